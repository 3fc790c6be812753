"""What is kept of a study's runs, read back: which are there, which no longer match the plan, what they measured."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sao.config import RunConfig, resolve
from sao.config_tree import ConfigError
from sao.observe.run_data import MetricRows, Series, increments, read_metrics
from sao.study.claims import FINAL, Claim, Measure
from sao.study.keep import FAILED, METRICS
from sao.study.plan import Plan, leaves
from sao.study.prepare import STARTED_FROM, parts_of

CLOCK = "time/clock"
LATER = 0.5
"""Means over training are of the steps after this share, when a run has settled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """One run that ended."""

    arm: str
    """Name of its arm."""
    seed: int
    """Pairs it with the other arms' runs."""
    metrics: MetricRows
    """Rows of its metrics."""
    environment: Mapping[str, Any]
    """What environment.json says: versions, machine, seconds."""
    steps: int
    """Planned training steps."""
    evaluated_every: int
    """Steps from one planned evaluation to the next."""
    may_collapse: bool = False
    """Whether its plan has a rule by which it may end early."""
    batch_size: int
    """Rollouts per step."""
    shared: tuple[str, ...] = ()
    """What its evaluation before the first step depends on; other arms have it too."""
    failure: str = ""
    """Why it failed; "" for a run that did not."""

    @property
    def start(self) -> Mapping[str, Any] | None:
        """Row of its evaluation before the first step. A run that was stopped during it may lack it."""
        return next((row for row in self.metrics.stage("eval") if row["step"] == 0), None)

    def starting_from(self, start: Mapping[str, Any] | None) -> "Result":
        """The same with an evaluation before the first step, where it lacks one: another arm's is that of one policy,
        on the same tasks, by the same draws."""
        if start is None or self.start is not None or not self.last_step:
            return self
        return replace(self, metrics=replace(self.metrics, rows=(dict(start), *self.metrics.rows)))

    @property
    def last_step(self) -> int:
        """Steps done."""
        return max((int(row["step"]) for row in self.metrics.stage("train")), default=0)

    @property
    def collapsed(self) -> bool:
        """Whether it ended before its steps were done, by the plan's rule."""
        return self.may_collapse and not self.failure and self.last_step < self.steps

    @property
    def lost_evaluations(self) -> list[int]:
        """Steps, up to its last, of planned evaluations that it does not have."""
        kept = set(self._series(FINAL.key)[0])
        return [int(step) for step in self._planned if step <= self.last_step and step not in kept]

    def curve(self) -> tuple[Series, Series]:
        """Steps and means of its evaluations; a run that collapsed goes on at its last value."""
        return self._to_the_end(*self._series(FINAL.key))

    def seconds_at(self, steps: Series) -> Series:
        """Seconds of the run's clock at training steps (N,), 0 at the start; after a collapse it goes on as before."""
        done, clock = self._series(CLOCK)
        if not len(done):
            return np.zeros_like(steps)
        pace = clock[-1] / done[-1]
        inside = np.interp(steps, np.append(0.0, done), np.append(0.0, clock))
        return np.where(steps > done[-1], steps * pace, inside)

    def measure(self, measure: Measure, *, end: float | None = None) -> float | None:
        """What the run was measured to be; None where it does not have the measure.

        `end` is the time of a run that never gets to where it is waited for; its own end by default.
        """
        steps, values = self._series(measure.key)
        if not len(values):
            return None
        match measure.of:
            case "last":
                return float(values[-1])
            case "area":
                if measure.evaluated and steps[0] > 0:
                    return None
                steps, values = self._to_the_end(steps, values)
                return float(np.trapezoid(values, steps) / (steps[-1] - steps[0])) if len(steps) > 1 else None
            case "mean":
                if measure.evaluated:
                    steps, values = self._to_the_end(steps, values)
                    steps, values = self._as_planned(steps, values)
                if (steps[-1] if measure.evaluated else self.last_step) < max(last for _, last in measure.steps):
                    return None
                inside = np.logical_or.reduce([(first <= steps) & (steps <= last) for first, last in measure.steps])
                return float(values[inside].mean()) if inside.any() else None
            case "seconds_to":
                assert measure.reach is not None
                return self._seconds_to(steps, values, measure.reach, end=self.end if end is None else end)

    @property
    def end(self) -> float:
        """Seconds of the run's clock after its planned steps."""
        return float(self.seconds_at(np.array([float(self.steps)]))[0])

    def reached(self, measure: Measure) -> bool:
        """Whether the run ever is at the value that the measure waits for."""
        assert measure.reach is not None
        return bool((self._series(measure.key)[1] >= measure.reach).any())

    def _series(self, key: str) -> tuple[Series, Series]:
        """Steps and values of the first stage that has the key. The clock goes on where a resume began it again."""
        found = (self.metrics.series(key, stage) for stage in ("eval", "train", "value_pretraining", "sft"))
        steps, values = next((series for series in found if len(series[0])), (np.zeros(0), np.zeros(0)))
        return steps, increments(values).cumsum() if key == CLOCK else values

    def _to_the_end(self, steps: Series, values: Series) -> tuple[Series, Series]:
        """Evaluations; a run that collapsed has those that it lacks, at its last value."""
        if len(steps) < 2 or not self.collapsed or steps[-1] >= self.steps:
            return steps, values
        later = self._planned[self._planned > steps[-1]]
        return np.append(steps, later), np.append(values, np.full(len(later), values[-1]))

    @property
    def _planned(self) -> Series:
        """Steps of its evaluations, its end among them."""
        return np.array([*range(0, self.steps, self.evaluated_every), self.steps], dtype=np.float64)

    def _as_planned(self, steps: Series, values: Series) -> tuple[Series, Series]:
        """Evaluations at the planned steps between the first and the last that there are."""
        planned = self._planned[(self._planned >= steps[0]) & (self._planned <= steps[-1])]
        return planned, np.interp(planned, steps, values)

    def _seconds_to(self, steps: Series, values: Series, reach: float, *, end: float) -> float:
        there = np.flatnonzero(values >= reach)
        if not len(there):
            return end
        at, before = there[0], max(there[0] - 1, 0)
        step = np.interp(reach, values[[before, at]], steps[[before, at]]) if at else steps[0]
        return float(self.seconds_at(np.atleast_1d(np.float64(step)))[0])

    def later_mean(self, *keys: str) -> float | None:
        """Mean over the later steps of the sum of keys; None where no step has them all."""
        _, *columns = self.metrics.aligned(*keys)
        late = [column[int(LATER * len(column)) :] for column in columns]
        return float(np.sum(late, axis=0).mean()) if len(late[0]) else None


