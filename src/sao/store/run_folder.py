"""A run is a folder one can read; a dead run's folder is enough for every tool.

config.toml       the resolved configuration        environment.json  versions and machine
metrics.jsonl     one JSON object a line            events.log        what happened, for people
log/              the durable rollout log           snapshots/        published weights
checkpoints/      folders; renaming one into place is the only commit
report/           report.md, report.html, figures
"""

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import google_crc32c

from sao.store.files import JsonLinesWriter, checksum, finite, plain, sync_file, sync_folder, write_durably

MANIFEST = "manifest.json"
STOPPED = "stopped"
"""Why training ended where it was asked to, and can go on."""
_FOLDERS = ("log", "checkpoints", "snapshots", "report")
_TEMPORARY = "unfinished-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself, besides the trainer's files."""

    step: int
    """Training steps done."""
    version: int
    """Policy version of the weights in it."""
    consumed: tuple[str, ...]
    """Ids of the rollouts trained by the surviving history up to `step`, in order."""
    cursor: int
    """Tasks taken from the source by then."""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """State of the baseline, as JSON; its numbers are finite."""
    accounts: Mapping[str, int] = field(default_factory=dict)
    """What became of all rollouts, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    """Its folder, named by number and step."""
    number: int
    """In the order of commits: 1, 2, ... A resume goes on counting."""
    manifest: Manifest
    """What the loop goes on from."""
    files: Mapping[str, str]
    """Checksum by relative path."""

    def verify(self) -> None:
        """Raises ValueError naming the first file that is missing or damaged."""
        for name, expected in self.files.items():
            file = self.path / name
            if not file.is_file():
                raise ValueError(f"checkpoint file {file} is missing. {_how_to_go_on(self.path)}")
            found = checksum(file)
            if found != expected:
                raise ValueError(
                    f"checkpoint file {file} is damaged: {found}, not {expected}. {_how_to_go_on(self.path)}"
                )


class RunFolder:
    """Paths of a run, and for its one writer: metrics, events, commits. Make one with create, resume or open."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.log"
        self.log = path / "log"
        self.checkpoints = path / "checkpoints"
        self.snapshots = path / "snapshots"
        self.report = path / "report"
        self._lock = lock
        self._metrics_writer: JsonLinesWriter | None = None

    @classmethod
    def create(cls, path: Path | str) -> "RunFolder":
        """A new run. Raises ValueError if the folder exists and is not empty, or cannot be made."""
        path = Path(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            resumable = f", or go on with it by `sao resume {path}`" if (path / "config.toml").is_file() else ""
            raise ValueError(
                f"run folder {path} already exists and is not empty; a run never overwrites another. "
                f"Choose another folder{resumable}"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"run folder {path} cannot be made: {error.strerror}. Choose a folder that can") from error
        lock = _acquire(path)
        for name in _FOLDERS:
            (path / name).mkdir()
        sync_folder(path)
        return cls(path, lock)

    @classmethod
    def resume(cls, path: Path | str) -> "RunFolder":
        """An existing run, to be written on. Raises ValueError if there is none, or if another process writes it."""
        folder = cls.open(path)
        return cls(folder.path, _acquire(folder.path))

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """An existing run, to be read: nothing in it is changed. Raises ValueError if it is none."""
        path = Path(path)
        if not path.is_dir():
            raise ValueError(f"there is no run folder at {path}; give the folder that `sao train` reported")
        if not (path / "log").is_dir():
            raise ValueError(
                f"{path} is no run folder: it has no folder `log`. Give the folder that `sao train` reported"
            )
        return cls(path, None)

    @property
    def writable(self) -> bool:
        """Whether this is the run's one writer."""
        return self._lock is not None

    def close(self) -> None:
        """Release the folder to other writers. Safe to call twice. Raises OSError if metrics could not be written."""
        writer, self._metrics_writer = self._metrics_writer, None
        lock, self._lock = self._lock, None
        try:
            if writer is not None:
                writer.close()
        finally:
            if lock is not None:
                os.close(lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What ended the run says more than that the last metrics could not be written either.
        with suppress(OSError) if kind is not None else nullcontext():
            self.close()

    def write_config(self, toml: str) -> None:
        """Keep the resolved configuration."""
        assert self.writable
        write_durably(self.config, toml)

    def write_environment(self, description: Mapping[str, Any]) -> None:
        """Keep versions and machine, as JSON."""
        assert self.writable
        write_durably(self.environment, json.dumps(finite(description), indent=2) + "\n")

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl; NaN and infinities become null."""
        assert self.writable
        if self._metrics_writer is None:
            self._metrics_writer = JsonLinesWriter(self.metrics)
        self._metrics_writer.write(row)

    @property
    def end(self) -> str:
        """Why training ended, by events.log, "stopped" among others; "" if it goes on, or was killed."""
        with suppress(OSError):
            for line in reversed(self.events.read_text(encoding="utf-8").splitlines()):
                if found := re.search(r" (?:ended at step \d+: (.+)|resumed at step)", line):
                    return found[1] or ""
        return ""

    @property
    def ended(self) -> bool:
        """Whether the run came to its end: not stopped before, nor gone on with since."""
        return self.end not in ("", STOPPED)

    def write_event(self, text: str) -> None:
        """Append a line to events.log, with the time of day."""
        assert self.writable
        line = " ".join(text.split())
        with self.events.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line}\n")

    @contextmanager
    def warnings_as_events(self) -> Generator[None]:
        """Meanwhile what this package's loggers warn of stands in events.log too."""
        handler, logger = _EventHandler(self), logging.getLogger("sao")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder to save into, for `commit_checkpoint`; those of writers that died are removed."""
        assert self.writable
        for leftover in self.checkpoints.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        draft = self.checkpoints / f"{_TEMPORARY}{step:06d}"
        draft.mkdir()
        return draft

    def commit_checkpoint(self, draft: Path, manifest: Manifest, *, keep: int = 2) -> Checkpoint:
        """The one commit point: checksums, manifest and everything else on the disk, then a rename into place.

        Blocks for as long as reading and syncing the files takes. Afterwards only the last `keep` checkpoints stay.
        """
        assert self.writable
        assert draft.parent == self.checkpoints
        if keep < 1:
            raise ValueError(f"{keep} checkpoints to keep; at least 1 is needed to resume from")
        paths = sorted(path for path in draft.rglob("*") if path.is_file())
        files = {path.relative_to(draft).as_posix(): checksum(path) for path in paths}
        for path in paths:
            sync_file(path)
        for folder in (path for path in draft.rglob("*") if path.is_dir()):
            sync_folder(folder)
        number = max((number for number, _ in self._committed()), default=0) + 1
        content = plain({"number": number, **asdict(manifest), "files": files})
        write_durably(draft / MANIFEST, json.dumps({"checksum": _checksum_of(content), "content": content}) + "\n")
        path = self.checkpoints / f"{number:04d}-step-{manifest.step:06d}"
        draft.rename(path)
        sync_folder(self.checkpoints)
        for _, older in self._committed()[:-keep]:
            # Renamed first: a crash in the middle must not leave a checkpoint that looks damaged.
            doomed = older.rename(self.checkpoints / f"{_TEMPORARY}{older.name}")
            shutil.rmtree(doomed)
        return Checkpoint(path=path, number=number, manifest=manifest, files=files)

    def _committed(self) -> list[tuple[int, Path]]:
        """Number and folder of every committed checkpoint, in the order of commits."""
        found = [
            (int(path.name.split("-")[0]), path)
            for path in self.checkpoints.glob("*-step-*")
            if path.is_dir() and path.name.split("-")[0].isdigit()
        ]
        return sorted(found)

    def checkpoint_paths(self) -> list[Path]:
        """Committed checkpoints, oldest first, unverified."""
        return [path for _, path in self._committed()]

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, verified; None when there is none. Raises ValueError if it is damaged: no silent step
        back to an older one."""
        paths = self.checkpoint_paths()
        return read_checkpoint(paths[-1]) if paths else None


def read_checkpoint(path: Path | str) -> Checkpoint:
    """A checkpoint by its folder, verified. Raises ValueError naming the missing or damaged file."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"there is no checkpoint at {path}. {_how_to_go_on(path)}")
    file = path / MANIFEST
    try:
        loaded = json.loads(file.read_bytes())
        content = loaded["content"]
        if loaded["checksum"] != _checksum_of(content):
            raise ValueError("its content does not fit its checksum")
        checkpoint = Checkpoint(
            path=path,
            number=content["number"],
            manifest=Manifest(
                step=content["step"],
                version=content["version"],
                consumed=tuple(content["consumed"]),
                cursor=content["cursor"],
                baseline=content["baseline"],
                accounts=content["accounts"],
            ),
            files=content["files"],
        )
    except FileNotFoundError as error:
        raise ValueError(f"checkpoint file {file} is missing. {_how_to_go_on(path)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint file {file} is damaged: {error!r}. {_how_to_go_on(path)}") from error
    checkpoint.verify()
    return checkpoint


def _checksum_of(content: Mapping[str, Any]) -> str:
    return f"crc32c:{google_crc32c.value(json.dumps(content, sort_keys=True, allow_nan=False).encode()):08x}"


def _how_to_go_on(path: Path) -> str:
    others = sorted(other.name for other in path.parent.glob("*-step-*") if other.name != path.name)
    run = path.parent.parent
    if not others:
        return "There is no other checkpoint in this run: start a new run"
    return (
        f"To go on from an older one, name it: `sao resume {run} --checkpoint {path.parent / others[-1]}` "
        f"(there: {', '.join(others)})"
    )


def _acquire(path: Path) -> int:
    """Hold the folder's lock until the descriptor is closed, or the process ends in any way."""
    file = path / "lock"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(
            f"run folder {path} cannot be written: {error.strerror}. Change its permissions, or choose another folder"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 100).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ValueError(
            f"run folder {path} is being written by process {holder}. Wait until it ends, or stop it; "
            "two writers never share a run folder"
        ) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


class _EventHandler(logging.Handler):
    """A line of events.log for each warning."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(logging.WARNING)
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._folder.write_event(record.getMessage())
        except OSError:
            self.handleError(record)
