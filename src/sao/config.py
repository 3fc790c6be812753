"""One configuration: TOML, composed of what each part declares beside itself. Unknown keys are errors.

resolve(path, overrides) -> RunConfig          read, override, check
to_toml(config) -> str                         every value, as saved with a run
describe() -> lines                            every key with its default and meaning
to_markdown() -> str                           the same as a page
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import re
import textwrap
import tomllib
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from sao.algorithm.sao import AlgorithmConfig
from sao.engines.local import EngineConfig, EngineCost
from sao.envs.demonstrations import FLAWLESS, NoiseConfig
from sao.envs.select import EnvironmentConfig, TasksConfig
from sao.evaluate import EvaluationConfig
from sao.loop import LoopConfig
from sao.models.load import ModelConfig
from sao.pipeline.baselines import BaselineConfig
from sao.rollout.process import ProcessWorkersConfig
from sao.rollout.teacher import TeacherConfig
from sao.rollout.worker import RolloutConfig
from sao.store.toml import toml_lines, toml_value
from sao.training.core import TrainerConfig
from sao.training.inline import TrainerCost
from sao.training.sft import SftConfig
from sao.training.value_pretraining import ValuePretrainingConfig

_PAGE_HEAD = """# Configuration

Every key of a run's TOML file, with its default and meaning; written by `sao config --markdown`. Keys that are left out
take their defaults, unknown keys are refused with the nearest known one, and `--set section.key=value` overrides one
from the command line (`--set sft.0.fit.lr=1e-4` in a list). `"none"` stands for no value. Sections in double brackets
may stand several times. A section that is left out altogether, such as `[value_pretraining]`, skips its stage.
"""
_ENDLESS = {
    "engine.start_timeout_s", "engine.load_timeout_s", "rollout.timeout_s", "rollout.step_timeout_s",
    "loop.batch_timeout_s", "loop.trainer_timeout_s", "loop.engine_timeout_s",
}  # fmt: skip
"""Keys that may be inf: waits that then have no end. Every other number must be finite."""
_LONGEST_S = 1e6
"""Eleven days; sockets take no limit much longer."""


class ConfigError(ValueError):
    """The configuration is wrong; the message names the key, the value and what to do."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to tokens."""

    path: str = ""
    """Folder or hub name; empty takes the model's, or builds the word tokenizer of the demo for a built model."""
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
    """Name of the run, and of its folder under runs/."""
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

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"name is {self.name!r}; it names a folder: use letters, digits, dashes and dots, no dot first"
            )
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
            raise ValueError('value_pretraining needs a critic, and algorithm.advantage = "given" builds none')
        if self.clock == "virtual" and (self.environment.tool != "restricted" or self.sinks):
            raise ValueError("in virtual time only in-process tools run, and only metrics.jsonl is written")
        self.rollout.require_neutral()


def resolve(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, apply `a.b=c` overrides, and check everything. Raises ConfigError."""
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits, of nesting without end
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return from_tree(tree, overrides)


def from_tree(tree: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A checked configuration from nested tables. Raises ConfigError."""
    for override in overrides:
        _apply(tree, override)
    _refuse_unknown(tree, RunConfig, "")
    try:
        return _adapter().validate_python(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_readable(problem) for problem in error.errors())) from error


@functools.cache
def _adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


def to_toml(config: RunConfig) -> str:
    """The resolved configuration, every value; "none" stands for None."""
    return "\n".join(toml_lines(dataclasses.asdict(config), "")) + "\n"


