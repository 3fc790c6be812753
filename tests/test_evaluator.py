"""Evaluation in a real run: on an engine of its own, which may die."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from small_runs import small_config

from sao.build import make_trainer, prepare_model, prepare_tokenizer
from sao.clock import RealClock, VirtualClock, run_virtual
from sao.engines.process import ProcessEngine
from sao.evaluator import Evaluator
from sao.loop import EvaluationLostError
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
