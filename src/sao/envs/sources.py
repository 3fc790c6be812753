"""Tasks from files (JSONL, GSM8K, IMO-AnswerBench), and sources over them: shuffled, cycling."""

import csv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sao.envs.answers import extract_answer
from sao.envs.keyed import generator
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
    question, answer = (record.get(name) if isinstance(record, dict) else None for name in ("question", "answer"))
    if not isinstance(question, str) or not isinstance(answer, str):
        raise BadRecordError("no GSM8K record: an object with the texts question and answer")
    return question.strip(), answer


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
