"""One configuration: TOML, composed of what each part declares beside itself. Unknown keys are errors.

resolve(path, overrides) -> RunConfig          read, override, check
to_toml(config) -> str                         every value, as saved with a run
describe() -> lines                            every key with its default and meaning
to_markdown() -> str                           the same as a page
departures(config) -> lines                    where it is not what its recipe says
"""

import dataclasses
import functools
import itertools
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sao.algorithm.sao import AlgorithmConfig
from sao.cluster.settings import ClusterConfig
from sao.config_tree import (
    ConfigError,
    apply_override,
    checked,
    dataclass_of,
    describe_fields,
    field_docstrings,
    merged,
    read_tree,
)
from sao.engines.local import EngineConfig, EngineCost
from sao.engines.pool import PoolConfig
from sao.engines.vllm_settings import VllmConfig
from sao.envs.demonstrations import FLAWLESS, NoiseConfig
from sao.envs.select import ENVIRONMENTS, EnvironmentConfig, TasksConfig
from sao.evaluate import EvaluationConfig
from sao.loop import LoopConfig
from sao.models.load import ModelConfig
from sao.pipeline.baselines import BaselineConfig
from sao.recipes import find_recipe
from sao.rollout.pool import ProcessWorkersConfig
from sao.rollout.teacher import TeacherConfig
from sao.rollout.worker import RolloutConfig
from sao.store.toml import toml_lines, toml_value
from sao.training.inline import TrainerCost
from sao.training.settings import TrainerConfig
from sao.training.sft import SftConfig
from sao.training.value_pretraining import ValuePretrainingConfig

_PAGE_HEAD = """# Configuration

Every key of a run's TOML file, with its default and meaning; written by `sao config --markdown`. Keys that are left out
take their defaults, unknown keys are refused with the nearest known one, and `--set section.key=value` overrides one
from the command line (`--set sft.0.fit.lr=1e-4` in a list). `"none"` stands for no value. Sections in double brackets
may stand several times. `[[sft]]` and `[value_pretraining]` are stages: one that neither the file nor its recipe names
is skipped, and a recipe's is skipped by `value_pretraining = "none"`.
"""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to tokens."""

    path: str = ""
    """Folder or hub name; empty takes the model's, or builds one of the task source's words for a built model."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role under which the template shows tool output; "user" for templates without a tool role."""


