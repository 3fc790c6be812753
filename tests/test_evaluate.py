"""Evaluation: numbers worked by hand, and what happens to samples that failed."""

import asyncio
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sao.clock import VirtualClock, run_virtual
from sao.evaluate import (
    Evaluation,
    EvaluationConfig,
    Outcome,
    bootstrap_interval,
    evaluate,
    paired_t_interval,
    pass_at_k,
    wilson_interval,
)
from sao.types import OBSERVED, FailureKind, Rollout, Sequence, StopReason, Task


def task(name: str, data_set: str = "") -> Task:
    return Task(id=name, prompt_id=name, question="", answer="", data_set=data_set)


def rollout(of: Task, attempt: int, reward: float, failure: FailureKind = FailureKind.NONE) -> Rollout:
    sequence = Sequence(
        token_ids=np.array([1, 2], np.int32),
        action_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
        policy_versions=np.array([OBSERVED, 0], np.int32),
        rewards=np.array([0, reward], np.float32),
        turns=np.zeros(2, np.int32),
    )
    return Rollout(
        id=f"{of.id}@{attempt}", task_id=of.id, prompt_id=of.prompt_id, group_id=of.id, attempt=attempt,
        sequences=(sequence,), stop_reason=StopReason.FINISHED, failure=failure,
    )  # fmt: skip


class TableWorker:
    """Gives the rewards of a table, by task and sample; -1 is an infrastructure failure. Later tasks are faster."""

    def __init__(self, rewards: dict[str, list[float]]) -> None:
        self.rewards = rewards
        self.clock = VirtualClock()
        self.running = self.most = 0
        self.seeds: dict[tuple[str, int], int] = {}

    async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
        assert group_id == task.id
        self.seeds[task.id, attempt] = seed
        self.running += 1
        self.most = max(self.most, self.running)
        await self.clock.sleep(1.0 / (1 + len(self.seeds)))
        self.running -= 1
        reward = self.rewards[task.id][attempt]
        failure = FailureKind.INFRASTRUCTURE if reward < 0 else FailureKind.POLICY if reward == 0 else FailureKind.NONE
        return rollout(task, attempt, reward, failure)

    async def stop(self) -> None:
        pass


def outcomes(rewards: dict[str, list[float | None]], data_set: str = "tasks") -> Evaluation:
    return Evaluation(
        outcomes=tuple(
            Outcome(task_id=name, data_set=data_set, sample=sample, reward=reward)
            for name, row in rewards.items()
            for sample, reward in enumerate(row)
        )
    )


def test_means_intervals_and_failures_by_hand() -> None:
    """Catches failures counted as wrong, samples averaged over the pool instead of by prompt, and lost data sets."""
    worker = TableWorker({"a": [1, 0, 1, 1], "b": [0, 0, 0, 0], "c": [1, -1, -1, 1], "d": [-1, -1, -1, -1]})
    tasks = [task("a", "x"), task("b", "x"), task("c", "y"), task("d", "y")]
    progress: list[tuple[int, int]] = []
    done = run_virtual(
        evaluate(
            tasks, worker, samples=4, concurrency=3, seed=7,
            on_progress=lambda *counts: progress.append(counts),
        )
    )  # fmt: skip
    assert progress == [(n, 16) for n in range(1, 17)]
    assert worker.most == 3
    assert [(one.task_id, one.sample) for one in done.outcomes] == list(itertools.product("abcd", range(4)))
    assert done.failed_tasks == ("c", "d")
    config = EvaluationConfig(samples=4, pass_k=(1, 2, 4))
    x, y, overall = done.rows(config)
    assert (x.data_set, x.prompts, x.failed, x.mean) == ("x", 2, 0, 0.375)
    assert (y.data_set, y.prompts, y.failed, y.mean) == ("y", 1, 6, 1.0)
    assert (overall.data_set, overall.prompts, overall.failed) == ("overall", 3, 6)
    assert overall.mean == pytest.approx((0.75 + 0 + 1) / 3)
    # a: 3 of 4 solved. pass@2 = 1 - C(1,2)/C(4,2) = 1; b: 0.
    assert x.pass_at == ((1, 0.375), (2, 0.5), (4, 0.5))
    # c has 2 samples left, both solved; nothing has 4.
    assert y.pass_at == ((1, 1.0), (2, 1.0), (4, None))
    assert x.low is not None
    assert x.high is not None
    assert (x.low, x.high) == (0.0, 0.75)  # of two prompts, a resample of one alone is more likely than 2.5 %
    metrics = done.metrics(config)
    assert metrics["eval/x/mean"].value == 0.375
    assert metrics["eval/y/failed"].value == 6
    assert metrics["eval/x/pass_at_2"].value == 0.5
    assert "eval/y/pass_at_4" not in metrics
    assert all(math.isfinite(metric.value) for metric in metrics.values())


