"""Sources and traces: properties, and files as they come from other programs."""

import json
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.clock import VirtualClock
from sao.envs.answers import ExactGrader
from sao.envs.demonstrations import ReplayExpert, demonstrate
from sao.envs.math_python import MathPythonConfig, MathPythonEnvironment
from sao.envs.restricted import RestrictedTool
from sao.envs.sources import ListSource, MixedSource, gsm8k_tasks, imo_answerbench_tasks, read_tasks
from sao.envs.traces import Trace, read_traces, write_traces
from sao.types import Message, Task

HEADER = "Problem ID,Problem,Short Answer,Category\n"


def made(count: int) -> list[Task]:
    return [Task(id=str(i), prompt_id=str(i), question=f"q{i}", answer=str(i)) for i in range(count)]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), seed=st.integers(0, 2**40), visits=st.lists(st.integers(0, 150), max_size=20))
def test_a_cursor_is_all_that_a_source_needs(count: int, seed: int, visits: list[int]) -> None:
    """Would catch a source whose task depends on how it was reached: a resumed run would repeat or skip tasks."""
    source = ListSource(made(count), name="s", seed=seed)
    for index in visits:
        task = source.at(index)
        assert task is not None
        assert task == ListSource(made(count), name="s", seed=seed).at(index)
        assert task.id.startswith(f"s/{index // count}/")
    cycle = [source.at(3 * count + place) for place in range(count)]
    assert sorted(task.answer for task in cycle if task) == sorted(map(str, range(count)))


@settings(max_examples=15, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), seed=st.integers(0, 2**40), at=st.integers(0, 1500)
)
def test_a_mixture_interleaves_its_sources(weights: list[float], seed: int, at: int) -> None:
    """Would catch tasks lost or doubled when sources are mixed, also where the counts are extended."""

    def mixture() -> MixedSource:
        return MixedSource([(ListSource(made(5), name=f"s{i}"), weight) for i, weight in enumerate(weights)], seed=seed)

    first = mixture().at(at)
    mixed = mixture()
    tasks = [task for index in range(at, at + 40) if (task := mixed.at(index)) is not None]
    assert tasks[0] == first
    assert len({task.id for task in tasks}) == len(tasks)
    for number in range(len(weights)):
        mine = [task for task in tasks if task.data_set == f"s{number}"]
        alone = ListSource(made(5), name=f"s{number}")
        ids = (alone.at(index) for index in range(at + 40))
        if mine:
            start = next(index for index, task in enumerate(ids) if task == mine[0])
            assert mine == [alone.at(start + offset) for offset in range(len(mine))]


def test_the_same_prompt_is_recognised_in_every_cycle() -> None:
    """Would catch a prompt_id with the cycle in it, so that no statistic per prompt is possible."""
    source = ListSource(made(3), name="s")
    prompts = [task.prompt_id for index in range(9) if (task := source.at(index))]
    assert sorted(prompts) == ["s/0"] * 3 + ["s/1"] * 3 + ["s/2"] * 3


