"""Mathematics with a Python tool: call it with `<python> CODE </python>`, end with `<answer> X </answer>` or a box.

Variables live as long as the rollout. How many turns there are is the rollout worker's business.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sao.clock import Clock
from sao.envs.answers import extract_answer, extract_code
from sao.envs.keyed import key, normal, uniform
from sao.envs.protocol import CodeTool, Grader, Step, ToolResult
from sao.types import Message, Task

TOOL_ERROR = "error try again"
"""Output of a call that failed for no fault of the policy."""
NO_OUTPUT = "no output"
RESULTS_DETAIL = "right_results"
"""Detail of a task: "name=value ..." of every intermediate result. Numbers that a tool gives are then marked: WRONG
unless the name that the code assigns last has that value. "" marks all of them RIGHT."""
RIGHT, WRONG = ".", "?"
MOST_CHATTER = 10_000
_CHATTER = ("try", "again", "no", "output")
_NUMBER, _ASSIGNED = re.compile(r"-?\d+"), re.compile(r"(\w+) *=(?!=)")
EXPECTED = "expected <python> code </python> or <answer> number </answer>"
INSTRUCTIONS = (
    "Solve the problem step by step. To compute, write <python> code </python>; you are shown the output, and "
    "variables are kept. When you are done, write <answer> number </answer>."
)
"""A system prompt for models that were not trained on this format."""


@dataclass(frozen=True, kw_only=True)
class ToolLatency:
    """How long a tool call takes: lognormal, keyed by (seed, task, turn), so that every policy meets the same waits."""

    median_s: float = 0.0
    """Median in seconds; 0 for none."""
    sigma: float = 1.2
    """Standard deviation of the logarithm; 1.2 puts the mean at twice the median, with a heavy tail."""
    real_sleep: bool = False
    """Whether to wait for it in real time too, on top of the tool's own time; for benchmarks."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median_s) and self.median_s >= 0 and 0 <= self.sigma <= 5):
            raise ValueError(
                f"median_s is {self.median_s} and sigma {self.sigma}; need median_s >= 0 and 0 <= sigma <= 5"
            )

    def seconds(self, seed: int, task_id: str, turn: int) -> float:
        """Latency of one call."""
        if self.median_s == 0:
            return 0.0
        return self.median_s * math.exp(self.sigma * normal(seed, "latency", task_id, turn))


@dataclass(frozen=True, kw_only=True)
class MathPythonConfig:
    """The environment around question and tool."""

    system_prompt: str = ""
    """First message of every episode; empty for none (a policy trained on the format needs none)."""
    tool_error_probability: float = 0.0
    """Chance that a call fails by no fault of the policy, by (seed, task, turn); a task's details override it."""
    grading_s: float = 0.0
    """Virtual seconds that grading an answer costs; not used in real time."""
    chatter_words: int = 0
    """Most words that follow a tool's output and say nothing: 0 to so many, by (seed, task, turn); for studies of long
    observations."""
    latency: ToolLatency = field(default_factory=ToolLatency)
    """Time that tool calls take."""

    def __post_init__(self) -> None:
        if not 0 <= self.tool_error_probability <= 1:
            raise ValueError(f"tool_error_probability is {self.tool_error_probability}; it must lie between 0 and 1")
        if not 0 <= self.chatter_words <= MOST_CHATTER:
            raise ValueError(f"chatter_words is {self.chatter_words}; it must lie between 0 and {MOST_CHATTER}")
        if not self.grading_s >= 0:
            raise ValueError(f"grading_s is {self.grading_s}; it must not be negative")


