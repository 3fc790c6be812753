"""Everything that can be known before a run starts, checked by doing it small."""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel

from sao.build import make_renderer, prepare_tokenizer
from sao.clock import VirtualClock, run_virtual
from sao.config import RunConfig
from sao.envs.sandbox import sandbox_problem
from sao.envs.select import make_source, make_world
from sao.models.load import build_config
from sao.rollout.renderer import ChatRenderer
from sao.training.critic import attention_modules
from sao.types import Task

LOOKED_AT = 20
"""Tasks whose prompts are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    good: bool
    text: str


def preflight(config: RunConfig) -> list[Finding]:
    """Findings in order; a check that depends on a failed one is left out."""
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as scratch:
        for check in (_tokenizer, _model, _tasks, _tool, _batches, _lengths, _disk, _sinks):
            findings += _guarded(lambda check=check: check(config, Path(scratch)))
            if not findings[-1].good and check in (_tokenizer, _tasks):
                break
    return findings


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except ValueError as error:
        return [Finding(good=False, text=str(error))]


def _renderer(config: RunConfig, scratch: Path) -> ChatRenderer:
    return make_renderer(config, prepare_tokenizer(config, scratch / "tokenizer"))


def _tokenizer(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    renderer = _renderer(config, scratch)
    yield Finding(good=True, text=f"tokenizer: {renderer.vocab_size} tokens, its template only appends")


def _model(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    if config.model.gguf_file:
        file = Path(config.model.path) / config.model.gguf_file
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            yield Finding(good=False, text=f"{file} needs {' and '.join(missing)}: pip install 'sao[gguf]'")
        elif not file.is_file():
            yield Finding(good=False, text=f"there is no GGUF file {file}; see model.path and model.gguf_file")
        else:
            yield Finding(good=True, text=f"model: {file}")
        return
    vocabulary = _renderer(config, scratch).vocab_size
    if config.model.path:
        try:
            hub_config = AutoConfig.from_pretrained(config.model.path)
        except (OSError, ValueError) as error:
            yield Finding(good=False, text=f"model.path {config.model.path!r} holds no model: {error}")
            return
    else:
        hub_config = build_config(config.model, vocabulary)
    with torch.device("meta"):
        backbone = AutoModel.from_config(hub_config)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    text = hub_config.get_text_config()
    yield Finding(good=True, text=f"model: {type(backbone).__name__}, {parameters:,} parameters")
    yield Finding(
        good=text.vocab_size >= vocabulary,
        text=f"vocabulary: the model has {text.vocab_size} tokens, the tokenizer {vocabulary}",
    )
    positions = int(getattr(text, "max_position_embeddings", config.engine.max_context))
    yield Finding(
        good=positions >= config.engine.max_context,
        text=f"positions: the model knows {positions}, engine.max_context is {config.engine.max_context}",
    )
    if config.algorithm.advantage != "given" and config.trainer.freeze == "attention":
        frozen = attention_modules(backbone)
        yield Finding(good=True, text=f"critic: {len(frozen)} attention modules to freeze")


def _tasks(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    source = make_source(config.tasks, "train", seed=config.seed)
    first = source.at(0)
    if first is None:
        yield Finding(good=False, text=f"the task source {source.name} has no task")
        return
    yield Finding(good=True, text=f"tasks: {source.name}, the first is {first.question[:60]!r}")
    for tasks in config.evaluation_tasks or (config.tasks,):
        held_out = make_source(tasks, "evaluation", seed=config.seed)
        same = held_out.at(0) is not None and held_out.name == source.name
        yield Finding(
            good=not same, text=f"evaluation: {held_out.name}" + (" is what is trained on; set split" if same else "")
        )


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
    yield Finding(
        good=True,
        text=f"loop: batches of {loop.batch_size}, {min(loop.concurrency, places)} rollouts at once, {places} places",
    )


def _lengths(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    renderer = _renderer(config, scratch)
    source = make_source(config.tasks, "train", seed=config.seed)
    lengths = [_prompt_length(config, renderer, task) for task in map(source.at, range(LOOKED_AT)) if task is not None]
    room = min(config.rollout.max_tokens, config.engine.max_context)
    yield Finding(
        good=max(lengths) < room,
        text=f"prompts: up to {max(lengths)} tokens in the first {len(lengths)} tasks, of {room} for a rollout",
    )


def _prompt_length(config: RunConfig, renderer: ChatRenderer, task: Task) -> int:
    async def opening() -> int:
        world = make_world(config.environment, config.tasks, VirtualClock(), seed=config.seed)
        environment = world.make_environment()
        try:
            return len(renderer.open(await environment.reset(task)))
        finally:
            await environment.close()
            world.stop()

    return run_virtual(opening())


def _disk(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding(good=free > 1e9, text=f"disk: {free / 1e9:.1f} GB free here; checkpoints and the log need at least 1")


def _sinks(config: RunConfig, scratch: Path) -> Iterator[Finding]:
    for sink in config.sinks:
        found = importlib.util.find_spec(sink) is not None
        yield Finding(
            good=found, text=f"sink: {sink}" + ("" if found else f" is not installed: pip install 'sao[{sink}]'")
        )
    if not config.sinks:
        yield Finding(good=True, text="sinks: metrics.jsonl")
