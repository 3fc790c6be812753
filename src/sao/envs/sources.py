"""Tasks from files (JSONL, GSM8K, IMO-AnswerBench), and sources over them: shuffled, cycling, mixed."""

import csv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sao.envs.answers import extract_answer
from sao.envs.keyed import generator, uniform
from sao.envs.protocol import TaskSource
from sao.envs.traces import BadRecordError, parse_line, read_lines, shorten
from sao.types import Task

_WHERE = {
    "GSM8K": "https://github.com/openai/grade-school-math (grade_school_math/data/train.jsonl and test.jsonl)",
    "IMO-AnswerBench": "https://github.com/google-deepmind/superhuman (imobench/answerbench_v2.csv)",
}


class ListSource:
    """A list of tasks, in order or shuffled anew in each cycle, once or for ever.

    The id of a task is source/cycle/its own id, so that a cycling source admits no id twice; `prompt_id` stays.
    """

    def __init__(
        self, tasks: Sequence[Task], *, name: str, seed: int = 0, shuffle: bool = True, cycle: bool = True
    ) -> None:
        if not tasks:
            raise ValueError(f"the task source {name!r} is empty; give it at least one task")
        self.name = name
        self._tasks = tuple(tasks)
        self._seed = seed
        self._shuffle = shuffle
        self._cycle = cycle
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Tasks of one cycle."""
        return len(self._tasks)

    def at(self, index: int) -> Task | None:
        """Task `index` of the endless sequence of cycles; None past the first cycle if the source does not cycle."""
        cycle, place = divmod(index, len(self._tasks))
        if cycle > 0 and not self._cycle:
            return None
        task = self._tasks[int(self._order(cycle)[place])]
        return Task(
            id=f"{self.name}/{cycle}/{task.id}",
            prompt_id=f"{self.name}/{task.id}",
            question=task.question,
            answer=task.answer,
            data_set=task.data_set or self.name,
            details=task.details,
        )

    def _order(self, cycle: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._tasks))
        if cycle not in self._orders:
            if len(self._orders) > 4:
                self._orders.clear()
            self._orders[cycle] = generator(self._seed, self.name, "order", cycle).permutation(len(self._tasks))
        return self._orders[cycle]


class MixedSource:
    """Draws each task from one of several sources by weight; each source is taken in its own order.

    Finite sources must cycle: a source that ends raises ValueError, as the shares would change unseen.
    """

    def __init__(self, sources: Sequence[tuple[TaskSource, float]], *, name: str = "mixed", seed: int = 0) -> None:
        if not sources or any(not weight > 0 for _, weight in sources):
            raise ValueError(
                f"the mixture {name!r} has the weights {[weight for _, weight in sources]}; all must be > 0"
            )
        names = [source.name for source, _ in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"the mixture {name!r} has sources of the same name: {names}; task ids would collide")
        self.name = name
        self._sources = [source for source, _ in sources]
        weights = np.array([weight for _, weight in sources])
        self._bounds = np.cumsum(weights / weights.sum())
        self._seed = seed
        self._taken = np.zeros((1, len(sources)), np.int64)
        """Row i: tasks taken from each source before index i."""

    def at(self, index: int) -> Task | None:
        """Task `index`; the first call for a far index counts up to it."""
        while len(self._taken) <= index + 1:
            self._extend()
        source = self._source(index)
        task = self._sources[source].at(int(self._taken[index, source]))
        if task is None:
            raise ValueError(
                f"the source {self._sources[source].name!r} of the mixture {self.name!r} ended; let it cycle"
            )
        return task

    def _source(self, index: int) -> int:
        draw = uniform(self._seed, self.name, index)
        return min(int(np.searchsorted(self._bounds, draw, side="right")), len(self._sources) - 1)

    def _extend(self) -> None:
        start = len(self._taken)
        steps = np.zeros((1024, len(self._sources)), np.int64)
        for offset in range(len(steps)):
            steps[offset, self._source(start - 1 + offset)] = 1
        self._taken = np.concatenate([self._taken, self._taken[-1] + np.cumsum(steps, axis=0)])


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a JSONL file with the fields question, answer, and optionally id and details (a flat object).

    Raises ValueError naming the file, the line and the offending text.
    """
    tasks: list[Task] = []
    line_of: dict[str, int] = {}
    for number, line in read_lines(path):
        task = parse_line(path, number, line, partial(_task, default_id=str(number)))
        if task.id in line_of:
            raise ValueError(f"{path}, line {number}: the id {task.id!r} is that of line {line_of[task.id]} too")
        line_of[task.id] = number
        tasks.append(task)
    if not tasks:
        raise ValueError(f"{path} holds no task; expected one JSON object a line with question and answer")
    return tasks


