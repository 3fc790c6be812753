"""Pre-train the critic before RL, on Monte-Carlo returns of logged rollouts."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sao.algorithm.diagnostics import explained_variance
from sao.algorithm.sao import AlgorithmConfig, targets
from sao.observe.metrics import Metric, last
from sao.pipeline.packing import MicroBatch, pack, rows
from sao.training.critic import Critic, Freeze
from sao.training.fitting import FitConfig, fit
from sao.training.optimiser import Optimiser, Progress
from sao.training.parallel import ONE_RANK, OneRank
from sao.training.passes import critic_pass, score_values
from sao.training.tensors import to_tensor
from sao.types import Rollout


@dataclass(frozen=True, kw_only=True)
class ValuePretrainingConfig(FitConfig):
    """How the critic is pre-trained. The paper does it before RL but does not give its scale."""

    stage = "value_pretraining"

    epochs: int = 2
    """Passes over the training share of the rollouts; `steps` overrides it where it is not 0."""
    batch_size: int = 32
    """Rollouts per update."""
    lr: float = 5e-6
    """Peak learning rate; the critic's of the paper. Small models from scratch need 1e-3."""
    grad_clip: float = 10.0
    """Largest norm of the gradient; as the critic's in the trainer."""
    freeze: Freeze = "attention"
    """What does not train here: the attention modules as in RL, or none. Its own switch: what the policy's attention
    does not look at, a frozen one never shows the critic, however much pretraining there is."""
    held_out_share: float = 0.1
    """Share of the prompts whose rollouts are kept for the explained variance that is reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"value_pretraining.fit.held_out_share is {self.held_out_share}; it must be in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """What value pretraining will do with some rollouts."""

    train: list[Rollout]
    """Rollouts to fit on."""
    held_out: list[Rollout]
    """Rollouts that only measure: no prompt of theirs is trained on."""
    updates: int
    """Optimiser steps in all."""
    passes: float
    """How often each training rollout is seen, on average."""


@dataclass(kw_only=True, eq=False)
class _Part:
    """Some rollouts as arrays, with their Monte-Carlo returns; tensors (B, T)."""

    packs: list[MicroBatch]
    num_sequences: int
    returns: Tensor
    value_mask: Tensor


def pretrain_values(
    critic: Critic,
    rollouts: Sequence[Rollout],
    *,
    config: ValuePretrainingConfig,
    algorithm: AlgorithmConfig,
    seed: int,
    progress: Progress | None = None,
    ranks: OneRank = ONE_RANK,
) -> dict[str, Metric]:
    """Fit the critic's values to returns with lambda 1 and no bootstrap, whatever the algorithm's own lambda.

    Untrainable rollouts are left out. Prompts are split, not rollouts, so that no held-out prompt was trained on. The
    critic's own freezing is as before afterwards. Raises ValueError if no rollout is left to train on, and TrainerError
    after too many gradients in a row that were not finite.
    """
    work = planned_work(rollouts, config=config, seed=seed)
    train, held_out = work.train, work.held_out
    monte_carlo = replace(algorithm, lambda_critic=1.0, bootstrap_truncated=False, value_clip=None)
    frozen_before = critic.freeze
    critic.set_freeze(config.freeze)
    try:
        optimiser = Optimiser(
            critic.named_parameters(),
            betas=config.betas,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )
        history = fit(
            optimiser,
            train,
            lambda chosen: _add_gradient(critic, chosen, config, monte_carlo, ranks),
            config,
            seed=seed,
            progress=progress,
        )
        metrics = history[-1] if history else {}
        return metrics | _measure(critic, train, held_out, config, monte_carlo, ranks)
    finally:
        critic.set_freeze(frozen_before)


def planned_work(rollouts: Sequence[Rollout], *, config: ValuePretrainingConfig, seed: int) -> PlannedWork:
    """How the rollouts are split, and how often they are seen. Raises ValueError if none is left to train on."""
    usable = [rollout for rollout in rollouts if rollout.trainable]
    train, held_out = split_by_prompt(usable, share=config.held_out_share, seed=seed)
    if not train:
        raise ValueError(
            f"value pretraining has nothing to train on: of {len(rollouts)} rollouts {len(usable)} can be trained on, "
            f"{len(held_out)} of them held out; collect rollouts of more prompts, or lower "
            "value_pretraining.fit.held_out_share"
        )
    updates = config.num_steps(len(train))
    per_epoch = math.ceil(len(train) / config.batch_size)
    return PlannedWork(train=train, held_out=held_out, updates=updates, passes=updates / per_epoch)


def split_by_prompt(rollouts: Sequence[Rollout], *, share: float, seed: int) -> tuple[list[Rollout], list[Rollout]]:
    """Training and held-out rollouts; `share` of the prompts, rounded, is held out, at least one if `share` > 0."""
    prompts = sorted(
        {rollout.prompt_id for rollout in rollouts},
        key=lambda prompt: hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest(),
    )
    count = min(max(round(share * len(prompts)), 1 if share > 0 else 0), max(len(prompts) - 1, 0))
    held_out = set(prompts[:count])
    return (
        [rollout for rollout in rollouts if rollout.prompt_id not in held_out],
        [rollout for rollout in rollouts if rollout.prompt_id in held_out],
    )


def _part(
    critic: Critic, rollouts: Sequence[Rollout], config: ValuePretrainingConfig, algorithm: AlgorithmConfig
) -> _Part:
    arrays = rows(rollouts)
    device = critic.head.weight.device
    action_mask = to_tensor(arrays.action_mask, device)
    fit_targets = targets(
        rewards=to_tensor(arrays.rewards, device),
        values=torch.zeros(action_mask.shape, device=device),
        action_mask=action_mask,
        turns=to_tensor(arrays.turns, device),
        num_action_tokens=to_tensor(arrays.num_action_tokens, device),
        config=algorithm,
    )
    packs = pack(
        arrays.sequences,
        config.micro_batch_tokens,
        places=arrays.places,
        score_observations=algorithm.train_observation_values,
    )
    return _Part(
        packs=packs,
        num_sequences=len(arrays.sequences),
        returns=fit_targets.returns,
        value_mask=fit_targets.value_mask & to_tensor(arrays.predicted, device),
    )


def _add_gradient(
    critic: Critic,
    rollouts: Sequence[Rollout],
    config: ValuePretrainingConfig,
    algorithm: AlgorithmConfig,
    ranks: OneRank,
) -> dict[str, Metric]:
    """Add the gradient of the batch's loss; the loss."""
    part = _part(critic, rollouts, config, algorithm)
    loss = critic_pass(
        critic,
        part.packs,
        returns=part.returns,
        value_mask=part.value_mask,
        initial_values=torch.zeros_like(part.returns),
        denominator=float(part.value_mask.sum()),
        algorithm=algorithm,
        ranks=ranks,
    )
    return {"value_pretraining/loss": last(loss)}


