"""Tasks played outside of training, by the loop's rules."""

import asyncio

import pytest
from test_orchestrator import FiniteSource, ListLog, TimedEngine, TimedWorker, make_rollout

from sao.clock import run_virtual
from sao.intake import play_all
from sao.loop import LoopConfig, LoopError
from sao.store.records import AttemptEnded, Finished
from sao.types import FailureKind, Rollout, Task

TASKS = [task for task in map(FiniteSource(30).at, range(30)) if task is not None]


class Failing(TimedWorker):
    """Fails the first `failures` attempts at the tasks of `bad`."""

    bad: frozenset[str] = frozenset()
    failures: int = 0

    async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
        rollout = await super().run(task, group_id=group_id, attempt=attempt, seed=seed)
        failed = task.id in self.bad and attempt < self.failures
        return make_rollout(task, group_id, attempt, [seed], FailureKind.INFRASTRUCTURE) if failed else rollout


def play(bad: set[str], failures: int, log: ListLog, ends: list[int], **changes: object) -> list[Rollout]:
    worker = Failing(TimedEngine(version=0))
    worker.bad, worker.failures = frozenset(bad), failures
    config = LoopConfig(concurrency=4, max_retries=2, **changes)  # type: ignore[arg-type]
    work = play_all(TASKS, worker, log, config, seed_of=lambda task, attempt: attempt, on_end=ends.append)
    return run_virtual(work)


def test_failures_are_tried_again_logged_and_counted() -> None:
    """Catches a collection that loses tasks to one incident, and a bar that never reaches its end."""
    log, ends = ListLog(), list[int]()
    rollouts = play({"t3", "t4"}, 2, log, ends)
    assert sorted(rollout.task_id for rollout in rollouts) == sorted(task.id for task in TASKS)
    assert all(rollout.failure is FailureKind.NONE for rollout in rollouts)
    assert {rollout.id for rollout in rollouts} >= {"t3@2", "t4@2"}
    assert ends == list(range(1, 31))
    assert [record.position for record in log.of(Finished)] == list(range(30))
    assert sorted((record.rollout_id, record.retried) for record in log.of(AttemptEnded)) == [
        ("t3@0", True), ("t3@1", True), ("t4@0", True), ("t4@1", True),
    ]  # fmt: skip


def test_what_fails_for_good_is_among_the_ends() -> None:
    """Catches a lost task that is waited for, or passed off as finished."""
    log, ends = ListLog(), list[int]()
    rollouts = play({"t3"}, 3, log, ends)
    assert [rollout.id for rollout in rollouts if rollout.failure is FailureKind.INFRASTRUCTURE] == ["t3@2"]
    assert ends == list(range(1, 31))
    assert len(log.of(Finished)) == 29
    assert [record.retried for record in log.of(AttemptEnded)] == [True, True, False]


def test_a_broken_world_ends_it() -> None:
    """Catches thousands of tasks played, each three times, in a sandbox that does not start."""
    log, ends = ListLog(), list[int]()
    with pytest.raises(LoopError, match="max_failure_share"):
        play({task.id for task in TASKS}, 3, log, ends)
    assert len(ends) < 20


def test_one_error_ends_all() -> None:
    """Catches players that go on, and write to a log that is closed, after one of them has failed."""

    class Crashing(TimedWorker):
        async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
            if task.id == "t5":
                raise RuntimeError("a fault of the worker")
            return await super().run(task, group_id=group_id, attempt=attempt, seed=seed)

    async def main() -> None:
        worker, log = Crashing(TimedEngine(version=0)), ListLog()
        with pytest.raises(RuntimeError, match="a fault"):
            await play_all(
                TASKS, worker, log, LoopConfig(concurrency=4), seed_of=lambda task, attempt: 0, on_end=lambda n: None
            )
        before = len(log.records)
        assert worker.running == 0
        await asyncio.sleep(1e6)
        assert len(log.records) == before

    run_virtual(main())
