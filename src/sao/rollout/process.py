"""Episodes in processes of their own, so that rendering and tools never hold up the orchestrator's loop.

    orchestrator --- socket: tasks, cancellations ---> N processes, many episodes each ---> engine's socket
                 <-- socket: rollouts ---------------

A process that dies gives infrastructure failures for its episodes and is replaced, a bounded number of times. When the
parent dies its end of the socket closes, and the processes end their episodes and go.
"""

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from sao.clock import Clock, RealClock, Signal, limit
from sao.engines.protocol import Engine
from sao.envs.protocol import EnvironmentFactory
from sao.rollout.protocol import Renderer
from sao.rollout.worker import LocalWorker, Purpose, RolloutConfig, describe, rollout_id
from sao.types import FailureKind, Rollout, StopReason, Task, Timings

_ENTRY = "import sys; sys.path[:] = {path!r}; from sao.rollout.process import main; main({fd})"
_HEADER_BYTES = 8
_ORPHAN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """What plays episodes, built inside a process."""

    make_environment: EnvironmentFactory
    engine: Engine
    renderer: Renderer
    stop: Callable[[], object] | None = None
    """Releases what the parts hold (grader pools), when the process ends."""


MakeParts = Callable[..., WorkerParts | Awaitable[WorkerParts]]
"""A function at the top of an importable module; its arguments are picklable. Called on the process's loop."""


@dataclass(frozen=True, kw_only=True)
class ProcessWorkersConfig:
    """How many processes play episodes, and how patient the run is with them."""

    processes: int = 1
    """Each plays many episodes at once; one is enough until its core is full of rendering and tool waits."""
    max_restarts: int = 3
    """Dead processes replaced in a run, over all of them. More means that something is wrong for good."""
    start_timeout_s: float = 120.0
    """Seconds until a process must be ready: imports, tokenizer, grader pool."""
    stop_timeout_s: float = 10.0
    """Seconds that episodes get to close their tools when the run ends; then the process is killed."""

    def __post_init__(self) -> None:
        for name in ("processes", "start_timeout_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"workers.{name} is {getattr(self, name)}; it must be above 0")
        if self.max_restarts < 0:
            raise ValueError(f"workers.max_restarts is {self.max_restarts}; it must be 0 or above")


class WorkerStartError(RuntimeError):
    """A rollout process could not be started; the message says why."""


class ProcessWorkers:
    """Satisfies rollout.protocol.RolloutWorker. Call `start` before `run`."""

    def __init__(
        self,
        make_parts: MakeParts,
        arguments: tuple[Any, ...],
        clock: Clock,
        rollout: RolloutConfig,
        config: ProcessWorkersConfig,
        *,
        purpose: Purpose = "training",
    ) -> None:
        """Raises ValueError for a virtual clock, sampling that training refuses, and parts that cannot be sent."""
        if clock.virtual:
            raise ValueError("rollout processes have no virtual time; play virtual runs with LocalWorker")
        if purpose == "training":
            rollout.require_neutral()
        try:
            self._setup = pickle.dumps((make_parts, arguments, rollout, purpose))
        except Exception as error:  # pickle raises many kinds
            raise ValueError(
                f"the parts of a rollout process cannot be sent to it: {error}; give a function at the top of a module "
                "and plain arguments"
            ) from error
        self._clock = clock
        self._config = config
        self._children: list[_Child] = []
        self._restarts = 0
        self._changed = Signal()
        self._watchers: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._stopped = False
        self._last_death = "they were not started"

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that are ready."""
        return tuple(child.pid for child in self._children)

    @property
    def restarts(self) -> int:
        """Dead processes that were replaced."""
        return self._restarts

    async def start(self) -> None:
        """Start all processes. Raises WorkerStartError with what a process said; then none is left."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._config.processes):
                    group.create_task(self._start_child())
        except BaseExceptionGroup as errors:
            await self.stop()
            raise errors.exceptions[0] from None

    async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
        """Play one episode in the process with the fewest. Only cancellation is raised."""
        started = self._clock.now()
        await self._changed.until(lambda: bool(self._children) or not self._starting)
        if not self._children:
            return self._failed(task, group_id, attempt, started, f"no rollout process is left: {self._last_death}")
        child = min(self._children, key=lambda each: len(each.waiting))
        number, answer = child.send_task(task, group_id, attempt, seed)
        try:
            rollout, child_now = await answer
        except _DiedError as error:
            return self._failed(task, group_id, attempt, started, str(error))
        except asyncio.CancelledError:
            child.cancel_task(number)
            raise
        shift = self._clock.now() - child_now
        times = rollout.timings
        times = replace(times, admitted=started, started=times.started + shift, finished=times.finished + shift)
        return replace(rollout, timings=times)

    async def stop(self) -> None:
        """End all episodes and processes; kills those that outlast the limit. Safe to call twice."""
        self._stopped = True
        self._last_death = "they were stopped"
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        children, self._children = self._children, []
        await asyncio.gather(*(child.stop(self._config.stop_timeout_s) for child in children))
        self._changed.notify()

    async def _start_child(self) -> None:
        child = await _Child.start(self._setup, self._config.start_timeout_s)
        self._children.append(child)
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        self._changed.notify()

    async def _watch(self, child: "_Child") -> None:
        """Takes what a process sends until it dies; then replaces it."""
        await child.read_answers()
        self._children.remove(child)
        self._starting += 1  # before anything is waited for, so that nobody takes the gap for the end
        try:
            self._last_death = await child.bury()
            while not self._stopped and self._restarts < self._config.max_restarts:
                self._restarts += 1
                try:
                    return await self._start_child()
                except WorkerStartError as error:
                    self._last_death = str(error)
        finally:
            self._starting -= 1
            self._changed.notify()

    def _failed(self, task: Task, group_id: str, attempt: int, started: float, text: str) -> Rollout:
        return Rollout(
            id=rollout_id(task.id, attempt),
            task_id=task.id,
            prompt_id=task.prompt_id,
            group_id=group_id,
            attempt=attempt,
            sequences=(),
            stop_reason=StopReason.ERROR,
            failure=FailureKind.INFRASTRUCTURE,
            failure_text=text,
            timings=Timings(admitted=started, started=started, finished=self._clock.now()),
            data_set=task.data_set,
        )


class _DiedError(RuntimeError):
    """The process that played an episode is gone."""


class _Child:
    """The parent's end of one process."""

    def __init__(self, process: asyncio.subprocess.Process, stream: "_Stream") -> None:
        self.waiting: dict[int, asyncio.Future[tuple[Rollout, float]]] = {}
        self._process = process
        self._stream = stream
        self._numbers = 0

    @classmethod
    async def start(cls, setup: bytes, timeout_s: float) -> "_Child":
        """Start a process and wait until its parts are built. Raises WorkerStartError."""
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own, so that Ctrl-C reaches the parent alone, which ends the episodes in order.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _ENTRY.format(path=sys.path, fd=theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
            )
        child = cls(process, await _Stream.over(ours))
        try:
            async with limit(timeout_s, f"rollout process {process.pid} to be ready"):
                child._stream.send_bytes(setup)
                trouble = await child._stream.receive()
            if trouble:
                raise WorkerStartError(f"rollout process {process.pid} could not build its parts: {trouble}")
        except (EOFError, TimeoutError) as error:
            told = await child.bury()
            raise WorkerStartError(str(error) if isinstance(error, TimeoutError) else told) from error
        except BaseException:
            await child.bury()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_task(
        self, task: Task, group_id: str, attempt: int, seed: int
    ) -> tuple[int, asyncio.Future[tuple[Rollout, float]]]:
        """Send one episode; the future brings the rollout and the process's own time then."""
        number, self._numbers = self._numbers, self._numbers + 1
        answer = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        self._stream.send((number, task, group_id, attempt, seed))
        return number, answer

    def cancel_task(self, number: int) -> None:
        """End an episode whose rollout nobody waits for."""
        if self.waiting.pop(number, None) is not None:
            self._stream.send((number,))

    async def read_answers(self) -> None:
        """Give each rollout to whoever waits for it, until the process is gone."""
        with contextlib.suppress(EOFError):
            while True:
                number, rollout, now = await self._stream.receive()
                answer = self.waiting.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result((rollout, now))

    async def bury(self) -> str:
        """End the process for certain and fail its episodes; returns what became of it."""
        try:
            await self._ended(1.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                if self._process.returncode is None:
                    self._process.kill()
        code = await self._process.wait()
        self._stream.close()
        told = f"rollout process {self.pid} ended with exit code {code}"
        waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(_DiedError(told))
        return told

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to end its episodes and go; kill it after `timeout_s`."""
        self._stream.end()
        await self._ended(timeout_s)
        await self.bury()

    async def _ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout_s)
        return self._process.returncode is not None


class _Stream:
    """Pickled messages between parent and child, with their length before them. Both ends are our own code."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> "_Stream":
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: object) -> None:
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, body: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(_HEADER_BYTES, "big"))
            self._writer.write(body)

    async def receive(self) -> Any:
        """The next message. Raises EOFError when the other end is gone."""
        try:
            header = await self._reader.readexactly(_HEADER_BYTES)
            return pickle.loads(await self._reader.readexactly(int.from_bytes(header, "big")))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def end(self) -> None:
        """Say that nothing more will be sent."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    async def drain(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()


def main(fd: int) -> None:
    """Run as a rollout process: episodes come and rollouts go over the socket `fd`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_outlive_briefly, args=(os.getppid(),), daemon=True).start()
    asyncio.run(_serve(socket.socket(fileno=fd)))


