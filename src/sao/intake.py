"""The rollout side of the loop: tasks are admitted, played and settled, and the finished ones wait for a batch.

`play_all` plays tasks outside of the loop, once each, by the same rules.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from sao.clock import Clock, Signal, end_tasks, gather_or_cancel
from sao.envs.protocol import TaskSource
from sao.loop import Log, LoopConfig, LoopError, Start
from sao.observe.metrics import Metric, last
from sao.pipeline.accounts import NO_TRIES_LEFT, UNTRAINABLE, Accounts
from sao.pipeline.admission import Admission, Member
from sao.rollout.protocol import RolloutWorker
from sao.rollout.worker import rollout_seed
from sao.store.records import Admitted, AttemptEnded, Dropped, Finished
from sao.types import FailureKind, Rollout, Task


class Intake:
    """Everything between the task source and a batch.

    `fresh` says whether the engine's weights allow admission; `engine_lives` raises if the engine is gone.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        source: TaskSource,
        worker: RolloutWorker,
        log: Log,
        config: LoopConfig,
        start: Start,
        seed: int,
        changed: Signal,
        fresh: Callable[[], bool],
        engine_version: Callable[[], int],
        engine_lives: Callable[[], Awaitable[None]],
    ) -> None:
        self._clock, self._source, self._worker, self._log = clock, source, worker, log
        self._config, self._seed, self._changed = config, seed, changed
        self._fresh, self._engine_version, self._engine_lives = fresh, engine_version, engine_lives
        self._admission = Admission(
            batch_size=config.batch_size,
            group_size=config.group_size,
            max_batches_ahead=config.max_batches_ahead,
            max_retries=config.max_retries,
            in_order=config.batch_order == "admitted",
        )
        self.accounts = Accounts(start.accounts)
        self._cursor, self._position = start.cursor, start.position
        self._begun: dict[str, int] = {}
        self._players: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Players that were cancelled with their group, until they have ended."""
        self._ended: asyncio.Queue[tuple[Member, Rollout]] = asyncio.Queue()
        self._crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exhausted = False
        self._closed = False
        self._restore(start)

    def _restore(self, start: Start) -> None:
        # Times of the process that admitted them mean nothing on this clock.
        pending = [replace(member, admitted=self._clock.now()) for member in start.pending]
        for member in pending:
            self._record_admission(member)
        for rollout_id in self._admission.restore(pending, start.finished, start.groups):
            self._drop(rollout_id, "its group is incomplete after resume")

    # What the training side asks.

    @property
    def waiting(self) -> int:
        """Rollouts ready for a batch."""
        return self._admission.waiting

    @property
    def full(self) -> bool:
        """Whether a whole batch is ready."""
        return self._admission.full

    @property
    def cursor(self) -> int:
        """Tasks taken from the source."""
        return self._cursor

    @property
    def drained(self) -> bool:
        """Whether nothing more will become ready: the source has ended and nothing is under way."""
        return self._exhausted and self._admission.empty and self._ended.empty()

    def begun_versions(self) -> list[int]:
        """The engine's version when each running rollout began."""
        return list(self._begun.values())

    def take(self) -> tuple[Rollout, ...]:
        """A full batch, or what is left once drained, or ()."""
        return self._admission.take(partial=self.drained)

    def drop_ready(self, unwanted: Callable[[Rollout], bool], reason: str) -> None:
        """Drop ready groups with an unwanted member, counted."""
        for rollout in self._admission.drop_ready(unwanted):
            self._drop(rollout.id, reason)
            self._changed.notify()

    def release(self, rollouts: Iterable[Rollout]) -> None:
        """Free the places of a trained batch."""
        rollouts = list(rollouts)
        self._admission.release(rollouts)
        self.accounts.add("trained", len(rollouts))
        self._changed.notify()

    def describe(self) -> str:
        """Where the rollouts are, for messages."""
        admission = self._admission
        return (
            f"{len(admission.pending)} pending, {len(admission.running)} running, {admission.waiting} ready, "
            f"{admission.held} of {admission.capacity} places held"
        )

    def metrics(self) -> dict[str, Metric]:
        """The loop/ metrics of rollouts."""
        return {
            **self.accounts.metrics(),
            "loop/places_held": last(self._admission.held),
            "loop/running": last(len(self._admission.running)),
            "loop/waiting": last(self._admission.waiting),
        }

    async def close(self) -> None:
        """Admit nothing more and cancel what is running; returns when all players have ended. Safe to call twice."""
        self._closed = True
        players = list(self._players.values())
        self._players.clear()
        await end_tasks(*players)
        # Not cancelled again: that would cut their clean-up short.
        await asyncio.gather(*self._leaving, return_exceptions=True)

    # The loops.

    async def feed(self) -> None:
        """Takes tasks from the source; gives running rollouts. Waits for a slot to run in, or a place and new weights.

        Woken by rollouts that end, batches that are released, and weights that arrive.
        """
        while True:
            await self._changed.until(lambda: self._may_start() or self._may_admit())
            if self._may_start():
                member = self._admission.start()
                self._begun[member.key] = self._engine_version()
                player = asyncio.create_task(self._play(member), name=f"rollout {member.rollout_id}")
                player.add_done_callback(self._player_done)
                self._players[member.key] = player
            else:
                self._admit_next()
            if not self._clock.virtual:
                # Thousands of starts at once would stop the loop for seconds.
                await asyncio.sleep(0)

    async def collect(self) -> None:
        """Takes rollouts that ended; gives finished ones to the batch, once they are durable. Woken by each ending."""
        while True:
            ended = [await self._ended.get()]
            while not self._ended.empty():
                ended.append(self._ended.get_nowait())
            # Counted in the order of ending, on which the share of failures depends.
            ended = [pair for pair in ended if self._counted(*pair)]
            # What can be trained on is safe before the others are looked at: they may end the run.
            await self._keep([(member, rollout) for member, rollout in ended if rollout.trainable])
            others = [(member, rollout) for member, rollout in ended if not rollout.trainable]
            if any(rollout.failure is FailureKind.INFRASTRUCTURE for _, rollout in others):
                # With the engine gone everything fails at once. That ends the run, and must not use up these tasks.
                await self._engine_lives()
            for member, rollout in others:
                self._settle(member, rollout)
            self._changed.notify()

    async def watch_players(self) -> None:
        """Takes nothing; raises what a player raised, which no worker should."""
        await self._crash

    # Steps of the loops.

    def _may_start(self) -> bool:
        admission = self._admission
        return not self._closed and bool(admission.pending) and len(admission.running) < self._config.concurrency

    def _may_admit(self) -> bool:
        return not self._closed and not self._exhausted and self._admission.room and self._fresh()

    def _admit_next(self) -> None:
        task = self._source.at(self._cursor)
        if task is None:
            self._exhausted = True
            self._changed.notify()
            return
        self._cursor += 1
        size = self._config.group_size
        members = [
            Member(
                task=task if size == 1 else replace(task, id=f"{task.id}#{index}"),
                group_id=task.id,
                index=index,
                attempt=0,
                cursor=self._cursor,
                admitted=self._clock.now(),
            )
            for index in range(size)
        ]
        for member in members:
            self._record_admission(member)
        self._admission.admit(members)
        self.accounts.add("admitted", size)

    def _record_admission(self, member: Member) -> None:
        self._log.append(
            Admitted(
                task=member.task,
                cursor=member.cursor,
                rollout_id=member.rollout_id,
                group_id=member.group_id,
                attempt=member.attempt,
                seed=self._seed_of(member),
                clock_seconds=member.admitted,
            )
        )

    def _seed_of(self, member: Member) -> int:
        return rollout_seed(self._seed, member.task.id, member.attempt)

    async def _play(self, member: Member) -> None:
        rollout = await self._worker.run(
            member.task, group_id=member.group_id, attempt=member.attempt, seed=self._seed_of(member)
        )
        rollout = replace(rollout, timings=replace(rollout.timings, admitted=member.admitted))
        self._ended.put_nowait((member, rollout))

    def _player_done(self, player: asyncio.Task[None]) -> None:
        if not player.cancelled() and player.exception() is not None and not self._crash.done():
            self._crash.set_exception(player.exception() or AssertionError())

    def _counted(self, member: Member, rollout: Rollout) -> bool:
        """Count an ending; False if its group was lost meanwhile: it was counted then."""
        self._players.pop(member.key, None)
        self._begun.pop(member.key, None)
        if member.key not in self._admission.running:
            return False
        failed = rollout.failure is FailureKind.INFRASTRUCTURE
        self.accounts.attempt(failed=failed, retry=member.failures > 0)
        return True

    async def _keep(self, ended: list[tuple[Member, Rollout]]) -> None:
        """Log rollouts that may be trained on, and give them to the batch once they are durable."""
        for _, rollout in ended:
            self._log.append(Finished(rollout=rollout, position=self._position))
            self._position += 1
        await self._log.durable()
        for member, rollout in ended:
            self._admission.finish(member, rollout)
            self.accounts.add("finished")
        self._changed.notify()

    def _settle(self, member: Member, rollout: Rollout) -> None:
        """Deal with an ending that cannot be trained on."""
        if member.key not in self._admission.running:
            return  # another that ended with it has lost their group
        if rollout.failure is FailureKind.INFRASTRUCTURE:
            self._settle_failure(member, rollout)
        else:
            self.accounts.add("untrainable")
            self._lose_group(member, UNTRAINABLE)

    def _settle_failure(self, member: Member, rollout: Rollout) -> None:
        self.accounts.add("infrastructure_failures")
        again = self._admission.retry(member)
        self._log.append(_attempt_ended(member.rollout_id, rollout, retried=again is not None))
        _check_failures(self.accounts, self._config, rollout)
        if again is not None:
            self.accounts.add("retried")
            self._record_admission(again)
        else:
            self._lose_group(member, NO_TRIES_LEFT)

    def _lose_group(self, member: Member, reason: str) -> None:
        """Drop the group of a member that is lost for good."""
        unfinished, finished = self._admission.lose(member.group_id)
        self._log.append(Dropped(rollout_id=member.rollout_id, reason=reason))
        for other in unfinished:
            if other.key == member.key:
                continue
            self._begun.pop(other.key, None)
            player = self._players.pop(other.key, None)
            if player is not None:
                player.cancel()
                self._leaving.add(player)
                player.add_done_callback(self._leaving.discard)
            self._drop(other.rollout_id, f"its group lost {member.rollout_id}")
        for rollout in finished:
            self._drop(rollout.id, f"its group lost {member.rollout_id}")
        self._changed.notify()

    def _drop(self, rollout_id: str, reason: str) -> None:
        self._log.append(Dropped(rollout_id=rollout_id, reason=reason))
        self.accounts.add("dropped")


