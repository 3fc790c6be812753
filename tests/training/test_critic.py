"""The value network on real tiny transformers, dense and mixture of experts."""

import numpy as np
import pytest
import torch
from torch import nn
from training_toys import VOCABULARY, make_actor, make_batch, make_core, weights

from sao.pipeline.packing import pack
from sao.training.critic import Critic, attention_modules
from sao.training.passes import score_values
from sao.training.tensors import forward_inputs, to_tensor
from sao.types import Batch

CPU = torch.device("cpu")


def make_critic(architecture: str) -> Critic:
    """With a head that is not zero, so that values say something."""
    critic = Critic.from_actor(make_actor(architecture))
    torch.manual_seed(1)
    nn.init.normal_(critic.head.weight)
    return critic


def test_values_start_at_zero_and_the_backbone_is_a_copy():
    """A critic that starts with noise for values, or shares its weights with the actor and trains both."""
    actor = make_actor()
    critic = Critic.from_actor(actor)
    values = critic(torch.arange(6)[None], torch.arange(6)[None], torch.arange(5))
    assert values.tolist() == [0.0] * 5
    with torch.no_grad():
        critic.backbone.get_input_embeddings().weight.add_(1.0)
    assert not torch.equal(critic.backbone.get_input_embeddings().weight, actor.get_input_embeddings().weight)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_value_does_not_see_the_token_it_scores(architecture: str):
    """V read at the token instead of before it: the baseline then knows the sampled action."""
    critic = make_critic(architecture)
    batch = make_batch(count=1, lengths=(20,))
    sequence = batch.rollouts[0].sequences[0]
    (micro,) = pack([sequence], 64)

    def values(token_ids: torch.Tensor) -> torch.Tensor:
        _, positions = forward_inputs(micro, CPU)
        return critic(token_ids, positions, to_tensor(micro.predictor_index, CPU))

    token_ids, _ = forward_inputs(micro, CPU)
    before = values(token_ids)
    for number, place in enumerate(micro.scored_index.tolist()):
        changed = token_ids.clone()
        changed[0, place] = (changed[0, place] + 1) % VOCABULARY
        after = values(changed)
        assert torch.allclose(after[: number + 1], before[: number + 1], atol=1e-6)
        if number + 1 < len(before):
            assert not torch.allclose(after[number + 1 :], before[number + 1 :], atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_packed_values_and_gradients_equal_separate_ones(architecture: str):
    """Sequences that leak into each other when they are packed: transformers' silent default with a cache."""
    critic = make_critic(architecture)
    sequences = [rollout.sequences[0] for rollout in make_batch(lengths=(7, 12, 3, 20)).rollouts]
    weight = torch.linspace(-1, 1, 4 * 20).reshape(4, 20)

    def run(budget: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        critic.zero_grad()
        values = torch.zeros(4, 20)
        for micro in pack(sequences, budget):
            scored = critic(*forward_inputs(micro, CPU), to_tensor(micro.predictor_index, CPU))
            (scored * weight[micro.row, micro.column]).sum().backward()
            values[micro.row, micro.column] = scored.detach()
        return values, {name: p.grad.clone() for name, p in critic.named_parameters() if p.grad is not None}

    (packed, packed_gradients), (separate, separate_gradients) = run(64), run(1)
    assert torch.allclose(packed, separate, atol=1e-5)
    for name, gradient in separate_gradients.items():
        assert torch.allclose(packed_gradients[name], gradient, atol=1e-4, rtol=1e-4), name


def test_value_beyond_the_end_is_read_at_the_last_token():
    """A bootstrap read from the last scored token instead of the last one, which may be an observation."""
    critic = make_critic("qwen3")
    sequence = make_batch(lengths=(9,)).rollouts[0].sequences[0]
    _, beyond = score_values(critic, pack([sequence], 64), shape=(1, 9), num_sequences=1)
    tokens = to_tensor(sequence.token_ids, CPU)[None]
    expected = critic(tokens, torch.arange(9)[None], torch.tensor([8]))
    assert torch.allclose(beyond, expected)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_training_moves_all_but_the_attention(architecture: str):
    """Values that are detached, so that the critic never trains; or a freeze that freezes nothing, or norms too."""
    core = make_core(architecture)
    assert core.critic is not None
    before = weights(core.critic)
    for step in (1, 2):
        core.begin(make_batch(step=step, seed=step, count=12))
        core.critic_update()
        core.report()
    for name, weight in weights(core.critic).items():
        frozen = ".self_attn." in name
        assert torch.equal(weight, before[name]) == frozen, name
    assert any("post_attention_layernorm" in name for name in before)
    frozen = sum(weight.numel() for name, weight in before.items() if ".self_attn." in name)
    assert core.critic.frozen_share == pytest.approx(frozen / sum(weight.numel() for weight in before.values()))


def test_without_freezing_the_attention_trains():
    """A critic whose attention stays frozen whatever the configuration says."""
    core = make_core(freeze="none")
    assert core.critic is not None
    before = weights(core.critic)
    for step in (1, 2):
        core.begin(make_batch(step=step, seed=step))
        core.critic_update()
        core.report()
    assert core.critic.frozen_share == 0
    assert not any(torch.equal(weight, before[name]) for name, weight in weights(core.critic).items())


class Mixer(nn.Linear):
    """A layer's token mixer that is no attention."""


def test_a_critic_of_the_head_alone():
    """A frozen backbone that moves, keeps gradients or moments, or stops the head from learning."""
    core = make_core(freeze="backbone")
    assert core.critic is not None
    assert core.critic_optimiser is not None
    before = weights(core.critic)
    core.begin(make_batch())
    core.actor_update()
    core.critic_update()
    core.report()
    moved = {name for name, weight in weights(core.critic).items() if not torch.equal(weight, before[name])}
    assert moved == {"head.weight", "head.bias"}
    assert {name.rpartition(".")[0] for name in core.critic_optimiser.state()} == moved
    assert core.critic.frozen_share == pytest.approx(1 - 33 / core.critic.num_parameters)


def _with_layers(critic: Critic, names: list[str]) -> Critic:
    for layer, name in zip(critic.backbone.layers, names, strict=True):
        mixer = layer.self_attn
        del layer.self_attn
        setattr(layer, name, mixer if "att" in name else Mixer(2, 2))
    return critic


def test_a_hybrid_with_linear_attention_is_frozen_whole():
    """A pattern that knows `self_attn` only, and leaves half of a hybrid model's attention training."""
    critic = _with_layers(make_critic("qwen3"), ["self_attn", "linear_attn"])
    critic.set_freeze("attention")
    assert list(attention_modules(critic.backbone)) == ["layers.0.self_attn", "layers.1.linear_attn"]


@pytest.mark.parametrize(("names", "missing"), [(["mixer", "mixer"], "layers.0"), (["self_attn", "mixer"], "layers.1")])
def test_layers_without_attention_raise(names: list[str], missing: str):
    """A pattern that matches nothing, or a part, and trains what was to be frozen without a word."""
    critic = _with_layers(make_critic("qwen3"), names)
    with pytest.raises(ValueError, match=rf"'attn' or 'attention'.*{missing} \(Qwen3DecoderLayer: .*freeze = 'none'"):
        critic.set_freeze("attention")


def test_a_batch_of_many_lengths_scores_every_action():
    """Values of some sequences that stay 0 because their micro-batch was overwritten."""
    core = make_core(micro_batch_tokens=24)
    assert core.critic is not None
    nn.init.ones_(core.critic.head.bias)
    batch: Batch = make_batch(count=9)
    core.begin(batch)
    for rollout, tokens in zip(batch.rollouts, core.report().tokens, strict=True):
        assert np.array_equal(tokens[0].values, rollout.sequences[0].action_mask.astype(np.float32))
