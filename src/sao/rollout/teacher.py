"""Traces of a teacher behind an OpenAI-compatible chat endpoint, for supervised fine-tuning.

The teacher plays the same environments as the policy, by messages instead of tokens.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from sao.clock import Clock
from sao.envs.chat import ChatClient, EndpointConfig, EndpointError, UnansweredError
from sao.envs.math_python import INSTRUCTIONS
from sao.envs.protocol import EnvironmentFactory, WorldError
from sao.envs.traces import Trace, read_traces
from sao.types import Message, Task


class TeacherError(RuntimeError):
    """The teacher cannot be used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(EndpointConfig):
    """Where the teacher is, and how it is asked."""

    section = "teacher"

    system_prompt: str = INSTRUCTIONS
    """Shown to the teacher before each episode, and left out of the traces: what the student learns by example. The
    default tells of math_python's tool; empty for a teacher that knows the format."""
    tool_role: str = "user"
    """Role under which tool output is sent; most endpoints take "tool" only after a call in their own format."""
    cut_after: tuple[str, ...] = ("</python>", "</answer>")
    """A reply is cut behind the first of these: a teacher that invents its tool's output would teach inventing."""
    temperature: float | None = 0.7
    """From 0 to 2; its log-probs are not used, so it need not be 1. None leaves it out of the request, as hosted
    reasoning models want."""
    max_tokens: int = 2048
    """Tokens of one reply; an episode with a longer one gives no trace."""
    max_turns: int = 50
    """Replies in an episode, as for the policy."""
    attempts: int = 1
    """Episodes per task until one is kept."""
    only_right: bool = True
    """Keep only episodes whose reward reaches `right_reward`."""
    right_reward: float = 1.0
    """Reward of a right answer; above 0, which wrong answers get."""
    concurrency: int = 8
    """Episodes at once, a request each."""
    timeout_s: float = 300.0
    """Seconds for one reply."""
    max_retries: int = 5
    """Repeats of a request that was refused for the moment, or whose reply cannot be used; waiting 1, 2, 4 ... seconds
    before, or as long as the endpoint says, at most 60."""
    max_failures_in_a_row: int = 20
    """Episodes that fail one after the other before the collection gives up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_turns", "attempts", "max_failures_in_a_row"):
            if not getattr(self, name) > 0:
                raise ValueError(f"teacher.{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.right_reward < math.inf:
            raise ValueError(
                f"teacher.right_reward is {self.right_reward}; it must be finite and above 0, which wrong answers get"
            )


class Teacher:
    """One chat endpoint. Close it when done."""

    def __init__(self, config: TeacherConfig, clock: Clock) -> None:
        """Raises TeacherError for a key that is none."""
        self._config = config
        try:
            self._client = ChatClient(config, clock)
        except EndpointError as error:
            raise TeacherError(str(error)) from error

    async def reply(self, messages: Sequence[Message]) -> str:
        """The next assistant message. Raises TeacherError if none will ever come, UnansweredError if not to this."""
        config = self._config
        system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
        turns = [{"role": config.tool_role if m.role == "tool" else m.role, "content": m.content} for m in messages]
        try:
            text = await self._client.reply([*system, *turns])
        except EndpointError as error:
            raise TeacherError(str(error)) from error
        ends = [text.find(mark) + len(mark) for mark in config.cut_after if mark in text]
        return text[: min(ends)] if ends else text

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


@dataclass(kw_only=True)
class Collected:
    """What became of the tasks."""

    kept: int = 0
    """Traces written by this collection."""
    already_there: int = 0
    """Tasks with a trace in the file before, which were not asked again."""
    wrong: int = 0
    """Tasks whose last episode did not end, or did not reach the reward."""
    failed: int = 0
    """Tasks whose last episode broke off."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why episodes broke off or did not end, and how often."""


