"""What people see while a run goes on: bars for long work, a line per row of metrics."""

import math
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sao.observe.metrics import Metrics

LINE_SECONDS = 2.0
"""Least time between two lines of training, so that fast runs do not flood the terminal."""

BAR_LINE_SECONDS = 30.0
"""Least time between two lines that stand for a bar where there is no terminal, as in a log file."""


class ConsoleReporter:
    """Satisfies stages.Reporter on a terminal; without one, lines only."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False)
        self._steps = steps
        self._bars: dict[str, TaskID] = {}
        self._last_line = 0.0
        self._last_bar_line = time.monotonic()
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )

    def __enter__(self) -> "ConsoleReporter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(text)

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Move a stage's bar; it goes when done = total, and a line stays."""
        self._move(stage, done, total, note)
        now = time.monotonic()
        if done >= total:
            self._console.print(f"{stage}: {total} done {note}".rstrip())
        elif not self._console.is_terminal and now - self._last_bar_line >= BAR_LINE_SECONDS:
            self._last_bar_line = now
            self._console.print(f"{stage}: {done} of {total} {note}".rstrip())

    def _move(self, stage: str, done: int, total: int, note: str) -> None:
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=total, note=note)
        self._progress.update(self._bars[stage], completed=done, total=total, note=note)
        if done >= total:
            self._progress.remove_task(self._bars.pop(stage))

    def row(self, step: int, version: int, stage: str, metrics: Metrics) -> None:
        """Training as a bar with a line now and then; other stages as a line each."""
        values = {key: metric.value for key, metric in metrics.items()}
        if stage == "train":
            note = _train_line(values)
            self._move("training", step, self._steps, note)
            if time.monotonic() - self._last_line >= LINE_SECONDS or step == self._steps:
                self._last_line = time.monotonic()
                self._console.print(f"step {step:4d}  version {version:4d}  {note}")
            return
        shown = _eval_line(values) if stage == "eval" else ""
        shown = shown or "  ".join(f"{key.split('/', 1)[1]} {value:.3g}" for key, value in values.items())
        self._console.print(f"{stage} at step {step}: {shown}")


def _train_line(values: dict[str, float]) -> str:
    sides = [values[key] for key in ("actor/masked_low_share", "actor/masked_high_share") if key in values]
    shown = values | ({"masked": sum(sides)} if sides else {})
    wanted = (
        ("reward", "rollout/reward", ".3f"),
        ("age", "age/mean", ".1f"),
        ("masked", "masked", ".2%"),
        ("EV", "critic/explained_variance", ".2f"),
        ("entropy", "actor/entropy", ".3f"),
        ("waiting", "loop/waiting", ".0f"),
    )
    return "  ".join(f"{name} {shown[key]:{form}}" for name, key, form in wanted if key in shown)


def _eval_line(values: dict[str, float]) -> str:
    """Mean, interval and size of each data set; the row over all of them only where there are several."""
    names = [key.split("/")[1] for key in values if key.endswith("/mean")]
    parts: list[str] = []
    for name in names if len(names) > 2 else names[:1]:
        row = {key.split("/")[2]: value for key, value in values.items() if key.split("/")[1] == name}
        lost = f", {row['failed']:.0f} rollouts lost" if row.get("failed") else ""
        interval = f"{row.get('low', math.nan):.3f} to {row.get('high', math.nan):.3f}"
        parts.append(f"{name} {row['mean']:.3f} ({interval}) on {row['prompts']:.0f} tasks{lost}")
    return "  ".join(parts)
