"""What a run folder says, as series and arrays: the one source of report and figures. Read-only; damage is counted."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.store.files import read_json_lines
from sao.store.log import read
from sao.store.records import Finished, Trained
from sao.store.replay import LogState, TrainedStep, replay
from sao.store.run_folder import RunFolder
from sao.types import FloatArray, Rollout

Row = Mapping[str, Any]
Series = NDArray[np.float64]

MAX_ROLLOUTS = 4000
"""Rollouts whose tokens the report looks at, newest first: enough for its histograms, and bounded memory."""


REPLACED = {
    "loop/trainer_restarts": "The trainer was lost, and the run went on from its last commit",
    "loop/worker_restarts": "A rollout process died or hung, and was replaced",
    "engine/taken_out": "An engine replica was taken out",
}
"""Counters of parts that were lost or replaced, and what they count; each begins at 0 when its parts are started."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSample:
    """Action tokens (N,) of the trained rollouts of a run's second half."""

    values: FloatArray
    """NaN without a critic."""
    returns: FloatArray
    """Targets of the critic."""
    positions: FloatArray
    """Place of the token among its rollout's action tokens: 0 the first, 1 the last."""
    ages: FloatArray
    """Actor updates between the version that sampled the token and the one that computed the loss."""
    first_step: int
    """Oldest training step in the sample."""
    last_step: int
    """Newest training step in it."""
    rollouts: int
    """How many the tokens are of."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricRows:
    """What metrics.jsonl says."""

    rows: tuple[Row, ...]
    """Rows of the surviving history: what a resume repeated counts once, in its last form."""
    broken_lines: int
    """Lines that are no JSON object: torn by a crash, or damaged."""
    replaced: Mapping[str, int]
    """How many parts of each key of REPLACED were replaced over all starts; those of a history that a resume made void
    count too."""

    def stage(self, stage: str) -> list[Row]:
        """Rows of a stage, in order of their steps."""
        return sorted((row for row in self.rows if row.get("stage") == stage), key=lambda row: row["step"])

    def series(self, key: str, stage: str = "train") -> tuple[Series, Series]:
        """Steps and values of a key, where there is a finite one."""
        found = [(row["step"], row[key]) for row in self.stage(stage) if is_number(row.get(key))]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    def aligned(self, *keys: str) -> tuple[Series, ...]:
        """Steps, and values of several keys, of the training rows that have all of them."""
        rows = [row for row in self.stage("train") if all(is_number(row.get(key)) for key in keys)]
        return tuple(np.array([row[key] for row in rows], dtype=np.float64) for key in ("step", *keys))

    def evaluations(self) -> dict[str, list[Row]]:
        """By data set: rows with step, mean, and what else was measured (low, high, prompts, failed, pass_at_k).

        The row over all data sets is left out where there is only one.
        """
        found: dict[str, list[Row]] = {}
        for row in self.stage("eval"):
            for key in row:
                if key.startswith("eval/") and key.endswith("/mean") and is_number(row[key]):
                    name = key.removeprefix("eval/").removesuffix("/mean")
                    prefix = f"eval/{name}/"
                    values = {other.removeprefix(prefix): row[other] for other in row if other.startswith(prefix)}
                    found.setdefault(name, []).append({"step": row["step"], "version": row.get("version"), **values})
        if len(found) == 2:
            found.pop("overall", None)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunData(MetricRows):
    """Everything the report shows."""

    path: Path
    """The run folder."""
    state: LogState
    """What the log says of every admitted task."""
    tokens: TokenSample | None
    """None where the log holds no trained token."""
    config: Mapping[str, Any]
    """Resolved configuration as nested tables; empty if it cannot be read."""
    environment: Mapping[str, Any]
    """environment.json: machine, versions, time used; empty if it cannot be read."""

    @property
    def name(self) -> str:
        """The configuration's name, or the folder's."""
        return str(self.config.get("name") or self.path.name)


def is_number(value: object) -> bool:
    """Whether a cell of a row holds a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def increments(counter: Series) -> Series:
    """Growth of a counter (N,) from row to row (N,), the first from 0, where training began; a counter that fell was
    restarted at 0."""
    before = np.concatenate([[0.0], counter[:-1]])
    return np.where(counter >= before, counter - before, counter)


def surviving(rows: list[Row]) -> tuple[Row, ...]:
    """Rows without those that a resume made void: a step of a stage that comes again voids its rows from there on, one
    of training evaluations from there on too; of two evaluations of one step the later stands."""
    kept: list[Row] = []
    newest: dict[Any, float] = {}
    for row in rows:
        step, stage = row.get("step"), row.get("stage")
        if not is_number(step):
            continue
        assert isinstance(step, int | float)
        if stage == "eval":
            kept = [old for old in kept if old.get("stage") != stage or old["step"] != step]
        else:
            if step <= newest.get(stage, -math.inf):
                void = ("train", "eval") if stage == "train" else (stage,)
                kept = [old for old in kept if old.get("stage") not in void or old["step"] < step]
            newest[stage] = step
        kept.append(row)
    return tuple(kept)


