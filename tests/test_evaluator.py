"""Evaluation in a real run: on an engine of its own, which may die."""

import asyncio
import math
import os
import signal
from pathlib import Path

import pytest
from small_runs import small_config

from sao.build import make_trainer, make_worker, prepare_model, prepare_tokenizer
from sao.clock import RealClock, VirtualClock, run_virtual
from sao.engines.process import ProcessEngine
from sao.evaluator import Evaluator
from sao.loop import EvaluationLostError
from sao.rollout.pool import WorkerPool, WorkerStartError
from sao.types import Snapshot

REAL = small_config("clock=real", "worker_processes=0", "loop.supervise_every_s=0.1", "loop.engine_timeout_s=5")


def snapshot_of(folder: Path) -> tuple[Snapshot, Path]:
    config, clock = small_config(), VirtualClock()
    tokenizer = prepare_tokenizer(config, folder / "tokenizer")
    trainer = make_trainer(config, clock, prepare_model(config, tokenizer, folder / "start"), folder / "snapshots")

    async def publish() -> Snapshot:
        return await trainer.publish_initial(0, None)

    return run_virtual(publish()), tokenizer


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_costs_one_evaluation(fault: signal.Signals, tmp_path: Path) -> None:
    """Catches an evaluation that waits for its engine until every rollout's time limit, and one that ends the run."""
    snapshot, tokenizer = snapshot_of(tmp_path)
    struck = False

    async def main() -> None:
        def strike(what: str, done: int, total: int) -> None:
            nonlocal struck
            engine = evaluator._engine
            if not struck and isinstance(engine, ProcessEngine):
                struck = True
                os.kill(engine.process_id, fault)

        evaluator = Evaluator(REAL, RealClock(), tokenizer, strike)
        with pytest.raises(EvaluationLostError, match="its engine failed"):
            await evaluator(snapshot, 0, True)
        metrics = await evaluator(snapshot, 2, False)
        assert metrics["eval/guess-evaluation/prompts"].value == 8
        await evaluator.stop()

    asyncio.run(asyncio.wait_for(main(), 300))
    assert struck


def test_a_worker_that_does_not_start_costs_one_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a training run that ends because a process of its evaluation could not be started."""
    snapshot, tokenizer = snapshot_of(tmp_path)
    starts = 0

    async def starts_late(*arguments: object, **settings: object) -> object:
        nonlocal starts
        starts += 1
        if starts == 1:
            raise WorkerStartError("no memory for it")
        return await make_worker(*arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr("sao.evaluator.make_worker", starts_late)

    async def main() -> None:
        evaluator = Evaluator(small_config(), VirtualClock(), tokenizer, lambda what, done, total: None)
        with pytest.raises(EvaluationLostError, match="its worker did not start: no memory for it"):
            await evaluator(snapshot, 0, True)
        assert evaluator._engine is None
        metrics = await evaluator(snapshot, 2, False)
        assert metrics["eval/guess-evaluation/prompts"].value == 8
        await evaluator.stop()

    run_virtual(main())


def test_an_evaluation_takes_no_virtual_time(tmp_path: Path) -> None:
    """Catches evaluations that meet the tail of tool latencies, so that one is lost when the next is due."""
    snapshot, tokenizer = snapshot_of(tmp_path)
    config = small_config("engine_cost.step_seconds=10.0", "engine_cost.load_seconds=100.0")

    async def main() -> None:
        clock = VirtualClock()
        evaluator = Evaluator(config, clock, tokenizer, lambda what, done, total: None)
        await clock.sleep(3.0)
        for step in (0, 2):
            metrics = await evaluator(snapshot, step, step == 0)
            assert metrics["eval/guess-evaluation/prompts"].value == 8
        assert clock.now() == 3.0
        await evaluator.stop()

    run_virtual(main())


def test_a_pool_without_restarts_left_costs_one_evaluation(tmp_path: Path) -> None:
    """Catches a dead pool that is kept: every later evaluation is a row without a mean, and none is counted as lost."""
    snapshot, tokenizer = snapshot_of(tmp_path)
    config = small_config(
        "clock=real", "worker_processes=1", "workers.max_restarts_per_hour=0", "loop.supervise_every_s=0.1"
    )

    async def main() -> None:
        evaluator = Evaluator(config, RealClock(), tokenizer, lambda what, done, total: None)
        await evaluator(snapshot, 0, True)
        worker = evaluator._worker
        assert isinstance(worker, WorkerPool)
        os.kill(worker.pids[0], signal.SIGKILL)
        await worker._changed.until(lambda: not worker.pids)
        with pytest.raises(EvaluationLostError, match="every rollout of it failed: no rollout process is left"):
            await evaluator(snapshot, 2, False)
        metrics = await evaluator(snapshot, 4, False)
        assert metrics["eval/guess-evaluation/prompts"].value == 8
        assert math.isfinite(metrics["eval/overall/mean"].value)
        await evaluator.stop()

    asyncio.run(asyncio.wait_for(main(), 300))
