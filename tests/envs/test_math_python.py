"""math_python over each of its tools: calls, answers, faults, latency, and whatever a policy may write."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.clock import RealClock, VirtualClock, run_virtual
from sao.envs.answers import ExactGrader
from sao.envs.demonstrations import ReplayExpert, play
from sao.envs.math_python import (
    EXPECTED,
    NO_OUTPUT,
    RESULTS_DETAIL,
    TOOL_ERROR,
    MathPythonConfig,
    MathPythonEnvironment,
    ToolLatency,
    math_python_words,
)
from sao.envs.protocol import CodeTool, Step, ToolResult, WorldError
from sao.envs.restricted import RestrictedTool
from sao.envs.sandbox import SandboxPython, sandbox_problem
from sao.envs.traces import Trace
from sao.types import Message, Task

T = TypeVar("T")

TASK = Task(id="t/0", prompt_id="t", question="b = 7 + 3 ; c = b * 2 ; c ?", answer="20")
fragments = st.sampled_from(
    [
        "<python>",
        "</python>",
        "<answer>",
        "</answer>",
        "\\boxed{",
        "{",
        "}",
        "####",
        "\n",
        " ",
        "42",
        "x = 1",
        "1 +",
        "é",
    ]
)


class CountingTool(RestrictedTool):
    """The real tool, which remembers that it was stopped."""

    stopped: int = 0

    def stop(self) -> None:
        self.stopped += 1
        super().stop()


def play_texts(
    *texts: str, config: MathPythonConfig | None = None, make_tool: Callable[[], RestrictedTool] = RestrictedTool
) -> Trace:
    async def episode() -> Trace:
        environment = MathPythonEnvironment(
            make_tool, ExactGrader(), VirtualClock(), config or MathPythonConfig(), inline_tool=True
        )
        return await play(TASK, environment, ReplayExpert(texts), max_turns=len(texts))

    return run_virtual(episode())


def outputs(trace: Trace) -> list[str]:
    return [message.content for message in trace.messages if message.role == "tool"]


@pytest.fixture(scope="module")
def problem() -> str | None:
    return sandbox_problem()


@pytest.fixture(params=[RestrictedTool, SandboxPython])
def tool(request: pytest.FixtureRequest, problem: str | None) -> type[CodeTool]:
    if request.param is SandboxPython and problem is not None:
        pytest.skip(problem)
    return request.param


def steps_of(tool: type[CodeTool], *texts: str, config: MathPythonConfig | None = None) -> list[Step]:
    """The steps of one rollout."""

    async def episode() -> list[Step]:
        environment = MathPythonEnvironment(tool, ExactGrader(), VirtualClock(), config or MathPythonConfig())
        await environment.reset(TASK)
        try:
            return [await environment.step(Message(role="assistant", content=text)) for text in texts]
        finally:
            await environment.close()
            await environment.close()

    return run_virtual(episode())


def said_by_tool(steps: list[Step]) -> list[str]:
    return [step.messages[0].content.strip() for step in steps if not step.done]


def errors(count: int, probability: float, *, seed: int, text: str, task_id: str = "t/0") -> list[bool]:
    """Which of `count` calls failed for no fault of the policy."""

    async def episode() -> list[bool]:
        config = MathPythonConfig(tool_error_probability=probability)
        environment = MathPythonEnvironment(RestrictedTool, ExactGrader(), VirtualClock(), config, seed=seed)
        await environment.reset(Task(id=task_id, prompt_id="t", question="q", answer="1"))
        steps = [await environment.step(Message(role="assistant", content=text)) for _ in range(count)]
        return [step.messages[0].content == TOOL_ERROR for step in steps]

    return run_virtual(episode())


@pytest.mark.parametrize(("text", "reward"), [(r"\boxed{20}", 1.0), ("<answer> 21 </answer>", 0.0), ("#### 20", 1.0)])
def test_answers_end_the_episode(text: str, reward: float) -> None:
    """Would catch an episode that goes on after its answer."""
    trace = play_texts(text, "<answer> 20 </answer>")
    assert (trace.reward, len(trace.messages)) == (reward, 2)


def test_last_block_runs_and_a_call_comes_before_an_answer() -> None:
    """Would catch an answer that the policy wrote before it saw the output."""
    trace = play_texts("<python> 1 </python> <python> 2 </python> <answer> 20 </answer>", "<answer> 20 </answer>")
    assert outputs(trace) == ["2"]
    assert trace.reward == 1.0


def test_neither_call_nor_answer_says_what_was_expected() -> None:
    """Would catch a crash on free text, which an untrained model writes at once."""
    trace = play_texts("hello", "", "<python> cut", "<python> </python>", "<answer> 20 </answer>")
    assert outputs(trace) == [EXPECTED, EXPECTED, EXPECTED, NO_OUTPUT]
    assert trace.reward == 1.0


def test_faults_of_the_code_are_outputs() -> None:
    """Would catch a fault that ends the rollout instead of being shown to the policy."""
    trace = play_texts("<python> x + 1 </python>", "<python> 1 / 0 </python>", "<answer> 20 </answer>")
    assert outputs(trace) == ["error : name x is not defined", "error : division by zero"]


def test_injected_errors_do_not_run_the_code_and_are_keyed() -> None:
    """Would catch errors drawn from a shared generator, and a failed call that changed the variables all the same."""
    config = MathPythonConfig(tool_error_probability=0.5)
    texts = [f"<python> x{turn} = {turn} </python>" for turn in range(30)]
    first, second = outputs(play_texts(*texts, config=config)), outputs(play_texts(*texts, config=config))
    assert first == second
    assert 5 < first.count(TOOL_ERROR) < 25
    failed = first.index(TOOL_ERROR)
    asks = [f"<python> x{failed} </python>"] * 10
    assert f"error : name x{failed} is not defined" in outputs(play_texts(*texts, *asks, config=config))


def test_task_details_override_the_probability() -> None:
    """Would catch a demo without the tool errors its tasks ask for."""

    async def first_output(details: dict[str, float]) -> str:
        task = Task(id="t", prompt_id="t", question="q", answer="1", details=details)
        environment = MathPythonEnvironment(
            RestrictedTool, ExactGrader(), VirtualClock(), MathPythonConfig(tool_error_probability=1.0)
        )
        await environment.reset(task)
        step = await environment.step(Message(role="assistant", content="<python> 5 </python>"))
        return step.messages[0].content

    assert run_virtual(first_output({})) == TOOL_ERROR
    assert run_virtual(first_output({"tool_error_probability": 0.0})) == "5"


CALLS = (
    "<python> b = 7 + 3 </python>",
    "<python> c = 9 * 2 </python>",
    "<python> c = b * 2 </python>",
    "<python> d = 4 </python>",
    "<python> b == 10 </python>",
    "<python> b + 0 </python>",
    "<python> nothing </python>",
)


@pytest.mark.parametrize(
    ("results", "marks"),
    [("b=10 c=20", [" .", " ?", " .", " ?", "", " ?", ""]), ("", [" .", " .", " .", " .", "", " .", ""])],
)
def test_results_are_marked_by_the_value_they_should_have(results: str, marks: list[str]) -> None:
    """Catches a comparison taken for an assignment, a mark on an error, and a control that tells right from wrong."""

    async def episode(details: dict[str, str]) -> list[str]:
        environment = MathPythonEnvironment(RestrictedTool, ExactGrader(), VirtualClock(), MathPythonConfig())
        await environment.reset(Task(id="t/0", prompt_id="t", question="q", answer="20", details=details))
        steps = [await environment.step(Message(role="assistant", content=text)) for text in CALLS]
        await environment.close()
        return said_by_tool(steps)

    plain = run_virtual(episode({}))
    marked = run_virtual(episode({RESULTS_DETAIL: results}))
    assert plain[:2] == ["10", "18"]
    assert marked == [output + mark for output, mark in zip(plain, marks, strict=True)]


def test_chatter_follows_what_a_tool_says() -> None:
    """Catches chatter before the result, of one length, or that differs from policy to policy."""
    calls = ["<python> b = 7 + 3 </python>"] * 40
    said = outputs(play_texts(*calls, config=MathPythonConfig(chatter_words=5)))
    assert {output.split()[0] for output in said} == {"10"}
    assert {len(output.split()) - 1 for output in said} == set(range(6))
    others = outputs(play_texts(*["<python> c = 9 </python>"] * 40, config=MathPythonConfig(chatter_words=5)))
    assert [output.split()[1:] for output in others] == [output.split()[1:] for output in said]
    assert set(" ".join(said).split()) - {"10"} <= set(math_python_words())


def test_latency_is_charged_and_keyed() -> None:
    """Would catch a tool that costs no virtual time, or another time in another schedule."""
    latency = ToolLatency(median_s=2.0, sigma=1.0)
    config = MathPythonConfig(latency=latency, tool_error_probability=0.5, grading_s=0.25)

    async def spent() -> list[float]:
        clock = VirtualClock()
        environment = MathPythonEnvironment(RestrictedTool, ExactGrader(), clock, config, seed=4, inline_tool=True)
        await environment.reset(TASK)
        seconds: list[float] = []
        for text in ("<python> 1 </python>", "<python> 2 </python>", "<answer> 20 </answer>"):
            before = clock.now()
            step = await environment.step(Message(role="assistant", content=text))
            seconds.append(clock.now() - before)
            assert step.tool_seconds == (0.0 if step.done else pytest.approx(seconds[-1]))
        await environment.close()
        return seconds

    expected = [latency.seconds(4, TASK.id, 0), latency.seconds(4, TASK.id, 1), 0.25]
    assert run_virtual(spent()) == pytest.approx(expected)


def test_latency_has_the_median_it_says() -> None:
    """Would catch a mean taken for the median, or a tail that is not lognormal."""
    draws = sorted(ToolLatency(median_s=3.0, sigma=1.2).seconds(0, f"t/{i}", 0) for i in range(4001))
    assert draws[2000] == pytest.approx(3.0, rel=0.1)
    assert sum(draws) / len(draws) == pytest.approx(3.0 * 2.054, rel=0.15)
    assert ToolLatency().seconds(0, "t", 0) == 0.0


def test_tool_is_made_late_and_stopped_once() -> None:
    """Would catch a sandbox started for an episode that never calls it, or one left running."""
    made: list[CountingTool] = []

    def make() -> CountingTool:
        made.append(CountingTool())
        return made[-1]

    play_texts("<answer> 20 </answer>", make_tool=make)
    assert not made
    play_texts("<python> 1 </python>", "<python> 2 </python>", "<answer> 1 </answer>", make_tool=make)
    assert [tool.stopped for tool in made] == [1]


def test_real_clock_runs_a_slow_tool_off_the_loop() -> None:
    """Would catch a blocking tool that stalls every other rollout of the worker."""

    class Slow(RestrictedTool):
        def run(self, code: str) -> ToolResult:
            time.sleep(0.2)
            return super().run(code)

    async def episode() -> tuple[float, int]:
        environment = MathPythonEnvironment(Slow, ExactGrader(), RealClock(), MathPythonConfig())
        await environment.reset(TASK)
        stepping = asyncio.ensure_future(environment.step(Message(role="assistant", content="<python> 1 </python>")))
        ticks = 0
        while not stepping.done():
            await asyncio.sleep(0.01)
            ticks += 1
        step = await stepping
        await environment.close()
        return step.tool_seconds, ticks

    seconds, ticks = asyncio.run(episode())
    assert seconds >= 0.2
    assert ticks >= 3


def test_real_sleeps_are_optional() -> None:
    """Would catch made-up waits in a real run that did not ask for them."""

    async def seconds(real_sleep: bool) -> float:
        config = MathPythonConfig(latency=ToolLatency(median_s=0.2, sigma=0.0, real_sleep=real_sleep))
        environment = MathPythonEnvironment(RestrictedTool, ExactGrader(), RealClock(), config, inline_tool=True)
        await environment.reset(TASK)
        return (await environment.step(Message(role="assistant", content="<python> 1 </python>"))).tool_seconds

    assert asyncio.run(seconds(True)) >= 0.19
    assert asyncio.run(seconds(False)) < 0.19


def test_a_broken_tool_is_the_worlds_fault() -> None:
    """Would catch an infrastructure failure shown to the policy as if its code were wrong."""

    class Broken(RestrictedTool):
        def run(self, code: str) -> ToolResult:
            raise WorldError("the sandbox did not start")

    with pytest.raises(WorldError, match="did not start"):
        play_texts("<python> 1 </python>", make_tool=Broken)


def test_system_prompt_comes_first() -> None:
    """Would catch instructions that an untrained model never sees."""
    trace = play_texts("<answer> 20 </answer>", config=MathPythonConfig(system_prompt="use the tool"))
    assert [message.role for message in trace.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("settings", [{"tool_error_probability": 1.5}, {"grading_s": -1.0}])
def test_bad_settings(settings: dict[str, float]) -> None:
    """Would catch a probability above one."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        MathPythonConfig(**settings)  # type: ignore[arg-type]


