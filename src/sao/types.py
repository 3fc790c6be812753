"""What crosses a stage: frozen records, one line per field.

Per-token arrays have the length of their sequence; entry t is about token t. Whoever sampled a token wrote its entries;
nothing here is ever reconstructed from text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]

OBSERVED = -1
"""Policy version of a token that no policy sampled."""


class StopReason(StrEnum):
    """Why a rollout ended."""

    FINISHED = "finished"
    MAX_TOKENS = "max_tokens"
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    TIMEOUT = "timeout"
    ERROR = "error"

    @property
    def truncated(self) -> bool:
        """Whether a limit cut the rollout before the environment ended it."""
        return self not in (StopReason.FINISHED, StopReason.ERROR)


class FailureKind(StrEnum):
    """Whose fault a bad ending is. Infrastructure failures are never trained on."""

    NONE = "none"
    POLICY = "policy"
    INFRASTRUCTURE = "infrastructure"


class GenerationStop(StrEnum):
    """Why the engine stopped sampling one action."""

    STOP_TOKEN = "stop_token"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation, as text."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str
    """Without the template's marks around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt to solve. Admitted once; `id` is unique in a run."""

    id: str
    """Unique within the run: source, cycle and index."""
    prompt_id: str
    """The same for every admission of the same prompt."""
    question: str
    """The prompt as the environment puts it to the policy."""
    answer: str
    """Gold answer, as the grader takes it."""
    data_set: str = ""
    """Name of the data set, for a row of its own in evaluation."""
    details: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """What only the environment reads, such as a difficulty or a written solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens sampled by one policy version, in order."""

    token_ids: tuple[int, ...]
    """In the engine's vocabulary; may be empty on the last chunk."""
    logprobs: tuple[float, ...]
    """Of the distribution sampled from (after temperature), one per token."""
    version: int
    """Policy version that sampled every token of the chunk."""
    stop: GenerationStop | None = None
    """Set on the last chunk of a generation only."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"chunk has {len(self.token_ids)} tokens and {len(self.logprobs)} log-probs")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """One root-to-leaf token list of a rollout with its per-token arrays, each of shape (T,)."""

    token_ids: IntArray
    """Observed and sampled tokens in the order in which the model sees them."""
    action_mask: BoolArray
    """True where the policy sampled the token; each sampled token is True in exactly one sequence of its rollout."""
    rollout_logprobs: FloatArray
    """Log-probability recorded when the token was sampled; 0 off actions."""
    policy_versions: IntArray
    """Version that sampled the token; -1 off actions."""
    rewards: FloatArray
    """Reward on its action token; 0 off actions."""
    turns: IntArray
    """Index of the turn (0, 1, ...) a token belongs to; an observation belongs to the turn it opens."""
    parent: int | None = None
    """Index in the rollout of the sequence this one branched from."""
    branch_at: int | None = None
    """Number of leading tokens shared with the parent."""
    continues_parent: bool = False
    """True for the successor of a compacted sequence: its actions follow the parent's last one."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("action_mask", "rollout_logprobs", "policy_versions", "rewards", "turns"):
            array = getattr(self, name)
            if array.shape != (length,):
                raise ValueError(f"{name} has shape {array.shape}, but the sequence has {length} tokens")
        if length and self.action_mask[0]:
            raise ValueError("a sequence starts with an action token; nothing precedes it, so it has no value estimate")
        if not np.isfinite(self.rollout_logprobs).all():
            bad = int(np.flatnonzero(~np.isfinite(self.rollout_logprobs))[0])
            raise ValueError(f"rollout log-prob of token {bad} is {self.rollout_logprobs[bad]}; it must be finite")
        if not np.isfinite(self.rewards).all():
            bad = int(np.flatnonzero(~np.isfinite(self.rewards))[0])
            raise ValueError(f"reward at token {bad} is {self.rewards[bad]}; it must be finite")
        off = ~self.action_mask
        if self.rollout_logprobs[off].any() or self.rewards[off].any() or (self.policy_versions[off] != OBSERVED).any():
            raise ValueError("log-probs and rewards must be 0, and versions -1, off the action tokens")
        if (self.policy_versions[self.action_mask] < 0).any():
            raise ValueError("an action token has no policy version")

    @property
    def num_action_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.action_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When things happened to a rollout, in seconds of the run's clock."""

    admitted: float = 0.0
    """When its task was taken from the source."""
    started: float = 0.0
    """When a worker began to play it."""
    finished: float = 0.0
    """When its last token, or its failure, was there."""
    generating: float = 0.0
    """Seconds spent waiting for the engine."""
    tools: float = 0.0
    """Seconds spent in the environment's tools."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One attempt at one task: tokens, endings and timings."""

    id: str
    """Task id and attempt: unique within the run."""
    task_id: str
    """Of the admitted task; attempts at it share it."""
    prompt_id: str
    """Shared by all admissions of the same prompt."""
    group_id: str
    """Shared by the members of a group; equal to task_id for single rollouts."""
    attempt: int
    """0 for the first try; more after an infrastructure failure or an interruption."""
    sequences: tuple[Sequence, ...]
    """One for most; more after a compaction, or with sub-agents; empty if it failed at its start."""
    stop_reason: StopReason
    """What ended it."""
    failure: FailureKind = FailureKind.NONE
    """Whose fault a bad ending is."""
    failure_text: str = ""
    """What went wrong, for people."""
    timings: Timings = field(default_factory=Timings)
    """When it was played, and what took the time."""
    data_set: str = ""
    """The task's, for a row of its own in evaluation."""
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the environment found beside the reward, by name: the last value of each; empty in logs of before there were
    any."""

    @property
    def reward(self) -> float:
        """Sum of the rewards of all sequences."""
        return float(sum(float(sequence.rewards.sum()) for sequence in self.sequences))

    @property
    def num_action_tokens(self) -> int:
        """Sampled tokens over all sequences: l of the length-adaptive lambda."""
        return sum(sequence.num_action_tokens for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens over all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_turns(self) -> int:
        """Turns of the longest sequence."""
        return max((int(sequence.turns[-1]) + 1 for sequence in self.sequences if len(sequence.turns)), default=0)

    @property
    def trainable(self) -> bool:
        """Whether the rollout may enter a batch."""
        return self.failure is not FailureKind.INFRASTRUCTURE and self.num_action_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What one training step consumes."""

    step: int
    """Number of the training step, from 1."""
    rollouts: tuple[Rollout, ...]
    """In the order they are consumed: completion order for single rollouts."""
    advantages: tuple[float, ...] | None = None
    """One number per rollout from a critic-free baseline; None where the critic supplies them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Published weights of the actor."""

    version: int
    """Unique in a run folder, never used twice."""
    parent: int | None
    """The version it was trained from."""
    location: str
    """Folder with config and safetensors; absolute, since whoever reads it may have another working directory."""
    checksum: str
    """Of the weight files, as `store.snapshots.folder_checksum` makes it; engines compare it before they load."""
    probe_token_ids: tuple[int, ...] = ()
    """A short fixed sequence that the engine scores after loading."""
    probe_logprobs: tuple[float, ...] = ()
    """The trainer's log-prob of probe tokens 1.. given those before; one fewer than probe_token_ids."""