def test_files_of_other_systems(tmp_path: Path) -> None:
    """Would catch a byte order mark, CR LF, or a separator of lines inside a text taken for the end of a record."""
    record = json.dumps({"question": "a\u2028b\x85c", "answer": 7}, ensure_ascii=False)
    (one, two) = read_tasks(write(tmp_path / "t.jsonl", f"\ufeff{record}\r\n\r\n{record}"))
    assert (one.question, one.answer, one.id, two.id) == ("a\u2028b\x85c", "7", "1", "3")


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ('{"question": "q", "answer": true}', 'field "answer" is'),
        ('{"question": "q", "answer": "1", "id": null}', 'field "id" is'),
        ('{"question": "q", "answer": "1", "id": {}}', 'field "id" is'),
        ('{"question": "q", "answer": "1", "details": [1]}', 'field "details" must be'),
        ('"text"', "not a JSON object"),
    ],
)
def test_odd_fields_are_named(tmp_path: Path, record: str, complaint: str) -> None:
    """Would catch null taken for the text "None"."""
    path = write(tmp_path / "t.jsonl", '{"question": "q", "answer": "1"}\n' + record + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2") as error:
        read_tasks(path)
    assert complaint in str(error.value)


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


def test_long_lines_are_shortened_in_errors(tmp_path: Path) -> None:
    """Would catch a message of a megabyte."""
    with pytest.raises(ValueError, match="line 1: not JSON") as error:
        read_tasks(write(tmp_path / "t.jsonl", "x" * 100_000))
    assert len(str(error.value)) < 1000


def test_gsm8k_by_hand(tmp_path: Path) -> None:
    """Would catch thousands separators in gold answers, and a split mistaken for the other."""
    record = {"question": " how many? ", "answer": "1+1=<<1+1=2>>2\n#### -1,234"}
    write(tmp_path / "train.jsonl", json.dumps(record) + "\n")
    (task,) = gsm8k_tasks(tmp_path)
    assert (task.question, task.answer, task.id, task.data_set) == ("how many?", "-1234", "train-1", "gsm8k-train")
    with pytest.raises(ValueError, match=r"test\.jsonl; get it from https://\S+ .*give the folder"):
        gsm8k_tasks(tmp_path, "test")
    write(tmp_path / "test.jsonl", json.dumps({"question": "q", "answer": "it is 3"}) + "\n")
    with pytest.raises(ValueError, match=r'line 1: no "#### answer"'):
        gsm8k_tasks(tmp_path, "test")


def test_imo_answerbench_by_hand(tmp_path: Path) -> None:
    """Would catch problems split at line breaks or commas inside quotes."""
    write(tmp_path / "answerbench_v2.csv", HEADER + 'p-1,"Let $x$,\nfind ""x""",$\\frac{1}{2}$,Algebra\n')
    (task,) = imo_answerbench_tasks(tmp_path)
    assert (task.id, task.question, task.answer) == ("p-1", 'Let $x$,\nfind "x"', r"$\frac{1}{2}$")
    assert task.details == {"category": "Algebra"}


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("p-1,problem,3,Algebra\np-2,problem\n", "line 3: no Short Answer"),
        ('p-1,"problem, cut here', "line 2: no Short Answer"),
        ("p-1, ,3,Algebra\n", "line 2: no Problem;"),
    ],
)
def test_broken_imo_answerbench(tmp_path: Path, rows: str, complaint: str) -> None:
    """Would catch an AttributeError for a download that was cut off."""
    write(tmp_path / "answerbench_v2.csv", HEADER + rows)
    with pytest.raises(ValueError, match=complaint):
        imo_answerbench_tasks(tmp_path)


def test_imo_answerbench_in_another_encoding(tmp_path: Path) -> None:
    """Would catch a codec's error that does not name the file."""
    (tmp_path / "answerbench_v2.csv").write_bytes((HEADER + "p-1,caf\u00e9,3,Algebra\n").encode("latin-1"))
    with pytest.raises(ValueError, match=r"answerbench_v2\.csv: not UTF-8"):
        imo_answerbench_tasks(tmp_path)


trace_messages = st.lists(
    st.builds(Message, role=st.sampled_from(["user", "assistant"]), content=st.text()), min_size=1, max_size=4
).filter(lambda messages: any(message.role == "assistant" for message in messages))


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


def openai(arguments: object) -> str:
    call = {"id": "c", "type": "function", "function": {"name": "python", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "6 * 7 ?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": "<answer> 42 </answer>"},
    ]
    return json.dumps({"task_id": "t", "messages": messages})


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
        lambda clock: played_environment(clock),
        lambda _: ReplayExpert(message.content for message in trace.messages if message.role == "assistant"),
        count=1,
    )
    assert again.messages == trace.messages
    assert again.reward == trace.reward == 1.0


def played_environment(clock: VirtualClock) -> MathPythonEnvironment:
    return MathPythonEnvironment(RestrictedTool, ExactGrader(), clock, MathPythonConfig(), inline_tool=True)


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