def test_bad_latency() -> None:
    """Would catch a negative wait."""
    with pytest.raises(ValueError, match="median_s is -1"):
        ToolLatency(median_s=-1.0)


def test_variables_live_as_long_as_the_rollout(tool: type[CodeTool]) -> None:
    """Would catch variables lost between calls, or seen by the next rollout; a fault must not lose them either."""
    steps = steps_of(
        tool,
        "<python> a = 6 </python>",
        "<python>\n    b = a + 1\n    print(a * b)\n</python>",
        "<python> a / 0 </python>",
        "first <python> c = 1 </python> then <python> print(a) </python> <answer> 1 </answer>",
        "<python> print(c) </python>",
        "<answer> 20 </answer>",
    )
    said = said_by_tool(steps)
    assert said[0] in ("6", NO_OUTPUT)  # the restricted tool shows what was assigned
    assert said[1].splitlines()[0] == "42"
    assert said[2].endswith("division by zero")
    assert said[3] == "6"
    assert "c" in said[4]
    assert "not defined" in said[4]
    assert (steps[-1].done, steps[-1].reward, steps[-1].messages) == (True, 1.0, ())
    assert all(step.reward == 0.0 for step in steps[:-1])
    (other,) = said_by_tool(steps_of(tool, "<python> print(a) </python>"))
    assert "not defined" in other


