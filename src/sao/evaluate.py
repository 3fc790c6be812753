"""Repeated sampling of a set of tasks: mean@k, unbiased pass@k, and their intervals.

A rollout that failed by infrastructure says nothing about the policy: it is left out of every number, and counted.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from sao.clock import gather_or_cancel
from sao.envs.keyed import generator, key
from sao.observe.metrics import Metric, Metrics, last
from sao.rollout.protocol import RolloutWorker
from sao.types import FailureKind, Rollout, Task

OVERALL = "overall"
"""Row over all data sets."""
OVERALL_MEAN = f"eval/{OVERALL}/mean"
UNNAMED = "tasks"
"""Row of tasks that name no data set."""
SOLVED = 0.5
"""Reward from which a sample counts as solved in pass@k; rewards of right and wrong are 1 and 0."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How often, on how much, and with which statistics."""

    every_steps: int = 20
    """Training steps between two evaluations; the start and the end are evaluated too."""
    tasks: int = 0
    """Tasks of each data set, from its start; 0 for all. Endless sources need a number."""
    final_tasks: int = 0
    """As `tasks`, for the evaluations before the first step and after the last; 0 takes `tasks`."""
    stop_below: float | None = None
    """Mean over all data sets below which a run has collapsed: it ends there, after a last evaluation. none: it goes on
    whatever it scores."""
    stop_from_step: int = 0
    """First step whose evaluation may end the run by stop_below; an untrained policy may well lie below it."""
    stop_in_a_row: int = 1
    """Evaluations below stop_below, one after another, that end the run. 1 saves most; a policy may come back from
    one, which 2 allows for. A resume counts from 0."""
    samples: int = 1
    """Rollouts of each task. The paper takes 16 for contests and 4 for BeyondAIME."""
    pass_k: tuple[int, ...] = (1,)
    """For which k to estimate pass@k; each at most `samples`."""
    confidence: float = 0.95
    """Coverage of the intervals."""
    bootstrap_samples: int = 2000
    """Resamplings of the prompts; enough for two digits of a 95 % interval."""
    seed: int = 0
    """Keys the sampling and the bootstrap, so that two policies meet the same draws."""

    def __post_init__(self) -> None:
        lowest = {"every_steps": 1, "tasks": 0, "final_tasks": 0, "samples": 1, "bootstrap_samples": 100, "seed": 0}
        lowest |= {"stop_from_step": 0, "stop_in_a_row": 1}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ValueError(f"evaluation.{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"evaluation.confidence is {self.confidence}; it must lie in (0, 1), such as 0.95")
        if self.stop_below is not None and not math.isfinite(self.stop_below):
            raise ValueError(f"evaluation.stop_below is {self.stop_below}; give a finite mean reward, or none")
        bad = [k for k in self.pass_k if not 1 <= k <= self.samples]
        if bad:
            raise ValueError(
                f"evaluation.pass_k: pass@{bad[0]} needs 1 <= k <= samples, which is {self.samples}; raise samples"
            )

    def collapse_rule(self, before: Mapping[int, float] = MappingProxyType({})) -> Callable[[int, Metrics], bool]:
        """Says of each evaluation, by its step, whether the run is to end by stop_below.

        `before`: means by step of the evaluations that a resumed run had.
        """
        means = dict(before)

        def collapsed(step: int, metrics: Metrics) -> bool:
            mean = metrics.get(OVERALL_MEAN)
            if self.stop_below is None or mean is None or step < self.stop_from_step:
                return False
            means[step] = mean.value
            counted = [means[at] for at in sorted(means) if at >= self.stop_from_step]
            low = [value < self.stop_below for value in counted[-self.stop_in_a_row :]]
            return len(low) == self.stop_in_a_row and all(low)

        return collapsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One sample of one task."""

    task_id: str
    """Samples of one task share it; prompts are told apart by it."""
    data_set: str
    """Row that it counts in, besides the row over all."""
    sample: int
    """0 ... samples - 1."""
    reward: float | None
    """None when infrastructure failed."""
    failure_text: str = ""
    """What went wrong, for people; "" where it was measured."""
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    """The rollout's; empty when infrastructure failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The numbers of one data set. None where nothing was measured."""

    data_set: str
    """Name of the data set, or "overall"."""
    prompts: int
    """Tasks with at least one sample that did not fail."""
    failed: int
    """Samples lost to infrastructure."""
    mean: float | None
    """mean@k: over prompts, of the mean reward of their samples."""
    low: float | None
    """Lower end of the interval of `mean`: over prompts, which are the draws from the population of tasks."""
    high: float | None
    """Its upper end."""
    pass_at: tuple[tuple[int, float | None], ...]
    """(k, pass@k), over the prompts that have at least k samples."""
    marks: tuple[tuple[str, float], ...] = ()
    """(name, mean): over the prompts that have the mark, of its mean over their samples that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All samples, ordered by task and sample."""

    outcomes: tuple[Outcome, ...]
    """One per task and sample, failed ones included."""

    @property
    def failed_tasks(self) -> tuple[str, ...]:
        """Tasks that lost a sample to infrastructure, each once."""
        return tuple(dict.fromkeys(outcome.task_id for outcome in self.outcomes if outcome.reward is None))

    def rows(self, config: EvaluationConfig) -> tuple[Row, ...]:
        """A row per data set in order of appearance, then one over all."""
        names = dict.fromkeys(outcome.data_set for outcome in self.outcomes)
        parts = [(name, [outcome for outcome in self.outcomes if outcome.data_set == name]) for name in names]
        return tuple(_row(name, part, config) for name, part in [*parts, (OVERALL, list(self.outcomes))])

    def metrics(self, config: EvaluationConfig) -> dict[str, Metric]:
        """`eval/<data set>/{mean,low,high,pass_at_<k>,mark_<name>,prompts,failed}`; what was not measured has none."""
        metrics: dict[str, Metric] = {}
        for row in self.rows(config):
            values: dict[str, float | None] = {"mean": row.mean, "low": row.low, "high": row.high}
            values |= {f"pass_at_{k}": value for k, value in row.pass_at}
            values |= {f"mark_{name}": value for name, value in row.marks}
            values |= {"prompts": row.prompts, "failed": row.failed}
            for name, value in values.items():
                if value is not None:
                    metrics[f"eval/{row.data_set}/{name}"] = last(value)
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with an interval."""

    mean: float
    """The estimate itself, which need not lie in the middle."""
    low: float
    """Lower end at the confidence that was asked for."""
    high: float
    """Upper end at that confidence."""
    count: int
    """Independent observations behind it."""


async def evaluate(
    tasks: Sequence[Task],
    worker: RolloutWorker,
    *,
    samples: int,
    concurrency: int,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Play each task `samples` times, `concurrency` at once; draws depend on (seed, task id, sample) alone.

    `on_progress(done, total)` is called after each rollout. Raises ValueError for numbers below 1 and repeated ids.
    """
    if samples < 1 or concurrency < 1:
        raise ValueError(f"samples is {samples} and concurrency {concurrency}; both must be at least 1")
    if len({task.id for task in tasks}) < len(tasks):
        raise ValueError("two tasks of an evaluation have the same id; ids key the randomness, so make them differ")
    # All first samples come before the second ones, so that stopping early leaves every task covered.
    places = [(index, sample) for sample in range(samples) for index in range(len(tasks))]
    outcomes: dict[tuple[int, int], Outcome] = {}
    queue = iter(places)

    async def play() -> None:
        for place in queue:
            task, sample = tasks[place[0]], place[1]
            draws = key(seed, "evaluation", task.id, sample)
            rollout = await worker.run(task, group_id=task.id, attempt=sample, seed=draws)
            outcomes[place] = _outcome(task, sample, rollout)
            if on_progress is not None:
                on_progress(len(outcomes), len(places))

    await gather_or_cancel(*(play() for _ in range(min(concurrency, len(places)))))
    return Evaluation(outcomes=tuple(outcomes[place] for place in sorted(outcomes)))


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Probability that k of the samples, drawn without return, hold a solved one: 1 - C(n-c, k) / C(n, k).

    Unbiased (Chen et al. 2021, section 2.1). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_solved <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_solved} solved in {num_samples} samples is not defined")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def wilson_interval(num_solved: int, count: int, confidence: float) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927). Unlike the normal one it stays within [0, 1] and is not empty at 0."""
    if not 0 <= num_solved <= count or count < 1:
        raise ValueError(f"{num_solved} of {count} is not a share")
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    share = num_solved / count
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count * count))) / (1 + z2 / count)
    # At 0 and 1 rounding would leave an end a hair inside.
    return (0.0 if num_solved == 0 else centre - half), (1.0 if num_solved == count else centre + half)


