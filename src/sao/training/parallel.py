"""The trainer on several ranks: which rank computes what, and how the results become one.

    every rank    the whole batch (it is small), the same step, the same numbers
    weights       sharded over all ranks by FSDP2, a group per decoder layer and one for the rest; gathered where used
    micro-batch   computed by one data rank, or shared along its tokens by the sequence ranks of one (`ulysses.py`)
    gradients     summed over all ranks: losses carry the whole batch's denominator
    per token     each number is computed once and added to zeros elsewhere

Gathering weights and summing gradients are collective: all ranks must make the same passes, in the same order. So each
gets the same number of micro-batches, where there are too few of them a repeated one that counts for nothing.

B rows, T tokens of a micro-batch, N scored tokens.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sao.algorithm.diagnostics import PolicyDiagnostics
from sao.models.load import Device, find_device, named_weights
from sao.models.scoring import action_logprobs
from sao.pipeline.packing import MicroBatch
from sao.store.files import describe_error
from sao.training.critic import Critic, decoder_layers
from sao.training.protocol import TrainerError, TrainerLostError
from sao.training.tensors import forward_inputs, to_tensor
from sao.training.ulysses import SequenceGroup, gather, piece_of, use_ulysses
from sao.types import IntArray

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands among the trainer's ranks; picklable."""

    rank: int = 0
    """0 ... num_ranks - 1; 0 writes what is written once."""
    num_ranks: int = 1
    """Processes of the trainer in all."""
    rendezvous: str = ""
    """Where ranks meet, as torch's init_method: file:///... of a folder that all see, or tcp://host:port of rank 0."""
    sequence_ranks: int = 1
    """Ranks, next to each other, that share micro-batches."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in passes."""
    device: Device = "auto"
    """auto takes a GPU per rank where there is one."""
    interface: str = ""
    """Network interface of the ranks' connections, such as `lo`; empty lets gloo and NCCL choose."""
    timeout_s: float = 3600.0
    """Longest wait for the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """A micro-batch as one rank is to compute it."""

    micro: MicroBatch
    """The tokens; the same on all ranks of a sequence group."""
    trains: bool = True
    """Whether its gradient counts; a repeated micro-batch's does not."""
    reports: bool = True
    """Whether its results are this rank's to report."""


class OneRank:
    """The trainer in one process: nothing is sharded, and nothing needs to be agreed."""

    rank: int = 0
    num_ranks: int = 1
    sharded: bool = False

    def shard_actor(self, actor: PreTrainedModel) -> None:
        """Keep this rank's shard of the weights."""

    def shard_critic(self, critic: Critic) -> None:
        """Keep this rank's shard of the weights."""

    def deal(self, packs: Sequence[MicroBatch]) -> list[Share]:
        """What this rank computes of micro-batches that all ranks hold; equally many on each."""
        return [Share(micro=micro) for micro in packs]

    def action_logprobs(
        self, actor: PreTrainedModel, micro: MicroBatch, *, chunk_tokens: int, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-prob (N,) and entropy (N,) of the scored tokens, as `scoring.action_logprobs`."""
        device = actor.device
        return action_logprobs(
            actor,
            *forward_inputs(micro, device),
            to_tensor(micro.predictor_index, device),
            to_tensor(micro.target_ids, device),
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )

    def values(self, critic: Critic, micro: MicroBatch, predictors: IntArray) -> Tensor:
        """Values (N,) of what follows the places `predictors` (N,)."""
        device = critic.head.weight.device
        return critic(*forward_inputs(micro, device), to_tensor(predictors, device))

    def add_up(self, *tensors: Tensor) -> None:
        """Sum over ranks, in place."""

    def total(self, loss: float, diagnostics: PolicyDiagnostics) -> tuple[float, PolicyDiagnostics]:
        """Sums over ranks."""
        return loss, diagnostics

    def whole_weights(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        """The weights for saving, on rank 0's CPU; None where the model itself holds them. Empty on other ranks."""
        return None

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Do `work` on rank 0; its result, which must be picklable, or its error, on every rank."""
        return work()

    def on_each(self, work: Callable[[], Result]) -> list[Result]:
        """Do `work` on every rank; all results, by rank, or one rank's error, on every rank."""
        return [work()]

    def leave(self) -> None:
        """Release the connections. Safe to call twice."""


ONE_RANK = OneRank()

_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError, "TrainerError": TrainerError}
"""Errors that one rank tells the others of."""


