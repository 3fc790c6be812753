"""The one page: it composes what it says, and refuses settings that mean nothing."""

import ast
import math
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

import sao.algorithm
from sao.algorithm import AlgorithmConfig, actor_loss, critic_loss, targets
from sao.algorithm.advantages import (
    action_span,
    length_adaptive_lambda,
    moments,
    observation_inclusive_gae,
    skip_observation_gae,
    step_gae,
    whiten,
)
from sao.algorithm.losses import dis_policy_loss, value_loss

FOLDER = Path(sao.algorithm.__file__).parent


@pytest.fixture
def batch():
    """Three rows of 10 tokens: two actions of unequal length each, outcome 1, 0, 1."""
    generator = torch.Generator().manual_seed(4)
    action_mask = torch.tensor(
        [[0, 1, 1, 0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0, 1, 1]]
    )
    action_mask = action_mask.bool()
    rewards = torch.zeros(3, 10)
    rewards[0, 6] = rewards[2, 9] = 1.0
    turns = (torch.arange(10) > 3).int().expand(3, 10)
    return {
        "rewards": rewards,
        "values": torch.rand(3, 10, generator=generator),
        "action_mask": action_mask,
        "turns": turns,
        "num_action_tokens": action_mask.sum(1),
    }


def test_targets_of_sao(batch):
    """Catches one lambda used for both, and returns taken from the actor's call."""
    found = targets(**batch, config=AlgorithmConfig())
    rewards, values, actions = batch["rewards"], batch["values"], batch["action_mask"]
    lam = length_adaptive_lambda(torch.tensor([5, 2, 6]), alpha=1.5)
    raw, _ = skip_observation_gae(rewards, values, actions, gamma=1.0, lam=lam)
    expected, _ = whiten(raw, actions, rewards=rewards)
    torch.testing.assert_close(found.advantages, expected)
    torch.testing.assert_close(found.returns, torch.where(actions, rewards.sum(1)[:, None], 0.0))
    assert torch.equal(found.value_mask, actions)
    assert (found.advantage_mean, found.advantage_std) == pytest.approx(moments(raw, actions))
    assert found.whitened
    plain = targets(**batch, config=AlgorithmConfig(whiten=False))
    torch.testing.assert_close(plain.advantages, raw)
    assert not plain.whitened


def test_l_is_the_rollouts_not_the_rows(batch):
    """Catches l counted per row, where a rollout's side branch is a row of its own."""
    batch["num_action_tokens"] = torch.tensor([11, 11, 2])
    found = targets(**batch, config=AlgorithmConfig(whiten=False))
    lam = length_adaptive_lambda(torch.tensor([11, 11, 2]), alpha=1.5)
    raw, _ = skip_observation_gae(batch["rewards"], batch["values"], batch["action_mask"], gamma=1.0, lam=lam)
    torch.testing.assert_close(found.advantages, raw)


def test_a_side_branch_does_not_make_equal_rewards_differ(batch):
    """Catches whitening of a batch in which every rollout got the same reward, for a branch's row holds none of it."""
    batch["rewards"][1] = 0.0
    assert targets(**batch, config=AlgorithmConfig()).whitened
    found = targets(**batch, rollout_of_row=torch.tensor([0, 0, 1]), config=AlgorithmConfig())
    assert not found.whitened


def test_fixed_lambda_and_gamma(batch):
    """Catches a fixed lambda overruled by the length-adaptive one, and gamma lost on the way."""
    config = AlgorithmConfig(alpha=None, lam=0.3, gamma=0.9, lambda_critic=0.5, whiten=False)
    found = targets(**batch, config=config)
    arrays = batch["rewards"], batch["values"], batch["action_mask"]
    torch.testing.assert_close(found.advantages, skip_observation_gae(*arrays, gamma=0.9, lam=0.3)[0])
    torch.testing.assert_close(found.returns, skip_observation_gae(*arrays, gamma=0.9, lam=0.5)[1])


@pytest.mark.parametrize("train_observations", [False, True])
def test_observation_inclusive(batch, train_observations):
    """Catches l that counts action tokens only, advantages at observations, and observations the critic never fits."""
    config = AlgorithmConfig(
        advantage="observation_inclusive", whiten=False, train_observation_values=train_observations
    )
    found = targets(**batch, config=config)
    actions = batch["action_mask"]
    lam = length_adaptive_lambda(torch.tensor([6, 4, 9]), alpha=1.5)
    raw, _ = observation_inclusive_gae(batch["rewards"], batch["values"], actions, gamma=1.0, lam=lam)
    torch.testing.assert_close(found.advantages, raw)
    assert torch.equal(found.value_mask, action_span(actions) if train_observations else actions)
    torch.testing.assert_close(found.returns, torch.where(found.value_mask, batch["rewards"].sum(1)[:, None], 0.0))


@pytest.mark.parametrize("step_value", ["mean", "last"])
def test_step_level(batch, step_value):
    """Catches l that counts tokens where the recursion counts steps."""
    found = targets(**batch, config=AlgorithmConfig(advantage=f"step_{step_value}", whiten=False))
    lam = length_adaptive_lambda(torch.tensor([2, 2, 2]), alpha=1.5)
    arrays = (batch[name] for name in ("rewards", "values", "action_mask", "turns"))
    raw, _ = step_gae(*arrays, gamma=1.0, lam=lam, step_value=step_value)
    torch.testing.assert_close(found.advantages, raw)


