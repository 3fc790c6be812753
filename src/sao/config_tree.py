"""Nested tables against the dataclasses that declare them: overrides, unknown keys, impossible numbers, descriptions.

read_tree(path) -> tables              of a TOML file
checked(declared, tables) -> declared  as the dataclass that declares them
read_checked(declared, path)           both

Knows no section of the configuration but by its name among the waits that may be endless.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import textwrap
import tomllib
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sao.store.toml import toml_value

_ENDLESS = {
    "engine.start_timeout_s", "engine.load_timeout_s", "rollout.timeout_s", "rollout.step_timeout_s",
    "loop.batch_timeout_s", "loop.trainer_timeout_s", "loop.engine_timeout_s",
}  # fmt: skip
"""Keys that may be inf: waits that then have no end. Every other number must be finite."""
_LONGEST_S = 1e6
"""Eleven days; sockets take no limit much longer."""

Declared = TypeVar("Declared")


class ConfigError(ValueError):
    """The configuration is wrong; the message names the key, the value and what to do."""


def read_tree(path: str | Path) -> dict[str, Any]:
    """The nested tables of a TOML file. Raises ConfigError."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:  # of a number of thousands of digits, of nesting without end
        raise ConfigError(f"{path} is not TOML: {error}") from error


def checked(declared: type[Declared], tree: dict[str, Any], *, known: Sequence[str] = ()) -> Declared:
    """The dataclass that nested tables describe; `known` as in check_tree. Raises ConfigError."""
    check_tree(tree, declared, known=known)
    try:
        return _adapter(declared).validate_python(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(readable(problem) for problem in error.errors())) from error


@functools.cache
def _adapter(declared: type) -> TypeAdapter[Any]:
    return TypeAdapter(declared)


def read_checked(declared: type[Declared], path: Path) -> Declared:
    """The dataclass that a TOML file describes. Raises ConfigError, which names the file."""
    tree = read_tree(path)
    try:
        return checked(declared, tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Write section.key=value into the tree. Raises ConfigError for one that has no place there."""
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


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Nested tables of both; where both have a key, `above` wins, table by table. Neither is changed."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        result[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result


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


def check_tree(tree: Any, declared: Any, prefix: str = "", *, known: Sequence[str] = ()) -> None:
    """Raise ConfigError for an unknown key, naming the nearest of the section or of `known`, and for absurd numbers.

    Turns "none" into None where a key may be None, as TOML has no null.
    """
    declared = dataclass_of(declared)
    if declared is None:
        return
    if isinstance(tree, list):
        for index, entry in enumerate(tree):
            check_tree(entry, declared, f"{prefix}{index}.", known=known)
        return
    if not isinstance(tree, dict):
        return
    hints = type_hints(declared)
    for key, value in tree.items():
        if key not in hints:
            raise ConfigError(f"unknown key {prefix}{key}{_nearest(key, hints, prefix, known)}")
        if value == "none" and type(None) in typing.get_args(hints[key]):
            tree[key] = None
        _refuse_number(value, hints[key], f"{prefix}{key}")
        check_tree(value, hints[key], f"{prefix}{key}.", known=known)


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


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """For the end of an error: the nearest of some names, or all of them."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _nearest(key: str, hints: dict[str, Any], prefix: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    everywhere = [name for name in known if name.rpartition(".")[2] == key]
    return f"; did you mean {everywhere[0]}?" if everywhere else f"; known here: {', '.join(hints)}"


@functools.cache
def type_hints(declared: type) -> dict[str, Any]:
    """Types of the fields; resolving them is slow."""
    return typing.get_type_hints(declared)


def dataclass_of(declared: Any) -> Any:
    """The dataclass within X, X | None or tuple[X, ...]; None where there is none."""
    candidates = (declared, *typing.get_args(declared))
    return next((each for each in candidates if dataclasses.is_dataclass(each)), None)


def readable(problem: Any) -> str:
    """A problem of pydantic as a sentence that names the key."""
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


def describe_fields(config: Any, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Leaves first, then sections. `config` holds the defaults: they may differ from those of a section's own class."""
    meanings, hints = field_docstrings(type(config)), typing.get_type_hints(type(config))
    sections = {name: inner for name in hints if (inner := dataclass_of(hints[name])) is not None}
    for name in hints:
        if name not in sections:
            meaning = meanings[name] + _choices(hints[name], meanings[name])
            yield f"{prefix}{name}", toml_value(getattr(config, name)), meaning
    for name, inner in sections.items():
        default = getattr(config, name)
        # An absent section, or a list without entries, shows what one would hold.
        yield from describe_fields(default if dataclasses.is_dataclass(default) else inner(), f"{prefix}{name}.")


def _choices(hint: Any, meaning: str) -> str:
    """The values of a choice, unless the meaning goes through them all."""
    allowed = [str(value) for value in typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []
    if not allowed and typing.get_origin(hint) is tuple:
        return _choices(typing.get_args(hint)[0], meaning)
    named = all(re.search(rf"(?<![a-z_]){re.escape(value)}(?![a-z_])", meaning) for value in allowed)
    return "" if named else f" One of: {', '.join(allowed)}."


@functools.cache
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
