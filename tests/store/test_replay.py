"""What a log says about the present, against a bookkeeper that watched the run."""

import copy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_examples import make_rollout, make_task

from sao.store.frames import SegmentWriter, encode, segments
from sao.store.log import read
from sao.store.records import Admitted, AttemptEnded, Dropped, Finished, Published, Record, Trained, to_frame
from sao.store.replay import Fate, LogState, replay
from sao.types import FailureKind, Rollout, Snapshot


def snapshot(version: int, parent: int | None) -> Snapshot:
    return Snapshot(version=version, parent=parent, location="", checksum="")


def admitted(task_id: str, cursor: int, attempt: int = 0, group_id: str | None = None) -> Admitted:
    return Admitted(
        task=make_task(task_id),
        cursor=cursor,
        rollout_id=f"{task_id}.{attempt}",
        group_id=group_id or task_id,
        attempt=attempt,
        seed=1,
        clock_seconds=0.0,
    )


def finished(task_id: str, position: int, attempt: int = 0) -> Finished:
    return Finished(rollout=make_rollout(task_id, attempt, seed=position), position=position)


def trained(step: int, version: int, parent: int, *rollout_ids: str) -> Trained:
    return Trained(step=step, version=version, parent=parent, rollout_ids=rollout_ids, tokens=())


def write(folder: Path, records: list[Record], segment_bytes: int = 10**7) -> None:
    folder.mkdir(exist_ok=True)
    writer = SegmentWriter(folder, segment_bytes=segment_bytes)
    for record in records:
        writer.write(encode(to_frame(record)))
    writer.close()


@dataclass
class Bookkeeper:
    """A run under random events: writes records, and knows the truth at every moment."""

    records: list[Record] = field(default_factory=list)
    fates: dict[str, Fate] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    cursor: int = 0
    position: int = 0
    step: int = 0
    version: int = 0
    highest: int = 0
    waiting: list[Rollout] = field(default_factory=list)
    parents: dict[int, int | None] = field(default_factory=dict)
    consumed: list[str] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    history: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    unconsumed: list[Rollout] = field(default_factory=list)
    """Waiting at the last checkpoint, or finished since, and not dropped: waiting again after a crash."""
    saved: "Bookkeeper | None" = None
    moments: list["Bookkeeper"] = field(default_factory=list)
    """As of every record: what a crash right after it would leave."""

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def copied(self) -> "Bookkeeper":
        moment = copy.copy(self)
        for name in ("fates", "attempts", "waiting", "parents", "consumed", "failures", "history", "unconsumed"):
            setattr(moment, name, copy.copy(getattr(self, name)))
        moment.moments = []
        return moment

    def note(self) -> None:
        """Keep the truth after every record since the last call."""
        self.moments.extend([self.copied()] * (len(self.records) - len(self.moments)))

    def act(self, action: int, choice: int) -> None:
        running = [task_id for task_id, fate in self.fates.items() if fate is Fate.UNFINISHED]
        match action:
            case 0 | 1:
                task_id = f"t{self.cursor}"
                self.cursor += 1
                self.admit(task_id, 0)
            case 2 | 3 if running:
                self.finish(running[choice % len(running)])
            case 4 if running:
                self.fail(running[choice % len(running)], choice)
            case 5 if self.waiting:
                rollout = self.waiting.pop(choice % len(self.waiting))
                self.unconsumed = [other for other in self.unconsumed if other.id != rollout.id]
                self.fates[rollout.task_id] = Fate.DROPPED
                self.emit(Dropped(rollout_id=rollout.id, reason="over_age"))
            case 6 | 7 if self.waiting:
                self.train(skipped=choice % 4 == 0)
            case 8:
                # Records so far are on the disk before a checkpoint: it holds from this moment on.
                self.unconsumed = list(self.waiting)
                self.saved = self.copied()
                self.moments[-1] = self.copied()
            case 9:
                self.crash()
            case _:
                pass
        self.note()

    def admit(self, task_id: str, attempt: int) -> None:
        self.attempts[task_id] = attempt
        self.fates[task_id] = Fate.UNFINISHED
        self.emit(admitted(task_id, self.cursor, attempt))

    def finish(self, task_id: str) -> None:
        record = finished(task_id, self.position, self.attempts[task_id])
        self.position += 1
        self.emit(record)
        if record.rollout.trainable:
            self.fates[task_id] = Fate.WAITING
            self.waiting.append(record.rollout)
            self.unconsumed.append(record.rollout)
        else:
            self.fates[task_id] = Fate.DROPPED

    def fail(self, task_id: str, choice: int) -> None:
        retried = choice % 2 == 0
        name = f"{task_id}.{self.attempts[task_id]}"
        self.failures[task_id] = self.failures.get(task_id, 0) + 1
        self.emit(AttemptEnded(rollout_id=name, failure=FailureKind.INFRASTRUCTURE, failure_text="", retried=retried))
        if not retried:
            self.fates[task_id] = Fate.INFRASTRUCTURE_FAILURE
            if choice % 3 == 0:
                self.note()
                self.emit(Dropped(rollout_id=name, reason="no tries left"))
        else:
            self.note()
            self.admit(task_id, self.attempts[task_id] + 1)

    def train(self, skipped: bool) -> None:
        batch, self.waiting = self.waiting[:2], self.waiting[2:]
        parent = self.version
        self.step += 1
        if not skipped:
            self.highest += 1
            self.version = self.highest
            self.parents[self.version] = parent
            self.emit(Published(snapshot=snapshot(self.version, parent)))
            # A crash between the two: the version is used up, the rollouts are not.
            self.waiting = batch + self.waiting
            self.step -= 1
            self.note()
            self.step += 1
            self.waiting = self.waiting[len(batch) :]
        names = tuple(rollout.id for rollout in batch)
        self.emit(trained(self.step, self.version, parent, *names))
        self.consumed.extend(names)
        self.history.append((self.step, self.version, names))
        for rollout in batch:
            self.fates[rollout.task_id] = Fate.TRAINED

    def crash(self) -> None:
        saved = self.saved
        self.step = saved.step if saved else 0
        self.version = saved.version if saved else 0
        self.consumed = list(saved.consumed) if saved else []
        self.history = list(saved.history) if saved else []
        self.waiting = sorted(self.unconsumed, key=self.order)
        self.unconsumed = list(self.waiting)
        for rollout in self.waiting:
            self.fates[rollout.task_id] = Fate.WAITING
        for task_id, fate in list(self.fates.items()):
            if fate is Fate.UNFINISHED:
                self.note()
                self.admit(task_id, self.attempts[task_id] + 1)

    def order(self, rollout: Rollout) -> int:
        finishes = [record for record in self.records if isinstance(record, Finished)]
        return next(record.position for record in finishes if record.rollout.id == rollout.id)


