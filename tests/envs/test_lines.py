"""Lines of JSON that are wrong in ways that would show later: tasks, GSM8K and traces share one reader."""

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.envs.sources import gsm8k_tasks, imo_answerbench_tasks, read_tasks
from sao.envs.traces import read_traces

HEADER = "Problem ID,Problem,Short Answer,Category\n"


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


DEEP = "[" * 50_000 + "]" * 50_000
HARMFUL = [
    (DEEP, "nested too deeply"),
    ('{"question": "q", "answer": ' + DEEP + "}", "nested too deeply"),
    ('{"question": "half \\ud800 of one", "answer": "1"}', "lone surrogate"),
    ('{"question": "q", "answer": "1", "\\uDFFF": 1}', "lone surrogate"),
    ('{"question": "q", "answer": ' + "9" * 5000 + "}", "thousands of digits"),
    ('{"question": "q", "answer": NaN}', "must be finite"),
    ('{"question": "q", "answer": -Infinity}', "must be finite"),
    ('{"question": "q", "answer": 1e999}', "must be finite"),
]
"""Lines of JSON, and what is to be said of them."""


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        *HARMFUL,
        ('{"question": "q", "answer": "1", "id": ""}', 'field "id" is empty'),
        ('{"question": "q", "answer": "1", "details": {"tool_error_probability": "often"}}', "between 0 and 1"),
        ('{"question": "q", "answer": "1", "details": {"tool_error_probability": 1.5}}', "between 0 and 1"),
        ('{"question": "q", "answer": "1", "details": {"a": 1e999}}', "must be finite"),
    ],
)
def test_tasks_that_would_fail_later(tmp_path: Path, record: str, complaint: str) -> None:
    """Would catch a traceback, now or at the first tool call, where the file and the line could be named."""
    path = write(tmp_path / "t.jsonl", '{"question": "\\ud83d\\ude00", "answer": "1"}\n' + record + "\n")
    with pytest.raises(ValueError, match=rf"t\.jsonl, line 2: .*{complaint}") as error:
        read_tasks(path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(("record", "complaint"), [*HARMFUL, ("[1, 2]", "no GSM8K"), ('{"question": 5}', "no GSM8K")])
def test_gsm8k_lines_that_would_fail_later(tmp_path: Path, record: str, complaint: str) -> None:
    """Would catch a reader that does not share the checks of the others."""
    write(tmp_path / "train.jsonl", '{"question": "q", "answer": "#### 1"}\n' + record + "\n")
    with pytest.raises(ValueError, match=rf"train\.jsonl, line 2: .*{complaint}"):
        gsm8k_tasks(tmp_path)


def test_imo_answerbench_with_a_field_without_end(tmp_path: Path) -> None:
    """Would catch the CSV reader's own error, which names no file and is no ValueError."""
    write(tmp_path / "answerbench_v2.csv", HEADER + "p-1," + "x" * 200_000 + ",3,Algebra\n")
    with pytest.raises(ValueError, match=r"answerbench_v2\.csv: not CSV"):
        imo_answerbench_tasks(tmp_path)


def spoken(content: str, **more: str) -> str:
    """A trace of one message, of JSON texts."""
    fields = {"role": '"assistant"', "content": content} | more
    return '{"messages": [{' + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}]}"


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (spoken('"x"', tool_calls="5"), "tool_calls is 5; it must be a list"),
        (spoken('"x"', tool_calls='{"a": 1}'), "tool_calls is {'a': 1}; it must be a list"),
        (spoken('"x"', tool_calls="[5]"), "a tool call cannot be read"),
        (spoken('[{"text": 5}]'), "a part of a message's content is"),
        (spoken("[5]"), "a part of a message's content is 5"),
        (spoken('{"text": "x"}'), "a message's content is"),
        (spoken('"half \\ud800"'), "lone surrogate"),
        (spoken(DEEP), "nested too deeply"),
        (spoken('"x"', role=DEEP), "nested too deeply"),
        (spoken('"x"')[:-1] + f', "reward": {"9" * 400}}}', 'field "reward" is 999'),
        (spoken('"x"')[:-1] + ', "reward": -1e999}', "must be finite"),
        (spoken('"x"')[:-1] + ', "task_id": [1]}', 'field "task_id" is'),
    ],
)
def test_traces_that_are_no_traces(tmp_path: Path, record: str, complaint: str) -> None:
    """Would catch a traceback for a field of another type than expected."""
    path = write(tmp_path / "t.jsonl", spoken('"\\ud83d\\ude00"') + "\n" + record + "\n")
    with pytest.raises(ValueError, match=rf"t\.jsonl, line 2: .*{re.escape(complaint)}") as error:
        list(read_traces(path))
    assert len(str(error.value)) < 1000


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)) | st.just("assistant"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "text", "function", "arguments", "code"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": st.just("assistant")}, optional={"content": anything, "tool_calls": anything})
    ),
    others=st.dictionaries(st.sampled_from(["reward", "task_id", "question", "answer", "id", "details"]), anything),
)
def test_no_record_gives_anything_but_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, messages: list[object], others: dict[str, object]
) -> None:
    """Would catch the next type that is not checked."""
    path = tmp_path_factory.getbasetemp() / "odd.jsonl"
    for read, record in (
        (lambda: list(read_traces(path)), {"messages": messages, **others}),
        (lambda: read_tasks(path), others),
    ):
        write(path, json.dumps(record))
        with suppress(ValueError):
            read()
