"""Advantages: numbers worked by hand, identities, and the ways others got them wrong."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.algorithm.advantages import (
    action_span,
    discounted_suffix_sums,
    fold_rewards,
    group_centred,
    group_normalised,
    leave_one_out,
    length_adaptive_lambda,
    moments,
    num_steps,
    observation_inclusive_gae,
    skip_observation_gae,
    step_gae,
    whiten,
)


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def mask(*bits):
    return torch.tensor([bits]).bool()


def close(result, *expected):
    torch.testing.assert_close(result, row(*expected).to(result.dtype), atol=1e-6, rtol=0)


def plain_gae(rewards, values, gamma, lam, bootstrap=0.0):
    """The textbook loop over one row, in Python floats: nothing in common with the code under test."""
    advantages, following, advantage = [], bootstrap, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        advantages.append(advantage)
    return advantages[::-1]


@st.composite
def batches(draw):
    """A random batch (B, T) with an action token in every row, rewards on action tokens."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    action_mask = torch.rand(rows, length, generator=generator) < draw(st.floats(0.1, 1.0))
    action_mask[torch.arange(rows), torch.randint(length, (rows,), generator=generator)] = True
    values = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    rewards = torch.randn(rows, length, generator=generator, dtype=torch.float64) * action_mask
    gamma, lam = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    return rewards, values, action_mask, gamma, lam


# ---------------------------------------------------------------------------------------------- skip-observation


def test_values_worked_by_hand_with_an_observation_in_the_middle():
    """Catches a recursion that steps through the tool output (it gives 0.380439 at token 0)."""
    rewards, values, actions = row(0, 0, 0, 0, 1), row(0.5, 9, -9, 0.25, 0.75), mask(1, 0, 0, 1, 1)
    advantages, returns = skip_observation_gae(rewards, values, actions, gamma=1.0, lam=0.95)
    close(advantages, 0.450625, 0, 0, 0.7375, 0.25)
    close(returns, 0.950625, 0, 0, 0.9875, 1.0)
    naive, _ = observation_inclusive_gae(rewards, values, actions, gamma=1.0, lam=0.95)
    close(naive, 0.380439375, 0, 0, 0.7375, 0.25)


def test_token_before_an_observation_is_not_terminal():
    """Catches V = 0 after an action's last token: delta of token 1 is 0.7 - (-0.3) = 1.0 there, not 0.3."""
    rewards, values, actions = row(0, 0, 0, 0, 0, 1), row(0.5, -0.3, 9, -9, 0.7, 0.2), mask(1, 1, 0, 0, 1, 1)
    close(skip_observation_gae(rewards, values, actions, gamma=1.0, lam=0.95)[0], 0.38465, 1.247, 0, 0, 0.26, 0.8)
    close(skip_observation_gae(rewards, values, actions, gamma=1.0, lam=0.0)[0], -0.8, 1.0, 0, 0, -0.5, 0.8)


def test_lambda_0_is_one_step_and_gamma_0_is_the_reward_alone():
    """Catches gamma and lambda swapped."""
    rewards, values, actions = row(1, 0, 5), row(1, 2, 3), mask(1, 1, 1)
    close(skip_observation_gae(rewards, values, actions, gamma=1.0, lam=0.0)[0], 2, 1, 2)
    close(skip_observation_gae(rewards, values, actions, gamma=0.5, lam=0.0)[0], 1, -0.5, 2)
    close(skip_observation_gae(rewards, values, actions, gamma=0.0, lam=1.0)[0], 0, -2, 2)


