"""The loop: the only place where trained weights return to the engine.

      TaskSource                                                        RolloutLog (durable)
          |  feed: waits for places, and for fresh weights                   ^
          v                                                                  | admitted, finished, dropped,
    +-- places (pipeline/admission.py) --+                                   | published, trained
    |   pending -> running -> ready      |-- play: worker <-> engine         |
    +------------------------------------+          |                        |
          ^         |                               v                        |
          |         |  assemble: waits for     collect: rollouts that ended -+
          |         v  a full batch
          |     train: actor x 1 -> publish (version + 1) -> critic x K -> commit
          |         |                  |
          +---------+ places free      +--> deliver: newest weights to the engine, rollouts in flight
                                       +--> evaluate: pinned weights, on an engine of its own
    supervise: asks the engine after its health    collect_garbage: rarely

Only train is finite; its end, at a collapse too, or a failure that cannot be repaired, unwinds the rest.
"""

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from sao.clock import Signal, WaitTimeoutError, end_tasks, limit
from sao.engines.protocol import EngineHealth
from sao.intake import Intake
from sao.loop import EvaluationLostError, LoopConfig, LoopError, Outcome, Parts, Start
from sao.observe.metrics import last, merge
from sao.pipeline.accounts import age_metrics, engine_metrics, gap_metrics, rollout_metrics, token_ages
from sao.store.records import Published, Trained
from sao.store.run_folder import Manifest
from sao.store.versions import VersionTree
from sao.training.protocol import StepReport
from sao.types import Batch, Rollout, Snapshot

GARBAGE_EVERY_S = 600.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """An evaluation that is due."""

    snapshot: Snapshot
    step: int
    at_an_end: bool
    """Whether it is the first or the last of the run."""