def test_virtual_time_is_the_latency_alone(tool: type[CodeTool]) -> None:
    """Would catch real seconds of a tool in a virtual run: numbers would depend on the machine."""
    config = MathPythonConfig(latency=ToolLatency(median_s=3.0, sigma=0.5))
    steps = steps_of(tool, "<python> print(1) </python>", "say", "<python> print(2) </python>", config=config)
    expected = [config.latency.seconds(0, TASK.id, turn) for turn in range(3)]
    assert [step.tool_seconds for step in steps] == pytest.approx([expected[0], 0.0, expected[2]])


def test_closing_is_safe_at_any_time() -> None:
    """Would catch a close that fails before the first call, or stops a tool twice."""
    stops: list[int] = []

    class Counting(RestrictedTool):
        def stop(self) -> None:
            stops.append(1)

    async def episode() -> None:
        unused = MathPythonEnvironment(Counting, ExactGrader(), VirtualClock(), MathPythonConfig())
        await unused.close()
        await unused.reset(TASK)
        await unused.close()
        assert not stops
        used = MathPythonEnvironment(Counting, ExactGrader(), VirtualClock(), MathPythonConfig())
        await used.reset(TASK)
        await used.step(Message(role="assistant", content="<python> 1 </python>"))
        for _ in range(3):
            await used.close()
        assert stops == [1]

    run_virtual(episode())


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.lists(fragments, max_size=12).map("".join)))
def test_any_text_is_a_call_an_answer_or_told_what_was_expected(text: str) -> None:
    """Would catch a crash on half-written tags, which is an infrastructure failure and drops the rollout."""
    (step,) = steps_of(RestrictedTool, text)
    if step.done:
        assert step.messages == ()
        assert step.reward in (0.0, 1.0)
    else:
        (message,) = step.messages
        assert message.role == "tool"
        assert message.content.strip()
        assert step.reward == 0.0
    if "<python>" not in text and "<answer>" not in text and "boxed" not in text and "####" not in text:
        assert step.messages[0].content == EXPECTED


