"""Grades mathematical answers: an exact path in this process, then math-verify in a pool of processes.

A grading that hangs is ended by the pool, and is a failure of the world: never a reward of 0.
"""

import contextlib
import json
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass
from typing import IO

from sao.envs.answers import as_number, exactly_equal, normalise
from sao.envs.framing import receive_frame, send_frame
from sao.envs.protocol import Grade, WorldError
from sao.types import Task

_OVERSIZED = re.compile(r"\^[\s{(]*\d{6,}|\^[\s{(]*\d+\s*\^[\s{(]*\d|\d{5,}\s*!|\d\s*\^[\s{(]*\d+[\s})]*!")
"""Large exponents, towers, and factorials of large numbers or powers: no computer writes them out."""
_LONGEST_ANSWER = 500
_DEEPEST = 10
"""Nesting of brackets, unless the gold answer has more: the parser's time doubles with each, thirty take minutes."""
_BRACKETS = {"(": 1.0, "[": 1.0, ")": -1.0, "]": -1.0, "{": 1 / 3, "}": -1 / 3}
_LARGEST_FRAME = 1 << 16


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    """The pool that judges what exact comparison cannot."""

    workers: int = 2
    """Processes, started when first needed. A grading takes about 0.1 s, so two keep up with most runs."""
    timeout_s: float = 20.0
    """Seconds for one grading; longer counts as a failure of the grader. Most answers take well under one."""
    memory_mb: int = 1024
    """Address space of one process; sympy itself takes about 150."""
    start_timeout_s: float = 120.0
    """Seconds for a process to start; loading sympy takes one or two on an idle machine."""
    queue_timeout_s: float = 240.0
    """Seconds that an answer waits for a free process. Below rollout.step_timeout_s, so that the reason is told."""

    def __post_init__(self) -> None:
        for name, lowest in (("workers", 1), ("timeout_s", 0.1), ("memory_mb", 256), ("start_timeout_s", 1.0),
                             ("queue_timeout_s", 0.1)):  # fmt: skip
            if not getattr(self, name) >= lowest:
                raise ValueError(f"grader {name} is {getattr(self, name)}; it must be at least {lowest:g}")


class MathGrader:
    """Reward 1 for an answer equal to the task's, else 0. May be called from several threads."""

    def __init__(self, config: GraderConfig | None = None) -> None:
        self.config = config or GraderConfig()
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.config.workers):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._running: set[_Worker] = set()
        self._stopped = False

    def grade(self, task: Task, answer: str) -> Grade:
        """Judge; blocks up to the time limit and the wait for a free process. Raises WorldError if grading failed."""
        if exactly_equal(answer, task.answer):
            return Grade(reward=1.0, method="exact")
        if as_number(answer) is not None and as_number(task.answer) is not None:
            return Grade(reward=0.0, method="exact")
        gold, given = normalise(task.answer), normalise(answer)
        if not given or _cannot_match(gold, given):
            return Grade(reward=0.0, method="unparsed")
        verdict = self._compare(gold, given)
        return Grade(
            reward=1.0 if verdict == "equal" else 0.0, method="unparsed" if verdict == "unparsed" else "math-verify"
        )

    def stop(self) -> None:
        """End the pool; gradings under way fail. Safe to call twice."""
        with self._lock:
            self._stopped = True
            running, self._running = self._running, set()
        for worker in running:
            worker.end()

    def _compare(self, gold: str, answer: str) -> str:
        try:
            worker = self._idle.get(timeout=self.config.queue_timeout_s)
        except queue.Empty:
            raise WorldError(
                f"waited {self.config.queue_timeout_s:g} s for one of {self.config.workers} grading processes to be "
                "free; answers come faster than they are graded: raise environment.grader.workers"
            ) from None
        try:
            if worker is not None and worker.process.poll() is not None:
                self._discard(worker)
                worker = None
            if worker is None:
                worker = self._start()
            verdict = worker.compare(gold, answer, self.config.timeout_s)
        except (OSError, EOFError, ValueError) as error:
            if worker is not None:
                self._discard(worker)
                worker = None
            if self._stopped:
                raise WorldError("the grader was stopped") from error
            late = isinstance(error, TimeoutError)
            reason = f"took more than {self.config.timeout_s:g} s" if late else "ended its process"
            raise WorldError(f"grading {answer[:80]!r} against {gold[:80]!r} {reason}") from error
        finally:
            self._idle.put(worker)
        return verdict

    def _start(self) -> "_Worker":
        if self._stopped:
            raise WorldError("the grader was stopped")
        worker = _Worker(self.config)
        with self._lock:
            stopped = self._stopped
            if not stopped:
                self._running.add(worker)
        if stopped:
            worker.end()
            raise WorldError("the grader was stopped")
        try:
            worker.wait_until_ready(self.config.start_timeout_s)
        except (OSError, EOFError, ValueError) as error:
            reason = worker.failure_reason() if not isinstance(error, TimeoutError) else "not ready in time"
            self._discard(worker)
            raise WorldError(f"a grading process did not start: {reason}") from error
        return worker

    def _discard(self, worker: "_Worker") -> None:
        with self._lock:
            self._running.discard(worker)
        worker.end()


class _Worker:
    """A process of the pool and the socket to it."""

    def __init__(self, config: GraderConfig) -> None:
        self.socket, theirs = socket.socketpair()
        self.stream = self.socket.makefile("rb")
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        limits = {
            "control": theirs.fileno(),
            "parent": os.getpid(),
            "memory_bytes": config.memory_mb << 20,
            "timeout_s": config.timeout_s,
        }
        with theirs:
            # Not multiprocessing: its daemons, such as rollout workers, may have no children.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sao.envs.grader_worker", json.dumps(limits)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                start_new_session=True,
            )
        self.end = weakref.finalize(
            self, _end, os.getpid(), self.process, self.socket, (self.stream, self.socket, self.errors)
        )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the libraries are loaded. Raises OSError, EOFError or ValueError."""
        self.socket.settimeout(timeout_s)
        receive_frame(self.stream, _LARGEST_FRAME)

    def compare(self, gold: str, answer: str, timeout_s: float) -> str:
        """One comparison. Raises TimeoutError, or another OSError, EOFError or ValueError if the process is gone."""
        self.socket.settimeout(timeout_s)
        send_frame(self.socket, {"gold": gold, "answer": answer})
        reply, _ = receive_frame(self.stream, _LARGEST_FRAME)
        return str(reply["verdict"])

    def failure_reason(self) -> str:
        """Last line of what the process wrote before it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.poll()}"


def _cannot_match(gold: str, answer: str) -> bool:
    """Whether an answer is too long or too large to be the gold one, and would only hold up the pool."""
    too_long = len(answer) > max(_LONGEST_ANSWER, 3 * len(gold))
    oversized = _OVERSIZED.search(answer) is not None and _OVERSIZED.search(gold) is None
    return too_long or oversized or _depth(answer) > max(_DEEPEST, _depth(gold))


def _depth(text: str) -> float:
    """The deepest nesting of round and square brackets, closed or not; braces, which parse fast, count a third."""
    depth = deepest = 0.0
    for character in text:
        depth += _BRACKETS.get(character, 0.0)
        deepest = max(deepest, depth)
    return deepest


def _end(
    owner: int,
    process: subprocess.Popen[bytes],
    control: socket.socket,
    open_files: tuple[IO[bytes] | socket.socket, ...],
) -> None:
    if os.getpid() != owner:  # a fork that forgets its copy
        return
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # wakes a grading that waits in another thread
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    for file in open_files:
        file.close()
