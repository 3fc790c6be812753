"""Rollouts with chosen rewards, log-probs and versions."""

from collections.abc import Sequence as Items

import numpy as np

from sao.rollout.worker import rollout_id
from sao.types import FailureKind, Rollout, Sequence, StopReason, Task, Timings


def make_task(name: str, prompt: str = "") -> Task:
    """A task by its name."""
    return Task(id=name, prompt_id=prompt or name, question="?", answer="1")


def make_rollout(
    task_id: str,
    *,
    reward: float = 0.0,
    versions: Items[int] = (0,),
    logprobs: Items[float] | None = None,
    group_id: str = "",
    prompt_id: str = "",
    attempt: int = 0,
    failure: FailureKind = FailureKind.NONE,
) -> Rollout:
    """One observation token, then an action token per version, the last of which gets the reward."""
    count = len(versions)
    sequence = Sequence(
        token_ids=np.arange(count + 1, dtype=np.int32),
        action_mask=np.arange(count + 1) > 0,
        rollout_logprobs=np.array([0.0, *(logprobs or [-1.0] * count)], dtype=np.float32),
        policy_versions=np.array([-1, *versions], dtype=np.int32),
        rewards=np.array([0.0] * count + [reward] if count else [0.0], dtype=np.float32),
        turns=np.zeros(count + 1, dtype=np.int32),
    )
    return Rollout(
        id=rollout_id(task_id, attempt),
        task_id=task_id,
        prompt_id=prompt_id or task_id,
        group_id=group_id or task_id,
        attempt=attempt,
        sequences=(sequence,),
        stop_reason=StopReason.FINISHED,
        failure=failure,
        timings=Timings(started=1.0, finished=3.0, tools=0.5),
    )
