"""Critic-free baselines: one advantage per rollout, from a group, a batch or a memory of rewards.

Each `advantages` call sees the baseline as it was before the batch; `observe` follows it. State is plain JSON, and part
of the checkpoint. Formulas and sources: method.md section 5, and `docs/algorithm.md`.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from sao.algorithm.advantages import group_centred, group_normalised, leave_one_out
from sao.algorithm.baselines import batch_mean, beta_tracker_update, beta_tracker_value, running_mean
from sao.types import Rollout


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
    """Added to a group's standard deviation by `group_normalised` (GRPO); above 0, for groups of equal rewards."""
    spo_half_life: float = 0.06
    """D_half of SPO's forgetting: rho = 2^(-D / D_half), D the KL divergence since the prompt's last visit."""
    spo_rho_min: float = 0.875
    """Least forgetting factor of SPO; its prior has mass 1 / (1 - rho_min)."""
    spo_rho_max: float = 0.96
    """Greatest forgetting factor of SPO."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"baseline.window is {self.window}; it must be at least 1")
        if not (self.spo_half_life > 0 and math.isfinite(self.spo_half_life)):
            raise ValueError(f"baseline.spo_half_life is {self.spo_half_life}; it must be above 0")
        if not 0 < self.std_floor < math.inf:
            raise ValueError(
                f"baseline.std_floor is {self.std_floor}; it must be finite and above 0, or a group of equal rewards "
                "would be 0 / 0"
            )
        if not 0 <= self.spo_rho_min <= self.spo_rho_max < 1:
            raise ValueError(
                f"baseline.spo_rho_min {self.spo_rho_min} and baseline.spo_rho_max {self.spo_rho_max} must satisfy "
                "0 <= min <= max < 1"
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


class WithinBatchBaseline(CriticBaseline):
    """Compares rewards within a group (recognised by `group_id`) or a batch; remembers nothing."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function = function

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:  # type: ignore[override]
        """Of the batch's own rewards."""
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(rollout.group_id, len(numbers)) for rollout in rollouts]
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        return tuple(self._function(rewards, torch.tensor(groups)).tolist())


class RunningMeanBaseline:
    """R - mean of the last `window` rewards, over all prompts or of the same prompt."""

    def __init__(self, window: int, *, per_prompt: bool) -> None:
        self._window, self._per_prompt = window, per_prompt
        self._rewards: dict[str, deque[float]] = {}

    def _key(self, rollout: Rollout) -> str:
        return rollout.prompt_id if self._per_prompt else ""

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
        """Against the mean before this batch."""
        return tuple(running_mean(r.reward, list(self._rewards.get(self._key(r), ()))) for r in rollouts)

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
    """SPO's per-prompt Beta tracker (arXiv 2509.13232): R - v, with forgetting by how far the policy has moved.

    The divergence since a prompt's last visit is estimated by the change of the mean recorded log-prob of its rollouts
    (ours: SPO's own estimate needs a forward pass of the old policy). Rewards must lie in [0, 1].
    """

    def __init__(self, update: Callable[..., tuple[float, float]], prior: float) -> None:
        self._update, self._prior = update, prior
        self._trackers: dict[str, tuple[float, float, float]] = {}

    def _tracker(self, rollout: Rollout) -> tuple[float, float, float]:
        return self._trackers.get(rollout.prompt_id, (self._prior / 2, self._prior / 2, _mean_logprob(rollout)))

    def advantages(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
        """Against each prompt's tracked success rate. Raises ValueError for a reward outside [0, 1]."""
        for rollout in rollouts:
            if not 0 <= rollout.reward <= 1:
                raise ValueError(
                    f"rollout {rollout.id} has reward {rollout.reward:g}, and SPO's Beta tracker takes rewards in "
                    '[0, 1]; scale the environment\'s rewards, or choose another baseline.kind, such as "running_mean"'
                )
        return tuple(rollout.reward - beta_tracker_value(*self._tracker(rollout)[:2]) for rollout in rollouts)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Forget, then count the new rewards in the order of the batch."""
        for rollout in rollouts:
            successes, failures, level = self._tracker(rollout)
            now = _mean_logprob(rollout)
            counts = self._update(successes, failures, rollout.reward, divergence=abs(now - level))
            self._trackers[rollout.prompt_id] = (*counts, now)

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
        case "group_normalised":
            return WithinBatchBaseline(partial(group_normalised, floor=config.std_floor))
        case "group_mean":
            return WithinBatchBaseline(group_centred)
        case "leave_one_out":
            return WithinBatchBaseline(leave_one_out)
        case "batch_mean":
            return WithinBatchBaseline(lambda rewards, _: batch_mean(rewards))
        case "running_mean" | "prompt_running_mean":
            return RunningMeanBaseline(config.window, per_prompt=config.kind == "prompt_running_mean")
        case "spo":
            update = partial(
                beta_tracker_update,
                half_life=config.spo_half_life,
                keep_least=config.spo_rho_min,
                keep_most=config.spo_rho_max,
            )
            return SpoBaseline(update, prior=1.0 / (1.0 - config.spo_rho_min))
