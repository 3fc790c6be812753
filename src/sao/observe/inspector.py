"""Rollouts of a run folder as text: which there are, and one of them token by token. Works on a dead run's folder.

A rollout that the loop took is a `finished` record of the log; an attempt that it played again, or gave up, is one of
`attempt_ended`. Both hold tokens, and both are shown.
"""

import difflib
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sao.observe.run_data import ages_of
from sao.store.log import read
from sao.store.records import AttemptEnded, Finished, TokenRecord, Trained
from sao.store.replay import Fate, LogState, TrainedStep, replay
from sao.store.run_folder import RunFolder
from sao.types import Rollout, Sequence

Decode = Callable[[int], str]
"""The text of one token id."""

_ENDS, _ENDED = ("finished", "attempt_ended"), (Finished, AttemptEnded)
"""Kinds and classes of the records that hold a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """A rollout in one line."""

    id: str
    """Task and attempt, as `inspect_rollout` takes it."""
    reward: float
    """Sum over its tokens."""
    turns: int
    """Turns of its longest sequence."""
    tokens: int
    """Tokens over all sequences, sampled and observed."""
    action_tokens: int
    """Those that the policy sampled."""
    stop: str
    """Value of its StopReason."""
    failure: str
    """Value of its FailureKind; "none" where nothing went wrong."""
    fate: str
    """Of its task; "retried" if another attempt at it came after."""
    step: int | None
    """The step of the surviving history that trained it."""
    age: float | None
    """Mean age of its action tokens when it was trained, in actor updates."""
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    """What its environment found beside the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedToken:
    """Everything known of one token; None where nobody wrote it."""

    index: int
    """Place in its sequence, from 0."""
    token_id: int
    """As the model knows it."""
    text: str
    """Its piece of text on one line; the id in angle brackets without a decoder."""
    action: bool
    """Whether the policy sampled it."""
    turn: int
    """Turn that it belongs to, from 0."""
    reward: float
    """What it earned; 0 off actions."""
    version: int | None = None
    """Policy version that sampled it."""
    rollout_logprob: float | None = None
    """Log-prob (nats) recorded when it was sampled."""
    actor_logprob: float | None = None
    """Log-prob (nats) under the weights that computed the loss."""
    ratio: float | None = None
    """exp(actor_logprob - rollout_logprob), at most e^50."""
    mask: str = ""
    """ "kept", or the side on which the loss cut it off: "low" or "high"; "" where that is not known."""
    value: float | None = None
    """The critic's estimate before the step's updates; NaN without a critic."""
    advantage: float | None = None
    """As the loss took it, whitened if the configuration says so."""
    returned: float | None = None
    """The critic's target."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FailedAttempt:
    """Another attempt at a rollout's task, which ended without a rollout to train on."""

    rollout_id: str
    """Its own id, which `inspect_rollout` takes too."""
    failure: str
    """Value of its FailureKind, and what went wrong."""
    retried: bool
    """Whether the task was to be played again."""
    rollout: Rollout | None
    """What there was of it; None in logs of before it was kept."""
    sequences: tuple[tuple[InspectedToken, ...], ...]
    """Its tokens, by sequence; what only training computes is None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InspectedRollout:
    """A rollout with what its training step computed."""

    rollout: Rollout
    """As the log holds it."""
    summary: RolloutSummary
    """The same in one line."""
    sequences: tuple[tuple[InspectedToken, ...], ...]
    """Its tokens, by sequence."""
    failed_attempts: tuple[FailedAttempt, ...] = ()
    """The task's other attempts that failed, in the order in which they ended."""


def summarise(folder: Path | str) -> Iterator[RolloutSummary]:
    """All rollouts of a run folder, failed attempts too, as they ended. Raises ValueError if it is no run folder."""
    log = RunFolder.open(folder).log
    state = replay(log)
    steps = {rollout_id: step for step in state.steps for rollout_id in step.rollout_ids}
    for record in _ended(log):
        if record.rollout is not None:
            yield _summary(record.rollout, state, steps.get(record.rollout.id))


def inspect_rollout(folder: Path | str, rollout_id: str, *, decode: Decode | None = None) -> InspectedRollout:
    """One rollout, token by token. Raises ValueError if there is no such rollout, naming those with a similar id."""
    run = RunFolder.open(folder)
    state = replay(run.log)
    step = next((step for step in state.steps if rollout_id in step.rollout_ids), None)
    found: Rollout | None = None
    trained: tuple[TokenRecord, ...] = ()
    contents, seen = read(run.log), list[str]()
    for frame in contents.frames():
        if frame.kind in _ENDS:
            name = frame.fields.get("rollout", {}).get("id")
            seen.append(str(name))
            record = contents.decode(frame) if name == rollout_id else None
            found = record.rollout if isinstance(record, _ENDED) and record.rollout is not None else found
        elif frame.kind == "trained" and step is not None and _is_step(frame.fields, step):
            record = contents.decode(frame)
            if isinstance(record, Trained) and record.tokens:
                trained = record.tokens[record.rollout_ids.index(rollout_id)]
    if found is None:
        close = difflib.get_close_matches(rollout_id, seen, n=3, cutoff=0.3) or seen[:3]
        hint = f"Close to it: {', '.join(close)}" if close else "The log holds no rollout yet"
        raise ValueError(f"no rollout {rollout_id!r} in {run.log}. {hint}; `sao inspect {run.path}` lists all")
    algorithm = _algorithm(run.config)
    parts = trained or (None,) * len(found.sequences)
    return InspectedRollout(
        rollout=found,
        summary=_summary(found, state, step),
        sequences=tuple(
            _tokens(sequence, part, algorithm, decode) for sequence, part in zip(found.sequences, parts, strict=False)
        ),
        failed_attempts=tuple(_other_attempts(run.log, found, decode)),
    )


