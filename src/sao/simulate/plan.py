"""A plan: which schedules are simulated, along which curves.

seeds = 3                          set = ["turns.mean=6"]        for all runs
[[arms]]    name, set              a schedule; the first is what the others are compared with
[[curves]]  name, label, points    points = [{x = 0.4, set = ["turns.spread=0.4"]}]; arms, seeds of this curve alone

defaults < the plan's set < the point's < the arm's < --set
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sao.config_tree import ConfigError, read_checked
from sao.simulate.settings import SimulationConfig, config_of


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One way to order the same work."""

    name: str
    """Stands in tables and legends."""
    set: tuple[str, ...] = ()
    """Overrides `key=value`."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place on a curve."""

    x: float
    """Where it stands on the axis."""
    set: tuple[str, ...] = ()
    """Overrides `key=value`."""
    seeds: int = 0
    """Seeds 0, 1, ... here; 0 takes the curve's."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One thing varied."""

    name: str
    """Names the figure."""
    label: str
    """Of the axis."""
    points: tuple[Point, ...]
    """In the order of the table."""
    arms: tuple[str, ...] = ()
    """Schedules on it; all by default."""
    seeds: int = 0
    """Seeds 0, 1, ... of its points; 0 takes the plan's."""
    logarithmic: bool = False
    """Whether the axis is."""


@dataclass(frozen=True, kw_only=True)
class SimulationPlan:
    """Everything that is simulated."""

    arms: tuple[Schedule, ...]
    """Schedules."""
    curves: tuple[Curve, ...]
    """What is varied."""
    seeds: int = 3
    """Seeds 0, 1, ... of each point."""
    set: tuple[str, ...] = ()
    """Overrides for all."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds is {self.seeds}; it must be at least 1")
        names = [arm.name for arm in self.arms]
        for what, listed in (("arms", names), ("curves", [curve.name for curve in self.curves])):
            if not listed:
                raise ValueError(f"{what} is empty; name at least one")
            twice = [name for name in listed if listed.count(name) > 1]
            if twice:
                raise ValueError(f"two {what} are called {twice[0]!r}; names must differ")
        for curve in self.curves:
            if not curve.name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"curves.name is {curve.name!r}; it names a file: use letters, digits, dashes")
            if not curve.points:
                raise ValueError(f"curve {curve.name!r} has no points")
            x = [point.x for point in curve.points]
            if len(set(x)) < len(x):
                raise ValueError(f"curve {curve.name!r} has two points at x = {max(x, key=x.count):g}; x must differ")
            for name in curve.arms:
                if name not in names:
                    raise ValueError(f"curve {curve.name!r} names the arm {name!r}; known: {', '.join(names)}")

    def arms_of(self, curve: Curve) -> list[Schedule]:
        """Schedules on a curve, the one compared with first."""
        return [arm for arm in self.arms if not curve.arms or arm.name in curve.arms]

    def seeds_of(self, curve: Curve, point: Point) -> int:
        """How many seeds a point has."""
        return point.seeds or curve.seeds or self.seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One run: where it stands in the plan."""

    curve: str
    """Name of the curve."""
    x: float
    """Of the point."""
    arm: str
    """Name of the schedule."""
    config: SimulationConfig
    """What is run; places may share it."""


def read_plan(path: Path) -> SimulationPlan:
    """Read and check a plan. Raises ConfigError; what is wrong with its settings shows in `places`."""
    return read_checked(SimulationPlan, path)


def places(plan: SimulationPlan, overrides: Sequence[str] = ()) -> Iterator[Place]:
    """Every run of the plan, seed by seed. Raises ConfigError naming the place of settings that cannot be."""
    for curve in plan.curves:
        for point in curve.points:
            for arm in plan.arms_of(curve):
                try:
                    config = config_of([*plan.set, *point.set, *arm.set, *overrides])
                except ConfigError as error:
                    raise ConfigError(f"curve {curve.name!r}, x = {point.x:g}, arm {arm.name!r}: {error}") from error
                for seed in range(plan.seeds_of(curve, point)):
                    yield Place(
                        curve=curve.name, x=point.x, arm=arm.name, config=replace(config, seed=config.seed + seed)
                    )