def gsm8k_tasks(folder: Path, split: str = "train") -> list[Task]:
    """GSM8K from a folder with train.jsonl and test.jsonl; the annotated solution is in details["solution"]."""
    path = _existing(folder / f"{split}.jsonl", "GSM8K")
    tasks: list[Task] = []
    for number, line in read_lines(path):
        question, solution = parse_line(path, number, line, _gsm8k_texts)
        answer = extract_answer(solution)
        if answer is None:
            raise ValueError(f'{path}, line {number}: no "#### answer" at the end of {shorten(solution)}')
        tasks.append(
            Task(
                id=f"{split}-{number}",
                prompt_id=f"gsm8k-{split}-{number}",
                question=question,
                answer=answer.replace(",", ""),
                data_set=f"gsm8k-{split}",
                details={"solution": solution},
            )
        )
    return tasks


def imo_answerbench_tasks(folder: Path) -> list[Task]:
    """IMO-AnswerBench v2 from a folder with answerbench_v2.csv; answers are LaTeX as given."""
    path = _existing(folder / "answerbench_v2.csv", "IMO-AnswerBench")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _imo_rows(path, csv.DictReader(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error
    except csv.Error as error:
        raise ValueError(f"{path}: not CSV ({error}); fetch the file again") from error


def _gsm8k_texts(record: Any) -> tuple[str, str]:
    question, solution = (record.get("question"), record.get("answer")) if isinstance(record, dict) else (None, None)
    if not isinstance(question, str) or not isinstance(solution, str):
        raise BadRecordError("no GSM8K record: an object with the texts question and answer")
    return question.strip(), solution


def _imo_rows(path: Path, rows: "csv.DictReader[str]") -> list[Task]:
    needed = ("Problem ID", "Problem", "Short Answer")
    if not {*needed, "Category"} <= set(rows.fieldnames or ()):
        raise ValueError(f"{path} has the columns {rows.fieldnames}; expected {', '.join(needed)}, Category")
    tasks: list[Task] = []
    for row in rows:
        empty = [name for name in needed if not (row[name] or "").strip()]
        if empty:
            raise ValueError(f"{path}, line {rows.line_num}: no {', '.join(empty)}; fetch the file again if it was cut")
        tasks.append(
            Task(
                id=row["Problem ID"],
                prompt_id=row["Problem ID"],
                question=row["Problem"].strip(),
                answer=row["Short Answer"].strip(),
                data_set="imo-answerbench",
                details={"category": row["Category"] or ""},
            )
        )
    return tasks


def _task(record: Any, *, default_id: str) -> Task:
    if not isinstance(record, dict):
        raise BadRecordError("not a JSON object")
    for name in ("question", "answer"):
        if name not in record:
            raise BadRecordError(f'no field "{name}" (it has {", ".join(record) or "none"})')
        if isinstance(record[name], bool) or not isinstance(record[name], str | int | float):
            raise BadRecordError(f'field "{name}" is {shorten(str(record[name]))}; it must be text or a number')
        if not str(record[name]).strip():
            raise BadRecordError(f'field "{name}" is empty')
    unknown = set(record) - {"question", "answer", "id", "details"}
    if unknown:
        raise BadRecordError(f"unknown field {', '.join(sorted(unknown))} (fields are question, answer, id, details)")
    name = record.get("id", default_id)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise BadRecordError(f'field "id" is {shorten(str(name))}; it must be text or a whole number')
    if not str(name).strip():
        raise BadRecordError('field "id" is empty; leave it out to take the number of the line')
    return Task(
        id=str(name),
        prompt_id=str(name),
        question=str(record["question"]),
        answer=str(record["answer"]),
        details=_details(record.get("details", {})),
    )


def _details(details: Any) -> Mapping[str, str | int | float | bool]:
    if not isinstance(details, dict) or any(not isinstance(value, str | int | float) for value in details.values()):
        raise BadRecordError('field "details" must be an object of texts, numbers, true and false')
    chance = details.get("tool_error_probability", 0.0)
    if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 1:
        raise BadRecordError(
            f'details "tool_error_probability" is {shorten(str(chance))}; it must be a number between 0 and 1'
        )
    return details


def _existing(path: Path, data_set: str) -> Path:
    if not path.is_file():
        raise ValueError(
            f"{data_set} is not at {path}; get it from {_WHERE[data_set]} and give the folder that holds it"
        )
    return path
