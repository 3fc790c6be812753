"""The specification's worked numbers, from its file."""

import json
from pathlib import Path

import pytest
import torch

from sao.algorithm import dis_policy_loss, length_adaptive_lambda, observation_inclusive_gae, skip_observation_gae

PATH = Path(__file__).parent / "vectors" / "method.json"


@pytest.fixture(scope="module")
def vectors():
    return json.loads(PATH.read_text())


def test_skip_observation_gae(vectors):
    """Catches any departure from the specification's numbers."""
    for case in vectors["skip_observation_gae"]:
        rewards, values = (torch.tensor([case[name]], dtype=torch.float64) for name in ("rewards", "values"))
        actions = torch.tensor([case["action_mask"]]).bool()
        settings = {"gamma": case["gamma"], "lam": case["lam"]}
        advantages, returns = skip_observation_gae(rewards, values, actions, **settings)
        assert advantages[0].tolist() == pytest.approx(case["advantages"], abs=1e-6), case["name"]
        if "returns" in case:
            assert returns[0].tolist() == pytest.approx(case["returns"], abs=1e-6), case["name"]
        if "observation_inclusive_advantage_of_token_0" in case:
            naive, _ = observation_inclusive_gae(rewards, values, actions, **settings)
            assert naive[0, 0].item() == pytest.approx(case["observation_inclusive_advantage_of_token_0"], abs=1e-6)


def test_length_adaptive_lambda(vectors):
    """Catches any departure from the specification's numbers."""
    case = vectors["length_adaptive_lambda"]
    lam = length_adaptive_lambda(torch.tensor(case["num_action_tokens"]), alpha=case["alpha"])
    assert lam.tolist() == pytest.approx(case["lam"], abs=1e-6)


@pytest.mark.parametrize("nudge", [-1e-6, 1e-6])
def test_dis_policy_loss(vectors, nudge):
    """Catches any departure from the specification's numbers, at both sides of both bounds."""
    for case in vectors["dis_policy_loss"]:
        actor, ratios, advantages, weights, gradient = (
            torch.tensor([case[name]], dtype=torch.float64)
            for name in ("actor_logprobs", "ratios", "advantages", "weights", "gradient_of_actor_logprobs")
        )
        actions, low, high = torch.tensor([case["action_mask"]]).bool(), case["ratio_low"], case["ratio_high"]
        on_low, on_high = ratios == low, ratios == high
        log_ratio = ratios.log() + nudge * (on_low | on_high)
        kept_bound = on_low if nudge > 0 else on_high
        added = torch.where(kept_bound, -log_ratio.exp() * advantages * actions / case["denominator"], 0.0)
        loss, _ = dis_policy_loss(
            actor.requires_grad_(), actor.detach() - log_ratio, advantages, actions,
            ratio_low=low, ratio_high=high, denominator=case["denominator"],
        )  # fmt: skip
        torch.testing.assert_close(torch.autograd.grad(loss, actor)[0], gradient + added)
        assert loss.item() == pytest.approx(case["loss"] + (added * actor.detach()).sum().item())
        assert ((weights > 0) == (gradient != 0)).all()