class _ScoredActor(nn.Module):
    """Log-probs need backbone and head, called one after the other: FSDP gathers the root's weights around forward."""

    def __init__(self, actor: PreTrainedModel) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, *inputs: Tensor, chunk_tokens: int, with_entropy: bool, mask: Tensor | None) -> tuple:
        return action_logprobs(
            self.actor, *inputs, chunk_tokens=chunk_tokens, with_entropy=with_entropy, attention_mask=mask
        )


class ShardedRanks(OneRank):
    """One of several ranks; or a single one that computes in another type than its weights'."""

    sharded = True

    def __init__(self, place: Place) -> None:
        """Meet the other ranks. Raises TrainerLostError if they do not come within the time limit."""
        self.rank, self.num_ranks = place.rank, place.num_ranks
        self.device = _device(place)
        if place.interface:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, place.interface)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(
                backend,
                init_method=place.rendezvous,
                rank=place.rank,
                world_size=place.num_ranks,
                timeout=timedelta(seconds=place.timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise TrainerLostError(
                f"rank {place.rank} of {place.num_ranks} could not meet the others at {place.rendezvous}: {error}"
            ) from error
        self._mesh = init_device_mesh(self.device.type, (place.num_ranks,))
        # float32 leaves passes to the weights' own type, as in one process.
        self._dtype = torch.bfloat16 if place.compute_dtype == "bfloat16" else None
        self._scored: dict[PreTrainedModel, _ScoredActor] = {}
        self._sequence: SequenceGroup | None = None
        if place.sequence_ranks > 1:
            self._sequence = _sequence_group(place)

    def shard_actor(self, actor: PreTrainedModel) -> None:
        """Keep this rank's shard of rank 0's weights; the other ranks' may be on the meta device."""
        scored = _ScoredActor(actor)
        self._shard(scored, actor)
        self._scored[actor] = scored

    def shard_critic(self, critic: Critic) -> None:
        """Keep this rank's shard of rank 0's weights; the head computes in float32 whatever the rest does."""
        self._receive(critic.head)
        fully_shard(critic.head, mesh=self._mesh, reshard_after_forward=True)
        self._shard(critic, critic.backbone)

    def deal(self, packs: Sequence[MicroBatch]) -> list[Share]:
        """Micro-batches in order of length, one to each data rank in turn, so that ranks seldom wait for each other."""
        sequence_ranks = self._sequence.size if self._sequence else 1
        data_ranks, mine = self.num_ranks // sequence_ranks, self.rank // sequence_ranks
        reports = self._sequence is None or self._sequence.index == 0
        by_length = sorted(packs, key=lambda micro: -len(micro.token_ids))
        shares = [Share(micro=micro, reports=reports) for micro in by_length[mine::data_ranks]]
        if len(shares) < -(-len(packs) // data_ranks):
            shares.append(Share(micro=by_length[-1], trains=False, reports=False))
        return shares

    def action_logprobs(
        self, actor: PreTrainedModel, micro: MicroBatch, *, chunk_tokens: int, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-prob (N,) and entropy (N,) of the scored tokens, the same on all ranks that share the micro-batch."""
        score, sequence = self._scored[actor], self._sequence
        settings = {"chunk_tokens": chunk_tokens, "with_entropy": with_entropy}
        if sequence is None:
            places = to_tensor(micro.predictor_index, self.device), to_tensor(micro.target_ids, self.device)
            return score(*forward_inputs(micro, self.device), *places, mask=None, **settings)
        piece = piece_of(micro, micro.predictor_index, micro.target_ids, sequence, self.device)
        inputs = piece.token_ids, piece.position_ids, piece.predictor_index, piece.target_ids
        logprobs, entropy = score(*inputs, mask=piece.attention_mask, **settings)
        return gather(logprobs, piece, sequence), gather(entropy, piece, sequence)

    def values(self, critic: Critic, micro: MicroBatch, predictors: IntArray) -> Tensor:
        """Values (N,) of what follows the places `predictors`, the same on all ranks that share the micro-batch."""
        if self._sequence is None:
            return critic(*forward_inputs(micro, self.device), to_tensor(predictors, self.device))
        piece = piece_of(micro, predictors, predictors, self._sequence, self.device)
        values = critic(piece.token_ids, piece.position_ids, piece.predictor_index, piece.attention_mask)
        return gather(values, piece, self._sequence)

    def add_up(self, *tensors: Tensor) -> None:
        """Sum over ranks, in place."""
        for tensor in tensors:
            dist.all_reduce(tensor)

    def total(self, loss: float, diagnostics: PolicyDiagnostics) -> tuple[float, PolicyDiagnostics]:
        """Sums over ranks, and the largest of the maxima."""
        names = [field.name for field in fields(PolicyDiagnostics)]
        sums = torch.tensor([loss, *(getattr(diagnostics, name) for name in names)], dtype=torch.float64)
        largest = torch.tensor([diagnostics.ratio_max], dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        found = dict(zip(names, sums[1:].tolist(), strict=True)) | {"ratio_max": float(largest)}
        return float(sums[0]), PolicyDiagnostics(**found)

    def whole_weights(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The weights on rank 0's CPU, gathered one at a time; empty on other ranks."""
        found: dict[str, Tensor] = {}
        for name, weight in named_weights(model):
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if self.rank == 0:
                found[name] = whole.cpu()
        return found

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Do `work` on rank 0; its result, which must be picklable, or its error, on every rank."""
        outcome = [_attempt(work) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
        return _first_result(outcome)

    def on_each(self, work: Callable[[], Result]) -> list[Result]:
        """Do `work`, which must not talk to other ranks, on every rank; all results, or one rank's error, on each."""
        outcomes: list = [None] * self.num_ranks
        dist.all_gather_object(outcomes, _attempt(work))
        _first_result(outcomes)
        return [outcome[0] for outcome in outcomes]

    def leave(self) -> None:
        """Release the connections. Safe to call twice."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _shard(self, root: nn.Module, backbone: PreTrainedModel) -> None:
        """A group of weights for each decoder layer, and one for what is left of `root`."""
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        for _, layer in decoder_layers(backbone):
            self._receive(layer)
            fully_shard(layer, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
        self._receive(root)
        # Without resharding, weights that a pass without gradients gathered would outlive the next update.
        fully_shard(root, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if self._sequence is not None:
            use_ulysses(backbone, self._sequence)

    def _receive(self, module: nn.Module) -> None:
        """Put rank 0's weights and buffers, those not sharded yet, in their places on every rank's device."""
        received: dict[Tensor, Tensor] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and not isinstance(parameter, DTensor):
                    if parameter not in received:
                        whole = nn.Parameter(self._from_first(parameter.data), requires_grad=parameter.requires_grad)
                        received[parameter] = whole
                    owner._parameters[name] = received[parameter]  # pyright: ignore[reportArgumentType]
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = self._from_first(buffer)

    def _from_first(self, tensor: Tensor) -> Tensor:
        whole = tensor.to(self.device) if self.rank == 0 else torch.empty_like(tensor, device=self.device)
        whole = whole.contiguous()
        dist.broadcast(whole, src=0)
        return whole


def join(place: Place | None) -> OneRank:
    """Take one's place among the ranks; None is for a trainer that is not sharded."""
    return ONE_RANK if place is None else ShardedRanks(place)


def _device(place: Place) -> torch.device:
    if find_device(place.device).type == "cpu":
        return torch.device("cpu")
    local_rank = place.rank % max(torch.cuda.device_count(), 1)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _sequence_group(place: Place) -> SequenceGroup:
    size, mine = place.sequence_ranks, None
    for first in range(0, place.num_ranks, size):
        members = list(range(first, first + size))
        group = dist.new_group(members)  # Every rank must make every group.
        if place.rank in members:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return SequenceGroup(group=mine, size=size, index=place.rank % size)


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, str, str]:
    """A result, or kind and text of an error, so that the other ranks learn of it instead of waiting."""
    try:
        return work(), "", ""
    except (ValueError, OSError, TrainerError) as error:
        kind = next(name for name, kind in _KINDS.items() if isinstance(error, kind))
        return None, kind, describe_error(error)


def _first_result(outcomes: Sequence) -> Any:
    """The first rank's result. Raises the first error there is."""
    for rank, (_, kind, text) in enumerate(outcomes):
        if kind:
            raise _KINDS[kind](text if len(outcomes) == 1 or kind == "ValueError" else f"rank {rank}: {text}")
    return outcomes[0][0]
