"""What a plan gave: runs, medians over seeds, speed-ups paired by seed."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from sao.simulate.plan import Curve, Place, SimulationPlan
from sao.simulate.run import Measured, measure, simulate
from sao.simulate.settings import SimulationConfig

Runs = Mapping[SimulationConfig, Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one number over seeds. The range covers the median of all seeds with probability 1 - 2^(1 - seeds)."""

    median: float
    """Over seeds."""
    low: float
    """Least."""
    high: float
    """Greatest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One schedule at one point."""

    x: float
    """Of the point."""
    arm: str
    """Name of the schedule."""
    seeds: int
    """How many runs."""
    values: Mapping[str, Spread]
    """By field of `Measured`."""
    speed_up: Spread
    """Tokens per second of the first schedule over this one's, paired by seed."""


def run_once(config: SimulationConfig) -> Measured:
    """Simulate and measure."""
    return measure(simulate(config), warmup_steps=config.warmup_steps, concurrency=config.concurrency)


def run_all(found: Iterable[Place], *, jobs: int, progress: Callable[[], None]) -> Runs:
    """Each distinct run once, on so many processes; `progress` is called after each."""
    configs = list(dict.fromkeys(place.config for place in found))
    runs: dict[SimulationConfig, Measured] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for config, measured in zip(configs, pool.map(run_once, configs), strict=True):
            runs[config] = measured
            progress()
    return runs


def cells(plan: SimulationPlan, curve: Curve, found: Iterable[Place], runs: Runs) -> list[Cell]:
    """The table of a curve, point by point."""
    by_point: dict[tuple[float, str], list[Measured]] = {}
    for place in found:
        if place.curve == curve.name:
            by_point.setdefault((place.x, place.arm), []).append(runs[place.config])
    first = plan.arms_of(curve)[0].name
    return [_cell(x, arm, measured, by_point[x, first]) for (x, arm), measured in by_point.items()]


def _cell(x: float, arm: str, measured: list[Measured], reference: list[Measured]) -> Cell:
    values = {name: _spread([getattr(each, name) for each in measured]) for name in Measured.__slots__}
    pairs = zip(reference, measured, strict=True)
    speed_up = _spread([ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs])
    return Cell(x=x, arm=arm, seeds=len(measured), values=values, speed_up=speed_up)


def _spread(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))
