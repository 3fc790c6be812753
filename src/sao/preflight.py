"""Everything that can be known before a run starts, checked by doing it small."""

import asyncio
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

from sao.build import cluster_rooms, make_renderer, prepare_tokenizer
from sao.clock import RealClock, VirtualClock, run_virtual
from sao.cluster.actors import load_ray
from sao.cluster.connect import check_nodes, cluster
from sao.config import RunConfig
from sao.engines.protocol import EngineError
from sao.envs.protocol import WorldError
from sao.envs.sandbox import sandbox_problem
from sao.envs.select import make_expert, make_source, make_world, trained_on
from sao.envs.traces import read_traces
from sao.evaluator import evaluation_tasks
from sao.models.load import DTYPES, build_config, check_head_config, find_device
from sao.preflight_engines import (
    Finding,
    ModelSize,
    check_limits,
    check_memory,
    check_servers,
    check_types,
)
from sao.rollout.renderer import ChatRenderer
from sao.store.frames import segments
from sao.training.critic import Critic
from sao.training.ulysses import check_heads
from sao.types import Message, Task

LOOKED_AT = 20
"""Tasks whose prompts are measured."""

CHECKPOINTS, SNAPSHOTS = 3, 4
"""That are on the disk at once: two checkpoints are kept while a third is written."""
LOG_BYTES = 500_000_000
"""For a log of a few million tokens."""


def preflight(config: RunConfig, folder: Path = Path()) -> list[Finding]:
    """Findings in order; a check that depends on a failed one is left out. `folder`: where the run will be written."""
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, tasks = (_run(check, config, Path(scratch)) for check in (_tokenizer, _tasks))
        findings += tokenizer
        if _good(tokenizer):
            findings += _run(_model, config, Path(scratch))
            if _good(findings) and not config.cluster.address and not config.model.gguf_file:
                findings += _run(_memory, config, Path(scratch))
        findings += tasks
        findings += _run(_ranks, config, Path(scratch))
        for check in (_types, _evaluation, _stages, _tool, _judge, _batches, _lengths, _sinks):
            needed = [*(tasks if check in (_batches, _lengths) else ()), *(tokenizer if check is _lengths else ())]
            if _good(needed):
                findings += _run(check, config, Path(scratch))
        findings += _run(partial(_disk, folder=folder), config, Path(scratch))
        if config.cluster.address:
            findings += _run(partial(_cluster, folder=folder), config, Path(scratch))
        if config.engine.kind == "vllm" and _good(findings):
            findings += _run(partial(check_servers, folder=_existing(folder)), config, Path(scratch))
    return list(dict.fromkeys(findings))  # Several checks may meet the same obstacle.


def _good(findings: list[Finding]) -> bool:
    return all(finding.good for finding in findings)


def _run(check: Callable[[RunConfig, Path], Iterator[Finding]], config: RunConfig, scratch: Path) -> list[Finding]:
    try:
        return list(check(config, scratch))
    except (ValueError, OSError, WorldError, EngineError) as error:
        return [Finding(good=False, text=str(error))]


@lru_cache(maxsize=1)
def _renderer(config: RunConfig, scratch: Path) -> ChatRenderer:
    """Read once for all checks, which share `scratch`."""
    return make_renderer(config, prepare_tokenizer(config, scratch / "tokenizer"))


