"""Where a resumed run goes on: real run folders and logs, written as a run writes them."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sao.clock import Signal, VirtualClock, run_virtual
from sao.envs.toy import GuessConfig, GuessTasks
from sao.intake import Intake
from sao.loop import LoopConfig, Start
from sao.pipeline.accounts import NO_TRIES_LEFT, UNTRAINABLE
from sao.resume import start_from
from sao.rollout.worker import rollout_id
from sao.store.frames import MAGIC, segments
from sao.store.log import RolloutLogWriter, read
from sao.store.records import Admitted, AttemptEnded, Dropped, Finished, Published, Record, Trained
from sao.store.run_folder import Checkpoint, Manifest, RunFolder
from sao.store.versions import VersionTree
from sao.types import FailureKind, Rollout, Sequence, Snapshot, StopReason, Task


def admitted(task_id: str, cursor: int, *, attempt: int = 0, group: str = "") -> Admitted:
    return Admitted(
        task=Task(id=task_id, prompt_id=task_id, question="?", answer="1"),
        cursor=cursor,
        rollout_id=rollout_id(task_id, attempt),
        group_id=group or task_id,
        attempt=attempt,
        seed=1,
        clock_seconds=float(cursor),
    )


def finished(task_id: str, position: int, *, attempt: int = 0, group: str = "", version: int = 0) -> Finished:
    mask = np.array([False, True])
    sequence = Sequence(
        token_ids=np.array([1, 2], dtype=np.int32),
        action_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        rewards=np.zeros(2, dtype=np.float32),
        turns=np.zeros(2, dtype=np.int32),
    )
    rollout = Rollout(
        id=rollout_id(task_id, attempt),
        task_id=task_id,
        prompt_id=task_id,
        group_id=group or task_id,
        attempt=attempt,
        sequences=(sequence,),
        stop_reason=StopReason.FINISHED,
    )
    return Finished(rollout=rollout, position=position)


def published(version: int, parent: int | None) -> Published:
    return Published(snapshot=Snapshot(version=version, parent=parent, location="", checksum=""))


def trained(step: int, version: int, parent: int, *ids: str) -> Trained:
    return Trained(step=step, version=version, parent=parent, rollout_ids=ids, tokens=())


def failed(task_id: str, attempt: int, *, retried: bool) -> AttemptEnded:
    name = rollout_id(task_id, attempt)
    return AttemptEnded(rollout_id=name, failure=FailureKind.INFRASTRUCTURE, failure_text="gone", retried=retried)


class Run:
    """A run folder under the pen of a run that will die."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.create(path)

    def log(self, *records: Record) -> None:
        """Records of one life of the process: a segment of their own."""
        writer = RolloutLogWriter(self.folder.log)
        for record in records:
            writer.append(record)
        writer.close()

    def commit(self, step: int, version: int, *consumed: str, cursor: int = 0, **counters: int) -> Checkpoint:
        draft = self.folder.begin_checkpoint(step)
        (draft / "trainer").mkdir()
        (draft / "trainer" / "weights").write_bytes(b"w")
        manifest = Manifest(
            step=step, version=version, consumed=consumed, cursor=cursor, baseline={"x": 1}, accounts=counters
        )
        return self.folder.commit_checkpoint(draft, manifest)

    def start(self, group_size: int = 1) -> Start:
        """Read back by another process."""
        checkpoint = RunFolder.open(self.folder.path).latest_checkpoint()
        assert checkpoint is not None
        return start_from(checkpoint, self.folder, group_size=group_size)


@pytest.fixture
def run(tmp_path: Path):
    made = Run(tmp_path / "run")
    yield made
    made.folder.close()


def test_the_first_commit_is_the_beginning(run: Run) -> None:
    """Catches a run that was stopped after value pretraining and cannot start."""
    run.commit(0, 0)
    assert run.start() == Start(baseline={"x": 1}, accounts=run.start().accounts)
    assert set(run.start().accounts.values()) == {0}


