"""What can be known of engines before a run: memory, types, time limits, vLLM's servers; by doing it small on those."""

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from transformers import PreTrainedModel

from sao.build import prepare_model, prepare_tokenizer, server_gpus
from sao.config import RunConfig
from sao.engines.placement import gpus_per_server, visible_gpus
from sao.engines.protocol import EngineError
from sao.engines.vllm import VllmEngine
from sao.engines.vllm_server import vllm_version
from sao.models.load import DTYPES, find_device, load_folder, output_head
from sao.training.weights import SnapshotStore
from sao.types import Snapshot

NOISE = 0.02
"""Nats by which log-probs of a probe differ where one of engine and trainer computes in bfloat16, at the least: the
smallest model in docs/vllm.md's table differs by 7e-3 on average and by 5e-2 at most."""

_LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    good: bool
    """False stops the run before it starts."""
    text: str
    """A sentence: what was found, or what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers that a model holds."""

    actor: int
    """Parameters, those of a head of its own included."""
    critic: int
    """Parameters; 0 without a critic."""
    frozen: int
    """Of the critic's, those that do not train."""
    cache: int
    """Keys and values of a token, all layers together."""


def trainer_bytes(size: ModelSize, *, width: int = 4) -> int:
    """Weights, gradients and AdamW's two moments of all that trains, and the weights, `width` bytes each, of the rest.

    16 bytes a parameter in either type: bfloat16 weights and gradients have a float32 copy beside them.
    """
    return 16 * (size.actor + size.critic - size.frozen) + width * size.frozen


def check_types(config: RunConfig) -> Iterator[Finding]:
    """Of engine and trainer, and whether the probe can bear their difference."""
    engine = config.engine
    trainer = config.trainer.compute_dtype if config.trainer.sharded else config.model.dtype
    text = f"types: the engine computes in {engine.dtype}, the trainer in {trainer}"
    same_code = engine.kind == "local" and engine.dtype == trainer
    if "bfloat16" in (engine.dtype, trainer) and not same_code and engine.probe_tolerance < NOISE:
        yield Finding(
            good=False,
            text=f"{text}, whose log-probs differ by {NOISE:g} nats and more; engine.probe_tolerance is "
            f"{engine.probe_tolerance:g}, so that no update would pass its probe: set it to about 0.3",
        )
    else:
        yield Finding(good=True, text=f"{text}, probe tolerance {engine.probe_tolerance:g} nats")


def check_limits(config: RunConfig) -> Iterator[Finding]:
    """A remark where the loop would give up before a lost replica can be replaced."""
    engine, vllm, loop = config.engine, config.vllm, config.loop
    if engine.kind != "vllm":
        return
    update = engine.load_timeout_s + 2 * vllm.pause_timeout_s + vllm.probe_timeout_s
    if config.pool.load_timeout_s < update:
        yield Finding(
            good=True,
            text=f"time limits: pool.load_timeout_s is {config.pool.load_timeout_s:g} s, and a weight update may take "
            f"{update:g} (engine.load_timeout_s, twice vllm.pause_timeout_s, vllm.probe_timeout_s): a replica that is "
            "as slow as they allow is replaced in the middle of it",
        )
    waits = {"pool.load_timeout_s": config.pool.load_timeout_s}
    if not vllm.servers:
        waits["engine.start_timeout_s"] = engine.start_timeout_s
        if config.cluster.address:
            waits["cluster.place_timeout_s"] = config.cluster.place_timeout_s
    replaced = sum(waits.values()) + update
    if loop.engine_timeout_s < replaced:
        yield Finding(
            good=True,
            text=f"time limits: loop.engine_timeout_s is {loop.engine_timeout_s:g} s; where a weight update loses the "
            f"last replica, its replacement may take {replaced:g} ({', '.join(waits)}, and an update of {update:g}): "
            "the run would stop before, to be resumed",
        )


def check_memory(config: RunConfig, size: ModelSize) -> Iterator[Finding]:
    """What is surely needed on this machine, against what is free: no activations, and nothing of other programs."""
    needs = _needs(config, size)
    for device, free in (("cpu", _free_ram()), ("cuda", _free_gpu() if "cuda" in needs else None)):
        parts = {what: count for what, count in needs.get(device, {}).items() if count}
        needed = sum(parts.values())
        if free is None or not needed:
            continue
        listed = ", ".join(f"{what} {_gigabytes(count)}" for what, count in parts.items())
        where, more = ("memory", "") if device == "cpu" else ("memory of the first GPU", "; docs/one_gpu.md has more")
        advice = (
            "" if needed <= free else f". Take a smaller model, engine.max_sessions, or trainer.freeze = backbone{more}"
        )
        text = f"{where}: {_gigabytes(free)} GB free; needed at least {_gigabytes(needed)} ({listed}){advice}"
        yield Finding(good=needed <= free, text=text)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f}"


