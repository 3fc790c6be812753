"""What is simulated: how long rollouts are, what their tokens and an update cost, and the loop's numbers."""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from sao.config_tree import apply_override, checked, describe_fields, merged
from sao.loop import LoopConfig

Draws = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Of a positive number, with a mean that stays where it is when the tail grows or is cut."""

    kind: Literal["fixed", "lognormal", "pareto"] = "lognormal"
    """fixed: always the mean. lognormal: most of what agents do. pareto: a tail without a scale."""
    mean: float = 1.0
    """Of what is drawn, after the cuts; in its unit."""
    spread: float = 0.8
    """Heaviness of the tail. lognormal: sigma of the logarithm, 0 is fixed. pareto: 1 / shape, below 1; 0 is fixed."""
    most: float = 1e6
    """What is above is cut to this, as a limit of turns cuts a rollout."""

    def __post_init__(self) -> None:
        if not 0 <= self.mean < math.inf:
            raise ValueError(f"mean is {self.mean}; it must be finite and not negative")
        if not 0 <= self.spread <= 5 or (self.kind == "pareto" and self.spread >= 1):
            most = "below 1, or the mean would be infinite" if self.kind == "pareto" else "at most 5"
            raise ValueError(f"spread is {self.spread}; for {self.kind} it must be at least 0 and {most}")
        if not self.mean < self.most <= 1e12:
            raise ValueError(f"most is {self.most}; it must be above the mean, {self.mean}, and at most 1e12")

    def of_normal(self, z: Draws, *, least: float = 0.0) -> Draws:
        """The values (N,) at the quantiles at which standard normal draws `z` (N,) lie, cut to [least, most].

        `least` must not be above the mean.
        """
        assert least <= self.mean
        if self.kind == "fixed" or self.spread == 0:
            return np.full_like(z, self.mean)
        log_ratio = self.spread * z if self.kind == "lognormal" else -self.spread * log_ndtr(-z)
        return np.clip(np.exp(_log_scale(self, least) + log_ratio), least, self.most)


@functools.cache
def _log_scale(of: Distribution, least: float) -> float:
    """Logarithm of the median, or of the least value of a Pareto, with which the mean after the cuts is `of.mean`."""
    if of.mean <= least:
        return -math.inf

    def excess(log_scale: float) -> float:
        return least + _mean_below(of, log_scale, of.most) - _mean_below(of, log_scale, least) - of.mean

    # exp(100) beyond either end the mean is that of the cuts alone.
    return float(brentq(excess, math.log(of.mean) - 100, math.log(of.most) + 100))  # type: ignore[arg-type]


def _mean_below(of: Distribution, log_scale: float, cut: float) -> float:
    """E[min(X, cut)] of the uncut X, in closed form."""
    if cut == 0:
        return 0.0
    distance, scale = math.log(cut) - log_scale, math.exp(log_scale)
    if of.kind == "lognormal":
        z = distance / of.spread
        return float(scale * math.exp(of.spread**2 / 2) * ndtr(z - of.spread) + cut * ndtr(-z))
    if distance <= 0:
        return cut
    above = 1 / of.spread - 1
    return scale * (1 - math.expm1(-above * distance) / above)


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """A cluster in numbers. The defaults are of the order of a 30-billion model that uses tools; measure yours."""

    turns: Distribution = Distribution(mean=6.0, spread=0.8, most=50.0)
    """Turns of a rollout, at least 1; a fraction is rounded up as often as it says. 50 is the paper's limit with a
    Python tool."""
    turn_tokens: Distribution = Distribution(mean=400.0, spread=0.6, most=8192.0)
    """Tokens sampled in a turn, in whole blocks, at least one; a part of a block is rounded up as often as it says."""
    tool_seconds: Distribution = Distribution(mean=3.0, spread=1.0, most=600.0)
    """Seconds between two turns, in which the world answers and the engine is free for others."""
    prompt_share: float = 0.5
    """Share of the variance of log turns that comes from the prompt: members of a group are alike to that degree. A
    guess, on the barrier's side: at 0 it waits longest."""
    block_tokens: int = 50
    """Tokens that stand together in the records, under the version of the first. Resolution against speed."""
    replicas: int = 4
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
    warmup_steps: int = 8
    """First steps that are not measured: at the start only short rollouts have ended."""
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(steps=24))
    """The loop's own settings. Nothing fails and nothing is saved: of them count steps, sizes, concurrency and ages."""
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
        if self.turns.mean < 1:
            raise ValueError(f"turns.mean is {self.turns.mean}; a rollout has at least 1 turn")
        if self.turn_tokens.mean < self.block_tokens:
            raise ValueError(
                f"turn_tokens.mean is {self.turn_tokens.mean}; a turn has at least a block, and block_tokens is "
                f"{self.block_tokens}"
            )
        if not 0 <= self.warmup_steps < self.loop.steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}; it must be at least 0 and below loop.steps, {self.loop.steps}"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2^63")


_SECONDS = (
    "step_seconds", "session_seconds", "load_seconds", "actor_seconds", "actor_token_seconds", "critic_seconds",
    "critic_token_seconds",
)  # fmt: skip


@functools.cache
def _keys() -> tuple[str, ...]:
    return tuple(name for name, _, _ in describe_fields(SimulationConfig(), ""))


def config_of(overrides: Sequence[str]) -> SimulationConfig:
    """Settings from `key=value` overrides of the defaults, the later ones above. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    return checked(SimulationConfig, merged(asdict(SimulationConfig()), tree), known=_keys())
