"""The only file that turns a configuration into objects (those of the world stand in envs/select.py)."""

import dataclasses
import os
import platform
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from sao.clock import Clock
from sao.cluster.connect import own_host
from sao.cluster.engines import local_replica, vllm_replica
from sao.cluster.settings import Room
from sao.cluster.trainer import RayTrainer
from sao.cluster.workers import RayWorkers
from sao.config import RunConfig
from sao.engines.local import LocalEngine
from sao.engines.placement import share_gpus, visible_gpus
from sao.engines.pool import EnginePool
from sao.engines.process import ProcessEngine
from sao.engines.protocol import Engine
from sao.engines.vllm import VllmEngine
from sao.engines.vllm_server import VllmServer
from sao.envs.select import World, make_world, source_words
from sao.envs.tokenizer import save_tokenizer
from sao.models.load import (
    DTYPES,
    find_device,
    load_causal_lm,
    load_folder,
    load_folder_empty,
    load_tokenizer,
    save_model,
)
from sao.observe.sinks import MetricsSink, TensorBoardSink, WandbSink
from sao.rollout.parts import worker_parts
from sao.rollout.pool import WorkerPool
from sao.rollout.process import ProcessWorkers
from sao.rollout.protocol import RolloutWorker
from sao.rollout.renderer import ChatRenderer, load_renderer
from sao.rollout.worker import LocalWorker, Purpose
from sao.training.core import TrainerCore
from sao.training.critic import Critic
from sao.training.inline import InlineTrainer
from sao.training.optimiser import Progress
from sao.training.parallel import ONE_RANK, OneRank, Place
from sao.training.process import ProcessTrainer
from sao.training.protocol import Trainer
from sao.training.weights import SnapshotStore
from sao.types import Snapshot


def prepare_tokenizer(config: RunConfig, target: Path) -> Path:
    """A folder with the tokenizer: the one named, the model's, or a word tokenizer written to `target`."""
    named = config.tokenizer.path or config.model.path
    if named and not (config.model.gguf_file and not config.tokenizer.path):
        return Path(named)
    if not (target / "tokenizer.json").is_file():
        target.mkdir(parents=True, exist_ok=True)
        if named:
            load_tokenizer(named, gguf_file=config.model.gguf_file).save_pretrained(str(target))
        else:
            save_tokenizer(target, source_words(config.tasks))
    return target


def make_renderer(config: RunConfig, tokenizer: Path) -> ChatRenderer:
    """Text to tokens and back. Raises ValueError for a tokenizer without a usable chat template."""
    return load_renderer(str(tokenizer), tool_role=config.tokenizer.tool_role)


def prepare_model(config: RunConfig, tokenizer: Path, target: Path) -> Path:
    """A folder with the starting weights as safetensors; written to `target` where they are not one already."""
    if config.model.path and not config.model.gguf_file and Path(config.model.path).is_dir():
        return Path(config.model.path)
    if not (target / "config.json").is_file():
        renderer = make_renderer(config, tokenizer)
        model = load_causal_lm(config.model, seed=config.seed, tokenizer_size=renderer.vocab_size)
        draft = target.with_name(target.name + ".partial")
        save_model(model, draft)
        draft.rename(target)
    return target


def make_core(
    config: RunConfig, model: Path, snapshots: Path, ranks: OneRank = ONE_RANK
) -> tuple[TrainerCore, SnapshotStore]:
    """Actor, critic and optimisers from starting weights; runs in the trainer's process, or on each of its ranks."""
    dtype = getattr(torch, config.model.dtype)
    if ranks.rank == 0:
        device = "cpu" if ranks.sharded else config.model.device
        actor = load_folder(model, dtype=dtype, attention=config.model.attention, device=device)
    else:  # Rank 0 sends the others its weights.
        actor = load_folder_empty(model, dtype=dtype, attention=config.model.attention)
    critic = None
    if config.algorithm.advantage != "given":
        critic = Critic.from_actor(actor, freeze=config.trainer.freeze)
    core = TrainerCore(
        actor=actor,
        critic=critic,
        config=config.trainer,
        algorithm=config.algorithm,
        value_pretraining=config.value_pretraining.fit if config.value_pretraining else None,
        seed=config.seed,
        ranks=ranks,
    )
    return core, SnapshotStore(snapshots, ranks, dtype=DTYPES[config.engine.dtype])


def make_trainer(
    config: RunConfig, clock: Clock, model: Path, snapshots: Path, progress: Progress | None = None
) -> Trainer:
    """In a process of its own, or one per rank, in real time, or in actors of a cluster; inline in virtual time.

    `progress` shows value pretraining's updates.
    """
    build, settings = partial(make_core, config, model, snapshots), config.trainer
    if clock.virtual:
        return InlineTrainer(*build(), clock, config.trainer_cost, progress)
    place = None
    if settings.sharded:
        place = Place(
            num_ranks=settings.ranks,
            sequence_ranks=settings.sequence_ranks,
            compute_dtype=settings.compute_dtype,
            device=config.model.device,
            timeout_s=settings.step_timeout_s,
        )
    timeout_s, threads = settings.step_timeout_s, settings.threads
    if config.cluster.address:
        return RayTrainer(build, config.cluster, threads=threads, timeout_s=timeout_s, progress=progress, place=place)
    return ProcessTrainer(build, threads=threads, timeout_s=timeout_s, progress=progress, place=place)


