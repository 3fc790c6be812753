"""A run folder has one writer and one commit point."""

import json
import logging
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from sao.store.files import read_json_lines
from sao.store.run_folder import Manifest, RunFolder, read_checkpoint


def commit(run: RunFolder, step: int, keep: int = 2, consumed: tuple[str, ...] = ("a",)) -> Path:
    draft = run.begin_checkpoint(step)
    (draft / "actor").mkdir()
    (draft / "actor" / "model.safetensors").write_bytes(bytes([step % 256]) * 1000)
    (draft / "optimizer.safetensors").write_bytes(b"x" * step)
    manifest = Manifest(
        step=step, version=step + 1, consumed=consumed, cursor=4, baseline={"mean": 0.1}, accounts={"n": np.int64(3)}
    )
    return run.commit_checkpoint(draft, manifest, keep=keep).path


def test_a_run_never_overwrites_another(tmp_path: Path) -> None:
    """Would catch the second `sao train` that ruins the first one's results."""
    path = tmp_path / "deep" / "run"
    with RunFolder.create(path) as run:
        run.write_config("")
    with pytest.raises(ValueError, match=r"already exists and is not empty.*sao resume"):
        RunFolder.create(path)
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday" / "picture").write_text("")
    with pytest.raises(ValueError, match=r"already exists and is not empty.*another folder$"):
        RunFolder.create(tmp_path / "holiday")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="already exists"):
        RunFolder.create(tmp_path / "file")
    (tmp_path / "locked" / "lock").mkdir(parents=True)
    (tmp_path / "locked" / "log").mkdir()
    with pytest.raises(ValueError, match=r"locked cannot be written: .*choose another folder"):
        RunFolder.resume(tmp_path / "locked")
    with pytest.raises(ValueError, match="cannot be made"):
        RunFolder.create(tmp_path / "file" / "run")
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty").close()


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    """Would catch a mistyped path that is inspected as an empty run."""
    with pytest.raises(ValueError, match="no run folder at"):
        RunFolder.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no folder `log`"):
        RunFolder.open(tmp_path)


def _hold(path: Path, ready: "multiprocessing.synchronize.Event", done: "multiprocessing.synchronize.Event") -> None:
    with RunFolder.resume(path):
        ready.set()
        done.wait(60)


def test_two_writers_never_share_a_folder(tmp_path: Path) -> None:
    """Would catch a resume beside a run that is alive; and a dead writer's lock must not stay."""
    RunFolder.create(tmp_path / "run").close()
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "run", ready, done))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(ValueError, match=f"being written by process {holder.pid}"):
        RunFolder.resume(tmp_path / "run")
    assert not RunFolder.open(tmp_path / "run").writable
    holder.kill()
    holder.join()
    with RunFolder.resume(tmp_path / "run") as run:
        assert run.writable
        with pytest.raises(ValueError, match=f"process {os.getpid()}"):
            RunFolder.resume(tmp_path / "run")


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    """Would catch a manifest that loses the order of the consumed ids, or numbers of numpy that JSON cannot say."""
    with RunFolder.create(tmp_path / "run") as run:
        assert run.latest_checkpoint() is None
        path = commit(run, 7, consumed=("b", "a"))
        checkpoint = run.latest_checkpoint()
        assert checkpoint is not None
        assert checkpoint.path == path
        assert checkpoint.manifest == Manifest(
            step=7, version=8, consumed=("b", "a"), cursor=4, baseline={"mean": 0.1}, accounts={"n": 3}
        )
        assert set(checkpoint.files) == {"actor/model.safetensors", "optimizer.safetensors"}


def test_an_unfinished_checkpoint_does_not_count(tmp_path: Path) -> None:
    """Would catch a crash while saving that leaves a checkpoint which looks committed, or blocks the next one."""
    with RunFolder.create(tmp_path / "run") as run:
        commit(run, 1)
        draft = run.begin_checkpoint(2)
        (draft / "half").write_bytes(b"x")
    with RunFolder.resume(tmp_path / "run") as run:
        checkpoint = run.latest_checkpoint()
        assert checkpoint is not None
        assert checkpoint.manifest.step == 1
        commit(run, 2)
        assert sorted(path.name for path in run.checkpoints.iterdir()) == ["0001-step-000001", "0002-step-000002"]


def test_old_checkpoints_go(tmp_path: Path) -> None:
    """Would catch a full disk; and an abandoned branch's higher step taken for the newest commit."""
    with RunFolder.create(tmp_path / "run") as run:
        for step in (10, 20, 30):
            commit(run, step)
        assert [path.name for path in run.checkpoint_paths()] == ["0002-step-000020", "0003-step-000030"]
        commit(run, 25)
        latest = run.latest_checkpoint()
        assert latest is not None
        assert (latest.manifest.step, latest.number) == (25, 4)
        with pytest.raises(ValueError, match="0 checkpoints to keep"):
            commit(run, 31, keep=0)


