"""One child process: a command of `sao` with its output in files, ended with its parent.

Its libraries take one thread each; torch takes what the configuration says.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LAST_LINES = 40
"""Of what a failed child wrote to stderr, that are kept."""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True, eq=False)
class Job:
    """A child that runs."""

    title: str
    """For people."""
    process: subprocess.Popen[bytes]
    """The child; leader of a session of its own, so that Ctrl-C reaches it only through its parent."""
    errors: Path
    """Its stderr."""
    started: float = field(default_factory=time.monotonic)
    """Of the monotonic clock."""

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self.started

    def ended(self) -> int | None:
        """Exit code, below 0 for a signal; None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """Ask for a clean end."""
        self.process.terminate()

    def last_words(self) -> str:
        """How it ended, and the end of its stderr."""
        code = self.process.returncode
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        try:
            lines = self.errors.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join([how, *lines[-LAST_LINES:]])


def start_job(title: str, words: Sequence[str], logs: Path, name: str) -> Job:
    """Start `sao WORDS`; its output goes to logs/NAME.out and .err."""
    logs.mkdir(parents=True, exist_ok=True)
    errors = logs / f"{name}.err"
    environment = os.environ | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONUNBUFFERED": "1"}
    with (logs / f"{name}.out").open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "sao.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
    return Job(title=title, process=process, errors=errors)


def stop_all(jobs: Sequence[Job], patience_s: float) -> None:
    """Ask all for a clean end, and kill what has not ended after `patience_s`, or at a further Ctrl-C."""
    for job in jobs:
        job.stop()
    deadline = time.monotonic() + patience_s
    try:
        while any(job.ended() is None for job in jobs) and time.monotonic() < deadline:
            time.sleep(0.1)
    except KeyboardInterrupt:
        pass
    for job in jobs:
        if job.ended() is None:
            job.process.kill()
        job.process.wait()


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """In the child: a parent that is killed outright must not leave it writing into a run folder."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
