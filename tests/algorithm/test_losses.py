"""Losses: numbers worked by hand, gradients, and the ways others got them wrong."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.algorithm.losses import (
    check_band,
    decoupled_ppo_policy_loss,
    dis_policy_loss,
    icepop_policy_loss,
    ppo_clip_policy_loss,
    reinforce_policy_loss,
    trajectory_mean_denominator,
    value_loss,
)

dis = partial(dis_policy_loss, ratio_low=0.7, ratio_high=6.0)
ppo = partial(ppo_clip_policy_loss, clip_ratio_low=0.8, clip_ratio_high=1.28)
decoupled = partial(decoupled_ppo_policy_loss, clip_ratio_low=0.8, clip_ratio_high=1.28)
icepop = partial(icepop_policy_loss, ratio_low=0.5, ratio_high=5.0, clip_ratio_low=0.8, clip_ratio_high=1.28)
POLICY_LOSSES = {"dis": dis, "none": reinforce_policy_loss, "ppo": ppo, "decoupled": decoupled, "icepop": icepop}


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def tokens(logprobs, ratios, advantages):
    """One row of action tokens with the given actor log-probs and ratios, as the four arguments of a loss."""
    actor = row(*logprobs).requires_grad_()
    return actor, actor.detach() - row(*ratios).log(), row(*advantages), torch.ones(1, len(logprobs)).bool()


def gradient(loss, actor):
    return torch.autograd.grad(loss, actor)[0][0].tolist()


def random_batch(seed, rows=4, length=9, spread=1.0):
    """(B, T) float64 arguments with ratios on both sides of every band, and an action in every row."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, rows, length, generator=generator, dtype=torch.float64)
    actor, action_mask = -draw().abs() - 0.05, draw() > -0.3
    action_mask[:, -1] = True
    return actor, actor - spread * draw(), draw(), action_mask


# -------------------------------------------------------------------------------------------------------------- DIS


def test_dis_by_hand():
    """Catches a clamp where a mask was meant, a mean over kept tokens only (2.5) and the literal gradient."""
    actor, rollout, advantages, actions = tokens([-1, -0.5, -2, -0.1, -3], [0.7, 0.9, 5.9, 6, 1], [1, -2, 0.5, 3, 1])
    rollout = rollout + row(1e-6, 0, 0, -1e-6, 0)
    actions[0, 4] = False
    loss, sums = dis(actor, rollout, advantages, actions, denominator=4)
    assert loss.item() == pytest.approx(1.25, abs=1e-6)
    assert gradient(loss, actor) == pytest.approx([0, 0.45, -0.7375, 0, 0], abs=1e-6)
    assert (sums.tokens, sums.masked_low, sums.masked_high) == (4, 1, 1)


def test_band_is_open_and_does_not_depend_on_the_sign_of_the_advantage():
    """Catches >= for >, and PPO's one-sided rule: just inside passes, just outside does not, for both signs."""
    low, high, nudge = 0.7, 6.0, 1e-6
    ratios = [low * (1 - nudge), low * (1 + nudge), high * (1 - nudge), high * (1 + nudge)]
    for sign in (1.0, -1.0):
        actor, *rest = tokens([-1.0] * 4, ratios, [sign] * 4)
        loss, _ = dis(actor, *rest, denominator=1)
        assert gradient(loss, actor) == pytest.approx([0, -sign * ratios[1], -sign * ratios[2], 0])


def test_a_ratio_exactly_on_a_bound_is_rejected():
    """Catches a closed band: the bounds are taken from the ratios themselves, so that they are equal bit for bit."""
    actor, rollout, advantages, actions = tokens([-1.0] * 3, [0.7, 1.0, 6.0], [1.0] * 3)
    low, _, high = (actor.detach() - rollout).exp()[0].tolist()
    loss, sums = dis_policy_loss(actor, rollout, advantages, actions, ratio_low=low, ratio_high=high, denominator=1)
    assert gradient(loss, actor) == pytest.approx([0, -1, 0])
    assert (sums.masked_low, sums.masked_high) == (1, 1)


