"""Chunked log-probs against the plain ones, forward and backward."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from sao.models.load import ModelConfig, load_causal_lm
from sao.models.scoring import action_logprobs, sequence_logprobs

LENGTHS = (7, 1, 12, 4)


def make(architecture: str, vocab_size: int = 50) -> PreTrainedModel:
    config = ModelConfig(
        architecture=architecture,  # type: ignore[arg-type]
        vocab_size=vocab_size,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=32,
        num_experts=4,
    )
    model = load_causal_lm(config, seed=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 50, (length,), generator=generator) for length in LENGTHS]


def pack(parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, position ids, and every token but the first of each sequence as a target."""
    starts = [0, *itertools.accumulate(len(part) for part in parts)]
    predictors = torch.cat(
        [torch.arange(start, start + len(part) - 1) for start, part in zip(starts, parts, strict=False)]
    )
    tokens = torch.cat(parts)
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return tokens[None], positions[None], predictors, tokens[predictors + 1]


def plain(model: PreTrainedModel, part: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Straight from the definition, one sequence alone."""
    logits = model(input_ids=part[None], use_cache=False).logits[0, :-1].float() / temperature
    table = torch.log_softmax(logits, dim=1)
    return table.gather(1, part[1:, None])[:, 0], -(table.exp() * table).sum(1)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1024])
def test_packed_and_chunked_equal_separate_and_whole(architecture: str, chunk_tokens: int):
    """Catches sequences that see one another, a shifted target, and gradients lost in the recomputed chunks."""
    parts, temperature = sequences(), 0.7
    model, packed_model = make(architecture), make(architecture)
    expected = [torch.cat(values) for values in zip(*[plain(model, part, temperature) for part in parts], strict=True)]
    scored = action_logprobs(packed_model, *pack(parts), temperature=temperature, chunk_tokens=chunk_tokens)
    weights = torch.linspace(-1, 1, len(expected[0]))
    for ours, theirs in zip(scored, expected, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not scored[1].requires_grad
    (scored[0] @ weights).backward()
    (expected[0] @ weights).backward()
    for (name, ours), theirs in zip(packed_model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text
        )


def test_without_entropy_log_probs_are_the_same():
    """Catches a shortcut that differs from the long way."""
    model, packed = make("qwen3"), pack(sequences())
    with torch.no_grad():
        long, entropy = action_logprobs(model, *packed)
        short, zeros = action_logprobs(model, *packed, with_entropy=False)
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-5)
    assert not zeros.any()
    assert (entropy > 0).all()


class LargestTensor(TorchFunctionMode):
    """Watches the vocabulary-wide tensors that any operation returns."""

    def __init__(self, vocab_size: int) -> None:
        self.rows = 0
        self._vocab_size = vocab_size

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim and result.shape[-1] == self._vocab_size:
            self.rows = max(self.rows, result.numel() // self._vocab_size)
        return result


def test_the_logits_of_a_long_sequence_never_exist():
    """Catches a head applied to all tokens at once: no tensor as wide as the vocabulary has more rows than a chunk."""
    model = make("qwen3", vocab_size=501)
    tokens = torch.randint(0, 501, (1, 200), generator=torch.Generator().manual_seed(0))
    with LargestTensor(501) as watch:
        logprobs, _ = action_logprobs(
            model, tokens, torch.arange(200)[None], torch.arange(199), tokens[0, 1:], chunk_tokens=16
        )
        logprobs.sum().backward()
    assert watch.rows == 16


def test_no_targets_give_nothing():
    """Catches a crash on a micro-batch without action tokens."""
    empty = torch.empty(0, dtype=torch.long)
    logprobs, entropy = action_logprobs(make("qwen3"), torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), empty, empty)
    assert logprobs.shape == entropy.shape == (0,)


def test_a_sequence_is_scored_token_by_token():
    """Catches a probe that is shifted: entry t is about token t + 1."""
    model, part = make("qwen3"), sequences()[2]
    with torch.no_grad():
        torch.testing.assert_close(sequence_logprobs(model, part.tolist()), plain(model, part, 1.0)[0])


def test_wrong_shapes_are_refused():
    """Catches a batch of rows where one packed row is meant, which would be scored without its packing."""
    model, line = make("qwen3"), torch.arange(4)
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        action_logprobs(model, line.view(2, 2), line.view(2, 2), line[:2], line[:2])
    with pytest.raises(ValueError, match=r"\(4,\) and targets \(3,\)"):
        action_logprobs(model, line[None], line[None], line, line[:3])
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        action_logprobs(model, line[None], line[None], line, line, chunk_tokens=0)