def _outlive_briefly(parent: int) -> None:
    """End a process whose loop hangs in somebody's code when its parent is long dead."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_ORPHAN_S)
    os._exit(1)


async def _serve(end: socket.socket) -> None:
    stream = await _Stream.over(end)
    try:
        make_parts, arguments, config, purpose = await stream.receive()
        made = make_parts(*arguments)
        parts: WorkerParts = await made if inspect.isawaitable(made) else made
        clock = RealClock()
        worker = LocalWorker(parts.make_environment, parts.engine, parts.renderer, clock, config, purpose=purpose)
    except Exception as error:
        stream.send(describe(error))
        await stream.drain()
        return
    stream.send("")
    episodes: dict[int, asyncio.Task[None]] = {}

    async def play(number: int, task: Task, group_id: str, attempt: int, seed: int) -> None:
        try:
            rollout = await worker.run(task, group_id=group_id, attempt=attempt, seed=seed)
            stream.send((number, rollout, clock.now()))
            await stream.drain()
        finally:
            episodes.pop(number, None)

    with contextlib.suppress(EOFError):
        while True:
            number, *rest = await stream.receive()
            if rest:
                episodes[number] = asyncio.create_task(play(number, *rest))
            elif number in episodes:
                episodes[number].cancel()
    for episode in episodes.values():
        episode.cancel()
    await asyncio.gather(*episodes.values(), return_exceptions=True)
    if parts.stop is not None:
        parts.stop()
    # Threads of hung tools must not keep the process; everything that is to be closed is closed.
    os._exit(0)