def test_everything_finds_its_place(run: Run) -> None:
    """Catches a rollout that is trained twice, lost, out of order, or interrupted and taken for failed.

    t0, t1 are consumed; t3 finished before t2; t4 is interrupted; t5 failed once, and is interrupted in its retry; t6
    failed for good; t7 was untrainable; t8 was dropped by age.
    """
    run.log(
        published(0, None),
        *(admitted(f"t{index}", index + 1) for index in range(6)),
        finished("t1", 0),
        finished("t0", 1),
        published(1, 0),
        trained(1, 1, 0, "t1@0", "t0@0"),
    )
    run.commit(1, 1, "t1@0", "t0@0", skipped_steps=3)
    run.log(
        finished("t3", 2, version=1),
        *(admitted(f"t{index}", index + 1) for index in range(6, 9)),
        finished("t2", 3),
        failed("t5", 0, retried=True),
        admitted("t5", 6, attempt=1),
        failed("t6", 0, retried=True),
        admitted("t6", 7, attempt=1),
        failed("t6", 1, retried=False),
        Dropped(rollout_id="t6@1", reason=NO_TRIES_LEFT),
        Dropped(rollout_id="t7@0", reason=UNTRAINABLE),
        finished("t8", 4),
        Dropped(rollout_id="t8@0", reason="over_age: more than 3 updates"),
    )
    start = run.start()
    assert (start.step, start.version, start.highest, start.cursor, start.position) == (1, 1, 1, 9, 5)
    assert start.consumed == ("t1@0", "t0@0")
    assert [rollout.id for rollout in start.finished] == ["t3@0", "t2@0"]
    assert [(member.rollout_id, member.failures, member.cursor) for member in start.pending] == [
        ("t4@1", 0, 5),
        ("t5@2", 1, 6),
    ]
    assert start.accounts == {
        "admitted": 9, "finished": 5, "trained": 2, "dropped": 1, "untrainable": 1, "infrastructure_failures": 3,
        "retried": 2, "skipped_steps": 3,
    }  # fmt: skip


def test_what_a_dead_branch_trained_waits_again_and_its_versions_stay_used(run: Run) -> None:
    """Catches a version number used twice: tokens of the dead branch would change their meaning."""
    run.log(
        published(0, None),
        *(admitted(f"t{index}", index + 1) for index in range(4)),
        *(finished(f"t{index}", index) for index in range(2)),
        published(1, 0),
        trained(1, 1, 0, "t0@0"),
    )
    run.commit(1, 1, "t0@0")
    run.log(
        published(2, 1), trained(2, 2, 1, "t1@0"), published(3, 2), finished("t2", 2, version=3), published(4, 3)
    )  # killed before the commit of step 2
    start = run.start()
    assert [rollout.id for rollout in start.finished] == ["t1@0", "t2@0"]
    assert (start.version, start.highest) == (1, 4)
    tree = VersionTree(dict(start.edges))
    tree.add(start.highest + 1, start.version)
    assert tree.distance(3, 5) == 3, "a token of the dead 3 is 2 updates up to 1 and 1 down to 5 away"


def test_a_version_that_was_published_and_not_recorded_elsewhere_is_never_reused(run: Run) -> None:
    """Catches a crash between publishing and the trained record."""
    run.log(published(0, None))
    run.commit(0, 0)
    run.log(published(1, 0))
    assert run.start().highest == 1


def test_a_second_resume_counts_attempts_on(run: Run) -> None:
    """Catches a rollout id that two attempts share."""
    run.log(published(0, None), admitted("t0", 1))
    run.commit(0, 0)
    assert [member.rollout_id for member in run.start().pending] == ["t0@1"]
    run.log(published(0, None), admitted("t0", 1, attempt=1))
    assert [member.rollout_id for member in run.start().pending] == ["t0@2"]


def test_a_group_cut_in_the_middle_of_its_admission_is_completed(run: Run) -> None:
    """Catches a group of two of four members that holds its places for ever."""
    run.log(
        published(0, None),
        *(admitted(f"a#{index}", 1, group="a") for index in range(4)),
        finished("a#2", 0, group="a"),
        admitted("b#0", 2, group="b"),
        admitted("b#1", 2, group="b"),
    )
    run.commit(0, 0)
    start = run.start(group_size=4)
    assert [(member.rollout_id, member.index) for member in start.pending] == [
        ("a#0@1", 0), ("a#1@1", 1), ("a#3@1", 3), ("b#0@1", 0), ("b#1@1", 1), ("b#2@0", 2), ("b#3@0", 3),
    ]  # fmt: skip
    assert {member.group_id for member in start.pending[3:]} == {"b"}
    assert start.cursor == 2


async def restored(run: Run, start: Start, **changes: Any) -> tuple[Intake, list[Record]]:
    """The rollout side after a resume, and what it logged."""
    log = RolloutLogWriter(run.folder.log, inline=True)
    before = len(list(read(run.folder.log)))
    settings = {"batch_size": 4, "concurrency": 4, "max_batches_ahead": 1, **changes}

    async def lives() -> None:
        pass

    intake = Intake(
        clock=VirtualClock(), source=GuessTasks(GuessConfig()), worker=None,  # type: ignore[arg-type]
        log=log, config=LoopConfig(**settings), start=start, seed=0, changed=Signal(), fresh=lambda: True,
        engine_version=lambda: 0, engine_lives=lives,
    )  # fmt: skip
    await asyncio.sleep(0)
    log.close()
    return intake, list(read(run.folder.log))[before:]


