"""Advantages and returns: pure functions, tensors and scalars in, tensors out.

Axes: B rows (one row is one rollout's continued sequences laid end to end), T tokens, L action tokens of the longest
row, S steps of the longest row. Entry t of a (B, T) array is about token t: values[t] was read before token t, and
rewards[t] arrived with it. `action_mask` is bool and true where the policy sampled the token. Padding is off the mask.

Everything is computed in float64; results are float32 (float64 if the values are), 0 off action tokens, and carry no
gradient. Not-finite values go through to the results, where the trainer's check of the gradient finds them.
"""

from typing import Literal

import torch
from torch import Tensor

from sao.algorithm.checks import check_shapes

AdvantageName = Literal["skip_observation", "observation_inclusive", "step_mean", "step_last", "given"]
"""What a configuration calls the forms of GAE below; given: a baseline's numbers instead."""


def length_adaptive_lambda(num_action_tokens: Tensor, *, alpha: float) -> Tensor:
    """Lambda of the actor's GAE: max(0, 1 - 1 / (alpha * l)).

    Args:
        num_action_tokens: (B,) l, action tokens of each rollout (over all its sequences).
        alpha: Above 0. 1.5 in SAO, where lambda^l tends to 0.513; 0.05 in VAPO, where it tends to 2e-9.

    Returns:
        (B,) float64: at l = 131072 a bfloat16 lambda would be 1.

    Raises:
        ValueError: Not of shape (B,), a rollout without action tokens, or alpha not above 0.

    Source: SAO section 3 and VAPO (arXiv 2504.05118); the clamp, which alpha < 1 needs, is ours.
    """
    if num_action_tokens.ndim != 1:
        raise ValueError(f"num_action_tokens has shape {tuple(num_action_tokens.shape)}; give one count per row, (B,)")
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}; it must be above 0")
    if (num_action_tokens < 1).any():
        row = int((num_action_tokens < 1).nonzero()[0])
        raise ValueError(f"row {row} has {int(num_action_tokens[row])} action tokens; leave such rollouts out")
    return (1.0 - 1.0 / (alpha * num_action_tokens.double())).clamp(min=0.0)


@torch.no_grad()
def skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE over action tokens only: credit flows from an action's last token to the next action's first.

    Args:
        rewards: (B, T). A reward off the action tokens belongs to the action token before it.
        values: (B, T). Off the action tokens never read.
        action_mask: (B, T) bool.
        gamma: Discount per action token, in [0, 1].
        lam: A number or (B,), in [0, 1].
        bootstrap: (B,) value beyond the last action token, 0 where the environment ended the rollout; None is 0.

    Returns:
        advantages, returns: (B, T). returns = advantages + values of this `lam`: take the critic's targets from a call
        with the critic's lambda.

    Raises:
        ValueError: Shapes that do not fit, a reward before the first action token or not finite, gamma or lam out of
            range.

    Source: SAO equations 4 and 5.
    """
    _check(rewards, values, action_mask, gamma)
    folded = fold_rewards(rewards, action_mask)
    advantages = _token_gae(folded, values, action_mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    return _results(advantages, values, action_mask)


@torch.no_grad()
def observation_inclusive_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
    keep_observations: bool = False,
) -> tuple[Tensor, Tensor]:
    """The naive form, for the ablation: every token from the first to the last action token is a step.

    Arguments and errors as in `skip_observation_gae`, but values are read at the observation tokens between actions.
    With `keep_observations` the results are also given at those tokens (where `action_span` is true), so that a critic
    can be trained there; else they are 0 there.
    """
    _check(rewards, values, action_mask, gamma)
    span = action_span(action_mask)
    folded = fold_rewards(rewards, action_mask)
    advantages = _token_gae(folded, values, span, gamma=gamma, lam=lam, bootstrap=bootstrap)
    return _results(advantages, values, span if keep_observations else action_mask)


@torch.no_grad()
def step_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    turns: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    step_value: Literal["mean", "last"],
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE over steps: one step is one turn's action tokens, and all of them get its advantage and its return.

    Arguments and errors as in `skip_observation_gae`, and:
        turns: (B, T) int, equal for action tokens of one step; a new step starts where it changes.
        step_value: The value of a step is the mean of its tokens' values, or its last token's.
        gamma: Discount per step.

    Source: SAO's ablation of the step level.
    """
    _check(rewards, values, action_mask, gamma)
    check_shapes(action_mask=action_mask, turns=turns)
    if step_value not in ("mean", "last"):
        raise ValueError(f'step_value is {step_value!r}; it is "mean" or "last"')
    is_token = _compact(action_mask, action_mask)
    step = _steps(turns, action_mask)
    token_values = _compact(values.double(), action_mask)
    num_steps = (step.amax(1) + 1) * is_token.any(1)
    empty = token_values.new_zeros(len(step), int(num_steps.max()) if num_steps.numel() else 0)
    step_rewards = empty.scatter_add(1, step, _compact(fold_rewards(rewards, action_mask), action_mask))
    if step_value == "mean":
        tokens = empty.scatter_add(1, step, is_token.double())
        step_values = empty.scatter_add(1, step, token_values) / tokens.clamp(min=1.0)
    else:
        ends = is_token.clone()
        ends[:, :-1] &= ~is_token[:, 1:] | (step[:, 1:] != step[:, :-1])
        step_values = empty.scatter_add(1, step, torch.where(ends, token_values, 0.0))
    advantages = _gae(step_rewards, step_values, num_steps, gamma=gamma, lam=lam, bootstrap=bootstrap)
    values_of_step = _scatter(step_values.gather(1, step), action_mask)
    return _results(_scatter(advantages.gather(1, step), action_mask), values_of_step.to(values.dtype), action_mask)