def format_summaries(summaries: Iterator[RolloutSummary] | list[RolloutSummary]) -> Iterator[str]:
    """A header, then a line per rollout."""
    yield f"{'rollout':<28} {'reward':>7} {'turns':>5} {'tokens':>7} {'acted':>6} {'step':>5} {'age':>5}  ending"
    for row in summaries:
        step = "-" if row.step is None else str(row.step)
        ending = row.stop + (f", {row.failure} failure" if row.failure != "none" else "")
        if row.step is None:
            ending += f" ({row.fate.replace('_', ' ')})"
        ending += _marks_text(row.marks)
        yield (
            f"{row.id:<28} {row.reward:>7.3f} {row.turns:>5} {row.tokens:>7} {row.action_tokens:>6} "
            f"{step:>5} {_cell(row.age, '.1f'):>5}  {ending}"
        )


def format_rollout(inspected: InspectedRollout, *, every_token: bool = False) -> Iterator[str]:
    """Lines of text: action tokens one by one; observations as one line a run of them, or all tokens likewise."""
    rollout, row = inspected.rollout, inspected.summary
    trained = "not trained" if row.step is None else f"trained in step {row.step} at mean age {_cell(row.age, '.1f')}"
    yield f"rollout {rollout.id}  prompt {rollout.prompt_id}  attempt {rollout.attempt}  group {rollout.group_id}"
    yield f"reward {row.reward:g}  turns {row.turns}  tokens {row.tokens} ({row.action_tokens} sampled)  {trained}"
    if row.marks:
        yield f"marks:{_marks_text(row.marks)}"
    yield (
        f"ended: {row.stop}  failure: {row.failure}"
        + (f" ({rollout.failure_text})" if rollout.failure_text else "")
        + f"  fate of the task: {row.fate.replace('_', ' ')}"
    )
    yield from _sequence_lines(rollout, inspected.sequences, every_token)
    for attempt in inspected.failed_attempts:
        yield ""
        yield (
            f"failed attempt {attempt.rollout_id}  failure: {attempt.failure}  "
            + ("played again" if attempt.retried else "given up")
        )
        if attempt.rollout is None:
            yield "its tokens are not in the log"
        else:
            part = attempt.rollout
            counts = f"attempt {part.attempt}  tokens {part.num_tokens} ({part.num_action_tokens} sampled)"
            yield counts + _marks_text(part.marks)
            yield from _sequence_lines(part, attempt.sequences, every_token)


def _sequence_lines(
    rollout: Rollout, sequences: tuple[tuple[InspectedToken, ...], ...], every_token: bool
) -> Iterator[str]:
    for index, tokens in enumerate(sequences):
        sequence = rollout.sequences[index]
        if len(sequences) > 1:
            origin = "" if sequence.parent is None else f", from sequence {sequence.parent} at {sequence.branch_at}"
            yield f"sequence {index}{origin}"
        yield (
            f"{'token':>6} {'turn':>4} {'version':>7} {'sampled':>8} {'trained':>8} {'ratio':>7} {'mask':>5} "
            f"{'value':>7} {'advant.':>7} {'return':>7}  text"
        )
        yield from _token_lines(tokens, every_token)


def _token_lines(tokens: tuple[InspectedToken, ...], every_token: bool) -> Iterator[str]:
    start = 0
    while start < len(tokens):
        first, end = tokens[start], start + 1
        if first.action:
            yield _action_line(first)
        else:
            while not every_token and end < len(tokens) and not tokens[end].action and tokens[end].turn == first.turn:
                end += 1
            text = "".join(token.text for token in tokens[start:end])
            count = f"{end - start} observed" if end - start > 1 else "observed"
            yield f"{first.index:>6} {first.turn:>4} {count:>65}  {text}"
        start = end


def _action_line(token: InspectedToken) -> str:
    reward = f"   reward {token.reward:g}" if token.reward else ""
    return (
        f"{token.index:>6} {token.turn:>4} {_cell(token.version, 'd'):>7} {_cell(token.rollout_logprob, '.3f'):>8} "
        f"{_cell(token.actor_logprob, '.3f'):>8} {_cell(token.ratio, '.3f'):>7} {token.mask or '-':>5} "
        f"{_cell(token.value, '.3f'):>7} {_cell(token.advantage, '.3f'):>7} {_cell(token.returned, '.3f'):>7}  "
        f"{token.text}{reward}"
    )