def test_a_broken_group_is_dropped_whole_after_a_crash(run: Run) -> None:
    """Catches a crash between the loss of a member and the drop of the others: they would wait for ever."""
    run.log(
        published(0, None),
        *(admitted(f"a#{index}", 1, group="a") for index in range(4)),
        *(admitted(f"b#{index}", 2, group="b") for index in range(4)),
        *(finished(f"b#{index}", index, group="b") for index in range(4)),
        finished("a#0", 4, group="a"),
        failed("a#1", 0, retried=False),
    )
    run.commit(0, 0)
    start = run.start(group_size=4)
    intake, records = run_virtual(restored(run, start, group_size=4))
    dropped = {record.rollout_id for record in records if isinstance(record, Dropped)}
    assert dropped == {"a#0@0", "a#2@1", "a#3@1"}
    assert intake.accounts.counts()["dropped"] == 3
    assert [rollout.task_id for rollout in intake.take()] == [f"b#{index}" for index in range(4)]
    again = run.start(group_size=4)
    assert (again.pending, [rollout.group_id for rollout in again.finished]) == ((), ["b"] * 4)
    assert again.accounts["dropped"] == 3


def test_tasks_with_a_sharp_in_their_ids_are_no_groups(run: Run) -> None:
    """Catches tasks of a file, named like members of a group, that lose their places in the order of admission."""
    names = ("math#2", "math#1", "code#7")
    run.log(published(0, None), *(admitted(name, place) for place, name in enumerate(names, 1)))
    run.commit(0, 0)
    assert run.start().groups == names


@pytest.mark.parametrize("group_size", [1, 2])
def test_batches_in_the_order_of_admission_stay_so(run: Run, group_size: int) -> None:
    """Catches a resume after which what has ended, the short ones, is trained before what was admitted first."""
    tasks = [task.id for task in map(GuessTasks(GuessConfig()).at, range(4)) if task is not None]
    members = {task: [task] if group_size == 1 else [f"{task}#0", f"{task}#1"] for task in tasks}
    run.log(
        published(0, None),
        *(admitted(name, place, group=task) for place, task in enumerate(tasks, 1) for name in members[task]),
        *(finished(name, place, group=task) for place, task in enumerate(tasks[:0:-1]) for name in members[task]),
    )
    run.commit(0, 0)
    settings = {"group_size": group_size, "batch_size": 2 * group_size, "batch_order": "admitted"}
    intake, _ = run_virtual(restored(run, run.start(group_size), **settings))
    assert (intake.waiting, intake.full) == (3 * group_size, False), "the first is still being played"
    run.log(*(finished(name, 9, attempt=1, group=tasks[0]) for name in members[tasks[0]]))
    intake, _ = run_virtual(restored(run, run.start(group_size), **settings))
    assert [rollout.group_id for rollout in intake.take()] == [task for task in tasks[:2] for _ in range(group_size)]


def test_another_group_size_drops_what_no_longer_fits(run: Run) -> None:
    """Catches a resume with another loop.group_size that crashes, or trains groups in part."""
    run.log(published(0, None), admitted("t0", 1), admitted("t1", 2), finished("t0", 0))
    run.commit(0, 0)
    intake, records = run_virtual(restored(run, run.start(group_size=2), group_size=2))
    assert {record.rollout_id for record in records if isinstance(record, Dropped)} == {"t0@0", "t1@1"}
    assert intake.waiting == 0


def test_admissions_are_on_record_before_they_are_played_again(run: Run) -> None:
    """Catches an attempt that only memory knows: after a second crash its id would be given twice."""
    run.log(published(0, None), admitted("t0", 1), admitted("t1", 2))
    run.commit(0, 0)
    _, records = run_virtual(restored(run, run.start()))
    assert [record.rollout_id for record in records if isinstance(record, Admitted)] == ["t0@1", "t1@1"]
    assert {record.attempt for record in records if isinstance(record, Admitted)} == {1}


