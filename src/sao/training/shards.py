"""Tensors in safetensors files, each rank's rows of them in its own: written without gathering, read by any number.

A tensor that is sharded stands in every rank's file with the rows that the rank holds; the file's header says where
they begin and how many there are in all. Others (a step count) are in rank 0's file. Nothing is pickled, which is why
this is not torch.distributed.checkpoint, whose index is.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from sao.models.load import full_disk_named

_HEADER = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Where some rows of a tensor stand."""

    file: Path
    first: int
    count: int


def shard_name(part: str, rank: int, num_ranks: int) -> str:
    """File of a rank's rows; the usual form of files that belong together."""
    return f"{part}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def write_shard(tensors: Mapping[str, Tensor], path: Path, *, rank: int = 0) -> None:
    """Write what of these tensors is this rank's to keep. Raises OSError where the disk is full."""
    mine: dict[str, Tensor] = {}
    rows: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            if len(local):
                mine[name] = local
                rows[name] = (first_row(tensor), tensor.shape[0])
        elif rank == 0:
            mine[name] = tensor
    with full_disk_named(path, sum(tensor.nbytes for tensor in mine.values())):
        on_cpu = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in mine.items()}
        save_file(on_cpu, path, metadata={_HEADER: json.dumps(rows)} if rows else None)


def first_row(tensor: DTensor) -> int:
    """Index in the whole tensor of the first row that this rank holds."""
    assert len(tensor.placements) == 1
    assert tensor.placements[0].is_shard(0)
    rank, ranks = tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()
    return min(rank * -(-tensor.shape[0] // ranks), tensor.shape[0])


class Shards:
    """Tensors by name, wherever their rows stand: in one file, or in one per rank."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Reads headers only. Raises ValueError naming a file that is missing or corrupt, or the rows that are."""
        self._rows: dict[str, list[_Rows]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            try:
                self._read_header(path)
            except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"checkpoint file {path} cannot be read ({error})") from error
        for name, parts in self._rows.items():
            parts.sort(key=lambda part: part.first)
            ends = [part.first + part.count for part in parts]
            if [part.first for part in parts] != [0, *ends[:-1]] or ends[-1] != (self._shapes[name] or (1,))[0]:
                raise ValueError(f"checkpoint file {parts[0].file} and its neighbours lack rows of {name}")

    def _read_header(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            rows = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
            for name in file.keys():  # noqa: SIM118
                shape = tuple(file.get_slice(name).get_shape())
                first, total = rows.get(name, (0, shape[0] if shape else 1))
                self._shapes[name] = (total, *shape[1:]) if shape else ()
                part = _Rows(file=path, first=first, count=shape[0] if shape else 1)
                self._rows.setdefault(name, []).append(part)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the whole tensors."""
        return self._shapes

    def read(self, name: str, first: int = 0, count: int | None = None) -> Tensor:
        """`count` rows from `first` on; all of them by default, the whole of a scalar."""
        found: list[Tensor] = []
        last = (self._shapes[name] or (1,))[0] if count is None else first + count
        for part in self._rows[name]:
            start, end = max(first, part.first), min(last, part.first + part.count)
            if self._shapes[name] and start >= end:
                continue
            with safe_open(part.file, framework="pt") as file:
                if not self._shapes[name]:
                    return file.get_tensor(name)
                found.append(file.get_slice(name)[start - part.first : end - part.first])
        return torch.cat(found) if found else torch.empty(0, *self._shapes[name][1:])

    def read_like(self, name: str, like: Tensor) -> Tensor:
        """The tensor as `like` is held: whole, or this rank's rows of it, on the same device; in the file's type."""
        if not isinstance(like, DTensor) or not self._shapes[name]:
            return self.read(name)
        return _place_rows(like, lambda first, count: self.read(name, first, count))


def held_like(like: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor as `like` is held: whole, or this rank's rows of it."""
    if not isinstance(like, DTensor):
        return whole
    return _place_rows(like, lambda first, count: whole[first : first + count])


def _place_rows(like: DTensor, read: Callable[[int, int], Tensor]) -> DTensor:
    """A tensor sharded as `like` is, of what `read(first, count)` gives for this rank's rows."""
    local = like.to_local()
    rows = read(first_row(like), len(local)).to(local.device)
    assert rows.shape == local.shape
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
