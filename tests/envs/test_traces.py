import json
from pathlib import Path
from typing import Any

import pytest

from sao.clock import VirtualClock
from sao.envs.answers import ExactGrader
from sao.envs.demonstrations import demonstrate, gsm8k_expert
from sao.envs.math_python import MathPythonConfig, MathPythonEnvironment
from sao.envs.restricted import RestrictedTool
from sao.envs.sources import ListSource, gsm8k_tasks
from sao.envs.traces import Trace, read_traces, write_traces
from sao.types import Message, Task

DATA = Path(__file__).parents[3] / "shared" / "data"


def environment(clock: VirtualClock) -> MathPythonEnvironment:
    return MathPythonEnvironment(RestrictedTool, ExactGrader(), clock, MathPythonConfig(), inline_tool=True)


def test_round_trip(tmp_path: Path) -> None:
    """Would catch text changed on its way through the file."""
    messages = (Message(role="user", content='ü "\n'), Message(role="assistant", content="<answer> 1 </answer>"))
    traces = [Trace(task_id=f"t/{i}", messages=messages, reward=i / 2) for i in range(3)]
    assert write_traces(tmp_path / "t.jsonl", traces) == 3
    assert list(read_traces(tmp_path / "t.jsonl")) == traces


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


def test_gsm8k_annotations_become_calls() -> None:
    """Would catch an annotation left in the text, and a call whose words come after it."""
    solution = "He sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"
    task = Task(id="g", prompt_id="g", question="how many?", answer="72", details={"solution": solution})
    (trace,) = demonstrate(ListSource([task], name="g"), environment, gsm8k_expert, count=1)
    assert [message.content for message in trace.messages[1:]] == [
        "He sold 48/2 =\n<python> 48/2 </python>",
        "24.0",
        "24 clips.\nIn all 48+24 =\n<python> 48+24 </python>",
        "72",
        "72.\n<answer> 72 </answer>",
    ]
    assert trace.reward == 1.0


def test_gsm8k_expert_needs_a_solution() -> None:
    """Would catch a trace that answers without any work because the solution was lost."""
    with pytest.raises(ValueError, match="has no solution"):
        gsm8k_expert(Task(id="g", prompt_id="g", question="q", answer="1"))


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets at {DATA}")
def test_gsm8k_traces_are_graded_right() -> None:
    """Would catch a conversion that loses the answer on real data."""
    source = ListSource(gsm8k_tasks(DATA / "gsm8k"), name="gsm8k", cycle=False)
    traces = demonstrate(source, environment, gsm8k_expert, count=100, only_right=True)
    assert len(traces) == 100
    failed = sum("error" in message.content for trace in traces for message in trace.messages if message.role == "tool")
    assert failed <= 2