def _tokenizer(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    renderer = _renderer(config, scratch)
    yield Finding(good=True, text=f"tokenizer: {renderer.vocab_size} tokens, its template only appends")


def _model(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    if config.model.gguf_file:
        file = Path(config.model.path) / config.model.gguf_file
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            yield Finding(
                good=False, text=f"{file} needs {' and '.join(missing)}: pip install -e '.[gguf]' in sao's checkout"
            )
        elif not file.is_file():
            yield Finding(good=False, text=f"there is no GGUF file {file}; see model.path and model.gguf_file")
        else:
            yield Finding(good=True, text=f"model: {file}")
        return
    vocabulary = _renderer(config, scratch).vocab_size
    backbone = _backbone(config, scratch)
    text = backbone.config.get_text_config()
    devices = f"trainer on {find_device(config.model.device)}, engine on {find_device(config.engine.device)}"
    yield Finding(good=True, text=f"model: {type(backbone).__name__}, {_parameters(backbone):,} parameters, {devices}")
    yield Finding(
        good=text.vocab_size >= vocabulary,
        text=f"vocabulary: the model has {text.vocab_size} tokens, the tokenizer {vocabulary}",
    )
    positions = int(getattr(text, "max_position_embeddings", config.engine.max_context))
    yield Finding(
        good=positions >= config.engine.max_context,
        text=f"positions: the model knows {positions}, engine.max_context is {config.engine.max_context}",
    )
    size = _size(config, scratch)
    if size.frozen:
        share = f"{size.frozen / size.critic:.0%} of its parameters"
        yield Finding(good=True, text=f"critic: {config.trainer.freeze} is frozen, {share}")


def _memory(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    yield from check_memory(config, _size(config, scratch))


def _types(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    yield from check_types(config)
    yield from check_limits(config)


def _size(config: RunConfig, scratch: Path) -> ModelSize:
    backbone = _backbone(config, scratch)
    text, body = backbone.config.get_text_config(), _parameters(backbone)
    critic = None
    if config.algorithm.advantage != "given":
        with torch.device("meta"):
            critic = Critic(backbone, freeze=config.trainer.freeze)
    # A model without attention has no such cache.
    queries = getattr(text, "num_attention_heads", 0)
    width = getattr(text, "head_dim", None) or (text.hidden_size // queries if queries else 0)
    heads = getattr(text, "num_key_value_heads", None) or queries
    return ModelSize(
        actor=body + (0 if backbone.config.tie_word_embeddings else text.vocab_size * text.hidden_size),
        critic=critic.num_parameters if critic else 0,
        frozen=round(critic.frozen_share * critic.num_parameters) if critic else 0,
        cache=2 * text.num_hidden_layers * heads * width,
    )


@lru_cache(maxsize=1)
def _backbone(config: RunConfig, scratch: Path) -> PreTrainedModel:
    """The model without weights and without its head; built once for all checks."""
    hub_config = build_config(config.model, _renderer(config, scratch).vocab_size)
    if config.model.path:
        try:
            hub_config = AutoConfig.from_pretrained(config.model.path)
        except (OSError, ValueError) as error:
            raise ValueError(f"model.path {config.model.path!r} holds no model: {error}") from error
    check_head_config(hub_config)
    with torch.device("meta"):
        return AutoModel.from_config(hub_config)


def _parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _ranks(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    settings = config.trainer
    if not settings.sharded:
        return
    if config.cluster.address:
        if settings.sequence_ranks > 1:
            check_heads(_num_kv_heads(config), settings.sequence_ranks)
        return
    gpus = torch.cuda.device_count() if find_device(config.model.device).type == "cuda" else 0
    if settings.sequence_ranks > 1:
        check_heads(_num_kv_heads(config), settings.sequence_ranks)
    groups = f", {settings.sequence_ranks} to a micro-batch" if settings.sequence_ranks > 1 else ""
    what = f"trainer: {settings.ranks} ranks{groups}, computing in {settings.compute_dtype}"
    if gpus:
        advice = "" if settings.ranks <= gpus else f", but this machine has {gpus}; lower trainer.ranks"
        yield Finding(good=settings.ranks <= gpus, text=f"{what}, a GPU each{advice}")
        return
    cores, needed = os.cpu_count() or 1, settings.ranks * settings.threads
    advice = "" if needed <= cores else f", but this machine has {cores}; lower trainer.ranks or trainer.threads"
    yield Finding(good=needed <= cores, text=f"{what}, on {needed} cores{advice}")


def _cluster(config: RunConfig, scratch: Path, folder: Path) -> Iterator[Finding]:
    """Ray's nodes; a Ray that is to be started here needs only be installed."""
    rooms = cluster_rooms(config)
    asked = "; ".join(f"{count} x {room}" for room, count in {room: rooms.count(room) for room in rooms}.items())
    if config.cluster.address == "local":
        yield Finding(good=True, text=f"cluster: Ray {load_ray().__version__}, started here for {asked}")
        return
    starts_servers = config.engine.kind == "vllm" and not config.vllm.servers
    with cluster(config.cluster, rooms):
        command = (config.vllm.command or sys.executable) if starts_servers else None
        for line in check_nodes(config.cluster, _existing(folder), rooms, command):
            yield Finding(good=True, text=f"cluster: {line}")
    yield Finding(good=True, text=f"cluster: room for {asked}")


def _num_kv_heads(config: RunConfig) -> int:
    if not config.model.path:
        return config.model.num_kv_heads
    text = AutoConfig.from_pretrained(config.model.path).get_text_config()
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def _tasks(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    source = make_source(config.tasks, "train", seed=config.seed)
    first = source.at(0)
    if first is None:
        yield Finding(good=False, text=f"the task source {source.name} has no task")
        return
    yield Finding(good=True, text=f"tasks: {source.name}, the first is {first.question[:60]!r}")


def _evaluation(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    for tasks in config.evaluation_tasks or (config.tasks,):
        held_out = make_source(tasks, "evaluation", seed=config.seed)
        if held_out.at(0) is None:
            yield Finding(good=False, text=f"evaluation: the task source {held_out.name} has no task")
        elif trained_on(tasks, config.tasks):
            # Beside others and by its name it is wanted: how far training and held-out tasks lie apart.
            wanted = tasks.split == "train" and any(
                not trained_on(other, config.tasks) for other in config.evaluation_tasks
            )
            if wanted:
                yield Finding(good=True, text=f"evaluation: {held_out.name} is what is trained on, as a data set apart")
                continue
            yield Finding(
                good=False,
                text=f"evaluation: {held_out.name} is what is trained on; set tasks.held_out_share = 0.1, "
                "evaluation_tasks.split, or evaluation_tasks.path to other tasks",
            )
    settings = config.evaluation
    counts = {
        len(evaluation_tasks(config, number)) for number in (settings.tasks, settings.final_tasks or settings.tasks)
    }
    rollouts = " and ".join(str(count * settings.samples) for count in sorted(counts))
    yield Finding(good=True, text=f"evaluation: {rollouts} rollouts, every {settings.every_steps} steps")


def _stages(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    for number, stage in enumerate(config.sft, start=1):
        if stage.traces:
            count = sum(trace.reward > 0 or not stage.only_right for trace in read_traces(Path(stage.traces)))
            text = f"sft {number}: {count} traces in {stage.traces}"
            yield Finding(good=count > 0, text=text + ("" if count else "; sft.only_right leaves none of them"))
        else:
            make_expert(config.tasks, stage.noise, seed=config.seed)
            yield Finding(good=True, text=f"sft {number}: {stage.demonstrations} demonstrations of the scripted expert")
    values = config.value_pretraining
    if values is not None and values.logged:
        found = segments(Path(values.logged))
        text = f"value pretraining: rollouts logged in {values.logged}"
        missing = " are not there; give the folder `log` of a run, or that of `sao rollout`"
        yield Finding(good=bool(found), text=text + ("" if found else missing))


def _tool(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    if config.environment.tool == "sandbox":
        problem = sandbox_problem(config.environment.sandbox)
        yield Finding(good=problem is None, text=problem or "sandbox: real Python runs under bubblewrap")
    else:
        yield Finding(good=True, text=f"tool: {config.environment.tool}")


def _batches(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    loop = config.loop
    source = make_source(config.tasks, "train", seed=config.seed)
    needed = loop.batch_size // loop.group_size
    if source.at(needed - 1) is None:
        yield Finding(
            good=False,
            text=f"the source {source.name} ends before its first full batch of {needed} prompts (loop.batch_size "
            f"{loop.batch_size}, groups of {loop.group_size}): admission could never fill one. Give more tasks, let "
            "tasks.cycle be true, or lower loop.batch_size",
        )
        return
    places = (loop.max_batches_ahead + 1) * loop.batch_size
    engines = len(config.vllm.servers) or config.engine.replicas
    at_once, sessions = min(loop.concurrency, places), config.engine.max_sessions * engines
    text = f"loop: batches of {loop.batch_size}, {at_once} rollouts at once, {places} places"
    if at_once > sessions:
        text += f"; the engines run {sessions} sessions (engine.max_sessions), so some wait for a place in the cache"
    yield Finding(good=True, text=text)


def _lengths(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    renderer = _renderer(config, scratch)
    source = make_source(config.tasks, "train", seed=config.seed)
    openings = [_opening(config, task) for task in map(source.at, range(LOOKED_AT)) if task is not None]
    lengths = [len(renderer.open(messages)) for messages in openings]
    limits = {"rollout.max_tokens": config.rollout.max_tokens, "engine.max_context": config.engine.max_context}
    room = min(limits.values())
    yield Finding(
        good=max(lengths) < room,
        text=f"prompts: up to {max(lengths)} tokens in the first {len(lengths)} tasks, of {room} for a rollout "
        f"({min(limits, key=lambda name: limits[name])})",
    )
    lost = dict.fromkeys(piece for opening in openings for each in opening for piece in renderer.unknown(each.content))
    if lost:
        shown = ", ".join(repr(piece) for piece in list(lost)[:5])
        yield Finding(
            good=False,
            text=f"prompts: {len(lost)} words are unknown to the tokenizer and would be lost, such as {shown}; that of "
            "a built model knows only the generated tasks' words: name a model.path or tokenizer.path that fits",
        )


def _opening(config: RunConfig, task: Task) -> tuple[Message, ...]:
    async def opening() -> tuple[Message, ...]:
        world = make_world(config.environment, config.tasks, VirtualClock(), seed=config.seed)
        environment = world.make_environment()
        try:
            return await environment.reset(task)
        finally:
            await environment.close()
            await world.stop()

    return run_virtual(opening())


def _judge(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    """A model that judges, by one judgement."""
    if config.environment.name == "styles" and config.environment.judge.kind == "model":
        yield asyncio.run(_try_judge(config))


async def _try_judge(config: RunConfig) -> Finding:
    clock = RealClock()
    task = make_source(config.tasks, "train", seed=config.seed).at(0)
    assert task is not None, "styles are endless"
    world = make_world(config.environment, config.tasks, clock, seed=config.seed)
    began = clock.now()
    try:
        await world.judge.judge(task, task.answer)
    except WorldError as error:
        return Finding(good=False, text=str(error))
    finally:
        await world.stop()
    seconds = clock.now() - began
    return Finding(good=True, text=f"judge: {config.environment.judge.model} marked an answer in {seconds:.1f} s")


def _existing(folder: Path) -> Path:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return place


def run_folder_bytes(parameters: int, *, sharded: bool, snapshot_width: int = 4) -> int:
    """Bytes of a run folder at its largest, for a model of so many float32 parameters; snapshots may be narrower.

    A checkpoint holds actor and critic, each with AdamW's two moments; a sharded trainer's the actor once more, plain.
    """
    checkpoint = 4 * parameters * (6 + (1 if sharded else 0))
    return CHECKPOINTS * checkpoint + SNAPSHOTS * snapshot_width * parameters + LOG_BYTES


def _disk(config: RunConfig, scratch: Path, folder: Path) -> Iterator[Finding]:
    place = _existing(folder)
    free = shutil.disk_usage(place).free
    if config.model.gguf_file:
        weights = (Path(config.model.path) / config.model.gguf_file).stat().st_size  # half a byte each, or more
        parameters = 2 * weights
    else:
        parameters = _parameters(_backbone(config, scratch))
    width = DTYPES[config.engine.dtype].itemsize
    needed = run_folder_bytes(parameters, sharded=config.trainer.sharded, snapshot_width=width)
    text = f"disk: {free / 1e9:.1f} GB free at {place}; checkpoints, snapshots and the log need about"
    yield Finding(good=free > needed, text=f"{text} {needed / 1e9:.1f}")


def _sinks(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    for sink in config.sinks:
        found = importlib.util.find_spec(sink) is not None
        yield Finding(
            good=found,
            text=f"sink: {sink}"
            + ("" if found else f" is not installed: pip install -e '.[{sink}]' in sao's checkout"),
        )
    if not config.sinks:
        yield Finding(good=True, text="sinks: metrics.jsonl")