class MathPythonEnvironment:
    """One episode. Reward is the grader's, at the answer; everything before it earns 0.

    `make_tool` is called at the first tool call. `inline_tool` says that the tool and its start are so cheap that they
    need no thread in real time (the restricted tool).
    """

    def __init__(
        self,
        make_tool: Callable[[], CodeTool],
        grader: Grader,
        clock: Clock,
        config: MathPythonConfig,
        *,
        seed: int = 0,
        inline_tool: bool = False,
    ) -> None:
        self._make_tool = make_tool
        self._grader = grader
        self._clock = clock
        self._config = config
        self._seed = seed
        self._run = clock.compute if inline_tool else clock.external
        self._tool: CodeTool | None = None
        self._task: Task | None = None
        self._turn = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The system prompt, if there is one, and the question."""
        self._task = task
        question = Message(role="user", content=task.question)
        prompt = self._config.system_prompt
        return (Message(role="system", content=prompt), question) if prompt else (question,)

    async def step(self, action: Message) -> Step:
        """Run the last code block, or grade the answer, or say what was expected. Raises WorldError."""
        assert self._task is not None, "step before reset"
        turn, self._turn = self._turn, self._turn + 1
        code = extract_code(action.content)
        if code is not None:
            return await self._call_tool(self._task, turn, code)
        answer = extract_answer(action.content)
        if answer is None:
            return Step(messages=(Message(role="tool", content=EXPECTED),))
        task = self._task
        grade = await self._clock.external(lambda: self._grader.grade(task, answer), cost=self._config.grading_s)
        return Step(reward=grade.reward, done=True)

    async def close(self) -> None:
        """End the tool."""
        tool, self._tool = self._tool, None
        if tool is not None:
            await self._run(tool.stop, cost=0.0)

    async def _call_tool(self, task: Task, turn: int, code: str) -> Step:
        latency = self._config.latency.seconds(self._seed, task.id, turn)
        probability = float(task.details.get("tool_error_probability", self._config.tool_error_probability))
        if uniform(self._seed, "tool error", task.id, turn) < probability:
            await self._clock.sleep(latency if self._clock.virtual else 0.0)
            output, seconds = TOOL_ERROR, 0.0
        else:
            result, seconds = await self._run(lambda: self._execute(code), cost=latency)
            output = self._marked(task, code, result.output) if result.output.strip() else NO_OUTPUT
        output = " ".join((output, *self._chatter(task, turn)))
        if self._clock.virtual:
            seconds = latency
        elif self._config.latency.real_sleep:
            await self._clock.sleep(latency)
            seconds += latency
        return Step(messages=(Message(role="tool", content=output),), tool_seconds=seconds)

    def _marked(self, task: Task, code: str, output: str) -> str:
        """The output, and its mark where the task has marks and the output is a number."""
        results = task.details.get(RESULTS_DETAIL)
        if results is None or not _NUMBER.fullmatch(output.strip()):
            return output
        right = dict(pair.split("=") for pair in str(results).split())
        names = _ASSIGNED.findall(code)
        wrong = bool(right) and (not names or right.get(names[-1]) != output.strip())
        return f"{output.strip()} {WRONG if wrong else RIGHT}"

    def _chatter(self, task: Task, turn: int) -> Iterator[str]:
        count = int(uniform(self._seed, "chatter", task.id, turn) * (self._config.chatter_words + 1))
        for place in range(count):
            yield _CHATTER[key(self._seed, "chatter word", task.id, turn, place) % len(_CHATTER)]

    def _execute(self, code: str) -> tuple[ToolResult, float]:
        """Result and seconds, measured where the tool runs: a wait for a thread is not the policy's doing."""
        started = self._clock.now()
        if self._tool is None:
            self._tool = self._make_tool()
        result = self._tool.run(code)
        return result, self._clock.now() - started


def math_python_words() -> tuple[str, ...]:
    """Every word this environment and the restricted tool say, tags and digits left out."""
    said = (TOOL_ERROR, NO_OUTPUT, EXPECTED, "error : name is not defined", "error : division by zero")
    refused = ("error : not allowed", "error : too long", "error : wrong value", "error : syntax", "number too large")
    words = dict.fromkeys(
        " ".join((*said, *refused, "too much output", "True False print ( ) [ ] , / // % **")).split()
    )
    return tuple(word for word in words if not word.startswith("<"))
