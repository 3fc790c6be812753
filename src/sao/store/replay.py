"""What a log says about the present: where a resumed run goes on, and how every admitted task ended."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sao.store.log import LogContents
from sao.store.records import Admitted, AttemptEnded, Dropped, Finished, Published, Record, Trained
from sao.store.versions import VersionTree
from sao.types import FailureKind, Rollout


class Fate(StrEnum):
    """How an admitted task ended: exactly one of these."""

    TRAINED = "trained"
    WAITING = "waiting"
    DROPPED = "dropped"
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"
    INTERRUPTED = "interrupted"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step of the surviving history."""

    step: int
    """1, 2, ...; each once in the surviving history."""
    version: int
    """What it made; equal to `parent` when the actor was not updated."""
    parent: int
    """The version whose weights computed the loss."""
    rollout_ids: tuple[str, ...]
    """What it consumed, in the order of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogState:
    """The present of a run, as its log and a checkpoint tell it."""

    cursor: int
    """Tasks taken from the source, over all admissions: the next one to admit."""
    waiting: tuple[Rollout, ...]
    """Finished and not consumed, in the order of completion."""
    interrupted: tuple[Admitted, ...]
    """The last attempt of each task that has neither finished nor failed for good, in the order of admission: to be
    admitted again with attempt + 1."""
    versions: VersionTree
    """All that were ever published, dead branches included."""
    highest_version: int
    """The highest number used in any way, also by a damaged record's neighbours; -1 when there is none."""
    next_position: int
    """Place in the order of completion of the next rollout to finish."""
    fates: Mapping[str, Fate]
    """By task id."""
    last_attempts: Mapping[str, str]
    """Rollout id of the last attempt, by task id."""
    steps: tuple[TrainedStep, ...]
    """The surviving history, by step."""
    drop_reasons: Mapping[str, str]
    """By rollout id."""
    infrastructure_failures: Mapping[str, int]
    """Failed attempts by task id; interruptions are none."""
    groups: tuple[str, ...]
    """Groups, or tasks that are none, in the order of admission."""
    broken_groups: frozenset[str]
    """Groups that lost a member for good: the rest of them is to be dropped."""
    quarantined: int
    """Records lost to damage."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of tasks by fate, every fate named."""
        counted = Counter(self.fates.values())
        return {fate.value: counted[fate] for fate in Fate}


@dataclass(slots=True)
class _History:
    """What the records said so far."""

    cursor: int = 0
    admissions: dict[str, Admitted] = field(default_factory=dict)
    """Last attempt by task id."""
    attempts: dict[str, list[str]] = field(default_factory=dict)
    """Rollout ids by task id, in order."""
    groups: dict[str, str] = field(default_factory=dict)
    """Group by task id."""
    ended: dict[str, AttemptEnded] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    """Rollout id by task id: of the last attempt that finished."""
    waiting: dict[str, tuple[int, Rollout]] = field(default_factory=dict)
    """Position and rollout by rollout id: what finished, can be trained, and is not consumed; also if dropped later."""
    untrainable: dict[str, Fate] = field(default_factory=dict)
    """Why a finished rollout is not in `waiting`, by rollout id."""
    dropped: dict[str, str] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)
    highest_version: int = -1
    next_position: int = 0
    steps: list[TrainedStep] = field(default_factory=list)

    def take(self, record: Record) -> None:
        """Enter a record."""
        match record:
            case Admitted():
                self.cursor = max(self.cursor, record.cursor)
                self.admissions[record.task.id] = record
                self._attempt(record.task.id, record.rollout_id, record.group_id)
            case AttemptEnded():
                self.ended[record.rollout_id] = record
            case Finished():
                self._finish(record)
            case Dropped():
                self.dropped[record.rollout_id] = record.reason
            case Published():
                self._version(record.snapshot.version, record.snapshot.parent)
            case Trained():
                numbers = {"step": record.step, "version": record.version, "parent": record.parent}
                self.take_trained(TrainedStep(**numbers, rollout_ids=record.rollout_ids))

    def take_trained(self, trained: TrainedStep) -> None:
        """Enter a step."""
        self.steps.append(trained)
        if trained.version != trained.parent:
            self._version(trained.version, trained.parent)

    def take_consumed(self, fields: Mapping[str, Any]) -> bool:
        """Enter a finished rollout that was consumed, by its header; False where that does not say enough."""
        rollout, position = fields["rollout"], fields.get("position")
        names = [rollout.get(name) for name in ("task_id", "id", "group_id")]
        if not isinstance(position, int) or not all(isinstance(name, str) for name in names):
            return False
        self._attempt(*names)
        self.finished[rollout["task_id"]] = rollout["id"]
        self.untrainable[rollout["id"]] = Fate.TRAINED
        self.next_position = max(self.next_position, position + 1)
        return True

    def _attempt(self, task_id: str, rollout_id: str, group_id: str) -> None:
        self.groups.setdefault(task_id, group_id)
        attempts = self.attempts.setdefault(task_id, [])
        if rollout_id not in attempts:
            attempts.append(rollout_id)

    def _finish(self, record: Finished) -> None:
        rollout = record.rollout
        # The admission may have been lost to damage.
        self._attempt(rollout.task_id, rollout.id, rollout.group_id)
        self.finished[rollout.task_id] = rollout.id
        self.next_position = max(self.next_position, record.position + 1)
        self.highest_version = max(
            self.highest_version, *(int(s.policy_versions.max(initial=-1)) for s in rollout.sequences), -1
        )
        if not rollout.trainable:
            infrastructure = rollout.failure is FailureKind.INFRASTRUCTURE
            self.untrainable[rollout.id] = Fate.INFRASTRUCTURE_FAILURE if infrastructure else Fate.DROPPED
        else:
            self.waiting[rollout.id] = (record.position, rollout)

    def _version(self, version: int, parent: int | None) -> None:
        self.highest_version = max(self.highest_version, version)
        if version >= 0 and (parent is None or parent < version):
            self.parents.setdefault(version, parent)


