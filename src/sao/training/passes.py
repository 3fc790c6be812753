"""Passes over a whole batch in packed micro-batches: what each gives is the batch's, whatever packing and ranks.

B rows, T tokens of a row or of a micro-batch, S sequences, N scored tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sao.algorithm.diagnostics import PolicyDiagnostics
from sao.algorithm.losses import reference_loss
from sao.algorithm.sao import AlgorithmConfig, actor_loss, critic_loss
from sao.pipeline.packing import MicroBatch
from sao.training.critic import Critic
from sao.training.parallel import ONE_RANK, OneRank


@torch.no_grad()
def score_values(
    critic: Critic,
    packs: Sequence[MicroBatch],
    *,
    shape: tuple[int, int],
    num_sequences: int,
    ranks: OneRank = ONE_RANK,
) -> tuple[Tensor, Tensor]:
    """Values (B, T) of the scored tokens, 0 elsewhere, and (S,) of what would follow each sequence's last token."""
    device = critic.head.weight.device
    values, beyond = torch.zeros(shape, device=device), torch.zeros(num_sequences, device=device)
    for share in ranks.deal(packs):
        micro = share.micro
        scored = ranks.values(critic, micro, np.concatenate([micro.predictor_index, micro.last_index]))
        if share.reports:
            values[micro.row, micro.column] = scored[: len(micro.row)]
            beyond[micro.sequences] = scored[len(micro.row) :]
    ranks.add_up(values, beyond)
    return values, beyond


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActorPass:
    """What one pass of the actor gave, over the batch."""

    loss: float
    """Sum over micro-batches, by the batch's denominator."""
    diagnostics: PolicyDiagnostics
    """Sums over the batch's action tokens."""
    logprobs: Tensor
    """(B, T), 0 off the scored tokens."""


def actor_pass(
    actor: PreTrainedModel,
    packs: Sequence[MicroBatch],
    *,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    denominator: float | Tensor,
    algorithm: AlgorithmConfig,
    chunk_tokens: int,
    train: bool,
    reference_logprobs: Tensor | None = None,
    reference_kl: float = 0.0,
    ranks: OneRank = ONE_RANK,
) -> ActorPass:
    """Score the action tokens; with `train` also add the gradient of the loss to the actor's parameters.

    `rollout_logprobs`, `advantages` and `reference_logprobs` are (B, T), `denominator` is a number or (B, T). With a
    reference, `reference_kl` times the distance from it is part of the loss.
    """
    everywhere = torch.zeros_like(rollout_logprobs)
    loss_sum, diagnostics = 0.0, PolicyDiagnostics()
    for share in ranks.deal([micro for micro in packs if len(micro.row)]):
        here = share.micro.row, share.micro.column
        with torch.set_grad_enabled(train):
            logprobs, entropy = ranks.action_logprobs(actor, share.micro, chunk_tokens=chunk_tokens)
            everything = torch.ones_like(logprobs, dtype=torch.bool)[None]
            divisor = denominator[here][None] if isinstance(denominator, Tensor) else denominator
            loss, found = actor_loss(
                logprobs[None],
                rollout_logprobs[here][None],
                advantages[here][None],
                everything,
                denominator=divisor,
                config=algorithm,
                entropy=entropy[None],
            )
            if reference_logprobs is not None:
                reference = reference_logprobs[here][None]
                loss = loss + reference_kl * reference_loss(logprobs[None], reference, everything, denominator=divisor)
            if train:
                (loss if share.trains else 0 * loss).backward()
        if share.reports:
            everywhere[here] = logprobs.detach()
            loss_sum += float(loss.detach())
            diagnostics += found
    ranks.add_up(everywhere)
    loss_sum, diagnostics = ranks.total(loss_sum, diagnostics)
    return ActorPass(loss=loss_sum, diagnostics=diagnostics, logprobs=everywhere)


def critic_pass(
    critic: Critic,
    packs: Sequence[MicroBatch],
    *,
    returns: Tensor,
    value_mask: Tensor,
    initial_values: Tensor,
    denominator: float,
    algorithm: AlgorithmConfig,
    ranks: OneRank = ONE_RANK,
) -> float:
    """Add the gradient of the critic's loss to its parameters; the loss. Tensors are (B, T)."""
    loss_sum = 0.0
    for share in ranks.deal([micro for micro in packs if len(micro.row)]):
        here = share.micro.row, share.micro.column
        loss = critic_loss(
            ranks.values(critic, share.micro, share.micro.predictor_index)[None],
            returns[here][None],
            value_mask[here][None],
            denominator=denominator,
            initial_values=initial_values[here][None],
            config=algorithm,
        )
        (loss if share.trains else 0 * loss).backward()
        if share.reports:
            loss_sum += float(loss.detach())
    return ranks.total(loss_sum, PolicyDiagnostics())[0]


def set_activation_checkpointing(model: PreTrainedModel, enabled: bool) -> None:
    """Whether layers' activations are computed again in the backward pass; the model stays without dropout."""
    if enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # transformers checkpoints a layer in training mode only; what is inside the layer stays in evaluation mode.
            module.training = enabled
