"""A snapshot is what was published, or an error names the file, before anybody loads it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sao.store.snapshots import check_snapshot, folder_checksum
from sao.types import Snapshot


def published(folder: Path, files: int) -> Snapshot:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in range(files):
        save_file({f"w{number}": np.full(100, number, np.float32)}, folder / f"model-{number}.safetensors")
    return Snapshot(version=1, parent=0, location=str(folder), checksum=folder_checksum(folder))


@pytest.mark.parametrize("files", [1, 3])
def test_damage_is_named(files: int, tmp_path: Path) -> None:
    """Catches an engine that goes on with weights of which a part is missing, cut short or changed."""
    snapshot = published(tmp_path / "v1", files)
    assert check_snapshot(snapshot) == sum(file.stat().st_size for file in (tmp_path / "v1").glob("*.safetensors"))
    file = tmp_path / "v1" / f"model-{files - 1}.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    where = str(file) if files == 1 else "one of the 3 files"
    with pytest.raises(ValueError, match=rf"{where}.* was damaged or replaced after version 1 was published"):
        check_snapshot(snapshot)
    for cut in (whole[:-10], whole[:5], b""):
        file.write_bytes(cut)
        with pytest.raises(ValueError, match=rf"{file} is cut short or damaged"):
            check_snapshot(snapshot)
    file.unlink()
    with pytest.raises(ValueError, match="holds no" if files == 1 else "one of the 2 files"):
        check_snapshot(snapshot)


def test_a_folder_that_is_not_whole_is_named(tmp_path: Path) -> None:
    """Catches a bare FileNotFoundError for a snapshot that was pruned, or is not written to its end."""
    snapshot = published(tmp_path / "v1", 1)
    with pytest.raises(ValueError, match=r"no model folder '.*nowhere'"):
        check_snapshot(replace(snapshot, location=str(tmp_path / "nowhere")))
    (tmp_path / "v1" / "config.json").unlink()
    with pytest.raises(ValueError, match="no model folder"):
        check_snapshot(snapshot)


def test_weights_that_moved_to_another_file_are_others(tmp_path: Path) -> None:
    """Catches a checksum of several files that does not know which content is whose."""
    snapshot = published(tmp_path / "v1", 2)
    first, second = sorted((tmp_path / "v1").glob("*.safetensors"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    with pytest.raises(ValueError, match="one of the 2 files"):
        check_snapshot(snapshot)
