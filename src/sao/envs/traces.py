"""Traces: played episodes as text, for supervised fine-tuning. One JSON object a line."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao.types import Message

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One played episode."""

    task_id: str
    messages: tuple[Message, ...]
    """From the opening to the last assistant message; only assistant messages are to be imitated."""
    reward: float


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
        try:
            yield _trace(json.loads(line))
        except (json.JSONDecodeError, _BadTraceError) as error:
            raise ValueError(f"{path}, line {number}: {error}; the line reads {shorten(line)}") from error
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


def shorten(text: str) -> str:
    """A text for an error message, at most 120 characters of it, quoted."""
    return repr(text if len(text) <= 120 else text[:117] + "...")


class _BadTraceError(Exception):
    """What is wrong with a record."""


def _trace(record: Any) -> Trace:
    if not isinstance(record, dict):
        raise _BadTraceError("not a JSON object")
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _BadTraceError('field "messages" must be a list that is not empty')
    reward = record.get("reward", 1.0)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < float("inf"):
        raise _BadTraceError(f'field "reward" is {reward!r}; it must be a finite number')
    converted = _merge_tools([_message(message) for message in messages])
    if not any(message.role == "assistant" for message in converted):
        raise _BadTraceError("no assistant message, so there is nothing to imitate")
    return Trace(task_id=str(record.get("task_id", "")), messages=tuple(converted), reward=float(reward))


def _message(record: Any) -> Message:
    if not isinstance(record, dict) or record.get("role") not in ROLES:
        role = record.get("role") if isinstance(record, dict) else record
        raise _BadTraceError(f"a message has the role {role!r}; roles are {', '.join(ROLES)}")
    content = record.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise _BadTraceError(f"a message's content is {content!r}; it must be text")
    calls = record.get("tool_calls") or ()
    if calls:
        # A message runs one block, so that several calls of one message become one.
        code = "\n".join(_code_of(call) for call in calls)
        content = (content + "\n" if content else "") + f"<python> {code} </python>"
    return Message(role=record["role"], content=content)


def _code_of(call: Any) -> str:
    try:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        values = list(arguments.values())
        code = arguments["code"] if "code" in arguments else values[0] if len(values) == 1 else None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise _BadTraceError(f"a tool call cannot be read: {shorten(str(call))}") from error
    if not isinstance(code, str):
        raise _BadTraceError(f'a tool call has no argument "code": {shorten(str(call))}')
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