def test_marks_are_means_over_the_prompts_that_have_them() -> None:
    """Catches marks averaged over the pool of samples, of failed samples too, or as 0 where a sample has none.

    a has style 0.5 and 1, b 0.25 alone, c (of y) was lost: (0.75 + 0.25) / 2.
    """
    table: dict[str, list[dict[str, float]]] = {"a": [{"style": 0.5}, {"style": 1.0}], "b": [{}, {"style": 0.25}]}

    class Marking(TableWorker):
        async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
            played = await super().run(task, group_id=group_id, attempt=attempt, seed=seed)
            return replace(played, marks=table.get(task.id, [{"style": 9.0}] * 2)[attempt])

    worker = Marking({"a": [1, 1], "b": [0, 1], "c": [-1, -1]})
    tasks = [task("a", "x"), task("b", "x"), task("c", "y")]
    done = run_virtual(evaluate(tasks, worker, samples=2, concurrency=1, seed=0))
    metrics = done.metrics(EvaluationConfig(samples=2))
    found = {key: metric.value for key, metric in metrics.items() if "mark" in key}
    assert found == {"eval/x/mark_style": 0.5, "eval/overall/mark_style": 0.5}


def test_nothing_measured_gives_counts_and_no_numbers() -> None:
    """Catches 0/0, or a mean of 0 for an evaluation whose engine was down."""
    row, _ = outcomes({"a": [None], "b": [None]}).rows(EvaluationConfig())
    assert (row.prompts, row.failed, row.mean, row.low, row.high, row.pass_at) == (0, 2, None, None, None, ((1, None),))
    metrics = outcomes({"a": [None]}).metrics(EvaluationConfig())
    assert set(metrics) == {"eval/tasks/prompts", "eval/tasks/failed", "eval/overall/prompts", "eval/overall/failed"}
    assert asyncio.run(evaluate([], TableWorker({}), samples=1, concurrency=4, seed=0)).outcomes == ()


def test_draws_depend_on_seed_task_and_sample_alone() -> None:
    """Catches randomness keyed by order: the same task in another set, or beside others, must sample alike."""
    rewards = {"a": [1.0, 0.0], "b": [1.0, 0.0], "c": [1.0, 0.0]}
    first, second = TableWorker(rewards), TableWorker(rewards)
    run_virtual(evaluate([task("a"), task("b"), task("c")], first, samples=2, concurrency=1, seed=3))
    run_virtual(evaluate([task("c"), task("a")], second, samples=2, concurrency=5, seed=3))
    assert all(first.seeds[place] == seed for place, seed in second.seeds.items())
    assert len(set(first.seeds.values())) == 6
    third = TableWorker(rewards)
    run_virtual(evaluate([task("a")], third, samples=2, concurrency=1, seed=4))
    assert not set(third.seeds.values()) & set(first.seeds.values())


def test_a_worker_that_raises_ends_the_evaluation() -> None:
    """Catches an evaluation that goes on with a broken worker, or leaves rollouts running behind it."""
    worker = TableWorker({"a": [1.0]})  # no row for b
    with pytest.raises(KeyError):
        run_virtual(evaluate([task("a"), task("b")], worker, samples=1, concurrency=2, seed=0))