def num_steps(turns: Tensor, action_mask: Tensor) -> Tensor:
    """(B,) steps of each row as `step_gae` counts them: l of its length-adaptive lambda.

    Raises ValueError for shapes that do not fit.
    """
    check_shapes(action_mask=action_mask, turns=turns)
    return (_steps(turns, action_mask).amax(1) + 1) * action_mask.any(1)


def action_span(action_mask: Tensor) -> Tensor:
    """(B, T) bool: the tokens from the first to the last action token of each row, observations included.

    Raises ValueError for a mask that is not bool (B, T).
    """
    check_shapes(action_mask=action_mask)
    started = action_mask.long().cumsum(1) > 0
    unfinished = action_mask.long().flip(1).cumsum(1).flip(1) > 0
    return started & unfinished


def fold_rewards(rewards: Tensor, action_mask: Tensor) -> Tensor:
    """(B, T) float64: each reward on its action token, those off the mask added to the action token before them.

    Raises ValueError for shapes that do not fit, and for a reward that is not finite, or that no action token
    precedes. Source: ours.
    """
    check_shapes(action_mask=action_mask, rewards=rewards)
    if not torch.isfinite(rewards).all():
        row, token = (int(i) for i in (~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"reward of row {row}, token {token} is {float(rewards[row, token])}; it must be finite")
    positions = torch.arange(action_mask.shape[1], device=action_mask.device).expand_as(action_mask)
    owner = torch.where(action_mask, positions, -1).cummax(1).values
    orphans = (owner < 0) & (rewards != 0)
    if orphans.any():
        row, token = (int(i) for i in orphans.nonzero()[0])
        raise ValueError(
            f"reward {float(rewards[row, token])} of row {row}, token {token} comes before the row's first action "
            "token; put it on the action token that earned it"
        )
    rewards = rewards.double()
    return torch.zeros_like(rewards).scatter_add(1, owner.clamp(min=0), rewards)


@torch.no_grad()
def group_normalised(rewards: Tensor, group_ids: Tensor, *, floor: float = 1e-6) -> Tensor:
    """(B,) of GRPO: reward minus its group's mean, divided by its group's standard deviation plus `floor`.

    `rewards` (B,) one per rollout, `group_ids` (B,) int. The deviation is the sample's (n - 1). Members of a group of
    equal rewards get 0. Raises ValueError for a group of one. Source: arXiv 2402.03300.
    """
    mean, count, member_of = _group_means(rewards, group_ids)
    centred = rewards.double() - mean[member_of]
    variance = torch.zeros_like(mean).scatter_add(0, member_of, centred.square()) / (count - 1)
    return (centred / (variance.sqrt()[member_of] + floor)).to(_result_dtype(rewards))


@torch.no_grad()
def group_centred(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) reward minus its group's mean, no division. As `group_normalised` else. Source: arXiv 2503.20783."""
    mean, _, member_of = _group_means(rewards, group_ids)
    return (rewards.double() - mean[member_of]).to(_result_dtype(rewards))


@torch.no_grad()
def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) reward minus the mean of the group's other members. Else as `group_normalised`. Source: arXiv 2402.14740."""
    mean, count, member_of = _group_means(rewards, group_ids)
    scale = (count / (count - 1))[member_of]
    return ((rewards.double() - mean[member_of]) * scale).to(_result_dtype(rewards))