def _needs(config: RunConfig, size: ModelSize) -> dict[str, dict[str, int]]:
    """Bytes by kind of device and by part. All ranks are in the machine's memory, one is on its first GPU."""
    found: dict[str, dict[str, int]] = {"cpu": {}}
    engine, width = config.engine, DTYPES[config.engine.dtype].itemsize
    cache = width * size.cache * (engine.max_sessions + 1) * (engine.max_context + 1)
    local, training = (find_device(settings.device).type for settings in (engine, config.model))
    ranks = config.trainer.ranks if training == "cuda" else 1
    found.setdefault(training, {})["trainer"] = trainer_bytes(size, width=DTYPES[config.model.dtype].itemsize) // ranks
    holder = found.setdefault(local, {})
    if engine.kind == "local":
        holder["engine"] = engine.replicas * (width * size.actor + cache)
    elif not config.vllm.servers and "cpu" in vllm_version(config.vllm.command or sys.executable):
        found["cpu"]["servers"] = engine.replicas * (width * size.actor + (config.vllm.kv_cache_mb << 20))
    elif not config.vllm.servers and any(gpus[:1] == visible_gpus(1) for gpus in server_gpus(config)):
        one_session = width * (size.actor + size.cache * engine.max_context)
        found.setdefault("cuda", {})["server"] = one_session // gpus_per_server(config.vllm.extra_args)
    if not (engine.kind == "vllm" and config.vllm.evaluation_servers):
        holder["evaluation's engine"] = width * size.actor + cache
    return found


def _free_ram() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _free_gpu() -> int | None:
    """Of the first GPU. Asked for in a process of its own, since asking takes half a gigabyte there for good."""
    code = "import torch; print(torch.cuda.mem_get_info(0)[0])"
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout)
    return None


def check_servers(config: RunConfig, scratch: Path, folder: Path) -> Iterator[Finding]:
    """The Python that starts servers; or weight updates and a generation on those that run, from the run's disk."""
    servers = (*config.vllm.servers, *config.vllm.evaluation_servers)
    if config.vllm.transport != "folder":
        yield _transfer_address(config)
    if not config.vllm.servers:
        yield _to_place(config) if config.cluster.address else _to_start(config)
    if not servers:
        return
    model = load_folder(prepare_model(config, prepare_tokenizer(config, scratch / "tokenizer"), scratch / "start"))
    with tempfile.TemporaryDirectory(prefix=".sao-check-", dir=folder) as shared:
        store = SnapshotStore(shared)
        snapshot = store.write(model, version=0, parent=None)
        other = _perturbed(model, store, snapshot, least=4 * config.engine.probe_tolerance)
        for address in servers:
            yield asyncio.run(_try_server(config, address, other, snapshot))


def _to_start(config: RunConfig) -> Finding:
    version = vllm_version(config.vllm.command or sys.executable)
    where = ""
    if "cpu" not in version:
        where = "; ".join(f"GPU {', '.join(gpus)}" for gpus in server_gpus(config) if gpus)
    text = f"engine: {config.engine.replicas} servers of vLLM {version}"
    return Finding(good=True, text=text + (f", on {where}" if where else ""))


def _to_place(config: RunConfig) -> Finding:
    """Ray shows a server those GPUs alone that were set aside for it."""
    span, gpus = gpus_per_server(config.vllm.extra_args), config.cluster.engine_gpus
    if span > max(gpus, 1):
        return Finding(
            good=False,
            text=f"cluster.engine_gpus is {gpus:g}, and by vllm.extra_args a server spans {span} GPUs: set it so",
        )
    return Finding(good=True, text=f"engine: {config.engine.replicas} servers of vLLM, {gpus:g} GPUs each")


def _transfer_address(config: RunConfig) -> Finding:
    """Whether this machine has it, and whether the servers can reach it there."""
    address = config.vllm.transfer_address
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        text = f"vllm.transfer_address {address} is none of this machine's: {error.strerror or error}"
        return Finding(good=False, text=f"{text}; name the one at which the servers reach it")
    hosts = [urlsplit(server).hostname or "" for server in (*config.vllm.servers, *config.vllm.evaluation_servers)]
    elsewhere = [host for host in hosts if not host.startswith(_LOOPBACK)]
    if config.cluster.address not in ("", "local"):
        elsewhere.append("[cluster]'s nodes")
    if address.startswith(_LOOPBACK) and elsewhere:
        return Finding(
            good=False,
            text=f"vllm.transfer_address {address} is reached from this machine alone, and not from "
            f"{', '.join(elsewhere)}; name an address of this machine in their network",
        )
    return Finding(good=True, text=f"weights are sent from {address} by {config.vllm.transport}")


def _perturbed(model: PreTrainedModel, store: SnapshotStore, true: Snapshot, *, least: float) -> Snapshot:
    """A snapshot of a model with scaled logits, whose probe's log-probs differ by more than `least`.

    A server that was started from the true weights can show that it takes an update only by taking another one first.
    """
    weight = output_head(model).weight
    assert isinstance(weight, torch.Tensor)
    for factor in (0.5, 4.0, 32.0):  # Powers of two, so that no bit is lost on the way back.
        weight.data.mul_(factor)
        snapshot = store.write(model, version=1, parent=0)
        weight.data.div_(factor)
        if np.abs(np.subtract(snapshot.probe_logprobs, true.probe_logprobs)).max() > least:
            return snapshot
    raise ValueError(
        f"the model's log-probs hardly depend on its weights, so an engine.probe_tolerance of {least / 4:g} nats "
        "proves nothing; set a smaller one"
    )


async def _try_server(config: RunConfig, address: str, other: Snapshot, true: Snapshot) -> Finding:
    """Two updates: to other weights, and back to those that the run starts from."""
    try:
        engine = await VllmEngine.connect(address, other, config.engine, config.vllm)
        try:
            await engine.load(true)
            health = await engine.health()
        finally:
            await engine.stop()
    except EngineError as error:
        return Finding(good=False, text=str(error))
    seconds, gap = health.update_seconds, health.probe_gap
    return Finding(good=True, text=f"engine: {address} took weights in {seconds:.1f} s, probe gap {gap:.1e} nats")
