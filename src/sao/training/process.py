"""The trainer in a process of its own, so that training and generation overlap.

    parent                                  child
    request (number, method, inputs)  --->  one at a time, in order
    reply (number, result or error)   <---  the actor's half of a step is answered before the critic trains

The parent's loop never blocks: one thread writes requests, one reads replies. A dead child closes the connection, which
fails every wait at once. The child ends with its parent, and ignores Ctrl-C and SIGTERM: those the parent handles.
"""

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from sao.observe.metrics import Metric
from sao.training.checkpoint import load_trainer, save_trainer
from sao.training.core import TrainerCore
from sao.training.optimiser import Progress
from sao.training.protocol import ActorUpdate, StepReport, TrainerError
from sao.training.timing import StepTimer, process_metrics
from sao.training.weights import SnapshotStore
from sao.types import Batch, Rollout, Snapshot

START_TIMEOUT_S = 600.0
"""Importing torch and reading a large model may take minutes on a slow disk."""
STOP_TIMEOUT_S = 10.0
"""How long the child may take to end on request before it is ended."""

_STOPS = {signal.SIGINT, signal.SIGTERM}

MakeCore = Callable[[], tuple[TrainerCore, SnapshotStore]]
"""Builds the trainer in the child; picklable, so a module's function or a partial of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """An exception in the child, as text."""

    text: str
    bad_input: bool
    """Whether it was a ValueError, which stays one."""

    def error(self) -> ValueError | TrainerError:
        """The exception for the parent."""
        return ValueError(self.text) if self.bad_input else TrainerError(self.text)


class ProcessTrainer:
    """Implements `Trainer` over a child process. The child starts with the constructor; requests may come at once."""

    def __init__(
        self, make_core: MakeCore, *, threads: int, timeout_s: float, progress: Progress | None = None
    ) -> None:
        """`timeout_s` bounds a wait for a reply, or for the next progress; `progress` is called on value pretraining's
        updates, on the loop that waits for it."""
        context = multiprocessing.get_context("spawn")
        self._connection, childs_end = context.Pipe()
        self._process = context.Process(
            target=_child, args=(childs_end, make_core, threads), name="sao-trainer", daemon=True
        )
        self._timeout_s = timeout_s
        self._progress = progress
        self._heard = 0.0
        """When the latest progress came, by the loop's time."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._started = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: ValueError | TrainerError | None = None
        # A child inherits the mask: a stop of the run cannot end it before it has set its own handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        childs_end.close()
        self._writer = ThreadPoolExecutor(1, "sao-trainer-requests")
        self._reader = threading.Thread(target=self._read, name="sao-trainer-replies", daemon=True)
        self._reader.start()

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
        """End the child."""
        with self._lock:
            self._end = self._end or TrainerError("the trainer was stopped")
        await asyncio.to_thread(self._stop)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        assert self._process.pid is not None
        return self._process.pid

    async def _ask(self, method: str, what: str, *inputs: object) -> Any:
        """Send a request and wait for its reply. Raises ValueError for bad input, else TrainerError."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._end is not None:
                raise type(self._end)(str(self._end))
            self._waiting[number] = future
        self._loop = asyncio.get_running_loop()
        self._writer.submit(self._write, (number, method, inputs))
        limit = self._timeout_s + (0 if self._started else START_TIMEOUT_S)
        return await unless_silent(asyncio.wrap_future(future), limit, what, heard=lambda: self._heard)

    def _write(self, request: tuple[int, str, tuple[object, ...]]) -> None:
        try:
            self._connection.send(request)
        except OSError:
            pass  # The reader sees the end of the connection too, and fails the request.
        except Exception as error:
            text = f"cannot send the request {request[1]} to the trainer process: {error}"
            self._deliver(request[0], _Failure(text=text, bad_input=False))

    def _read(self) -> None:
        while True:
            try:
                number, answer = self._connection.recv()
            except (EOFError, OSError, TypeError):  # A connection closed under a read gives a TypeError.
                break
            if number is None:
                with suppress(RuntimeError):  # The loop that asked may have ended.
                    assert self._loop is not None, "progress without a request"
                    self._loop.call_soon_threadsafe(self._note, *answer)
            elif number == 0:
                self._started = answer is None
                self._end = self._end or (None if answer is None else answer.error())
            else:
                self._deliver(number, answer)
        self._process.join(STOP_TIMEOUT_S)
        with self._lock:
            self._end = self._end or TrainerError(f"the trainer process ended: {_exit(self._process.exitcode)}")
            numbers = list(self._waiting)
        for number in numbers:
            self._deliver(number, _Failure(text=str(self._end), bad_input=isinstance(self._end, ValueError)))

    def _note(self, done: int, total: int, metrics: dict[str, Metric]) -> None:
        self._heard = asyncio.get_running_loop().time()
        if self._progress is not None:
            self._progress(done, total, metrics)

    def _deliver(self, number: int, answer: object) -> None:
        with self._lock:
            future = self._waiting.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return  # Whoever asked was cancelled. The reply is dropped, and the next request is unharmed.
        if isinstance(answer, _Failure):
            future.set_exception(answer.error())
        else:
            future.set_result(answer)

    def _stop(self) -> None:
        if self._process.is_alive():
            self._writer.submit(self._write, (0, "stop", ()))
            self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
        self._reader.join(STOP_TIMEOUT_S)
        self._writer.shutdown(wait=False)
        self._connection.close()


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


def _child(connection: Connection, make_core: MakeCore, threads: int) -> None:
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        service = _Service(*make_core(), connection)
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
            return
        try:
            answer = getattr(service, method)(*inputs)
        except Exception as error:
            answer = _failure(error)
        connection.send((number, answer))


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


class _Service:
    """What the child answers."""

    def __init__(self, core: TrainerCore, store: SnapshotStore, connection: Connection) -> None:
        self._core, self._store, self._connection = core, store, connection
        self._timer = StepTimer(time.perf_counter)

    def publish_initial(self, version: int, parent: int | None) -> Snapshot:
        return self._store.write(self._core.actor, version=version, parent=parent)

    def update_actor(self, batch: Batch, version: int, parent: int) -> ActorUpdate:
        with self._timer.part("values"):
            self._core.begin(batch)
        with self._timer.part("actor"):
            skipped = self._core.actor_update()
        with self._timer.part("publish"):
            snapshot = None if skipped else self.publish_initial(version, parent)
        return ActorUpdate(snapshot=snapshot, skipped=skipped)

    def update_critic(self) -> StepReport:
        with self._timer.part("critic"):
            self._core.critic_update()
        report = self._core.report()
        metrics = {**report.metrics, **self._timer.take(), **process_metrics()}
        return StepReport(step=report.step, metrics=metrics, tokens=report.tokens)

    def fit_values(self, rollouts: tuple[Rollout, ...]) -> Mapping[str, Metric]:
        return self._core.fit_values(rollouts, lambda *progress: self._connection.send((None, progress)))

    def save(self, folder: str) -> None:
        save_trainer(self._core, Path(folder))

    def load(self, folder: str) -> None:
        load_trainer(self._core, Path(folder))
