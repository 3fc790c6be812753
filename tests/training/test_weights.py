"""Snapshot folders: whole or not there, proved by checksum and probe, and not for ever."""

import resource
from pathlib import Path

import pytest
import torch
from training_toys import VOCABULARY, make_actor, weights

from sao.models.load import read_weights
from sao.store.snapshots import check_snapshot
from sao.training.weights import SnapshotStore, probe_tokens, prune_snapshots


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_what_is_read_is_what_was_written(architecture: str, tmp_path: Path):
    """Weights lost in a change of names, as with experts that are saved one by one and held fused."""
    actor, other = make_actor(architecture), make_actor(architecture, seed=1)
    snapshot = SnapshotStore(tmp_path).write(actor, version=5, parent=3)
    assert (snapshot.version, snapshot.parent) == (5, 3)
    assert check_snapshot(snapshot) > 0
    found = read_weights(snapshot.location, other)
    expected = weights(actor)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert (Path(snapshot.location) / "config.json").is_file()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_snapshot_is_of_the_engines_type(architecture: str, tmp_path: Path):
    """Snapshots twice as large as what engines make of them, weights lost on the way, or an actor that is rounded."""
    actor, other = make_actor(architecture), make_actor(architecture, seed=1)
    before = weights(actor)
    sizes = {}
    for dtype in (torch.bfloat16, torch.float32):
        snapshot = SnapshotStore(tmp_path / str(dtype), dtype=dtype).write(actor, version=0, parent=None)
        sizes[dtype] = sum(file.stat().st_size for file in Path(snapshot.location).glob("*.safetensors"))
        found = read_weights(snapshot.location, other)
        assert all(torch.equal(found[name], weight.to(dtype).float()) for name, weight in before.items())
    assert sizes[torch.bfloat16] < 0.6 * sizes[torch.float32]
    assert all(torch.equal(weights(actor)[name], weight) for name, weight in before.items())


def test_a_snapshot_is_found_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run in a relative folder whose server, which runs elsewhere, takes the path for a name on the hub."""
    monkeypatch.chdir(tmp_path)
    snapshot = SnapshotStore("run/snapshots").write(make_actor(), version=0, parent=None)
    assert Path(snapshot.location) == tmp_path / "run" / "snapshots" / "v00000000"


def test_probe_is_the_models_own_log_probs(tmp_path: Path):
    """A probe that is shifted by one, or of other weights, and lets a stale engine pass."""
    actor = make_actor()
    snapshot = SnapshotStore(tmp_path).write(actor, version=0, parent=None)
    probe = torch.tensor([snapshot.probe_token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(actor(input_ids=probe).logits[0], -1)
    expected = [float(logprobs[place, token]) for place, token in enumerate(snapshot.probe_token_ids[1:])]
    assert snapshot.probe_logprobs == pytest.approx(expected, abs=1e-5)
    assert snapshot.probe_token_ids == probe_tokens(VOCABULARY) == probe_tokens(VOCABULARY)
    assert max(probe_tokens(7)) < 7


def test_a_full_disk_is_an_error_with_sizes_and_keeps_no_part(tmp_path: Path):
    """An error of safetensors' own that names no folder, a half that stays and fills the disk, a store that breaks."""
    store, actor = SnapshotStore(tmp_path), make_actor()
    first = store.write(actor, version=0, parent=None)
    size = sum(weight.nbytes for weight in weights(actor).values())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (8192, 0):  # Some of the weights, nothing at all.
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                store.write(actor, version=1, parent=0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        said = str(caught.value)
        assert f"cannot write {tmp_path}/v00000001.partial" in said
        assert f"It takes {size / 1e6:,.1f} MB, and " in said
        assert "MB are free there now. What was committed before is safe; free space on that disk" in said
        assert [path.name for path in tmp_path.iterdir()] == ["v00000000"]
    assert check_snapshot(first) > 0
    assert check_snapshot(store.write(actor, version=1, parent=0)) > 0


def test_old_snapshots_go_and_needed_and_unannounced_ones_stay(tmp_path: Path):
    """A disk that fills up over a thousand steps; a version deleted while an engine reads it, or before it is known."""
    store, actor = SnapshotStore(tmp_path), make_actor()
    (tmp_path / "v00000009.partial").mkdir()
    for version in (9, 10, 11, 12):
        store.write(actor, version=version, parent=version - 1)
    prune_snapshots(tmp_path, keep={9, 11})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000009", "v00000011", "v00000012"]