@given(batches())
@settings(max_examples=60, deadline=None)
def test_equals_plain_gae_on_the_collapsed_rows(batch):
    """Catches any error of gathering, scattering or the scan: each row must be the textbook loop over its actions."""
    rewards, values, actions, gamma, lam = batch
    bootstrap = values[:, 0] * 3
    advantages, returns = skip_observation_gae(rewards, values, actions, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for i, chosen in enumerate(actions):
        expected = plain_gae(rewards[i][chosen].tolist(), values[i][chosen].tolist(), gamma, lam, float(bootstrap[i]))
        assert advantages[i][chosen].tolist() == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(returns[actions], (advantages + values)[actions])
    assert not advantages[~actions].any()
    assert not returns[~actions].any()


@given(batches())
@settings(max_examples=40, deadline=None)
def test_observation_values_do_not_matter(batch):
    """Catches reading V off the action tokens, where it may be anything, NaN included."""
    rewards, values, actions, gamma, lam = batch
    first = skip_observation_gae(rewards, values, actions, gamma=gamma, lam=lam)
    second = skip_observation_gae(rewards, torch.where(actions, values, math.nan), actions, gamma=gamma, lam=lam)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@given(batches())
@settings(max_examples=40, deadline=None)
def test_without_observations_the_naive_form_is_the_same(batch):
    """Catches a difference between the two forms that is not about observations."""
    rewards, values, actions, gamma, lam = batch
    everywhere = torch.ones_like(actions)
    skip = skip_observation_gae(rewards, values, everywhere, gamma=gamma, lam=lam)
    naive = observation_inclusive_gae(rewards, values, everywhere, gamma=gamma, lam=lam)
    assert torch.equal(skip[0], naive[0])
    assert torch.equal(skip[1], naive[1])


def test_one_terminal_reward_is_every_tokens_return_at_131072_tokens():
    """Catches rounding in the recursion: with lambda = gamma = 1 the critic's target is the reward itself."""
    length = 131072
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(2, length, generator=generator) < 0.6
    actions[:, -1] = True
    rewards = torch.zeros(2, length)
    rewards[:, -1] = torch.tensor([1.0, 0.25])
    values = torch.rand(2, length, generator=generator)
    _, returns = skip_observation_gae(rewards, values, actions, gamma=1.0, lam=1.0)
    assert returns.dtype == torch.float32
    assert (returns - rewards[:, -1:])[actions].abs().max() < 1e-4


def test_length_adaptive_lambda_reaches_its_limit_at_131072_tokens():
    """Catches lambda kept in a narrow dtype: it would be 1, and the first token's advantage the whole reward."""
    length = 131072
    rewards = torch.zeros(1, length)
    rewards[0, -1] = 1.0
    lam = length_adaptive_lambda(torch.tensor([length]), alpha=1.5)
    actions = torch.ones(1, length, dtype=torch.bool)
    advantages, _ = skip_observation_gae(rewards, torch.zeros(1, length), actions, gamma=1.0, lam=lam)
    assert float(advantages[0, 0]) == pytest.approx(math.exp(-1 / 1.5), abs=1e-4)


def test_lambda_per_row_is_not_broadcast_over_rows():
    """Catches a (B, 1) lambda that broadcasts to (B, B); it is refused, and (B,) is taken row by row."""
    rewards, values = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.zeros(2, 2)
    actions = torch.ones(2, 2, dtype=torch.bool)
    lam = torch.tensor([0.5, 0.75])
    advantages, _ = skip_observation_gae(rewards, values, actions, gamma=1.0, lam=lam)
    assert advantages[:, 0].tolist() == [0.5, 0.75]
    with pytest.raises(ValueError, match=r"lam has shape \(2, 1\)"):
        skip_observation_gae(rewards, values, actions, gamma=1.0, lam=lam[:, None])


def test_bootstrap_reaches_the_last_action_token_only():
    """Catches a bootstrap put on the padding or on a trailing observation."""
    actions = mask(0, 1, 0, 1, 0, 0)
    values = row(7, 0.5, 7, 0.25, 7, 7)
    boot = torch.tensor([2.0])
    close(
        skip_observation_gae(torch.zeros(1, 6), values, actions, gamma=1.0, lam=0.0, bootstrap=boot)[0],
        0, -0.25, 0, 1.75, 0, 0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="bootstrap has shape"):
        skip_observation_gae(torch.zeros(1, 6), values, actions, gamma=1.0, lam=0.0, bootstrap=boot[:, None])


def test_reward_on_a_trailing_observation_reaches_the_action_before_it():
    """Catches the reward written on the last attended token: masked out, it silently never arrives."""
    actions = mask(0, 1, 1, 0, 0)
    close(fold_rewards(row(0, 0, 0, 0, 1), actions), 0, 0, 1, 0, 0)
    close(fold_rewards(row(0, 0.5, 0, 2, 1), actions), 0, 0.5, 3, 0, 0)
    _, returns = skip_observation_gae(row(0, 0, 0, 0, 1), torch.zeros(1, 5), actions, gamma=1.0, lam=1.0)
    close(returns.double(), 0, 1, 1, 0, 0)


@pytest.mark.parametrize("gae", [skip_observation_gae, observation_inclusive_gae])
def test_bad_rewards_are_refused(gae):
    """Catches a reward that is dropped or poisons the batch: before any action, and NaN."""
    values, actions = torch.zeros(1, 3), mask(0, 1, 1)
    with pytest.raises(ValueError, match=r"reward 1.0 of row 0, token 0 comes before"):
        gae(row(1, 0, 0), values, actions, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"reward of row 0, token 2 is nan"):
        gae(row(0, 0, math.nan), values, actions, gamma=1.0, lam=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(1, 2)}, "values has shape"),
        ({"rewards": torch.zeros(3)}, "rewards has shape"),
        ({"action_mask": torch.ones(1, 3)}, "must be bool"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lam": 1.5}, "lam is 1.5"),
        ({"lam": math.nan}, "lam is nan"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    """Catches silent broadcasting and settings out of range."""
    arguments = {
        "rewards": torch.zeros(1, 3),
        "values": torch.zeros(1, 3),
        "action_mask": mask(0, 1, 1),
        "gamma": 1.0,
        "lam": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        skip_observation_gae(**(arguments | change))


def test_row_without_actions_is_zero_and_results_carry_no_gradient():
    """Catches a row of observations only that breaks the batch, and targets that train the critic by accident."""
    values = torch.ones(2, 3, requires_grad=True)
    actions = torch.tensor([[False] * 3, [False, True, True]])
    advantages, returns = skip_observation_gae(
        torch.zeros(2, 3), values, actions, gamma=1.0, lam=0.9, bootstrap=torch.ones(2)
    )
    assert not advantages[0].any()
    assert not returns[0].any()
    assert not advantages.requires_grad
    assert not returns.requires_grad


@given(st.integers(1, 70), st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_scan_equals_the_loop_and_ignores_padding(length, decay, seed):
    """Catches a scan that is right for powers of two only, or that changes with padding."""
    array = torch.randn(1, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = plain_gae(array[0].tolist(), [0.0] * length, 1.0, decay)
    rates = torch.tensor([decay], dtype=torch.float64)
    sums = discounted_suffix_sums(array, rates)
    assert sums[0].tolist() == pytest.approx(expected, abs=1e-9)
    wide = discounted_suffix_sums(torch.nn.functional.pad(array, (0, 13)), rates)
    assert torch.equal(wide[:, :length], sums)


# -------------------------------------------------------------------------------------------- length-adaptive


def test_length_adaptive_lambda_by_hand():
    """Catches another formula, and VAPO's negative lambda below 20 tokens."""
    lengths = torch.tensor([1, 2, 3, 10, 1000])
    expected = torch.tensor([1 / 3, 2 / 3, 7 / 9, 14 / 15, 1499 / 1500], dtype=torch.float64)
    torch.testing.assert_close(length_adaptive_lambda(lengths, alpha=1.5), expected)
    vapo = length_adaptive_lambda(torch.tensor([10, 19, 20, 40]), alpha=0.05)
    torch.testing.assert_close(vapo, torch.tensor([0.0, 0.0, 0.0, 0.5], dtype=torch.float64))


@pytest.mark.parametrize(
    ("lengths", "alpha", "message"),
    [([3, 0], 1.5, "row 1 has 0 action tokens"), ([[3]], 1.5, r"give one count per row"), ([3], 0.0, "alpha is 0.0")],
)
def test_length_adaptive_lambda_refuses(lengths, alpha, message):
    """Catches a division by zero that would be clamped to a plausible lambda."""
    with pytest.raises(ValueError, match=message):
        length_adaptive_lambda(torch.tensor(lengths), alpha=alpha)


# ------------------------------------------------------------------------------ observation-inclusive, step level


def test_observation_inclusive_keeps_observation_targets_only_on_request():
    """Catches a straw man: V at observation tokens must be trainable, towards the return from there."""
    rewards, values, actions = row(0, 0, 0, 0, 1, 0), row(3, 0.5, 0.25, 0.25, 0.75, 9), mask(0, 1, 0, 0, 1, 0)
    _, returns = observation_inclusive_gae(rewards, values, actions, gamma=1.0, lam=1.0)
    close(returns, 0, 1, 0, 0, 1, 0)
    _, returns = observation_inclusive_gae(rewards, values, actions, gamma=1.0, lam=1.0, keep_observations=True)
    close(returns, 0, 1, 1, 1, 1, 0)
    assert action_span(actions).tolist() == [[False, True, True, True, True, False]]
    assert not action_span(mask(0, 0)).any()


def test_step_level_by_hand():
    """Catches a step's value, reward or advantage taken from the wrong tokens. Steps: tokens 1, 2 and tokens 4, 5."""
    rewards, values = row(0, 0, 0, 0.5, 0, 1), row(9, 0.2, 0.4, 9, 0.6, 0.8)
    actions, turns = mask(0, 1, 1, 0, 1, 1), torch.tensor([[0, 0, 0, 1, 1, 1]])
    common = {"gamma": 1.0, "lam": 0.5}
    # Means 0.3 and 0.7, rewards 0.5 and 1: A_1 = 1 - 0.7; A_0 = 0.5 + 0.7 - 0.3 + 0.5 * 0.3.
    advantages, returns = step_gae(rewards, values, actions, turns, **common, step_value="mean")
    close(advantages, 0, 1.05, 1.05, 0, 0.3, 0.3)
    close(returns, 0, 1.35, 1.35, 0, 1.0, 1.0)
    # Last tokens 0.4 and 0.8: A_1 = 0.2; A_0 = 0.5 + 0.8 - 0.4 + 0.5 * 0.2.
    advantages, returns = step_gae(rewards, values, actions, turns, **common, step_value="last")
    close(advantages, 0, 1.0, 1.0, 0, 0.2, 0.2)
    close(returns, 0, 1.4, 1.4, 0, 1.0, 1.0)
    boot = torch.tensor([1.0])
    advantages, _ = step_gae(rewards, values, actions, turns, **common, step_value="last", bootstrap=boot)
    close(advantages, 0, 1.5, 1.5, 0, 1.2, 1.2)
    assert num_steps(turns, actions).tolist() == [2]
    assert num_steps(turns, mask(0, 0, 0, 0, 0, 0)).tolist() == [0]


@given(batches())
@settings(max_examples=40, deadline=None)
def test_steps_of_one_token_are_tokens(batch):
    """Catches a step level that differs where a step is one token, in rows of unequal length."""
    rewards, values, actions, gamma, lam = batch
    turns = torch.arange(actions.shape[1]).expand_as(actions)
    token = skip_observation_gae(rewards, values, actions, gamma=gamma, lam=lam)
    for step_value in ("mean", "last"):
        step = step_gae(rewards, values, actions, turns, gamma=gamma, lam=lam, step_value=step_value)
        torch.testing.assert_close(step[0], token[0])
        torch.testing.assert_close(step[1], token[1])


@given(batches())
@settings(max_examples=40, deadline=None)
def test_one_terminal_reward_is_every_return_in_every_form(batch):
    """Catches a form that loses the outcome reward on its way to the critic."""
    rewards, values, actions, _, _ = batch
    rewards = torch.zeros_like(rewards)
    rewards[:, -1] = 0.75
    folded = fold_rewards(rewards, actions)
    expected = torch.where(actions, 0.75, 0.0).double()
    turns = (torch.arange(actions.shape[1]) // 3).expand_as(actions)
    for _, returns in (
        skip_observation_gae(folded, values, actions, gamma=1.0, lam=1.0),
        observation_inclusive_gae(folded, values, actions, gamma=1.0, lam=1.0),
        step_gae(folded, values, actions, turns, gamma=1.0, lam=1.0, step_value="mean"),
        step_gae(folded, values, actions, turns, gamma=1.0, lam=1.0, step_value="last"),
    ):
        torch.testing.assert_close(returns, expected)


def test_step_level_refuses_what_does_not_fit():
    """Catches turns of another shape, and an unknown way to value a step."""
    arguments = (torch.zeros(1, 2), torch.zeros(1, 2), mask(0, 1))
    with pytest.raises(ValueError, match="turns has shape"):
        step_gae(*arguments, torch.zeros(2), gamma=1.0, lam=1.0, step_value="mean")
    with pytest.raises(ValueError, match="step_value is 'first'"):
        step_gae(*arguments, torch.zeros(1, 2), gamma=1.0, lam=1.0, step_value="first")


# ------------------------------------------------------------------------------------------- groups and whitening


def test_group_baselines_by_hand():
    """Catches groups mixed up when members arrive out of order, and the wrong divisor."""
    rewards, groups = torch.tensor([1.0, 5.0, 0.0, 5.0, 1.0]), torch.tensor([7, 3, 7, 3, 7])
    torch.testing.assert_close(group_centred(rewards, groups), torch.tensor([1 / 3, 0, -2 / 3, 0, 1 / 3]))
    torch.testing.assert_close(leave_one_out(rewards, groups), torch.tensor([0.5, 0, -1, 0, 0.5]))
    deviation = math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2)
    expected = torch.tensor([1 / 3, 0, -2 / 3, 0, 1 / 3]) / deviation
    torch.testing.assert_close(group_normalised(rewards, groups), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("baseline", [group_normalised, group_centred, leave_one_out])
def test_group_of_one_is_refused(baseline):
    """Catches a lost member that turns a group baseline into NaN, or into no baseline."""
    with pytest.raises(ValueError, match="group 4 has one member"):
        baseline(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1, 1, 4]))


def test_whitening_is_over_action_tokens_of_the_batch():
    """Catches statistics that count padding, and results that are not 0 off actions."""
    advantages, actions = row(9, 1, 3, 9, 5), mask(0, 1, 1, 0, 1)
    both = torch.cat([advantages, -advantages]), torch.cat([actions, actions])
    white, done = whiten(*both, rewards=torch.tensor([1.0, 0.0]))
    assert done
    assert moments(white, both[1]) == pytest.approx((0.0, 1.0), abs=1e-9)
    assert not white[~both[1]].any()


def test_constant_reward_batch_is_not_whitened():
    """Catches critic noise blown up to unit variance: gradient norm 804 in a prototype."""
    noise, actions = torch.tensor([[0.001, -0.001], [0.002, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    white, done = whiten(noise, actions, rewards=torch.tensor([[0.0, 1.0], [0.7, 0.3]]))
    assert not done
    assert torch.equal(white, noise)
    white, done = whiten(noise, actions, rewards=torch.tensor([1.0, 0.0]))
    assert done
    assert white.abs().max() < 0.02, "the floor of 0.1 holds the scale"
    with pytest.raises(ValueError, match="floor"):
        whiten(noise, actions, rewards=torch.tensor([1.0, 0.0]), floor=0.0)


def test_equal_rewards_are_judged_by_rollout():
    """Catches rows compared instead of rollouts: a side branch of reward 0 beside its rollout's reward of 1."""
    noise, actions = torch.tensor([[0.01], [0.02], [0.5]]), torch.ones(3, 1, dtype=torch.bool)
    rewards, rollout_of_row = torch.tensor([[1.0], [0.0], [1.0]]), torch.tensor([0, 0, 1])
    white, done = whiten(noise, actions, rewards=rewards, rollout_of_row=rollout_of_row)
    assert not done
    assert torch.equal(white, noise)
    assert whiten(noise, actions, rewards=rewards)[1]
    # Two rollouts whose rows are all equal, one with a branch more.
    assert whiten(noise, actions, rewards=torch.ones(3), rollout_of_row=rollout_of_row)[1]
    with pytest.raises(ValueError, match=r"rollout_of_row has shape \(2,\); give one per row, \(3,\)"):
        whiten(noise, actions, rewards=rewards, rollout_of_row=rollout_of_row[:2])
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\); give one per row, \(3,\)"):
        whiten(noise, actions, rewards=torch.ones(2))


def test_arrays_of_other_shapes_are_refused_by_the_small_functions_too():
    """Catches a decay of (B, 1) that broadcasts to (B, B), and a mask that indexes an array of another shape."""
    actions = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"array has shape \(2, 3\), decay \(2, 1\)"):
        discounted_suffix_sums(torch.ones(2, 3), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"array has shape \(2, 3, 4\), the action mask \(2, 3\)"):
        moments(torch.ones(2, 3, 4), actions)
    with pytest.raises(ValueError, match=r"turns has shape \(3,\), the action mask \(2, 3\)"):
        num_steps(torch.ones(3), actions)
    with pytest.raises(ValueError, match=r"rewards has shape \(2, 1\), the action mask \(2, 3\)"):
        fold_rewards(torch.ones(2, 1), actions)
    with pytest.raises(ValueError, match=r"action_mask is torch.float32 \(2, 3\)"):
        action_span(torch.ones(2, 3))
