"""The inline trainer on both clocks."""

import asyncio
from pathlib import Path

import pytest
import torch
from training_toys import make_batch, make_core, weights

from sao.algorithm.sao import AlgorithmConfig
from sao.clock import RealClock, VirtualClock, run_virtual
from sao.models.load import read_weights
from sao.training.inline import InlineTrainer, TrainerCost
from sao.training.value_pretraining import ValuePretrainingConfig
from sao.training.weights import SnapshotStore
from sao.types import Batch


def test_the_snapshot_leaves_before_the_critic_trains(tmp_path: Path):
    """New weights that wait for the critic, or a critic's time that is charged to the actor."""
    core = make_core()
    cost = TrainerCost(
        value_token_seconds=1.0,
        actor_token_seconds=2.0,
        critic_token_seconds=3.0,
        publish_seconds=0.5,
        update_seconds=0.25,
    )
    clock = VirtualClock()
    trainer = InlineTrainer(core, SnapshotStore(tmp_path), clock, cost)
    batch = make_batch(lengths=(10, 6))

    async def main() -> None:
        first = await trainer.publish_initial(0, None)
        assert clock.now() == 0.5
        critic_before = weights(core.critic)  # type: ignore[arg-type]
        update = await trainer.update_actor(batch, version=1, parent=0)
        assert clock.now() == pytest.approx(0.5 + 16 * 3 + 0.25 + 0.5)
        assert update.skipped == ""
        assert update.snapshot is not None
        assert (update.snapshot.version, update.snapshot.parent) == (1, 0)
        assert all(torch.equal(w, critic_before[n]) for n, w in weights(core.critic).items())  # type: ignore[arg-type]
        moved = read_weights(update.snapshot.location, core.actor)
        assert not torch.equal(
            moved["lm_head.weight" if "lm_head.weight" in moved else "model.embed_tokens.weight"],
            read_weights(first.location, core.actor)["model.embed_tokens.weight"],
        )
        report = await trainer.update_critic()
        seconds = {key: metric.value for key, metric in report.metrics.items() if key.startswith("time/")}
        assert seconds == pytest.approx(
            {"time/values": 16.0, "time/actor": 32.25, "time/publish": 0.5, "time/critic": 2 * (0.25 + 48.0)}
        )
        assert "memory/trainer_mb" not in report.metrics

    run_virtual(main())


def test_a_skipped_update_publishes_nothing(tmp_path: Path):
    """A version number given to weights that have not changed."""
    trainer = InlineTrainer(make_core(critic_only_steps=1), SnapshotStore(tmp_path), VirtualClock())
    update = run_virtual(trainer.update_actor(make_batch(), version=1, parent=0))
    assert update.snapshot is None
    assert update.skipped == "critic_only"
    assert not list(tmp_path.iterdir())


def test_save_load_and_real_time(tmp_path: Path):
    """A trainer that works in virtual time alone."""
    core, other = make_core(), make_core()
    (tmp_path / "c").mkdir()

    async def main() -> None:
        trainer = InlineTrainer(core, SnapshotStore(tmp_path / "s"), RealClock())
        await trainer.update_actor(make_batch(), version=1, parent=0)
        report = await trainer.update_critic()
        assert report.metrics["memory/trainer_mb"].value > 0
        assert report.metrics["time/actor"].value > 0
        await trainer.save(str(tmp_path / "c"))
        resumed = InlineTrainer(other, SnapshotStore(tmp_path / "s"), RealClock())
        await resumed.load(str(tmp_path / "c"))
        assert "value_pretraining/loss" in await resumed.fit_values(make_batch(count=8).rollouts)
        await trainer.stop()
        await trainer.stop()

    asyncio.run(main())
    assert other.counters == core.counters


def test_without_a_critic_nothing_is_fitted_or_charged(tmp_path: Path):
    """Critic-free baselines that pay for a critic."""
    core = make_core(algorithm=AlgorithmConfig(advantage="given"))
    clock = VirtualClock()
    trainer = InlineTrainer(core, SnapshotStore(tmp_path), clock, TrainerCost(actor_token_seconds=0.0))
    batch = make_batch(count=2)

    async def main() -> float:
        await trainer.update_actor(Batch(step=1, rollouts=batch.rollouts, advantages=(1.0, -1.0)), version=1, parent=0)
        await trainer.update_critic()
        assert await trainer.fit_values(batch.rollouts) == {}
        return clock.now()

    assert run_virtual(main()) == 0


@pytest.mark.parametrize(("fit", "updates", "passes"), [({"epochs": 3}, 6, 3.0), ({"steps": 5}, 5, 2.5)])
def test_value_pretraining_costs_all_its_updates(tmp_path: Path, fit: dict[str, int], updates: int, passes: float):
    """Pretraining whose epochs are free in virtual time."""
    core = make_core()
    core.value_pretraining = ValuePretrainingConfig(batch_size=2, held_out_share=0.25, **fit)  # type: ignore[arg-type]
    cost = TrainerCost(value_token_seconds=0.125, critic_token_seconds=1.0, update_seconds=0.5)
    seen: list[tuple[int, int]] = []
    clock = VirtualClock()
    trainer = InlineTrainer(
        core, SnapshotStore(tmp_path), clock, cost, lambda done, total, metrics: seen.append((done, total))
    )
    rollouts = make_batch(lengths=(8, 8, 8, 8)).rollouts

    async def main() -> float:
        await trainer.fit_values(rollouts)
        return clock.now()

    # Three of four prompts are trained on, in two batches an epoch.
    assert run_virtual(main()) == pytest.approx(0.5 * updates + passes * 24 + 0.125 * 32)
    assert seen == [(done, updates) for done in range(1, updates + 1)]
