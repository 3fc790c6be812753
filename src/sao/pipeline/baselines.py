"""Critic-free baselines: one advantage per rollout, from a group, a batch or a memory of rewards.

Each `advantages` call sees the baseline as it was before the batch; `observe` follows it. State is plain JSON and part of
the checkpoint. Formulas and sources: method.md section 5, and `docs/algorithm.md`.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from sao.types import FailureKind, Rollout


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Where the advantage comes from when no critic supplies it."""

    kind: Literal[
        "critic",
        "group_normalised",
        "group_mean",
        "leave_one_out",
        "running_mean",
        "prompt_running_mean",
        "batch_mean",
        "spo",
    ] = "critic"
    """`critic`: no baseline here, the critic's values are used (SAO)."""
    window: int = 128
    """Rewards remembered by `running_mean`, or per prompt by `prompt_running_mean` (8 in the paper's ablation)."""
    std_floor: float = 1e-6
    """Added to a group's standard deviation by `group_normalised` (GRPO)."""
    spo_half_life: float = 0.06
    """D_half of SPO's forgetting: rho = 2^(-D / D_half), D the KL divergence since the prompt's last visit."""
    spo_rho_min: float = 0.875
    """Least forgetting factor of SPO; its prior has mass 1 / (1 - rho_min)."""
    spo_rho_max: float = 0.96
    """Greatest forgetting factor of SPO."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"baseline.window is {self.window}; it must be at least 1")
        if not 0 <= self.spo_rho_min <= self.spo_rho_max < 1:
            raise ValueError(
                f"baseline.spo_rho_min {self.spo_rho_min} and spo_rho_max {self.spo_rho_max} must satisfy 0 <= min <= max < 1"
            )


class Baseline(Protocol):
    """What a reward is compared with."""

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[float, ...] | None:
        """One number per rollout of a batch, from what was observed before it; None when a critic supplies them."""
        ...

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Remember a consumed batch."""
        ...

    def state(self) -> dict[str, object]:
        """JSON for the checkpoint."""
        ...

    def load(self, state: dict[str, object]) -> None:
        """Take back what `state` gave."""
        ...


