"""The trainer's part of a checkpoint: weights and optimiser state as safetensors, counters as JSON; nothing is pickled.

actor/                        config and weights, as any `transformers` program reads them
critic.safetensors            where there is a critic; so are the next two of their networks
actor_optimiser.safetensors   critic_optimiser.safetensors
trainer.json                  counters, and the checksum of every other file; written last
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sao.models.load import full_disk_named, named_weights, read_weights, save_model
from sao.training.core import Counters, TrainerCore
from sao.training.weights import file_checksum

ACTOR_FOLDER = "actor"
MANIFEST = "trainer.json"
FORMAT = 1
_ADVICE = "resume from an earlier checkpoint of the run, or start a new run"


def save_trainer(core: TrainerCore, folder: Path) -> None:
    """Write the trainer's whole state into an existing folder. The caller renames the folder into its place."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; create it before the trainer saves into it")
    save_model(core.actor, folder / ACTOR_FOLDER)
    _write(core.actor_optimiser.state(), folder / "actor_optimiser.safetensors")
    if core.critic is not None:
        assert core.critic_optimiser is not None
        _write(core.critic.state_dict(), folder / "critic.safetensors")
        _write(core.critic_optimiser.state(), folder / "critic_optimiser.safetensors")
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST and _ours(path, folder)
    )
    manifest = {
        "format": FORMAT,
        "counters": dataclasses.asdict(core.counters),
        "files": {path.relative_to(folder).as_posix(): file_checksum(path) for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def load_trainer(core: TrainerCore, folder: Path) -> None:
    """Take back what `save_trainer` wrote, into a core of the same models; settings such as rates stay the core's.

    Raises ValueError that names the file which is missing, corrupt or of another model; the core is unchanged then.
    """
    manifest = _read_manifest(folder)
    for name, checksum in manifest["files"].items():
        found = file_checksum(folder / name)
        if found != checksum:
            raise ValueError(f"checkpoint file {folder / name} is corrupt: checksum {found}, not {checksum}; {_ADVICE}")
    needed = ["actor_optimiser.safetensors"]
    if core.critic is not None:
        needed += ["critic.safetensors", "critic_optimiser.safetensors"]
    for name in needed:
        if name not in manifest["files"]:
            raise ValueError(f"checkpoint {folder} has no {name}, which this configuration needs; {_ADVICE}")
    actor_weights = read_weights(folder / ACTOR_FOLDER, core.actor)
    tensors = {name: _read(folder / name) for name in needed}
    try:
        counters = Counters(**manifest["counters"])
    except TypeError as error:
        raise ValueError(f"checkpoint file {folder / MANIFEST} is corrupt: {error}; {_ADVICE}") from error
    if core.critic is not None:
        _check_shapes(tensors["critic.safetensors"], core.critic.state_dict(), folder / "critic.safetensors")
    core.actor_optimiser.check(tensors["actor_optimiser.safetensors"])
    if core.critic_optimiser is not None:
        core.critic_optimiser.check(tensors["critic_optimiser.safetensors"])
    with torch.no_grad():
        for name, weight in named_weights(core.actor):
            weight.copy_(actor_weights[name])
    core.actor_optimiser.load(tensors["actor_optimiser.safetensors"])
    if core.critic is not None:
        assert core.critic_optimiser is not None
        core.critic.load_state_dict(tensors["critic.safetensors"])
        core.critic_optimiser.load(tensors["critic_optimiser.safetensors"])
    core.counters = counters


def _ours(path: Path, folder: Path) -> bool:
    relative = path.relative_to(folder)
    return relative.parts[0] == ACTOR_FOLDER or relative.suffix == ".safetensors"


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    with full_disk_named(path):
        save_file({name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}, path)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint file {path} cannot be read ({error}); {_ADVICE}") from error


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
    if manifest.get("format") != FORMAT:
        raise ValueError(f"checkpoint file {path} has format {manifest.get('format')}; this version reads {FORMAT}")
    return manifest


def _check_shapes(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    bad = sorted(name for name in found.keys() | wanted.keys() if _shape(found, name) != _shape(wanted, name))
    if bad:
        raise ValueError(f"checkpoint file {path} is of another model: {', '.join(bad[:3])} differ; use its own config")


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