def test_given_advantages_are_spread_over_action_tokens(batch):
    """Catches a baseline's number lost or put on observations; without a critic V is 0 and returns are the reward."""
    batch["values"] = torch.zeros(3, 10)
    config = AlgorithmConfig(advantage="given", whiten=False)
    found = targets(**batch, given=torch.tensor([0.5, -1.0, 2.0]), config=config)
    expected = torch.tensor([[0.5], [-1.0], [2.0]]) * batch["action_mask"]
    torch.testing.assert_close(found.advantages, expected)
    torch.testing.assert_close(found.returns, torch.where(batch["action_mask"], batch["rewards"].sum(1)[:, None], 0.0))
    with pytest.raises(ValueError, match="needs one number per row"):
        targets(**batch, config=config)


def test_bootstrap_is_a_switch(batch):
    """Catches a truncated rollout that is bootstrapped although the switch is off, or not although it is on."""
    boot = torch.tensor([0.0, 0.8, 0.0])
    off = targets(**batch, bootstrap=boot, config=AlgorithmConfig())
    on = targets(**batch, bootstrap=boot, config=AlgorithmConfig(bootstrap_truncated=True))
    assert off.returns[1, 5] == 0
    assert on.returns[1, [2, 5]].tolist() == pytest.approx([0.8, 0.8])
    assert torch.equal(on.returns[[0, 2]], off.returns[[0, 2]])


@pytest.mark.parametrize("policy_loss", ["dis", "none", "ppo_clip", "decoupled_ppo", "icepop"])
def test_every_policy_loss_runs_on_packed_tokens(batch, policy_loss):
    """Catches a named loss that gets settings it does not know; (1, N) slices are what training passes."""
    actions = batch["action_mask"]
    actor = -batch["values"][actions][None].requires_grad_()
    entropy = torch.full_like(actor, 0.5)
    loss, sums = actor_loss(
        actor, actor.detach() - 0.1, torch.ones_like(actor), torch.ones_like(actor).bool(),
        denominator=13, config=AlgorithmConfig(policy_loss=policy_loss), entropy=entropy,
    )  # fmt: skip
    weight = 1.0 if policy_loss == "none" else math.exp(0.1)
    torch.testing.assert_close(torch.autograd.grad(loss, actor)[0], torch.full_like(actor, -weight / 13))
    assert sums.summary()["entropy"] == pytest.approx(0.5)


def test_losses_take_their_settings_from_the_configuration(batch):
    """Catches a band, a switch or a clip that is configured and ignored."""
    actor = torch.tensor([[-2.0, -2.0]], requires_grad=True)
    arguments = actor, actor.detach() - torch.tensor([[0.3, 5.0]]).log(), torch.ones(1, 2), torch.ones(1, 2).bool()
    for settings in ({"ratio_low": 0.2, "ratio_high": 4.0}, {"detach_ratio": False}, {}):
        loss, _ = actor_loss(*arguments, denominator=1, config=AlgorithmConfig(**settings))
        expected, _ = dis_policy_loss(*arguments, **({"ratio_low": 0.7, "ratio_high": 6.0} | settings), denominator=1)
        assert torch.equal(torch.autograd.grad(loss, actor)[0], torch.autograd.grad(expected, actor)[0])
    values, returns, mask = torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.ones(1, 1).bool()
    clip = {"clip": 0.2, "initial_values": torch.zeros(1, 1)}
    found = critic_loss(
        values, returns, mask, denominator=1, config=AlgorithmConfig(value_clip=0.2), initial_values=torch.zeros(1, 1)
    )
    assert found == value_loss(values, returns, mask, denominator=1, **clip)
    assert critic_loss(values, returns, mask, denominator=1, config=AlgorithmConfig()) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio_low": 0.3, "ratio_high": 0.9}, "must enclose 1"),
        ({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, "must enclose 1"),
        ({"gamma": 1.1}, "gamma is 1.1"),
        ({"lam": -0.1}, "lam is -0.1"),
        ({"lambda_critic": math.nan}, "lambda_critic is nan"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"whiten_floor": 0.0}, "whiten_floor is 0.0"),
        ({"value_clip": -1.0}, "value_clip is -1.0"),
        ({"train_observation_values": True}, "is for observation_inclusive, not skip_observation"),
        ({"advantage": "skip_observations"}, "algorithm.advantage is 'skip_observations'; choose one of 'skip_observ"),
        ({"policy_loss": "ppo"}, "algorithm.policy_loss is 'ppo'; choose one of 'dis', 'none', 'ppo_clip'"),
        ({"denominator": "tokens"}, "algorithm.denominator is 'tokens'; choose one of 'action_tokens'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    """Catches a bad number found hours later, in the middle of a run."""
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**settings)


def test_configuration_can_be_read_by_pydantic_and_every_field_is_explained():
    """Catches a field type that a TOML file cannot give, and a knob without a word on what it does."""
    adapter = TypeAdapter(AlgorithmConfig)
    assert adapter.validate_python({"policy_loss": "icepop", "alpha": None}).alpha is None
    assert adapter.validate_json("{}") == AlgorithmConfig()
    tree = ast.parse((FOLDER / "sao.py").read_text())
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AlgorithmConfig")
    explained = [
        first.target.id
        for first, second in zip(config.body, config.body[1:], strict=False)
        if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
    ]
    assert explained == [field.name for field in fields(AlgorithmConfig)]


def test_page_is_a_page_and_the_folder_stands_alone():
    """Catches maths creeping onto the page, and an import that would keep anyone from lifting the folder out."""
    assert len((FOLDER / "sao.py").read_text().splitlines()) <= 150
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert name.startswith("sao.algorithm") or root == "torch" or root in sys.stdlib_module_names, (
                    path,
                    name,
                )