@torch.no_grad()
def moments(array: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and standard deviation (n, not n - 1) of array (B, T) over mask (B, T); (0, 0) if the mask is empty.

    Raises ValueError for shapes that do not fit.
    """
    check_shapes(action_mask=mask, array=array)
    chosen = array[mask].double()
    if not chosen.numel():
        return 0.0, 0.0
    return float(chosen.mean()), float(chosen.std(correction=0))


@torch.no_grad()
def whiten(
    advantages: Tensor,
    action_mask: Tensor,
    *,
    rewards: Tensor,
    rollout_of_row: Tensor | None = None,
    floor: float = 0.1,
) -> tuple[Tensor, bool]:
    """Shift and scale the batch's advantages to mean 0 and deviation 1 over its action tokens.

    Args:
        advantages: (B, T).
        action_mask: (B, T) bool.
        rewards: (B,) or (B, T) rewards of the rows. If all rollouts' sums are equal the advantages are returned as they
            came: what is left in them is the critic's noise.
        rollout_of_row: (B,) int, which rollout a row belongs to, for rollouts with side branches; None says that each
            row is a rollout.
        floor: The divisor is at least this, so that a nearly constant batch is not blown up.

    Returns:
        (B, T) advantages, 0 off actions, and whether they were whitened.

    Raises:
        ValueError: Shapes that do not fit, or a floor not above 0.

    Source: ours; the paper does not mention whitening.
    """
    check_shapes(action_mask=action_mask, advantages=advantages)
    rows = action_mask.shape[:1]
    if rewards.shape not in (rows, action_mask.shape):
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; give one per row, {tuple(rows)}, or (B, T)")
    if rollout_of_row is not None and rollout_of_row.shape != rows:
        raise ValueError(f"rollout_of_row has shape {tuple(rollout_of_row.shape)}; give one per row, {tuple(rows)}")
    if not floor > 0:
        raise ValueError(f"the floor of the standard deviation is {floor}; it must be above 0")
    sums = rewards.double() if rewards.ndim == 1 else rewards.double().sum(1)
    acted = action_mask.any(1)
    if rollout_of_row is not None:
        names, member_of = rollout_of_row.unique(return_inverse=True)
        sums = torch.zeros_like(names, dtype=torch.float64).scatter_add(0, member_of, sums)
        acted = torch.zeros_like(names).scatter_add(0, member_of, acted.to(names.dtype)) > 0
    zero = torch.zeros_like(advantages)
    if not action_mask.any() or _all_equal(sums[acted]):
        return torch.where(action_mask, advantages, zero), False
    mean, deviation = moments(advantages, action_mask)
    return torch.where(action_mask, (advantages - mean) / max(deviation, floor), zero), True


def discounted_suffix_sums(array: Tensor, decay: Tensor) -> Tensor:
    """(B, S) y with y[s] = x[s] + decay * y[s + 1], for one decay in [0, 1] per row, (B,).

    After n passes an entry holds the sum over a window of 2^n entries, so a row of 131072 takes 17 passes. There is no
    division, and padding a row with zeros on the right leaves it the same bit for bit. Raises ValueError for shapes
    that do not fit.
    """
    if array.ndim != 2 or decay.shape != array.shape[:1]:
        raise ValueError(f"array has shape {tuple(array.shape)}, decay {tuple(decay.shape)}; give (B, S) and (B,)")
    sums = array.clone()
    power = decay.to(array.dtype)[:, None]
    window = 1
    while window < array.shape[1] and bool(power.any()):
        sums[:, :-window] += power * sums[:, window:]
        power = power * power
        window *= 2
    return sums


def _token_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor, bootstrap: Tensor | None
) -> Tensor:
    """GAE (B, T) float64 whose steps are the tokens of `mask`: gather them, run plain GAE, scatter back."""
    step_rewards = _compact(rewards, mask)
    step_values = _compact(values.double(), mask)
    advantages = _gae(step_rewards, step_values, mask.sum(1), gamma=gamma, lam=lam, bootstrap=bootstrap)
    return _scatter(advantages, mask)


def _gae(
    rewards: Tensor, values: Tensor, num_steps: Tensor, *, gamma: float, lam: float | Tensor, bootstrap: Tensor | None
) -> Tensor:
    """Plain GAE (B, S) over each row's first `num_steps` entries; the rest of rewards and values is 0."""
    decay = gamma * _lambda_per_row(lam, values)
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    if bootstrap is not None:
        if bootstrap.shape != (len(values),):
            raise ValueError(f"bootstrap has shape {tuple(bootstrap.shape)}; give one value per row, ({len(values)},)")
        rows = (num_steps > 0).nonzero()[:, 0]
        next_values[rows, num_steps[rows] - 1] = bootstrap.double()[rows]
    return discounted_suffix_sums(rewards + gamma * next_values - values, decay)


def _compact(array: Tensor, mask: Tensor) -> Tensor:
    """(B, L): the entries of each row on the mask, moved to its start; 0 after them."""
    slots = mask.long().cumsum(1) - 1
    longest = int(mask.sum(1).max()) if mask.numel() else 0
    compact = array.new_zeros(len(mask), max(longest, 1))
    compact[mask.nonzero()[:, 0], slots[mask]] = array[mask]
    return compact


def _scatter(compact: Tensor, mask: Tensor) -> Tensor:
    """(B, T): the inverse of `_compact`, 0 off the mask."""
    slots = mask.long().cumsum(1) - 1
    spread = compact.new_zeros(mask.shape)
    spread[mask] = compact[mask.nonzero()[:, 0], slots[mask]]
    return spread


def _steps(turns: Tensor, action_mask: Tensor) -> Tensor:
    """(B, L) index of the step of each action token; after a row's last one its last step's."""
    compact = _compact(turns.long(), action_mask)
    is_token = _compact(action_mask, action_mask)
    starts = torch.zeros_like(compact)
    starts[:, 1:] = (compact[:, 1:] != compact[:, :-1]) & is_token[:, 1:]
    return starts.cumsum(1)


def _lambda_per_row(lam: float | Tensor, values: Tensor) -> Tensor:
    per_row = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    if per_row.ndim == 0:
        per_row = per_row.expand(len(values))
    if per_row.shape != (len(values),):
        raise ValueError(f"lam has shape {tuple(per_row.shape)}; give a number or one per row, ({len(values)},)")
    if not ((per_row >= 0) & (per_row <= 1)).all():
        raise ValueError(f"lam is {lam}; it must be in [0, 1]")
    return per_row


def _results(advantages: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    dtype = _result_dtype(values)
    advantages = torch.where(mask, advantages, 0.0)
    returns = torch.where(mask, advantages + values.double(), 0.0)
    return advantages.to(dtype), returns.to(dtype)


def _result_dtype(array: Tensor) -> torch.dtype:
    return torch.float64 if array.dtype == torch.float64 else torch.float32


def _group_means(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (G,) and size (G,) of each group, and the group (B,) of each rollout."""
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards and group_ids have shapes {tuple(rewards.shape)} and {tuple(group_ids.shape)}")
    names, member_of, count = group_ids.unique(return_inverse=True, return_counts=True)
    if (count < 2).any():
        lonely = int(names[count < 2][0])
        raise ValueError(f"group {lonely} has one member; a group baseline needs at least two")
    mean = torch.zeros(len(names), dtype=torch.float64, device=rewards.device)
    return mean.scatter_add(0, member_of, rewards.double()) / count, count.double(), member_of


def _all_equal(array: Tensor) -> bool:
    return not array.numel() or float(array.max() - array.min()) <= 1e-6 * max(1.0, float(array.abs().max()))


def _check(rewards: Tensor, values: Tensor, action_mask: Tensor, gamma: float) -> None:
    check_shapes(action_mask=action_mask, rewards=rewards, values=values)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must be in [0, 1]")
