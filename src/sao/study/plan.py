"""A plan: which arms are compared over which seeds, and what is claimed of them, all of it written before.

name = "core"                      seeds = 8                    question = "..."
base = "chain.toml"                the configuration below all arms, relative to the plan
set = ["clock=virtual"]            for all arms: base < recipe < set < the arm's own set
[[arms]]     name, recipe, set, seeds          [[claims]]  id, text, better, worse, measure, kind, margin, paper
[[measures]] name, text, of, key, steps, reach [[curves]]  id, text, x, measures, [[curves.lines]] label, arms
[collapse]   below, from_step, in_a_row        [[over_steps]] id, text, keys, arms
[[against]]  arm, measure, arms
"""

import copy
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sao.config import RunConfig, from_tree, recipe_tree
from sao.config_tree import ConfigError, did_you_mean, merged, read_checked, read_tree
from sao.study.claims import AREA, FINAL, Against, Claim, Curve, Measure, OverSteps

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_OWN = {"recipe": "an arm has it as `recipe`", "seed": "`seeds` says how many", "name": "the arm's name is taken"}
"""Settings that a plan makes itself, and where it says them."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One system of a comparison."""

    name: str
    """Names the arm in claims and tables, and its folder of results."""
    recipe: str = ""
    """Recipe above the base; empty takes the base as it is."""
    set: tuple[str, ...] = ()
    """Overrides "section.key=value" above all else."""
    seeds: int = 0
    """Seeds 0, 1, ... of this arm; 0 takes the plan's."""


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """When a run is given up."""

    below: float
    """Mean of an evaluation below which a run has collapsed."""
    from_step: int = 0
    """First step whose evaluation counts."""
    in_a_row: int = 1
    """Evaluations below it, one after another, that make a collapse."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole study."""

    name: str
    """Names the study and its folder of results."""
    question: str = ""
    """What it is to answer."""
    base: str = "config.toml"
    """Configuration below all arms, relative to the plan."""
    seeds: int = 5
    """Seeds 0, 1, ... of every arm that does not say its own number; fixed before the first run."""
    set: tuple[str, ...] = ()
    """Overrides for all arms."""
    arms: tuple[Arm, ...]
    """What is compared, in the order of the tables."""
    claims: tuple[Claim, ...] = ()
    """Corrected together, by Holm."""
    measures: tuple[Measure, ...] = ()
    """Of claims and curves, besides final, area and the metrics' keys; columns of the table of arms."""
    against: tuple[Against, ...] = ()
    """Tables of differences from one arm; they decide nothing."""
    curves: tuple[Curve, ...] = ()
    """Figures over a setting; they decide nothing."""
    over_steps: tuple[OverSteps, ...] = ()
    """Figures over the training steps; they decide nothing."""
    collapse: Collapse | None = None
    """Rule by which a run ends early; none lets every run go to its end."""

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        ids = [figure.id for figure in (*self.curves, *self.over_steps)]
        named = [
            ("name", self.name),
            *(("arms.name", name) for name in names),
            *(("a figure's id", name) for name in ids),
        ]
        for what, name in named:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{what} is {name!r}; it names a folder: use letters, digits, dashes, dots not first")
        measures = [measure.name for measure in (FINAL, AREA, *self.measures)]
        claims = [claim.id for claim in self.claims]
        for what, listed in (("arms", names), ("claims", claims), ("measures", measures), ("figures", ids)):
            twice = [name for name in listed if listed.count(name) > 1]
            if twice:
                raise ValueError(f"two {what} are called {twice[0]!r}; names must differ")
        if not self.arms:
            raise ValueError("arms is empty; a study compares at least one arm")
        for arm in self.arms:
            if self.seeds_of(arm.name) < 2:
                raise ValueError(f"arm {arm.name!r} has {self.seeds_of(arm.name)} seed; an interval needs at least 2")
        for override in (*self.set, *(override for arm in self.arms for override in arm.set)):
            key = override.partition("=")[0].strip()
            if key in _OWN:
                raise ValueError(f"{override!r} cannot be set: {_OWN[key]}")
        for claim in self.claims:
            self._check_claim(claim)
        for curve in self.curves:
            for arm in (arm for line in curve.lines for arm in line.arms):
                require_arm(self, arm, f"curve {curve.id!r}")
            for name in curve.measures:
                self.measure(name)
        for figure in self.over_steps:
            for arm in figure.arms:
                require_arm(self, arm, f"figure {figure.id!r}")
        for table in self.against:
            for arm in (table.arm, *table.arms):
                require_arm(self, arm, "against")
            self.measure(table.measure)

    def _check_claim(self, claim: Claim) -> None:
        for name in (claim.better, claim.worse):
            require_arm(self, name, f"claim {claim.id!r}")
        if claim.better == claim.worse:
            raise ValueError(f"claim {claim.id!r} compares {claim.better!r} with itself")
        self.measure(claim.measure)
        if claim.kind == "equivalent" and not claim.margin > 0:
            raise ValueError(f"claim {claim.id!r} says equivalent with margin {claim.margin:g}; it must be above 0")

    def measure(self, name: str) -> Measure:
        """The measure of a name: the plan's, final, area, or a metric's last value. Raises ValueError for others."""
        known = {measure.name: measure for measure in (FINAL, AREA, *self.measures)}
        if name in known:
            return known[name]
        if "/" not in name:
            raise ValueError(
                f"measure {name!r} is neither the plan's nor the key of a metric; {did_you_mean(name, known)}"
            )
        return Measure(name=name, text=f"last `{name}`", key=name)

    def arm(self, name: str) -> Arm:
        """The arm of a name that is known."""
        return next(arm for arm in self.arms if arm.name == name)

    def seeds_of(self, name: str) -> int:
        """How many seeds an arm has."""
        return self.arm(name).seeds or self.seeds

    def pairs(self, claim: Claim) -> int:
        """How many pairs a claim is decided by."""
        return min(self.seeds_of(claim.better), self.seeds_of(claim.worse))

    def runs(self) -> list[tuple[Arm, int]]:
        """(arm, seed) seed by seed over all arms, so that what is there after any time is balanced."""
        most = max(self.seeds_of(arm.name) for arm in self.arms)
        return [(arm, seed) for seed in range(most) for arm in self.arms if seed < self.seeds_of(arm.name)]


