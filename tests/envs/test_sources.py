from pathlib import Path

import pytest

from sao.envs.sources import ListSource, MixedSource, gsm8k_tasks, imo_answerbench_tasks, read_tasks
from sao.types import Task

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets at {DATA}")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def made(count: int) -> list[Task]:
    return [Task(id=str(i), prompt_id=str(i), question=f"q{i}", answer=str(i)) for i in range(count)]


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
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    """Would catch an error that leaves the user searching a file of ten thousand lines."""
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


def test_many_cycles_can_be_visited_in_any_order() -> None:
    """Would catch an order that is forgotten and drawn anew."""
    source = ListSource(made(5), name="s")
    first = [source.at(i) for i in range(100)]
    assert [source.at(i) for i in reversed(range(100))] == first[::-1]


def test_mixture_keeps_weights_and_each_source_in_order() -> None:
    """Would catch a source whose tasks are skipped when the other one is drawn."""
    few, many = ListSource(made(7), name="few"), ListSource(made(7), name="many")
    mixed = MixedSource([(few, 1.0), (many, 3.0)], seed=5)
    tasks = [mixed.at(i) for i in range(2000)]
    from_few = [task for task in tasks if task and task.data_set == "few"]
    assert len(from_few) / 2000 == pytest.approx(0.25, abs=0.03)
    assert from_few == [few.at(i) for i in range(len(from_few))]
    fresh = MixedSource([(few, 1.0), (many, 3.0)], seed=5)
    assert fresh.at(1500) == tasks[1500]


def test_mixture_refuses_what_cannot_work() -> None:
    """Would catch shares that change unseen when a source ends, and ids that collide."""
    endless, finite = ListSource(made(3), name="a"), ListSource(made(3), name="b", cycle=False)
    mixed = MixedSource([(endless, 1.0), (finite, 1.0)])
    with pytest.raises(ValueError, match="'b' of the mixture 'mixed' ended"):
        [mixed.at(i) for i in range(100)]
    with pytest.raises(ValueError, match="must be > 0"):
        MixedSource([(endless, 0.0)])
    with pytest.raises(ValueError, match="collide"):
        MixedSource([(endless, 1.0), (endless, 1.0)])


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
