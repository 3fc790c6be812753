"""Sources of tasks: order and cycles, and files as they come from other programs."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.envs.sources import ListSource, gsm8k_tasks, imo_answerbench_tasks, read_tasks
from sao.types import Task

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets at {DATA}")
HEADER = "Problem ID,Problem,Short Answer,Category\n"


def made(count: int) -> list[Task]:
    return [Task(id=str(i), prompt_id=str(i), question=f"q{i}", answer=str(i)) for i in range(count)]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_reads_tasks(tmp_path: Path) -> None:
    """Would catch fields lost on the way, and ids that shift with blank lines."""
    path = write(
        tmp_path / "t.jsonl",
        '{"question": "1+1?", "answer": 2, "id": "a", "details": {"level": 3}}\n\n{"question": "q", "answer": "x"}\n',
    )
    first, second = read_tasks(path)
    assert (first.id, first.question, first.answer, dict(first.details)) == ("a", "1+1?", "2", {"level": 3})
    assert second.id == "3"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "q", "answer": ', "line 2: not JSON"),
        ("[1, 2]", "line 2: not a JSON object"),
        ('{"question": "q"}', 'line 2: no field "answer"'),
        ('{"question": "q", "answer": null}', 'field "answer" is'),
        ('{"question": " ", "answer": "1"}', 'field "question" is empty'),
        ('{"question": "q", "answer": "1", "id": "a"}', "the id 'a' is that of line 1 too"),
        ('{"question": "q", "answer": "1", "anwser": "2"}', "unknown field anwser"),
        ('{"question": "q", "answer": "1", "details": {"x": [1]}}', '"details" must be'),
        ('{"question": "q", "answer": "1", "details": [1]}', 'field "details" must be'),
        ('{"question": "q", "answer": true}', 'field "answer" is'),
        ('{"question": "q", "answer": "1", "id": null}', 'field "id" is'),
        ('{"question": "q", "answer": "1", "id": {}}', 'field "id" is'),
        ('"text"', "not a JSON object"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    """Would catch an error that leaves the user searching a file of ten thousand lines, and null taken for "None"."""
    path = write(tmp_path / "t.jsonl", '{"question": "q", "answer": "1", "id": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2") as error:
        read_tasks(path)
    assert complaint in str(error.value)


def test_empty_missing_and_binary_files(tmp_path: Path) -> None:
    """Would catch a run that starts without tasks and waits for ever."""
    with pytest.raises(ValueError, match="holds no task"):
        read_tasks(write(tmp_path / "t.jsonl", "\n\n"))
    with pytest.raises(ValueError, match="is not a file"):
        read_tasks(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b'{"question": "\xff\xfe"}')
    with pytest.raises(ValueError, match="line 1: not UTF-8"):
        read_tasks(tmp_path / "b.jsonl")


def test_each_cycle_is_a_permutation_of_its_own() -> None:
    """Would catch tasks skipped or repeated within a cycle, the same order in each, and ids admitted twice."""
    source = ListSource(made(50), name="s", seed=1)
    cycles = [[source.at(cycle * 50 + i) for i in range(50)] for cycle in range(3)]
    orders = [[task.prompt_id for task in cycle if task] for cycle in cycles]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert len({task.id for cycle in cycles for task in cycle if task}) == 150
    assert ListSource(made(50), name="s", seed=1).at(120) == cycles[2][20]
    assert [ListSource(made(50), name="s", seed=2).at(i) for i in range(50)] != cycles[0]


def test_finite_and_unshuffled() -> None:
    """Would catch an evaluation that cycles, or is not in the order of its file."""
    source = ListSource(made(4), name="s", shuffle=False, cycle=False)
    assert [task.answer for i in range(4) if (task := source.at(i))] == ["0", "1", "2", "3"]
    assert source.at(4) is None
    assert len(source) == 4
    with pytest.raises(ValueError, match="'s' is empty"):
        ListSource([], name="s")


@needs_data
def test_gsm8k() -> None:
    """Would catch gold answers cut at a comma, and lines lost."""
    train, test = gsm8k_tasks(DATA / "gsm8k"), gsm8k_tasks(DATA / "gsm8k", "test")
    assert (len(train), len(test)) == (7473, 1319)
    assert (train[0].answer, test[0].answer) == ("72", "18")
    assert all(task.answer.lstrip("-").replace(".", "", 1).isdigit() for task in train)
    assert len({task.id for task in (*train, *test)}) == 7473 + 1319


@needs_data
def test_imo_answerbench() -> None:
    """Would catch problems split at their line breaks."""
    tasks = imo_answerbench_tasks(DATA / "imo_answerbench")
    assert len(tasks) == 400
    assert (tasks[0].id, tasks[0].answer) == ("imo-bench-algebra-001", "3")
    assert all(task.question and task.answer for task in tasks)


def test_absent_data_say_where_to_get_them(tmp_path: Path) -> None:
    """Would catch a FileNotFoundError that does not say what to do."""
    with pytest.raises(ValueError, match="grade-school-math"):
        gsm8k_tasks(tmp_path)
    with pytest.raises(ValueError, match="superhuman"):
        imo_answerbench_tasks(tmp_path)
    with pytest.raises(ValueError, match="expected"):
        imo_answerbench_tasks(write(tmp_path / "answerbench_v2.csv", "a,b\n1,2\n").parent)
    with pytest.raises(ValueError, match="line 1: no GSM8K record"):
        gsm8k_tasks(write(tmp_path / "train.jsonl", "{}\n").parent)


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