class Orchestrator:
    """One run, from a start to an outcome. Single use; make it on the loop that runs it."""

    def __init__(self, parts: Parts, config: LoopConfig, start: Start, snapshot: Snapshot, *, seed: int) -> None:
        """`snapshot` holds the starting weights, under the number `start.version`."""
        assert snapshot.version == start.version, "the snapshot is of another version than the start"
        self._parts, self._config = parts, config
        self._clock = parts.clock
        self._changed = Signal()
        self._tree = VersionTree()
        for version, parent in start.edges:
            self._tree.add(version, parent)
        self._highest = max(start.highest, self._tree.highest)
        self._step, self._version, self._engine_version = start.step, start.version, -1
        self._newest = snapshot
        self._consumed = list(start.consumed)
        parts.baseline.load(start.baseline)
        self._wanted: asyncio.Future[Batch | None] | None = None
        self._asked: _Asked | None = None
        self._evaluating = False
        self._evaluations_changed = Signal()
        self._pinned: list[int] = []
        """Versions that are being loaded or evaluated: their snapshots must stay."""
        self._evaluated = (-1 if start.evaluated == "never" else start.step, start.evaluated == "at an end")
        """The step that an evaluation was last asked for, and whether as an end of the run."""
        self._stopping = self._interrupted = self._collapsed = False
        self._began = 0.0
        self._engine_before: EngineHealth
        """Clock and counters of the engine at the start of training: what came before is not counted."""
        self._intake = Intake(
            clock=parts.clock,
            source=parts.source,
            worker=parts.worker,
            log=parts.log,
            config=config,
            start=start,
            seed=seed,
            changed=self._changed,
            fresh=self._engine_is_fresh,
            engine_version=lambda: self._engine_version,
            engine_lives=self._engine_lives,
        )

    def stop(self) -> None:
        """Ask for a clean end: the step under way is finished and committed. Evaluations are waited for in virtual time
        alone, where they are short and a study would lack them."""
        self._stopping = self._interrupted = True
        self._changed.notify()
        self._evaluations_changed.notify()

    async def run(self) -> Outcome:
        """Takes a start; gives an outcome, after the last commit. Raises what no loop could repair."""
        intake = self._intake
        loops: list[asyncio.Task[None]] = []
        try:
            await self._publish_start()
            self._began, self._engine_before = self._clock.now(), await self._engine_health()
            rollout_side = (intake.feed, intake.collect, intake.watch_players)
            coroutines = (
                *rollout_side,
                self.assemble,
                self.deliver,
                self.evaluate,
                self.supervise,
                self.collect_garbage,
            )
            loops += [asyncio.create_task(loop(), name=loop.__name__) for loop in coroutines]
            train = asyncio.create_task(self.train(), name="train")
            loops.append(train)  # type: ignore[arg-type]
            await _first_failure_or(train, loops)
            await intake.close()
            evaluated = asyncio.create_task(self._last_evaluation(), name="last evaluation")
            loops[-1] = evaluated  # in the place of train, which has ended
            await _first_failure_or(evaluated, loops)
            if not self._interrupted:
                return train.result()
            # An evaluation that was waited for may have found a collapse, which a resume would not look at again.
            return replace(train.result(), reason="collapsed" if self._collapsed and self._clock.virtual else "stopped")
        finally:
            await intake.close()
            await end_tasks(*loops)

    async def assemble(self) -> None:
        """Takes ready rollouts; gives the batch that train asked for. Waits for a full one, or the end of the source.

        Woken by collect, feed and train.
        """
        while True:
            await self._changed.until(lambda: self._wanted is not None and self._batch_possible())
            if self._config.over_age == "drop":
                self._intake.drop_ready(self._over_age, f"over_age: more than {self._config.max_age} updates")
                if not self._batch_possible():
                    continue
            wanted, self._wanted = self._wanted, None
            assert wanted is not None
            rollouts = () if self._stopping else self._intake.take()
            if not rollouts:
                wanted.set_result(None)
                continue
            advantages = self._parts.baseline.advantages(rollouts)
            wanted.set_result(Batch(step=self._step + 1, rollouts=rollouts, advantages=advantages))

    def _batch_possible(self) -> bool:
        return self._stopping or self._intake.full or self._intake.drained

    def _over_age(self, rollout: Rollout) -> bool:
        return bool(token_ages([rollout], self._tree, self._version).max() > self._config.max_age)

    async def train(self) -> Outcome:
        """Takes batches; gives weights, metrics and commits. Waits for a batch, never for the engine to load weights;
        after a step for the engine's health.

        Woken by assemble. Ends after the last step, at the end of a finite source, or when asked to stop.
        """
        config, partial, committed = self._config, 0, self._step
        while self._step < config.steps and not self._stopping and not self._collapsed:
            asked = self._clock.now()
            batch = await self._next_batch()
            if batch is None:
                break
            await self._train_on(batch, waited=self._clock.now() - asked)
            partial = len(batch.rollouts) % config.batch_size
            if self._step % config.checkpoint_every == 0:
                await self._commit()
                committed = self._step
            self._request_evaluation_if_due()
        stopped, self._stopping = self._stopping, True
        if committed != self._step:
            await self._commit()
        if not stopped:
            self._request_evaluation(last=True)
        return Outcome(steps=self._step, version=self._version, reason=self._reason(stopped), partial_batch=partial)

    def _reason(self, stopped: bool) -> Literal["steps done", "collapsed", "stopped", "source exhausted"]:
        if self._step >= self._config.steps:
            return "steps done"
        return "collapsed" if self._collapsed else "stopped" if stopped else "source exhausted"

    async def _next_batch(self) -> Batch | None:
        self._wanted = wanted = asyncio.get_running_loop().create_future()
        self._changed.notify()
        async with self._limit(self._config.batch_timeout_s, "a batch (loop.batch_timeout_s)"):
            batch = await wanted
            if batch is not None and self._config.over_age == "wait":
                await self._changed.until(lambda: self._stopping or not self._straggler_would_age())
        return batch

    def _straggler_would_age(self) -> bool:
        """Whether a running rollout's first tokens would be older than max_age after the next update."""
        begun = self._intake.begun_versions()
        return any(self._tree.distance(version, self._version) + 1 > self._config.max_age for version in begun)

    async def _train_on(self, batch: Batch, *, waited: float) -> None:
        trainer, started, parent = self._parts.trainer, self._clock.now(), self._version
        metrics = [rollout_metrics(batch.rollouts), age_metrics(batch.rollouts, self._tree, parent)]
        async with self._limit(self._config.trainer_timeout_s, f"the actor update of step {batch.step}"):
            update = await trainer.update_actor(batch, version=self._highest + 1, parent=parent)
        if update.snapshot is not None:
            await self._publish(update.snapshot)
        elif update.skipped == "not_finite":
            self._intake.accounts.add("skipped_steps")
        self._intake.release(batch.rollouts)
        self._parts.baseline.observe(batch.rollouts)
        self._consumed += [rollout.id for rollout in batch.rollouts]
        async with self._limit(self._config.trainer_timeout_s, f"the critic updates of step {batch.step}"):
            report = await trainer.update_critic()
        self._step = batch.step
        self._parts.log.append(_trained(batch, report, version=self._version, parent=parent))
        actor_logprobs = [[part.actor_logprobs for part in parts] for parts in report.tokens]
        metrics.append(gap_metrics(batch.rollouts, actor_logprobs, self._tree, parent))
        now = self._clock.now()
        timing = {
            "time/wait_for_batch": last(waited),
            "time/step": last(now - started),
            "time/clock": last(now - self._began),
            "loop/version": last(self._version),
            "loop/worker_restarts": last(self._parts.worker_restarts()),
        }
        engine = engine_metrics(await self._engine_health(), self._engine_before)
        metrics += [report.metrics, timing, self._intake.metrics(), engine]
        self._parts.emit(self._step, self._version, "train", merge(metrics))

    async def _engine_health(self) -> EngineHealth:
        async with self._limit(self._config.engine_timeout_s, "the engine's health"):
            return await self._parts.engine.health()

    async def _publish_start(self) -> None:
        """Put the starting weights, under their own number, on record and on the engine."""
        await self._publish(self._newest)
        await self._load(self._newest)
        self._request_evaluation_if_due()

    async def _publish(self, snapshot: Snapshot) -> None:
        """Make a version known; durable before any engine loads it."""
        self._tree.add(snapshot.version, snapshot.parent)
        self._highest = max(self._highest, snapshot.version)
        self._parts.log.append(Published(snapshot=snapshot))
        await self._parts.log.durable()
        self._version, self._newest = snapshot.version, snapshot
        self._changed.notify()

    def _engine_is_fresh(self) -> bool:
        if self._engine_version < 0 or self._stopping:
            return False
        return self._tree.distance(self._engine_version, self._version) <= self._config.max_batches_ahead

    async def deliver(self) -> None:
        """Takes published weights; gives them to the engine, the newest first, older ones never. Woken by train."""
        while True:
            await self._changed.until(lambda: self._newest.version != self._engine_version)
            await self._load(self._newest)
            self._changed.notify()

    async def _load(self, snapshot: Snapshot) -> None:
        self._pinned.append(snapshot.version)
        async with self._limit(self._config.engine_timeout_s, f"the engine to load version {snapshot.version}"):
            await self._parts.engine.load(snapshot)
        self._engine_version = snapshot.version
        self._pinned.remove(snapshot.version)
        self._prune()

    def _prune(self) -> None:
        self._parts.prune({self._engine_version, self._version, *self._pinned})

    def _request_evaluation_if_due(self) -> None:
        if self._step % self._parts.evaluate_every == 0 or self._step >= self._config.steps:
            self._request_evaluation()

    def _request_evaluation(self, *, last: bool = False) -> None:
        """At most once a step; the last step again, if the ends take other tasks. A newer request ousts a waiting one.

        So slow evaluations neither pile up nor keep more than two snapshots on the disk.
        """
        step, at_an_end = self._evaluated
        again = last and self._parts.ends_differ and not at_an_end
        if self._parts.evaluate is None or (step == self._step and not again):
            return
        at_an_end = last or self._step == 0 or self._step >= self._config.steps
        self._evaluated = (self._step, at_an_end)
        ousted, self._asked = self._asked, _Asked(self._newest, self._step, at_an_end)
        self._pinned.append(self._newest.version)
        if ousted is not None:
            self._pinned.remove(ousted.snapshot.version)
            if ousted.step != self._step:
                self._lose_evaluation(ousted.step, f"that of step {self._step} was due before it began")
        self._evaluations_changed.notify()

    def _lose_evaluation(self, step: int, reason: str) -> None:
        self._intake.accounts.add("evaluations_lost")
        self._parts.note(f"the evaluation of step {step} is left out: {reason}")

    async def evaluate(self) -> None:
        """Takes pinned weights; gives evaluation rows. Waits for train to ask; train does not wait for it."""
        while True:
            await self._evaluations_changed.until(lambda: self._asked is not None)
            asked, self._asked, self._evaluating = self._asked, None, True
            assert asked is not None
            assert self._parts.evaluate is not None
            seconds = None if self._clock.virtual else self._config.evaluation_timeout_s
            try:
                async with limit(seconds, "an evaluation (loop.evaluation_timeout_s)"):
                    metrics = await self._parts.evaluate(asked.snapshot, asked.step, asked.at_an_end)
                row = {**metrics, "eval/at_an_end": last(int(asked.at_an_end))}
                self._parts.emit(asked.step, asked.snapshot.version, "eval", row)
                self._collapsed |= self._parts.collapsed(asked.step, metrics)
            except (EvaluationLostError, WaitTimeoutError) as error:
                self._lose_evaluation(asked.step, str(error))
            self._pinned.remove(asked.snapshot.version)
            self._prune()
            self._evaluating = False
            self._evaluations_changed.notify()

    async def _last_evaluation(self) -> None:
        """Returns once every evaluation that was asked for is done, in real time at once when asked to stop."""
        await self._evaluations_changed.until(
            lambda: (self._interrupted and not self._clock.virtual) or (self._asked is None and not self._evaluating)
        )

    async def supervise(self) -> None:
        """Takes nothing; raises when the engine is gone. Idle in virtual time, where nothing can die by itself."""
        if self._clock.virtual:
            await asyncio.get_running_loop().create_future()
        while True:
            await self._clock.sleep(self._config.supervise_every_s)
            await self._engine_lives()

    async def _engine_lives(self) -> None:
        """Raises EngineError if the engine is gone. In virtual time it is part of this process."""
        if not self._clock.virtual:
            await self._engine_health()

    async def collect_garbage(self) -> None:
        """Takes nothing; gives memory back: a garbage collection every ten minutes, and none in between.

        Left to itself Python looks through the million objects of 10,000 rollouts every few seconds, which stops the
        loop for half a second each time. Rollouts make no cycles, so there is next to nothing to find.
        """
        if self._clock.virtual:
            await asyncio.get_running_loop().create_future()
        automatic = gc.isenabled()
        gc.disable()
        try:
            while True:
                await self._clock.sleep(GARBAGE_EVERY_S)
                gc.collect()
        finally:
            if automatic:
                gc.enable()

    async def _commit(self) -> None:
        """The one commit point: after it, what was trained is never trained again."""
        await self._parts.log.durable()
        manifest = Manifest(
            step=self._step,
            version=self._version,
            consumed=tuple(self._consumed),
            cursor=self._intake.cursor,
            baseline=self._parts.baseline.state(),
            accounts=self._intake.accounts.counts(),
        )
        async with self._limit(self._config.trainer_timeout_s, f"the checkpoint of step {self._step}"):
            await self._parts.commit(manifest)

    @asynccontextmanager
    async def _limit(self, seconds: float, waiting_for: str) -> AsyncGenerator[None]:
        """Bound a wait in real time; the error says where everything stands."""
        try:
            async with limit(None if self._clock.virtual else seconds, waiting_for):
                yield
        except WaitTimeoutError as error:
            raise LoopError(
                f"{error}. Step {self._step}, version {self._version}, engine at {self._engine_version}; rollouts: "
                f"{self._intake.describe()}. The run folder can be resumed."
            ) from error


def _trained(batch: Batch, report: StepReport, *, version: int, parent: int) -> Trained:
    ids = tuple(rollout.id for rollout in batch.rollouts)
    return Trained(step=batch.step, version=version, parent=parent, rollout_ids=ids, tokens=report.tokens)


async def _first_failure_or(goal: "asyncio.Future[Any]", loops: list[asyncio.Task[None]]) -> None:
    """Wait for the goal; a loop that ends first has failed, and its error is raised."""
    await asyncio.wait({goal, *loops}, return_when=asyncio.FIRST_COMPLETED)
    for loop in loops:
        if loop.done() and loop is not goal:
            loop.result()
    await goal
