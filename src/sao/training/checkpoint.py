"""The trainer's part of a checkpoint: weights and optimiser state as safetensors, counters as JSON; nothing is pickled.

actor/                        config and weights, as any `transformers` program reads them
critic.safetensors            where there is a critic; so are the next two of their networks
actor_optimiser.safetensors   critic_optimiser.safetensors
trainer.json                  counters, and the checksum of every other file; written last

A sharded trainer writes each of the four in a file per rank, `critic-00001-of-00002.safetensors`. It gathers only the
actor, for its folder, which tools read and a sharded trainer does not. Any number of ranks reads either form.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sao.models.load import named_weights, read_weights, save_model
from sao.store.snapshots import file_checksum
from sao.training.core import Counters, TrainerCore
from sao.training.optimiser import Optimiser
from sao.training.shards import Shards, held_like, shard_name, write_shard

ACTOR_FOLDER = "actor"
MANIFEST = "trainer.json"
FORMAT, SHARDED_FORMAT = 1, 2
_ADVICE = "resume from an earlier checkpoint of the run, or start a new run"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Loaded:
    """What is read before anything is changed; tensors as the core holds its own."""

    weights: list[tuple[Tensor, Tensor]]
    """Pairs: the core's, and what it is to become."""
    optimisers: dict[str, dict[str, Tensor]]
    counters: Counters


def save_trainer(core: TrainerCore, folder: Path) -> None:
    """Write the trainer's whole state into an existing folder. The caller renames the folder into its place.

    On several ranks all call it, with a folder that all see.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; create it before the trainer saves into it")
    ranks = core.ranks
    manifest: dict[str, object] = {"format": FORMAT, "counters": dataclasses.asdict(core.counters)}
    if ranks.sharded:
        whole = ranks.whole_weights(core.actor)
        parts = ranks.on_each(lambda: _write_shards(core, folder, whole))
        files = {name: checksum for part in parts for name, checksum in part.items()}
        manifest |= {"format": SHARDED_FORMAT, "ranks": ranks.num_ranks}
    else:
        files = _write_whole(core, folder)
    text = json.dumps(manifest | {"files": files}, indent=1)
    ranks.on_first(lambda: (folder / MANIFEST).write_text(text, encoding="utf-8"))


def load_trainer(core: TrainerCore, folder: Path) -> None:
    """Take back what `save_trainer` wrote, into a core of the same models; settings such as rates stay the core's.

    On whatever number of ranks it was written. Raises ValueError that names the file which is missing, corrupt or of
    another model, on all ranks; the core is unchanged then.
    """
    found: list[_Loaded] = []
    core.ranks.on_each(lambda: found.append(_read(core, folder)))
    (loaded,) = found
    with torch.no_grad():
        for weight, value in loaded.weights:
            weight.copy_(value)
    for part, optimiser in _optimisers(core).items():
        optimiser.load(loaded.optimisers[part])
    core.counters = loaded.counters


def _networks(core: TrainerCore) -> dict[str, dict[str, Tensor]]:
    networks = {ACTOR_FOLDER: dict(named_weights(core.actor))}
    return networks if core.critic is None else networks | {"critic": core.critic.state_dict()}


def _tensors(core: TrainerCore) -> dict[str, dict[str, Tensor]]:
    return _networks(core) | {part: optimiser.state() for part, optimiser in _optimisers(core).items()}


def _optimisers(core: TrainerCore) -> dict[str, Optimiser]:
    found = {"actor_optimiser": core.actor_optimiser}
    return found if core.critic_optimiser is None else found | {"critic_optimiser": core.critic_optimiser}


def _write_whole(core: TrainerCore, folder: Path) -> dict[str, str]:
    files = _write_actor(core, folder, None)
    for part, tensors in _tensors(core).items():
        if part != ACTOR_FOLDER:
            files.append(folder / f"{part}.safetensors")
            write_shard(tensors, files[-1])
    return _checksums(files, folder)


def _write_shards(core: TrainerCore, folder: Path, actor_weights: Mapping[str, Tensor] | None) -> dict[str, str]:
    """This rank's files, and by rank 0 the actor once more, as all but the trainer read it."""
    rank, num_ranks = core.ranks.rank, core.ranks.num_ranks
    files = _write_actor(core, folder, actor_weights) if rank == 0 else []
    for part, tensors in _tensors(core).items():
        files.append(folder / shard_name(part, rank, num_ranks))
        write_shard(tensors, files[-1], rank=rank)
    return _checksums(files, folder)


