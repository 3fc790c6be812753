"""Sequence parallelism (Ulysses): a micro-batch's tokens are shared out over a group of ranks.

Each rank holds a contiguous piece of the packed row. All of a layer but its attention works on tokens one by one, so on
the piece; for attention the ranks exchange: each gives its tokens of all heads and gets all tokens of its share of the
heads, and back. That is exact, gradients included. What is computed for scored tokens is gathered by all ranks, which
go on with the same numbers; each then sends the gradient back through its own piece alone.

T tokens of a micro-batch, P = T / ranks tokens of a piece (T padded), S sequences, N scored tokens, n the most scored
tokens of a piece, d width of a head.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from sao.models.packed_attention import attends_to_everything, lengths_mask, packed_attention
from sao.pipeline.packing import MicroBatch
from sao.training.tensors import to_tensor
from sao.types import IntArray

NAME = "sao_ulysses"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """The ranks that share micro-batches."""

    group: dist.ProcessGroup
    """For torch's collectives."""
    size: int
    """Ranks, and so pieces of each micro-batch."""
    index: int
    """Which piece is this rank's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """This rank's part of a micro-batch."""

    token_ids: Tensor
    """(1, P)"""
    position_ids: Tensor
    """(1, P); restart where sequences start, not where the piece does."""
    attention_mask: Tensor
    """(1, 1, 1, S) lengths of the whole row's sequences, the padding's included."""
    predictor_index: Tensor
    """(n,) places in the piece; filled up with 0, so that every rank uses every weight."""
    target_ids: Tensor
    """(n,)"""
    order: Tensor
    """(N,) where each scored token stands among the ranks' n each, end to end."""


def use_ulysses(model: PreTrainedModel, sequence: SequenceGroup) -> None:
    """Switch a model to attention over all pieces. Raises ValueError for a model that cannot be shared out so."""
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    check_heads(num_kv_heads, sequence.size)
    if not attends_to_everything(model):
        raise ValueError(
            f"{type(model).__name__} has layers with windowed or linear attention, which trainer.sequence_ranks does "
            "not know; set trainer.sequence_ranks = 1"
        )
    AttentionInterface.register(NAME, partial(_attention, sequence))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def check_heads(num_kv_heads: int, sequence_ranks: int) -> None:
    """Raise ValueError unless the ranks can share the key and value heads evenly."""
    if num_kv_heads % sequence_ranks:
        raise ValueError(
            f"trainer.sequence_ranks is {sequence_ranks}, which does not divide the model's {num_kv_heads} key and "
            "value heads; choose a divisor of them"
        )


def piece_of(
    micro: MicroBatch, predictors: IntArray, targets: IntArray, sequence: SequenceGroup, device: torch.device
) -> Piece:
    """This rank's part of a micro-batch in which `predictors` (N,) are to give something about `targets` (N,)."""
    count, size = len(micro.token_ids), sequence.size
    length = -(-count // size)
    fill = length * size - count
    starts = np.flatnonzero(micro.position_ids == 0)
    lengths = np.diff(starts, append=[count, *([count + fill] if fill else [])])
    padded = [np.concatenate([array, np.arange(fill)]) for array in (micro.token_ids, micro.position_ids)]
    here = slice(sequence.index * length, (sequence.index + 1) * length)
    owners = predictors // length
    most = max(int(np.bincount(owners, minlength=size).max()) if len(owners) else 0, 1)
    order, mine = np.zeros(len(predictors), np.int64), np.zeros((2, most), np.int64)
    for owner in range(size):
        chosen = np.flatnonzero(owners == owner)
        order[chosen] = owner * most + np.arange(len(chosen))
        if owner == sequence.index:
            mine[:, : len(chosen)] = predictors[chosen] - owner * length, targets[chosen]
    token_ids, position_ids = (to_tensor(array[here].astype(np.int64), device)[None] for array in padded)
    return Piece(
        token_ids=token_ids,
        position_ids=position_ids,
        attention_mask=lengths_mask(to_tensor(lengths.astype(np.int64), device)),
        predictor_index=to_tensor(mine[0], device),
        target_ids=to_tensor(mine[1], device),
        order=to_tensor(order, device),
    )


def gather(mine: Tensor, piece: Piece, sequence: SequenceGroup) -> Tensor:
    """What all ranks computed for the scored tokens, (N,), from this rank's part (n,).

    The gradient goes to this rank's part alone: all ranks compute the same loss from the result, so that a sum over
    ranks of the weights' gradients is the loss's gradient once.
    """
    gathered: Any = _Gather.apply(mine, sequence)
    return gathered.flatten()[piece.order]


def _attention(
    sequence: SequenceGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention function of `transformers` over pieces: (1, heads, P, d) to (1, P, heads, d)."""
    query, key, value = (_to_heads(states, sequence) for states in (query, key, value))
    attended, _ = packed_attention(module, query, key, value, attention_mask, **settings)
    return _to_tokens(attended, sequence), None


def _to_heads(states: Tensor, sequence: SequenceGroup) -> Tensor:
    """(1, heads, P, d) of this rank's tokens to (1, heads / ranks, T, d) of all tokens."""
    _, heads, length, width = states.shape
    shape = (sequence.size, heads // sequence.size, length, width)
    received: Any = _Exchange.apply(states.reshape(shape), sequence)
    return received.transpose(0, 1).reshape(1, shape[1], sequence.size * length, width)


def _to_tokens(attended: Tensor, sequence: SequenceGroup) -> Tensor:
    """(1, T, heads / ranks, d) to (1, P, heads, d): the way back."""
    _, count, heads, width = attended.shape
    shape = (sequence.size, count // sequence.size, heads, width)
    received: Any = _Exchange.apply(attended.reshape(shape), sequence)
    return received.transpose(0, 1).reshape(1, shape[1], sequence.size * heads, width)


class _Exchange(torch.autograd.Function):
    """Part i of the first axis goes to rank i, and part i of the result came from it. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=sequence.group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        back: Any = _Exchange.apply(gradients[0], ctx.sequence)
        return back, None


class _Gather(torch.autograd.Function):
    """(n,) of each rank to (ranks, n) on every rank; backward takes this rank's row."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        parts = [torch.empty_like(mine) for _ in range(sequence.size)]
        dist.all_gather(parts, mine.contiguous(), group=sequence.group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.sequence.index], None
