"""Files of traces: what comes back, and traces as they come from other programs."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.clock import VirtualClock
from sao.envs.answers import ExactGrader
from sao.envs.demonstrations import ReplayExpert, demonstrate
from sao.envs.math_python import MathPythonConfig, MathPythonEnvironment
from sao.envs.restricted import RestrictedTool
from sao.envs.sources import ListSource
from sao.envs.traces import Trace, read_traces, write_traces
from sao.types import Message, Task

trace_messages = st.lists(
    st.builds(Message, role=st.sampled_from(["user", "assistant"]), content=st.text()), min_size=1, max_size=4
).filter(lambda messages: any(message.role == "assistant" for message in messages))


def environment(clock: VirtualClock) -> MathPythonEnvironment:
    return MathPythonEnvironment(RestrictedTool, ExactGrader(), clock, MathPythonConfig(), inline_tool=True)


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def openai(arguments: object) -> str:
    call = {"id": "c", "type": "function", "function": {"name": "python", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "6 * 7 ?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": "<answer> 42 </answer>"},
    ]
    return json.dumps({"task_id": "t", "messages": messages})


def test_tool_calls_become_blocks(tmp_path: Path) -> None:
    """Would catch OpenAI traces whose calls vanish, so that the policy learns to answer without them."""

    def call(code: str) -> dict[str, Any]:
        return {"id": "c", "type": "function", "function": {"name": "python", "arguments": json.dumps({"code": code})}}

    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2*3?"}]},
        {"role": "assistant", "content": "let me see", "tool_calls": [call("a = 2"), call("a * 3")]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "tool", "tool_call_id": "c", "content": "6"},
        {"role": "assistant", "content": None, "tool_calls": [call("a")]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<answer> 6 </answer>"},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    (trace,) = read_traces(path)
    assert [message.content for message in trace.messages] == [
        "2*3?",
        "let me see\n<python> a = 2\na * 3 </python>",
        "2\n6",
        "<python> a </python>",
        "2",
        "<answer> 6 </answer>",
    ]
    assert trace.reward == 1.0


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ("nonsense", "Expecting value"),
        ("[]", "not a JSON object"),
        ('{"messages": []}', '"messages" must be'),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "role 'bot'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "nothing to imitate"),
        ('{"messages": [{"role": "assistant", "content": 3}]}', "content is 3"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "reward": NaN}', "a number is 'NaN'"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}', "cannot be read"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}',
            'no argument "code"',
        ),
    ],
)
def test_broken_line_is_named(tmp_path: Path, record: str, complaint: str) -> None:
    """Would catch traces dropped in silence, or trained on with a reward of NaN."""
    good = '{"messages": [{"role": "assistant", "content": "x"}], "reward": 1}'
    path = tmp_path / "t.jsonl"
    path.write_text(good + "\n" + record + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2") as error:
        list(read_traces(path))
    assert complaint in str(error.value)


def test_empty_file(tmp_path: Path) -> None:
    """Would catch fine-tuning on nothing."""
    (tmp_path / "t.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no trace"):
        list(read_traces(tmp_path / "t.jsonl"))


@settings(max_examples=50, deadline=None)
@given(
    traces=st.lists(
        st.builds(
            Trace,
            task_id=st.text(),
            messages=trace_messages.map(tuple),
            reward=st.floats(allow_nan=False, allow_infinity=False),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_trace_comes_back(tmp_path_factory: pytest.TempPathFactory, traces: list[Trace]) -> None:
    """Would catch text that breaks the file into other lines."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    assert write_traces(path, traces) == len(traces)
    assert list(read_traces(path)) == traces


@pytest.mark.parametrize(
    "arguments", ['{"code": "6 * 7"}', {"code": "6 * 7"}, {"source": "6 * 7"}, {"code": "6 * 7", "timeout": 5}]
)
def test_a_converted_trace_plays_in_the_environment(tmp_path: Path, arguments: object) -> None:
    """Would catch calls in a form that the environment does not run: the policy would imitate what never works."""
    (trace,) = read_traces(write(tmp_path / "t.jsonl", openai(arguments)))
    assert trace.messages[1].content == "<python> 6 * 7 </python>"
    task = Task(id="s/0/t", prompt_id="t", question="6 * 7 ?", answer="42")
    (again,) = demonstrate(
        ListSource([task], name="s"),
        environment,
        lambda _: ReplayExpert(message.content for message in trace.messages if message.role == "assistant"),
        count=1,
    )
    assert again.messages == trace.messages
    assert again.reward == trace.reward == 1.0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ('{"code": 3}', 'no argument "code"'),
        ({"a": "1", "b": "2"}, 'no argument "code"'),
        ("[1]", "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 50_000, "nested too deeply"),
        ('{"code": "half \\ud800"}', "cannot be read .*lone surrogate"),
        (None, "cannot be read"),
    ],
)
def test_calls_that_hold_no_code(tmp_path: Path, arguments: object, complaint: str) -> None:
    """Would catch a call dropped in silence."""
    path = write(tmp_path / "t.jsonl", "\n" + openai(arguments))
    with pytest.raises(ValueError, match=rf"t\.jsonl, line 2: .*{complaint}"):
        list(read_traces(path))


def test_traces_are_read_one_by_one(tmp_path: Path) -> None:
    """Would catch a large file read whole, and a good line lost to a broken one after it."""
    good = '{"messages": [{"role": "assistant", "content": "x"}]}\n'
    traces = read_traces(write(tmp_path / "t.jsonl", good * 2 + "broken\n"))
    assert len(list(islice(traces, 2))) == 2
    with pytest.raises(ValueError, match="line 3"):
        next(traces)
    with pytest.raises(ValueError, match="is not a file"):
        list(read_traces(tmp_path / "none.jsonl"))
