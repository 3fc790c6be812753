"""Tasks played outside of training, by the loop's rules."""

import asyncio

import pytest
from test_orchestrator import FiniteSource, ListLog, TimedEngine, TimedWorker, make_rollout

from sao.clock import Signal, VirtualClock, run_virtual
from sao.engines.protocol import EngineError
from sao.intake import Intake, play_all
from sao.loop import LoopConfig, LoopError, Start
from sao.rollout.protocol import RolloutWorker
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


def make_intake(worker: RolloutWorker, log: ListLog, config: LoopConfig, *, engine_gone: bool = False) -> Intake:
    async def engine_lives() -> None:
        if engine_gone:
            await asyncio.sleep(300.0)
            raise EngineError("the engine is gone")

    return Intake(
        clock=VirtualClock(), source=FiniteSource(), worker=worker, log=log, config=config, start=Start(), seed=0,
        changed=Signal(), fresh=lambda: True, engine_version=lambda: 0, engine_lives=engine_lives,
    )  # fmt: skip


class AtOnce(TimedWorker):
    """Plays twenty tasks to the same instant; the first ten fail, and so do their retries."""

    async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
        await asyncio.sleep(10.0)
        failed = int(task.id[1:]) < 10
        kind = FailureKind.INFRASTRUCTURE if failed else FailureKind.NONE
        return make_rollout(task, group_id, attempt, [0], kind)


@pytest.mark.parametrize(
    ("engine_gone", "error", "message"),
    [(False, LoopError, "max_failure_share"), (True, EngineError, "the engine is gone")],
)
def test_what_ended_well_is_kept_although_what_ended_with_it_ends_the_run(
    engine_gone: bool, error: type[Exception], message: str
) -> None:
    """Catches hours of rollouts that were done, and are played again after the resume."""

    async def main() -> None:
        log = ListLog()
        config = LoopConfig(batch_size=20, concurrency=20, max_batches_ahead=0, max_failure_share=0.4, max_retries=0)
        intake = make_intake(AtOnce(TimedEngine(version=0)), log, config, engine_gone=engine_gone)
        feeding = asyncio.create_task(intake.feed())
        with pytest.raises(error, match=message):
            await intake.collect()
        feeding.cancel()
        await intake.close()
        assert [record.rollout.id for record in log.of(Finished)] == [f"t{number}@0" for number in range(10, 20)]
        assert [record.position for record in log.of(Finished)] == list(range(10))
        assert intake.waiting == 10, "and ready for a batch"
        kinds = [type(record) for record in log.records if isinstance(record, Finished | AttemptEnded)]
        assert kinds == sorted(kinds, key=[Finished, AttemptEnded].index)

    run_virtual(main())


def test_the_players_of_a_lost_group_end_before_the_world_does() -> None:
    """Catches a cancelled episode that closes its tools when they were stopped already, or never closes them."""

    class Tidy(TimedWorker):
        """The first member is lost after a second; the other of its group takes longest to close its tools."""

        tidied = 0

        async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
            try:
                await asyncio.sleep(1.0 if task.id == "t0#0" else 100.0)
                return make_rollout(task, group_id, attempt, [], FailureKind.NONE)
            except asyncio.CancelledError:
                await asyncio.sleep(50.0 if task.id == "t0#1" else 10.0)
                self.tidied += 1
                raise

    async def main() -> None:
        worker = Tidy(TimedEngine(version=0))
        config = LoopConfig(batch_size=2, group_size=2, concurrency=2, max_batches_ahead=0)
        intake = make_intake(worker, ListLog(), config)
        loops = [asyncio.create_task(intake.feed()), asyncio.create_task(intake.collect())]
        await asyncio.sleep(2.0)
        assert intake.accounts.counts()["untrainable"] == 1
        for loop in loops:
            loop.cancel()
        await intake.close()
        await intake.close()
        assert worker.tidied == 3, "the other of the lost group, and both of the next one"

    run_virtual(main())