def measured(runs: Sequence[Result], measure: Measure) -> list[float]:
    """A measure of those runs that have it."""
    return [value for run in runs if (value := run.measure(measure)) is not None]


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Where a run's results are kept."""
    return folder / arm / f"seed-{seed}"


def read_results(plan: Plan, folder: Path) -> dict[tuple[str, int], Result]:
    """Every run of the plan that ended, by arm and seed."""
    found: dict[tuple[str, int], Result] = {}
    starts: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for arm, seed in plan.runs():
        place = run_folder(folder, arm.name, seed)
        if place.is_dir():
            found[arm.name, seed] = result = _read(place, arm.name, seed)
            if result.start is not None and result.shared and not result.failure:
                starts.setdefault(result.shared, result.start)
    return {key: result.starting_from(starts.get(result.shared)) for key, result in found.items()}


def _read(place: Path, arm: str, seed: int) -> Result:
    config = resolve(place / "config.toml")
    failed, machine = place / FAILED, kept_environment(place)
    result = Result(
        arm=arm,
        seed=seed,
        metrics=read_metrics(place / METRICS, may_lack=failed.is_file()),
        environment=machine,
        steps=config.loop.steps,
        evaluated_every=config.evaluation.every_steps,
        may_collapse=config.evaluation.stop_below is not None,
        batch_size=config.loop.batch_size,
        shared=_shared(config, machine),
        failure=failed.read_text(encoding="utf-8").strip() if failed.is_file() else "",
    )
    if not result.failure and not result.may_collapse and result.last_step < result.steps:
        result = replace(result, failure=f"its tasks ended at step {result.last_step} of {result.steps}")
    return result