def require_arm(plan: Plan, name: str, where: str) -> None:
    """Raise ValueError with the nearest name where the plan has no such arm."""
    names = [arm.name for arm in plan.arms]
    if name not in names:
        raise ValueError(f"{where} names the arm {name!r}, which the plan does not have; {did_you_mean(name, names)}")


def read_plan(path: Path) -> Plan:
    """Read and check a plan. Raises ConfigError; what is wrong with an arm's settings shows in `arm_configs`."""
    return read_checked(Plan, path)


def arm_configs(plan: Plan, path: Path) -> dict[tuple[str, int], RunConfig]:
    """The configuration of each (arm, seed), for a plan that was read from `path`. Raises ConfigError."""
    base = read_tree(path.parent / plan.base)
    configs = {(arm.name, seed): _config_of(plan, base, arm, seed) for arm, seed in plan.runs()}
    longest = max(config.loop.steps for config in configs.values())
    for measure in plan.measures:
        beyond = [window for window in measure.steps if window[1] > longest]
        if beyond:
            raise ConfigError(f"measure {measure.name!r} has the window {list(beyond[0])}; runs have {longest} steps")
    for curve in plan.curves:
        for arm in (arm for line in curve.lines for arm in line.arms):
            setting(configs[arm, 0], curve.x)
    return configs


def setting(config: RunConfig, key: str) -> Any:
    """The value of section.key; None in a section that the run does not have. Raises ConfigError."""
    values = leaves(dataclasses.asdict(config))
    if key in values:
        return values[key]
    if any(values.get(above, "") is None for above in accumulate(key.split("."), "{}.{}".format)):
        return None
    raise ConfigError(f"{key!r} is no setting; {did_you_mean(key, values)}")


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of nested tables and lists of tables, by its key."""
    if isinstance(value, dict):
        items: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        items = list(enumerate(value))
    else:
        return {prefix: tuple(value) if isinstance(value, list) else value}
    return {key: leaf for name, inner in items for key, leaf in leaves(inner, f"{prefix}.{name}".strip(".")).items()}


def _config_of(plan: Plan, base: dict[str, Any], arm: Arm, seed: int) -> RunConfig:
    try:
        tree = copy.deepcopy(base)
        if arm.recipe:
            tree = merged(tree, recipe_tree(arm.recipe)) | {"recipe": arm.recipe}
        return from_tree(tree, [*plan.set, *_rule(plan), *arm.set, _name(plan, arm), f"seed={seed}"])
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name!r}: {error}") from error


def _rule(plan: Plan) -> Sequence[str]:
    if plan.collapse is None:
        return ()
    return (
        f"evaluation.stop_below={plan.collapse.below}",
        f"evaluation.stop_from_step={plan.collapse.from_step}",
        f"evaluation.stop_in_a_row={plan.collapse.in_a_row}",
    )


def _name(plan: Plan, arm: Arm) -> str:
    return f'name="{plan.name}-{arm.name}"'
