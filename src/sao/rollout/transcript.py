"""A logged rollout as messages again: for reading, and as a trace to imitate."""

import numpy as np

from sao.envs.traces import Trace
from sao.rollout.renderer import ChatRenderer
from sao.types import Message, Rollout


def trace_of(rollout: Rollout, renderer: ChatRenderer) -> Trace:
    """Messages from the opening to the last action, and the rollout's reward.

    Raises ValueError for a rollout without an action, with several sequences, or rendered by another template.
    """
    if len(rollout.sequences) != 1 or not rollout.num_action_tokens:
        raise ValueError(
            f"rollout {rollout.id} has {len(rollout.sequences)} sequences and {rollout.num_action_tokens} action "
            "tokens; a trace is made of one sequence with an action"
        )
    (sequence,) = rollout.sequences
    messages: list[Message] = []
    borders = np.flatnonzero(np.diff(sequence.action_mask)) + 1
    for tokens, mask in zip(
        np.split(sequence.token_ids, borders), np.split(sequence.action_mask, borders), strict=True
    ):
        if mask[0]:
            messages.append(Message(role="assistant", content=renderer.text(tokens.tolist())))
        else:
            messages.extend(renderer.read_back(tokens.tolist(), opening=not messages))
    while messages[-1].role != "assistant":
        messages.pop()
    return Trace(task_id=rollout.task_id, messages=tuple(messages), reward=rollout.reward)