async def make_engine(config: RunConfig, clock: Clock, snapshot: Snapshot, *, purpose: Purpose = "training") -> Engine:
    """Holding `snapshot`: a pool of replicas or a process of its own in real time, inline in virtual time."""
    if clock.virtual:
        return LocalEngine.from_snapshot(snapshot, clock, config.engine, config.engine_cost)
    evaluating = purpose == "evaluation"
    servers = config.vllm.evaluation_servers if evaluating else config.vllm.servers
    vllm = config.engine.kind == "vllm" and (bool(servers) or not evaluating)
    size = (vllm and len(servers)) or (1 if evaluating else config.engine.replicas)
    if not vllm and size == 1 and not config.cluster.address:
        return await ProcessEngine.start(snapshot, config.engine)
    make = partial(_vllm_replica, config, servers) if vllm else partial(_local_replica, config)
    host = own_host(config.cluster) if config.cluster.address else ""
    return await EnginePool.start(make, size, snapshot, config.pool, host)


async def _local_replica(config: RunConfig, place: int, snapshot: Snapshot) -> Engine:
    if config.cluster.address:
        return await local_replica(config.cluster, config.engine, snapshot)
    return await ProcessEngine.start(snapshot, config.engine)


async def _vllm_replica(config: RunConfig, servers: tuple[str, ...], place: int, snapshot: Snapshot) -> Engine:
    """The engine of a running server, or of one that is started from the snapshot's folder and ends with the engine."""
    if servers:
        return await VllmEngine.connect(servers[place], snapshot, config.engine, config.vllm)
    if config.cluster.address:
        return await vllm_replica(config.cluster, config.engine, config.vllm, place, snapshot)
    gpus = server_gpus(config)[place]
    process = await VllmServer.start(snapshot.location, config.engine, config.vllm, index=place, gpus=gpus)
    return await VllmEngine.connect(process.address, snapshot, config.engine, config.vllm, process=process)


def server_gpus(config: RunConfig) -> list[tuple[str, ...]]:
    """GPUs of this machine for each vLLM server that the run starts. Raises ValueError as `share_gpus`."""
    training = config.trainer.ranks if find_device(config.model.device).type == "cuda" else 0
    gpus = visible_gpus(torch.cuda.device_count())
    return share_gpus(gpus, servers=config.engine.replicas, trainer=training, extra_args=config.vllm.extra_args)


async def make_worker(
    config: RunConfig,
    clock: Clock,
    engine: Engine,
    tokenizer: Path,
    *,
    purpose: Purpose,
    on_restart: Callable[[str], None] = lambda reason: None,
) -> tuple[RolloutWorker, World | None]:
    """Plays episodes: in processes of their own in real time, else on the loop. A world is the caller's to stop.

    `on_restart` is told why a process is replaced.
    """
    environment = config.environment if purpose == "training" else config.environment.for_evaluation()
    if isinstance(engine, (ProcessEngine, EnginePool)) and config.worker_processes:
        arguments = (
            environment,
            config.tasks,
            config.tokenizer.tool_role,
            tokenizer,
            engine.address,
            engine.secret,
            config.seed,
        )
        make = partial(RayWorkers, config.cluster) if config.cluster.address else ProcessWorkers
        workers = make(
            worker_parts,
            arguments,
            clock,
            config.rollout,
            config.workers,
            processes=config.worker_processes,
            purpose=purpose,
            on_restart=on_restart,
        )
        await workers.start()
        return workers, None
    world = make_world(environment, config.tasks, clock, seed=config.seed)
    renderer = make_renderer(config, tokenizer)
    return LocalWorker(world.make_environment, engine, renderer, clock, config.rollout, purpose=purpose), world


def worker_restarts(worker: RolloutWorker) -> int:
    """Processes of a worker that were replaced; 0 for one without."""
    return worker.restarts if isinstance(worker, WorkerPool) else 0


def cluster_rooms(config: RunConfig) -> tuple[Room, ...]:
    """All that a run asks of a cluster: replicas and workers, those of evaluation too, and the trainer's ranks."""
    servers = config.engine.kind == "vllm" and config.vllm.servers
    replicas = 0 if servers else config.engine.replicas
    evaluating = 0 if config.engine.kind == "vllm" and config.vllm.evaluation_servers else 1
    cluster = config.cluster
    return (
        *[cluster.engine] * (replicas + evaluating),
        *[cluster.trainer] * config.trainer.ranks,
        *[cluster.worker] * (2 * config.worker_processes),
    )


def make_sinks(config: RunConfig, folder: Path) -> tuple[MetricsSink, ...]:
    """Where metrics go besides metrics.jsonl. Raises ValueError for one that is not installed."""
    makers: dict[str, Callable[[], MetricsSink]] = {
        "tensorboard": lambda: TensorBoardSink(folder / "tensorboard"),
        "wandb": lambda: WandbSink(folder, name=config.name, config=dataclasses.asdict(config)),
    }
    return tuple(makers[name]() for name in config.sinks)


def describe_machine(config: RunConfig, command: list[str]) -> dict[str, object]:
    """Versions and machine, for the run folder: what someone needs to run it again."""
    names = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "pydantic", "math-verify")
    return {
        "command": shlex.join(["sao", *command[1:]]),
        "sao": metadata.version("sao"),
        "commit": _commit(),
        "packages": {name: metadata.version(name) for name in names},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "seed": config.seed,
    }


def _commit() -> str:
    """The source's commit, where it is a git checkout; "+" marks uncommitted changes."""
    try:
        commit, changes = (
            subprocess.run(["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "") if commit.returncode == 0 else "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
