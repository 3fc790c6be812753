"""One simulated run, and what is measured of a run, simulated or real."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sao.clock import VirtualClock, run_virtual
from sao.loop import Parts, Start
from sao.observe.metrics import Metrics
from sao.orchestrator import Orchestrator
from sao.pipeline.baselines import CriticBaseline
from sao.simulate.engine import TimedEngine
from sao.simulate.settings import SimulationConfig
from sao.simulate.worker import Prompts, TimedWorker
from sao.store.records import Record
from sao.store.run_folder import Manifest
from sao.training.scripted import ScriptedTrainer

Row = Mapping[str, float]
"""One step: the keys of docs/metrics.md, and SLOT_SECONDS."""
SLOT_SECONDS = "simulate/slot_seconds"
"""Key of the seconds in which a rollout ran, summed over the slots, since the start."""


class _NoLog:
    """Forgets: what only cost time is not worth a disk."""

    def append(self, record: Record) -> None:
        """See loop.Log."""

    async def durable(self) -> None:
        """See loop.Log."""


def simulate(config: SimulationConfig) -> list[Row]:
    """Metrics of each step of a run of the loop."""
    return run_virtual(_run(config))


async def _run(config: SimulationConfig) -> list[Row]:
    clock = VirtualClock()
    engine = TimedEngine(clock, config)
    trainer = ScriptedTrainer(
        clock=clock,
        actor_seconds=config.actor_seconds,
        actor_token_seconds=config.actor_token_seconds * config.block_tokens,
        critic_seconds=config.critic_seconds,
        critic_token_seconds=config.critic_token_seconds * config.block_tokens,
    )
    worker = TimedWorker(engine, clock, config)
    rows: list[Row] = []

    def emit(step: int, version: int, stage: str, metrics: Metrics) -> None:
        row = {key: metric.value for key, metric in metrics.items()}
        row["rollout/action_tokens"] *= config.block_tokens
        rows.append({"step": step, "version": version, SLOT_SECONDS: worker.slot_seconds(), **row})

    async def commit(manifest: Manifest) -> None:
        pass

    parts = Parts(
        clock=clock, source=Prompts(), worker=worker,
        engine=engine,  # type: ignore[arg-type]  # the loop only loads it, and asks after its health
        trainer=trainer, baseline=CriticBaseline(), log=_NoLog(), commit=commit, evaluate=None, evaluate_every=1,
        emit=emit, prune=lambda versions: None,
    )  # fmt: skip
    snapshot = await trainer.publish_initial(0, None)
    await Orchestrator(parts, config.loop, Start(), snapshot, seed=config.seed).run()
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of the steps after the first ones, in seconds of the run's clock."""

    tokens_per_second: float
    """Action tokens trained on."""
    updates_per_hour: float
    """Actor updates."""
    step_seconds: float
    """From one step's end to the next's."""
    engine_idle: float
    """Share of the time in which a replica has nothing to decode, mean over replicas."""
    trainer_idle: float
    """Share of the time in which the trainer waits for a batch."""
    slots_idle: float
    """Share of `concurrency` in which no rollout runs."""
    dropped: float
    """Share of the finished rollouts that were dropped as too old."""
    age_mean: float
    """Actor updates between a trained token and the weights that trained on it."""
    age_p90: float
    """Mean over steps of the 90th percentile."""
    age_max: float
    """Greatest of all."""
    rollout_seconds: float
    """Mean duration of trained rollouts."""


def measure(rows: Sequence[Row], *, warmup_steps: int, concurrency: int) -> Measured:
    """What a run did between the end of step `warmup_steps` and its last step.

    Raises ValueError for fewer than one step after them.
    """
    if not 0 <= warmup_steps < len(rows):
        raise ValueError(f"{len(rows)} steps leave none after {warmup_steps} steps of warm-up; take more steps")

    def column(key: str) -> np.ndarray:
        return np.array([row[key] for row in rows[warmup_steps:]], dtype=np.float64)

    def change(key: str) -> float:
        return rows[-1][key] - (rows[warmup_steps - 1][key] if warmup_steps else 0.0)

    elapsed, trained = change("time/clock"), change("loop/trained")
    tokens = column("rollout/action_tokens")
    return Measured(
        tokens_per_second=float(tokens.mean()) * trained / elapsed,
        updates_per_hour=3600 * len(tokens) / elapsed,
        step_seconds=elapsed / len(tokens),
        engine_idle=1 - change("engine/busy_seconds") / elapsed,
        trainer_idle=float(column("time/wait_for_batch").sum()) / elapsed,
        slots_idle=1 - change(SLOT_SECONDS) / (elapsed * concurrency),
        dropped=change("loop/dropped") / max(1.0, change("loop/finished")),
        age_mean=float((column("age/mean") * tokens).sum() / tokens.sum()),
        age_p90=float(column("age/p90").mean()),
        age_max=float(column("age/max").max()),
        rollout_seconds=float(column("rollout/seconds").mean()),
    )
