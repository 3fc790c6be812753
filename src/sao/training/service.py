"""What one rank of the trainer answers; a plain object that a process of its own, or an actor elsewhere, can hold.

Every rank is given the same requests in the same order, and computes the same answers. Whoever asks must end all ranks
if one of them dies or is stuck: the others would wait for it.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from sao.observe.metrics import Metric
from sao.training.checkpoint import load_trainer, save_trainer
from sao.training.core import TrainerCore
from sao.training.optimiser import Progress
from sao.training.parallel import OneRank, Place, join
from sao.training.protocol import ActorUpdate, StepReport
from sao.training.timing import StepTimer, process_metrics
from sao.training.weights import SnapshotStore
from sao.types import Batch, Rollout, Snapshot

MakeCore = Callable[[OneRank], tuple[TrainerCore, SnapshotStore]]
"""Builds a rank's trainer where it runs; picklable, so a module's function or a partial of one."""


class TrainerService:
    """The requests of `Trainer`, synchronous, with the seconds each part took."""

    def __init__(
        self, make_core: MakeCore, place: Place | None, *, threads: int, progress: Progress | None = None
    ) -> None:
        """Meets the other ranks; `place` is None for a trainer that is not sharded. Raises what `make_core` raises."""
        torch.set_num_threads(threads)
        self._ranks = join(place)
        self._core, self._store = make_core(self._ranks)
        self._progress = progress
        self._timer = StepTimer(time.perf_counter)

    def publish_initial(self, version: int, parent: int | None) -> Snapshot:
        """Write the current actor as a snapshot without an update."""
        return self._store.write(self._core.actor, version=version, parent=parent)

    def update_actor(self, batch: Batch, version: int, parent: int) -> ActorUpdate:
        """Fix values and targets, update the actor, write it as `version`."""
        with self._timer.part("values"):
            self._core.begin(batch)
        with self._timer.part("actor"):
            skipped = self._core.actor_update()
        with self._timer.part("publish"):
            snapshot = None if skipped else self.publish_initial(version, parent)
        return ActorUpdate(snapshot=snapshot, skipped=skipped)

    def update_critic(self) -> StepReport:
        """Update the critic K times and report the step; processor time and memory are this rank's."""
        with self._timer.part("critic"):
            self._core.critic_update()
        report = self._core.report()
        metrics = {**report.metrics, **self._timer.take(), **process_metrics()}
        return StepReport(step=report.step, metrics=metrics, tokens=report.tokens)

    def fit_values(self, rollouts: tuple[Rollout, ...]) -> Mapping[str, Metric]:
        """Pre-train the critic; nothing without one."""
        return self._core.fit_values(rollouts, self._progress)

    def save(self, folder: str) -> None:
        """Write a checkpoint into an existing folder that all ranks see."""
        save_trainer(self._core, Path(folder))

    def load(self, folder: str) -> None:
        """Read a checkpoint, of any number of ranks. Raises ValueError naming the missing or corrupt file."""
        load_trainer(self._core, Path(folder))

    def leave(self) -> None:
        """Release the connections to the other ranks."""
        self._ranks.leave()
