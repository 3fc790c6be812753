"""Virtual time: one order, no hang, no drift; waits that say what they waited for."""

import asyncio
import math
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.clock import (
    RealClock,
    Signal,
    Tasks,
    VirtualClock,
    WaitTimeoutError,
    gather_or_cancel,
    limit,
    run_virtual,
    unless_failed,
)


async def wake_all(delays: list[float], *, staggered: bool = False) -> list[tuple[float, int]]:
    """(virtual time, index) in the order in which sleepers of these delays wake."""
    woken: list[tuple[float, int]] = []
    loop = asyncio.get_running_loop()

    async def sleeper(index: int, delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((loop.time(), index))

    tasks = []
    for index, delay in enumerate(delays):
        tasks.append(asyncio.create_task(sleeper(index, delay)))
        if staggered:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return woken


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.25, 1.0, 1.5, 1e6, 3e11]), min_size=1, max_size=150), st.booleans())
def test_ties_wake_in_the_order_of_scheduling(delays: list[float], staggered: bool) -> None:
    """Catches ties resolved by the heap's whim: a virtual run would not repeat."""
    woken = run_virtual(wake_all(delays, staggered=staggered))
    assert [index for _, index in woken] == sorted(range(len(delays)), key=lambda index: delays[index])
    assert [when for when, _ in woken] == pytest.approx(sorted(delays), abs=2e-6)


def test_cancelled_timers_do_not_disturb_the_order() -> None:
    """Catches asyncio's clean-up of cancelled timers, which rebuilds the heap, losing the order of ties."""

    async def run() -> list[int]:
        loop, order = asyncio.get_running_loop(), list[int]()
        handles = [loop.call_at(5.0, order.append, index) for index in range(400)]
        for index, handle in enumerate(handles):
            if index % 3:
                handle.cancel()
        await asyncio.sleep(6.0)
        return order

    assert run_virtual(run()) == list(range(0, 400, 3))


@pytest.mark.parametrize("far", [1e3, 1e9, 1e10, 1e13, 1e17])
def test_far_times_are_reached(far: float) -> None:
    """Catches a loop that spins for ever where the clock's resolution is lost in rounding (beyond 1e10 s)."""

    async def run() -> tuple[float, float]:
        await asyncio.sleep(far)
        first = asyncio.get_running_loop().time()
        await asyncio.sleep(far / 3)
        return first, asyncio.get_running_loop().time()

    first, second = run_virtual(run())
    assert first == far
    assert second == pytest.approx(far + far / 3, rel=1e-12)


def test_a_year_takes_no_real_time() -> None:
    """Catches virtual time that waits for real."""
    began = time.monotonic()
    assert run_virtual(wake_all([float(day * 86400) for day in range(365)]))[-1][0] == 364 * 86400
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("when", [float("inf"), float("nan")])
def test_a_time_without_end_is_refused(when: float) -> None:
    """Catches a cost of inf or NaN, with which virtual time stands still for ever."""

    async def run() -> None:
        await VirtualClock().compute(lambda: None, cost=when)

    # From 3.13 on asyncio refuses to sleep for NaN seconds itself.
    refused_by_asyncio = math.isnan(when) and sys.version_info >= (3, 13)
    with pytest.raises(ValueError, match="Invalid delay: NaN" if refused_by_asyncio else "cannot reach"):
        run_virtual(run())


def test_a_deadlock_is_an_error_and_not_a_hang() -> None:
    """Catches a run in which everybody waits for everybody."""
    cleaned: list[str] = []

    async def run() -> None:
        async def waits(name: str) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cleaned.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(waits("a"))
            group.create_task(waits("b"))

    with pytest.raises(RuntimeError, match="every task waits for something that no scheduled event will bring"):
        run_virtual(run())
    assert sorted(cleaned) == ["a", "b"], "what was waiting must be unwound"


def test_a_deadlock_after_work_is_an_error_too() -> None:
    """Catches a check that only looks at the start."""

    async def run() -> None:
        await asyncio.sleep(10.0)
        await Signal().until(lambda: False)

    with pytest.raises(RuntimeError, match="virtual time cannot go on"):
        run_virtual(run())


def test_threads_are_refused_in_virtual_time() -> None:
    """Catches a run whose order depends on how fast a thread is."""

    async def run() -> None:
        await asyncio.to_thread(lambda: None)

    with pytest.raises(RuntimeError, match=r"clock\.external"):
        run_virtual(run())


def test_computing_reads_at_its_start_and_shows_at_its_end() -> None:
    """Catches work that sees what happened while it ran, or whose result is out before its cost has passed."""
    state = ["before"]
    seen: list[tuple[str, float]] = []

    async def run() -> None:
        clock = VirtualClock()

        async def work(call, cost: float) -> None:
            result = await call(lambda: state[0], cost=cost)
            seen.append((result, clock.now()))

        async def change() -> None:
            await clock.sleep(1.0)
            state[0] = "after"

        await asyncio.gather(work(clock.compute, 2.0), work(clock.external, 3.0), change())

    run_virtual(run())
    assert seen == [("before", 2.0), ("before", 3.0)]


def test_the_real_clock_starts_at_zero_and_keeps_outside_calls_off_the_loop() -> None:
    """Catches time counted from the machine's start, and a blocking call that stops the loop."""

    async def run() -> None:
        clock = RealClock()
        assert clock.now() == 0.0
        threads = [
            await clock.external(threading.get_ident, cost=0.0),
            await clock.compute(threading.get_ident, cost=9.0),
        ]
        assert threads[0] != threading.get_ident() == threads[1]
        assert 0 < clock.now() < 5, "compute is not charged in real time"

    asyncio.run(run())


