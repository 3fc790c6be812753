"""The trainer in processes of its own, one or several ranks, so that training and generation overlap.

    parent                                  each child
    request (number, method, inputs)  --->  one at a time, in order; the same to every rank
    reply (number, result or error)   <---  the actor's half of a step is answered before the critic trains

A request is done when all ranks have replied; rank 0's result counts, and any rank's error. The parent's loop never
blocks: one thread writes requests, one per child reads replies. A dead child closes its connection, which fails every
wait at once, and the other ranks are ended: they would wait for it. Children end with their parent, and ignore Ctrl-C
and SIGTERM: those the parent handles.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from sao.observe.metrics import Metric
from sao.training.optimiser import Progress
from sao.training.parallel import Place
from sao.training.protocol import ActorUpdate, StepReport, TrainerError
from sao.training.service import MakeCore, TrainerService
from sao.types import Batch, Rollout, Snapshot

START_TIMEOUT_S = 600.0
"""Importing torch and reading a large model may take minutes on a slow disk."""
STOP_TIMEOUT_S = 10.0
"""How long the children may take to end on request before they are ended."""
ERROR_GRACE_S = 10.0
"""How long the other ranks may take to reply after one has failed: an error of all comes at once, and a rank that waits
for the failed one never replies."""

_STOPS = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An exception in the child, as text."""

    text: str
    bad_input: bool
    """Whether it was a ValueError, which stays one."""

    def error(self) -> ValueError | TrainerError:
        """The exception for the parent."""
        return ValueError(self.text) if self.bad_input else TrainerError(self.text)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Child:
    """One rank's process."""

    rank: int
    process: BaseProcess
    connection: Connection


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """What has been replied to one request."""

    future: Future[Any]
    answers: dict[int, object] = field(default_factory=dict)