def watched(actions: list[tuple[int, int]]) -> Bookkeeper:
    run = Bookkeeper()
    run.emit(Published(snapshot=snapshot(0, None)))
    run.parents[0] = None
    run.note()
    for action, choice in actions:
        run.act(action, choice)
    return run


def assert_state(state: LogState, truth: Bookkeeper, order: list[str]) -> None:
    saved = truth.saved
    expected = dict(truth.fates)
    for rollout in truth.unconsumed:
        expected[rollout.task_id] = Fate.WAITING
    expected = {task: Fate.INTERRUPTED if fate is Fate.UNFINISHED else fate for task, fate in expected.items()}
    assert state.fates == expected
    assert state.cursor == truth.cursor
    assert [rollout.id for rollout in state.waiting] == [
        name for name in order if name in {rollout.id for rollout in truth.unconsumed}
    ]
    assert {record.task.id: record.attempt for record in state.interrupted} == {
        task: truth.attempts[task] for task, fate in expected.items() if fate is Fate.INTERRUPTED
    }
    assert state.versions.parents == truth.parents
    assert state.highest_version == truth.highest
    assert state.next_position == truth.position
    assert state.infrastructure_failures == truth.failures
    assert [(s.step, s.version, s.rollout_ids) for s in state.steps] == (saved.history if saved else [])
    assert sum(state.counts.values()) == len(expected)


