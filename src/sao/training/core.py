"""One training step, synchronous, in the order of the method.

    begin          values = critic(batch)             before any update of this step
                   targets(values, rewards)           fixed from here on
    actor_update   one optimiser step                 the new policy can leave now
    critic_update  K optimiser steps                  on the same targets
    report         metrics, and what was computed for every token

Each optimiser step is over the whole batch: micro-batches share one denominator, so that their losses and gradients
add up to the batch's for every packing. Actor and critic are separate networks without dropout, so swapping the two
updates changes no bit.

B rows, T tokens of a row, N scored tokens of a micro-batch.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sao.algorithm.diagnostics import PolicyDiagnostics, ratio_quantiles
from sao.algorithm.losses import sequence_gate, trajectory_mean_denominator
from sao.algorithm.sao import AlgorithmConfig, Targets, targets
from sao.models.packed_attention import use_packed_attention
from sao.observe.metrics import Metric, last, total
from sao.pipeline.packing import MicroBatch, Rows, pack, rows
from sao.store.records import TokenRecord
from sao.training.critic import Critic
from sao.training.optimiser import Optimiser, Progress, UpdateOutcome, learning_rate
from sao.training.parallel import ONE_RANK, OneRank
from sao.training.passes import (
    ActorPass,
    actor_pass,
    critic_pass,
    score_values,
    set_activation_checkpointing,
)
from sao.training.protocol import StepReport, TrainerError
from sao.training.settings import TrainerConfig
from sao.training.tensors import to_tensor
from sao.training.timing import MEGABYTE
from sao.training.value_pretraining import ValuePretrainingConfig, pretrain_values
from sao.training.value_quality import value_quality
from sao.types import Batch, Rollout


@dataclass(kw_only=True, eq=False)
class _Step:
    """What one step works on; tensors (B, T) on the actor's device."""

    batch: Batch
    arrays: Rows
    action_mask: Tensor
    rollout_logprobs: Tensor
    value_mask: Tensor
    """Tokens at which the critic is trained."""
    values: Tensor
    targets: Targets
    actor_packs: list[MicroBatch]
    critic_packs: list[MicroBatch]
    actor_logprobs: Tensor
    reference_logprobs: Tensor | None = None
    """Of the policy that RL started from, where the actor is kept near it."""
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(kw_only=True)
class Counters:
    """How far the trainer has come. Part of the checkpoint."""

    steps: int = 0
    """Steps that were finished."""
    actor_updates: int = 0
    """Updates that changed the actor."""
    critic_updates: int = 0
    """Updates that changed the critic."""
    actor_skipped: list[int] = field(default_factory=list)
    """Latest steps in a row without an actor update, for a gradient that was not finite."""
    critic_skipped: list[int] = field(default_factory=list)
    """The same of the critic."""