def _measure(
    critic: Critic,
    train: Sequence[Rollout],
    held_out: Sequence[Rollout],
    config: ValuePretrainingConfig,
    algorithm: AlgorithmConfig,
    ranks: OneRank,
) -> dict[str, Metric]:
    """Explained variance on both parts; NaN where it is undefined."""
    found: dict[str, Metric] = {"value_pretraining/rollouts": last(len(train) + len(held_out))}
    for name, rollouts in (("explained_variance", train), ("explained_variance_held_out", held_out)):
        score = _explained_variance(critic, rollouts, config, algorithm, ranks)
        found[f"value_pretraining/{name}"] = last(math.nan if score is None else score)
    return found


def _explained_variance(
    critic: Critic,
    rollouts: Sequence[Rollout],
    config: ValuePretrainingConfig,
    algorithm: AlgorithmConfig,
    ranks: OneRank,
) -> float | None:
    """Over all rollouts, which are scored a batch at a time: padded to one length, a whole log fills the memory."""
    values: list[Tensor] = []
    returns: list[Tensor] = []
    for start in range(0, len(rollouts), config.batch_size):
        part = _part(critic, rollouts[start : start + config.batch_size], config, algorithm)
        height, width = part.returns.shape
        shape, count = (height, width), part.num_sequences
        scored, _ = score_values(critic, part.packs, shape=shape, num_sequences=count, ranks=ranks)
        values.append(scored[part.value_mask])
        returns.append(part.returns[part.value_mask])
    if not returns:
        return None
    every = torch.cat(returns)[None]
    return explained_variance(torch.cat(values)[None], every, torch.ones_like(every, dtype=torch.bool))