def test_bounds_are_bounds_not_epsilons():
    """Catches epsilons taken for bounds: (0.3, 5.0) as epsilons would keep 5.5; epsilons of PPO's size are refused."""
    actor, *rest = tokens([-1.0, -1.0], [0.5, 5.5], [1.0, 1.0])
    assert gradient(dis(actor, *rest, denominator=1)[0], actor) == pytest.approx([0, -5.5])
    with pytest.raises(ValueError, match=r"\(0.2, 0.28\).*must enclose 1"):
        dis_policy_loss(actor, *rest, ratio_low=0.2, ratio_high=0.28, denominator=1)
    for bounds in ((-0.1, 2.0), (1.0, 2.0), (0.5, 1.0), (0.5, math.inf), (math.nan, 2.0)):
        with pytest.raises(ValueError, match="must enclose 1"):
            check_band(*bounds)


@pytest.mark.parametrize("logprob", [-0.1, -0.99, -1.01, -2.0, -9.0])
def test_rewarded_tokens_are_pushed_up_also_when_rare(logprob):
    """Catches the literal derivative - r A (1 + log pi): it pushes rewarded tokens under probability 0.368 down."""
    actor, *rest = tokens([logprob], [1.5], [1.0])
    assert gradient(dis(actor, *rest, denominator=1)[0], actor) == pytest.approx([-1.5])
    literal, _ = dis(actor, *rest, denominator=1, detach_ratio=False)
    assert gradient(literal, actor) == pytest.approx([-1.5 * (1 + logprob)])


