"""Scripted policies that play the real environment, flawless or noisy, to make traces for supervised fine-tuning."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from sao.clock import VirtualClock, run_virtual
from sao.envs.chain import chain_of
from sao.envs.keyed import key, uniform
from sao.envs.protocol import Environment, TaskSource
from sao.envs.traces import Trace
from sao.types import Message, Task

_ANNOTATION = re.compile(r"<<([^<>]*)=([^<>=]*)>>")
_OTHER_OPERATORS = {"+": "-*", "-": "+*", "*": "+-"}


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """How often the scripted expert errs, each a probability. All 0 is the flawless expert."""

    wrong_operand: float = 0.08
    """Per call: an operand off by one to three."""
    wrong_operator: float = 0.04
    """Per call: another operator."""
    skip_step: float = 0.04
    """Per call: the step after the next one, so that one is left out."""
    give_up: float = 0.5
    """Per failed call: answers with the last value seen instead of trying again."""
    early_answer: float = 0.04
    """Per turn before the end: answers with the last value seen."""
    wrong_answer: float = 0.06
    """At the end: an answer that is off by one to three."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            probability = getattr(self, name)
            if not 0 <= probability <= 1:
                raise ValueError(f"{name} is {probability}; it must lie between 0 and 1")
        if self.wrong_operand + self.wrong_operator + self.skip_step > 1:
            raise ValueError("wrong_operand, wrong_operator and skip_step exclude each other; they must add up to <= 1")


FLAWLESS = NoiseConfig(
    wrong_operand=0.0, wrong_operator=0.0, skip_step=0.0, give_up=0.0, early_answer=0.0, wrong_answer=0.0
)


class ScriptedPolicy(Protocol):
    """Plays one episode by a script."""

    def act(self, observation: str) -> str:
        """The next assistant message, given the last message before it."""
        ...


class ChainExpert:
    """Solves one chain step by step, with the errors of its noise. Keyed by (seed, task, turn)."""

    def __init__(self, task: Task, noise: NoiseConfig, *, seed: int = 0) -> None:
        self._chain = chain_of(task)
        self._noise = noise
        self._key = key(seed, "chain expert", task.id)
        self._turn = 0
        self._done = 0
        self._last_value = self._chain.start
        self._calling = 0

    def act(self, observation: str) -> str:
        """The next tool call or the answer."""
        turn, self._turn = self._turn, self._turn + 1
        if self._calling:
            if observation.startswith("error"):
                if self._happens(self._noise.give_up, turn, "give up"):
                    return _answer(self._last_value)
            else:
                self._done = self._calling
                self._last_value = int(observation.split()[0])  # a mark or chatter may follow
        if self._done == self._chain.steps:
            wrong = self._happens(self._noise.wrong_answer, turn, "wrong answer")
            return _answer(self._last_value + (self._offset(turn) if wrong else 0))
        if self._happens(self._noise.early_answer, turn, "early"):
            return _answer(self._last_value)
        return f"<python> {self._call(turn)} </python>"

    def _call(self, turn: int) -> str:
        step, noise, chain = self._done + 1, self._noise, self._chain
        self._calling = step
        draw = uniform(self._key, turn, "call")
        if draw < noise.wrong_operand:
            return self._changed(step, operand=max(0, chain.operands[step - 1] + self._offset(turn)))
        if draw < noise.wrong_operand + noise.wrong_operator:
            others = _OTHER_OPERATORS[chain.operators[step - 1]]
            return self._changed(step, operator=others[key(self._key, turn, "operator") % len(others)])
        if draw < noise.wrong_operand + noise.wrong_operator + noise.skip_step and step < chain.steps:
            return chain.code(step + 1, self._last_value)
        return chain.code(step, self._last_value)

    def _changed(self, step: int, *, operator: str | None = None, operand: int | None = None) -> str:
        target, equals, left, right_operator, right_operand = self._chain.code(step, self._last_value).split()
        return f"{target} {equals} {left} {operator or right_operator} {right_operand if operand is None else operand}"

    def _offset(self, turn: int) -> int:
        return (-3, -2, -1, 1, 2, 3)[key(self._key, turn, "offset") % 6]

    def _happens(self, probability: float, turn: int, what: str) -> bool:
        return uniform(self._key, turn, what) < probability


class ReplayExpert:
    """Says given messages in order, whatever it observes."""

    def __init__(self, messages: Iterable[str]) -> None:
        self._messages: Iterator[str] = iter(messages)

    def act(self, observation: str) -> str:
        """The next of the messages; an empty one past their end."""
        return next(self._messages, "")


async def play(task: Task, environment: Environment, policy: ScriptedPolicy, *, max_turns: int = 50) -> Trace:
    """One episode as a trace; it ends unrewarded after `max_turns`."""
    try:
        messages = list(await environment.reset(task))
        reward = 0.0
        for _ in range(max_turns):
            action = Message(role="assistant", content=policy.act(messages[-1].content))
            step = await environment.step(action)
            messages += [action, *step.messages]
            reward += step.reward
            if step.done:
                break
        while messages[-1].role != "assistant":
            messages.pop()
        return Trace(task_id=task.id, messages=tuple(messages), reward=reward)
    finally:
        await environment.close()


def demonstrate(
    source: TaskSource,
    make_environment: Callable[[VirtualClock], Environment],
    make_policy: Callable[[Task], ScriptedPolicy],
    *,
    count: int,
    first: int = 0,
    max_turns: int = 50,
    only_right: bool = False,
) -> list[Trace]:
    """Traces of tasks first .. first + count - 1, played in virtual time, so that waits cost nothing.

    Fewer where the source ends; with `only_right`, those of reward 0 are left out. Not callable from a running loop.
    """

    async def play_all() -> list[Trace]:
        traces: list[Trace] = []
        for index in range(first, first + count):
            task = source.at(index)
            if task is None:
                break
            traces.append(await play(task, make_environment(VirtualClock()), make_policy(task), max_turns=max_turns))
        return traces

    traces = run_virtual(play_all())
    return [trace for trace in traces if trace.reward > 0] if only_right else traces


def gsm8k_expert(task: Task) -> ReplayExpert:
    """Plays a GSM8K solution, each annotation <<48/2=24>> as a tool call with the words before it.

    Takes the annotated solution from the task's details ("solution"). A solution without annotations only answers.
    """
    solution = str(task.details.get("solution", ""))
    if not solution:
        raise ValueError(f"task {task.id} has no solution in its details; load it with envs.sources.gsm8k_tasks")
    text = solution.partition("####")[0]
    messages: list[str] = []
    position = 0
    for annotation in _ANNOTATION.finditer(text):
        words = text[position : annotation.start()].strip()
        messages.append(f"{words}\n<python> {annotation.group(1).strip()} </python>".lstrip())
        position = annotation.end()
    rest = text[position:].strip()
    messages.append(f"{rest}\n{_answer(task.answer)}".lstrip())
    return ReplayExpert(messages)


def _answer(value: int | str) -> str:
    return f"<answer> {value} </answer>"