@dataclass(frozen=True, kw_only=True)
class SftStageConfig:
    """One stage of supervised fine-tuning; several run in order."""

    traces: str = ""
    """JSONL of traces; empty makes demonstrations with the task source's scripted expert."""
    demonstrations: int = 2000
    """Traces to make."""
    only_right: bool = False
    """Whether to leave out traces of reward 0."""
    noise: NoiseConfig = FLAWLESS
    """Errors of the scripted expert; none by default."""
    fit: SftConfig = field(default_factory=SftConfig)
    """How the traces are fitted."""

    def __post_init__(self) -> None:
        if self.demonstrations < 1:
            raise ValueError(f"sft.demonstrations is {self.demonstrations}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ValueStageConfig:
    """Value pretraining before RL: Monte-Carlo returns of the starting policy's rollouts."""

    rollouts: int = 4096
    """Rollouts to collect with the starting policy."""
    logged: str = ""
    """Log folder of an earlier run to take rollouts from, instead of collecting."""
    fit: ValuePretrainingConfig = field(default_factory=ValuePretrainingConfig)
    """How the returns are fitted."""

    def __post_init__(self) -> None:
        if self.rollouts < 2:
            raise ValueError(f"value_pretraining.rollouts is {self.rollouts}; it must be at least 2")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    name: str = "run"
    """Name of the run; its folder is runs/NAME-TIME."""
    recipe: str = ""
    """A named system, such as "grpo-dis" (`sao recipes` lists them): its settings lie below the file's own and --set's,
    which win. Empty takes the defaults, which are SAO's, without its value pretraining."""
    seed: int = 0
    """Keys all randomness of the run, together with ids."""
    clock: Literal["real", "virtual"] = "real"
    """real: engine and trainer in processes of their own. virtual: all inline and deterministic, at stated costs."""
    worker_processes: int = 1
    """Processes that render, tokenise and step environments in real time; 0 plays episodes on the loop itself."""
    tasks: TasksConfig = field(default_factory=TasksConfig)
    """What is trained on."""
    evaluation_tasks: tuple[TasksConfig, ...] = ()
    """Data sets of evaluation, a row each; none takes the held-out part of `tasks`."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """What the policy acts in."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Text to tokens."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy's network, and the critic's backbone."""
    sft: tuple[SftStageConfig, ...] = ()
    """Stages of supervised fine-tuning before RL; none skips it."""
    sft_threads: int = 2
    """Torch threads of fine-tuning, which runs before anything else needs a core."""
    value_pretraining: ValueStageConfig | None = None
    """Value pretraining before RL; none skips it."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Targets and losses."""
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    """Critic-free baselines, for comparison."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How actor and critic are optimised."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The engine that samples tokens."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """vLLM servers, for engine.kind = "vllm"."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """How several replicas of the engine, and vLLM servers, are watched."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """On which nodes of a Ray cluster engines, the trainer and rollout workers live."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Limits of an episode, and its sampling."""
    workers: ProcessWorkersConfig = field(default_factory=ProcessWorkersConfig)
    """Patience with the processes that play episodes; how many there are says worker_processes."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """How many rollouts, how far ahead."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation during training and at its end."""
    engine_cost: EngineCost = field(default_factory=EngineCost)
    """What sampling costs in virtual time."""
    trainer_cost: TrainerCost = field(default_factory=TrainerCost)
    """What training costs in virtual time."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """A model behind an endpoint that `sao rollout` asks instead of the policy."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl."""

    @property
    def tasks_per_step(self) -> int:
        """Tasks whose rollouts make a batch."""
        return self.loop.batch_size // self.loop.group_size

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"name is {self.name!r}; it names a folder: use letters, digits, dashes, dots but not first"
            )
        if self.recipe:
            find_recipe(self.recipe)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2^63")
        if self.sft_threads < 1:
            raise ValueError(f"sft_threads is {self.sft_threads}; it must be at least 1")
        if self.worker_processes < 0:
            raise ValueError(f"worker_processes is {self.worker_processes}; use 0 to play episodes on the loop itself")
        if (self.algorithm.advantage == "given") == (self.baseline.kind == "critic"):
            raise ValueError(
                f'algorithm.advantage = "{self.algorithm.advantage}" and baseline.kind = "{self.baseline.kind}" do not '
                'go together: a critic-free baseline needs algorithm.advantage = "given", and "given" needs a baseline'
            )
        grouped = self.baseline.kind in ("group_normalised", "group_mean", "leave_one_out")
        if grouped and self.loop.group_size < 2:
            raise ValueError(
                f'baseline.kind = "{self.baseline.kind}" compares rollouts of one prompt; loop.group_size is '
                f"{self.loop.group_size}, set it to 2 or more"
            )
        if self.algorithm.whiten and (grouped or self.baseline.kind == "batch_mean"):
            raise ValueError(
                f'algorithm.whiten is true with baseline.kind = "{self.baseline.kind}", whose advantages are already '
                "relative to the group or batch, and are not scaled in their source; set algorithm.whiten = false"
            )
        if self.value_pretraining is not None and self.algorithm.advantage == "given":
            raise ValueError(
                'value_pretraining needs a critic, and algorithm.advantage = "given" builds none; take the section '
                'out, or set value_pretraining = "none"'
            )
        if self.clock == "virtual" and (self.environment.tool != "restricted" or self.sinks):
            raise ValueError("in virtual time only in-process tools run, and only metrics.jsonl is written")
        if self.clock == "virtual" and self.environment.judge.kind == "model":
            raise ValueError('a model that judges answers is outside of virtual time; set clock = "real", or rules')
        self.trainer.require_clock(self.clock)
        if self.trainer.sharded and self.model.dtype != "float32":
            raise ValueError(
                f'model.dtype is "{self.model.dtype}" with trainer.ranks = {self.trainer.ranks} and '
                f'trainer.compute_dtype = "{self.trainer.compute_dtype}": FSDP2 would add up the gradients of '
                'micro-batches in that type, and save nothing; set model.dtype = "float32" and '
                'trainer.compute_dtype = "bfloat16"'
            )
        if self.clock == "virtual" and (self.engine.kind != "local" or self.engine.replicas > 1):
            raise ValueError('in virtual time only one local engine runs: set clock = "real", or engine.replicas to 1')
        if self.clock == "virtual" and self.cluster.address:
            raise ValueError('in virtual time all runs in one process; set clock = "real", or cluster.address to ""')
        self._check_world()
        self.rollout.require_neutral()

    def _check_world(self) -> None:
        """Tasks that the environment does not know, and a judge that is given up before it has answered."""
        environment, judge = self.environment.name, self.environment.judge
        for source in (self.tasks.source, *(tasks.source for tasks in self.evaluation_tasks)):
            if environment in ENVIRONMENTS and (source == "styles") != (environment == "styles"):
                raise ValueError(
                    f'tasks.source = "{source}" and environment.name = "{environment}" do not go together: the source '
                    '"styles" and the environment "styles" need each other, in evaluation_tasks too'
                )
        longest_s, room_s = judge.longest_s, self.rollout.step_timeout_s
        if environment == "styles" and judge.kind == "model" and longest_s >= room_s:
            raise ValueError(
                f"a judgement may take {longest_s:g} s (environment.judge.max_retries + 1 times "
                f"environment.judge.timeout_s, and up to 60 s before each repeat), and rollout.step_timeout_s is "
                f"{room_s:g}: lower the first two, or raise that one"
            )


