"""Chained arithmetic of graded difficulty, as symbols or as a word problem, for a policy with a code tool.

A chain of two steps, in both forms, and the calls that solve it:

    7 ; b + 3 ; c * 2 ; c ?
    start with 7 . bob adds 3 . cid multiplies 2 . after cid ?
    <python> bob = 7 + 3 </python>    <python> cid = 10 * 2 </python>    <answer> 20 </answer>

Names follow one another from a random first one and mark the steps; lengths are heavy-tailed. Task i of a stream is a
pure function of (seed, stream, i), and streams never share a chain, whatever it is called or how it is worded.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sao.envs.keyed import generator, uniform
from sao.envs.math_python import RESULTS_DETAIL
from sao.types import Task

Stream = Literal["train", "sft", "evaluation"]

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_PEOPLE = "ann bob cid dan eva fay gus hal ida jim kim leo mia ned ola pam ray sue tom uma val wes yan zoe"
PEOPLE = tuple(_PEOPLE.split(" "))
_SPOKEN = {"+": "adds", "-": "takes", "*": "multiplies"}
LARGEST_OPERAND, LARGEST_VALUE = 1000, 10**9
"""Each step lists all operands that fit."""
STEEPEST = 20
"""Of `length_exponent`; beyond it all chains but one in a million have the same length, and shares turn to 0 / 0."""
_SHARES: dict[str, tuple[float, float]] = {"evaluation": (0.0, 0.1), "sft": (0.1, 0.5), "train": (0.5, 1.0)}
"""Which part of all chains, by hash, belongs to which stream."""


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """Which chains are drawn."""

    min_steps: int = 1
    """Shortest chain, in steps (tool calls that a flawless policy needs)."""
    max_steps: int = 12
    """Longest chain; every length between occurs."""
    length_exponent: float = 0.8
    """P(n steps) is proportional to n ** -length_exponent: larger is shorter, 0 is uniform."""
    max_value: int = 99
    """No intermediate value is larger; two digits keep observations short."""
    max_operand: int = 9
    """Largest operand of a step."""
    words_share: float = 0.5
    """Share of chains told as a word problem; the rest are symbols."""
    tool_error_probability: float = 0.12
    """Chance that a tool call fails for no fault of the policy and must be repeated."""
    result_marks: Literal["none", "verified", "constant"] = "none"
    """What follows a tool's result. verified: "." if the name that was assigned has its right value, else "?": errors
    show long before the reward. constant: always ".", a control of the same length that says nothing."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_steps <= self.max_steps <= len(PEOPLE):
            raise ValueError(
                f"min_steps is {self.min_steps} and max_steps {self.max_steps}; need 1 <= min_steps <= max_steps <= "
                f"{len(PEOPLE)}, since every step has a name of its own"
            )
        if not 2 <= self.max_operand <= min(self.max_value, LARGEST_OPERAND) or self.max_value > LARGEST_VALUE:
            raise ValueError(
                f"max_operand is {self.max_operand} and max_value {self.max_value}; need 2 <= max_operand <= max_value,"
                f" max_operand <= {LARGEST_OPERAND} and max_value <= {LARGEST_VALUE}"
            )
        if not abs(self.length_exponent) <= STEEPEST:
            raise ValueError(
                f"length_exponent is {self.length_exponent}; it must lie between -{STEEPEST} and {STEEPEST}"
            )
        for name in ("words_share", "tool_error_probability"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it must lie between 0 and 1")

    @property
    def length_shares(self) -> np.ndarray:
        """P(n) for n = min_steps .. max_steps, shape (max_steps - min_steps + 1,)."""
        weights = np.arange(self.min_steps, self.max_steps + 1) ** -self.length_exponent
        return weights / weights.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The arithmetic of a task: value i + 1 is value i, operator i, operand i."""

    start: int
    """Value 0, which the question gives."""
    operators: tuple[str, ...]
    """One per step: a sign that `apply` knows."""
    operands: tuple[int, ...]
    """Right-hand side of each step."""
    names: tuple[str, ...]
    """One per step."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.operators)

    @property
    def values(self) -> tuple[int, ...]:
        """The start and the value after each step, shape (steps + 1,)."""
        values = [self.start]
        for operator, operand in zip(self.operators, self.operands, strict=True):
            values.append(apply(operator, values[-1], operand))
        return tuple(values)

    def code(self, step: int, value: int | None = None) -> str:
        """The statement that computes value `step` (1, 2, ...) from the one before it, or from a `value` given."""
        left = self.values[step - 1] if value is None else value
        return f"{self.names[step - 1]} = {left} {self.operators[step - 1]} {self.operands[step - 1]}"

    def as_symbols(self) -> str:
        """The question in symbols."""
        return " ; ".join([str(self.start), *self._clauses({}), f"{self.names[-1]} ?"])

    def as_words(self) -> str:
        """The question as a word problem."""
        return " . ".join([f"start with {self.start}", *self._clauses(_SPOKEN), f"after {self.names[-1]} ?"])

    def _clauses(self, spoken: dict[str, str]) -> list[str]:
        steps = zip(self.names, self.operators, self.operands, strict=True)
        return [f"{name} {spoken.get(operator, operator)} {operand}" for name, operator, operand in steps]


class ChainTasks:
    """Endless tasks of one stream; `size` makes the source finite."""

    def __init__(self, config: ChainConfig, *, stream: Stream, seed: int = 0, size: int | None = None) -> None:
        if stream not in _SHARES:
            raise ValueError(f"stream is {stream!r}; choose one of {', '.join(sorted(_SHARES))}")
        if size is not None and size < 1:
            raise ValueError(f"size is {size}; give at least 1, or none for an endless source")
        self.name = f"chain-{stream}"
        self._config = config
        self._stream = stream
        self._seed = seed
        self._size = size

    def at(self, index: int) -> Task | None:
        """Task `index`."""
        if self._size is not None and index >= self._size:
            return None
        random = generator(self._seed, self.name, index)
        words = bool(random.random() < self._config.words_share)
        steps = self._config.min_steps + int(
            random.choice(len(self._config.length_shares), p=self._config.length_shares)
        )
        # Drawn before the rejection below, so that every stream has the same lengths.
        chain = self._draw(random, steps, PEOPLE if words else LETTERS)
        return Task(
            id=f"{self.name}/{index}",
            prompt_id=f"{self.name}/{index}",
            question=chain.as_words() if words else chain.as_symbols(),
            answer=str(chain.values[-1]),
            data_set=self.name,
            details={
                "steps": steps,
                "form": "words" if words else "symbols",
                "start": chain.start,
                "operators": " ".join(chain.operators),
                "operands": " ".join(map(str, chain.operands)),
                "names": " ".join(chain.names),
                "tool_error_probability": self._config.tool_error_probability,
                **self._marks(chain),
            },
        )

    def _marks(self, chain: Chain) -> dict[str, str]:
        """What math_python marks results by."""
        if self._config.result_marks == "none":
            return {}
        right = " ".join(f"{name}={value}" for name, value in zip(chain.names, chain.values[1:], strict=True))
        return {RESULTS_DETAIL: right if self._config.result_marks == "verified" else ""}

    def _draw(self, random: np.random.Generator, steps: int, names: tuple[str, ...]) -> Chain:
        low, high = _SHARES[self._stream]
        first = int(random.integers(len(names)))
        chosen = tuple(names[(first + step) % len(names)] for step in range(steps))
        for _ in range(10_000):
            chain = _random_chain(random, steps, chosen, self._config)
            text = f"{chain.start} {' '.join(chain.operators)} {chain.operands}"
            if low <= uniform("chain stream", text) < high:
                return chain
        raise ValueError(
            f"no chain of {steps} steps is left for the stream {self._stream!r}; raise max_value or max_operand"
        )


def apply(operator: str, value: int, operand: int) -> int:
    """One step of a chain."""
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operator]


