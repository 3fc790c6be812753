"""Fine-tuning on traces: whose tokens are trained, and how a trace becomes tokens."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from training_toys import VOCABULARY, make_actor, weights

from sao.envs.tokenizer import save_tokenizer
from sao.models.load import ModelConfig, load_causal_lm
from sao.rollout.renderer import ChatRenderer, load_renderer
from sao.training.protocol import TrainerError
from sao.training.sft import SftConfig, SftExample, fit_sft, render_trace
from sao.types import Message


def example(length: int, actions: list[int], *, seed: int = 0) -> SftExample:
    mask = np.zeros(length, bool)
    mask[actions] = True
    token_ids = np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)
    return SftExample(token_ids=token_ids, action_mask=mask)


def test_loss_by_hand_and_only_on_the_policys_own_tokens():
    """Observations that are trained, or a mean over something else than the batch's trained tokens."""
    actor = make_actor()
    examples = [example(9, [3, 4, 8]), example(5, [1], seed=1)]
    with torch.no_grad():
        picked = [
            torch.log_softmax(actor(input_ids=torch.from_numpy(one.token_ids)[None].long()).logits[0, place - 1], -1)[
                int(one.token_ids[place])
            ]
            for one in examples
            for place in np.flatnonzero(one.action_mask)
        ]
    expected = -float(torch.stack(picked).mean())
    for budget in (100, 3):
        config = SftConfig(batch_size=2, steps=1, micro_batch_tokens=budget)
        (metrics,) = fit_sft(make_actor(), examples, config, seed=0)
        assert metrics["sft/loss"].value == pytest.approx(expected, abs=1e-5)
        assert metrics["sft/tokens"].value == 4


def test_the_policys_tokens_are_learned():
    """A fine-tuning that leaves the model as it was, or that trains the observations before the actions."""
    actor = make_actor()
    examples = [example(12, [4, 5, 6, 10], seed=seed) for seed in range(8)]
    config = SftConfig(epochs=60, batch_size=4, lr=1e-2, warmup_steps=5)
    calls: list[tuple[int, int]] = []
    history = fit_sft(actor, examples, config, seed=0, progress=lambda done, total, _: calls.append((done, total)))
    assert history[0]["sft/loss"].value == pytest.approx(math.log(VOCABULARY), abs=0.3)
    assert history[-1]["sft/loss"].value < 0.5
    assert calls[-1] == (120, 120)
    assert history[-1]["sft/lr"].value < 1e-5
    tokens = torch.from_numpy(examples[0].token_ids)[None].long()
    with torch.no_grad():
        logprobs = torch.log_softmax(actor(input_ids=tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
    trained = torch.from_numpy(examples[0].action_mask)[1:]
    assert logprobs[trained].mean() > -0.5
    assert logprobs[~trained].mean() < -2


def test_the_same_seed_gives_the_same_weights_and_another_does_not():
    """An order that depends on the process, so that a run cannot be repeated."""
    examples = [example(8, [3, 4], seed=seed) for seed in range(6)]
    actors = [make_actor() for _ in range(3)]
    for actor, seed in zip(actors, (1, 1, 2), strict=True):
        fit_sft(actor, examples, SftConfig(batch_size=2, lr=1e-3), seed=seed)
    first, second, third = (list(weights(actor).values()) for actor in actors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_bad_examples_are_refused():
    """A stage that trains on nothing, or beyond the positions that the model knows."""
    actor = make_actor()
    with pytest.raises(ValueError, match="none of 1 examples has a token to train on"):
        fit_sft(actor, [example(5, [])], SftConfig(), seed=0)
    with pytest.raises(ValueError, match="an example has 600 tokens, the model takes 512"):
        fit_sft(actor, [example(600, [5])], SftConfig(), seed=0)
    with pytest.raises(ValueError, match=r"sft\.fit\.lr is 0"):
        SftConfig(lr=0)


def test_a_gradient_that_is_never_finite_ends_the_stage():
    """Fine-tuning to the end on weights that are NaN."""
    actor = make_actor()
    with torch.no_grad():
        actor.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainerError, match="not finite in the last 2 of 2 updates"):
        fit_sft(actor, [example(5, [2])], SftConfig(steps=5, max_skipped_in_a_row=2), seed=0)


def test_skipped_updates_are_counted_and_only_a_row_of_them_ends_the_stage():
    """Updates that are lost without a trace, or a count in a row that good updates do not end."""
    actor = make_actor()
    calls = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient * float("nan") if calls in (2, 4, 5) else gradient

    actor.model.norm.weight.register_hook(spoil)
    history = fit_sft(actor, [example(5, [2])], SftConfig(steps=6, max_skipped_in_a_row=3), seed=0)
    assert [metrics["sft/skipped"].value for metrics in history] == [0, 1, 1, 2, 3, 3]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(str(save_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def conversation(*turns: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in turns]


TRACE = conversation(
    ("user", "guess a number from 1 to 9"), ("assistant", "5"), ("tool", "higher"), ("assistant", "7"), ("user", "no")
)


def test_a_trace_has_the_tokens_of_an_episode(renderer: ChatRenderer):
    """Fine-tuning on tokens that the policy never sees in an episode, or without its stop token."""
    found = render_trace(TRACE, renderer, renderer.encode_action)
    actions = [renderer.encode_action("5"), renderer.encode_action("7")]
    assert found.token_ids[found.action_mask].tolist() == actions[0] + actions[1]
    assert actions[0][-1] in renderer.stop_token_ids
    opened = renderer.open(TRACE[:1])
    assert found.token_ids[: len(opened)].tolist() == opened
    assert not found.action_mask[: len(opened)].any()
    assert found.action_mask[-1]
    expected = (
        "<|user|> guess a number from 1 to 9 <|end|> <|assistant|> 5 <|end|> <|tool|> higher <|end|> <|assistant|> 7"
    )
    assert renderer.decode(found.token_ids.tolist()).split() == [*expected.split(), "<|end|>"]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "it has nothing"),
        (TRACE[1:], "it has assistant, tool"),
        (TRACE[:1], "it has user"),
        ([*TRACE[:2], TRACE[3]], "messages 1 and 2 of a trace are both the assistant's"),
    ],
)
def test_a_trace_that_is_no_episode_is_refused(messages: list[Message], complaint: str, renderer: ChatRenderer):
    """A first action without anything before it, or a crash deep in the template."""
    with pytest.raises(ValueError, match=complaint):
        render_trace(messages, renderer, renderer.encode_action)


def test_a_trace_is_learned_to_the_letter(renderer: ChatRenderer, tmp_path: Path):
    """A shift between trace and loss, which greedy decoding shows."""
    found = render_trace(TRACE, renderer, renderer.encode_action)
    actor = load_causal_lm(ModelConfig(vocab_size=renderer.vocab_size, hidden_size=32), seed=0)
    fit_sft(actor, [found], SftConfig(steps=60, lr=3e-3), seed=0)
    tokens = torch.from_numpy(found.token_ids)[None].long()
    with torch.no_grad():
        greedy = actor(input_ids=tokens).logits[0, :-1].argmax(-1)
    trained = torch.from_numpy(found.action_mask)[1:]
    assert torch.equal(greedy[trained], tokens[0, 1:][trained])
