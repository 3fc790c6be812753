"""Episodes in processes of their own, so that rendering and tools never hold up the orchestrator's loop.

    orchestrator --- socket: tasks, cancellations ---> N processes, many episodes each ---> engine's socket
                 <-- socket: rollouts ---------------

A process that dies, or gives no sign of life for too long, gives infrastructure failures for its episodes and is
replaced, a bounded number of times an hour. When the parent dies its end of the socket closes, and the processes end
their episodes and go.
"""

import asyncio
import contextlib
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sao.clock import Clock, Signal, Tasks, limit
from sao.rollout.serve import BEAT_S, MakeParts, Stream
from sao.rollout.worker import Purpose, RolloutConfig, describe, rollout_id
from sao.types import FailureKind, Rollout, StopReason, Task, Timings

_ENTRY = "import sys; sys.path[:] = {path!r}; from sao.rollout.serve import main; main({fd})"
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class ProcessWorkersConfig:
    """How patient a run is with its rollout processes."""

    max_restarts_per_hour: int = 6
    """Lost processes replaced within an hour, over all of them. More means that something is wrong for good."""
    silent_timeout_s: float = 120.0
    """Seconds without a sign of life after which a process is replaced: code of an environment blocks its loop, or the
    system has stopped it. A busy machine delays a sign by a few seconds."""
    start_timeout_s: float = 120.0
    """Seconds until a process must be ready: imports, tokenizer, grader pool."""
    stop_timeout_s: float = 10.0
    """Seconds that episodes get to close their tools when the run ends; then the process is killed."""

    def __post_init__(self) -> None:
        for name in ("silent_timeout_s", "start_timeout_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"workers.{name} is {getattr(self, name)}; it must be above 0 seconds")
        if self.max_restarts_per_hour < 0:
            raise ValueError(
                f"workers.max_restarts_per_hour is {self.max_restarts_per_hour}; it must be 0 (none) or above"
            )


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
        processes: int = 1,
        purpose: Purpose = "training",
        on_restart: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`on_restart` is told why a process is replaced.

        Raises ValueError for a virtual clock, sampling that training refuses, and parts that cannot be sent.
        """
        assert processes > 0, "without a process nothing is ever played"
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
        self._config, self._processes, self._on_restart = config, processes, on_restart
        self._children: list[_Child] = []
        self._restarts = 0
        self._restarted: deque[float] = deque()
        self._changed = Signal()
        self._watchers = Tasks()
        self._starting = 0
        self._stopped = False
        self._last_death = "they were not started"

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that are ready."""
        return tuple(child.pid for child in self._children)

    @property
    def restarts(self) -> int:
        """Lost processes that were replaced, those that then did not start included."""
        return self._restarts

    async def start(self) -> None:
        """Start all processes. Raises WorkerStartError with what a process said; then none is left."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._processes):
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
        await self._watchers.stop()
        children, self._children = self._children, []
        await asyncio.gather(*(child.stop(self._config.stop_timeout_s) for child in children))
        self._changed.notify()

    async def _start_child(self) -> None:
        child = await _Child.start(self._setup, self._config.start_timeout_s)
        self._children.append(child)
        self._watchers.spawn(self._watch(child))
        self._changed.notify()

    async def _watch(self, child: "_Child") -> None:
        """Takes what a process sends until it dies or falls silent; then replaces it."""
        await child.read_answers(self._config.silent_timeout_s)
        self._children.remove(child)
        self._starting += 1  # before anything is waited for, so that nobody takes the gap for the end
        try:
            self._last_death = await child.reap()
            while not self._stopped and self._may_restart():
                self._on_restart(f"{self._last_death}; it is replaced")
                try:
                    return await self._start_child()
                except WorkerStartError as error:
                    self._last_death = str(error)
        finally:
            self._starting -= 1
            self._changed.notify()

    def _may_restart(self) -> bool:
        """Count a restart, if the last hour leaves one."""
        now = self._clock.now()
        while self._restarted and self._restarted[0] <= now - _HOUR:
            self._restarted.popleft()
        if len(self._restarted) >= self._config.max_restarts_per_hour:
            return False
        self._restarted.append(now)
        self._restarts += 1
        return True

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

    def __init__(self, process: asyncio.subprocess.Process, stream: Stream) -> None:
        self.waiting: dict[int, asyncio.Future[tuple[Rollout, float]]] = {}
        self._process = process
        self._stream = stream
        self._numbers = 0
        self._silent_s = 0.0
        self._fault = ""

    @classmethod
    async def start(cls, setup: bytes, timeout_s: float) -> "_Child":
        """Start a process and wait until its parts are built. Raises WorkerStartError."""
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own, so that Ctrl-C reaches the parent alone, which ends the episodes in order.
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    _ENTRY.format(path=sys.path, fd=theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise WorkerStartError(f"a rollout process could not be started: {error}") from error
        child = cls(process, await Stream.over(ours))
        try:
            async with limit(timeout_s, f"rollout process {process.pid} to be ready"):
                child._stream.send_bytes(setup)
                trouble = await child._stream.receive()
            if trouble:
                raise WorkerStartError(f"rollout process {process.pid} could not build its parts: {trouble}")
        except (EOFError, TimeoutError) as error:
            told = await child.reap()
            raise WorkerStartError(str(error) if isinstance(error, TimeoutError) else told) from error
        except BaseException:
            await child.reap()
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

    async def read_answers(self, silent_timeout_s: float) -> None:
        """Give each rollout to whoever waits for it, until the process is gone, sends nonsense, or is silent."""
        reading = asyncio.create_task(self._read())
        try:
            # Beats are counted, not seconds: a parent that was stopped itself must not take its children for dead.
            while not reading.done():
                if self._silent_s >= silent_timeout_s:
                    self._fault = f"gave no sign of life for {silent_timeout_s:g} s (workers.silent_timeout_s)"
                    return
                beat = min(BEAT_S, silent_timeout_s)
                self._silent_s += beat
                await asyncio.wait({reading}, timeout=beat)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                message = await self._stream.receive()
                self._silent_s = 0.0
                if not message:
                    continue
                number, rollout, now = message
                answer = self.waiting.pop(number, None)
                if answer is None or answer.done():
                    continue
                if isinstance(rollout, Rollout):
                    answer.set_result((rollout, now))
                else:
                    answer.set_exception(_DiedError(f"its rollout could not be sent: {rollout}"))
        except EOFError:
            return
        except Exception as error:  # unpickling raises many kinds, and nobody else would end the process
            self._fault = f"sent what is no rollout: {describe(error)}"

    async def reap(self) -> str:
        """End the process for certain and fail its episodes; returns what became of it."""
        try:
            if not self._fault:
                await self._ended(1.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                if self._process.returncode is None:
                    self._process.kill()
        code = await self._process.wait()
        self._stream.close()
        told = f"rollout process {self.pid} {self._fault or f'ended with exit code {code}'}"
        waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(_DiedError(told))
        return told

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to end its episodes and go; kill it after `timeout_s`."""
        self._stream.end()
        await self._ended(timeout_s)
        await self.reap()

    async def _ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout_s)
        return self._process.returncode is not None