def test_a_guard_that_fails_ends_what_it_guards() -> None:
    """Catches work that goes on, or that is waited for, with the engine it needs gone; and a guard that outlives it."""
    cancelled: list[str] = []

    async def wait(name: str, seconds: float, error: Exception | None = None) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise
        if error is not None:
            raise error
        return name

    assert run_virtual(unless_failed(wait("work", 5.0), wait("guard", 1e6))) == "work"
    assert cancelled == ["guard"]
    with pytest.raises(ValueError, match="gone"):
        run_virtual(unless_failed(wait("work", 1e6), wait("guard", 5.0, ValueError("gone"))))
    assert cancelled == ["guard", "work"]
    with pytest.raises(ValueError, match="broken"):
        run_virtual(unless_failed(wait("work", 1.0, ValueError("broken")), wait("guard", 5.0)))
    assert run_virtual(unless_failed(wait("work", 5.0), wait("guard", 1.0))) == "work"


def test_outside_calls_do_not_wait_for_one_another() -> None:
    """Catches asyncio's own threads, six on two cores: tools that hang hold up all others, at those others' cost."""
    meeting = threading.Barrier(100)

    async def main() -> None:
        clock = RealClock()
        await asyncio.gather(*(clock.external(lambda: meeting.wait(60), cost=0.0) for _ in range(100)))

    asyncio.run(main())


def test_a_limit_names_what_was_waited_for() -> None:
    """Catches `TimeoutError` without a word, from which nobody learns what hung."""

    async def run() -> None:
        async with limit(2.5, "the engine to load version 7"):
            await asyncio.sleep(100)

    with pytest.raises(WaitTimeoutError, match=r"^waited 2\.5 s for the engine to load version 7$"):
        run_virtual(run())


def test_the_innermost_limit_speaks() -> None:
    """Catches an outer limit that claims the inner one's wait."""

    async def run() -> None:
        async with limit(50.0, "the step"), limit(2.0, "the tool"):
            await asyncio.sleep(100)

    with pytest.raises(WaitTimeoutError, match="for the tool"):
        run_virtual(run())


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_timeout_of_the_thing_itself_is_not_the_limits(seconds: float | None) -> None:
    """Catches a socket's time-out reported as ours, and the formatting of no limit, which raised TypeError."""

    async def run() -> None:
        async with limit(seconds, "an answer"):
            raise TimeoutError("the peer did not answer")

    with pytest.raises(TimeoutError, match="the peer did not answer") as caught:
        run_virtual(run())
    assert not isinstance(caught.value, WaitTimeoutError)


def test_no_limit_waits_as_long_as_it_takes() -> None:
    """Catches None read as 0."""

    async def run() -> float:
        async with limit(None, "a long answer"):
            await asyncio.sleep(1e7)
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == 1e7


def test_a_signal_wakes_waiters_in_order_and_only_for_good() -> None:
    """Catches a waiter that returns while its condition is false, is forgotten, or overtakes another."""
    woken: list[str] = []

    async def run() -> None:
        signal, places = Signal(), [0]

        async def taker(name: str) -> None:
            await signal.until(lambda: places[0] > 0)
            places[0] -= 1
            woken.append(name)

        takers = [asyncio.create_task(taker(name)) for name in "abc"]
        await asyncio.sleep(0)
        signal.notify()  # nothing has changed
        await asyncio.sleep(1)
        assert woken == []
        for _ in range(3):
            places[0] += 1
            signal.notify()
            await asyncio.sleep(1)
        await asyncio.gather(*takers)

    run_virtual(run())
    assert woken == ["a", "b", "c"]


def test_a_signal_outlives_a_cancelled_waiter() -> None:
    """Catches `notify` failing on the future of a waiter that was cancelled, which would wake nobody after it."""

    async def run() -> None:
        signal, ready = Signal(), [False]
        first = asyncio.create_task(signal.until(lambda: ready[0]))
        second = asyncio.create_task(signal.until(lambda: ready[0]))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        ready[0] = True
        signal.notify()
        await second
        await signal.until(lambda: True)  # a condition that holds waits for nobody

    run_virtual(run())


def test_gathering_cancels_the_rest_at_the_first_failure() -> None:
    """Catches work that goes on behind an error."""
    ended: list[str] = []

    async def run() -> None:
        async def fails() -> None:
            await asyncio.sleep(1)
            raise ValueError("broken")

        async def goes_on() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                ended.append(f"at {asyncio.get_running_loop().time():g}")

        await gather_or_cancel(fails(), goes_on())

    with pytest.raises(ValueError, match="broken"):
        run_virtual(run())
    assert ended == ["at 1"]


def test_tasks_are_held_until_they_end_or_are_stopped() -> None:
    """Catches a background task that is collected in mid-work, and an owner that leaves its tasks running."""
    ends: list[str] = []

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            ends.append(f"{name} ended")
        except asyncio.CancelledError:
            ends.append(f"{name} cancelled")
            raise

    async def main() -> None:
        tasks = Tasks()
        await tasks.spawn(work("short", 1.0))
        long = tasks.spawn(work("long", 100.0))
        await asyncio.sleep(1.0)
        await tasks.stop()
        assert long.cancelled()
        await tasks.stop()

    run_virtual(main())
    assert ends == ["short ended", "long cancelled"]
