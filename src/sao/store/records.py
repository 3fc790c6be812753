"""What the durable log says, one record a fact. Records are never updated; nothing is pickled."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sao.store.frames import Array, Frame
from sao.types import FailureKind, FloatArray, Rollout, Sequence, Snapshot, StopReason, Task, Timings

_SEQUENCE_ARRAYS = ("token_ids", "action_mask", "rollout_logprobs", "policy_versions", "rewards", "turns")
_TOKEN_ARRAYS = ("actor_logprobs", "values", "advantages", "returns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """An attempt at a task is about to start. Members of a group have a task id each, and share `group_id`."""

    task: Task
    """Whole, so that a resumed run can play it again without its source."""
    cursor: int
    """Tasks taken from the source, this one included: where a resumed run goes on. A retry repeats its task's."""
    rollout_id: str
    """Task's id and attempt: `task@attempt`."""
    group_id: str
    """The task's id for single rollouts."""
    attempt: int
    """0 for the first try."""
    seed: int
    """Keys every draw of the attempt: 64 bits."""
    clock_seconds: float
    """Seconds of the run's clock at admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    """An attempt ended without a rollout to train on."""

    rollout_id: str
    """As it was admitted."""
    failure: FailureKind
    """Whose fault it was."""
    failure_text: str
    """What went wrong, for people."""
    retried: bool
    """Whether the task is to be admitted again; False means that it is lost for good."""
    rollout: Rollout | None = None
    """What there was of it, for people to read; None in logs of before it was kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """A rollout came to its end."""

    rollout: Rollout
    """All tokens with what was recorded of them."""
    position: int
    """Place in the order of completion: 0, 1, ... over the whole life of the run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A rollout, running or finished, that will never be trained."""

    rollout_id: str
    """As it was admitted; the tokens of one that had finished stay in the log."""
    reason: str
    """Counted by it: "over_age: more than <n> updates", "its group lost <rollout id>", "its group is incomplete after
    resume", or why the rollout itself was lost: UNTRAINABLE or NO_TRIES_LEFT of pipeline.accounts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """New weights; durable before any engine loads them."""

    snapshot: Snapshot
    """Its folder may be deleted later; version and parent hold for good."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """What a step computed for one sequence: arrays of shape (T,), entry t about token t, 0 off actions."""

    actor_logprobs: FloatArray
    """Under the weights that computed the loss, before the update."""
    values: FloatArray
    """NaN where there is no critic."""
    advantages: FloatArray
    """As the loss took them, whitened if the configuration says so."""
    returns: FloatArray
    """Targets of the critic."""

    def __post_init__(self) -> None:
        length = len(self.actor_logprobs)
        for name in _TOKEN_ARRAYS:
            if getattr(self, name).shape != (length,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, but the sequence has {length} tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """A step consumed these rollouts. Void when the step lies on a dead branch (see `replay`)."""

    step: int
    """Number in its branch: 1, 2, ... A resume may use it again."""
    version: int
    """What the step made; equal to `parent` when the actor was not updated."""
    parent: int
    """The version whose weights computed the loss."""
    rollout_ids: tuple[str, ...]
    """In the order of the batch."""
    tokens: tuple[tuple[TokenRecord, ...], ...]
    """Per rollout, per sequence; empty where the step kept none."""

    def __post_init__(self) -> None:
        if self.tokens and len(self.tokens) != len(self.rollout_ids):
            raise ValueError(f"step {self.step} trained {len(self.rollout_ids)} rollouts, tokens of {len(self.tokens)}")


Record = Admitted | AttemptEnded | Finished | Dropped | Published | Trained


def to_frame(record: Record) -> Frame:
    """The record as a frame; every number comes back bit for bit."""
    match record:
        case Finished():
            fields, arrays = _rollout_to_fields(record.rollout)
            return Frame(kind="finished", fields={"position": record.position, "rollout": fields}, arrays=arrays)
        case Trained():
            return _trained_to_frame(record)
        case Admitted():
            fields = {name: getattr(record, name) for name in ("cursor", "rollout_id", "group_id", "attempt", "seed")}
            task = {name: getattr(record.task, name) for name in Task.__dataclass_fields__}
            task["details"] = dict(record.task.details)
            return Frame(
                kind="admitted", fields=fields | {"clock_seconds": record.clock_seconds, "task": task}, arrays={}
            )
        case AttemptEnded():
            return _attempt_to_frame(record)
        case Dropped():
            return Frame(kind="dropped", fields=asdict(record), arrays={})
        case Published():
            return Frame(kind="published", fields=asdict(record.snapshot), arrays={})


def from_frame(frame: Frame) -> Record:
    """The record of a frame. Raises ValueError, KeyError or TypeError where the frame is none of ours."""
    read = _READERS.get(frame.kind)
    if read is None:
        raise ValueError(f"unknown kind of record {frame.kind!r}")
    return read(frame.fields, frame.arrays)


def _concatenate(parts: Iterable[Array], empty: Array) -> Array:
    listed = list(parts)
    return np.concatenate(listed) if listed else empty


def _split(array: Array, lengths: list[int]) -> list[Array]:
    if sum(lengths) != len(array):
        raise ValueError(f"{len(array)} entries cannot be split into sequences of {lengths}")
    ends = np.cumsum(lengths, dtype=np.int64)
    return [array[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _rollout_to_fields(rollout: Rollout) -> tuple[dict[str, Any], dict[str, Array]]:
    fields = {
        "id": rollout.id,
        "task_id": rollout.task_id,
        "prompt_id": rollout.prompt_id,
        "group_id": rollout.group_id,
        "attempt": rollout.attempt,
        "stop_reason": rollout.stop_reason.value,
        "failure": rollout.failure.value,
        "failure_text": rollout.failure_text,
        "timings": asdict(rollout.timings),
        "data_set": rollout.data_set,
        "marks": dict(rollout.marks),
        "sequences": [[len(s.token_ids), s.parent, s.branch_at, s.continues_parent] for s in rollout.sequences],
    }
    # One array over all sequences: a rollout of many branches keeps a short header, and it compresses better.
    arrays = {
        name: _concatenate((getattr(sequence, name) for sequence in rollout.sequences), np.zeros(0, np.int32))
        for name in _SEQUENCE_ARRAYS
    }
    return fields, arrays


def _rollout_from_fields(fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> Rollout:
    lengths = [int(entry[0]) for entry in fields["sequences"]]
    columns = {name: _split(arrays[name], lengths) for name in _SEQUENCE_ARRAYS}
    sequences = tuple(
        Sequence(
            **{name: columns[name][index] for name in _SEQUENCE_ARRAYS},
            parent=parent,
            branch_at=branch_at,
            continues_parent=continues_parent,
        )
        for index, (_, parent, branch_at, continues_parent) in enumerate(fields["sequences"])
    )
    return Rollout(
        id=fields["id"],
        task_id=fields["task_id"],
        prompt_id=fields["prompt_id"],
        group_id=fields["group_id"],
        attempt=fields["attempt"],
        sequences=sequences,
        stop_reason=StopReason(fields["stop_reason"]),
        failure=FailureKind(fields["failure"]),
        failure_text=fields["failure_text"],
        timings=Timings(**fields["timings"]),
        data_set=fields["data_set"],
        marks=fields.get("marks", {}),
    )


def _attempt_to_frame(record: AttemptEnded) -> Frame:
    fields: dict[str, Any] = {name: getattr(record, name) for name in ("rollout_id", "failure_text", "retried")}
    fields["failure"] = record.failure.value
    if record.rollout is None:
        return Frame(kind="attempt_ended", fields=fields, arrays={})
    rollout, arrays = _rollout_to_fields(record.rollout)
    return Frame(kind="attempt_ended", fields=fields | {"rollout": rollout}, arrays=arrays)


def _trained_to_frame(record: Trained) -> Frame:
    flat = [tokens for sequences in record.tokens for tokens in sequences]
    fields = {
        "step": record.step,
        "version": record.version,
        "parent": record.parent,
        "rollout_ids": list(record.rollout_ids),
        "lengths": [[len(tokens.actor_logprobs) for tokens in sequences] for sequences in record.tokens],
    }
    arrays = {name: _concatenate((getattr(t, name) for t in flat), np.zeros(0, np.float32)) for name in _TOKEN_ARRAYS}
    return Frame(kind="trained", fields=fields, arrays=arrays)


def _trained(fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> Trained:
    lengths = [int(length) for sequences in fields["lengths"] for length in sequences]
    columns = {name: _split(arrays[name], lengths) for name in _TOKEN_ARRAYS}
    flat = iter([TokenRecord(**{name: columns[name][i] for name in _TOKEN_ARRAYS}) for i in range(len(lengths))])
    return Trained(
        step=fields["step"],
        version=fields["version"],
        parent=fields["parent"],
        rollout_ids=tuple(fields["rollout_ids"]),
        tokens=tuple(tuple(next(flat) for _ in sequences) for sequences in fields["lengths"]),
    )


def _with(fields: Mapping[str, Any], **replaced: Any) -> dict[str, Any]:
    return {**fields, **replaced}


def _admitted(fields: Mapping[str, Any], _: Mapping[str, Array]) -> Admitted:
    return Admitted(**_with(fields, task=Task(**fields["task"])))


def _attempt_ended(fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> AttemptEnded:
    rollout = _rollout_from_fields(fields["rollout"], arrays) if "rollout" in fields else None
    return AttemptEnded(**_with(fields, failure=FailureKind(fields["failure"]), rollout=rollout))


def _finished(fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> Finished:
    return Finished(rollout=_rollout_from_fields(fields["rollout"], arrays), position=fields["position"])


def _dropped(fields: Mapping[str, Any], _: Mapping[str, Array]) -> Dropped:
    return Dropped(**fields)


def snapshot_from(fields: Mapping[str, Any]) -> Snapshot:
    """A snapshot from its JSON fields."""
    probe = {name: tuple(fields[name]) for name in ("probe_token_ids", "probe_logprobs")}
    return Snapshot(**_with(fields, **probe))


def _published(fields: Mapping[str, Any], _: Mapping[str, Array]) -> Published:
    return Published(snapshot=snapshot_from(fields))


_READERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Array]], Record]] = {
    "admitted": _admitted,
    "attempt_ended": _attempt_ended,
    "finished": _finished,
    "dropped": _dropped,
    "published": _published,
    "trained": _trained,
}