def _marks_text(marks: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.4g}" for name, value in marks.items())


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _is_step(fields: Mapping[str, Any], step: TrainedStep) -> bool:
    same = (fields.get("step"), fields.get("version")) == (step.step, step.version)
    return same and tuple(fields.get("rollout_ids", ())) == step.rollout_ids


def _ended(log: Path, kinds: tuple[str, ...] = _ENDS) -> Iterator[Finished | AttemptEnded]:
    contents = read(log)
    for frame in contents.frames():
        record = contents.decode(frame) if frame.kind in kinds else None
        if isinstance(record, _ENDED):
            yield record


def _other_attempts(log: Path, rollout: Rollout, decode: Decode | None) -> Iterator[FailedAttempt]:
    for record in _ended(log, ("attempt_ended",)):
        if isinstance(record, Finished) or record.rollout_id == rollout.id:
            continue
        part = record.rollout
        if rollout.task_id == (record.rollout_id.rpartition("@")[0] if part is None else part.task_id):
            yield FailedAttempt(
                rollout_id=record.rollout_id,
                failure=record.failure.value + (f" ({record.failure_text})" if record.failure_text else ""),
                retried=record.retried,
                rollout=part,
                sequences=() if part is None else tuple(_tokens(each, None, {}, decode) for each in part.sequences),
            )


def _summary(rollout: Rollout, state: LogState, step: TrainedStep | None) -> RolloutSummary:
    age = None
    if step is not None and rollout.num_action_tokens:
        versions = np.concatenate([s.policy_versions[s.action_mask] for s in rollout.sequences])
        age = float(ages_of(versions, step.parent, state).mean())
    last = state.last_attempts.get(rollout.task_id, rollout.id)
    fate = state.fates.get(rollout.task_id, Fate.WAITING)
    return RolloutSummary(
        id=rollout.id,
        reward=rollout.reward,
        turns=rollout.num_turns,
        tokens=rollout.num_tokens,
        action_tokens=rollout.num_action_tokens,
        stop=rollout.stop_reason.value,
        failure=rollout.failure.value,
        fate="retried" if step is None and last != rollout.id else fate.value,
        step=None if step is None else step.step,
        age=age,
        marks=rollout.marks,
    )


def _algorithm(config: Path) -> Mapping[str, Any]:
    try:
        loaded = tomllib.loads(config.read_text(encoding="utf-8")).get("algorithm", {})
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def mask_decision(ratio: float, advantage: float, algorithm: Mapping[str, Any]) -> str:
    """What the loss of a configuration did with a token: "kept", "low", "high", or "" where it is not known.

    dis keeps ratio_low < ratio < ratio_high; icepop keeps the closed band; PPO's clip cuts off a ratio below its band
    where the advantage is negative, and one above where it is positive.
    """
    try:
        match algorithm.get("policy_loss"):
            case "none":
                return "kept"
            case "dis":
                low, high = ratio <= algorithm["ratio_low"], ratio >= algorithm["ratio_high"]
            case "icepop":
                low, high = ratio < algorithm["ratio_low"], ratio > algorithm["ratio_high"]
            case "ppo_clip":
                low = ratio < algorithm["clip_ratio_low"] and advantage < 0
                high = ratio > algorithm["clip_ratio_high"] and advantage > 0
            case _:
                return ""
    except (KeyError, TypeError):
        return ""
    return "low" if low else "high" if high else "kept"


def _tokens(
    sequence: Sequence, trained: TokenRecord | None, algorithm: Mapping[str, Any], decode: Decode | None
) -> tuple[InspectedToken, ...]:
    if trained is not None and len(trained.values) != len(sequence.token_ids):
        trained = None
    return tuple(_token(sequence, trained, index, algorithm, decode) for index in range(len(sequence.token_ids)))


def _token(
    sequence: Sequence, trained: TokenRecord | None, index: int, algorithm: Mapping[str, Any], decode: Decode | None
) -> InspectedToken:
    token_id, action = int(sequence.token_ids[index]), bool(sequence.action_mask[index])
    text = _visible(decode(token_id)) if decode else f"<{token_id}>"
    turn, reward = int(sequence.turns[index]), float(sequence.rewards[index])
    if not action:
        return InspectedToken(index=index, token_id=token_id, text=text, action=False, turn=turn, reward=reward)
    sampled = float(sequence.rollout_logprobs[index])
    known: dict[str, Any] = {}
    if trained is not None:
        actor, advantage = float(trained.actor_logprobs[index]), float(trained.advantages[index])
        ratio = math.exp(min(actor - sampled, 50.0))
        known = {
            "actor_logprob": actor,
            "ratio": ratio,
            "mask": mask_decision(ratio, advantage, algorithm),
            "value": float(trained.values[index]),
            "advantage": advantage,
            "returned": float(trained.returns[index]),
        }
    return InspectedToken(
        index=index,
        token_id=token_id,
        text=text,
        action=True,
        turn=turn,
        reward=reward,
        version=int(sequence.policy_versions[index]),
        rollout_logprob=sampled,
        **known,
    )


def _visible(text: str) -> str:
    """On one line, with nothing that moves a terminal's cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