def _shared(config: RunConfig, environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a run that starts from a fine-tuned policy, which others may have; empty for others."""
    held = environment.get(STARTED_FROM, {})
    policies = [part.name + held.get(part.name, "") for part in parts_of(config) if part.command == "sft"]
    what = (config.evaluation, config.evaluation_tasks, config.tasks, config.environment, config.rollout)
    return (*policies, *map(repr, what)) if policies else ()


def kept_environment(place: Path) -> dict[str, Any]:
    """What environment.json of a run says; empty where it cannot be read."""
    try:
        return json.loads((place / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def mismatches(configs: Mapping[tuple[str, int], RunConfig], folder: Path) -> list[str]:
    """A line for each run that is kept and is not what the plan says now, key by key. Empty if all match."""
    lines: list[str] = []
    for (arm, seed), config in configs.items():
        place = run_folder(folder, arm, seed)
        if not place.is_dir():
            continue
        found = changed_settings(place / "config.toml", config)
        if found:
            lines.append(f"{arm}, seed {seed}: " + "; ".join(found))
    return lines


def require_match(configs: Mapping[tuple[str, int], RunConfig], folder: Path) -> None:
    """Raise ValueError where a kept run is not what the plan says now, or arms of a seed did not start alike."""
    lines = mismatches(configs, folder)
    if lines:
        raise ValueError(
            f"{len(lines)} runs in {folder} are not what the plan says now; nothing was run, mixed or deleted:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nPut the plan back, move these runs away, or name another folder by --folder"
        )
    for part, starts in starts_kept(configs, folder).items():
        if len(starts) > 1:
            groups = "\n".join(f"  {', '.join(runs)}" for runs in starts.values())
            raise ValueError(
                f"runs in {folder} that are to be compared in pairs did not start from the same {part}:\n{groups}\n"
                "One group was made on another machine or by other versions: move it away, to have it run again"
            )


def starts_kept(configs: Mapping[tuple[str, int], RunConfig], folder: Path) -> dict[str, dict[str, list[str]]]:
    """By name of a prepared part and hash of what it held: the kept runs that started from it."""
    found: dict[str, dict[str, list[str]]] = {}
    for arm, seed in configs:
        place = run_folder(folder, arm, seed)
        if not (place / FAILED).is_file():
            for part, digest in kept_environment(place).get(STARTED_FROM, {}).items():
                found.setdefault(part, {}).setdefault(digest, []).append(f"{arm} seed {seed}")
    return found


def changed_settings(stored: Path, config: RunConfig) -> list[str]:
    """A text for each setting of a stored configuration that is another one now."""
    try:
        before = leaves(dataclasses.asdict(resolve(stored)))
    except ConfigError as error:
        return [f"its configuration cannot be read: {error}"]
    now = leaves(dataclasses.asdict(config))
    keys = [*now, *(key for key in before if key not in now)]
    return [
        f"{key} was {_shown(before, key)}, is {_shown(now, key)}"
        for key in keys
        if before.get(key, math.nan) != now.get(key, math.nan)
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """How far a claim's pairs are."""

    claim: Claim
    """What is claimed."""
    differences: tuple[float, ...]
    """Better minus worse, one per seed whose two runs measured both."""
    lost: tuple[str, ...]
    """Why pairs will not come: a run failed, or did not measure it."""
    missing: int
    """Pairs that are still to be run."""


def pair(plan: Plan, claim: Claim, results: Mapping[tuple[str, int], Result]) -> Pairing:
    """The paired differences of a claim."""
    differences: list[float] = []
    lost: list[str] = []
    measure, missing = plan.measure(claim.measure), 0
    for seed in range(plan.pairs(claim)):
        runs = [run for arm in (claim.better, claim.worse) if (run := results.get((arm, seed))) is not None]
        if len(runs) < 2:
            missing += 1
            continue
        # In a pair a run that never gets there takes as long as the longer of both: that it ends sooner is no merit.
        end = max(run.end for run in runs)
        values: list[float] = []
        for run in runs:
            value = None if run.failure else run.measure(measure, end=end)
            if value is None:
                lost.append(f"{run.arm}, seed {seed} {'failed' if run.failure else f'has no {measure.name}'}")
            else:
                values.append(value)
        if len(values) == 2:
            differences.append(values[0] - values[1])
    return Pairing(claim=claim, differences=tuple(differences), lost=tuple(lost), missing=missing)