async def collect_traces(
    tasks: Iterable[Task],
    make_environment: EnvironmentFactory,
    path: Path,
    config: TeacherConfig,
    clock: Clock,
    *,
    progress: Callable[[Task, Trace | None], None] | None = None,
) -> Collected:
    """Let the teacher play `tasks`, and append its traces to the JSONL file `path` as they come.

    Tasks that the file already holds are skipped, so a collection that was interrupted goes on when called again.
    `progress` is called once per task, with the trace that was kept. Raises TeacherError when the teacher cannot be
    used, ValueError for a file that holds something else.
    """
    held = _resume(path)
    collected = Collected()
    teacher = Teacher(config, clock)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a", encoding="utf-8") as file:
            collection = _Collection(teacher, make_environment, config, collected, file, progress)
            waiting = iter(tasks)
            async with asyncio.TaskGroup() as group:
                for _ in range(config.concurrency):
                    group.create_task(collection.work(waiting, held))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await teacher.close()
    return collected


class _Collection:
    """The workers of one collection, and what they share."""

    def __init__(
        self,
        teacher: Teacher,
        make_environment: EnvironmentFactory,
        config: TeacherConfig,
        collected: Collected,
        file: TextIO,
        progress: Callable[[Task, Trace | None], None] | None,
    ) -> None:
        self._teacher = teacher
        self._make_environment = make_environment
        self._config = config
        self._collected = collected
        self._file = file
        self._progress = progress
        self._failures_in_a_row = 0

    async def work(self, tasks: Iterator[Task], held: set[str]) -> None:
        """Takes tasks until there are none; gives traces to the file."""
        for task in tasks:
            if task.id in held:
                self._collected.already_there += 1
                continue
            held.add(task.id)
            trace = await self._best(task)
            if trace is not None:
                messages = [{"role": message.role, "content": message.content} for message in trace.messages]
                record = {"task_id": trace.task_id, "messages": messages, "reward": trace.reward}
                self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
                self._file.flush()
                self._collected.kept += 1
            if self._progress is not None:
                self._progress(task, trace)

    async def _best(self, task: Task) -> Trace | None:
        """The first episode worth keeping."""
        broken = False
        for _ in range(self._config.attempts):
            try:
                trace = await self._play(task)
            except (UnansweredError, WorldError) as error:
                broken = True
                self._count_failure(error)
                continue
            broken = False
            self._failures_in_a_row = 0
            if trace is None:
                self._collected.reasons[f"no end after {self._config.max_turns} turns"] += 1
            elif not self._config.only_right or trace.reward >= self._config.right_reward:
                return trace
        if broken:
            self._collected.failed += 1
        else:
            self._collected.wrong += 1
        return None

    def _count_failure(self, error: Exception) -> None:
        self._collected.reasons[str(error)] += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._config.max_failures_in_a_row:
            raise TeacherError(
                f"{self._failures_in_a_row} episodes in a row broke off; the last one: {error}"
            ) from error

    async def _play(self, task: Task) -> Trace | None:
        """One episode; None when it does not end within the turns."""
        environment = self._make_environment()
        try:
            messages = list(await environment.reset(task))
            reward = 0.0
            for _ in range(self._config.max_turns):
                action = Message(role="assistant", content=await self._teacher.reply(messages))
                step = await environment.step(action)
                reward += step.reward
                if not math.isfinite(reward):
                    raise WorldError(f"the environment returned a reward of {step.reward}; it must be finite")
                messages.append(action)
                if step.done:
                    return Trace(task_id=task.id, messages=tuple(messages), reward=reward)
                messages.extend(step.messages)
            return None
        finally:
            await environment.close()


def _resume(path: Path) -> set[str]:
    """Task ids that a file of traces holds; what an interruption left of its last line is removed."""
    if not path.exists() or path.stat().st_size == 0:
        return set()
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            try:
                json.loads(content[whole:])
                file.write(b"\n")
            except ValueError:
                file.truncate(whole)
    return {trace.task_id for trace in read_traces(path)} if path.stat().st_size else set()
