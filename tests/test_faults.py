"""Processes die and disks fill in the middle of a run in real time: a clear end, nothing lost, and it goes on."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import is_running
from real_runs import begun, child, children, finish, go_on, wait_for
from test_runs import check_history

from sao.engines.protocol import EngineError
from sao.rollout.pool import PlayerHandle
from sao.store.log import read
from sao.store.records import AttemptEnded, Dropped, Finished, Trained
from sao.store.replay import replay
from sao.store.run_folder import RunFolder
from sao.training.protocol import TrainerError

pytestmark = pytest.mark.timeout(600)


def kill(kind: str) -> None:
    os.kill(child(kind)[0], signal.SIGKILL)


def records(path: Path, kind: type) -> list:
    return [record for record in read(path / "log") if isinstance(record, kind)]


def test_a_dead_worker_process_is_replaced_and_a_dead_engine_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that dies with a worker, or that hangs, or uses its tasks up, when the engine is gone."""
    path = tmp_path / "run"
    config = begun(path)
    seen: list[int] = []
    send_task = PlayerHandle.send_task

    def send_and_kill(self: PlayerHandle, *arguments: Any) -> Any:
        sent = send_task(self, *arguments)
        monkeypatch.undo()
        seen.append(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        return sent

    def kill_worker() -> None:
        # With an episode under way: between two steps there may be none.
        monkeypatch.setattr(PlayerHandle, "send_task", send_and_kill)

    def kill_engine() -> None:
        seen.extend(child("worker"))
        kill("engine")

    with pytest.raises(EngineError, match=r"connection to the engine .* broke \(process \d+ ended with -9\)"):
        go_on(path, config, {2: kill_worker, 12: kill_engine})
    assert len(set(seen)) == 2, "the worker was not replaced"
    failures = records(path, AttemptEnded)
    assert failures, "the episodes of the dead worker were not counted"
    assert all(failure.retried and "ended with exit code -9" in failure.failure_text for failure in failures)
    assert not records(path, Dropped), "tasks were lost with a process"
    wait_for(lambda: not child("engine") + child("worker") + child("trainer"), "the children to end")
    check_history(path, steps=finish(path))


def test_a_dead_trainer_ends_the_run(tmp_path: Path) -> None:
    """Catches a loop that waits an hour for a trainer that is gone."""
    path = tmp_path / "run"
    config = begun(path)
    config = replace(config, trainer=replace(config.trainer, max_restarts=0))
    with pytest.raises(TrainerError, match=r"the trainer process ended: killed by SIGKILL; .* out of memory"):
        go_on(path, config, {3: lambda: kill("trainer")})
    wait_for(lambda: not child("engine") + child("worker") + child("trainer"), "the children to end")
    check_history(path, steps=finish(path))


def start(path: Path) -> "subprocess.Popen[str]":
    """`sao resume` as a user starts it, in a process group of its own; returns five steps later."""
    before = rows(path)
    process = subprocess.Popen(
        [sys.executable, "-m", "sao.cli", "resume", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for(lambda: rows(path) > before + 5 or process.poll() is not None, "five steps")
    except AssertionError:
        process.kill()
        raise
    assert process.poll() is None, process.communicate()
    return process


def rows(path: Path) -> int:
    return len((path / "metrics.jsonl").read_bytes().splitlines())


def finished(path: Path) -> set[str]:
    return {record.rollout.id for record in records(path, Finished)}


def kill_nine(path: Path) -> None:
    """The machine loses the whole run at once."""
    process = start(path)
    pids = children(process.pid)
    process.kill()
    process.communicate(timeout=300)
    wait_for(lambda: not any(is_running(pid) for pid in pids), "the orphans to end")


def fill_the_disk(path: Path) -> None:
    """A limit on the size of files stands for a full disk: from now on the log cannot grow."""
    process = start(path)
    size = max(file.stat().st_size for file in (path / "log").iterdir())
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert "cannot write the rollout log" in said
    assert "File too large" in said
    assert "sao resume" in said
    assert "Traceback" not in said


_ON_A_SMALL_DISK = """
set -e
mount -t tmpfs -o size="$2" shared "$1/snapshots"
resume() { "$PYTHON" -m sao.cli resume "$@" 2>&1; echo "code $?"; }
echo "first: $(resume "$1" --set worker_processes=0)"
echo "left: $(ls "$1/snapshots")"
mount -o remount,size=100m "$1/snapshots"
echo "second: $(resume "$1" --set "loop.steps=$3")"
"""
"""A run, once without room for a second snapshot, then with; in a mount namespace of its own, as any user may."""


def test_a_full_snapshot_folder_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    """Catches a trainer that is started over and over on a full disk, half a snapshot that keeps it full, an error that
    does not say which folder, and rollouts that are gone after it."""
    path = tmp_path / "run"
    begun(path)
    (snapshot, *_) = (path / "snapshots").iterdir()
    size = sum(file.stat().st_size for file in snapshot.iterdir())
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", _ON_A_SMALL_DISK, "bash", str(path),
         str(size * 3 // 2 + 8192), "8"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        told, said = process.communicate(timeout=550)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if "first: " not in told:
        pytest.skip(f"no small disk can be mounted here: {said.strip()}")
    first, _, rest = told.partition("left: ")
    left, _, second = rest.partition("second: ")
    assert "code 2" in first, first
    assert f"cannot write {path}/snapshots/v" in first
    assert "No space left on device" in first
    assert "MB are free there now" in first
    assert "sao resume" in first
    assert "Traceback" not in first
    assert "starting again" not in first
    assert len(left.split()) == 1, left
    assert "code 0" in second, second
    check_history(path, steps=8)


def press_ctrl_c(path: Path) -> None:
    """As a terminal sends it: to the group."""
    stop(path, lambda process, pids: os.killpg(process.pid, signal.SIGINT))


def ask_to_end(path: Path) -> None:
    """As a scheduler does: every process of the run."""
    stop(path, lambda process, pids: [os.kill(pid, signal.SIGTERM) for pid in (*pids, process.pid)])


def stop(path: Path, ask: Callable[["subprocess.Popen[str]", Iterable[int]], object]) -> None:
    process = start(path)
    pids = children(process.pid)
    ask(process, pids)
    told, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert f"go on with: sao resume {path}" in told
    assert "Traceback" not in said
    checkpoint = RunFolder.open(path).latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.manifest.step == records(path, Trained)[-1].step, "the step under way was not committed"
    assert (path / "report" / "report.md").is_file()
    wait_for(lambda: not any(is_running(pid) for pid in pids), "the children to end")


def test_a_run_killed_out_of_disk_and_interrupted_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    """Catches state that lives only in memory, a full disk that hides itself, and Ctrl-C that leaves half a step."""
    path = tmp_path / "run"
    begun(path)
    for strike in (kill_nine, fill_the_disk, press_ctrl_c, ask_to_end):
        before = finished(path)
        strike(path)
        assert before <= finished(path)
    check_history(path, steps=finish(path))
    checkpoint = RunFolder.open(path).latest_checkpoint()
    assert checkpoint is not None
    consumed = checkpoint.manifest.consumed
    state = replay(path / "log", consumed=consumed, ended=True)
    kept = set(consumed) | {rollout.id for rollout in state.waiting}
    assert finished(path) <= kept, "a finished rollout was lost"
    assert {each for record in records(path, Trained) for each in record.rollout_ids} <= kept