class ProcessTrainer:
    """Implements `Trainer` over child processes. They start with the constructor; requests may come at once."""

    def __init__(
        self,
        make_core: MakeCore,
        *,
        threads: int,
        timeout_s: float,
        progress: Progress | None = None,
        place: Place | None = None,
    ) -> None:
        """`place` says how many ranks there are and how they compute; which is whose and where they meet is filled in.

        Without it one process trains, unsharded. `timeout_s` bounds a wait for a reply, or for the next progress;
        `progress` is called on value pretraining's updates, on the loop that waits for it.
        """
        self._meeting = tempfile.mkdtemp(prefix="sao-ranks-") if place else ""
        places: list[Place | None] = [None]
        if place is not None:
            there = replace(place, rendezvous=f"file://{self._meeting}/ranks", interface="lo")
            places = [replace(there, rank=rank) for rank in range(place.num_ranks)]
        self._timeout_s = timeout_s
        self._progress = progress
        self._heard = 0.0
        """When the latest progress came, by the loop's time."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Request] = {}
        self._to_start = len(places)
        self._end: ValueError | TrainerError | None = None
        self._children = [_start(rank, make_core, place, threads) for rank, place in enumerate(places)]
        self._writer = ThreadPoolExecutor(1, "sao-trainer-requests")
        self._readers = [
            threading.Thread(target=self._read, args=(child,), name="sao-trainer-replies", daemon=True)
            for child in self._children
        ]
        for reader in self._readers:
            reader.start()

    async def publish_initial(self, version: int, parent: int | None) -> Snapshot:
        """Write the current actor as a snapshot without an update."""
        return await self._ask("publish_initial", f"the trainer to write version {version}", version, parent)

    async def update_actor(self, batch: Batch, *, version: int, parent: int) -> ActorUpdate:
        """Fix values and targets, update the actor, write it as `version`."""
        what = f"the actor's update of step {batch.step}"
        return await self._ask("update_actor", what, batch, version, parent)

    async def update_critic(self) -> StepReport:
        """Update the critic K times and report the step."""
        return await self._ask("update_critic", "the critic's updates")

    async def fit_values(self, rollouts: Sequence[Rollout]) -> Mapping[str, Metric]:
        """Pre-train the critic; nothing without one."""
        return await self._ask("fit_values", "value pretraining", tuple(rollouts))

    async def save(self, folder: str) -> None:
        """Write a checkpoint into an existing folder."""
        await self._ask("save", f"the trainer to save into {folder}", folder)

    async def load(self, folder: str) -> None:
        """Read a checkpoint. Raises ValueError naming the missing or corrupt file."""
        await self._ask("load", f"the trainer to load {folder}", folder)

    async def stop(self) -> None:
        """End the children."""
        with self._lock:
            self._end = self._end or TrainerError("the trainer was stopped")
        await asyncio.to_thread(self._stop)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children, by rank."""
        return [child.process.pid for child in self._children if child.process.pid is not None]

    async def _ask(self, method: str, what: str, *inputs: object) -> Any:
        """Send a request and wait for its reply. Raises ValueError for bad input, else TrainerError."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._end is not None:
                raise type(self._end)(str(self._end))
            self._waiting[number] = _Request(future=future)
        self._loop = asyncio.get_running_loop()
        self._writer.submit(self._write, (number, method, inputs))
        limit = self._timeout_s + (START_TIMEOUT_S if self._to_start else 0)
        return await unless_silent(asyncio.wrap_future(future), limit, what, heard=lambda: self._heard)

    def _write(self, request: tuple[int, str, tuple[object, ...]]) -> None:
        try:
            message = pickle.dumps(request)
        except Exception as error:
            text = f"cannot send the request {request[1]} to the trainer process: {error}"
            self._deliver(request[0], _Failure(text=text, bad_input=False))
            return
        for child in self._children:
            with contextlib.suppress(OSError):  # The reader sees the end of the connection too, and fails the request.
                child.connection.send_bytes(message)

    def _read(self, child: _Child) -> None:
        while True:
            try:
                number, answer = child.connection.recv()
            except (EOFError, OSError, TypeError):  # A connection closed under a read gives a TypeError.
                break
            if number is None:
                with contextlib.suppress(RuntimeError):  # The loop that asked may have ended.
                    assert self._loop is not None, "progress without a request"
                    self._loop.call_soon_threadsafe(self._note, *answer)
            elif number == 0:
                with self._lock:
                    self._to_start -= answer is None
                if answer is not None:
                    self._fail(answer.error())
            else:
                self._answered(number, child, answer)
        child.process.join(STOP_TIMEOUT_S)
        self._fail(TrainerError(f"{self._name(child)} ended: {_exit(child.process.exitcode)}"))

    def _note(self, done: int, total: int, metrics: dict[str, Metric]) -> None:
        self._heard = asyncio.get_running_loop().time()
        if self._progress is not None:
            self._progress(done, total, metrics)

    def _name(self, child: _Child) -> str:
        if len(self._children) == 1:
            return "the trainer process"
        return f"the trainer's rank {child.rank} of {len(self._children)} (process {child.process.pid})"

    def _answered(self, number: int, child: _Child, answer: object) -> None:
        several = len(self._children) > 1
        if several and isinstance(answer, _Failure) and not answer.bad_input:
            answer = replace(answer, text=f"{self._name(child)} failed: {answer.text}")
        with self._lock:
            request = self._waiting.get(number)
            if request is None:
                return
            request.answers[child.rank] = answer
            answers = [request.answers[rank] for rank in sorted(request.answers)]
        failures = [found for found in answers if isinstance(found, _Failure)]
        if len(answers) == len(self._children):
            self._deliver(number, failures[0] if failures else answers[0])
        elif len(failures) == 1 and failures[0] is answer:
            timer = threading.Timer(ERROR_GRACE_S, self._give_up, (number, failures[0]))
            timer.daemon = True
            timer.start()

    def _give_up(self, number: int, failure: _Failure) -> None:
        """End all ranks if the request still waits: some rank waits for the one that failed."""
        with self._lock:
            waits = number in self._waiting
        if waits:
            self._fail(failure.error())

    def _fail(self, error: ValueError | TrainerError) -> None:
        """Fail all requests, now and later, with the first such error, and end the ranks that are left."""
        with self._lock:
            self._end = self._end or error
            end, numbers = self._end, list(self._waiting)
        if len(self._children) > 1:
            for child in self._children:
                child.process.kill()
        for number in numbers:
            self._deliver(number, _Failure(text=str(end), bad_input=isinstance(end, ValueError)))

    def _deliver(self, number: int, answer: object) -> None:
        with self._lock:
            request = self._waiting.pop(number, None)
        if request is None or not request.future.set_running_or_notify_cancel():
            return  # Whoever asked was cancelled. The reply is dropped, and the next request is unharmed.
        if isinstance(answer, _Failure):
            request.future.set_exception(answer.error())
        else:
            request.future.set_result(answer)

    def _stop(self) -> None:
        processes = [child.process for child in self._children]
        if any(process.is_alive() for process in processes):
            self._writer.submit(self._write, (0, "stop", ()))
            _join(processes)
        left = [process for process in processes if process.is_alive()]
        for process in left:
            process.kill()
        _join(left)
        for reader in self._readers:
            reader.join(STOP_TIMEOUT_S)
        self._writer.shutdown(wait=False)
        for child in self._children:
            child.connection.close()
        if self._meeting:
            shutil.rmtree(self._meeting, ignore_errors=True)


def _start(rank: int, make_core: MakeCore, place: Place | None, threads: int) -> _Child:
    context = multiprocessing.get_context("spawn")
    connection, childs_end = context.Pipe()
    process = context.Process(
        target=_child, args=(childs_end, make_core, place, threads), name=f"sao-trainer-{rank}", daemon=True
    )
    # A child inherits the mask: a stop of the run cannot end it before it has set its own handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    childs_end.close()
    return _Child(rank=rank, process=process, connection=connection)


def _join(processes: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))


async def unless_silent(reply: asyncio.Future[Any], limit: float, what: str, *, heard: Callable[[], float]) -> Any:
    """A reply. Raises TrainerError after `limit` seconds without it since the call, or since `heard()` (loop time)."""
    now = asyncio.get_running_loop().time
    asked = now()
    try:
        while not reply.done():
            left = max(asked, heard()) + limit - now()
            if left <= 0:
                raise TrainerError(f"waited {limit:g} s for {what}; if it is only slow, raise trainer.step_timeout_s")
            await asyncio.wait({reply}, timeout=left)
        return reply.result()
    finally:
        reply.cancel()


def _exit(code: int | None) -> str:
    if code is None:
        return "it closed its connection and hangs"
    if code >= 0:
        return f"exit code {code}; its own output says why"
    name = signal.Signals(-code).name
    return f"killed by {name}{'; the machine may be out of memory' if -code == signal.SIGKILL else ''}"


def _child(connection: Connection, make_core: MakeCore, place: Place | None, threads: int) -> None:
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    first = place is None or place.rank == 0

    def progress(done: int, total: int, metrics: dict[str, Metric]) -> None:
        connection.send((None, (done, total, metrics)))

    try:
        service = TrainerService(make_core, place, threads=threads, progress=progress if first else None)
    except Exception as error:
        connection.send((0, _failure(error)))
        return
    connection.send((0, None))
    while True:
        try:
            number, method, inputs = connection.recv()
        except EOFError:
            return
        if method == "stop":
            service.leave()
            return
        try:
            answer = getattr(service, method)(*inputs)
        except Exception as error:
            answer = _failure(error)
        connection.send((number, answer if first or isinstance(answer, _Failure) else None))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _failure(error: Exception) -> _Failure:
    if isinstance(error, ValueError | TrainerError | OSError):
        return _Failure(text=str(error), bad_input=isinstance(error, ValueError))
    detail = "".join(traceback.format_exception(error))
    return _Failure(text=f"{type(error).__name__} in the trainer process: {error}\n{detail}", bad_input=False)
