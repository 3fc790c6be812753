"""What a reader of a study should know of its runs besides what the arms are.

Evaluations that were lost, runs that were stopped and gone on with, and arms of a seed that were not run by the same
code on the same processor.
"""

from collections.abc import Mapping

from sao.study.results import Result

ALIKE = ("commit", "processor", "python")
"""Of environment.json: what arms of a seed should have in common."""


def caveat_lines(results: Mapping[tuple[str, int], Result]) -> list[str]:
    """A section of the report; empty where there is nothing to say."""
    runs = [run for run in results.values() if not run.failure]
    lines = [*_lost(runs), *_resumed(runs), *_unlike(runs)]
    return ["## What to know of these runs", "", *lines, ""] if lines else []


def _lost(runs: list[Result]) -> list[str]:
    lost = [f"{_title(run)}: {', '.join(map(str, steps))}" for run in runs if (steps := run.lost_evaluations)]
    if not lost:
        return []
    return [f"- Evaluations that are missing, whose place a straight line takes, by step: {'; '.join(lost)}."]


def _resumed(runs: list[Result]) -> list[str]:
    resumed = [_title(run) for run in runs if run.environment.get("starts", 1) > 1]
    if not resumed:
        return []
    return [f"- Stopped and gone on with, so that what was in flight was played again: {', '.join(resumed)}."]


def _unlike(runs: list[Result]) -> list[str]:
    lines: list[str] = []
    for key in ALIKE:
        for seed in sorted({run.seed for run in runs}):
            arms: dict[str, list[str]] = {}
            for run in runs:
                # A kept result that is not committed yet makes the tree of the next run "changed".
                value = str(run.environment.get(key, "unknown")).removesuffix("+")
                if run.seed == seed:
                    arms.setdefault(value, []).append(run.arm)
            if len(arms) > 1:
                shown = 12 if key == "commit" else None
                groups = "; ".join(f"{value[:shown]} ({', '.join(names)})" for value, names in arms.items())
                lines.append(f"- Seed {seed} was not run on one {key}: {groups}.")
    return lines


def _title(run: Result) -> str:
    return f"{run.arm} seed {run.seed}"