def resolve(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, apply `a.b=c` overrides, and check everything. Raises ConfigError."""
    return from_tree(read_tree(path), overrides)


def from_tree(tree: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A checked configuration from nested tables, above the recipe that they name. Raises ConfigError."""
    for override in overrides:
        apply_override(tree, override)
    if isinstance(tree.get("recipe"), str) and tree["recipe"]:
        tree = merged(recipe_tree(tree["recipe"]), tree)
    return checked(RunConfig, tree, known=_keys())


def recipe_tree(name: str) -> dict[str, Any]:
    """The nested tables of a recipe. Raises ConfigError for a name that is none."""
    try:
        settings = find_recipe(name).settings
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tree: dict[str, Any] = {}
    for setting in settings:
        apply_override(tree, setting)
    return tree


def departures(config: RunConfig) -> list[str]:
    """Settings of the recipe that the run's own file or --set replaced, each "key = value (its recipe: value)"."""
    if not config.recipe:
        return []
    pure = from_tree({"recipe": config.recipe})
    keys = [setting.partition("=")[0] for setting in find_recipe(config.recipe).settings]
    pairs = [(key, _value(config, key), _value(pure, key)) for key in keys]
    return [
        f"{key} = {toml_value(here)} (its recipe: {toml_value(there)})" for key, here, there in pairs if here != there
    ]


def _value(config: Any, key: str) -> Any:
    """The value under a dotted key; a section shows as "a section", and what lies in a missing one as None."""
    for name in key.split("."):
        config = None if config is None else getattr(config, name)
    return "a section" if dataclasses.is_dataclass(config) else config


@functools.cache
def _keys() -> tuple[str, ...]:
    return tuple(name for name, _, _ in describe())


def to_toml(config: RunConfig) -> str:
    """The resolved configuration, every value; "none" stands for None."""
    return "\n".join(toml_lines(dataclasses.asdict(config), "")) + "\n"


def describe() -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of every leaf. Keys below a list show the defaults of one entry."""
    yield from describe_fields(RunConfig(), "")


def to_markdown() -> str:
    """docs/configuration.md: a table for each section, in the order of the configuration."""
    lines = [_PAGE_HEAD]
    for section, leaves in itertools.groupby(describe(), key=lambda leaf: leaf[0].rpartition(".")[0]):
        lines += [f"## {_heading(section)}", "", *_about(section), "| key | default | meaning |", "|---|---|---|"]
        for key, default, meaning in leaves:
            shown = f"`{default}`" if default else ""
            lines.append(f"| `{key.rpartition('.')[2]}` | {shown} | {meaning.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def _about(section: str) -> list[str]:
    """What a section is for, as the field that holds it says."""
    declared, meaning = RunConfig, ""
    for name in section.split(".") if section else ():
        meaning = field_docstrings(declared)[name]
        declared = dataclass_of(typing.get_type_hints(declared)[name])
    return [meaning, ""] if meaning else []


def _heading(section: str) -> str:
    if not section:
        return "Of the whole run"
    first, _, rest = section.partition(".")
    repeated = typing.get_origin(typing.get_type_hints(RunConfig)[first]) is tuple
    return f"`[[{first}]]`" if repeated and not rest else f"`[{section}]`"
