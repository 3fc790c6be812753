"""The trainer in processes of its own, one or several ranks, so that training and generation overlap.

    parent                                  each child
    request (number, method, inputs)  --->  one at a time, in order; the same to every rank
    reply (number, result or error)   <---  the actor's half of a step is answered before the critic trains

One thread writes requests, one per child reads replies. A dead child closes its connection, which fails every wait at
once. Children end with their parent, and ignore Ctrl-C and SIGTERM: those the parent handles.
"""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from sao.observe.metrics import Metric
from sao.training.optimiser import Progress
from sao.training.parallel import Place
from sao.training.protocol import TrainerError, TrainerLostError
from sao.training.requests import STOP_TIMEOUT_S, Failure, RankTrainer, answer, failure_of
from sao.training.service import MakeCore, TrainerService

_STOPS = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Child:
    """One rank's process."""

    rank: int
    process: BaseProcess
    connection: Connection


class ProcessTrainer(RankTrainer):
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

        Without it one process trains, unsharded. For `timeout_s` and `progress` see RankTrainer.
        """
        self._meeting = tempfile.mkdtemp(prefix="sao-ranks-") if place else ""
        places: list[Place | None] = [None]
        if place is not None:
            there = replace(place, rendezvous=f"file://{self._meeting}/ranks", interface="lo")
            places = [replace(there, rank=rank) for rank in range(place.num_ranks)]
        super().__init__(len(places), timeout_s=timeout_s, progress=progress)
        self._children = [_start(rank, make_core, place, threads) for rank, place in enumerate(places)]
        self._writer = ThreadPoolExecutor(1, "sao-trainer-requests")
        self._readers = [
            threading.Thread(target=self._read, args=(child,), name="sao-trainer-replies", daemon=True)
            for child in self._children
        ]
        for reader in self._readers:
            reader.start()

    async def stop(self) -> None:
        """End the children."""
        with self._lock:
            self._end = self._end or TrainerError("the trainer was stopped")
        await asyncio.to_thread(self._stop)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children, by rank."""
        return [child.process.pid for child in self._children if child.process.pid is not None]

    def _send(self, number: int, method: str, inputs: tuple[object, ...]) -> None:
        self._writer.submit(self._write, (number, method, inputs))

    def _write(self, request: tuple[int, str, tuple[object, ...]]) -> None:
        try:
            message = pickle.dumps(request)
        except Exception as error:
            text = f"cannot send the request {request[1]} to the trainer process: {error}"
            self._deliver(request[0], Failure(text=text, kind=TrainerError))
            return
        for child in self._children:
            with contextlib.suppress(OSError):  # The reader sees the end of the connection too, and fails the request.
                child.connection.send_bytes(message)

    def _read(self, child: _Child) -> None:
        while True:
            try:
                number, told = child.connection.recv()
            except (EOFError, OSError, TypeError):  # A connection closed under a read gives a TypeError.
                break
            if number is None:
                self._progressed(*told)
            elif number == 0 and told is None:
                self._started()
            elif number == 0:
                self._fail(told.error())
            else:
                self._answered(number, child.rank, told)
        child.process.join(STOP_TIMEOUT_S)
        self._fail(TrainerLostError(f"{self._name(child.rank)} ended: {_exit(child.process.exitcode)}"))

    def _name(self, rank: int) -> str:
        if self._num_ranks == 1:
            return "the trainer process"
        return f"the trainer's rank {rank} of {self._num_ranks} (process {self._children[rank].process.pid})"

    def _end_ranks(self) -> None:
        for child in self._children:
            child.process.kill()

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
        connection.send((0, failure_of(error)))
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
        connection.send((number, answer(service, method, inputs, first=first)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