def _attempt_ended(rollout_id: str, rollout: Rollout, *, retried: bool) -> AttemptEnded:
    return AttemptEnded(
        rollout_id=rollout_id,
        failure=rollout.failure,
        failure_text=rollout.failure_text,
        retried=retried,
        rollout=rollout,
    )


def _check_failures(accounts: Accounts, config: LoopConfig, latest: Rollout) -> None:
    """Raises LoopError when too many attempts of late failed by infrastructure."""
    share = accounts.failure_share(retries=config.max_retries > 0)
    if share > config.max_failure_share:
        raise LoopError(
            f"{share:.0%} of the last attempts failed by infrastructure (loop.max_failure_share is "
            f"{config.max_failure_share:.0%}). Repair the cause. The last failure: "
            f"{latest.failure_text}"
        )


async def play_all(
    tasks: Sequence[Task],
    worker: RolloutWorker,
    log: Log,
    config: LoopConfig,
    *,
    seed_of: Callable[[Task, int], int],
    position: int = 0,
    on_end: Callable[[int], None],
) -> list[Rollout]:
    """Play each task once, outside of training, by the loop's rules; logged, in the order of their ends.

    Takes what keys the randomness of a task and attempt, the log's next position, and who is told how many tasks are
    done. Infrastructure failures are tried again up to loop.max_retries times; the last try of a task is among the
    rollouts even so. Raises LoopError above loop.max_failure_share.
    """
    accounts = Accounts({})
    ended: list[Rollout] = []
    queue = iter(tasks)

    async def attempts(task: Task) -> Rollout:
        attempt = 0
        while True:
            rollout = await worker.run(task, group_id=task.id, attempt=attempt, seed=seed_of(task, attempt))
            failed, again = rollout.failure is FailureKind.INFRASTRUCTURE, attempt < config.max_retries
            accounts.attempt(failed=failed, retry=attempt > 0)
            if not failed:
                log.append(Finished(rollout=rollout, position=position + accounts.counts()["finished"]))
                accounts.add("finished")
                return rollout
            log.append(_attempt_ended(rollout.id, rollout, retried=again))
            _check_failures(accounts, config, rollout)
            if not again:
                return rollout
            attempt += 1

    async def play() -> None:
        for task in queue:
            ended.append(await attempts(task))
            on_end(len(ended))

    await gather_or_cancel(*(play() for _ in range(min(config.concurrency, len(tasks)))))
    await log.durable()
    return ended
