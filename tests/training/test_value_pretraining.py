"""Fitting values to logged rollouts: what is learned, what is held out, what is left as it was."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_toys import make_actor, make_rollout, make_sequence, weights

from sao.algorithm.sao import AlgorithmConfig
from sao.pipeline.packing import Rows
from sao.training import value_pretraining
from sao.training.critic import Critic
from sao.training.protocol import TrainerError
from sao.training.value_pretraining import ValuePretrainingConfig, pretrain_values, split_by_prompt
from sao.types import FailureKind, Rollout

SETTINGS = ValuePretrainingConfig(epochs=20, batch_size=16, lr=3e-3, held_out_share=0.25)


def telling_rollouts(count: int = 64) -> list[Rollout]:
    """The first token says which reward the rollout will have."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(count):
        reward = float(index % 2)
        sequence = make_sequence(rng, 14, reward=reward)
        token_ids = sequence.token_ids.copy()
        token_ids[0] = int(reward)
        made.append(make_rollout(index, (replace(sequence, token_ids=token_ids),), prompt=f"p{index // 2}"))
    return made


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), AlgorithmConfig(lambda_critic=0.2, value_clip=0.01)])
def test_values_explain_held_out_rollouts(algorithm: AlgorithmConfig):
    """Targets that bootstrap from a critic that knows nothing yet, as with a critic's lambda below 1."""
    critic = Critic.from_actor(make_actor())
    before = weights(critic)
    metrics = pretrain_values(critic, telling_rollouts(), config=SETTINGS, algorithm=algorithm, seed=0)
    assert metrics["value_pretraining/explained_variance"].value > 0.8
    assert metrics["value_pretraining/explained_variance_held_out"].value > 0.7
    assert metrics["value_pretraining/rollouts"].value == 64
    for name, weight in weights(critic).items():
        assert torch.equal(weight, before[name]) == (".self_attn." in name), name


def test_freezing_is_its_own_switch_and_is_put_back():
    """RL with an unfrozen attention, because pretraining had it so; or the other way round."""
    critic = Critic.from_actor(make_actor())
    before = weights(critic)
    settings = replace(SETTINGS, freeze="none", epochs=1)
    pretrain_values(critic, telling_rollouts(), config=settings, algorithm=AlgorithmConfig(), seed=0)
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(critic).items() if "self_attn" in name)
    assert critic.freeze == "attention"
    assert critic.frozen_share > 0
    unfrozen = Critic.from_actor(make_actor(), freeze="none")
    pretrain_values(unfrozen, telling_rollouts(), config=SETTINGS, algorithm=AlgorithmConfig(), seed=0)
    assert unfrozen.frozen_share == 0


def test_held_out_prompts_are_never_trained_on():
    """Two rollouts of one prompt on both sides, which makes held-out numbers too good."""
    rollouts = telling_rollouts()
    train, held_out = split_by_prompt(rollouts, share=0.25, seed=3)
    assert len(train) + len(held_out) == len(rollouts)
    assert len({rollout.prompt_id for rollout in held_out}) == 8
    assert not {rollout.prompt_id for rollout in train} & {rollout.prompt_id for rollout in held_out}
    again = split_by_prompt(rollouts[::-1], share=0.25, seed=3)
    assert {rollout.id for rollout in again[1]} == {rollout.id for rollout in held_out}
    assert {rollout.id for rollout in split_by_prompt(rollouts, share=0.25, seed=4)[1]} != {r.id for r in held_out}