@given(st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_two_spellings_of_dis_give_one_gradient_inside_the_band(seed):
    """Catches a wrong weight: - sg(r) A log pi and the surrogate - r A have the same gradient."""
    actor, rollout, advantages, actions = random_batch(seed, spread=0.04)
    actor.requires_grad_()
    loss, sums = dis(actor, rollout, advantages, actions, denominator=7)
    assert sums.masked_low + sums.masked_high == 0
    surrogate = -((actor - rollout).exp() * advantages * actions).sum() / 7
    first, second = (torch.autograd.grad(value, actor)[0] for value in (loss, surrogate))
    torch.testing.assert_close(first, second)


def test_on_policy_dis_is_reinforce():
    """Catches a correction that does something where nothing is to be corrected."""
    actor, _, advantages, actions = random_batch(3)
    actor.requires_grad_()
    first = torch.autograd.grad(dis(actor, actor.detach(), advantages, actions, denominator=5)[0], actor)[0]
    second = torch.autograd.grad(
        reinforce_policy_loss(actor, actor.detach(), advantages, actions, denominator=5)[0], actor
    )[0]
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(second, torch.where(actions, -advantages / 5, 0.0))


@pytest.mark.parametrize("detach", [True, False])
def test_gradcheck_through_the_softmax(detach):
    """Catches a gradient that autograd does not agree with, where the band cuts nothing and where it cuts."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(4, (2, 5, 1), generator=generator)
    start = logits.detach().log_softmax(-1).gather(-1, ids)[..., 0]
    rollout = start - 2 * torch.randn(2, 5, generator=generator, dtype=torch.float64)
    advantages, actions = torch.randn(2, 5, generator=generator, dtype=torch.float64), torch.ones(2, 5).bool()
    ratio = (start - rollout).exp()
    kept = (ratio > 0.7) & (ratio < 6.0)
    assert kept.any()
    assert not kept.all()

    def logprobs(values):
        return values.log_softmax(-1).gather(-1, ids)[..., 0]

    def literal(values):
        return dis(logprobs(values), rollout, advantages, actions, denominator=10, detach_ratio=False)[0]

    if not detach:
        assert torch.autograd.gradcheck(literal, (logits,))
        return
    # Detached: the same as differentiating with the weights fixed at this point.
    fixed = torch.where(kept, ratio, 0.0)
    frozen = partial(lambda values: -(fixed * advantages * logprobs(values)).sum() / 10)
    assert torch.autograd.gradcheck(frozen, (logits,))
    loss, _ = dis(logprobs(logits), rollout, advantages, actions, denominator=10)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(frozen(logits), logits)[0])


# ------------------------------------------------------------------------------------------------- every policy loss


@pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=POLICY_LOSSES)
def test_nothing_off_the_mask_is_read(loss):
    """Catches inf times 0: NaN at padding or at observations must not reach loss, gradient or diagnostics."""
    actor, rollout, advantages, actions = random_batch(5)
    results = []
    for filler in (0.0, math.nan, -math.inf):
        dirty = [torch.where(actions, array, filler) for array in (actor, rollout, advantages)]
        dirty[0].requires_grad_()
        value, sums = loss(*dirty, actions, denominator=11)
        results.append((value.item(), torch.autograd.grad(value, dirty[0])[0].tolist(), sums.summary()))
    assert results[0] == results[1] == results[2]
    assert math.isfinite(results[0][0])


@pytest.mark.parametrize("name", ["dis", "ppo", "decoupled", "icepop"])
def test_extreme_ratios_stay_finite(name):
    """Catches exp overflow times mask 0: log-probs of -inf and log-ratios of +-500."""
    actor = torch.tensor([[-math.inf, -0.1, -600.0, -0.5]], requires_grad=True)
    rollout = torch.tensor([[-1.0, -600.0, -0.1, -0.5]])
    value, sums = POLICY_LOSSES[name](actor, rollout, torch.ones(1, 4), torch.ones(1, 4).bool(), denominator=4)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(actor.grad).all()
    assert actor.grad[0, 3] == pytest.approx(-0.25)
    if name == "dis":
        assert (sums.masked_low, sums.masked_high) == (2, 1)
        assert actor.grad[0, :3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=POLICY_LOSSES)
def test_recorded_logprob_that_is_not_finite_is_refused(loss):
    """Catches training on a log-prob that the engine never had; an actor's NaN is left for the trainer to see."""
    actor, rollout, advantages, actions = random_batch(6)
    for bad in (math.nan, math.inf, -math.inf):
        rollout[1, -1] = bad
        with pytest.raises(ValueError, match=r"rollout_logprobs of row 1, token 8 is .*; it must be finite"):
            loss(actor, rollout, advantages, actions, denominator=4)
    rollout[1, -1] = -1.0
    actor[1, -1] = math.nan
    assert math.isnan(loss(actor, rollout, advantages, actions, denominator=4)[0])


@pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=POLICY_LOSSES)
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(1, 35), max_size=6))
@settings(max_examples=15, deadline=None)
def test_micro_batches_add_up(loss, seed, cuts):
    """Catches a mean per micro-batch: any packing must give the batch's loss, gradient and sums."""
    actor, rollout, advantages, actions = random_batch(seed)
    actor.requires_grad_()
    weights = torch.rand(4, generator=torch.Generator().manual_seed(seed)) * 20 + 1
    for denominator in (float(actions.sum()), weights[:, None].expand(4, 9)):
        whole, sums = loss(actor, rollout, advantages, actions, denominator=denominator)
        expected = torch.autograd.grad(whole, actor)[0]
        packed = [array.reshape(1, -1) for array in (actor, rollout, advantages, actions)]
        edges = sorted({0, 36, *cuts})
        total, gradients, parts = 0.0, torch.zeros_like(actor), None
        for start, end in itertools.pairwise(edges):
            share = denominator if isinstance(denominator, float) else denominator.reshape(1, -1)[:, start:end]
            value, part = loss(*(array[:, start:end] for array in packed), denominator=share)
            gradients += torch.autograd.grad(value, actor, retain_graph=True)[0]
            total += value.item()
            parts = part if parts is None else parts + part
        assert total == pytest.approx(whole.item(), abs=1e-9)
        torch.testing.assert_close(gradients, expected)
        assert parts.summary() == pytest.approx(sums.summary())


@pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=POLICY_LOSSES)
def test_micro_batch_without_a_kept_token_gives_zero(loss):
    """Catches 0/0 in a micro-batch of observations, or of rejected tokens, only."""
    actor, rollout, advantages, actions = random_batch(7)
    actor.requires_grad_()
    value, sums = loss(actor, rollout, advantages, torch.zeros_like(actions), denominator=30)
    assert value.item() == 0
    assert not torch.autograd.grad(value, actor)[0].any()
    assert sums.summary() == {}
    value, sums = dis(actor, actor.detach() + 5, advantages, actions, denominator=30)
    assert value.item() == 0
    assert sums.masked_low == sums.tokens


@pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=POLICY_LOSSES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"denominator": 0}, "denominator is 0"),
        ({"denominator": math.nan}, "denominator is nan"),
        ({"denominator": torch.zeros(1, 1)}, "smallest denominator is 0"),
        ({"advantages": torch.zeros(3)}, r"advantages has shape \(3,\)"),
        ({"rollout_logprobs": torch.zeros(1, 2)}, "rollout_logprobs has shape"),
        ({"action_mask": torch.ones(1, 3)}, "must be bool"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(loss, change, message):
    """Catches broadcasting of (3,) over (1, 3), masks of numbers, and a division by zero."""
    arguments = {
        "actor_logprobs": torch.zeros(1, 3),
        "rollout_logprobs": torch.zeros(1, 3),
        "advantages": torch.zeros(1, 3),
        "action_mask": torch.ones(1, 3).bool(),
        "denominator": 3,
    }
    with pytest.raises(ValueError, match=message):
        loss(**(arguments | change))


def test_half_precision_log_probs_are_computed_in_float32():
    """Catches ratios in bfloat16, whose steps of 0.8 % move tokens across the band."""
    actor = torch.full((1, 2), -1.0, dtype=torch.bfloat16, requires_grad=True)
    rollout = actor.detach().float() - math.log(1.001)
    loss, sums = dis(actor, rollout, torch.ones(1, 2), torch.ones(1, 2).bool(), denominator=2)
    assert loss.dtype == torch.float32
    assert sums.ratio_max == pytest.approx(1.001, abs=1e-6)


def test_advantages_get_no_gradient():
    """Catches a critic trained through the policy loss."""
    actor, rollout, advantages, actions = random_batch(8)
    advantages.requires_grad_()
    actor.requires_grad_()
    for loss in POLICY_LOSSES.values():
        value, _ = loss(actor, rollout, advantages, actions, denominator=4)
        assert torch.autograd.grad(value, advantages, allow_unused=True, retain_graph=True)[0] is None


# ------------------------------------------------------------------------------------------ the comparison losses


def test_ppo_clip_by_hand():
    """Catches a two-sided mask in PPO, whose clip acts only where the ratio has gone the advantage's way."""
    ratios, advantages = [0.5, 0.5, 1.1, 2.0, 2.0], [1, -1, 1, 1, -1]
    actor, *rest = tokens([-1.0] * 5, ratios, advantages)
    loss, sums = ppo(actor, *rest, denominator=5)
    assert loss.item() == pytest.approx(-(0.5 - 0.8 + 1.1 + 1.28 - 2.0) / 5)
    assert gradient(loss, actor) == pytest.approx([-0.1, 0, -0.22, 0, 0.4])
    assert (sums.masked_low, sums.masked_high) == (1, 1)


def test_icepop_by_hand():
    """Catches an open band (IcePop's is closed), a clamp, and a gradient through the mismatch."""
    actor, *rest = tokens([-2.0] * 4, [0.49, 0.6, 4.9, 5.1], [1, -1, 1, 1])
    loss, sums = icepop(actor, *rest, denominator=4)
    assert gradient(loss, actor) == pytest.approx([0, 0.15, -1.225, 0])
    assert (sums.masked_low, sums.masked_high) == (1, 1)
    proximal = actor.detach() - row(0.0, math.log(0.5), math.log(2.0), 0.0)
    loss, _ = icepop(actor, *rest, denominator=4, proximal_logprobs=proximal)
    # Token 1: mismatch 0.6 * 0.5, below the band. Token 2: u = 2 with A > 0 is clipped. Nothing is left.
    assert gradient(loss, actor) == pytest.approx([0, 0, 0, 0])


def test_decoupled_ppo_by_hand():
    """Catches the two ratios swapped. In the first update u = 1 and only the weight is left."""
    actor, *rest = tokens([-2.0] * 3, [2.0, 0.1, 9.0], [1, 1, -1])
    assert gradient(decoupled(actor, *rest, denominator=1)[0], actor) == pytest.approx([-2.0, -0.1, 9.0])
    proximal = actor.detach() - row(1.1, 1.1, 0.5).log()
    loss, _ = decoupled(actor, *rest, denominator=1, proximal_logprobs=proximal)
    # u = 1.1 passes: k u = r. u = 0.5 with A < 0 is clipped.
    assert gradient(loss, actor) == pytest.approx([-2.0, -0.1, 0.0])


# ---------------------------------------------------------------------------------------------------- denominators


def test_trajectory_mean_weighs_rollouts_alike():
    """Catches long rollouts that dominate: two of 1 and 4 tokens, each token's gradient 1/2 and 1/8."""
    actions = torch.tensor([[True, False, False, False], [True] * 4])
    actor = torch.full((2, 4), -1.0, requires_grad=True)
    share = trajectory_mean_denominator(actions.sum(1), num_trajectories=2)
    loss, _ = dis(actor, actor.detach(), torch.ones(2, 4), actions, denominator=share)
    assert torch.autograd.grad(loss, actor)[0].tolist() == [[-0.5, 0, 0, 0], [-0.125] * 4]
    with pytest.raises(ValueError, match="want"):
        trajectory_mean_denominator(actions.sum(1)[:, None], num_trajectories=2)


# ------------------------------------------------------------------------------------------------------- the critic


def test_value_loss_by_hand():
    """Catches a missing 0.5, padding that counts, and a wrong sign: (0 - 1)^2 and (2 - 0)^2 halved over 2."""
    values, returns = row(0, 9, 2).requires_grad_(), row(1, -9, 0)
    actions = torch.tensor([[True, False, True]])
    loss = value_loss(values, returns, actions, denominator=2)
    assert loss.item() == pytest.approx(1.25)
    assert gradient(loss, values) == pytest.approx([-0.5, 0, 1.0])


def test_value_loss_trains_and_is_not_a_mean_of_means():
    """Catches detached values, and averaging per micro-batch, which changes the gradient several-fold with packing."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(1, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    returns = torch.randn(1, 12, generator=generator, dtype=torch.float64)
    actions = torch.ones(1, 12).bool()
    whole = torch.autograd.grad(value_loss(values, returns, actions, denominator=12), values)[0]
    assert whole.abs().min() > 0
    for cut in (1, 5, 11):
        parts = [
            value_loss(values[:, part], returns[:, part], actions[:, part], denominator=12)
            for part in (slice(0, cut), slice(cut, 12))
        ]
        torch.testing.assert_close(torch.autograd.grad(parts[0] + parts[1], values)[0], whole)
    assert torch.autograd.gradcheck(partial(value_loss, denominator=12), (values, returns, actions))


def test_value_clip_by_hand():
    """Catches the smaller of the two squares: from 0 to 1 with clip 0.2, return 2 keeps the larger error."""
    values, start, actions = row(1.0, 0.1, 3.0).requires_grad_(), row(0, 0, 0), torch.ones(1, 3).bool()
    loss = value_loss(values, row(2, 2, 2), actions, denominator=1, clip=0.2, initial_values=start)
    assert loss.item() == pytest.approx(0.5 * (1.8**2 + 1.9**2 + 1.8**2))
    assert gradient(loss, values) == pytest.approx([0, -1.9, 0])
    with pytest.raises(ValueError, match="needs initial_values"):
        value_loss(values, row(2, 2, 2), actions, denominator=1, clip=0.2)
    with pytest.raises(ValueError, match="clip is 0"):
        value_loss(values, row(2, 2, 2), actions, denominator=1, clip=0.0, initial_values=start)


def test_value_loss_ignores_what_is_off_the_mask():
    """Catches NaN at observation tokens, where the critic was never asked."""
    values, returns = row(0, math.nan, 2).requires_grad_(), row(1, math.inf, 0)
    loss = value_loss(values, returns, torch.tensor([[True, False, True]]), denominator=2)
    assert gradient(loss, values) == pytest.approx([-0.5, 0, 1.0])
