"""Evaluates pinned weights during training, on an engine and a worker of its own: sampling for training goes on."""

from collections.abc import Callable
from pathlib import Path

from sao.build import make_engine, make_worker
from sao.clock import Clock
from sao.config import RunConfig
from sao.engines.protocol import Engine, EngineError
from sao.envs.select import World, make_source
from sao.evaluate import evaluate
from sao.observe.metrics import Metrics
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
        if not size and source_config.source in ("chain", "guess"):
            raise ValueError(f"evaluation.tasks is 0, but data set {number} ({source.name}) has no end; give a number")
        index = 0
        while (task := source.at(index)) is not None and (not size or index < size):
            tasks.append(task)
            index += 1
    return tasks


class Evaluator:
    """Started at the first call. Satisfies loop.Parts.evaluate."""

    def __init__(self, config: RunConfig, clock: Clock, tokenizer: Path, progress: ProgressBar) -> None:
        self._config, self._clock, self._tokenizer, self._progress = config, clock, tokenizer, progress
        self._engine: Engine | None = None
        self._worker: RolloutWorker | None = None
        self._world: World | None = None

    async def __call__(self, snapshot: Snapshot, step: int) -> Metrics:
        """Play the held-out tasks under these weights. The first and last evaluations take `final_tasks`."""
        config = self._config.evaluation
        ends = step == 0 or step >= self._config.loop.steps
        tasks = evaluation_tasks(self._config, config.final_tasks if ends and config.final_tasks else config.tasks)
        worker = await self._ready(snapshot)
        result = await evaluate(
            tasks,
            worker,
            samples=config.samples,
            concurrency=self._config.loop.concurrency,
            seed=config.seed,
            on_progress=lambda done, total: self._progress(f"evaluation at step {step}", done, total),
        )
        return result.metrics(config)

    async def stop(self) -> None:
        """Release engine and worker. Safe to call twice."""
        if self._worker is not None:
            await self._worker.stop()
        if self._engine is not None:
            await self._engine.stop()
        if self._world is not None:
            self._world.stop()

    async def _ready(self, snapshot: Snapshot) -> RolloutWorker:
        if self._engine is not None:
            try:
                await self._engine.load(snapshot)
            except EngineError:
                # An engine that died costs an evaluation, not the run: the next one gets a new engine.
                await self.stop()
                self._engine = self._worker = self._world = None
        if self._engine is None:
            self._engine = await make_engine(self._config, self._clock, snapshot)
        if self._worker is None:
            self._worker, self._world = await make_worker(
                self._config, self._clock, self._engine, self._tokenizer, purpose="evaluation"
            )
        return self._worker