def test_misuse_is_refused() -> None:
    """Catches zero samples read as an empty success, and ids whose draws would be copies of each other."""
    with pytest.raises(ValueError, match="samples is 0"):
        asyncio.run(evaluate([task("a")], TableWorker({}), samples=0, concurrency=1, seed=0))
    with pytest.raises(ValueError, match="same id"):
        asyncio.run(evaluate([task("a"), task("a")], TableWorker({}), samples=1, concurrency=1, seed=0))
    with pytest.raises(ValueError, match="pass@4 needs"):
        EvaluationConfig(samples=2, pass_k=(1, 4))
    with pytest.raises(ValueError, match="confidence is 95"):
        EvaluationConfig(confidence=95)
    read = TypeAdapter(EvaluationConfig).validate_python({"samples": 4, "pass_k": [1, 4]})
    assert read == EvaluationConfig(samples=4, pass_k=(1, 4))


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(counts: tuple[int, int, int]) -> None:
    """Catches the biased 1 - (1 - c/n)^k, and factorials off by one."""
    n, c, k = counts
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_pass_at_k_needs_k_samples() -> None:
    """Catches pass@16 reported from 4 samples."""
    with pytest.raises(ValueError, match="pass@5 of 1 solved in 4"):
        pass_at_k(4, 1, 5)


def test_wilson_interval_by_hand() -> None:
    """Catches a wrong centre: for 8 of 10 at 95 % the interval is (0.490, 0.943) (Wilson 1927)."""
    assert wilson_interval(8, 10, 0.95) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    low, high = wilson_interval(0, 10, 0.95)
    assert low == 0.0
    assert high == pytest.approx(3.8414588 / 13.8414588)  # z^2 / (n + z^2)
    assert wilson_interval(10, 10, 0.95) == pytest.approx((1 - high, 1.0))
    with pytest.raises(ValueError, match="11 of 10"):
        wilson_interval(11, 10, 0.95)


def test_which_interval_is_used() -> None:
    """Catches Wilson applied to means of several samples, whose spread is not that of one coin."""
    config = EvaluationConfig()
    row, _ = outcomes({"a": [1.0], "b": [0.0], "c": [1.0]}).rows(config)
    assert (row.low, row.high) == wilson_interval(2, 3, 0.95)
    graded, _ = outcomes({"a": [0.5], "b": [0.25]}).rows(config)
    assert (graded.low, graded.high) == (0.25, 0.5)
    several, _ = outcomes({"a": [1.0, 0.0], "b": [1.0, 0.0]}).rows(EvaluationConfig(samples=2))
    assert (several.low, several.high) == (0.5, 0.5)


def test_bootstrap_is_seeded_and_has_the_width_of_the_standard_error() -> None:
    """Catches a bootstrap over samples instead of prompts, or one that differs between two reports of a run."""
    values = [float(n % 4 == 0) for n in range(400)]
    low, high = bootstrap_interval(values, 0.95, resamplings=4000, seed=1)
    assert (low, high) == bootstrap_interval(values, 0.95, resamplings=4000, seed=1)
    assert (low, high) != bootstrap_interval(values, 0.95, resamplings=4000, seed=2)
    half = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert (low, high) == pytest.approx((0.25 - half, 0.25 + half), abs=0.006)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_interval([], 0.95, resamplings=100, seed=0)


def test_t_interval_over_seeds_by_hand() -> None:
    """Catches the normal quantile, or the biased deviation: mean 23, s = sqrt(2.5), t(4, 0.975) = 2.776445."""
    interval = paired_t_interval([21, 22, 23, 24, 25])
    half = 2.776445105 * math.sqrt(2.5) / math.sqrt(5)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((23, 23 - half, 23 + half))
    with pytest.raises(ValueError, match="at least two seeds"):
        paired_t_interval([1.0])
    with pytest.raises(ValueError, match="not all finite"):
        paired_t_interval([1.0, float("nan")])
