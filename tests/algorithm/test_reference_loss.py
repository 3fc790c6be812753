"""The pull towards a reference policy: numbers worked by hand, and the divergence whose gradient it has."""

import math

import pytest
import torch

from sao.algorithm.losses import reference_loss


def test_by_hand() -> None:
    """Catches a mean for the sum, the factor one half forgotten, and observations that are pulled."""
    actor = torch.tensor([[0.5, 0.2, 0.9]]).log().requires_grad_()
    reference = torch.tensor([[0.25, 0.4, 0.1]]).log()
    mask = torch.tensor([[True, True, False]])
    loss = reference_loss(actor, reference, mask, denominator=4)
    assert loss.item() == pytest.approx(0.5 * (math.log(2) ** 2 + math.log(2) ** 2) / 4)
    loss.backward()
    assert actor.grad is not None
    assert torch.allclose(actor.grad, torch.tensor([[math.log(2) / 4, -math.log(2) / 4, 0.0]]))


def test_its_expected_gradient_is_that_of_the_divergence() -> None:
    """Catches the estimator whose gradient is that of KL(reference || actor) instead."""
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    expected = torch.zeros_like(wanted)
    mask = torch.ones(1, 1, dtype=torch.bool)
    for token in range(3):
        loss = reference_loss(policy[None, token : token + 1], reference[None, token : token + 1], mask, denominator=1)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        expected += policy[token].detach().exp() * gradient
    assert torch.allclose(expected, wanted)


def test_what_is_refused() -> None:
    """Catches shapes that broadcast, a denominator of 0, and a fault of the reference that is laid on the rollouts."""
    one, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="reference_logprobs has shape"):
        reference_loss(one, torch.zeros(1, 1), mask, denominator=1)
    with pytest.raises(ValueError, match="denominator is 0"):
        reference_loss(one, one, mask, denominator=0)
    with pytest.raises(ValueError, match="reference_logprobs of row 0, token 1 is nan"):
        reference_loss(one, torch.tensor([[0.0, math.nan]]), mask, denominator=1)