def test_a_damaged_checkpoint_is_named_and_not_passed_over(tmp_path: Path) -> None:
    """Would catch a silent step back to an older checkpoint, and damage that is loaded."""
    with RunFolder.create(tmp_path / "run") as run:
        older, newest = commit(run, 1), commit(run, 2)
        weights = newest / "actor" / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[:500] + b"\x00" + data[501:])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged.*--checkpoint .*0001-step-000001"):
            run.latest_checkpoint()
        assert read_checkpoint(older).manifest.step == 1
        weights.unlink()
        with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
            run.latest_checkpoint()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "missing"), (b"", "damaged"), (b"{}", "damaged"), (b"\xff\xfe", "damaged"), (b"[1]", "damaged")],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    """Would catch a traceback instead of the name of the file."""
    with RunFolder.create(tmp_path / "run") as run:
        manifest = commit(run, 1) / "manifest.json"
        manifest.unlink() if content is None else manifest.write_bytes(content)
        with pytest.raises(ValueError, match=rf"manifest\.json is {complaint}.*start a new run"):
            run.latest_checkpoint()


def test_a_changed_manifest_is_noticed(tmp_path: Path) -> None:
    """Would catch a flipped bit in the consumed ids, after which a rollout is trained twice."""
    with RunFolder.create(tmp_path / "run") as run:
        manifest = commit(run, 1, consumed=("t1.0",)) / "manifest.json"
        manifest.write_text(manifest.read_text().replace("t1.0", "t2.0"))
        with pytest.raises(ValueError, match="does not fit its checksum"):
            run.latest_checkpoint()
        shutil.rmtree(manifest.parent)
        with pytest.raises(ValueError, match="no checkpoint at"):
            read_checkpoint(manifest.parent)


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    """Would catch NaN in the file, which other tools refuse, and a row glued to a line that a crash tore."""
    with RunFolder.create(tmp_path / "run") as run:
        run.write_metrics({"step": 1, "a/b": float("nan"), "a/c": np.float32(0.5), "a/d": float("inf")})
        assert json.loads(run.metrics.read_text()) == {"step": 1, "a/b": None, "a/c": 0.5, "a/d": None}
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "a/')
    with RunFolder.resume(tmp_path / "run") as run:
        run.write_metrics({"step": 2, "a/b": 1.0})
    lines = read_json_lines(run.metrics)
    assert [row["step"] for row in lines.rows] == [1, 2]
    assert lines.broken == 1
    assert read_json_lines(tmp_path / "none").rows == []


def test_texts_of_a_run(tmp_path: Path) -> None:
    """Would catch an event that breaks the file's lines, and a configuration half written."""
    with RunFolder.create(tmp_path / "run") as run:
        run.write_config("a = 1\n")
        run.write_environment({"torch": "2", "cores": np.int64(2)})
        run.write_event("worker 3\ndied \udc80")
        assert run.config.read_text() == "a = 1\n"
        assert json.loads(run.environment.read_text()) == {"torch": "2", "cores": 2}
        assert run.events.read_text().count("\n") == 1
        assert not list(run.path.glob("*.tmp"))


def test_warnings_of_the_program_are_events_while_it_runs(tmp_path: Path) -> None:
    """Catches a replica whose end only the terminal told, and a run that writes another's warnings."""
    logger = logging.getLogger("sao.engines.pool")
    with RunFolder.create(tmp_path / "run") as run:
        with run.warnings_as_events():
            logger.warning("engine replica %d is taken out:\nit is %s", 1, "dead")
            logger.info("nothing to worry about")
            logging.getLogger("another").warning("not ours")
        logger.warning("after the run")
        (line,) = run.events.read_text().splitlines()
    assert line.endswith("engine replica 1 is taken out: it is dead")


def test_whether_a_run_came_to_its_end(tmp_path: Path) -> None:
    """Catches a report that takes what a finished run left over for what a dead one lost, or the other way round."""
    with RunFolder.create(tmp_path / "run") as run:
        told = []
        for line in (
            "prepared",
            "ended at step 4: stopped",
            "resumed at step 4, version 4",
            "ended at step 8: steps done",
        ):
            run.write_event(line)
            told.append(run.ended)
        run.write_event("report written")
        assert [*told, run.ended] == [False, False, False, True, True]
        run.write_event("resumed at step 8, version 8")
        assert not run.ended
