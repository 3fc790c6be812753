"""Policy and value losses: pure functions, tensors and scalars in, a scalar loss and sums out.

Axes: B rows, T tokens; entry t is about token t. Packed tokens come as one row, (1, N). `action_mask` is bool and true
where the policy sampled the token; nothing off the mask is read, so it may hold anything.

`denominator` is what the sum over tokens is divided by: the action tokens of the whole optimiser batch (a number), or a
tensor that broadcasts to (B, T), so that the losses and gradients of micro-batches add up to the batch's.

Ratios are taken against the log-probability that the engine recorded when it sampled the token, in float32 or better,
and the log-ratio is clamped before exp. Losses are minimised. Advantages never get a gradient.
"""

import torch
from torch import Tensor

from sao.algorithm.checks import check_shapes
from sao.algorithm.diagnostics import PolicyDiagnostics, policy_diagnostics

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp: far outside every band, and finite in float32."""
MIN_LOGPROB = -1e4
"""Log-probs are held above this in a difference, so that -inf minus -inf is 0."""


def dis_policy_loss(
    actor_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    ratio_low: float,
    ratio_high: float,
    denominator: float | Tensor,
    detach_ratio: bool = True,
) -> tuple[Tensor, PolicyDiagnostics]:
    """Direct double-sided importance sampling: - sum f A log pi / denominator, f = r inside the open band, else 0.

    Args:
        actor_logprobs: (B, T) under the weights being trained, with gradient.
        rollout_logprobs: (B, T) recorded by the engine.
        advantages: (B, T).
        action_mask: (B, T) bool.
        ratio_low, ratio_high: Bounds on the ratio itself, not epsilons: 0.7 and 6.0 for epsilons 0.3 and 5.0.
        denominator: See the head of this file.
        detach_ratio: False differentiates the printed formula literally. Then the gradient of a token is
            - r A (1 + log pi) grad log pi, whose sign is wrong wherever the probability is under 1/e = 0.368.

    Returns:
        Scalar loss, and sums for diagnostics.

    Raises:
        ValueError: Shapes that do not fit, a recorded log-prob that is not finite, bounds that do not enclose 1, or a
            denominator that is not above 0.

    Source: SAO equations 1 to 3. The detached ratio and the denominator (rejected tokens included) are ours.
    """
    check_shapes(
        action_mask=action_mask, actor_logprobs=actor_logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages
    )
    check_band(ratio_low, ratio_high)
    log_ratio = _log_ratio(actor_logprobs, rollout_logprobs, action_mask)
    ratio = log_ratio.exp()
    low, high = ratio <= ratio_low, ratio >= ratio_high
    kept = action_mask & ~low & ~high
    weight = ratio.detach() if detach_ratio else ratio
    loss = _weighted_log_likelihood(weight, advantages, actor_logprobs, kept, denominator)
    return loss, policy_diagnostics(log_ratio, action_mask, removed_low=low, removed_high=high)


def reinforce_policy_loss(
    actor_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    denominator: float | Tensor,
) -> tuple[Tensor, PolicyDiagnostics]:
    """No correction: - sum A log pi / denominator. The recorded log-probs serve for diagnostics only.

    This is also what PPO's clip gives when its ratio is against the trainer's own log-probs and there is one update per
    batch: that ratio is 1. Arguments, results and errors as in `dis_policy_loss`.
    """
    check_shapes(
        action_mask=action_mask, actor_logprobs=actor_logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages
    )
    log_ratio = _log_ratio(actor_logprobs, rollout_logprobs, action_mask)
    weight = torch.ones_like(log_ratio)
    loss = _weighted_log_likelihood(weight, advantages, actor_logprobs, action_mask, denominator)
    none = torch.zeros_like(action_mask)
    return loss, policy_diagnostics(log_ratio, action_mask, removed_low=none, removed_high=none)


def ppo_clip_policy_loss(
    actor_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    denominator: float | Tensor,
) -> tuple[Tensor, PolicyDiagnostics]:
    """PPO's clip with the ratio against the recorded log-probs: - sum min(r A, clip(r) A) / denominator.

    `clip_ratio_low` and `clip_ratio_high` are bounds on the ratio: 0.8 and 1.28 for epsilons 0.2 and 0.28. Else as in
    `dis_policy_loss`. Source: arXiv 1707.06347; asymmetric bounds arXiv 2503.14476.
    """
    check_shapes(
        action_mask=action_mask, actor_logprobs=actor_logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages
    )
    check_band(clip_ratio_low, clip_ratio_high)
    # k is 1 where the recorded log-probs are the proximal ones.
    arrays = actor_logprobs, rollout_logprobs, rollout_logprobs, advantages, action_mask
    return _clipped_loss(*arrays, clip=(clip_ratio_low, clip_ratio_high), denominator=denominator)


def decoupled_ppo_policy_loss(
    actor_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    denominator: float | Tensor,
    proximal_logprobs: Tensor | None = None,
) -> tuple[Tensor, PolicyDiagnostics]:
    """Decoupled PPO: - sum k min(u A, clip(u) A) / denominator, k = proximal / rollout, u = actor / proximal.

    `proximal_logprobs` (B, T) are the trainer's own, from before the batch's first update; None takes the actor's now,
    which is the same if there is one update per batch. Then u = 1 and nothing is clipped. k gets no gradient. Else as
    in `dis_policy_loss`. Source: arXiv 2110.00641, arXiv 2505.24298.
    """
    check_shapes(
        action_mask=action_mask, actor_logprobs=actor_logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages
    )
    check_band(clip_ratio_low, clip_ratio_high)
    arrays = actor_logprobs, rollout_logprobs, proximal_logprobs, advantages, action_mask
    return _clipped_loss(*arrays, clip=(clip_ratio_low, clip_ratio_high), denominator=denominator)


def icepop_policy_loss(
    actor_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    ratio_low: float,
    ratio_high: float,
    clip_ratio_low: float,
    clip_ratio_high: float,
    denominator: float | Tensor,
    proximal_logprobs: Tensor | None = None,
) -> tuple[Tensor, PolicyDiagnostics]:
    """IcePop: as decoupled PPO, but k is 0 outside the closed band [ratio_low, ratio_high], 0.5 and 5 in its paper.

    Arguments as in `dis_policy_loss` and `decoupled_ppo_policy_loss`. Source: arXiv 2510.18855.
    """
    check_shapes(
        action_mask=action_mask, actor_logprobs=actor_logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages
    )
    check_band(ratio_low, ratio_high)
    check_band(clip_ratio_low, clip_ratio_high)
    arrays = actor_logprobs, rollout_logprobs, proximal_logprobs, advantages, action_mask
    clip, band = (clip_ratio_low, clip_ratio_high), (ratio_low, ratio_high)
    return _clipped_loss(*arrays, clip=clip, band=band, denominator=denominator)


def value_loss(
    values: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    *,
    denominator: float | Tensor,
    clip: float | None = None,
    initial_values: Tensor | None = None,
) -> Tensor:
    """0.5 * sum (V - return)^2 / denominator over action tokens.

    Args:
        values: (B, T) with gradient.
        returns: (B, T) targets, fixed before the first update.
        action_mask: (B, T) bool.
        denominator: See the head of this file. Averaging per micro-batch instead changes the gradient with the packing.
        clip: PPO's value clip: the larger of the two squares, the other one with V held within `clip` of
            `initial_values`. None is off.
        initial_values: (B, T) values before the first update; needed with `clip`.

    Returns:
        Scalar loss.

    Raises:
        ValueError: Shapes that do not fit, a denominator not above 0, `clip` not above 0 or without `initial_values`.

    Source: the paper gives the square; denominator and no clipping are ours.
    """
    check_shapes(values=values, returns=returns, action_mask=action_mask)
    values = torch.where(action_mask, _at_least_float32(values), 0.0)
    returns = torch.where(action_mask, _at_least_float32(returns.detach()), 0.0)
    squares = (values - returns).square()
    if clip is not None:
        if not clip > 0:
            raise ValueError(f"clip is {clip}; it must be above 0, or None for no clipping")
        if initial_values is None or initial_values.shape != values.shape:
            raise ValueError("value clipping needs initial_values, of the shape of values")
        start = torch.where(action_mask, initial_values.detach(), 0.0)
        squares = torch.maximum(squares, (start + (values - start).clamp(-clip, clip) - returns).square())
    return 0.5 * (squares / _denominator(denominator, action_mask)).sum()


def reference_loss(
    actor_logprobs: Tensor, reference_logprobs: Tensor, action_mask: Tensor, *, denominator: float | Tensor
) -> Tensor:
    """0.5 * sum (actor - reference log-prob)^2 / denominator over action tokens: a pull towards a reference policy.

    Args:
        actor_logprobs: (B, T) with gradient.
        reference_logprobs: (B, T) of the same tokens under the reference policy.
        action_mask: (B, T) bool.
        denominator: See the head of this file.

    Returns:
        Scalar loss. On policy its gradient is that of KL(actor || reference), token by token: the mean of
        (log actor - log reference) grad log actor.

    Raises:
        ValueError: Shapes that do not fit, a reference that is not finite, a denominator not above 0.

    Source: the "k2" estimator of J. Schulman, "Approximating KL divergence" (2020), as a loss.
    """
    check_shapes(actor_logprobs=actor_logprobs, reference_logprobs=reference_logprobs, action_mask=action_mask)
    log_ratio = _log_ratio(actor_logprobs, reference_logprobs, action_mask, other_name="reference_logprobs")
    return 0.5 * (log_ratio.square() / _denominator(denominator, action_mask)).sum()


def trajectory_mean_denominator(num_action_tokens: Tensor, *, num_trajectories: int) -> Tensor:
    """(B, 1): rollouts in the batch times l of the row's rollout, so that each rollout weighs the same."""
    if num_action_tokens.ndim != 1 or num_trajectories < 1:
        raise ValueError(f"shape {tuple(num_action_tokens.shape)} and {num_trajectories} rollouts; want (B,) and >= 1")
    return (num_action_tokens * num_trajectories).float()[:, None]


