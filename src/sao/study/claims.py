"""What a plan asks of its runs: measures, claims about two arms, figures over a setting and over the steps."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["greater", "less", "equivalent"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that a run is judged by."""

    name: str
    """Names it in claims, curves and tables."""
    text: str = ""
    """What it is, in a few words; "" shows its name."""
    of: Literal["last", "area", "mean", "seconds_to"] = "last"
    """What is taken of the metric. last: its last value. area: mean height of its curve over the planned steps, where a
    run that collapsed goes on at its last value. mean: mean of the rows whose step lies within `steps`; of evaluations
    those that were planned, a lost one on the straight line between its neighbours, and after a collapse as for area.
    seconds_to: seconds of the run's clock until it first is at `reach`, by straight lines between rows."""
    key: str = "eval/overall/mean"
    """Key of the metric."""
    steps: tuple[tuple[int, int], ...] = ()
    """First and last step, both included, of each window of a mean."""
    reach: float | None = None
    """Value that `seconds_to` waits for; a run that never is there counts with the end of its planned steps, in a pair
    with the later of both ends."""

    def __post_init__(self) -> None:
        if (self.of == "mean") != bool(self.steps):
            raise ValueError(
                f"measure {self.name!r} is of {self.of!r} with {len(self.steps)} windows of steps; a mean needs some, "
                "as in steps = [[121, 240]], and nothing else has any"
            )
        if (self.of == "seconds_to") != (self.reach is not None):
            raise ValueError(
                f"measure {self.name!r} is of {self.of!r} with reach = {self.reach}; seconds_to needs a value to "
                "reach, and nothing else has one"
            )
        for first, last in self.steps:
            if not 0 <= first <= last:
                raise ValueError(f"measure {self.name!r} has the window [{first}, {last}]; need 0 <= first <= last")

    @property
    def evaluated(self) -> bool:
        """Whether it is of evaluations."""
        return self.key.startswith("eval/")

    @property
    def words(self) -> str:
        """For a reader."""
        return self.text or f"`{self.name}`"


FINAL = Measure(name="final", text="last evaluation")
AREA = Measure(name="area", text="mean height of the evaluation curve", of="area")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is said of two arms, before anything is run."""

    id: str
    """Short name."""
    text: str
    """The claim as a sentence."""
    better: str
    """Arm that the difference is taken of."""
    worse: str
    """Arm that is subtracted."""
    measure: str = "final"
    """One of the plan's measures by its name; final: mean of the last evaluation; area: mean height of the evaluation
    curve; or a metric's key, of which the last value counts."""
    kind: Kind = "greater"
    """greater: the difference is above the margin. less: it is below minus the margin, for measures of which less is
    better. equivalent: it lies within +- margin."""
    margin: float = 0.0
    """In units of the measure."""
    paper: str = ""
    """What the paper says, with its figures."""


@dataclass(frozen=True, kw_only=True)
class Against:
    """A table of the report: what arms differ from one of them, paired by seed; it decides nothing."""

    arm: str
    """Which is subtracted."""
    measure: str = "final"
    """As in claims."""
    arms: tuple[str, ...] = ()
    """Which are compared with it; empty for all others."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a curve."""

    label: str
    """Names it in the figure."""
    arms: tuple[str, ...]
    """Arms that are its points."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Measures over the values of a setting, an arm a point: a figure and a table of the report."""

    id: str
    """Names the figure's file."""
    text: str
    """What it asks or shows, as a sentence."""
    x: str
    """Key of a setting, as in "loop.max_batches_ahead", whose value in an arm is the arm's place; evenly apart."""
    measures: tuple[str, ...]
    """As in claims, a panel each."""
    lines: tuple[Line, ...]
    """At least one."""


@dataclass(frozen=True, kw_only=True)
class OverSteps:
    """A training metric over the steps, a line per arm with its interval over seeds: a figure of the report."""

    id: str
    """Names the figure's file."""
    text: str
    """What it shows, as a sentence."""
    keys: tuple[str, ...]
    """Metrics of training rows, which are added up."""
    arms: tuple[str, ...]
    """Which are shown."""
