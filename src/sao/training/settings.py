"""Settings of the trainer."""

import math
from dataclasses import dataclass
from typing import Literal

from sao.training.critic import Freeze


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the actor and the critic are updated."""

    actor_lr: float = 1e-6
    """Learning rate of the actor (paper section 4.1). Small models from scratch need 1e-4 and more."""
    critic_lr: float = 5e-6
    """Learning rate of the critic (paper section 4.1)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments. The paper does not give them; these are usual for language models."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only. The paper does not give it."""
    actor_grad_clip: float = 1.0
    """Largest norm of the actor's gradient."""
    critic_grad_clip: float = 10.0
    """Largest norm of the critic's gradient. Its own: the actor's 1.0 is known to starve a critic."""
    critic_updates: int = 2
    """Critic updates per step, K of the paper (section 3.3)."""
    sequence_gate: float | None = None
    """Largest binary KL in nats, from the policies that sampled a rollout to the actor and on average over its action
    tokens, with which the rollout is trained on; none trains on all. FlashREINFORCE's, for comparison."""
    reference_kl: float = 0.0
    """Weight of a penalty that keeps the actor near the policy that RL started from, per token 0.5 (log-prob - the
    starting policy's)^2. 0: none (paper). For worlds that change: in experiments/styles a run with 0.2
    found the next style and one with 0 did not, a seed each."""
    actor_warmup_steps: int = 0
    """Steps over which the actor's rate rises to actor_lr, counted after the critic-only steps."""
    critic_warmup_steps: int = 10
    """Steps over which the critic's rate rises to critic_lr: one reading of the paper's 10-step warm-up."""
    critic_only_steps: int = 0
    """First steps in which the critic alone is updated: the other reading of the paper's warm-up."""
    freeze: Freeze = "attention"
    """What of the critic does not train: its attention modules (paper section 3.3), its whole backbone, or none.
    backbone leaves a linear function of the starting policy's hidden states: 4 bytes a parameter instead of 16."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one forward pass. Bounds memory; changes no result but for rounding."""
    logprob_chunk_tokens: int = 1024
    """Action tokens whose logits exist at once. Bounds memory; changes no result but for rounding."""
    activation_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass: less memory, about a third more time."""
    max_skipped_in_a_row: int = 3
    """Steps in a row with a gradient that is not finite after which the run stops."""
    ranks: int = 1
    """Processes, and GPUs where there are any, over which actor and critic are sharded by FSDP2; needs the real
    clock."""
    sequence_ranks: int = 1
    """Ranks that share each micro-batch along its tokens (Ulysses), for trajectories whose activations exceed one GPU.
    Divides `ranks` and the model's key and value heads."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in passes. bfloat16 keeps weights in float32, computes in half the memory and
    sums gradients in float32; needs the real clock, and model.dtype = "float32"."""
    threads: int = 1
    """Threads of torch in the trainer's process, or in each rank's. A fixed number keeps results the same from run to
    run."""
    step_timeout_s: float = 3600.0
    """Longest wait for one half of a step, a checkpoint, or from one update of value pretraining to the next, when the
    trainer is its own process."""
    max_restarts: int = 3
    """Times without a commit between them that a run goes on from its last commit after its trainer died or fell
    silent; 0 stops the run, to be resumed by hand."""

    @property
    def sharded(self) -> bool:
        """Whether actor and critic are handed to FSDP2."""
        return self.ranks > 1 or self.compute_dtype != "float32"

    def require_clock(self, clock: Literal["real", "virtual"]) -> None:
        """Raise ValueError if actor and critic are sharded in virtual time, which has no processes."""
        if self.sharded and clock == "virtual":
            raise ValueError(
                f"trainer.ranks = {self.ranks} with trainer.compute_dtype = {self.compute_dtype!r} needs processes, "
                'which virtual time has not; set clock = "real", or one rank that computes in float32'
            )

    def __post_init__(self) -> None:
        positive = "actor_lr critic_lr actor_grad_clip critic_grad_clip critic_updates micro_batch_tokens"
        positive += " logprob_chunk_tokens max_skipped_in_a_row ranks sequence_ranks threads step_timeout_s"
        not_negative = "weight_decay reference_kl actor_warmup_steps critic_warmup_steps critic_only_steps max_restarts"
        for name in (positive + " " + not_negative).split():
            number = getattr(self, name)
            if not math.isfinite(number) or number < 0 or (number == 0 and name in positive.split()):
                least = "above 0" if name in positive.split() else "0 or more"
                raise ValueError(f"trainer.{name} is {number}; it must be a finite number, {least}")
        if self.sequence_gate is not None and not 0 < self.sequence_gate < math.inf:
            raise ValueError(f"trainer.sequence_gate is {self.sequence_gate}; it must be above 0, or none")
        if self.ranks % self.sequence_ranks:
            raise ValueError(
                f"trainer.sequence_ranks is {self.sequence_ranks}, which does not divide trainer.ranks = {self.ranks}; "
                "each group of ranks that shares micro-batches must be whole"
            )
        if self.reference_kl and self.sharded:
            raise ValueError(
                f"trainer.reference_kl is {self.reference_kl}, which needs a trainer of one rank that computes in "
                'float32; set it to 0, or trainer.ranks = 1 and trainer.compute_dtype = "float32"'
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"trainer.betas is {self.betas}; both must be in [0, 1)")