@torch.no_grad()
def sequence_gate(
    actor_logprobs: Tensor,
    rollout_logprobs: Tensor,
    action_mask: Tensor,
    *,
    largest_kl: float,
    rollout_of_row: Tensor | None = None,
) -> Tensor:
    """(B,) bool: rollouts whose tokens are, on average, close enough to the actor to be trained on.

    The distance of a token is the binary KL, in nats, from the policy that sampled it to the actor: of "this token"
    against "any other", p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    Args:
        actor_logprobs, rollout_logprobs: (B, T).
        action_mask: (B, T) bool.
        largest_kl: Largest mean over a rollout's action tokens.
        rollout_of_row: (B,) int, which rollout a row belongs to; None says that each row is a rollout.

    Raises:
        ValueError: Shapes that do not fit, a recorded log-prob that is not finite, or a limit not above 0.

    Source: FlashREINFORCE; the direction is ours.
    """
    check_shapes(action_mask=action_mask, actor_logprobs=actor_logprobs, rollout_logprobs=rollout_logprobs)
    if not 0 < largest_kl < float("inf"):
        raise ValueError(f"the largest binary KL of a rollout is {largest_kl}; it must be above 0")
    log_ratio = _log_ratio(actor_logprobs, rollout_logprobs, action_mask).double()
    p = torch.where(action_mask, rollout_logprobs.to(log_ratio.device), 0.0).double().exp().clamp(max=1.0)
    q = torch.where(action_mask, actor_logprobs.detach(), 0.0).double().exp().clamp(max=1.0)
    # Where p is 1 the second term is 0; where q is 1 and p is not, it is as large as a log-ratio gets.
    others = torch.where(p < 1, ((1 - p) / (1 - q)).log().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
    distance = torch.where(action_mask, (1 - p) * others - p * log_ratio, 0.0)
    member_of = torch.arange(len(action_mask), device=action_mask.device)
    if rollout_of_row is not None:
        member_of = rollout_of_row.to(action_mask.device).unique(return_inverse=True)[1]
    sums, tokens = distance.sum(1), action_mask.sum(1).double()
    totals = torch.zeros(len(action_mask), 2, dtype=torch.float64, device=action_mask.device)
    totals = totals.index_add(0, member_of, torch.stack([sums, tokens], 1))[member_of]
    return totals[:, 0] <= largest_kl * totals[:, 1]


def check_band(ratio_low: float, ratio_high: float, *, names: str = "the bounds on the ratio") -> None:
    """Raise ValueError, which calls the bounds by `names`, unless 0 <= ratio_low < 1 < ratio_high < exp(20)."""
    if not 0 <= ratio_low < 1 < ratio_high < 4.8e8:
        raise ValueError(
            f"{names} are ({ratio_low}, {ratio_high}); they must enclose 1. They bound the ratio itself: for "
            "epsilons (0.3, 5.0) give 0.7 and 6.0"
        )


def _log_ratio(
    actor_logprobs: Tensor,
    other: Tensor,
    action_mask: Tensor,
    *,
    other_name: str = "rollout_logprobs",
    require_finite: bool = True,
) -> Tensor:
    """Clamped log-ratio, 0 off the mask. An actor log-prob of NaN stays NaN, so that the trainer sees it.

    `require_finite` refuses other log-probs that are not finite: recorded ones must be, the trainer's own may not.
    """
    other = torch.where(action_mask, other.detach().to(actor_logprobs.device), 0.0)
    if require_finite and not torch.isfinite(other).all():
        row, token = (int(i) for i in (~torch.isfinite(other)).nonzero()[0])
        found = float(other[row, token])
        raise ValueError(f"{other_name} of row {row}, token {token} is {found}; it must be finite")
    actor = torch.where(action_mask, _at_least_float32(actor_logprobs), 0.0).clamp(min=MIN_LOGPROB)
    other = _at_least_float32(other).clamp(min=MIN_LOGPROB)
    return (actor - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _weighted_log_likelihood(
    weight: Tensor, advantages: Tensor, actor_logprobs: Tensor, kept: Tensor, denominator: float | Tensor
) -> Tensor:
    # Every factor is selected before the product: 0 times a log-prob of -inf is NaN.
    weight = torch.where(kept, weight, 0.0)
    advantages = torch.where(kept, advantages.detach(), 0.0)
    logprobs = torch.where(kept, _at_least_float32(actor_logprobs), 0.0)
    return -(weight * advantages * logprobs / _denominator(denominator, kept)).sum()


def _clipped_loss(
    actor_logprobs: Tensor,
    rollout_logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    clip: tuple[float, float],
    band: tuple[float, float] = (0.0, float("inf")),
    denominator: float | Tensor,
) -> tuple[Tensor, PolicyDiagnostics]:
    """- sum k min(u A, clip(u) A) / denominator; u = actor / proximal; k = proximal / rollout, 0 outside the band."""
    proximal = (actor_logprobs if proximal_logprobs is None else proximal_logprobs).detach()
    log_ratio = _log_ratio(actor_logprobs, rollout_logprobs, action_mask)
    u = _log_ratio(actor_logprobs, proximal, action_mask, require_finite=False).exp()
    k = _log_ratio(proximal, rollout_logprobs, action_mask).exp()
    outside_low, outside_high = k < band[0], k > band[1]
    k = torch.where(outside_low | outside_high, 0.0, k)
    advantages = torch.where(action_mask, advantages.detach(), 0.0)
    surrogate = torch.minimum(u * advantages, u.clamp(*clip) * advantages)
    surrogate = torch.where(action_mask, k * surrogate, 0.0)
    loss = -(surrogate / _denominator(denominator, action_mask)).sum()
    low, high = outside_low | (u < clip[0]) & (advantages < 0), outside_high | (u > clip[1]) & (advantages > 0)
    return loss, policy_diagnostics(log_ratio, action_mask, removed_low=low, removed_high=high)


def _denominator(denominator: float | Tensor, mask: Tensor) -> float | Tensor:
    if isinstance(denominator, Tensor):
        spread = torch.where(mask, denominator.to(mask.device), 1.0)
        if spread.shape != mask.shape:
            raise ValueError(f"denominator {tuple(denominator.shape)} does not broadcast to {tuple(mask.shape)}")
        if not (spread > 0).all():
            raise ValueError(f"the smallest denominator is {float(spread.min())}; it must be above 0")
        return spread
    if not 0 < denominator < float("inf"):
        raise ValueError(f"denominator is {denominator}; give the action tokens of the whole batch, above 0")
    return denominator


def _at_least_float32(array: Tensor) -> Tensor:
    return array.to(torch.promote_types(array.dtype, torch.float32))