@pytest.mark.parametrize("probability", [0.0, 0.12, 1.0])
def test_tool_errors_at_the_rate_set(probability: float) -> None:
    """Would catch a rate other than configured, at both ends too."""
    failed = errors(1500, probability, seed=0, text="<python> 1 </python>")
    assert abs(sum(failed) / 1500 - probability) <= 4 * math.sqrt(probability * (1 - probability) / 1500)


def test_tool_errors_depend_on_seed_task_and_turn_alone() -> None:
    """Would catch luck that depends on what the policy wrote, or is the same for every task."""
    failed = errors(60, 0.3, seed=0, text="<python> 1 </python>")
    assert errors(60, 0.3, seed=0, text="<python> y = 2 ** 5 </python>") == failed
    assert errors(30, 0.3, seed=0, text="<python> 1 </python>") == failed[:30]
    assert errors(60, 0.3, seed=1, text="<python> 1 </python>") != failed
    assert errors(60, 0.3, seed=0, text="<python> 1 </python>", task_id="t/1") != failed


def test_free_text_is_a_turn_of_its_own() -> None:
    """Would catch turns counted by calls: the latency of a call would depend on what was said before it."""
    config = MathPythonConfig(latency=ToolLatency(median_s=1.0))
    _, _, call = steps_of(RestrictedTool, "hm", "hm", "<python> 1 </python>", config=config)
    assert call.tool_seconds == pytest.approx(config.latency.seconds(0, TASK.id, 2))


class HandClock(RealClock):
    """Real, but its hands are moved; an outside call waits 100 s for its thread and 10 s for its result's way back."""

    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    async def external(self, work: Callable[[], T], *, cost: float) -> T:
        self.seconds += 100.0
        result = work()
        self.seconds += 10.0
        return result


def test_only_the_time_in_the_tool_is_the_policys() -> None:
    """Catches a wait for a free thread that is charged to the policy, whose rollout then times out by its own fault."""
    clock = HandClock()

    class SlowTool(RestrictedTool):
        def run(self, code: str) -> ToolResult:
            clock.seconds += 3.0
            return super().run(code)

    environment = MathPythonEnvironment(SlowTool, ExactGrader(), clock, MathPythonConfig())

    async def episode() -> float:
        await environment.reset(TASK)
        return (await environment.step(Message(role="assistant", content="<python> 1 + 1 </python>"))).tool_seconds

    assert asyncio.run(episode()) == 3.0
