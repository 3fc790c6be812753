"""A trainer that only costs time: for tests of the loop, for benchmarks, and for simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sao.clock import Clock
from sao.observe.metrics import Metric, last
from sao.store.records import TokenRecord
from sao.training.protocol import ActorUpdate, StepReport
from sao.types import Batch, Rollout, Snapshot


@dataclass(kw_only=True)
class ScriptedTrainer:
    """Publishes empty snapshots at stated costs; remembers what it consumed. Satisfies training.protocol.Trainer."""

    clock: Clock
    """What the costs are charged to."""
    actor_seconds: float = 0.0
    """Seconds from the batch to the new version."""
    actor_token_seconds: float = 0.0
    """More for each action token of the batch."""
    critic_seconds: float = 0.0
    """Seconds from there to the end of the step."""
    critic_token_seconds: float = 0.0
    """More for each action token of the batch."""
    skip_steps: frozenset[int] = frozenset()
    """Steps whose actor update is skipped as not finite."""
    consumed: list[str] = field(default_factory=list)
    """Rollout ids, in order."""
    versions: list[int] = field(default_factory=list)
    """Published so far, in order."""
    _batch: Batch | None = None

    async def publish_initial(self, version: int, parent: int | None) -> Snapshot:
        """An empty snapshot."""
        self.versions.append(version)
        return Snapshot(version=version, parent=parent, location="", checksum="")

    async def update_actor(self, batch: Batch, *, version: int, parent: int) -> ActorUpdate:
        """Remember the batch and let the actor's time pass."""
        assert self._batch is None, "update_critic() must follow update_actor()"
        self._batch = batch
        await self.clock.sleep(self.actor_seconds + self.actor_token_seconds * _action_tokens(batch))
        self.consumed += [rollout.id for rollout in batch.rollouts]
        if batch.step in self.skip_steps:
            return ActorUpdate(snapshot=None, skipped="not_finite")
        return ActorUpdate(snapshot=await self.publish_initial(version, parent))

    async def update_critic(self) -> StepReport:
        """Let the critic's time pass; the tokens' numbers are those recorded, or 0."""
        assert self._batch is not None, "update_actor() comes first"
        batch, self._batch = self._batch, None
        await self.clock.sleep(self.critic_seconds + self.critic_token_seconds * _action_tokens(batch))
        metrics = {"actor/updates": last(len(self.versions) - 1)}
        return StepReport(
            step=batch.step, metrics=metrics, tokens=tuple(_tokens(rollout) for rollout in batch.rollouts)
        )

    async def fit_values(self, rollouts: Sequence[Rollout]) -> Mapping[str, Metric]:
        """Nothing to fit."""
        return {}

    async def save(self, folder: str) -> None:
        """Write what was consumed."""
        (Path(folder) / "consumed.txt").write_text("\n".join(self.consumed))

    async def load(self, folder: str) -> None:
        """Read what was consumed."""
        self.consumed = (Path(folder) / "consumed.txt").read_text().split("\n")

    async def stop(self) -> None:
        """Nothing to release."""


def _action_tokens(batch: Batch) -> int:
    return sum(rollout.num_action_tokens for rollout in batch.rollouts)


def _tokens(rollout: Rollout) -> tuple[TokenRecord, ...]:
    def zeros(length: int) -> np.ndarray:
        return np.zeros(length, dtype=np.float32)

    return tuple(
        TokenRecord(
            actor_logprobs=sequence.rollout_logprobs,
            values=zeros(len(sequence.token_ids)),
            advantages=zeros(len(sequence.token_ids)),
            returns=zeros(len(sequence.token_ids)),
        )
        for sequence in rollout.sequences
    )
