"""Names to objects of the world: task sources, environments, tools.

Apart from build.py, because rollout processes use it and must start without torch.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

from sao.clock import Clock
from sao.envs.chain import ChainConfig, ChainTasks
from sao.envs.demonstrations import ChainExpert, NoiseConfig, ScriptedPolicy, gsm8k_expert
from sao.envs.grader import GraderConfig, MathGrader
from sao.envs.judge import JudgeConfig, make_judge
from sao.envs.keyed import uniform
from sao.envs.math_python import MathPythonConfig, MathPythonEnvironment
from sao.envs.protocol import CodeTool, Environment, EnvironmentFactory, Grader, Judge, TaskSource
from sao.envs.restricted import RestrictedTool
from sao.envs.sandbox import SandboxConfig, SandboxPython, UnprotectedPython
from sao.envs.sources import ListSource, gsm8k_tasks, imo_answerbench_tasks, read_tasks
from sao.envs.styles import StyleEnvironment, StyleExpert, StylesConfig, StyleTasks, style_words
from sao.envs.tokenizer import demo_words
from sao.envs.toy import GuessConfig, GuessEnvironment, GuessTasks
from sao.types import Task

Use = Literal["train", "sft", "evaluation"]

ENVIRONMENTS = ("math_python", "guess", "styles")
"""Environments of this package, by name."""

ENDLESS = ("chain", "guess", "styles")
"""Sources that are generated, without end."""

UNSPLIT = ("file", "imo_answerbench")
"""Sources without splits of their own."""


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Where tasks come from."""

    source: Literal["chain", "guess", "styles", "gsm8k", "imo_answerbench", "file"] = "chain"
    """chain, guess and styles are generated without end; gsm8k and imo_answerbench are read from a folder; file is
    JSONL."""
    path: str = ""
    """Folder of gsm8k or imo_answerbench, or the JSONL file."""
    split: Literal["auto", "train", "sft", "evaluation"] = "auto"
    """Part of the source; auto takes what the use needs: train for training, evaluation (held out) for evaluation."""
    held_out_share: float = 0.0
    """Share of file and imo_answerbench, drawn by task id, that evaluation gets and training does not; 0 gives both
    everything. The other sources have splits of their own."""
    limit: int = 0
    """Number of tasks to use; 0 for all (or endless). Of a generated source: of the part that is trained on, or that
    `split` names; demonstrations and evaluations draw on theirs without end."""
    cycle: bool = True
    """Whether a finite source starts again, shuffled anew. False ends the run with what is left as its last batch."""
    chain: ChainConfig = field(default_factory=ChainConfig)
    """For source = "chain"."""
    guess: GuessConfig = field(default_factory=GuessConfig)
    """For source = "guess"."""
    styles: StylesConfig = field(default_factory=StylesConfig)
    """For source = "styles"."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"tasks.limit is {self.limit}; use 0 for all")
        if self.limit and self.source == "styles":
            raise ValueError(
                f"tasks.limit is {self.limit}, but a pool of tasks would keep their styles for ever; tasks.source = "
                '"styles" needs 0, and its prompts come again by themselves'
            )
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"tasks.held_out_share is {self.held_out_share}; it must be at least 0 and below 1")
        if self.held_out_share and self.source not in UNSPLIT:
            raise ValueError(f'tasks.held_out_share is for {" and ".join(UNSPLIT)}; "{self.source}" has splits')
        if self.source in ("file", "gsm8k", "imo_answerbench") and not self.path:
            raise ValueError(f'tasks.source = "{self.source}" needs tasks.path')


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What the policy acts in."""

    name: str = "math_python"
    """math_python: mathematics with a Python tool. guess: the toy of envs/toy.py. styles: answers in a style.
    "module:name": one of your own, made by calling that name without arguments (docs/environments.md)."""
    tool: Literal["restricted", "sandbox", "unprotected"] = "restricted"
    """restricted: arithmetic and assignments, no process. sandbox: real Python under bubblewrap. unprotected: real
    Python with nothing around it; refused unless `allow_unprotected`."""
    allow_unprotected: bool = False
    """The explicit switch for running model-written Python with the rights of this user."""
    math_python: MathPythonConfig = field(default_factory=MathPythonConfig)
    """For name = "math_python"."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """For tool = "sandbox" and "unprotected"."""
    grader: GraderConfig = field(default_factory=GraderConfig)
    """How answers of math_python are judged."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """How answers of styles are judged."""

    def __post_init__(self) -> None:
        if self.name not in ENVIRONMENTS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.name):
            raise ValueError(
                f"environment.name is {self.name!r}; it is one of {', '.join(ENVIRONMENTS)}, or module:name of your own"
            )
        if self.tool == "unprotected" and not self.allow_unprotected:
            raise ValueError(
                'environment.tool = "unprotected" runs model-written Python with your rights; use "sandbox", or set '
                "environment.allow_unprotected = true if this machine may be lost"
            )

    def for_evaluation(self) -> "EnvironmentConfig":
        """The same without chance in its rewards, which an evaluation would only take for noise."""
        return replace(self, judge=replace(self.judge, coin=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Makes environments; holds what they share, which `stop` releases."""

    make_environment: EnvironmentFactory
    """Gives a fresh one for each episode."""
    grader: Grader
    """Judges answers that are right or wrong, for all of them."""
    judge: Judge
    """Judges other answers, for all of them."""

    async def stop(self) -> None:
        """Release the grader and the judge, on the loop that played the episodes. Safe to call twice."""
        self.grader.stop()
        await self.judge.close()


