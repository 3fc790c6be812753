"""Real time and virtual time: all waiting and all computing of a run goes through one of these.

Real: work runs where it belongs and a wait is a wait. Virtual: work runs inline, and what it gives becomes visible at
its start plus a stated cost, on an asyncio loop whose time is virtual. Ties resolve in the order of scheduling, so a
virtual run is deterministic.
"""

import asyncio
import heapq
import itertools
import math
import selectors
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_EXTERNAL_CALLS = 1024
"""Calls to the outside at once, a thread each, made when first needed: more than the episodes of a process, so that
none waits in a queue whose time would be charged to a tool."""


class WaitTimeoutError(TimeoutError):
    """A wait passed its limit; the message says what was waited for."""


class Clock(Protocol):
    """What waits, and what computes."""

    virtual: bool
    """Whether seconds are made up; wall-clock limits are off then."""

    def now(self) -> float:
        """Seconds since the clock started. May be asked within `external`, to time what runs there."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...

    async def compute(self, work: Callable[[], T], *, cost: float) -> T:
        """Run `work`. Virtual: inline, visible `cost` seconds later. Real: inline, at its own cost."""
        ...

    async def external(self, work: Callable[[], T], *, cost: float) -> T:
        """Run blocking `work` from outside the run (a tool, a grader). Virtual: charge `cost`. Real: in a thread."""
        ...


class RealClock:
    """Wall-clock seconds."""

    virtual = False

    def __init__(self) -> None:
        self._start: float | None = None
        self._threads = ThreadPoolExecutor(_EXTERNAL_CALLS, thread_name_prefix="sao-external")

    def now(self) -> float:
        """Seconds since the first call."""
        seconds = time.monotonic()
        if self._start is None:
            self._start = seconds
        return seconds - self._start

    async def sleep(self, seconds: float) -> None:
        """Wait for real."""
        await asyncio.sleep(seconds)

    async def compute(self, work: Callable[[], T], *, cost: float) -> T:
        """Run `work` inline, then let others run; `cost` is not used."""
        result = work()
        await asyncio.sleep(0)
        return result

    async def external(self, work: Callable[[], T], *, cost: float) -> T:
        """Run `work` in a thread of its own; `cost` is not used."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class VirtualClock:
    """Seconds of a virtual loop; use inside `run_virtual`."""

    virtual = True

    def now(self) -> float:
        """Virtual seconds since the loop started."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)

    async def compute(self, work: Callable[[], T], *, cost: float) -> T:
        """Run `work` now, on the inputs of now; return `cost` virtual seconds later."""
        result = work()
        await asyncio.sleep(cost)
        return result

    async def external(self, work: Callable[[], T], *, cost: float) -> T:
        """Block for real on `work`; charge `cost` virtual seconds."""
        result = work()
        await asyncio.sleep(cost)
        return result


class InstantClock(VirtualClock):
    """Virtual time that nothing takes any of: for what measures a run and is no part of its schedule."""

    async def sleep(self, seconds: float) -> None:
        """Let others run."""
        await super().sleep(0.0)

    async def compute(self, work: Callable[[], T], *, cost: float) -> T:
        """Run `work` now; `cost` is not charged."""
        return await super().compute(work, cost=0.0)

    async def external(self, work: Callable[[], T], *, cost: float) -> T:
        """Block for real on `work`; `cost` is not charged."""
        return await super().external(work, cost=0.0)


@asynccontextmanager
async def limit(seconds: float | None, waiting_for: str) -> AsyncGenerator[None]:
    """Bound a wait; raises WaitTimeoutError naming what was waited for. None means no limit (virtual time).

    A TimeoutError of what is waited for itself is passed on as it is.
    """
    bound = asyncio.timeout(seconds)
    try:
        async with bound:
            yield
    except TimeoutError as error:
        if not bound.expired() or isinstance(error, WaitTimeoutError):
            raise
        raise WaitTimeoutError(f"waited {seconds:g} s for {waiting_for}") from error


class _OrderedTimer(asyncio.TimerHandle):
    """A timer that ties with another by its sequence number, not by the heap's whim."""

    _numbers = itertools.count()

    def __init__(
        self, when: float, callback: Callable[..., Any], args: Any, loop: Any, context: Context | None
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self._number = next(self._numbers)

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _OrderedTimer)
        return (self._when, self._number) < (other._when, other._number)  # type: ignore[attr-defined]


class _JumpingSelector(selectors.DefaultSelector):
    """Advances virtual time where a real selector would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.next_timer: Callable[[], float]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError(
                "virtual time cannot go on: every task waits for something that no scheduled event will bring"
            )
        if timeout > 0:
            # Jump to the timer itself: time + timeout may round to just before it, and the loop would spin.
            self.time = max(self.time, self.next_timer())
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time is virtual. Threads and processes cannot be awaited on it."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.next_timer = lambda: self._scheduled[0].when()  # type: ignore[attr-defined]

    @property
    def _clock_resolution(self) -> float:
        """asyncio runs timers before time + resolution; far from 0 that sum must still be above the time itself."""
        return max(1e-6, 2 * math.ulp(self._jumping.time))

    @_clock_resolution.setter
    def _clock_resolution(self, _: float) -> None:
        """What asyncio sets is the resolution of the real clock, which nothing here reads."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.time

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        """Schedule at a virtual time; ties run in the order of scheduling. Raises ValueError for a time without end."""
        if not math.isfinite(when):
            raise ValueError(f"virtual time cannot reach {when}; a cost or a wait is not finite")
        timer = _OrderedTimer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Refused: a thread's end is not a virtual event."""
        raise RuntimeError(
            "a virtual run cannot wait for a thread; use clock.external, which blocks and charges a cost"
        )


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Tasks:
    """What runs beside its owner: held until it ends, so that it is not collected, or until `stop` cancels it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work` on the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def stop(self) -> None:
        """Cancel all, and return when they have ended, however they end."""
        await end_tasks(*self._running)


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and return when they have ended, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_or_cancel(*awaitables: Awaitable[Any]) -> None:
    """Await all; at the first failure cancel the rest and raise it."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)


async def unless_failed(goal: Coroutine[Any, Any, T], guard: Coroutine[Any, Any, Any]) -> T:
    """Await `goal`; if `guard` fails first, cancel it and raise that error."""
    working, guarding = asyncio.ensure_future(goal), asyncio.ensure_future(guard)
    try:
        await asyncio.wait({working, guarding}, return_when=asyncio.FIRST_COMPLETED)
        if guarding.done() and not working.done():
            guarding.result()
        return await working
    finally:
        await end_tasks(working, guarding)


class Signal:
    """Wakes whoever waits for a condition on shared state; `notify` after every change of that state."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Let every waiter look again, in the order in which they began to wait."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` is true; it is asked at every notification."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
