"""Passes over a whole batch in packed micro-batches: what each gives is the batch's, whatever the packing.

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
from sao.algorithm.sao import AlgorithmConfig, actor_loss, critic_loss
from sao.models.scoring import action_logprobs
from sao.pipeline.packing import MicroBatch
from sao.training.critic import Critic


def to_tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor on the device; integers become int64, which torch's indexing takes."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(device, torch.int64 if tensor.dtype is torch.int32 else None)


def forward_inputs(micro: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and position ids of a micro-batch, (1, T) each."""
    return to_tensor(micro.token_ids, device)[None], to_tensor(micro.position_ids, device)[None]


@torch.no_grad()
def score_values(
    critic: Critic, packs: Sequence[MicroBatch], *, shape: tuple[int, int], num_sequences: int
) -> tuple[Tensor, Tensor]:
    """Values (B, T) of the scored tokens, 0 elsewhere, and (S,) of what would follow each sequence's last token."""
    device = critic.head.weight.device
    values, beyond = torch.zeros(shape, device=device), torch.zeros(num_sequences, device=device)
    for micro in packs:
        predictors = to_tensor(np.concatenate([micro.predictor_index, micro.last_index]), device)
        scored = critic(*forward_inputs(micro, device), predictors)
        values[micro.row, micro.column] = scored[: len(micro.row)]
        beyond[micro.sequences] = scored[len(micro.row) :]
    return values, beyond


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActorPass:
    """What one pass of the actor gave, over the batch."""

    loss: float
    diagnostics: PolicyDiagnostics
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
) -> ActorPass:
    """Score the action tokens; with `train` also add the gradient of the loss to the actor's parameters.

    `rollout_logprobs` and `advantages` are (B, T), `denominator` is a number or (B, T).
    """
    device = actor.device
    everywhere = torch.zeros_like(rollout_logprobs)
    loss_sum, diagnostics = 0.0, PolicyDiagnostics()
    for micro in packs:
        if not len(micro.row):
            continue
        here = micro.row, micro.column
        with torch.set_grad_enabled(train):
            logprobs, entropy = action_logprobs(
                actor,
                *forward_inputs(micro, device),
                to_tensor(micro.predictor_index, device),
                to_tensor(micro.target_ids, device),
                chunk_tokens=chunk_tokens,
                with_entropy=True,
            )
            loss, found = actor_loss(
                logprobs[None],
                rollout_logprobs[here][None],
                advantages[here][None],
                torch.ones_like(logprobs, dtype=torch.bool)[None],
                denominator=denominator[here][None] if isinstance(denominator, Tensor) else denominator,
                config=algorithm,
                entropy=entropy[None],
            )
            if train:
                loss.backward()
        everywhere[here] = logprobs.detach()
        loss_sum += float(loss.detach())
        diagnostics += found
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
) -> float:
    """Add the gradient of the critic's loss to its parameters; the loss. Tensors are (B, T)."""
    device = critic.head.weight.device
    loss_sum = 0.0
    for micro in packs:
        if not len(micro.row):
            continue
        here = micro.row, micro.column
        loss = critic_loss(
            critic(*forward_inputs(micro, device), to_tensor(micro.predictor_index, device))[None],
            returns[here][None],
            value_mask[here][None],
            denominator=denominator,
            initial_values=initial_values[here][None],
            config=algorithm,
        )
        loss.backward()
        loss_sum += float(loss.detach())
    return loss_sum


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
