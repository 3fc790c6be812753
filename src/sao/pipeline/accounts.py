"""Counts of what became of rollouts, and the metrics of a batch."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from sao.engines.protocol import EngineHealth
from sao.observe.metrics import Metric, last
from sao.store.versions import VersionTree
from sao.types import FloatArray, Rollout

UNTRAINABLE = "untrainable: no action token"
NO_TRIES_LEFT = "infrastructure failure, no tries left"
"""Reasons on record for a rollout that is lost by itself, and not with its group or by its age."""


class Accounts:
    """Every rollout ends in exactly one column; counts are part of the checkpoint."""

    NAMES = (
        "admitted",
        "finished",
        "trained",
        "dropped",
        "infrastructure_failures",
        "retried",
        "untrainable",
        "skipped_steps",
        "evaluations_lost",
    )

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = Counter({name: counts.get(name, 0) for name in self.NAMES})
        self._attempts: deque[bool] = deque(maxlen=100)
        self._retries: deque[bool] = deque(maxlen=100)

    def add(self, name: str, number: int = 1) -> None:
        """Count; `name` is one of NAMES."""
        assert name in self.NAMES, name
        self._counts[name] += number

    def attempt(self, *, failed: bool, retry: bool = False) -> None:
        """Note how an attempt ended, for the failure share; `retry`: it came after an infrastructure failure."""
        self._attempts.append(failed)
        if retry:
            self._retries.append(failed)

    def failure_share(self, *, retries: bool) -> float:
        """Infrastructure failures among the last 100 attempts; 0 before there are 20.

        With `retries` the smaller of this and the share among the last 100 retries, 0 before there are 5: one incident,
        such as the death of a process, fails all that is running, but what is tried again then succeeds.
        """
        share = _share(self._attempts, least=20)
        return min(share, _share(self._retries, least=5)) if retries else share

    def counts(self) -> dict[str, int]:
        """For the checkpoint and the metrics."""
        return dict(self._counts)

    def metrics(self) -> dict[str, Metric]:
        """All counts as loop/ metrics."""
        return {f"loop/{name}": last(count) for name, count in self._counts.items()}


def _share(failed: deque[bool], *, least: int) -> float:
    return sum(failed) / len(failed) if len(failed) >= least else 0.0


def engine_metrics(health: EngineHealth, before: EngineHealth) -> dict[str, Metric]:
    """What the engine says of itself; its work since `before`, when training began."""
    cpu = {} if health.cpu_seconds is None else {"cpu/engine": last(health.cpu_seconds)}
    return cpu | {
        "engine/version": last(health.version),
        "engine/running": last(health.running),
        "engine/generated_tokens": last(health.generated_tokens - before.generated_tokens),
        "engine/recomputed_tokens": last(health.recomputed_tokens - before.recomputed_tokens),
        "engine/busy_seconds": last(health.busy_seconds - before.busy_seconds),
        "engine/probe_gap": last(health.probe_gap),
        "engine/update_seconds": last(health.update_seconds),
        "engine/update_bytes": last(health.update_bytes),
        "engine/replicas": last(health.replicas),
        "engine/taken_out": last(health.taken_out),
    }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Metric]:
    """Means over the rollouts of a batch; the reward also over each data set's, a mark over those that have it."""
    if not rollouts:
        return {}
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.data_set:
            parts.setdefault(f"rollout/{rollout.data_set}/reward", []).append(rollout.reward)
        for name, value in rollout.marks.items():
            parts.setdefault(f"rollout/mark_{name}", []).append(value)

    def average(values: Sequence[float]) -> Metric:
        return last(sum(values) / len(values))

    return {key: average(values) for key, values in parts.items()} | {
        "rollout/reward": average([rollout.reward for rollout in rollouts]),
        "rollout/action_tokens": average([rollout.num_action_tokens for rollout in rollouts]),
        "rollout/tokens": average([rollout.num_tokens for rollout in rollouts]),
        "rollout/turns": average([rollout.num_turns for rollout in rollouts]),
        "rollout/truncated_share": average([float(rollout.stop_reason.truncated) for rollout in rollouts]),
        "rollout/seconds": average([rollout.timings.finished - rollout.timings.started for rollout in rollouts]),
        "rollout/tool_seconds": average([rollout.timings.tools for rollout in rollouts]),
    }


def token_ages(rollouts: Sequence[Rollout], tree: VersionTree, current: int) -> FloatArray:
    """Age of every action token (N,) of the rollouts when `current` computes the loss."""
    versions = [
        sequence.policy_versions[sequence.action_mask] for rollout in rollouts for sequence in rollout.sequences
    ]
    if not versions:
        return np.zeros(0, dtype=np.float32)
    unique, inverse = np.unique(np.concatenate(versions), return_inverse=True)
    return np.array([tree.distance(int(version), current) for version in unique], dtype=np.float32)[inverse]


def age_metrics(rollouts: Sequence[Rollout], tree: VersionTree, current: int) -> dict[str, Metric]:
    """Ages over action tokens, in actor updates; `queue` is the age of each rollout's last token."""
    ages = token_ages(rollouts, tree, current)
    if not len(ages):
        return {}
    newest = [token_ages([rollout], tree, current).min() for rollout in rollouts]
    return {
        "age/mean": last(float(ages.mean())),
        "age/p50": last(float(np.quantile(ages, 0.5))),
        "age/p90": last(float(np.quantile(ages, 0.9))),
        "age/max": last(float(ages.max())),
        "age/queue": last(float(np.mean(newest))),
    }


def gap_metrics(
    rollouts: Sequence[Rollout], actor_logprobs: Sequence[Sequence[FloatArray]], tree: VersionTree, current: int
) -> dict[str, Metric]:
    """|actor - rollout log-prob| in nats, apart for tokens of the version that computes the loss, and for older ones.

    The first is the noise floor between engine and trainer, the second holds staleness too. `actor_logprobs` has an
    array (T,) per rollout and sequence; there is no gap in a step that did not compute them.
    """
    pairs = [
        (actor[sequence.action_mask], sequence.rollout_logprobs[sequence.action_mask])
        for rollout, parts in zip(rollouts, actor_logprobs, strict=True)
        for sequence, actor in zip(rollout.sequences, parts, strict=True)
    ]
    if not any(actor.any() for actor, _ in pairs):
        return {}
    gaps = np.concatenate([np.abs(actor - recorded) for actor, recorded in pairs])
    same = token_ages(rollouts, tree, current) == 0
    metrics = {"engine/gap_same_tokens": last(int(same.sum()))}
    if same.any():
        metrics["engine/gap_same_mean"] = last(float(gaps[same].mean()))
        metrics["engine/gap_same_max"] = last(float(gaps[same].max()))
    if not same.all():
        metrics["engine/gap_older_mean"] = last(float(gaps[~same].mean()))
    return metrics
