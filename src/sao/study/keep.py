"""What is kept of a run, so that others can check it: configuration, machine, metrics. Weights and the log stay out."""

import gzip
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

METRICS = "metrics.jsonl.gz"
"""A run's metrics.jsonl, a sixth as large: a study keeps hundreds. `zcat` shows it."""
KEPT = ("config.toml", "environment.json", METRICS)
"""What is kept of every run."""
FAILED = "FAILED"
"""File that says why a run failed; what was measured until then stands beside it."""


def keep_run(run: Path, target: Path, *more: str) -> None:
    """Keep a finished run, and `more` of its files or folders, as `target`, which appears whole or not at all.

    A failed try that stands there is ousted. Raises OSError.
    """
    draft = _draft(target)
    for name in (*KEPT, *more):
        _keep(run, draft, name)
    _settle(draft, target)


def keep_failure(run: Path, target: Path, reason: str, config: str) -> None:
    """Keep a run that failed: its configuration, what there is else, and the reason. Raises OSError."""
    draft = _draft(target)
    for name in KEPT:
        with suppress(FileNotFoundError):
            _keep(run, draft, name)
    (draft / "config.toml").write_text(config, encoding="utf-8")
    (draft / FAILED).write_text(_without_places(reason).rstrip() + "\n", encoding="utf-8")
    _settle(draft, target)


def _keep(run: Path, draft: Path, name: str) -> None:
    """Copy a file or folder; one whose name ends in .gz is compressed, to the same bytes every time."""
    place = run / name.removesuffix(".gz")
    if name.endswith(".gz"):
        (draft / name).write_bytes(gzip.compress(place.read_bytes(), mtime=0))
    elif place.is_dir():
        shutil.copytree(place, draft / name)
    else:
        shutil.copy(place, draft / name)


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
