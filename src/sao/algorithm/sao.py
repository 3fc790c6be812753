"""Single-Rollout Asynchronous Optimization (arXiv 2607.07508) on one page.

An agent is trained from single finished rollouts, in the order in which they finish: no group, no barrier. One step:
    batch  = the next 128 rollouts, one per prompt            values = critic(batch), targets(rewards, values): fixed
    actor_loss   -> one actor update    -> publish            engines take the weights with rollouts in flight
    critic_loss  -> K = 2 critic updates                      attention frozen, pretrained before RL starts
By the paper's letter: DIS (eq. 1 to 3), skip-observation GAE (eq. 4, 5), length-adaptive lambda, critic lambda 1.
Ours, the paper being silent: no gradient through the ratio; the denominator counts all action tokens of the batch,
rejected ones too; gamma = 1; whitening with a floor; V = 0 beyond a truncated end. The maths is in the other files.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor, where

import sao.algorithm.advantages as adv
import sao.algorithm.losses as losses
from sao.algorithm.checks import check_settings
from sao.algorithm.diagnostics import PolicyDiagnostics


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Which functions make a step's targets and losses, and their numbers."""

    advantage: adv.AdvantageName = "skip_observation"
    """Steps of the GAE (paper: action tokens). given: one number per rollout from a baseline, no critic."""
    policy_loss: Literal["dis", "none", "ppo_clip", "decoupled_ppo", "icepop"] = "dis"
    """Correction for the age of tokens (paper: dis). Ratios to the recorded log-probs; none: 1."""
    ratio_low: float = 0.7
    """Lower bound on the ratio in dis and icepop; the paper's for mathematics, 1 - 0.3 (coding 0.2, 1 - 0.8)."""
    ratio_high: float = 6.0
    """Upper bound on the ratio in dis and icepop; the paper's for mathematics, 1 + 5.0 (coding 4.0, 1 + 3.0)."""
    clip_ratio_low: float = 0.8
    """Lower bound of PPO's clip on the ratio; the usual epsilon of 0.2."""
    clip_ratio_high: float = 1.28
    """Upper bound of PPO's clip on the ratio; DAPO's epsilon of 0.28."""
    alpha: float | None = 1.5
    """Actor's lambda = 1 - 1/(alpha l), l = action tokens of the rollout (paper). None takes lam."""
    lam: float = 1.0
    """Actor's lambda where alpha is None; 1 is Monte Carlo minus the value."""
    gamma: float = 1.0
    """Discount per step of the GAE; the paper does not say, one outcome reward needs none."""
    lambda_critic: float = 1.0
    """Lambda of the critic's targets (paper)."""
    whiten: bool = True
    """Scale the batch's advantages to mean 0, deviation 1; ours. Must be off for the GRPO family and batch_mean."""
    whiten_floor: float = 0.1
    """Least divisor in whitening; a nearly constant batch otherwise explodes the gradient."""
    denominator: Literal["action_tokens", "kept_tokens", "trajectory_mean"] = "action_tokens"
    """The actor's N: action tokens of the batch, those inside the band, or rollouts times the rollout's own; ours."""
    detach_ratio: bool = True
    """No gradient through the ratio in dis; False flips the sign for tokens under probability 0.368. Ours."""
    bootstrap_truncated: bool = False
    """Whether a truncated rollout goes on with the critic's value at its end; the paper does not say."""
    value_clip: float | None = None
    """PPO's clip of the value change; off, the paper gives the plain square."""
    train_observation_values: bool = False
    """Whether observation_inclusive also fits V at observation tokens, so that it is no straw man."""

    def __post_init__(self) -> None:
        shares, above_zero = ("lam", "gamma", "lambda_critic"), ("alpha", "whiten_floor", "value_clip")
        check_settings(self, "algorithm", shares=shares, above_zero=above_zero)
        losses.check_band(self.ratio_low, self.ratio_high, names="algorithm.ratio_low, ratio_high")
        losses.check_band(self.clip_ratio_low, self.clip_ratio_high, names="algorithm.clip_ratio_low, clip_ratio_high")
        if self.train_observation_values and self.advantage != "observation_inclusive":
            raise ValueError(f"algorithm.train_observation_values is for observation_inclusive, not {self.advantage}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What both updates of a step are fitted to; arrays (B, T)."""

    advantages: Tensor
    """0 off action tokens; whitened if `whitened`."""
    returns: Tensor
    """What V is fitted to; 0 off `value_mask`."""
    value_mask: Tensor
    """Bool: where there are returns to fit, which are the action tokens unless configured otherwise."""
    advantage_mean: float
    """Before whitening, over action tokens."""
    advantage_std: float
    """As advantage_mean; 0 for a constant batch."""
    whitened: bool
    """Whether the advantages were scaled; a batch of equal rewards is not."""


def targets(
    *, rewards: Tensor, values: Tensor, action_mask: Tensor, turns: Tensor, num_action_tokens: Tensor,
    bootstrap: Tensor | None = None, given: Tensor | None = None, rollout_of_row: Tensor | None = None,
    config: AlgorithmConfig,
) -> Targets:  # fmt: skip
    """Advantages and returns of a whole batch: arrays (B, T); (B,) are l, bootstrap, given and the rollout of each row.

    Raises ValueError as the functions of advantages.py do, and where `given` is configured but not one per row.
    """
    value_mask, length = action_mask, num_action_tokens  # l counts the steps of the recursion, in each form
    match config.advantage:
        case "observation_inclusive":
            length, keep = adv.action_span(action_mask).sum(1), config.train_observation_values
            value_mask = adv.action_span(action_mask) if keep else action_mask
            gae = partial(adv.observation_inclusive_gae, rewards, values, action_mask, keep_observations=keep)
        case "step_mean" | "step_last":
            length, mean = adv.num_steps(turns, action_mask), config.advantage == "step_mean"
            gae = partial(adv.step_gae, rewards, values, action_mask, turns, step_value="mean" if mean else "last")
        case "skip_observation" | "given":  # eq. 4, 5: A = d + gamma lambda A(next), d = r + gamma V(next) - V
            gae = partial(adv.skip_observation_gae, rewards, values, action_mask)
    gae = partial(gae, gamma=config.gamma, bootstrap=bootstrap if config.bootstrap_truncated else None)
    returns = gae(lam=config.lambda_critic)[1]  # return = A(lambda_critic) + V
    if config.advantage == "given":
        if given is None or given.shape != num_action_tokens.shape:
            raise ValueError("algorithm.advantage = given needs one number per row from a baseline, in given")
        raw = where(action_mask, given[:, None], 0.0)
    else:
        lam = config.lam if config.alpha is None else adv.length_adaptive_lambda(length, alpha=config.alpha)
        raw = where(action_mask, gae(lam=lam)[0], 0.0)  # lambda_actor = 1 - 1/(alpha l)
    mean, std = adv.moments(raw, action_mask)
    whiten = partial(adv.whiten, rewards=rewards, rollout_of_row=rollout_of_row, floor=config.whiten_floor)
    final, whitened = whiten(raw, action_mask) if config.whiten else (raw, False)  # ours: (A - mean) / max(std, floor)
    return Targets(advantages=final, returns=returns, value_mask=value_mask, advantage_mean=mean,
                   advantage_std=std, whitened=whitened)  # fmt: skip


def actor_loss(
    actor_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, action_mask: Tensor, *,
    denominator: float | Tensor, config: AlgorithmConfig, entropy: Tensor | None = None,
) -> tuple[Tensor, PolicyDiagnostics]:  # fmt: skip
    """Loss of a micro-batch, arrays (B, T) or packed (1, N), and sums that add up over micro-batches."""
    band = {"ratio_low": config.ratio_low, "ratio_high": config.ratio_high}
    clip = {"clip_ratio_low": config.clip_ratio_low, "clip_ratio_high": config.clip_ratio_high}
    loss = {  # eq. 1 to 3: L = - sum_t f(r_t) A_t log pi_t / N, f(r) = r if ratio_low < r < ratio_high else 0
        "dis": partial(losses.dis_policy_loss, **band, detach_ratio=config.detach_ratio),
        "none": losses.reinforce_policy_loss,
        "ppo_clip": partial(losses.ppo_clip_policy_loss, **clip),
        "decoupled_ppo": partial(losses.decoupled_ppo_policy_loss, **clip),
        "icepop": partial(losses.icepop_policy_loss, **band, **clip),
    }[config.policy_loss]
    value, sums = loss(actor_logprobs, rollout_logprobs, advantages, action_mask, denominator=denominator)
    return value, sums if entropy is None else replace(sums, entropy_sum=float(entropy.detach()[action_mask].sum()))


def critic_loss(
    values: Tensor, returns: Tensor, value_mask: Tensor, *,
    denominator: float | Tensor, config: AlgorithmConfig, initial_values: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """0.5 sum (V - return)^2 / N of a micro-batch; N counts `value_mask` over the whole batch."""
    return losses.value_loss(values, returns, value_mask, denominator=denominator, clip=config.value_clip,
                             initial_values=initial_values)  # fmt: skip