def make_world(config: EnvironmentConfig, tasks: TasksConfig, clock: Clock, *, seed: int) -> World:
    """Environments that share one grader and one judge. Nothing starts before it is needed."""
    grader, judge = MathGrader(config.grader), make_judge(config.judge, clock)
    world = partial(World, grader=grader, judge=judge)
    if ":" in config.name:
        return world(make_environment=_own_factory(config.name))
    if config.name == "guess":
        return world(make_environment=lambda: GuessEnvironment(tasks.guess))
    if config.name == "styles":
        return world(make_environment=lambda: StyleEnvironment(judge, coin=config.judge.coin, seed=seed))
    make_tool = _tool_factory(config)

    def make_environment() -> Environment:
        inline = config.tool == "restricted"
        return MathPythonEnvironment(make_tool, grader, clock, config.math_python, seed=seed, inline_tool=inline)

    return world(make_environment=make_environment)


def _own_factory(name: str) -> EnvironmentFactory:
    """What the user's module has under that name. Raises ValueError where it has nothing that can be called."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"environment.name is {name!r}: {error}. The module must be installed, or its folder in PYTHONPATH"
        ) from error
    if not callable(factory):
        raise ValueError(f"environment.name is {name!r}: it is no class or function that makes an environment")
    return cast(EnvironmentFactory, factory)


def _tool_factory(config: EnvironmentConfig) -> Callable[[], CodeTool]:
    match config.tool:
        case "restricted":
            return RestrictedTool
        case "sandbox":
            return lambda: SandboxPython(config.sandbox)
        case "unprotected":
            return lambda: UnprotectedPython(config.sandbox, unprotected=config.allow_unprotected)


def make_source(config: TasksConfig, use: Use, *, seed: int, tasks_per_step: int = 1) -> TaskSource:
    """The source a configuration names; a limit makes a pool of its tasks. Evaluation neither cycles nor shuffles.

    `tasks_per_step`: tasks that a training step takes, for a source that changes with the steps. Raises ValueError for
    bad files.
    """
    split = _split(config, use)
    match config.source:
        case "chain" | "guess" | "styles":
            endless = _endless(config, split, seed, tasks_per_step)
            # A pool to train on takes nothing from demonstrations and evaluations, which have parts of their own.
            if not config.limit or split != _split(config, "train"):
                return endless
            tasks = [task for task in map(endless.at, range(config.limit)) if task is not None]
        case "gsm8k":
            tasks = gsm8k_tasks(Path(config.path), "test" if split == "evaluation" else "train")
        case "imo_answerbench":
            tasks = _part(imo_answerbench_tasks(Path(config.path)), config, split)
        case "file":
            tasks = _part(read_tasks(Path(config.path)), config, split)
    training = use != "evaluation"
    name = f"{config.source}-{split}"
    return ListSource(
        tasks[: config.limit or None], name=name, seed=seed, shuffle=training, cycle=training and config.cycle
    )


def _endless(config: TasksConfig, split: Use, seed: int, tasks_per_step: int) -> TaskSource:
    if config.source == "chain":
        return ChainTasks(config.chain, stream=split, seed=seed)
    if config.source == "guess":
        return GuessTasks(config.guess, name=f"guess-{split}", seed=seed)
    return StyleTasks(config.styles, stream=split, seed=seed, tasks_per_step=tasks_per_step)


def source_words(config: TasksConfig) -> tuple[str, ...]:
    """What a word tokenizer must know for a source; generated tasks other than styles share one vocabulary."""
    return style_words() if config.source == "styles" else demo_words()


def _part(tasks: list[Task], config: TasksConfig, split: Use) -> list[Task]:
    """The held-out part for evaluation, the rest for all else; everything where nothing is held out."""
    if not config.held_out_share:
        return tasks
    held_out = split == "evaluation"
    return [task for task in tasks if (uniform("held out", task.id) < config.held_out_share) == held_out]


def trained_on(evaluated: TasksConfig, trained: TasksConfig) -> bool:
    """Whether what is evaluated may be what is trained on."""
    if evaluated.source != trained.source or Path(evaluated.path) != Path(trained.path):
        return False
    if evaluated.held_out_share != trained.held_out_share:
        return True
    if trained.source in UNSPLIT and not trained.held_out_share:
        return True
    splits = {_split(evaluated, "evaluation"), _split(trained, "train")}
    return len(splits) == 1 or (trained.source == "gsm8k" and "evaluation" not in splits)


def _split(config: TasksConfig, use: Use) -> Use:
    return use if config.split == "auto" else config.split


def make_expert(config: TasksConfig, noise: NoiseConfig, *, seed: int) -> Callable[[Task], ScriptedPolicy]:
    """The scripted policy that makes demonstrations for a source. Raises ValueError where there is none."""
    match config.source:
        case "chain":
            return lambda task: ChainExpert(task, noise, seed=seed)
        case "gsm8k":
            return gsm8k_expert
        case "styles":
            return lambda task: StyleExpert(task, config.styles, seed=seed)
        case _:
            raise ValueError(
                f'there is no scripted expert for tasks.source = "{config.source}"; give traces of another policy by '
                "sft.traces (`sao rollout` writes them, also with a teacher)"
            )
