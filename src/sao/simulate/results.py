"""What a plan gave: runs, kept line by line as they end, medians over seeds, speed-ups paired by seed."""

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sao import __version__
from sao.simulate.plan import Curve, Place, SimulationPlan
from sao.simulate.run import Measured, measure, simulate
from sao.simulate.settings import SimulationConfig

Runs = Mapping[SimulationConfig, Measured | str]
"""What each run gave, or why it failed."""


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
    """How many runs ended well."""
    values: Mapping[str, Spread]
    """By field of `Measured`."""
    speed_up: Spread | None
    """Tokens per second of the first schedule over this one's, paired by seed; None where no pair ended well."""


def run_once(config: SimulationConfig) -> Measured:
    """Simulate and measure."""
    return measure(simulate(config), warmup_steps=config.warmup_steps, concurrency=config.loop.concurrency)


def kept_runs(configs: Iterable[SimulationConfig], path: Path) -> dict[SimulationConfig, Measured]:
    """Those runs that ended well in a file of `run_all`, under the same settings and version."""
    rows: dict[str, dict[str, float]] = {}
    for line in _whole_lines(path).splitlines():
        row = json.loads(line)
        if set(row.get("measured", ())) == set(Measured.__slots__):
            rows[_line(row["version"], row["config"])] = row["measured"]
    known = {config: rows.get(_line(__version__, asdict(config))) for config in configs}
    return {config: Measured(**measured) for config, measured in known.items() if measured is not None}


def run_all(
    configs: Iterable[SimulationConfig], path: Path, *, jobs: int, progress: Callable[[], None]
) -> dict[SimulationConfig, Measured | str]:
    """Each run, on so many processes; each becomes a line of the file, and `progress` is called, as soon as it ends."""
    runs: dict[SimulationConfig, Measured | str] = {}
    pool = ProcessPoolExecutor(jobs)
    try:
        futures = {pool.submit(run_once, config): config for config in configs}
        if path.is_file():
            os.truncate(path, len(_whole_lines(path)))
        with path.open("a", encoding="utf-8") as file:
            for future in as_completed(futures):
                config, error = futures[future], future.exception()
                if error is None:
                    measured = runs[config] = future.result()
                    file.write(_line(__version__, asdict(config), measured=asdict(measured)) + "\n")
                else:
                    reason = runs[config] = f"{type(error).__name__}: {error}"
                    file.write(_line(__version__, asdict(config), failed=reason) + "\n")
                file.flush()
                progress()
    finally:
        pool.shutdown(cancel_futures=True)
    return runs


def _whole_lines(path: Path) -> bytes:
    """All but a line that a kill cut off."""
    data = path.read_bytes() if path.is_file() else b""
    return data[: data.rfind(b"\n") + 1]


def _line(version: str, config: Mapping[str, Any], **outcome: Any) -> str:
    return json.dumps({"version": version, "config": config, **outcome})


def cells(plan: SimulationPlan, curve: Curve, found: Iterable[Place], runs: Runs) -> list[Cell]:
    """The table of a curve, point by point; without those where no run ended well."""
    by_point: dict[tuple[float, str], dict[int, Measured]] = {}
    for place in found:
        outcome = runs[place.config]
        if place.curve == curve.name and isinstance(outcome, Measured):
            by_point.setdefault((place.x, place.arm), {})[place.config.seed] = outcome
    first = plan.arms_of(curve)[0].name
    return [_cell(x, arm, measured, by_point.get((x, first), {})) for (x, arm), measured in by_point.items()]


def _cell(x: float, arm: str, measured: Mapping[int, Measured], reference: Mapping[int, Measured]) -> Cell:
    values = {name: _spread([getattr(each, name) for each in measured.values()]) for name in Measured.__slots__}
    pairs = [(reference[seed], theirs) for seed, theirs in measured.items() if seed in reference]
    speed_ups = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs]
    speed_up = _spread(speed_ups) if speed_ups else None
    return Cell(x=x, arm=arm, seeds=len(measured), values=values, speed_up=speed_up)


def _spread(values: list[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))