class TrainerCore:
    """Actor, critic, their optimisers and counters."""

    def __init__(
        self,
        *,
        actor: PreTrainedModel,
        critic: Critic | None,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        value_pretraining: ValuePretrainingConfig | None = None,
        seed: int = 0,
        ranks: OneRank = ONE_RANK,
    ) -> None:
        """`critic` is None exactly if the algorithm's advantages are given by a critic-free baseline.

        The networks are sharded over `ranks`; those of ranks other than the first may come without weights.
        """
        if (critic is None) != (algorithm.advantage == "given"):
            raise ValueError(
                f"advantage {algorithm.advantage!r} {'needs a' if critic is None else 'takes no'} critic; "
                "build one unless advantages are 'given'"
            )
        self.actor, self.critic, self.config, self.algorithm = actor.eval(), critic, config, algorithm
        self.value_pretraining, self.seed = value_pretraining or ValuePretrainingConfig(), seed
        self.counters, self.ranks = Counters(), ranks
        actor.requires_grad_(True)
        use_packed_attention(actor)
        # The actor is that of RL's start here, also in a run that resumes: its weights are read afterwards.
        self.reference = copy.deepcopy(actor).requires_grad_(False) if config.reference_kl else None
        ranks.shard_actor(actor)
        set_activation_checkpointing(actor, config.activation_checkpointing)
        self.actor_optimiser = self._optimiser(actor, config.actor_grad_clip)
        self.critic_optimiser: Optimiser | None = None
        if critic is not None:
            set_activation_checkpointing(critic.backbone, config.activation_checkpointing)
            critic.set_freeze(config.freeze)
            ranks.shard_critic(critic)
            self.critic_optimiser = self._optimiser(critic, config.critic_grad_clip)
        self._step: _Step | None = None

    def _optimiser(self, module: nn.Module, grad_clip: float) -> Optimiser:
        return Optimiser(
            module.named_parameters(),
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
            grad_clip=grad_clip,
        )

    def begin(self, batch: Batch) -> None:
        """Compute values and fix the targets. Raises ValueError for a batch that cannot be trained on."""
        arrays = rows(batch.rollouts)
        for rollout in batch.rollouts:
            if not rollout.trainable:
                raise ValueError(f"rollout {rollout.id} cannot be trained on: {rollout.failure} failure, or no action")
        device, budget = self.actor.device, self.config.micro_batch_tokens
        inclusive = self.algorithm.advantage == "observation_inclusive"
        packs = pack(arrays.sequences, budget, places=arrays.places)
        critic_packs = packs
        if inclusive:
            critic_packs = pack(arrays.sequences, budget, places=arrays.places, score_observations=True)
        action_mask = to_tensor(arrays.action_mask, device)
        values, bootstrap = self._values(arrays, critic_packs)
        step_targets = targets(
            rewards=to_tensor(arrays.rewards, device),
            values=values,
            action_mask=action_mask,
            turns=to_tensor(arrays.turns, device),
            num_action_tokens=to_tensor(arrays.num_action_tokens, device),
            bootstrap=bootstrap,
            given=self._given(batch, arrays),
            rollout_of_row=to_tensor(arrays.rollout_of_row, device),
            config=self.algorithm,
        )
        self._step = _Step(
            batch=batch,
            arrays=arrays,
            action_mask=action_mask,
            rollout_logprobs=to_tensor(arrays.rollout_logprobs, device),
            value_mask=step_targets.value_mask & to_tensor(arrays.predicted, device),
            values=values,
            targets=step_targets,
            actor_packs=packs,
            critic_packs=critic_packs,
            actor_logprobs=torch.zeros_like(values),
        )

    def actor_update(self) -> Literal["", "critic_only", "not_finite"]:
        """Update the actor once; says why not, where it was not. Raises TrainerError after too many bad gradients."""
        step = self._begun()
        turn = self.counters.steps - self.config.critic_only_steps
        rate = learning_rate(self.config.actor_lr, max(turn, 0), warmup_steps=self.config.actor_warmup_steps)
        self._gate_sequences(step)
        if self.reference is not None:
            step.reference_logprobs = self._actor_pass(step, 1.0, train=False, actor=self.reference).logprobs
        denominator = self._actor_denominator(step)
        done = self._actor_pass(step, denominator, train=turn >= 0)
        step.actor_logprobs = done.logprobs
        self._actor_metrics(step, done.loss, done.diagnostics)
        if turn < 0:
            return "critic_only"
        outcome = self.actor_optimiser.step(rate)
        self.counters.actor_updates += outcome.applied
        step.metrics |= {
            "actor/grad_norm": last(outcome.grad_norm),
            "actor/lr": last(rate),
            "actor/skipped": total(not outcome.applied),
            "actor/updates": last(self.counters.actor_updates),
        }
        self._count_skips("actor", self.counters.actor_skipped, step.batch.step, skipped=not outcome.applied)
        return "" if outcome.applied else "not_finite"

    def critic_update(self) -> None:
        """Update the critic K times on the step's targets; nothing without a critic. Raises as `actor_update`."""
        step = self._begun()
        if self.critic is None or self.critic_optimiser is None:
            return
        rate = learning_rate(self.config.critic_lr, self.counters.steps, warmup_steps=self.config.critic_warmup_steps)
        losses: list[float] = []
        outcomes: list[UpdateOutcome] = []
        for _ in range(self.config.critic_updates):
            losses.append(self._critic_pass(step))
            outcomes.append(self.critic_optimiser.step(rate))
        applied = sum(outcome.applied for outcome in outcomes)
        self.counters.critic_updates += applied
        step.metrics |= {
            "critic/loss": last(losses[0]),
            "critic/loss_after": last(losses[-1]),
            "critic/grad_norm": last(sum(outcome.grad_norm for outcome in outcomes) / len(outcomes)),
            "critic/lr": last(rate),
            "critic/skipped": total(len(outcomes) - applied),
            **self._critic_metrics(step),
        }
        skipped = applied < len(outcomes)
        self._count_skips("critic", self.counters.critic_skipped, step.batch.step, skipped=skipped)

    def report(self) -> StepReport:
        """End the step: its metrics and its numbers per token."""
        step = self._begun()
        self._step = None
        self.counters.steps += 1
        mask = step.action_mask
        pieces = [
            step.arrays.split(torch.where(mask, array.float(), 0.0).cpu().numpy())
            for array in (step.actor_logprobs, step.values, step.targets.advantages, step.targets.returns)
        ]
        tokens = tuple(
            tuple(
                TokenRecord(actor_logprobs=logprobs, values=values, advantages=advantages, returns=returns)
                for logprobs, values, advantages, returns in zip(*rollout, strict=True)
            )
            for rollout in zip(*pieces, strict=True)
        )
        return StepReport(step=step.batch.step, metrics=step.metrics, tokens=tokens)

    def fit_values(self, rollouts: Sequence[Rollout], progress: Progress | None = None) -> dict[str, Metric]:
        """Pre-train the critic on logged rollouts; nothing without a critic."""
        if self.critic is None:
            return {}
        assert self.critic_optimiser is not None
        settings, method = self.value_pretraining, self.algorithm
        metrics = pretrain_values(
            self.critic,
            rollouts,
            config=settings,
            algorithm=method,
            seed=self.seed,
            progress=progress,
            ranks=self.ranks,
        )
        self.critic_optimiser.refresh()
        return metrics

    def _begun(self) -> _Step:
        assert self._step is not None, "begin() comes first"
        return self._step

    def _values(self, arrays: Rows, packs: list[MicroBatch]) -> tuple[Tensor, Tensor | None]:
        """Values (B, T), and (B,) beyond the end of rows that a limit cut, where the algorithm asks for them."""
        shape, device = arrays.token_ids.shape, self.actor.device
        if self.critic is None:
            return torch.zeros(shape, device=device), None
        values, beyond = score_values(
            self.critic, packs, shape=shape, num_sequences=len(arrays.sequences), ranks=self.ranks
        )
        if self.algorithm.advantage == "observation_inclusive":
            # Nothing precedes a sequence's first token. Where the sequence is continued, the next value stands in.
            inner = arrays.places[[len(sequence.token_ids) > 1 for sequence in arrays.sequences]]
            values[inner[:, 0], inner[:, 1]] = values[inner[:, 0], inner[:, 1] + 1]
        if not self.algorithm.bootstrap_truncated:
            return values, None
        bootstrap = torch.zeros(shape[0], device=device)
        for row, value in zip(arrays.places[:, 0].tolist(), beyond, strict=True):
            bootstrap[row] = value  # A row's sequences stand in order, so its last one's stays.
        return values, torch.where(to_tensor(arrays.truncated, device), bootstrap, 0.0)

    def _given(self, batch: Batch, arrays: Rows) -> Tensor | None:
        if self.algorithm.advantage != "given":
            return None
        if batch.advantages is None or len(batch.advantages) != len(batch.rollouts):
            count = None if batch.advantages is None else len(batch.advantages)
            raise ValueError(f"the baseline gave {count} advantages for {len(batch.rollouts)} rollouts")
        per_rollout = torch.tensor(batch.advantages, dtype=torch.float32, device=self.actor.device)
        return per_rollout[to_tensor(arrays.rollout_of_row, self.actor.device)]

    def _gate_sequences(self, step: _Step) -> None:
        """Take the advantages of rollouts that the policy has left too far behind; they stay in the denominator."""
        if self.config.sequence_gate is None:
            return
        kept = sequence_gate(
            self._actor_pass(step, 1.0, train=False).logprobs,
            step.rollout_logprobs,
            step.action_mask,
            largest_kl=self.config.sequence_gate,
            rollout_of_row=to_tensor(step.arrays.rollout_of_row, self.actor.device),
        )
        advantages = torch.where(kept[:, None], step.targets.advantages, 0.0)
        step.targets = replace(step.targets, advantages=advantages)
        tokens = step.action_mask.sum(1).float()
        share = float((tokens * ~kept).sum() / tokens.sum())
        step.metrics["actor/gated_share"] = last(share)

    def _actor_denominator(self, step: _Step) -> float | Tensor:
        """What the actor's loss is divided by: a number, or (B, T)."""
        match self.algorithm.denominator:
            case "action_tokens":
                return float(step.action_mask.sum())
            case "trajectory_mean":
                num_tokens = to_tensor(step.arrays.num_action_tokens, self.actor.device)
                per_row = trajectory_mean_denominator(num_tokens, num_trajectories=len(step.batch.rollouts))
                return per_row.expand(step.action_mask.shape)
            case "kept_tokens":
                found = self._actor_pass(step, 1.0, train=False).diagnostics
                return max(found.tokens - found.masked_low - found.masked_high, 1.0)

    def _actor_pass(
        self, step: _Step, denominator: float | Tensor, *, train: bool, actor: PreTrainedModel | None = None
    ) -> ActorPass:
        return actor_pass(
            self.actor if actor is None else actor,
            step.actor_packs,
            rollout_logprobs=step.rollout_logprobs,
            advantages=step.targets.advantages,
            denominator=denominator,
            algorithm=self.algorithm,
            chunk_tokens=self.config.logprob_chunk_tokens,
            train=train,
            reference_logprobs=step.reference_logprobs,
            reference_kl=self.config.reference_kl,
            ranks=self.ranks,
        )

    def _critic_pass(self, step: _Step) -> float:
        assert self.critic is not None
        return critic_pass(
            self.critic,
            step.critic_packs,
            returns=step.targets.returns,
            value_mask=step.value_mask,
            initial_values=step.values,
            denominator=float(step.value_mask.sum()),
            algorithm=self.algorithm,
            ranks=self.ranks,
        )

    def _actor_metrics(self, step: _Step, loss: float, diagnostics: PolicyDiagnostics) -> None:
        quantiles = ratio_quantiles(step.actor_logprobs, step.rollout_logprobs, step.action_mask, (0.01, 0.5, 0.99))
        found = {
            "loss": loss,
            "advantage_mean": step.targets.advantage_mean,
            "advantage_std": step.targets.advantage_std,
            "whitened": float(step.targets.whitened),
            **diagnostics.summary(),
            **dict(zip(("ratio_p01", "ratio_p50", "ratio_p99"), quantiles, strict=True)),
        }
        if step.reference_logprobs is not None:
            gaps = (step.actor_logprobs - step.reference_logprobs)[step.action_mask]
            found["reference_kl"] = float(gaps.mean())
        step.metrics |= {f"actor/{name}": last(value) for name, value in found.items()}

    def _critic_metrics(self, step: _Step) -> dict[str, Metric]:
        assert self.critic is not None
        return {
            **value_quality(step.values, step.targets.returns, step.action_mask),
            "critic/value_mean": last(float(step.values[step.action_mask].mean())),
            "critic/return_mean": last(float(step.targets.returns[step.action_mask].mean())),
            "critic/frozen_share": last(self.critic.frozen_share),
            "critic/parameters": last(self.critic.num_parameters),
            "memory/critic_mb": last(self._critic_bytes() / MEGABYTE),
        }

    def _critic_bytes(self) -> int:
        """Weights, gradients and optimiser state of the critic."""
        assert self.critic is not None
        assert self.critic_optimiser is not None
        weights = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in self.critic.parameters())
        return weights + sum(t.numel() * t.element_size() for t in self.critic_optimiser.state().values())

    def _count_skips(self, network: str, in_a_row: list[int], step: int, *, skipped: bool) -> None:
        if not skipped:
            in_a_row.clear()
            return
        in_a_row.append(step)
        if len(in_a_row) >= self.config.max_skipped_in_a_row:
            raise TrainerError(
                f"the {network}'s gradient was not finite in steps {', '.join(map(str, in_a_row))}, so those updates "
                f"were skipped; trainer.max_skipped_in_a_row is {self.config.max_skipped_in_a_row}. "
                "Lower the learning rate, and go on from a checkpoint before these steps"
            )