def test_what_is_held_out_changes_nothing():
    """A held-out rollout whose reward reaches the weights."""
    rollouts = telling_rollouts(16)
    _, held_out = split_by_prompt(rollouts, share=0.25, seed=0)
    spoiled = []
    for rollout in rollouts:
        if rollout in held_out:
            sequence = rollout.sequences[0]
            rollout = replace(rollout, sequences=(replace(sequence, rewards=sequence.rewards * -9),))
        spoiled.append(rollout)
    critics = [Critic.from_actor(make_actor()) for _ in range(2)]
    settings = replace(SETTINGS, epochs=2)
    for critic, logged in zip(critics, (rollouts, spoiled), strict=True):
        pretrain_values(critic, logged, config=settings, algorithm=AlgorithmConfig(), seed=0)
    one, other = (weights(critic).values() for critic in critics)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_infrastructure_failures_are_left_out():
    """A critic that learns that a broken sandbox means reward 0."""
    rollouts = telling_rollouts(8)
    rollouts[3] = replace(rollouts[3], failure=FailureKind.INFRASTRUCTURE)
    critic = Critic.from_actor(make_actor())
    metrics = pretrain_values(critic, rollouts, config=replace(SETTINGS, epochs=1), algorithm=AlgorithmConfig(), seed=0)
    assert metrics["value_pretraining/rollouts"].value == 7
    with pytest.raises(ValueError, match="of 1 rollouts 0 can be trained on"):
        pretrain_values(critic, rollouts[3:4], config=SETTINGS, algorithm=AlgorithmConfig(), seed=0)


def test_a_gradient_that_is_not_finite_is_counted_and_a_row_of_them_ends_the_stage():
    """Value pretraining that skips every update in silence and reports a critic that never trained."""
    critic = Critic.from_actor(make_actor())
    calls = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient * float("nan") if calls == 2 else gradient

    hook = critic.head.bias.register_hook(spoil)
    settings = replace(SETTINGS, epochs=0, steps=4)
    metrics = pretrain_values(critic, telling_rollouts(16), config=settings, algorithm=AlgorithmConfig(), seed=0)
    assert metrics["value_pretraining/skipped"].value == 1
    hook.remove()
    critic.head.bias.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(TrainerError, match=r"not finite in the last 3 of 3 .* Lower value_pretraining\.fit\.lr"):
        pretrain_values(critic, telling_rollouts(16), config=settings, algorithm=AlgorithmConfig(), seed=0)
    assert critic.freeze == "attention"


def test_the_report_scores_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Thousands of logged rollouts padded to the longest at once, which fills the memory at the very end."""
    critic, settings = Critic.from_actor(make_actor()), replace(SETTINGS, batch_size=5, epochs=1)
    padded = value_pretraining.rows
    sizes: list[int] = []

    def watched(rollouts: Sequence[Rollout]) -> Rows:
        sizes.append(len(rollouts))
        return padded(rollouts)

    rollouts = telling_rollouts(64)
    monkeypatch.setattr(value_pretraining, "rows", watched)
    metrics = pretrain_values(critic, rollouts, config=settings, algorithm=AlgorithmConfig(), seed=0)
    assert max(sizes) == 5
    whole = pretrain_values(
        critic, rollouts, config=replace(settings, batch_size=64, lr=1e-20), algorithm=AlgorithmConfig(), seed=0
    )
    assert max(sizes) > 40
    for key in ("value_pretraining/explained_variance", "value_pretraining/explained_variance_held_out"):
        assert metrics[key].value == pytest.approx(whole[key].value, abs=1e-5)


def test_equal_returns_have_no_explained_variance():
    """An explained variance of 0 for rollouts that leave nothing to explain."""
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(index, (make_sequence(rng, 9, reward=1.0),)) for index in range(6)]
    critic = Critic.from_actor(make_actor())
    metrics = pretrain_values(critic, rollouts, config=SETTINGS, algorithm=AlgorithmConfig(), seed=0)
    assert math.isnan(metrics["value_pretraining/explained_variance"].value)
    assert math.isnan(metrics["value_pretraining/explained_variance_held_out"].value)
    assert metrics["value_pretraining/loss"].value < 0.05


def test_values_at_observations_are_fitted_where_the_algorithm_trains_them():
    """The naive form's critic, pretrained at other tokens than it is used at."""
    algorithm = AlgorithmConfig(advantage="observation_inclusive", train_observation_values=True)
    critic = Critic.from_actor(make_actor())
    metrics = pretrain_values(critic, telling_rollouts(), config=SETTINGS, algorithm=algorithm, seed=0)
    assert metrics["value_pretraining/explained_variance"].value > 0.8