def chain_of(task: Task) -> Chain:
    """The chain that a task of `ChainTasks` was made from. Raises ValueError for other tasks."""
    missing = [name for name in ("start", "operators", "operands", "names") if name not in task.details]
    if missing:
        raise ValueError(f"task {task.id} has no {', '.join(missing)} in its details: it is not a chain of this module")
    return Chain(
        start=int(task.details["start"]),
        operators=tuple(str(task.details["operators"]).split()),
        operands=tuple(map(int, str(task.details["operands"]).split())),
        names=tuple(str(task.details["names"]).split()),
    )


def chain_words() -> tuple[str, ...]:
    """Every word of the questions and of the calls that solve them, digits left out."""
    return (*LETTERS, *PEOPLE, *_SPOKEN, *_SPOKEN.values(), "=", ";", ".", "?", "start", "with", "after")


def _random_chain(random: np.random.Generator, steps: int, names: tuple[str, ...], config: ChainConfig) -> Chain:
    value = start = int(random.integers(1, config.max_value + 1))
    operators: list[str] = []
    operands: list[int] = []
    for _ in range(steps):
        choices = [
            (operator, operand)
            for operator in "+-*"
            for operand in range(2 if operator == "*" else 1, config.max_operand + 1)
            if 0 <= apply(operator, value, operand) <= config.max_value and (operator != "*" or value > 0)
        ]
        # By operator first: products fit rarely, and would be rare steps otherwise.
        allowed = sorted({operator for operator, _ in choices})
        operator = allowed[int(random.integers(len(allowed)))]
        fitting = [operand for chosen, operand in choices if chosen == operator]
        operand = fitting[int(random.integers(len(fitting)))]
        operators.append(operator)
        operands.append(operand)
        value = apply(operator, value, operand)
    return Chain(start=start, operators=tuple(operators), operands=tuple(operands), names=names)
