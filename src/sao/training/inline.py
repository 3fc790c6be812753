"""The trainer inside the loop's own process: for tests, and for virtual time, where each part costs a stated time."""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sao.clock import Clock
from sao.observe.metrics import Metric, last
from sao.training.checkpoint import load_trainer, save_trainer
from sao.training.core import TrainerCore
from sao.training.protocol import ActorUpdate, StepReport
from sao.training.weights import SnapshotStore
from sao.types import Batch, Rollout, Snapshot


@dataclass(frozen=True, kw_only=True)
class TrainerCost:
    """What a step costs in virtual time. Tokens are all tokens of the batch, observations included."""

    value_token_seconds: float = 1e-5
    """Seconds per token to score values: one forward pass."""
    actor_token_seconds: float = 3e-5
    """Seconds per token of the actor's update: forward and backward."""
    critic_token_seconds: float = 3e-5
    """Seconds per token of one of the K critic updates."""
    publish_seconds: float = 0.0
    """Seconds to write a snapshot."""
    update_seconds: float = 0.0
    """Seconds of each optimiser step, whatever the tokens."""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"trainer_cost.{name} is {seconds}; it must be finite and not negative")


class InlineTrainer:
    """Implements `Trainer` over a core in this process. Calls must not overlap."""

    def __init__(self, core: TrainerCore, store: SnapshotStore, clock: Clock, cost: TrainerCost | None = None) -> None:
        self.core = core
        self._store = store
        self._clock = clock
        self._cost = cost or TrainerCost()
        self._tokens = 0
        self._seconds: dict[str, Metric] = {}

    async def publish_initial(self, version: int, parent: int | None) -> Snapshot:
        """Write the current actor as a snapshot without an update."""
        return await self._clock.compute(
            lambda: self._store.write(self.core.actor, version=version, parent=parent), cost=self._cost.publish_seconds
        )

    async def update_actor(self, batch: Batch, *, version: int, parent: int) -> ActorUpdate:
        """Fix values and targets, update the actor, write it as `version`."""
        cost, clock, core = self._cost, self._clock, self.core
        self._tokens = sum(rollout.num_tokens for rollout in batch.rollouts)
        start = clock.now()
        value_cost = cost.value_token_seconds * self._tokens if core.critic is not None else 0.0
        await clock.compute(lambda: core.begin(batch), cost=value_cost)
        valued = clock.now()
        actor_cost = cost.update_seconds + cost.actor_token_seconds * self._tokens
        skipped = await clock.compute(core.actor_update, cost=actor_cost)
        updated = clock.now()
        snapshot = None if skipped else await self.publish_initial(version, parent)
        self._seconds = {
            "time/values": last(valued - start),
            "time/actor": last(updated - valued),
            "time/publish": last(clock.now() - updated),
        }
        return ActorUpdate(snapshot=snapshot, skipped=skipped)

    async def update_critic(self) -> StepReport:
        """Update the critic K times and report the step."""
        start = self._clock.now()
        per_update = self._cost.update_seconds + self._cost.critic_token_seconds * self._tokens
        updates = self.core.config.critic_updates if self.core.critic is not None else 0
        await self._clock.compute(self.core.critic_update, cost=per_update * updates)
        report = self.core.report()
        extra = self._seconds | {"time/critic": last(self._clock.now() - start)}
        if not self._clock.virtual:
            extra["memory/trainer_mb"] = last(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
        return StepReport(step=report.step, metrics={**report.metrics, **extra}, tokens=report.tokens)

    async def fit_values(self, rollouts: Sequence[Rollout]) -> Mapping[str, Metric]:
        """Pre-train the critic; nothing without one."""
        tokens = sum(rollout.num_tokens for rollout in rollouts)
        return await self._clock.compute(
            lambda: self.core.fit_values(rollouts), cost=self._cost.critic_token_seconds * tokens
        )

    async def save(self, folder: str) -> None:
        """Write a checkpoint into an existing folder."""
        await self._clock.compute(lambda: save_trainer(self.core, Path(folder)), cost=0.0)

    async def load(self, folder: str) -> None:
        """Read a checkpoint. Raises ValueError naming the missing or corrupt file."""
        await self._clock.compute(lambda: load_trainer(self.core, Path(folder)), cost=0.0)

    async def stop(self) -> None:
        """Nothing to release."""
