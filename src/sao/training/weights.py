"""Snapshot folders: the actor's weights as published, each proved by a checksum and by a short probe.

A folder is written under a temporary name and then renamed, so that a reader sees a whole one or none.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sao.models.load import named_weights, save_model
from sao.pipeline.packing import pack
from sao.store.snapshots import folder_checksum
from sao.training.parallel import ONE_RANK, OneRank
from sao.training.protocol import TrainerError
from sao.types import BoolArray, IntArray, Snapshot

PROBE_TOKENS = 32
"""Length of the probe; short, since every engine scores it at every update."""

_FOLDER_NAME = re.compile(r"v(\d{8})")


def probe_tokens(vocab_size: int, *, length: int = PROBE_TOKENS) -> tuple[int, ...]:
    """A fixed sequence that depends on the size of the vocabulary alone."""
    return tuple(np.random.default_rng(vocab_size).integers(0, vocab_size, length).tolist())


class SnapshotStore:
    """Writes snapshots below one folder. Who may still need one knows when it may go: see `prune_snapshots`."""

    def __init__(self, folder: str | Path, ranks: OneRank = ONE_RANK, *, dtype: torch.dtype = torch.float32) -> None:
        """`ranks` must be those that the actor is sharded over; all of them write together, by rank 0's hand.

        Weights wider than `dtype`, that of the engines, are rounded to it, as engines would do.
        """
        self._folder, self._ranks, self._dtype = Path(folder).absolute(), ranks, dtype

    def write(self, actor: PreTrainedModel, *, version: int, parent: int | None) -> Snapshot:
        """Write the actor's weights as `version`, with the probe's log-probs under them.

        Raises TrainerError for weights that give log-probs which are not finite, OSError where the disk is full.
        """
        ranks = self._ranks
        weights = ranks.whole_weights(actor)
        if self._dtype.itemsize < actor.dtype.itemsize and ranks.rank == 0:
            held = named_weights(actor) if weights is None else weights.items()
            weights = {name: weight.to("cpu", self._dtype) for name, weight in held}
        partial = ranks.on_first(lambda: self._write_partial(actor, weights, version))
        probe = probe_tokens(actor.config.get_text_config().vocab_size)
        logprobs = self._score(actor, probe)
        if not bool(torch.isfinite(logprobs).all()):
            raise TrainerError(
                f"the actor's log-probs are not finite as version {version}: its weights have run away. Lower "
                "trainer.actor_lr, and go on from a checkpoint before it"
            )
        target, checksum = ranks.on_first(lambda: _into_place(partial))
        return Snapshot(
            version=version,
            parent=parent,
            location=str(target),
            checksum=checksum,
            probe_token_ids=probe,
            probe_logprobs=tuple(logprobs.float().tolist()),
        )

    def _write_partial(self, actor: PreTrainedModel, weights: Mapping[str, Tensor] | None, version: int) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob("*.partial"):
            shutil.rmtree(leftover)
        partial = self._folder / f"v{version:08d}.partial"
        partial.mkdir()
        try:
            save_model(actor, partial, weights)
        except OSError:
            # What the disk was too full for must not keep it full.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return partial

    def _score(self, actor: PreTrainedModel, probe: tuple[int, ...]) -> Tensor:
        """Log-probs (T - 1,) of the probe's tokens after the first, as the trainer's passes compute them."""
        token_ids = np.array(probe, np.int32)
        sequence = _Probe(token_ids=token_ids, action_mask=np.zeros(len(probe), np.bool_))
        (micro,) = pack([sequence], len(probe), score_observations=True)
        with torch.no_grad():
            return self._ranks.action_logprobs(actor, micro, chunk_tokens=len(probe), with_entropy=False)[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Probe:
    token_ids: IntArray
    action_mask: BoolArray


def _into_place(partial: Path) -> tuple[Path, str]:
    """Rename a folder that is whole; where it is then, and its checksum."""
    target, checksum = partial.with_suffix(""), folder_checksum(partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    return target, checksum


def prune_snapshots(folder: str | Path, *, keep: set[int]) -> None:
    """Delete the snapshots below `folder` older than the newest of these versions, but for these.

    Newer ones stay: the trainer may have written one that nobody has been told of yet.
    """
    for path in Path(folder).iterdir():
        if _FOLDER_NAME.fullmatch(path.name) and int(path.name[1:]) not in keep and int(path.name[1:]) < max(keep):
            shutil.rmtree(path)