class CriticBaseline:
    """No baseline outside the trainer: the critic's values are the baseline."""

    def advantages(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing: targets are computed from values."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing to remember."""

    def state(self) -> dict[str, object]:
        """Empty."""
        return {}

    def load(self, state: dict[str, object]) -> None:
        """Nothing to take back."""


class GroupBaseline(CriticBaseline):
    """GRPO's (R - mean) / std, Dr.GRPO's R - mean, or RLOO's R - mean of the others, within a group."""

    def __init__(self, kind: str, std_floor: float) -> None:
        self._kind, self._std_floor = kind, std_floor

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:  # type: ignore[override]
        """Groups are recognised by `group_id`."""
        groups: dict[str, list[float]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout.reward)
        return tuple(self._one(rollout.reward, np.array(groups[rollout.group_id])) for rollout in rollouts)

    def _one(self, reward: float, group: np.ndarray) -> float:
        centred = reward - float(group.mean())
        if self._kind == "group_mean":
            return centred
        if self._kind == "leave_one_out":
            if len(group) < 2:
                raise ValueError("leave_one_out needs groups of at least 2; raise loop.group_size")
            return centred * len(group) / (len(group) - 1)
        return centred / (float(group.std(ddof=1) if len(group) > 1 else 0.0) + self._std_floor)


class BatchMeanBaseline(CriticBaseline):
    """R - mean of the batch (FlashREINFORCE)."""

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:  # type: ignore[override]
        """The batch is its own baseline."""
        mean = sum(rollout.reward for rollout in rollouts) / len(rollouts)
        return tuple(rollout.reward - mean for rollout in rollouts)


class RunningMeanBaseline:
    """R - mean of the last `window` rewards, over all prompts or of the same prompt; 0 is the mean of none."""

    def __init__(self, window: int, *, per_prompt: bool) -> None:
        self._window, self._per_prompt = window, per_prompt
        self._rewards: dict[str, deque[float]] = {}

    def _key(self, rollout: Rollout) -> str:
        return rollout.prompt_id if self._per_prompt else ""

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
        """Against the mean before this batch."""
        result: list[float] = []
        for rollout in rollouts:
            seen = self._rewards.get(self._key(rollout), ())
            result.append(rollout.reward - (sum(seen) / len(seen) if seen else 0.0))
        return tuple(result)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Rewards enter in the order of the batch."""
        for rollout in rollouts:
            self._rewards.setdefault(self._key(rollout), deque(maxlen=self._window)).append(rollout.reward)

    def state(self) -> dict[str, object]:
        """Rewards by key."""
        return {"rewards": {key: list(rewards) for key, rewards in self._rewards.items()}}

    def load(self, state: dict[str, object]) -> None:
        """Keeps the newest `window` of each key."""
        rewards = state.get("rewards", {})
        assert isinstance(rewards, dict)
        self._rewards = {str(key): deque(map(float, values), maxlen=self._window) for key, values in rewards.items()}


class SpoBaseline:
    """SPO's per-prompt Beta tracker (arXiv 2509.13232): R - v, v = alpha / (alpha + beta), forgetting by policy change.

    The KL divergence since a prompt's last visit is estimated from the recorded log-probs: mean over the rollout's action
    tokens of the drop in log-prob level against the previous visit's mean. Rewards must lie in [0, 1].
    """

    def __init__(self, *, half_life: float, rho_min: float, rho_max: float) -> None:
        self._half_life, self._rho_min, self._rho_max = half_life, rho_min, rho_max
        self._trackers: dict[str, tuple[float, float, float]] = {}

    def _value(self, prompt_id: str) -> float:
        if prompt_id not in self._trackers:
            return 0.5
        alpha, beta, _ = self._trackers[prompt_id]
        return alpha / (alpha + beta)

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
        """Against each prompt's tracked success rate."""
        for rollout in rollouts:
            if not 0 <= rollout.reward <= 1:
                raise ValueError(f"spo needs rewards in [0, 1]; rollout {rollout.id} has {rollout.reward}")
        return tuple(rollout.reward - self._value(rollout.prompt_id) for rollout in rollouts)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Forget by rho, then count the new reward."""
        for rollout in rollouts:
            level = _mean_logprob(rollout)
            mass = 1.0 / (1.0 - self._rho_min)
            alpha, beta, before = self._trackers.get(rollout.prompt_id, (mass / 2, mass / 2, level))
            rho = min(max(2.0 ** (-abs(level - before) / self._half_life), self._rho_min), self._rho_max)
            self._trackers[rollout.prompt_id] = (rho * alpha + rollout.reward, rho * beta + 1 - rollout.reward, level)

    def state(self) -> dict[str, object]:
        """Trackers by prompt."""
        return {"trackers": {key: list(value) for key, value in self._trackers.items()}}

    def load(self, state: dict[str, object]) -> None:
        """Take back the trackers."""
        trackers = state.get("trackers", {})
        assert isinstance(trackers, dict)
        self._trackers = {str(key): (float(a), float(b), float(level)) for key, (a, b, level) in trackers.items()}


def _mean_logprob(rollout: Rollout) -> float:
    count = rollout.num_action_tokens
    return math.fsum(float(s.rollout_logprobs.sum()) for s in rollout.sequences) / count if count else 0.0


def make_baseline(config: BaselineConfig) -> Baseline:
    """The baseline a configuration names."""
    match config.kind:
        case "critic":
            return CriticBaseline()
        case "group_normalised" | "group_mean" | "leave_one_out":
            return GroupBaseline(config.kind, config.std_floor)
        case "batch_mean":
            return BatchMeanBaseline()
        case "running_mean" | "prompt_running_mean":
            return RunningMeanBaseline(config.window, per_prompt=config.kind == "prompt_running_mean")
        case "spo":
            return SpoBaseline(half_life=config.spo_half_life, rho_min=config.spo_rho_min, rho_max=config.spo_rho_max)
