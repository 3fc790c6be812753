"""A trainer that is lost while a run trains: the run goes on by itself, for a while, and loses nothing."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from real_runs import AtStep, begun, child, go_on, wait_for
from small_runs import Silent, run_small, small_config
from test_runs import check_history

from sao.interruptions import Restarts
from sao.stages import run_stages
from sao.store.files import read_json_lines
from sao.store.run_folder import RunFolder, read_checkpoint
from sao.training.inline import InlineTrainer
from sao.training.protocol import TrainerError, TrainerLostError
from sao.training.requests import failure_of
from sao.training.settings import TrainerConfig

pytestmark = pytest.mark.timeout(600)


def kill_trainer() -> None:
    os.kill(child("trainer")[0], signal.SIGKILL)


def events(path: Path, what: str) -> int:
    return (path / "events.log").read_text().count(what)


def test_a_run_goes_on_from_its_last_commit_after_its_trainer_died(tmp_path: Path) -> None:
    """Catches a run that ends with its trainer, trains something twice, or keeps a former part alive."""
    path = tmp_path / "run"
    config = begun(path)
    config = replace(config, loop=replace(config.loop, steps=9))
    outcome = go_on(path, config, {3: kill_trainer, 6: kill_trainer})
    assert outcome is not None
    assert (outcome.steps, outcome.reason) == (9, "steps done")
    check_history(path, steps=9)
    assert events(path, "the trainer was lost; starting again from the last commit") == 2
    assert events(path, "resumed at step") == 3, "the resume by hand, and two by itself"
    rows = [row for row in read_json_lines(path / "metrics.jsonl").rows if row["stage"] == "train"]
    assert [rows[1]["loop/trainer_restarts"], rows[-1]["loop/trainer_restarts"]] == [0, 2]
    wait_for(lambda: not child("engine") + child("worker") + child("trainer"), "the children to end")


def test_a_trainer_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """Catches a run that starts for ever and never commits."""
    path = tmp_path / "run"
    config = begun(path)
    config = replace(
        config, loop=replace(config.loop, checkpoint_every=1000), trainer=replace(config.trainer, max_restarts=1)
    )
    with pytest.raises(TrainerLostError, match="killed by SIGKILL"):
        go_on(path, config, {1: kill_trainer, 2: kill_trainer})
    assert events(path, "starting again") == 1
    checkpoint = RunFolder.open(path).latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.manifest.step == 1


def test_a_restart_keeps_to_the_checkpoint_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trainer lost before its first commit that brings back the newer weights, which the user gave up."""
    path = tmp_path / "run"
    run_small(path, small_config())
    publish, losses = InlineTrainer.publish_initial, [TrainerLostError("killed"), TrainerLostError("killed again")]

    async def lost_at_first(trainer: InlineTrainer, version: int, parent: int | None) -> object:
        if losses:
            raise losses.pop()
        return await publish(trainer, version, parent)

    monkeypatch.setattr(InlineTrainer, "publish_initial", lost_at_first)
    with RunFolder.resume(path) as folder:
        chosen, _ = folder.checkpoint_paths()
        run_stages(small_config("loop.steps=6"), folder, Silent(), checkpoint=read_checkpoint(chosen))
    assert events(path, "starting again from the last commit") == 2
    assert (events(path, "resumed at step 2"), events(path, "resumed at step 4")) == (3, 0)
    check_history(path, steps=6)


def test_a_resume_after_one_from_a_chosen_checkpoint_keeps_to_it(tmp_path: Path) -> None:
    """Catches a run that is stopped at once, before its first step, and then goes on from what the user gave up."""
    path = tmp_path / "run"
    run_small(path, small_config())

    def switch_off() -> None:
        raise RuntimeError("the machine was switched off")

    config = small_config("loop.steps=6", "loop.checkpoint_every=100")
    with RunFolder.resume(path) as folder:
        chosen, _ = folder.checkpoint_paths()
        with pytest.raises(RuntimeError, match="switched off"):
            run_stages(config, folder, AtStep({1: switch_off}), checkpoint=read_checkpoint(chosen))
        steps = [read_checkpoint(each).manifest.step for each in folder.checkpoint_paths()]
        assert steps == [4, 2], "what was chosen is the newest now"
        newest = folder.checkpoint_paths()[-1]
        with pytest.raises(RuntimeError, match="switched off"):
            run_stages(config, folder, AtStep({1: switch_off}), checkpoint=read_checkpoint(newest))
        assert folder.checkpoint_paths()[-1] == newest, "naming the newest commits nothing"
        run_stages(config, folder, Silent())
    assert events(path, "resumed at step 2") == 3
    check_history(path, steps=6)


def test_a_commit_gives_all_restarts_back() -> None:
    """Catches a run of a month that ends with its third lost trainer."""
    restarts = Restarts(2)
    assert [restarts.another() for _ in range(3)] == [0.0, 5.0, None]
    restarts.committed()
    assert restarts.another() == 0.0
    assert restarts.count == 3
    assert Restarts(0).another() is None


def test_restarts_in_a_row_outlast_a_dead_node() -> None:
    """Catches ranks that are placed again and again on a node of which Ray does not know yet that it is dead: 15 s."""
    restarts = Restarts(TrainerConfig().max_restarts)
    pauses = [restarts.another() or 0.0 for _ in range(TrainerConfig().max_restarts)]
    assert sum(pauses) > 15


def test_what_would_fail_again_is_no_lost_trainer() -> None:
    """Catches a run that diverged, lacks a file or fills its disk, and is started over and over."""
    assert failure_of(ValueError("no such checkpoint")).kind is ValueError
    assert failure_of(TrainerError("not finite in steps 3, 4, 5")).kind is TrainerError
    assert failure_of(OSError(28, "No space left on device")).kind is TrainerError
    assert failure_of(MemoryError("out of memory")).kind is TrainerLostError
    assert isinstance(failure_of(RuntimeError("gloo: connection closed by peer")).error(), TrainerLostError)
