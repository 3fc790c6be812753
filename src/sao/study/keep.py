"""What is kept of a run, so that others can check it: configuration, machine, metrics. Weights and the log stay out."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

KEPT = ("config.toml", "environment.json", "metrics.jsonl")
"""Of a run folder."""
FAILED = "FAILED"
"""File that says why a run failed; what was measured until then stands beside it."""


def keep_run(run: Path, target: Path, names: Sequence[str] = KEPT) -> None:
    """Copy what is kept of a finished run to `target`, which appears whole or not at all; ousts a failed try there."""
    draft = _draft(target)
    for name in names:
        place = run / name
        (shutil.copytree if place.is_dir() else shutil.copy)(place, draft / name)
    _settle(draft, target)


def keep_failure(run: Path, target: Path, reason: str, config: str) -> None:
    """Keep a run that failed: its configuration, what there is else, and the reason. Raises OSError."""
    draft = _draft(target)
    for name in KEPT:
        if (run / name).is_file():
            shutil.copy(run / name, draft / name)
    (draft / "config.toml").write_text(config, encoding="utf-8")
    (draft / FAILED).write_text(_without_places(reason).rstrip() + "\n", encoding="utf-8")
    _settle(draft, target)


def _draft(target: Path) -> Path:
    draft = target.with_name(target.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def _settle(draft: Path, target: Path) -> None:
    if (target / FAILED).is_file():
        shutil.rmtree(target)
    draft.rename(target)


def _without_places(text: str) -> str:
    """A text that is committed names no folder of the machine."""
    for place in (os.getcwd(), sys.prefix, sys.base_prefix, str(Path.home())):
        if len(place) > 1:
            text = text.replace(f"{place}/", "")
    return text
