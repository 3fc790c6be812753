"""The trainer inside the loop's own process: for tests, and for virtual time, where each part costs a stated time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sao.clock import Clock
from sao.observe.metrics import Metric
from sao.training.checkpoint import load_trainer, save_trainer
from sao.training.core import TrainerCore
from sao.training.optimiser import Progress
from sao.training.protocol import ActorUpdate, StepReport
from sao.training.timing import StepTimer, process_metrics
from sao.training.value_pretraining import planned_work
from sao.training.weights import SnapshotStore
from sao.types import Batch, Rollout, Snapshot


@dataclass(frozen=True, kw_only=True)
class TrainerCost:
    """What a step costs in virtual time. Tokens are all tokens of the batch, observations included."""

    value_token_seconds: float = 1e-5
    """Seconds per token of one forward pass: to score values, and for trainer.reference_kl."""
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

    def __init__(
        self,
        core: TrainerCore,
        store: SnapshotStore,
        clock: Clock,
        cost: TrainerCost | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`progress` is called on value pretraining's updates."""
        self.core = core
        self._store = store
        self._clock = clock
        self._cost = cost or TrainerCost()
        self._progress = progress
        self._tokens = 0
        self._timer = StepTimer(clock.now)

    async def publish_initial(self, version: int, parent: int | None) -> Snapshot:
        """Write the current actor as a snapshot without an update."""
        return await self._clock.compute(
            lambda: self._store.write(self.core.actor, version=version, parent=parent), cost=self._cost.publish_seconds
        )

    async def update_actor(self, batch: Batch, *, version: int, parent: int) -> ActorUpdate:
        """Fix values and targets, update the actor, write it as `version`."""
        cost, clock, core = self._cost, self._clock, self.core
        self._tokens = _tokens(batch.rollouts)
        scored = (core.critic is not None) + (core.reference is not None)
        value_cost = cost.value_token_seconds * self._tokens * scored
        with self._timer.part("values"):
            await clock.compute(lambda: core.begin(batch), cost=value_cost)
        actor_cost = cost.update_seconds + cost.actor_token_seconds * self._tokens
        with self._timer.part("actor"):
            skipped = await clock.compute(core.actor_update, cost=actor_cost)
        with self._timer.part("publish"):
            snapshot = None if skipped else await self.publish_initial(version, parent)
        return ActorUpdate(snapshot=snapshot, skipped=skipped)

    async def update_critic(self) -> StepReport:
        """Update the critic K times and report the step."""
        per_update = self._cost.update_seconds + self._cost.critic_token_seconds * self._tokens
        updates = self.core.config.critic_updates if self.core.critic is not None else 0
        with self._timer.part("critic"):
            await self._clock.compute(self.core.critic_update, cost=per_update * updates)
        report = self.core.report()
        used = {} if self._clock.virtual else process_metrics()
        metrics = {**report.metrics, **self._timer.take(), **used}
        return StepReport(step=report.step, metrics=metrics, tokens=report.tokens)

    async def fit_values(self, rollouts: Sequence[Rollout]) -> Mapping[str, Metric]:
        """Pre-train the critic; nothing without one."""
        return await self._clock.compute(
            lambda: self.core.fit_values(rollouts, self._progress), cost=self._fit_seconds(rollouts)
        )

    def _fit_seconds(self, rollouts: Sequence[Rollout]) -> float:
        """Every update with its tokens, and the values of all rollouts at the end."""
        core, cost = self.core, self._cost
        if core.critic is None:
            return 0.0
        work = planned_work(rollouts, config=core.value_pretraining, seed=core.seed)
        return (
            cost.update_seconds * work.updates
            + cost.critic_token_seconds * work.passes * _tokens(work.train)
            + cost.value_token_seconds * _tokens([*work.train, *work.held_out])
        )

    async def save(self, folder: str) -> None:
        """Write a checkpoint into an existing folder."""
        await self._clock.compute(lambda: save_trainer(self.core, Path(folder)), cost=0.0)

    async def load(self, folder: str) -> None:
        """Read a checkpoint. Raises ValueError naming the missing or corrupt file."""
        await self._clock.compute(lambda: load_trainer(self.core, Path(folder)), cost=0.0)

    async def stop(self) -> None:
        """Nothing to release."""


def _tokens(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.num_tokens for rollout in rollouts)
