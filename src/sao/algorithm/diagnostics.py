"""What to look at while training: pure functions and sums that add up over micro-batches.

Axes: B rows, T tokens; entry t is about token t. Everything is over action tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sao.algorithm.checks import check_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDiagnostics:
    """Sums over action tokens. `a + b` is what one call over both parts would have given."""

    tokens: float = 0.0
    """Action tokens, rejected ones included."""
    masked_low: float = 0.0
    """Tokens whose gradient the loss removed because the ratio was too small."""
    masked_high: float = 0.0
    """Tokens whose gradient the loss removed because the ratio was too large."""
    ratio_sum: float = 0.0
    """Of actor probability / rollout probability."""
    ratio_square_sum: float = 0.0
    """Of the ratio squared, for the effective sample size."""
    ratio_max: float = 0.0
    """Largest ratio; 0 before there is a token."""
    k3_sum: float = 0.0
    """Of ratio - 1 - log ratio, an estimate of KL(rollout || actor) in nats that is never negative."""
    entropy_sum: float = 0.0
    """Of the actor's entropy in nats; NaN if it was not given."""

    def __add__(self, other: "PolicyDiagnostics") -> "PolicyDiagnostics":
        """Sums of both parts; the larger of the two maxima."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return PolicyDiagnostics(**(sums | {"ratio_max": max(self.ratio_max, other.ratio_max)}))

    def summary(self) -> dict[str, float]:
        """Shares and means by metric name; empty if there was no action token.

        `effective_sample_size` is (sum r)^2 / (n * sum r^2), a share: 1 on policy.
        """
        if not self.tokens:
            return {}
        summary = {
            "masked_low_share": self.masked_low / self.tokens,
            "masked_high_share": self.masked_high / self.tokens,
            "ratio_mean": self.ratio_sum / self.tokens,
            "ratio_max": self.ratio_max,
            "k3_kl": self.k3_sum / self.tokens,
            "effective_sample_size": self.ratio_sum**2 / (self.tokens * self.ratio_square_sum),
        }
        return summary if math.isnan(self.entropy_sum) else summary | {"entropy": self.entropy_sum / self.tokens}


@torch.no_grad()
def policy_diagnostics(
    log_ratio: Tensor, action_mask: Tensor, *, removed_low: Tensor, removed_high: Tensor
) -> PolicyDiagnostics:
    """Sums for one micro-batch, the entropy's excepted; arrays (B, T), `log_ratio` = actor minus rollout log-prob.

    The rest is bool. Raises ValueError for shapes that do not fit.
    """
    check_shapes(action_mask=action_mask, log_ratio=log_ratio, removed_low=removed_low, removed_high=removed_high)
    chosen = log_ratio[action_mask].double()
    if not chosen.numel():
        return PolicyDiagnostics()
    ratio = chosen.exp()
    sums = [
        action_mask.sum().double(),
        (removed_low & action_mask).sum().double(),
        (removed_high & action_mask).sum().double(),
        ratio.sum(),
        ratio.square().sum(),
        ratio.max(),
        (ratio - 1 - chosen).sum(),
        chosen.new_tensor(math.nan),
    ]
    names = [field.name for field in fields(PolicyDiagnostics)]
    return PolicyDiagnostics(**dict(zip(names, torch.stack(sums).tolist(), strict=True)))


@torch.no_grad()
def ratio_quantiles(
    actor_logprobs: Tensor, rollout_logprobs: Tensor, action_mask: Tensor, quantiles: Sequence[float]
) -> list[float]:
    """Quantiles (each in [0, 1]) of actor probability / rollout probability; empty list without action tokens.

    Arrays are (B, T). Quantiles do not add up over micro-batches: call this once, with the whole batch. Raises
    ValueError for shapes that do not fit, or a quantile outside [0, 1].
    """
    check_shapes(action_mask=action_mask, actor_logprobs=actor_logprobs, rollout_logprobs=rollout_logprobs)
    if not all(0 <= quantile <= 1 for quantile in quantiles):
        raise ValueError(f"quantiles are {tuple(quantiles)}; each must be in [0, 1]")
    log_ratio = (actor_logprobs[action_mask].double() - rollout_logprobs[action_mask].double()).sort().values
    if not log_ratio.numel():
        return []
    places = [min(int(quantile * len(log_ratio)), len(log_ratio) - 1) for quantile in quantiles]
    return log_ratio[places].exp().tolist()


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, action_mask: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns) over action tokens.

    Arrays are (B, T). None where it is undefined: no two tokens, or all returns equal. It may be far below 0. Raises
    ValueError for shapes that do not fit. Source: SAO figure 5.
    """
    check_shapes(action_mask=action_mask, values=values, returns=returns)
    chosen = returns[action_mask].double()
    if chosen.numel() < 2 or float(chosen.max() - chosen.min()) <= 1e-6 * max(1.0, float(chosen.abs().max())):
        return None
    residual = chosen - values[action_mask].double()
    return 1.0 - float(residual.var(correction=0) / chosen.var(correction=0))


@torch.no_grad()
def quarters(action_mask: Tensor) -> list[Tensor]:
    """The mask (B, T) of action tokens in four: the first quarter of each row's action tokens, to the last.

    Raises ValueError for a mask of another shape or type.
    """
    check_shapes(action_mask=action_mask)
    place = action_mask.cumsum(dim=1) - 1
    count = action_mask.sum(dim=1, keepdim=True).clamp(min=1)
    quarter = (4 * place).div(count, rounding_mode="floor")
    return [action_mask & (quarter == index) for index in range(4)]