def test_times_of_an_earlier_process_are_not_mixed_with_those_of_this_one(run: Run) -> None:
    """Catches a rollout admitted after it ended: each process's clock starts at 0."""
    run.log(published(0, None), admitted("t0", 7000), admitted("t1", 8000))
    run.commit(0, 0)
    _, records = run_virtual(restored(run, run.start()))
    assert [record.clock_seconds for record in records if isinstance(record, Admitted)] == [0.0, 0.0]


def damage(folder: Path, number: int) -> None:
    """Flip a byte within frame `number` of the log's only segment."""
    (path,) = segments(folder)
    data = bytearray(path.read_bytes())
    places = [index for index in range(len(data)) if data.startswith(MAGIC, index)]
    data[places[number] + len(MAGIC) + 20] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("lost", range(4))
def test_a_lost_version_record_costs_an_age_and_not_the_run(run: Run, lost: int) -> None:
    """Catches a bad byte in the record of a version that makes the run impossible to resume."""
    run.log(
        published(0, None), published(1, 0), published(2, 1), published(3, 2),
        admitted("t0", 1), finished("t0", 0, version=lost),
    )  # fmt: skip
    damage(run.folder.log, lost)
    run.commit(3, 3)
    start = run.start()
    tree = VersionTree(dict(start.edges))
    assert start.highest == 3
    assert 0 <= tree.distance(lost, 3) <= 3
    assert len(start.finished) == 1


def test_a_lost_admission_does_not_admit_its_task_again(run: Run) -> None:
    """Catches a task in the system twice because the cursor stood in the record that was lost."""
    run.log(published(0, None), admitted("t0", 1), admitted("t1", 2), finished("t1", 0))
    damage(run.folder.log, 2)
    run.commit(0, 0)
    start = run.start()
    assert start.cursor == 2
    assert [rollout.id for rollout in start.finished] == ["t1@0"]


def test_an_evaluation_counts_only_if_it_is_of_these_weights(run: Run) -> None:
    """Catches a resume that repeats an evaluation, or takes a dead branch's for its own."""
    run.log(published(0, None), published(1, 0), published(2, 1))
    run.commit(2, 2)
    for step, version, stage, expected in (
        (2, 1, "eval", "never"), (1, 2, "eval", "never"), (2, 2, "train", "never"), (2, 2, "eval", "between"),
    ):  # fmt: skip
        run.folder.write_metrics({"step": step, "version": version, "stage": stage, "eval/at_an_end": 0})
        assert run.start().evaluated == expected
    run.folder.write_metrics({"step": 2, "version": 2, "stage": "eval", "eval/at_an_end": 1})
    assert run.start().evaluated == "at an end"


def test_earlier_evaluations_come_back(run: Run) -> None:
    """Catches a rule for a collapse that counts anew at a resume, or counts what was given up."""
    run.log(published(0, None), published(1, 0))
    run.commit(20, 1)
    for step, mean in ((0, 0.5), (10, 0.4), (20, 0.1), (30, 0.0), (20, 0.2)):
        run.folder.write_metrics({"step": step, "version": 1, "stage": "eval", "eval/overall/mean": mean})
    run.folder.write_metrics({"step": 20, "version": 1, "stage": "train"})
    assert run.start().evaluations == {0: 0.5, 10: 0.4, 20: 0.2}
    run.folder.write_metrics({"step": 20, "version": 1, "stage": "eval", "eval/overall/mean": math.nan})
    assert math.isnan(run.start().evaluations[20])


def test_a_log_that_is_gone_is_no_fresh_start(run: Run) -> None:
    """Catches a resume without its log that hands out the consumed tasks again and trains them twice."""
    run.log(published(0, None), *(admitted(f"t{index}", index + 1) for index in range(3)))
    run.log(finished("t0", 0), finished("t2", 1), published(1, 0), trained(1, 1, 0, "t0@0", "t2@0"))
    run.commit(1, 1, "t0@0", "t2@0", cursor=3)
    for segment in segments(run.folder.log):
        segment.write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 of the 2 rollouts that .* consumed, such as t0@0, are not in .*log"):
        run.start()


def test_a_damaged_last_admission_moves_the_cursor_back_no_further_than_the_checkpoint(run: Run) -> None:
    """Catches a task that is admitted twice because the record of its first admission was damaged."""
    run.log(published(0, None), admitted("t0", 1), finished("t0", 0), trained(1, 1, 0, "t0@0"))
    run.log(admitted("t7", 8))
    run.commit(1, 1, "t0@0", cursor=8)
    (segment,) = segments(run.folder.log)[-1:]
    segment.write_bytes(segment.read_bytes()[:-3])
    assert (run.start().cursor, run.start().quarantined) == (8, 1)
