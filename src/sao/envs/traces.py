"""Traces: played episodes as text, for supervised fine-tuning. One JSON object a line."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sao.types import Message

ROLES = ("system", "user", "assistant", "tool")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89abcdefABCDEF]")

Made = TypeVar("Made")


class BadRecordError(Exception):
    """What is wrong with a record of a file; `parse_line` adds where it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One played episode."""

    task_id: str
    """Of the task that was played; several traces may share it."""
    messages: tuple[Message, ...]
    """From the opening to the last assistant message; only assistant messages are to be imitated."""
    reward: float
    """Sum over the episode; above 0 counts as right."""


def write_traces(path: Path, traces: Iterable[Trace]) -> int:
    """Write a file of traces and return how many there were. An existing file is replaced."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for trace in traces:
            count += 1
            messages = [{"role": message.role, "content": message.content} for message in trace.messages]
            line = {"task_id": trace.task_id, "messages": messages, "reward": trace.reward}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return count


def read_traces(path: Path) -> Iterator[Trace]:
    """Traces of a file, in order; OpenAI `tool_calls` become `<python>` blocks.

    Raises ValueError naming the file, the line and the offending text.
    """
    count = 0
    for number, line in read_lines(path):
        yield parse_line(path, number, line, _trace)
        count += 1
    if count == 0:
        raise ValueError(f"{path} holds no trace; expected one JSON object a line with task_id, messages and reward")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a UTF-8 file, from 1, blank ones left out. Raises ValueError for a missing or broken file."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give the path of a JSONL file")
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error}); save the file as UTF-8") from error
            if line:
                yield number, line


def parse_line(path: Path, number: int, line: str, make: Callable[[Any], Made]) -> Made:
    """What `make` makes of a line of JSON; it raises BadRecordError for what it cannot use.

    Raises ValueError naming file, line and text, also for what JSON allows and nothing here can use: numbers that are
    not finite, numbers of thousands of digits, halves of characters (a lone `\\ud800`), and nesting without end.
    """
    try:
        return make(_loads(line))
    except BadRecordError as error:
        raise ValueError(f"{path}, line {number}: {error}; the line reads {shorten(line)}") from error
    except RecursionError:
        # Without the cause: its trace is a thousand frames long.
        raise ValueError(f"{path}, line {number}: nested too deeply; the line reads {shorten(line)}") from None


def shorten(text: str) -> str:
    """A text for an error message, at most 120 characters of it, quoted."""
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _loads(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise BadRecordError(f"not JSON ({error})") from error
    except ValueError as error:
        raise BadRecordError("a number has thousands of digits; write it as text") from error
    # Whole pairs are one character by now, so that what is left is half of one. Few texts need the second look.
    if _ESCAPED_SURROGATE.search(text) and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise BadRecordError("a text holds half of a character (a lone surrogate, such as \\ud800); remove it")
    return value


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def _refuse_number(text: str) -> Any:
    raise BadRecordError(f"a number is {shorten(text)}; numbers must be finite")


def _trace(record: Any) -> Trace:
    if not isinstance(record, dict):
        raise BadRecordError("not a JSON object")
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRecordError('field "messages" must be a list that is not empty')
    reward = record.get("reward", 1.0)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
        raise BadRecordError(f'field "reward" is {_shown(reward)}; it must be a finite number')
    task_id = record.get("task_id", "")
    if isinstance(task_id, bool) or not isinstance(task_id, str | int):
        raise BadRecordError(f'field "task_id" is {_shown(task_id)}; it must be text or a whole number')
    converted = _merge_tools([_message(message) for message in messages])
    if not any(message.role == "assistant" for message in converted):
        raise BadRecordError("no assistant message, so there is nothing to imitate")
    return Trace(task_id=str(task_id), messages=tuple(converted), reward=float(reward))


def _message(record: Any) -> Message:
    if not isinstance(record, dict) or record.get("role") not in ROLES:
        role = record.get("role") if isinstance(record, dict) else record
        raise BadRecordError(f"a message has the role {_shown(role)}; roles are {', '.join(ROLES)}")
    content = record.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise BadRecordError(f"a message's content is {_shown(content)}; it must be text")
    calls = record.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadRecordError(f"a message's tool_calls is {_shown(calls)}; it must be a list")
    if calls:
        # A message runs one block, so that several calls of one message become one.
        code = "\n".join(_code_of(call) for call in calls)
        content = (content + "\n" if content else "") + f"<python> {code} </python>"
    return Message(role=record["role"], content=content)


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise BadRecordError(f"a part of a message's content is {_shown(part)}; it must be an object with a text")
    return text


def _code_of(call: Any) -> str:
    try:
        arguments = call["function"]["arguments"]
        arguments = _loads(arguments) if isinstance(arguments, str) else arguments
        values = list(arguments.values())
        code = arguments["code"] if "code" in arguments else values[0] if len(values) == 1 else None
    except (KeyError, TypeError, AttributeError, BadRecordError) as error:
        reason = f" ({error})" if isinstance(error, BadRecordError) else ""
        raise BadRecordError(f"a tool call cannot be read{reason}: {_shown(call)}") from error
    if not isinstance(code, str):
        raise BadRecordError(f'a tool call has no argument "code": {_shown(call)}')
    return code


def _merge_tools(messages: list[Message]) -> list[Message]:
    """Neighbouring tool messages as one: the output of calls that were made one."""
    merged: list[Message] = []
    for message in messages:
        if message.role == "tool" and merged and merged[-1].role == "tool":
            merged[-1] = Message(role="tool", content=merged[-1].content + "\n" + message.content)
        else:
            merged.append(message)
    return merged


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