def bootstrap_interval(
    values: Sequence[float], confidence: float, *, resamplings: int, seed: int
) -> tuple[float, float]:
    """Percentile interval of the mean of `values` (N,), resampled with return. Raises ValueError for no values."""
    if not values:
        raise ValueError("there are no values to resample")
    array = np.asarray(values, dtype=np.float64)
    draws = generator(seed, "bootstrap", len(array))
    means: NDArray[np.float64] = np.empty(resamplings)
    chunk = max(1, 2_000_000 // len(array))
    for start in range(0, resamplings, chunk):
        size = (min(chunk, resamplings - start), len(array))
        means[start : start + chunk] = array[draws.integers(0, len(array), size)].mean(axis=1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def paired_t_interval(differences: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of paired differences, one per seed. Raises ValueError for fewer than two."""
    count = len(differences)
    if count < 2:
        raise ValueError(f"a t interval needs at least two seeds, not {count}")
    if not all(math.isfinite(difference) for difference in differences):
        raise ValueError(f"differences {list(differences)} are not all finite")
    array = np.asarray(differences, dtype=np.float64)
    half = float(stdtrit(count - 1, 0.5 + confidence / 2)) * float(array.std(ddof=1)) / math.sqrt(count)
    mean = float(array.mean())
    return Interval(mean=mean, low=mean - half, high=mean + half, count=count)


def _outcome(task: Task, sample: int, rollout: Rollout) -> Outcome:
    lost = rollout.failure is FailureKind.INFRASTRUCTURE
    return Outcome(
        task_id=task.id,
        data_set=task.data_set or UNNAMED,
        sample=sample,
        reward=None if lost else rollout.reward,
        failure_text=rollout.failure_text,
        marks={} if lost else rollout.marks,
    )


def _by_task(outcomes: Iterable[Outcome], read: Callable[[Outcome], float | None]) -> dict[str, list[float]]:
    """Numbers read from outcomes, by task; a task without any is absent."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        number = read(outcome)
        if number is not None:
            found.setdefault(outcome.task_id, []).append(number)
    return found


def _means(by_task: dict[str, list[float]]) -> dict[str, float]:
    return {task: sum(numbers) / len(numbers) for task, numbers in by_task.items()}


def _mark_mean(name: str, outcomes: Iterable[Outcome]) -> float:
    means = _means(_by_task(outcomes, lambda outcome: outcome.marks.get(name)))
    return sum(means.values()) / len(means)


def _row(name: str, outcomes: list[Outcome], config: EvaluationConfig) -> Row:
    rewards = _by_task(outcomes, lambda outcome: outcome.reward)
    means = list(_means(rewards).values())
    low, high = _interval(list(rewards.values()), means, config) if means else (None, None)
    solved = [(len(of_task), sum(reward >= SOLVED for reward in of_task)) for of_task in rewards.values()]
    passes: list[tuple[int, float | None]] = []
    for k in config.pass_k:
        estimates = [pass_at_k(count, right, k) for count, right in solved if count >= k]
        passes.append((k, sum(estimates) / len(estimates) if estimates else None))
    marks = dict.fromkeys(mark for outcome in outcomes for mark in outcome.marks)
    return Row(
        data_set=name,
        prompts=len(means),
        failed=sum(outcome.reward is None for outcome in outcomes),
        mean=sum(means) / len(means) if means else None,
        low=low,
        high=high,
        pass_at=tuple(passes),
        marks=tuple((mark, _mark_mean(mark, outcomes)) for mark in marks),
    )


def _interval(rewards: list[list[float]], means: list[float], config: EvaluationConfig) -> tuple[float, float]:
    """Wilson where every prompt gave one verdict, right or wrong; else a bootstrap over prompts."""
    if all(len(of_task) == 1 and of_task[0] in (0.0, 1.0) for of_task in rewards):
        return wilson_interval(round(sum(means)), len(means), config.confidence)
    return bootstrap_interval(means, config.confidence, resamplings=config.bootstrap_samples, seed=config.seed)
