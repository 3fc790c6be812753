"""The seam between the loop and whatever updates weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sao.observe.metrics import Metric
from sao.store.records import TokenRecord
from sao.types import Batch, Rollout, Snapshot


class TrainerError(RuntimeError):
    """The trainer cannot go on; the message says why."""


class TrainerLostError(TrainerError):
    """The trainer died, fell silent or broke. A new one can go on from the last commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorUpdate:
    """The first half of a step."""

    snapshot: Snapshot | None
    """New weights; None when the actor was not updated."""
    skipped: str = ""
    """Why there was no update: "" or "critic_only" or "not_finite"."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepReport:
    """The second half of a step."""

    step: int
    """Of the batch that it reports on."""
    metrics: Mapping[str, Metric]
    """All that the trainer measured in both halves of the step."""
    tokens: tuple[tuple[TokenRecord, ...], ...]
    """Per rollout of the batch, per sequence."""


class Trainer(Protocol):
    """One optimiser step in two halves, so that new weights leave while the critic still trains."""

    async def publish_initial(self, version: int, parent: int | None) -> Snapshot:
        """Write the current actor as a snapshot without an update (start of a run, resume)."""
        ...

    async def update_actor(self, batch: Batch, *, version: int, parent: int) -> ActorUpdate:
        """Values and targets are fixed, then the actor is updated once and written as `version`."""
        ...

    async def update_critic(self) -> StepReport:
        """K critic updates on the targets of the last `update_actor`, then the step's metrics."""
        ...

    async def fit_values(self, rollouts: Sequence[Rollout]) -> Mapping[str, Metric]:
        """Pre-train the critic on Monte-Carlo returns of logged rollouts; explained variance on a held-out share."""
        ...

    async def save(self, folder: str) -> None:
        """Write actor, critic, optimisers, schedules and counters into an existing folder."""
        ...

    async def load(self, folder: str) -> None:
        """Read what `save` wrote. Raises ValueError naming the missing or corrupt file."""
        ...

    async def stop(self) -> None:
        """Release everything. Safe to call twice."""
        ...
