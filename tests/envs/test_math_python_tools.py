"""math_python over each of its tools, and on whatever a policy may write."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.clock import VirtualClock, run_virtual
from sao.envs.answers import ExactGrader
from sao.envs.math_python import EXPECTED, NO_OUTPUT, TOOL_ERROR, MathPythonConfig, MathPythonEnvironment, ToolLatency
from sao.envs.protocol import CodeTool, Step
from sao.envs.restricted import RestrictedTool
from sao.envs.sandbox import SandboxPython, sandbox_problem
from sao.types import Message, Task

TASK = Task(id="t/0", prompt_id="t", question="what is 6 * 7 ?", answer="42")


@pytest.fixture(scope="module")
def problem() -> str | None:
    return sandbox_problem()


@pytest.fixture(params=[RestrictedTool, SandboxPython])
def tool(request: pytest.FixtureRequest, problem: str | None) -> type[CodeTool]:
    if request.param is SandboxPython and problem is not None:
        pytest.skip(problem)
    return request.param


def play(tool: type[CodeTool], *texts: str, config: MathPythonConfig | None = None) -> list[Step]:
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


def outputs(steps: list[Step]) -> list[str]:
    return [step.messages[0].content.strip() for step in steps if not step.done]


def test_variables_live_as_long_as_the_rollout(tool: type[CodeTool]) -> None:
    """Would catch variables lost between calls, or seen by the next rollout; a fault must not lose them either."""
    steps = play(
        tool,
        "<python> a = 6 </python>",
        "<python>\n    b = a + 1\n    print(a * b)\n</python>",
        "<python> a / 0 </python>",
        "first <python> c = 1 </python> then <python> print(a) </python> <answer> 1 </answer>",
        "<python> print(c) </python>",
        "<answer> 42 </answer>",
    )
    said = outputs(steps)
    assert said[0] in ("6", NO_OUTPUT)  # the restricted tool shows what was assigned
    assert said[1].splitlines()[0] == "42"
    assert said[2].endswith("division by zero")
    assert said[3] == "6"
    assert "c" in said[4]
    assert "not defined" in said[4]
    assert (steps[-1].done, steps[-1].reward, steps[-1].messages) == (True, 1.0, ())
    assert all(step.reward == 0.0 for step in steps[:-1])
    (other,) = outputs(play(tool, "<python> print(a) </python>"))
    assert "not defined" in other


def test_virtual_time_is_the_latency_alone(tool: type[CodeTool]) -> None:
    """Would catch real seconds of a tool in a virtual run: numbers would depend on the machine."""
    config = MathPythonConfig(latency=ToolLatency(median_s=3.0, sigma=0.5))
    steps = play(tool, "<python> print(1) </python>", "say", "<python> print(2) </python>", config=config)
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


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.lists(fragments, max_size=12).map("".join)))
def test_any_text_is_a_call_an_answer_or_told_what_was_expected(text: str) -> None:
    """Would catch a crash on half-written tags, which is an infrastructure failure and drops the rollout."""
    (step,) = play(RestrictedTool, text)
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


def errors(count: int, probability: float, *, seed: int, text: str, task_id: str = "t/0") -> list[bool]:
    """Which of `count` calls failed for no fault of the policy."""

    async def episode() -> list[bool]:
        config = MathPythonConfig(tool_error_probability=probability)
        environment = MathPythonEnvironment(RestrictedTool, ExactGrader(), VirtualClock(), config, seed=seed)
        await environment.reset(Task(id=task_id, prompt_id="t", question="q", answer="1"))
        steps = [await environment.step(Message(role="assistant", content=text)) for _ in range(count)]
        return [step.messages[0].content == TOOL_ERROR for step in steps]

    return run_virtual(episode())


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
    _, _, call = play(RestrictedTool, "hm", "hm", "<python> 1 </python>", config=config)
    assert call.tool_seconds == pytest.approx(config.latency.seconds(0, TASK.id, 2))
