"""Baselines without a critic: numbers worked by hand."""

import pytest
import torch

from sao.algorithm.baselines import batch_mean, beta_tracker_update, beta_tracker_value, running_mean


def test_batch_mean_by_hand():
    """Catches a leave-one-out mean, and rewards per token."""
    torch.testing.assert_close(batch_mean(torch.tensor([1.0, 0.0, 0.5])), torch.tensor([0.5, -0.5, 0.0]))
    with pytest.raises(ValueError, match="one per rollout"):
        batch_mean(torch.zeros(2, 2))


def test_running_mean_leaves_the_reward_out_of_its_own_baseline():
    """Catches a reward that shrinks its own advantage, and a division by zero at the start of a run."""
    assert running_mean(1.0, [0.0, 0.5]) == 0.75
    assert running_mean(1.0, []) == 0.5
    assert running_mean(1.0, [], start=0.2) == pytest.approx(0.8)


def test_beta_tracker_by_hand():
    """Catches the reward added before the shrinking, and a divergence that forgets without bound."""
    assert beta_tracker_value(3.0, 1.0) == 0.75
    assert beta_tracker_update(4.0, 4.0, 1.0, divergence=0.0) == pytest.approx((4.84, 3.84))
    assert beta_tracker_update(4.0, 4.0, 0.25, divergence=9.0) == pytest.approx((3.75, 4.25))
    kept = 2 ** (-0.006 / 0.06)
    assert beta_tracker_update(4.0, 4.0, 0.0, divergence=0.006) == pytest.approx((4 * kept, 4 * kept + 1))


def test_beta_tracker_refuses_what_is_no_count_or_share():
    """Catches rewards outside [0, 1], for which a Beta distribution means nothing."""
    with pytest.raises(ValueError, match="reward is -1"):
        beta_tracker_update(1.0, 1.0, -1, divergence=0.0)
    with pytest.raises(ValueError, match="divergence is -1"):
        beta_tracker_update(1.0, 1.0, 1.0, divergence=-1)
    with pytest.raises(ValueError, match="both must be"):
        beta_tracker_value(0.0, 0.0)