@settings(max_examples=50, deadline=None)
@given(
    actions=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 11)), min_size=10, max_size=80),
    tear=st.integers(0, 10),
)
def test_replay_agrees_with_who_watched(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[int, int]], tear: int
) -> None:
    """Would catch a task lost, trained twice or admitted twice by a resume, at any instant of a crash."""
    run = watched(actions)
    order = [record.rollout.id for record in run.records if isinstance(record, Finished)]
    folder = tmp_path_factory.mktemp("log")
    frames = [encode(to_frame(record)) for record in run.records]
    written = b""
    for index, truth in enumerate(run.moments):
        written += frames[index]
        following = frames[index + 1] if index + 1 < len(frames) else b""
        torn = following[: len(following) * tear // 11]
        (folder / "000001.seg").write_bytes(written + torn)
        saved = truth.saved
        state = replay(
            folder,
            consumed=saved.consumed if saved else (),
            step=saved.step if saved else 0,
            version=saved.version if saved else 0,
        )
        assert_state(state, truth, order)
        assert state.quarantined == (1 if torn else 0)


@settings(max_examples=25, deadline=None)
@given(
    actions=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 11)), min_size=10, max_size=30),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=5),
)
def test_replay_never_raises_on_damage(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[int, int]], flips: list[tuple[int, int]]
) -> None:
    """Would catch one bad byte that makes a run impossible to resume or to inspect."""
    run = watched(actions)
    folder = tmp_path_factory.mktemp("log")
    write(folder, run.records, segment_bytes=3000)
    files = segments(folder)
    for place, value in flips:
        path = files[place % len(files)]
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= value
        path.write_bytes(bytes(data))
    for state in (replay(folder), replay(folder, consumed=run.consumed, step=run.step, version=run.version)):
        waiting = {rollout.task_id for rollout in state.waiting}
        assert waiting == {task for task, fate in state.fates.items() if fate is Fate.WAITING}
        assert {record.task.id for record in state.interrupted} <= set(state.fates)


def test_a_dead_branch_is_void_and_its_numbers_stay_used(tmp_path: Path) -> None:
    """Would catch a resume that counts a crashed branch's steps as done, or reuses its version numbers."""
    names = [f"t{number}" for number in range(6)]
    records: list[Record] = [Published(snapshot=snapshot(0, None))]
    for number, name in enumerate(names):
        records += [admitted(name, number + 1), finished(name, number)]
    records += [Published(snapshot=snapshot(1, 0)), trained(1, 1, 0, "t0.0")]  # checkpoint here
    records += [Published(snapshot=snapshot(2, 1)), trained(2, 2, 1, "t1.0"), Published(snapshot=snapshot(3, 2))]
    write(tmp_path, records)
    state = replay(tmp_path, consumed={"t0.0"}, step=1, version=1)
    assert state.highest_version == 3
    assert [step.version for step in state.steps] == [1]
    assert [rollout.id for rollout in state.waiting] == [f"t{number}.0" for number in range(1, 6)]

    write(tmp_path, [Published(snapshot=snapshot(4, 1)), trained(2, 4, 1, "t2.0")])
    state = replay(tmp_path, consumed={"t0.0", "t2.0"}, step=2, version=4)
    assert [(step.step, step.version) for step in state.steps] == [(1, 1), (2, 4)]
    assert state.fates["t1"] is Fate.WAITING
    assert state.versions.distance(3, 4) == 3
    assert replay(tmp_path).steps == state.steps
    # Back to an abandoned branch by choice of an older checkpoint: what lies on it counts again.
    state = replay(tmp_path, consumed={"t0.0", "t1.0"}, step=2, version=2)
    assert [(step.step, step.version) for step in state.steps] == [(1, 1), (2, 2)]


def test_a_group_that_lost_a_member_is_named(tmp_path: Path) -> None:
    """Would catch a crash between a member's loss and the drop of its group, after which the rest waits for ever."""
    records: list[Record] = [admitted(f"g#{index}", 1, group_id="g") for index in range(2)]
    records.append(AttemptEnded(rollout_id="g#0.0", failure=FailureKind.INFRASTRUCTURE, failure_text="", retried=False))
    write(tmp_path, records)
    state = replay(tmp_path)
    assert state.broken_groups == {"g"}
    assert state.fates == {"g#0": Fate.INFRASTRUCTURE_FAILURE, "g#1": Fate.INTERRUPTED}
    assert replay(tmp_path, ended=True).fates["g#1"] is Fate.UNFINISHED


def test_an_admission_lost_to_damage_is_told_by_its_rollout(tmp_path: Path) -> None:
    """Would catch a finished rollout that is ignored because the record of its admission cannot be read."""
    write(tmp_path, [finished("a", 4)])
    state = replay(tmp_path, consumed=())
    assert [rollout.id for rollout in state.waiting] == ["a.0"]
    assert state.fates == {"a": Fate.WAITING}
    assert state.next_position == 5
    assert state.highest_version == 0


def test_an_empty_log_is_the_beginning(tmp_path: Path) -> None:
    """Would catch a run killed before its first record that cannot be resumed."""
    state = replay(tmp_path)
    assert (state.cursor, state.highest_version, state.next_position, state.quarantined) == (0, -1, 0, 0)
    assert list(read(tmp_path)) == []
