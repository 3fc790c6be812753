"""The example that fits in one file says what the library does, and runs."""

import ast
import importlib.util
import math
from pathlib import Path

import pytest
import torch

from sao.algorithm import (
    AlgorithmConfig,
    actor_loss,
    critic_loss,
    dis_policy_loss,
    explained_variance,
    length_adaptive_lambda,
    skip_observation_gae,
    targets,
    value_loss,
    whiten,
)

PATH = Path(__file__).parents[1] / "examples" / "one_file.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=range(5))
def batch(request):
    """Random rows (B, T) with observations, padding, ratios on both sides of the band, one terminal reward each."""
    generator = torch.Generator().manual_seed(request.param)
    lengths, places = torch.randint(3, 20, (6,), generator=generator), torch.arange(20)
    actions = (torch.rand(6, 20, generator=generator) < 0.7) & (places < lengths[:, None]) & (places > 0)
    actions[:, 2] = True
    rewards = torch.zeros(6, 20)
    last = torch.where(actions, places, 0).amax(1)
    rewards[torch.arange(6), last] = torch.tensor([1.0, 0, 0, 1, 0, 1])
    actor = -torch.rand(6, 20, generator=generator) * 3
    rollout = actor + torch.randn(6, 20, generator=generator)
    return {
        "actions": actions, "rewards": rewards, "actor": actor, "rollout": rollout,
        "values": torch.rand(6, 20, generator=generator), "advantages": torch.randn(6, 20, generator=generator),
    }  # fmt: skip


def test_policy_loss_is_the_librarys(example, batch):
    """Catches the two drifting apart: value, gradient and ratios of DIS, for both bands of the paper."""
    actor, actions = batch["actor"].requires_grad_(), batch["actions"]
    for low, high in ((0.7, 6.0), (0.2, 4.0)):
        ours, ratio = example.dis_loss(actor, batch["rollout"], batch["advantages"], actions, low, high)
        theirs, sums = dis_policy_loss(
            actor, batch["rollout"], batch["advantages"], actions,
            ratio_low=low, ratio_high=high, denominator=int(actions.sum()),
        )  # fmt: skip
        torch.testing.assert_close(ours, theirs)
        gradients = [torch.autograd.grad(loss, actor)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*gradients)
        assert ((ratio[actions] <= low).sum(), (ratio[actions] >= high).sum()) == (sums.masked_low, sums.masked_high)


def test_critic_is_the_librarys(example, batch):
    """Catches another denominator or factor in the value loss, and another explained variance."""
    values, actions = batch["values"].requires_grad_(), batch["actions"]
    ours = example.value_loss(values, batch["advantages"], actions)
    theirs = value_loss(values, batch["advantages"], actions, denominator=int(actions.sum()))
    gradients = [torch.autograd.grad(loss, values)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*gradients)
    found = example.explained_variance(values.detach()[actions], batch["advantages"][actions])
    assert found == pytest.approx(explained_variance(values.detach(), batch["advantages"], actions), abs=1e-5)
    assert math.isnan(example.explained_variance(values.detach()[actions], torch.ones(int(actions.sum()))))


def test_advantages_are_the_librarys(example, batch):
    """Catches another recursion, lambda or whitening: the example's loop against the library's scan."""
    actions, rewards, values = batch["actions"], batch["rewards"], batch["values"]
    lam = length_adaptive_lambda(actions.sum(1), alpha=1.5)
    expected = skip_observation_gae(rewards, values, actions, gamma=0.9, lam=lam)
    for row in range(6):
        own = example.length_adaptive_lambda(int(actions[row].sum()), 1.5)
        assert own == pytest.approx(lam[row].item())
        found = example.skip_observation_gae(rewards[row], values[row], actions[row], gamma=0.9, lam=own)
        torch.testing.assert_close(found[0], expected[0][row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[1], expected[1][row], atol=1e-5, rtol=1e-5)
    white, _ = whiten(expected[0], actions, rewards=rewards)
    torch.testing.assert_close(example.whiten(expected[0], actions), white)


def test_a_whole_step_is_the_librarys(example):
    """Catches the example leaving the one page: on real rollouts with stale tokens both give the same two gradients."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        actor = example.Model(example.DIGITS + 8)
    example.fine_tune(actor, 0, 30)
    critic, flight = example.critic_from(actor), example.Flight(0, 48)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    flight.take(16, actor, 0)
    with torch.no_grad():
        actor.head.weight.mul_(1.5)
    rollouts = flight.take(16, actor, 1)
    for index, rollout in enumerate(rollouts):
        rollout.reward = float(index % 3 == 0)  # by hand: a policy of 30 steps always fails
    ids, actions, rollout_logprobs, versions = example.arrays(rollouts)
    assert {0, 1} <= set(versions[actions].tolist())
    values = example.before(critic(ids))[..., 0].detach()
    advantages, returns = example.targets(rollouts, values, actions, 1.5)
    white = example.whiten(advantages, actions)

    rewards = torch.zeros(actions.shape)
    last = torch.where(actions, torch.arange(actions.shape[1]), 0).amax(1)
    rewards[torch.arange(16), last] = torch.tensor([rollout.reward for rollout in rollouts])
    config = AlgorithmConfig()
    expected = targets(
        rewards=rewards, values=values, action_mask=actions, turns=torch.zeros(actions.shape),
        num_action_tokens=actions.sum(1), config=config,
    )  # fmt: skip
    assert expected.whitened
    torch.testing.assert_close(white, expected.advantages, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(returns, expected.returns, atol=1e-5, rtol=1e-5)

    count = int(actions.sum())
    logprobs = example.logprobs_of(actor, ids)
    ours, ratio = example.dis_loss(logprobs, rollout_logprobs, white, actions, 0.7, 6.0)
    theirs, _ = actor_loss(logprobs, rollout_logprobs, expected.advantages, actions, denominator=count, config=config)
    gradients = [torch.autograd.grad(loss, list(actor.parameters()), retain_graph=True) for loss in (ours, theirs)]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-3)
    on_policy = actions & (versions == 1)
    torch.testing.assert_close(ratio[on_policy], torch.ones(int(on_policy.sum())), atol=1e-4, rtol=0)
    assert (ratio[actions & (versions == 0)] - 1).abs().max() > 0.01
    fresh = example.before(critic(ids))[..., 0]
    torch.testing.assert_close(
        example.value_loss(fresh, returns, actions),
        critic_loss(fresh, expected.returns, actions, denominator=count, config=config),
        atol=1e-5, rtol=1e-4,
    )  # fmt: skip


def test_value_is_read_before_the_token_it_scores(example):
    """Catches a baseline that sees the sampled action."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = example.Model(16)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    changed = torch.tensor([[3, 1, 7, 1, 5]])
    first, second = example.before(critic(ids)), example.before(critic(changed))
    assert torch.equal(first[:, :3], second[:, :3])
    assert not torch.equal(first[:, 3:], second[:, 3:])


def test_runs_and_trains_for_a_few_updates(example, capsys):
    """Catches an example that no longer starts, and one whose run depends on something besides its seed."""
    settings = {"updates": 3, "sft_steps": 10, "value_steps": 2, "slots": 24, "batch": 8, "show": 1}
    first = example.train(seed=1, **settings)
    assert len(first) == 3
    assert "update    2" in capsys.readouterr().out
    assert example.train(seed=1, **settings) == first


def test_fits_its_budget():
    """Catches a file that is no longer read in one sitting, or that needs more than torch."""
    text = PATH.read_text()
    assert len(text.splitlines()) <= 300
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert modules == {"copy", "math", "random", "time", "typing", "torch", "torch.nn.functional"}
