"""Rollouts and records to store, made from a seed."""

import numpy as np

from sao.types import FailureKind, Rollout, Sequence, StopReason, Task, Timings


def make_task(name: str) -> Task:
    """A task with one detail of each kind."""
    details = {"level": 3, "weight": 0.1, "word": "ö", "hard": True}
    return Task(id=name, prompt_id=f"p-{name}", question="1 + 1?", answer="2", data_set="toy", details=details)


def make_sequence(generator: np.random.Generator, length: int, max_version: int) -> Sequence:
    """Random actions, none first."""
    mask = generator.random(length) < 0.6
    mask[:1] = False
    logprobs = -generator.exponential(size=length).astype(np.float32)
    return Sequence(
        token_ids=generator.integers(0, 1000, length).astype(np.int32),
        action_mask=mask,
        rollout_logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        policy_versions=np.where(mask, generator.integers(0, max_version + 1, length), -1).astype(np.int32),
        rewards=np.where(mask, generator.normal(size=length), 0).astype(np.float32),
        turns=np.cumsum(generator.random(length) < 0.2).astype(np.int32),
    )


def make_rollout(
    task_id: str,
    attempt: int = 0,
    *,
    lengths: tuple[int, ...] = (12,),
    seed: int = 0,
    max_version: int = 0,
    failure: FailureKind = FailureKind.NONE,
    group_id: str | None = None,
) -> Rollout:
    """A rollout with a sequence per length."""
    generator = np.random.default_rng([seed, attempt])
    return Rollout(
        id=f"{task_id}.{attempt}",
        task_id=task_id,
        prompt_id=f"p-{task_id}",
        group_id=group_id or task_id,
        attempt=attempt,
        sequences=tuple(make_sequence(generator, length, max_version) for length in lengths),
        stop_reason=StopReason.FINISHED,
        failure=failure,
        timings=Timings(admitted=0.1, started=0.2, finished=1 / 3, generating=1e-9, tools=0.0),
        data_set="toy",
        marks={"quality": 1 / 3, "style": -0.0} if seed % 2 else {},
    )
