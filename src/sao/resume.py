"""From a run folder to the start of the loop: the newest checkpoint says what was consumed, the log all the rest."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sao.loop import Start
from sao.pipeline.admission import Member
from sao.store.records import Admitted
from sao.store.replay import LogState, replay
from sao.store.run_folder import Checkpoint


def start_from(checkpoint: Checkpoint, log: Path, *, group_size: int) -> Start:
    """Where the loop goes on after `checkpoint`: nothing finished is lost, nothing consumed comes again."""
    manifest = checkpoint.manifest
    state = replay(log, consumed=manifest.consumed, step=manifest.step, version=manifest.version)
    pending = [_again(record) for record in state.interrupted]
    edges = tuple(sorted(state.versions.parents.items())) or ((manifest.version, None),)
    return Start(
        step=manifest.step,
        version=manifest.version,
        edges=edges,
        highest=max(state.highest_version, manifest.version),
        cursor=state.cursor,
        position=state.next_position,
        pending=(*pending, *_never_admitted(state, pending, group_size)),
        finished=state.waiting,
        consumed=manifest.consumed,
        baseline=dict(manifest.baseline),
        accounts={name: int(count) for name, count in manifest.counters.items()},
    )


def _again(record: Admitted) -> Member:
    return Member(
        task=record.task,
        group_id=record.group_id,
        index=_index(record.task.id),
        attempt=record.attempt + 1,
        cursor=record.cursor,
        admitted=record.clock_seconds,
    )


def _index(task_id: str) -> int:
    _, separator, index = task_id.rpartition("#")
    return int(index) if separator and index.isdigit() else 0


def _never_admitted(state: LogState, pending: Iterable[Member], group_size: int) -> list[Member]:
    """Members of a group whose admission a crash cut in the middle: the rest of it is admitted now."""
    if group_size == 1:
        return []
    known: dict[str, set[str]] = {}
    for task_id in state.fates:
        known.setdefault(task_id.rpartition("#")[0], set()).add(task_id)
    missing: list[Member] = []
    for member in {member.group_id: member for member in pending}.values():
        if member.group_id in state.broken_groups:
            continue
        for index in range(group_size):
            task_id = f"{member.group_id}#{index}"
            if task_id not in known[member.group_id]:
                missing.append(replace(member, task=replace(member.task, id=task_id), index=index, attempt=0))
    return missing
