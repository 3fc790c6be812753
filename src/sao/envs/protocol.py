"""The seams of the world: environments, task sources, tools and graders."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

from sao.types import Message, Task


class WorldError(RuntimeError):
    """The world failed, not the policy: a sandbox that does not start, a grader that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an action led to."""

    messages: tuple[Message, ...] = ()
    """Observations to append; empty when done."""
    reward: float = 0.0
    """Credited to the last token of the action."""
    done: bool = False
    """Whether the episode is over; no step may follow."""
    tool_seconds: float = 0.0
    """Seconds of the clock spent in the policy's own tool call."""
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    """What was found of the action beside its reward, such as the parts it is made of: finite numbers by name, shown
    and logged, never trained on. Of a name that comes again within the episode the last value counts."""

    def __post_init__(self) -> None:
        for name, value in self.marks.items():
            if not name.isidentifier():
                raise ValueError(
                    f"a mark is called {name!r}; it names a metric: use letters, digits and underscores, no digit first"
                )
            if not (isinstance(value, Real) and math.isfinite(value)):
                raise ValueError(f"mark {name} is {value!r}; give a finite number")


class Environment(Protocol):
    """One episode of one task. Single use. Raises WorldError for failures that are not the policy's."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Start; returns the opening messages."""
        ...

    async def step(self, action: Message) -> Step:
        """Take one assistant message."""
        ...

    async def close(self) -> None:
        """Release tools; called once, whatever happened."""
        ...


EnvironmentFactory = Callable[[], Environment]


class TaskSource(Protocol):
    """Tasks by index: a cursor is the number of tasks taken, so that resuming is seeking."""

    name: str

    def at(self, index: int) -> Task | None:
        """The task at `index` (0, 1, ...), the same on every call; None past the end of a finite source."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A verdict on an answer."""

    reward: float
    """Credited to the answer: 1 if right, else 0, unless the grader says otherwise."""
    method: str
    """How it was reached: "exact", "math-verify", "unparsed"."""


class Grader(Protocol):
    """Judges answers under its own time limit."""

    def grade(self, task: Task, answer: str) -> Grade:
        """Blocking; call through `clock.external`. Raises WorldError when grading itself failed or timed out."""
        ...

    def stop(self) -> None:
        """End the pool. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge says of an answer that is not simply right or wrong."""

    quality: float
    """How good it is, from 0 to 1, whatever its style."""
    style: float
    """How much of it is in the style that the task asks for, from 0 to 1."""


class Judge(Protocol):
    """Judges the quality and the style of answers, alike for any number of episodes at once."""

    async def judge(self, task: Task, answer: str) -> Verdict:
        """Marks of one answer. Raises WorldError when judging itself failed, under the judge's own time limit."""
        ...

    async def close(self) -> None:
        """Release connections, on the loop that used them. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What running a piece of code gave."""

    output: str
    """What the policy is shown: what was printed, the value, or the error."""
    ok: bool
    """False when the code raised or was stopped."""
    timed_out: bool = False
    """Its own limit of time ended it."""
    truncated: bool = False
    """Output was longer than the limit and was cut."""
    out_of_memory: bool = False
    """Its limit of memory ended it."""


class CodeTool(Protocol):
    """Runs code of one rollout, keeping variables between calls. Single use, blocking."""

    def run(self, code: str) -> ToolResult:
        """Execute; a fault of the code is a result. Raises WorldError when the tool itself cannot run."""
        ...

    def stop(self) -> None:
        """End everything the code started. Safe to call twice."""
        ...
