"""From the loop to a checkpoint, and from a run folder to the start of the loop.

The newest checkpoint says what was consumed, the log all the rest.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sao.clock import Clock
from sao.evaluate import OVERALL_MEAN
from sao.loop import Evaluated, Start
from sao.models.load import add_tokenizer
from sao.pipeline.accounts import NO_TRIES_LEFT, UNTRAINABLE
from sao.pipeline.admission import Member
from sao.store.files import read_json_lines
from sao.store.records import Admitted
from sao.store.replay import LogState, replay
from sao.store.run_folder import Checkpoint, Manifest, RunFolder
from sao.training.protocol import Trainer


async def commit_run(folder: RunFolder, trainer: Trainer, manifest: Manifest, clock: Clock, tokenizer: Path) -> None:
    """Save the trainer, its actor with the tokenizer, and rename the checkpoint into place."""
    draft = folder.begin_checkpoint(manifest.step)
    state = draft / "trainer"
    state.mkdir()
    await trainer.save(str(state))

    def finish() -> None:
        add_tokenizer(state / "actor", tokenizer)
        folder.commit_checkpoint(draft, manifest)

    # Checksums and syncing of a large model take seconds, which the loop must not.
    await clock.external(finish, cost=0.0)


def uncommitted(checkpoint: Checkpoint | None, folder: RunFolder) -> Manifest | None:
    """Where training begins, unless the newest commit says so; once it is committed every resume goes on from it.

    In a new run that is after the stages before training; later, a checkpoint that was chosen over the newest.
    """
    if checkpoint is None:
        return Manifest(step=0, version=0, consumed=(), cursor=0)
    newest = folder.checkpoint_paths()[-1:]
    return None if any(map(checkpoint.path.samefile, newest)) else checkpoint.manifest


def start_from(checkpoint: Checkpoint, folder: RunFolder, *, group_size: int) -> Start:
    """Where the loop goes on after `checkpoint`: nothing finished is lost, nothing consumed comes again."""
    manifest = checkpoint.manifest
    state = replay(folder.log, consumed=manifest.consumed, step=manifest.step, version=manifest.version)
    _check_whole(state, checkpoint, folder)
    pending = [_again(record, state) for record in state.interrupted]
    evaluations = [row for row in read_json_lines(folder.metrics).rows if row.get("stage") == "eval"]
    return Start(
        step=manifest.step,
        version=manifest.version,
        edges=_edges(state, manifest),
        highest=max(state.highest_version, manifest.version),
        cursor=max(manifest.cursor, _cursor(state)),
        position=state.next_position,
        pending=(*pending, *_never_admitted(state, pending, group_size)),
        finished=state.waiting,
        groups=state.groups,
        consumed=manifest.consumed,
        baseline=dict(manifest.baseline),
        accounts=_accounts(state, manifest),
        quarantined=state.quarantined,
        evaluated=_evaluated(evaluations, manifest),
        evaluations=_means(evaluations, manifest),
    )


def _check_whole(state: LogState, checkpoint: Checkpoint, folder: RunFolder) -> None:
    """Raise ValueError if rollouts are missing from the log and no damaged record explains it."""
    consumed = checkpoint.manifest.consumed
    missing = [name for name in consumed if name.rpartition("@")[0] not in state.fates]
    if len(missing) > state.quarantined:
        raise ValueError(
            f"{len(missing)} of the {len(consumed)} rollouts that {checkpoint.path} consumed, such as {missing[0]}, "
            f"are not in {folder.log}: segments were deleted or emptied. Put them back; or start a new run from the "
            f"weights, with model.path = {checkpoint.path / 'trainer' / 'actor'}"
        )


def _cursor(state: LogState) -> int:
    """Tasks taken. The last admission may be lost to damage while the rollout that it led to is not."""
    return max(state.cursor, len(state.groups))


def _edges(state: LogState, manifest: Manifest) -> tuple[tuple[int, int | None], ...]:
    """The version tree; a version whose record was lost to damage is taken for a child of the one before it."""
    parents = dict(state.versions.parents)
    sampled = {
        int(version)
        for rollout in state.waiting
        for sequence in rollout.sequences
        for version in sequence.policy_versions[sequence.action_mask]
    }
    for version in sorted(sampled | {manifest.version}):
        if version not in parents:
            parents[version] = max((known for known in parents if known < version), default=None)
    return tuple(sorted(parents.items()))


def _accounts(state: LogState, manifest: Manifest) -> dict[str, int]:
    """What became of all rollouts, by the log; what it does not know is the checkpoint's."""
    fates, reasons = state.counts, list(state.drop_reasons.values())
    failures = sum(state.infrastructure_failures.values())
    return {
        **{name: int(count) for name, count in manifest.accounts.items()},
        "admitted": len(state.fates),
        "finished": state.next_position,
        "trained": fates["trained"],
        "dropped": sum(reason not in (UNTRAINABLE, NO_TRIES_LEFT) for reason in reasons),
        "untrainable": reasons.count(UNTRAINABLE),
        "infrastructure_failures": failures,
        "retried": failures - fates["infrastructure_failure"],
    }


def _evaluated(evaluations: Iterable[Mapping[str, Any]], manifest: Manifest) -> Evaluated:
    wanted = (manifest.step, manifest.version)
    rows = [row for row in evaluations if (row.get("step"), row.get("version")) == wanted]
    if not rows:
        return "never"
    # Rows of before it was kept count as at an end, so that resuming a finished run repeats nothing.
    return "at an end" if any(row.get("eval/at_an_end", 1) for row in rows) else "between"


def _means(evaluations: Iterable[Mapping[str, Any]], manifest: Manifest) -> dict[int, float]:
    """By step; an evaluation that was made again counts as it was the last time."""
    known = (row for row in evaluations if OVERALL_MEAN in row)
    means = {row["step"]: row[OVERALL_MEAN] for row in known if row["step"] <= manifest.step}
    # A file of JSON says null where there was no mean.
    return {step: math.nan if mean is None else mean for step, mean in means.items()}


def _again(record: Admitted, state: LogState) -> Member:
    return Member(
        task=record.task,
        group_id=record.group_id,
        index=_index(record.task.id),
        attempt=record.attempt + 1,
        cursor=record.cursor,
        admitted=record.clock_seconds,
        failures=state.infrastructure_failures.get(record.task.id, 0),
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
        if member.group_id in state.broken_groups or member.key == member.group_id:
            continue
        for index in range(group_size):
            task_id = f"{member.group_id}#{index}"
            if task_id not in known.get(member.group_id, ()):
                fresh = replace(member, task=replace(member.task, id=task_id), index=index, attempt=0, failures=0)
                missing.append(fresh)
    return missing
