"""FlashREINFORCE's gate on whole rollouts: numbers worked by hand."""

import math

import pytest
import torch

from sao.algorithm.losses import sequence_gate

NAN = math.nan
ROLLOUT = torch.tensor([[0.5, 0.3, NAN], [0.25, 0.3, NAN], [0.9, NAN, 0.9]]).log()
ACTOR = torch.tensor([[0.25, 0.3, NAN], [0.5, 0.3, NAN], [0.9, NAN, 0.9]]).log()
MASK = ~ROLLOUT.isnan()
FORWARD = (0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2
"""Mean binary KL of the first row: one token of 0.5 that the actor gives 0.25, and one that did not change."""
BACKWARD = (0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2
"""Of the second row, whose two policies are the other way round; smaller than the first row's."""


def gate(limit: float, rollout_of_row: torch.Tensor | None = None) -> list[bool]:
    return sequence_gate(ACTOR, ROLLOUT, MASK, largest_kl=limit, rollout_of_row=rollout_of_row).tolist()


def test_gate_by_hand() -> None:
    """Catches KL(actor || rollout) for KL(rollout || actor), a sum for the mean, and observations that are counted."""
    assert BACKWARD < FORWARD
    assert gate(FORWARD + 1e-6) == [True, True, True]
    assert gate(FORWARD - 1e-6) == [False, True, True]
    assert gate(BACKWARD - 1e-6) == [False, False, True]


def test_rows_of_one_rollout_go_together() -> None:
    """Catches a side branch that is trained on without its rollout, and a mean of means."""
    together = torch.tensor([7, 3, 7])
    limit = 2 * FORWARD / 4  # rows 0 and 2: four tokens, of which one differs
    assert gate(limit + 1e-6, together) == [True, False, True]
    assert gate(limit - 1e-6, together) == [False, False, False]


def test_probabilities_at_their_ends() -> None:
    """Catches 0 times infinity where a policy is certain."""
    rollout, actor = torch.tensor([[0.0], [math.log(0.5)], [math.log(0.5)]]), torch.tensor([[0.0], [0.0], [-math.inf]])
    kept = sequence_gate(actor, rollout, torch.ones(3, 1, dtype=torch.bool), largest_kl=1.0)
    assert kept.tolist() == [True, False, False]
    with pytest.raises(ValueError, match="binary KL of a rollout is 0"):
        gate(0)