def _write_actor(core: TrainerCore, folder: Path, weights: Mapping[str, Tensor] | None) -> list[Path]:
    save_model(core.actor, folder / ACTOR_FOLDER, weights)
    return sorted(path for path in (folder / ACTOR_FOLDER).rglob("*") if path.is_file())


def _checksums(files: list[Path], folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): file_checksum(path) for path in files}


def _read(core: TrainerCore, folder: Path) -> _Loaded:
    manifest = _read_manifest(folder)
    names = sorted(manifest["files"])
    for name in names[core.ranks.rank :: core.ranks.num_ranks]:  # Ranks share the work of checking.
        found, checksum = file_checksum(folder / name), manifest["files"][name]
        if found != checksum:
            raise ValueError(f"checkpoint file {folder / name} is corrupt: checksum {found}, not {checksum}; {_ADVICE}")
    num_ranks = manifest.get("ranks", 0)
    weights: list[tuple[Tensor, Tensor]] = []
    parts = sorted([*_networks(core), *_optimisers(core)])
    shards = {part: _shards(part, num_ranks, manifest, folder) for part in parts if num_ranks or part != ACTOR_FOLDER}
    for part, wanted in _networks(core).items():
        if part not in shards:
            whole = read_weights(folder / ACTOR_FOLDER, core.actor)
            weights += [(weight, held_like(weight, whole[name])) for name, weight in wanted.items()]
            continue
        _check_shapes(shards[part].shapes, wanted, folder / part)
        weights += [(weight, shards[part].read_like(name, weight)) for name, weight in wanted.items()]
    try:
        counters = Counters(**manifest["counters"])
    except TypeError as error:
        raise ValueError(f"checkpoint file {folder / MANIFEST} is corrupt: {error}; {_ADVICE}") from error
    states = {
        part: {
            name: shards[part].read_like(name, optimiser.parameter_of(name, shape))
            for name, shape in shards[part].shapes.items()
        }
        for part, optimiser in _optimisers(core).items()
    }
    return _Loaded(weights=weights, optimisers=states, counters=counters)


def _shards(part: str, num_ranks: int, manifest: dict, folder: Path) -> Shards:
    """Where a part's tensors stand: in one file, or in one per rank that wrote them."""
    names = [shard_name(part, rank, num_ranks) for rank in range(num_ranks)] or [f"{part}.safetensors"]
    for name in names:
        if name not in manifest["files"]:
            raise ValueError(f"checkpoint {folder} has no {name}, which this configuration needs; {_ADVICE}")
    try:
        return Shards([folder / name for name in names])
    except ValueError as error:
        raise ValueError(f"{error}; {_ADVICE}") from error


def _read_manifest(folder: Path) -> dict:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest.get("files"), dict) or not isinstance(manifest.get("counters"), dict):
            raise ValueError("it has no files or no counters")
    except OSError as error:
        raise ValueError(f"checkpoint file {path} cannot be read ({error.strerror}); {_ADVICE}") from error
    except (ValueError, AttributeError) as error:
        raise ValueError(f"checkpoint file {path} is corrupt: {error}; {_ADVICE}") from error
    formats = (FORMAT, SHARDED_FORMAT)
    if manifest.get("format") not in formats:
        read = " and ".join(map(str, formats))
        raise ValueError(f"checkpoint file {path} has format {manifest.get('format')}; this version reads {read}")
    num_ranks = manifest.get("ranks", 0)
    if not isinstance(num_ranks, int) or (manifest["format"] == SHARDED_FORMAT) != (num_ranks > 0):
        raise ValueError(f"checkpoint file {path} is corrupt: it is of {num_ranks!r} ranks; {_ADVICE}")
    return manifest


def _check_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor], path: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    bad = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
    if bad:
        raise ValueError(f"checkpoint file {path} is of another model: {', '.join(bad[:3])} differ; use its own config")