def read_metrics(path: Path, *, may_lack: bool = False) -> MetricRows:
    """Read a metrics.jsonl or metrics.jsonl.gz, also where it stands alone.

    Raises FileNotFoundError if there is none; with `may_lack` it has no rows then.
    """
    if not may_lack and not path.is_file():
        raise FileNotFoundError(
            f"there are no metrics at {path}; a run folder has metrics.jsonl, what is kept of a run metrics.jsonl.gz"
        )
    lines = read_json_lines(path)
    replaced: dict[str, int] = {}
    for key in REPLACED:
        counter = np.array([row[key] for row in lines.rows if is_number(row.get(key))], dtype=np.float64)
        replaced[key] = int(increments(counter).sum())
    return MetricRows(rows=surviving(list(lines.rows)), broken_lines=lines.broken, replaced=replaced)


def read_run(path: Path | str) -> RunData:
    """Read a run folder, of a run that is alive or dead. Raises ValueError if it is none."""
    folder = RunFolder.open(path)
    # A run writes its first row after its first evaluation or step.
    metrics = read_metrics(folder.metrics, may_lack=True)
    state = replay(folder.log, ended=folder.ended)
    return RunData(
        path=folder.path,
        rows=metrics.rows,
        broken_lines=metrics.broken_lines,
        replaced=metrics.replaced,
        state=state,
        tokens=_sample_tokens(folder.log, state),
        config=_load_toml(folder.config),
        environment=_load_json(folder.environment),
    )


def _load_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _load_json(path: Path) -> Mapping[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _sample_tokens(log: Path, state: LogState) -> TokenSample | None:
    chosen: list[TrainedStep] = []
    count = 0
    for step in reversed(state.steps[len(state.steps) // 2 :]):
        if chosen and count + len(step.rollout_ids) > MAX_ROLLOUTS:
            break
        chosen.append(step)
        count += len(step.rollout_ids)
    wanted = {rollout_id for step in chosen for rollout_id in step.rollout_ids}
    steps = {(step.step, step.version): step for step in chosen}
    rollouts: dict[str, Rollout] = {}
    parts: list[NDArray[np.float32]] = []
    contents = read(log)
    for frame in contents.frames():
        if frame.kind == "finished" and frame.fields.get("rollout", {}).get("id") in wanted:
            record = contents.decode(frame)
            if isinstance(record, Finished):
                rollouts[record.rollout.id] = record.rollout
        elif frame.kind == "trained" and (frame.fields.get("step"), frame.fields.get("version")) in steps:
            record = contents.decode(frame)
            if isinstance(record, Trained):
                parts += _columns(record, rollouts, state)
                for rollout_id in record.rollout_ids:
                    rollouts.pop(rollout_id, None)
    if not parts:
        return None
    values, returns, positions, ages = np.concatenate(parts, axis=1)
    return TokenSample(
        values=values,
        returns=returns,
        positions=positions,
        ages=ages,
        first_step=min(step.step for step in chosen),
        last_step=max(step.step for step in chosen),
        rollouts=len(wanted),
    )


def _columns(record: Trained, rollouts: Mapping[str, Rollout], state: LogState) -> list[NDArray[np.float32]]:
    """Values, returns, positions and ages (4, n) of the action tokens of each rollout of a step."""
    columns: list[NDArray[np.float32]] = []
    for rollout_id, tokens in zip(record.rollout_ids, record.tokens, strict=False):
        rollout = rollouts.get(rollout_id)
        if rollout is None or not rollout.num_action_tokens:
            continue
        lengths = [len(sequence.token_ids) for sequence in rollout.sequences]
        if lengths != [len(part.values) for part in tokens]:
            continue
        masks = [sequence.action_mask for sequence in rollout.sequences]
        pairs = list(zip(tokens, masks, strict=True))
        versions = np.concatenate([s.policy_versions[s.action_mask] for s in rollout.sequences])
        count = len(versions)
        columns.append(
            np.stack(
                [
                    np.concatenate([part.values[mask] for part, mask in pairs]),
                    np.concatenate([part.returns[mask] for part, mask in pairs]),
                    np.arange(count, dtype=np.float32) / max(count - 1, 1),
                    ages_of(versions, record.parent, state),
                ]
            ).astype(np.float32)
        )
    return columns


def ages_of(versions: NDArray[Any], current: int, state: LogState) -> FloatArray:
    """Age of tokens (N,) sampled by `versions` (N,) when `current` computes the loss; NaN where the tree has a hole."""

    def age(version: int) -> float:
        try:
            return state.versions.distance(version, current)
        except ValueError:
            return math.nan

    unique, inverse = np.unique(versions, return_inverse=True)
    return np.array([age(int(version)) for version in unique], dtype=np.float32)[inverse]
