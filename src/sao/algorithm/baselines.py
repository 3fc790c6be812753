"""Critic-free baselines as pure functions: what they remember comes in and goes out; pipeline/baselines.py keeps it.

Axes: B rollouts. Rewards are one number per rollout. Group baselines stand in advantages.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def batch_mean(rewards: Tensor) -> Tensor:
    """(B,) reward minus the batch's mean. Source: FlashREINFORCE."""
    if rewards.ndim != 1 or not len(rewards):
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; give one per rollout, (B,)")
    return rewards - rewards.mean()


def running_mean(reward: float, recent: Sequence[float], *, start: float = 0.5) -> float:
    """Reward minus the mean of the recent rewards, this one not among them; minus `start` while there are none.

    `recent` holds the last 128 rewards of the run, or the last 8 of the prompt. Source: SAO's two controls; that a
    reward is not in its own baseline, and the start, are ours.
    """
    return reward - (sum(recent) / len(recent) if recent else start)


def beta_tracker_value(successes: float, failures: float) -> float:
    """Expected reward of a prompt under its Beta tracker: a / (a + b). Source: SPO, arXiv 2509.13232."""
    if not (successes >= 0 and failures >= 0 and successes + failures > 0):
        raise ValueError(f"a Beta tracker holds ({successes}, {failures}); both must be >= 0 and not both 0")
    return successes / (successes + failures)


def beta_tracker_update(
    successes: float,
    failures: float,
    reward: float,
    *,
    divergence: float,
    half_life: float = 0.06,
    keep_least: float = 0.875,
    keep_most: float = 0.96,
) -> tuple[float, float]:
    """New (a, b) of a prompt's Beta tracker: both shrink by rho, then the reward in [0, 1] is added.

    rho = 2^(-divergence / half_life), within [keep_least, keep_most]; `divergence` is the KL in nats between the policy
    now and when the prompt was last seen. Source: SPO, arXiv 2509.13232.
    """
    if not 0 <= reward <= 1:
        raise ValueError(f"reward is {reward}; a Beta tracker takes rewards in [0, 1]")
    if not divergence >= 0:
        raise ValueError(f"divergence is {divergence}; it must be >= 0")
    keep = min(max(2.0 ** (-divergence / half_life), keep_least), keep_most)
    return keep * successes + reward, keep * failures + 1.0 - reward