def replay(
    folder: Path,
    *,
    consumed: Collection[str] | None = None,
    step: int | None = None,
    version: int | None = None,
    ended: bool = False,
) -> LogState:
    """Read a log into the present, read-only; damage is counted, never raised.

    consumed, step, version: of the checkpoint to go on from. Trained records beyond it are void: a later step, a
        version that is no ancestor of `version`, rollouts that are not among the consumed. Without a checkpoint the log
        speaks for itself: a step number that comes again voids all steps from it on that were logged before.
    ended: whether the run came to its end, so that what is neither finished nor failed is unfinished for good.
    """
    if consumed is None:
        steps = _newest_branch(_read(LogContents(folder), None).steps)
        ids = frozenset(rollout_id for trained in steps for rollout_id in trained.rollout_ids)
        contents = LogContents(folder)
        history = _read(contents, ids)
    else:
        ids = frozenset(consumed)
        contents = LogContents(folder)
        history = _read(contents, ids)
        steps = _surviving(history, ids, step, version)
    return _state(history, ids, steps, ended, contents.quarantined)


def _read(contents: LogContents, consumed: frozenset[str] | None) -> _History:
    """Take every record in. Only rollouts that may be waiting are unpacked: none of them where `consumed` is None."""
    history = _History()
    for frame in contents.frames():
        if frame.kind == "trained":
            # The tokens of a step are its largest part, and nothing here needs them.
            names = ("step", "version", "parent")
            if all(isinstance(frame.fields.get(name), int) for name in names) and "rollout_ids" in frame.fields:
                numbers = {name: frame.fields[name] for name in names}
                history.take_trained(TrainedStep(**numbers, rollout_ids=tuple(frame.fields["rollout_ids"])))
                continue
        elif frame.kind == "finished":
            rollout = frame.fields.get("rollout", {})
            if consumed is None or (rollout.get("id") in consumed and history.take_consumed(frame.fields)):
                continue
        record = contents.decode(frame)
        if record is not None:
            history.take(record)
    return history


def _newest_branch(steps: list[TrainedStep]) -> list[TrainedStep]:
    """A step number that comes again is a resume from before it: what it repeats, and all after, is void."""
    surviving: list[TrainedStep] = []
    for trained in steps:
        while surviving and surviving[-1].step >= trained.step:
            surviving.pop()
        surviving.append(trained)
    return surviving


def _surviving(history: _History, consumed: frozenset[str], step: int | None, version: int | None) -> list[TrainedStep]:
    """Steps on the path to the checkpoint; of two with one number the later."""
    tree = VersionTree(history.parents)
    by_step = {
        trained.step: trained
        for trained in history.steps
        if (step is None or trained.step <= step)
        and (version is None or tree.is_ancestor(trained.version, version))
        and consumed.issuperset(trained.rollout_ids)
    }
    return [by_step[number] for number in sorted(by_step)]


def _state(
    history: _History, consumed: frozenset[str], steps: list[TrainedStep], ended: bool, quarantined: int
) -> LogState:
    fates = {task_id: _fate(history, task_id, consumed, ended) for task_id in history.groups}
    pending = (Fate.INTERRUPTED, Fate.UNFINISHED)
    lost = (Fate.DROPPED, Fate.INFRASTRUCTURE_FAILURE)
    waiting = sorted(
        (
            history.waiting[rollout_id]
            for task_id, rollout_id in history.finished.items()
            if fates[task_id] is Fate.WAITING
        ),
        key=lambda entry: entry[0],
    )
    return LogState(
        cursor=history.cursor,
        waiting=tuple(rollout for _, rollout in waiting),
        interrupted=tuple(admitted for task_id, admitted in history.admissions.items() if fates[task_id] in pending),
        versions=VersionTree(history.parents),
        highest_version=history.highest_version,
        next_position=history.next_position,
        fates=fates,
        last_attempts={task_id: attempts[-1] for task_id, attempts in history.attempts.items()},
        steps=tuple(steps),
        drop_reasons=history.dropped,
        infrastructure_failures=_infrastructure_failures(history),
        groups=tuple(dict.fromkeys(history.groups.values())),
        broken_groups=frozenset(
            group for task_id, group in history.groups.items() if group != task_id and fates[task_id] in lost
        ),
        quarantined=quarantined,
    )


def _infrastructure_failures(history: _History) -> dict[str, int]:
    failed = {rollout_id for rollout_id, end in history.ended.items() if end.failure is FailureKind.INFRASTRUCTURE}
    counts = {task_id: sum(map(failed.__contains__, attempts)) for task_id, attempts in history.attempts.items()}
    return {task_id: count for task_id, count in counts.items() if count}


def _fate(history: _History, task_id: str, consumed: frozenset[str], ended: bool) -> Fate:
    attempts = history.attempts[task_id]
    if any(rollout_id in consumed for rollout_id in attempts):
        return Fate.TRAINED
    end = history.ended.get(attempts[-1])
    if end is not None and not end.retried and end.failure is FailureKind.INFRASTRUCTURE:
        return Fate.INFRASTRUCTURE_FAILURE
    if any(rollout_id in history.dropped for rollout_id in attempts) or (end is not None and not end.retried):
        return Fate.DROPPED
    finished = history.finished.get(task_id)
    if finished is not None:
        return Fate.WAITING if finished in history.waiting else history.untrainable[finished]
    return Fate.UNFINISHED if ended else Fate.INTERRUPTED