def describe() -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of every leaf. Keys below a list show the defaults of one entry."""
    yield from _describe(RunConfig(), "")


def to_markdown() -> str:
    """docs/configuration.md: a table for each section, in the order of the configuration."""
    lines = [_PAGE_HEAD]
    for section, leaves in itertools.groupby(describe(), key=lambda leaf: leaf[0].rpartition(".")[0]):
        lines += [f"## {_heading(section)}", "", "| key | default | meaning |", "|---|---|---|"]
        for key, default, meaning in leaves:
            shown = f"`{default}`" if default else ""
            lines.append(f"| `{key.rpartition('.')[2]}` | {shown} | {meaning.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def _heading(section: str) -> str:
    if not section:
        return "Of the whole run"
    first, _, rest = section.partition(".")
    repeated = typing.get_origin(typing.get_type_hints(RunConfig)[first]) is tuple
    return f"`[[{first}]]`" if repeated and not rest else f"`[{section}]`"


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    if "\n" in override or "\r" in override:
        raise ConfigError(f"override {override!r} has several lines; write --set before each")
    *sections, leaf = key.strip().split(".")
    table: Any = tree
    for section in sections:
        table = _enter(table, section, key)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    if isinstance(table, list):
        table[_index(table, leaf, key)] = value
    elif isinstance(table, dict):
        _refuse_index(leaf, key)
        table[leaf] = value
    else:
        raise ConfigError(f"override {key}: {sections[-1]} is a value, not a section")


def _enter(table: Any, section: str, key: str) -> Any:
    if isinstance(table, list):
        return table[_index(table, section, key)]
    if not isinstance(table, dict):
        raise ConfigError(f"override {key}: {section} lies below a value, not a section")
    _refuse_index(section, key)
    return table.setdefault(section, {})


def _refuse_index(section: str, key: str) -> None:
    if section.isdigit():
        listed = key.strip().split(f".{section}")[0]
        raise ConfigError(f"override {key}: the file has no [[{listed}]] to override; write one there first")


def _index(table: list[Any], section: str, key: str) -> int:
    if not section.isdigit() or int(section) >= len(table):
        raise ConfigError(f"override {key}: {section!r} is no index into a list of {len(table)} (they count from 0)")
    return int(section)


def _refuse_unknown(tree: Any, declared: Any, prefix: str) -> None:
    """Name the nearest key for every unknown one."""
    declared = _dataclass_of(declared)
    if declared is None:
        return
    if isinstance(tree, list):
        for index, entry in enumerate(tree):
            _refuse_unknown(entry, declared, f"{prefix}{index}.")
        return
    if not isinstance(tree, dict):
        return
    hints = typing.get_type_hints(declared)
    for key, value in tree.items():
        if key not in hints:
            raise ConfigError(f"unknown key {prefix}{key}{_nearest(key, hints, prefix)}")
        if value == "none" and type(None) in typing.get_args(hints[key]):
            tree[key] = None  # TOML has no null
        _refuse_number(value, hints[key], f"{prefix}{key}")
        _refuse_unknown(value, hints[key], f"{prefix}{key}.")


def _refuse_number(value: Any, declared: Any, key: str) -> None:
    """Refuse what no number of a configuration can be; ranges are for the section that declares it."""
    if isinstance(value, list):
        for each in value:
            _refuse_number(each, declared, key)
    elif isinstance(value, str) and float in (declared, *typing.get_args(declared)):
        try:
            number = float(value)  # as pydantic takes it: "nan" and "1e999" too
        except ValueError:
            return
        _refuse_number(number, float, key)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key} is a number of {value.bit_length()} bits; it must fit into 64")
    elif isinstance(value, float) and not math.isfinite(value):
        if value != math.inf or key not in _ENDLESS:
            raise ConfigError(f"{key} is {value}; it must be a finite number")
    elif isinstance(value, int | float) and key.endswith(("_s", "_seconds")) and value > _LONGEST_S:
        endless = ", or inf for no limit" if key in _ENDLESS else ""
        raise ConfigError(f"{key} is {value:g}; it must be at most {_LONGEST_S:g} seconds{endless}")


def _nearest(key: str, hints: dict[str, Any], prefix: str) -> str:
    close = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    everywhere = [name for name, _, _ in describe() if name.rpartition(".")[2] == key]
    return f"; did you mean {everywhere[0]}?" if everywhere else f"; known here: {', '.join(hints)}"


def _dataclass_of(declared: Any) -> Any:
    """The dataclass within X, X | None or tuple[X, ...]; None where there is none."""
    candidates = (declared, *typing.get_args(declared))
    return next((each for each in candidates if dataclasses.is_dataclass(each)), None)


def _readable(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "configuration"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        # A part does not know under which key it stands, so its message may name its own field alone.
        section = ".".join(part for part in problem["loc"] if isinstance(part, str))
        if not section or f"{section}." in message:
            return message
        key = message.split(" ")[0]
        given = isinstance(problem["input"], dict) and key in problem["input"]
        return f"{place}.{message}" if given else f"[{place}] {message}"
    if problem["type"] == "tuple_type" and isinstance(problem["input"], dict):
        return f"[{place}] is a list of sections; write [[{place}]]"
    if isinstance(problem["input"], list) and problem["type"].startswith("dataclass"):
        return f"[[{place}]] is one section; write [{place}]"
    return f"{place} is {problem['input']!r}: {message}"


def _describe(config: Any, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Leaves first, then sections. `config` holds the defaults: they may differ from those of a section's own class."""
    meanings, hints = field_docstrings(type(config)), typing.get_type_hints(type(config))
    sections = {name: inner for name in hints if (inner := _dataclass_of(hints[name])) is not None}
    for name in hints:
        if name not in sections:
            yield f"{prefix}{name}", toml_value(getattr(config, name)), meanings[name]
    for name, inner in sections.items():
        default = getattr(config, name)
        # An absent section, or a list without entries, shows what one would hold.
        yield from _describe(default if dataclasses.is_dataclass(default) else inner(), f"{prefix}{name}.")


def field_docstrings(declared: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, or of the one it extends; "" where it has none."""
    base = declared.__base__
    inherited = field_docstrings(base) if base is not None and dataclasses.is_dataclass(base) else {}
    body = ast.parse(textwrap.dedent(inspect.getsource(declared))).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {entry.name: inherited.get(entry.name, "") for entry in dataclasses.fields(declared)}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = (
                following.value.value
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                else ""
            )
            if isinstance(text, str):
                meanings[statement.target.id] = " ".join(text.split())
    return meanings
