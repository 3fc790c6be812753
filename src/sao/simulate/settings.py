"""What is simulated: how long rollouts are, what their tokens and an update cost, and the loop's numbers."""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from scipy.special import log_ndtr

from sao.config_tree import ConfigError, apply_override, check_tree, merged, readable
from sao.loop import LoopConfig

Draws = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Of a positive number, with a mean that does not move when the tail grows."""

    kind: Literal["fixed", "lognormal", "pareto"] = "lognormal"
    """fixed: always the mean. lognormal: most of what agents do. pareto: a tail without a scale."""
    mean: float = 1.0
    """Before the cut at `most`; in the unit of what is drawn."""
    spread: float = 0.8
    """Heaviness of the tail. lognormal: sigma of the logarithm, 0 is fixed. pareto: 1 / shape, below 1; 0 is fixed."""
    most: float = 1e6
    """What is above is cut to this, as a limit of turns cuts a rollout; it lowers the mean of a heavy tail."""

    def __post_init__(self) -> None:
        if not 0 <= self.mean < math.inf:
            raise ValueError(f"mean is {self.mean}; it must be finite and not negative")
        if not 0 <= self.spread <= 5 or (self.kind == "pareto" and self.spread >= 1):
            most = "below 1, or the mean would be infinite" if self.kind == "pareto" else "at most 5"
            raise ValueError(f"spread is {self.spread}; for {self.kind} it must be at least 0 and {most}")
        if not self.mean <= self.most < math.inf:
            raise ValueError(f"most is {self.most}; it must be finite and at least the mean, {self.mean}")

    def of_normal(self, z: Draws) -> Draws:
        """The values (N,) at the quantiles at which standard normal draws `z` (N,) lie."""
        if self.kind == "fixed":
            return np.full_like(z, self.mean)
        if self.kind == "lognormal":
            values = self.mean * np.exp(self.spread * z - self.spread**2 / 2)
        else:
            values = self.mean * (1 - self.spread) * np.exp(-self.spread * log_ndtr(-z))
        return np.minimum(values, self.most)


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """A cluster in numbers. The defaults are of the order of a 30-billion model that uses tools; measure yours."""

    turns: Distribution = Distribution(mean=6.0, spread=0.8, most=50.0)
    """Turns of a rollout, at least 1. 50 is the paper's limit with a Python tool."""
    turn_tokens: Distribution = Distribution(mean=400.0, spread=0.6, most=8192.0)
    """Tokens sampled in a turn, rounded to whole blocks."""
    tool_seconds: Distribution = Distribution(mean=3.0, spread=1.0, most=600.0)
    """Seconds between two turns, in which the world answers and the engine is free for others."""
    prompt_share: float = 0.5
    """Share of the variance of log turns that comes from the prompt: members of a group are alike to that degree. A
    guess, on the barrier's side: at 0 it waits longest."""
    block_tokens: int = 50
    """Tokens that stand together in the records, under the version of the first. Resolution against speed."""
    replicas: int = 8
    """Engines; a turn goes to the one with the fewest running."""
    step_seconds: float = 0.02
    """Of a decode step of a replica, whatever its size."""
    session_seconds: float = 2e-4
    """More for each session in the step."""
    load_seconds: float = 5.0
    """From the publication of weights to the first token under them; decoding goes on meanwhile."""
    actor_seconds: float = 2.0
    """Of an actor update with what comes before it (values) and after it (publication), whatever the tokens."""
    actor_token_seconds: float = 5e-5
    """More for each action token of the batch."""
    critic_seconds: float = 2.0
    """Of a step's critic updates together, whatever the tokens. Groups need no critic; it is charged to all alike."""
    critic_token_seconds: float = 5e-5
    """More for each action token of the batch."""
    steps: int = 24
    """Training steps."""
    warmup_steps: int = 8
    """First steps that are not measured: at the start only short rollouts have ended."""
    batch_size: int = 128
    """Rollouts per step (paper: 128 x 1)."""
    group_size: int = 1
    """Rollouts per prompt that wait for one another; 1 is single-rollout streaming."""
    concurrency: int = 256
    """Rollouts running at once: the workers."""
    max_batches_ahead: int = 4
    """eta, the staleness bound; 0 is synchronous. See loop.max_batches_ahead."""
    seed: int = 0
    """Keys all draws: rollout i of a run has the same ones under every schedule, but for what its prompt shares."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in _SECONDS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and not negative")
        if self.step_seconds + self.session_seconds <= 0:
            raise ValueError("step_seconds and session_seconds are both 0; a decode step must take some time")
        if not 0 <= self.prompt_share <= 1:
            raise ValueError(f"prompt_share is {self.prompt_share}; it must lie in [0, 1]")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}; it must be at least 0 and below steps, {self.steps}"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2^63")
        self.loop()

    def loop(self) -> LoopConfig:
        """The loop's own settings. Raises ValueError for numbers with which it could not run."""
        return LoopConfig(
            steps=self.steps,
            batch_size=self.batch_size,
            group_size=self.group_size,
            concurrency=self.concurrency,
            max_batches_ahead=self.max_batches_ahead,
            checkpoint_every=self.steps,
        )


_SECONDS = (
    "step_seconds", "session_seconds", "load_seconds", "actor_seconds", "actor_token_seconds", "critic_seconds",
    "critic_token_seconds",
)  # fmt: skip


@functools.cache
def _adapter() -> TypeAdapter[SimulationConfig]:
    return TypeAdapter(SimulationConfig)


def config_of(overrides: Sequence[str]) -> SimulationConfig:
    """Settings from `key=value` overrides of the defaults, the later ones above. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    check_tree(tree, SimulationConfig)
    try:
        return _adapter().validate_python(merged(asdict(SimulationConfig()), tree))
    except ValidationError as error:
        raise ConfigError("\n".join(readable(problem) for problem in error.errors())) from error
