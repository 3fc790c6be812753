"""Evaluates pinned weights during training, on an engine and a worker of its own: sampling for training goes on."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from sao.build import make_engine, make_worker
from sao.clock import Clock, InstantClock, WaitTimeoutError, limit, unless_failed
from sao.config import RunConfig
from sao.engines.protocol import Engine, EngineError
from sao.envs.select import ENDLESS, World, make_source
from sao.evaluate import evaluate
from sao.loop import EvaluationLostError
from sao.observe.metrics import Metrics
from sao.rollout.pool import WorkerStartError
from sao.rollout.protocol import RolloutWorker
from sao.types import Snapshot, Task

ProgressBar = Callable[[str, int, int], None]
"""Called with what is evaluated, rollouts done, and rollouts in all."""


def evaluation_tasks(config: RunConfig, limit: int) -> list[Task]:
    """The first `limit` tasks (0: all) of each data set. Raises ValueError for an endless source without a limit."""
    tasks: list[Task] = []
    for number, source_config in enumerate(config.evaluation_tasks or (config.tasks,)):
        source = make_source(source_config, "evaluation", seed=config.seed)
        size = limit or source_config.limit
        if not size and source_config.source in ENDLESS:
            raise ValueError(f"evaluation.tasks is 0, but data set {number} ({source.name}) has no end; give a number")
        index = 0
        while (task := source.at(index)) is not None and (not size or index < size):
            tasks.append(task)
            index += 1
    return tasks


class Evaluator:
    """Started at the first call. Satisfies loop.Parts.evaluate. In virtual time an evaluation takes none."""

    def __init__(self, config: RunConfig, clock: Clock, tokenizer: Path, progress: ProgressBar) -> None:
        # Else it would meet the tail of tool latencies, and the next would be due before it ends.
        self._clock = InstantClock() if clock.virtual else clock
        self._config, self._tokenizer, self._progress = config, tokenizer, progress
        self._engine: Engine | None = None
        self._worker: RolloutWorker | None = None
        self._world: World | None = None

    async def __call__(self, snapshot: Snapshot, step: int, at_an_end: bool) -> Metrics:
        """Play the held-out tasks under these weights: `final_tasks` in the first and last evaluation of a run.

        Raises EvaluationLostError if the engine dies or hangs, the worker does not start, or every rollout fails by
        infrastructure; that costs one evaluation, the next gets a new engine and worker.
        """
        config = self._config.evaluation
        tasks = evaluation_tasks(self._config, (at_an_end and config.final_tasks) or config.tasks)
        complete = False
        try:
            worker = await self._ready(snapshot)
            work = evaluate(
                tasks,
                worker,
                samples=config.samples,
                concurrency=self._config.loop.concurrency,
                seed=config.seed,
                on_progress=lambda done, total: self._progress(f"evaluation at step {step}", done, total),
            )
            result = await unless_failed(work, self._supervise())
            failed = [outcome for outcome in result.outcomes if outcome.reward is None]
            if failed:
                # With the engine gone everything fails at once, before anybody looks after it.
                await self._engine_lives()
                if len(failed) == len(result.outcomes):
                    # So it does with a worker that has used up its restarts, which a new one may mend.
                    raise EvaluationLostError(f"every rollout of it failed: {failed[-1].failure_text}")
            complete = True
        except WorkerStartError as error:
            raise EvaluationLostError(f"its worker did not start: {error}") from error
        except (EngineError, WaitTimeoutError) as error:
            raise EvaluationLostError(f"its engine failed: {error}") from error
        finally:
            if not complete:
                await self.stop()
        return result.metrics(config)

    async def stop(self) -> None:
        """Release engine and worker. Safe to call twice."""
        engine, worker, world = self._engine, self._worker, self._world
        self._engine = self._worker = self._world = None
        if worker is not None:
            await worker.stop()
        if engine is not None:
            await engine.stop()
        if world is not None:
            await world.stop()

    async def _supervise(self) -> None:
        """Takes nothing; raises when the engine is gone or silent. Idle in virtual time."""
        if self._clock.virtual:
            await asyncio.get_running_loop().create_future()
        while True:
            await self._clock.sleep(self._config.loop.supervise_every_s)
            await self._engine_lives()

    async def _engine_lives(self) -> None:
        """Raises EngineError or WaitTimeoutError if the engine is gone or silent."""
        assert self._engine is not None
        if not self._clock.virtual:
            seconds = self._config.loop.engine_timeout_s
            async with limit(seconds, "the evaluation engine's health (loop.engine_timeout_s)"):
                await self._engine.health()

    async def _ready(self, snapshot: Snapshot) -> RolloutWorker:
        if self._engine is not None:
            try:
                await self._engine.load(snapshot)
            except EngineError:
                # An engine that died costs an evaluation, not the run: the next one gets a new engine.
                await self.stop()
        if self._engine is None:
            self._engine = await make_engine(self._config, self._clock, snapshot, purpose="evaluation")
        if self._worker is None:
            self._worker, self._world = await make_worker(
                self._config, self._clock, self._engine, self._tokenizer, purpose="evaluation"
            )
        return self._worker
