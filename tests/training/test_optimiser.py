"""Learning rates by hand, and an optimiser that refuses what is not finite."""

import pytest
import torch
from torch import nn

from sao.training.optimiser import Optimiser, learning_rate


def make(module: nn.Module, *, clip: float = 1e9, decay: float = 0.0) -> Optimiser:
    return Optimiser(module.named_parameters(), betas=(0.9, 0.95), weight_decay=decay, grad_clip=clip)


def test_rates_by_hand():
    """A warm-up that starts at 0 and wastes an update, or a decay that never ends."""
    assert [learning_rate(8.0, step, warmup_steps=4) for step in range(6)] == [2, 4, 6, 8, 8, 8]
    linear = [learning_rate(8.0, step, warmup_steps=2, decay="linear", total_steps=6) for step in range(7)]
    assert linear == [4, 8, 8, 6, 4, 2, 0]
    cosine = [learning_rate(8.0, step, warmup_steps=0, decay="cosine", total_steps=4) for step in range(5)]
    assert cosine == pytest.approx([8, 6.8284271, 4, 1.1715729, 0])


def test_first_step_by_hand():
    """A rate that is not the one given: AdamW's first step is the rate times the gradient's sign."""
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0]]))
    optimiser = make(layer)
    (layer.weight * torch.tensor([[3.0, -4.0]])).sum().backward()
    outcome = optimiser.step(0.1)
    assert outcome.applied
    assert outcome.grad_norm == pytest.approx(5.0)
    assert layer.weight.tolist()[0] == pytest.approx([0.9, -1.9], abs=1e-6)
    assert layer.weight.grad is None


def test_clip_bounds_the_gradient_but_reports_its_norm():
    """A logged norm that is the clipped one, and hides an exploding gradient."""
    layer = nn.Linear(2, 1, bias=False)
    optimiser = make(layer, clip=1.0)
    (layer.weight * torch.tensor([[3.0, -4.0]])).sum().backward()
    assert optimiser.step(0.1).grad_norm == pytest.approx(5.0)
    assert optimiser.state()["weight.exp_avg"].tolist()[0] == pytest.approx([0.06, -0.08], rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float):
    """One NaN that ends in every weight, or in the moments, where it stays."""
    layer = nn.Linear(2, 2)
    optimiser = make(layer)
    layer(torch.ones(1, 2)).sum().backward()
    optimiser.step(0.1)
    before = {name: tensor.clone() for name, tensor in (layer.state_dict() | optimiser.state()).items()}
    layer(torch.tensor([[1.0, bad]])).sum().backward()
    assert not optimiser.step(0.1).applied
    after = layer.state_dict() | optimiser.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert layer.weight.grad is None


def test_small_steps_of_low_precision_weights_add_up():
    """A learning rate of 1e-6 on bfloat16 weights, where each single step rounds to nothing."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimiser = make(layer)
    for _ in range(100):
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimiser.step(1e-4)
    assert layer.weight.item() == pytest.approx(0.99, abs=0.003)


def test_refresh_follows_weights_changed_elsewhere():
    """Value pretraining undone by the first RL update, whose fp32 copies are from before it."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimiser = make(layer)
    with torch.no_grad():
        layer.weight.fill_(4.0)
    optimiser.refresh()
    layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    optimiser.step(0.0)
    assert layer.weight.item() == 4.0


def test_weight_decay_spares_vectors():
    """Norms and biases that decay to 0."""
    layer = nn.Linear(2, 1)
    before = layer.state_dict()["bias"].clone(), layer.state_dict()["weight"].clone()
    optimiser = make(layer, decay=0.5)
    (layer.weight.sum() * 0 + layer.bias.sum() * 0).backward()
    optimiser.step(0.1)
    assert torch.equal(layer.bias, before[0])
    assert torch.allclose(layer.weight, before[1] * 0.95)


def test_state_of_another_model_is_refused():
    """A checkpoint of another model that is loaded in part."""
    layer, larger = nn.Linear(2, 1), nn.Linear(3, 1)
    optimiser = make(larger)
    larger(torch.ones(1, 3)).sum().backward()
    optimiser.step(0.1)
    with pytest.raises(ValueError, match=r"weight\.exp_avg.*\(1, 3\), its parameter \(1, 2\)"):
        make(layer).load(optimiser.state())
    with pytest.raises(ValueError, match="belongs to no trained parameter"):
        make(layer).load({"elsewhere.exp_avg": torch.zeros(1)})
