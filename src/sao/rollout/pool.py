"""Episodes played elsewhere, by several players that are watched and replaced.

    run --> the player with the fewest episodes --> rollout
              |  dies, sends nonsense, or gives no sign of life for too long
              '-> infrastructure failures for its episodes; another in its place, a bounded number of times an hour

What a player is (a process of this machine, an actor of a cluster) is a subclass's.
"""

import asyncio
import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sao.clock import Clock, Signal, Tasks, end_tasks
from sao.rollout.serve import BEAT_S, MakeParts
from sao.rollout.worker import Purpose, RolloutConfig, describe, rollout_id
from sao.types import FailureKind, Rollout, StopReason, Task, Timings

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


class DiedError(RuntimeError):
    """The player of an episode is gone."""


class PlayerHandle(ABC):
    """This end of one player: what was sent to it, and whether it lives."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[tuple[Rollout, float]]] = {}
        self._numbers = 0
        self._silent_s = 0.0
        self._fault = ""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id, where it runs."""

    @abstractmethod
    def _send_task(self, number: int, task: Task, group_id: str, attempt: int, seed: int) -> None:
        """Begin an episode there, without blocking."""

    @abstractmethod
    def _send_cancel(self, number: int) -> None:
        """End an episode there, without blocking."""

    @abstractmethod
    async def _read(self) -> None:
        """Call `_heard` at every sign of life and `_deliver` with every rollout; return when the player is gone."""

    @abstractmethod
    async def _end(self) -> str:
        """End the player for certain; returns what became of it."""

    @abstractmethod
    async def stop(self, timeout_s: float) -> None:
        """Ask the player to end its episodes and go; end it after `timeout_s`."""

    def send_task(
        self, task: Task, group_id: str, attempt: int, seed: int
    ) -> tuple[int, asyncio.Future[tuple[Rollout, float]]]:
        """Send one episode; the future brings the rollout and the player's own time then."""
        number, self._numbers = self._numbers, self._numbers + 1
        answer = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        self._send_task(number, task, group_id, attempt, seed)
        return number, answer

    def cancel_task(self, number: int) -> None:
        """End an episode whose rollout nobody waits for."""
        if self.waiting.pop(number, None) is not None:
            self._send_cancel(number)

    async def read_answers(self, silent_timeout_s: float) -> None:
        """Give each rollout to whoever waits for it, until the player is gone, sends nonsense, or is silent."""
        reading = asyncio.create_task(self._read_safely())
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
            await end_tasks(reading)

    async def reap(self) -> str:
        """End the player for certain and fail its episodes; returns what became of it."""
        told = await self._end()
        waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(DiedError(told))
        return told

    def _heard(self) -> None:
        self._silent_s = 0.0

    def _deliver(self, number: int, rollout: Rollout | str, now: float) -> None:
        """A rollout came, or a text that says why it could not be sent."""
        answer = self.waiting.pop(number, None)
        if answer is None or answer.done():
            return
        if isinstance(rollout, Rollout):
            answer.set_result((rollout, now))
        else:
            answer.set_exception(DiedError(f"its rollout could not be sent: {rollout}"))

    async def _read_safely(self) -> None:
        try:
            await self._read()
        except Exception as error:  # unpickling raises many kinds, and nobody else would end the player
            self._fault = f"sent what is no rollout: {describe(error)}"


class WorkerPool(ABC):
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
        self._children: list[PlayerHandle] = []
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

    @abstractmethod
    async def _make_player(self) -> PlayerHandle:
        """Start a player and wait until its parts are built. Raises WorkerStartError."""

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
        except DiedError as error:
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
        child = await self._make_player()
        self._children.append(child)
        self._watchers.spawn(self._watch(child))
        self._changed.notify()

    async def _watch(self, child: PlayerHandle) -> None:
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
