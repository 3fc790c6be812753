"""Diagnostics: numbers worked by hand, and what must not be reported as a number."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.algorithm.diagnostics import (
    PolicyDiagnostics,
    explained_variance,
    policy_diagnostics,
    quarters,
    ratio_quantiles,
)

ALL = torch.ones(1, 4).bool()


def test_explained_variance_by_hand():
    """Catches Var(V)/Var(R), a correlation squared, and a bias counted as error: V = R + 1 explains all."""
    returns = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert explained_variance(returns + 1, returns, ALL) == pytest.approx(1.0)
    assert explained_variance(returns / 2, returns, ALL) == pytest.approx(0.75)
    assert explained_variance(-returns, returns, ALL) == pytest.approx(-3.0)
    assert explained_variance(torch.zeros(1, 4), returns, ALL) == pytest.approx(0.0)


def test_explained_variance_is_undefined_when_all_returns_are_equal():
    """Catches an all-equal batch reported as 0, or as -1e12 because of rounding in the returns."""
    values = torch.tensor([[0.1, 0.9, 0.3, 0.7]])
    assert explained_variance(values, torch.ones(1, 4), ALL) is None
    assert explained_variance(values, torch.ones(1, 4) + 1e-7 * values, ALL) is None
    assert explained_variance(values, values, torch.tensor([[True, False, False, False]])) is None
    assert explained_variance(values, values, torch.zeros(1, 4).bool()) is None


def test_explained_variance_is_over_action_tokens():
    """Catches statistics that count observations or padding."""
    actions = torch.tensor([[True, True, False, False]])
    values, returns = torch.tensor([[0.0, 1.0, math.nan, 5.0]]), torch.tensor([[0.0, 1.0, 0.0, math.inf]])
    assert explained_variance(values, returns, actions) == pytest.approx(1.0)


def test_summary_by_hand():
    """Catches a wrong sign in k3, shares of kept tokens, and an effective sample size that is a count."""
    log_ratio = torch.tensor([[1.0, 2.0, 0.5, 9.0]]).log()
    actions = torch.tensor([[True, True, True, False]])
    low = torch.tensor([[False, False, True, True]])
    sums = policy_diagnostics(log_ratio, actions, removed_low=low, removed_high=~low)
    assert replace(sums, entropy_sum=6.0).summary() == pytest.approx(
        {
            "masked_low_share": 1 / 3,
            "masked_high_share": 2 / 3,
            "ratio_mean": 3.5 / 3,
            "ratio_max": 2.0,
            "k3_kl": (0 + (1 - math.log(2)) + (-0.5 + math.log(2))) / 3,
            "effective_sample_size": 3.5**2 / (3 * 5.25),
            "entropy": 2.0,
        }
    )


def test_nothing_is_reported_without_action_tokens_or_without_entropy():
    """Catches 0/0, and an entropy of 0 where none was measured (it would look like collapse)."""
    none = torch.zeros(1, 4).bool()
    assert policy_diagnostics(torch.zeros(1, 4), none, removed_low=none, removed_high=none) == PolicyDiagnostics()
    assert PolicyDiagnostics().summary() == {}
    assert "entropy" not in policy_diagnostics(torch.zeros(1, 4), ALL, removed_low=none, removed_high=none).summary()


@given(st.integers(0, 2**31), st.integers(1, 11))
@settings(max_examples=30, deadline=None)
def test_k3_is_never_negative_and_sums_add_up(seed, cut):
    """Catches the k1 estimate, and maxima that are added."""
    log_ratio = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    actions, low, high = torch.ones(1, 12).bool(), log_ratio < -0.3, log_ratio > 1
    every, first, second = (
        replace(
            policy_diagnostics(
                log_ratio[:, part], actions[:, part], removed_low=low[:, part], removed_high=high[:, part]
            ),
            entropy_sum=float(log_ratio[:, part].abs().sum()),
        )
        for part in (slice(0, 12), slice(0, cut), slice(cut, 12))
    )
    assert every.summary()["k3_kl"] >= 0
    assert (first + second + PolicyDiagnostics()).summary() == pytest.approx(every.summary())


def test_ratio_quantiles_by_hand():
    """Catches quantiles of the log, and positions off by one at the ends."""
    ratios = torch.tensor([[4.0, 1.0, 0.5, 2.0, 99.0]])
    actions = torch.tensor([[True, True, True, True, False]])
    found = ratio_quantiles(ratios.log(), torch.zeros(1, 5), actions, (0.0, 0.25, 0.5, 0.99, 1.0))
    assert found == pytest.approx([0.5, 1.0, 2.0, 4.0, 4.0])
    assert ratio_quantiles(ratios.log(), torch.zeros(1, 5), torch.zeros(1, 5).bool(), (0.5,)) == []


def test_arrays_of_other_shapes_are_refused():
    """Catches values of (B, T, 1), or one row short, that a mask happens to index: a number of something else."""
    good, flat, wide = torch.zeros(2, 3), torch.zeros(2, 3, 1), torch.zeros(1, 3)
    actions = torch.ones(2, 3).bool()
    for bad in (flat, wide):
        shapes = re.escape(f"{tuple(bad.shape)}, the action mask (2, 3)")
        for call in (
            lambda bad=bad: explained_variance(bad, good, actions),
            lambda bad=bad: explained_variance(good, bad, actions),
            lambda bad=bad: ratio_quantiles(bad, good, actions, (0.5,)),
            lambda bad=bad: ratio_quantiles(good, bad, actions, (0.5,)),
            lambda bad=bad: policy_diagnostics(bad, actions, removed_low=actions, removed_high=actions),
        ):
            with pytest.raises(ValueError, match=shapes):
                call()
    with pytest.raises(ValueError, match="must be bool"):
        explained_variance(good, good, good)
    with pytest.raises(ValueError, match=r"quantiles are \(1.5,\)"):
        ratio_quantiles(good, good, actions, (1.5,))


def test_quarters_by_hand() -> None:
    """Catches quarters of the padded row instead of its action tokens, and a token in two of them or in none."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0, 0, 0], [0] * 8]).bool()
    first, second, third, fourth = (part.int().tolist() for part in quarters(mask))
    assert first == [[0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0], [0] * 8]
    assert second == [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], [0] * 8, [0] * 8]
    assert third == [[0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0], [0] * 8, [0] * 8]
    assert fourth == [[0, 0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1], [0] * 8, [0] * 8]
