"""Tiny real models and made-up rollouts for the tests of this folder."""

import numpy as np
import torch
from transformers import PreTrainedModel

from sao.algorithm.sao import AlgorithmConfig
from sao.models.load import ModelConfig, load_causal_lm
from sao.training.core import TrainerCore
from sao.training.critic import Critic
from sao.training.parallel import ONE_RANK, OneRank
from sao.training.settings import TrainerConfig
from sao.training.weights import SnapshotStore
from sao.types import Batch, Rollout, Sequence, StopReason

VOCABULARY = 48


def make_actor(architecture: str = "qwen3", *, seed: int = 0, **fields: object) -> PreTrainedModel:
    shape: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_experts": 4,
        "max_positions": 512,
    }
    config = ModelConfig(architecture=architecture, **shape | fields)  # type: ignore[arg-type]
    return load_causal_lm(config, seed=seed)


def make_sequence(rng: np.random.Generator, length: int, *, reward: float = 0.0, **fields: object) -> Sequence:
    """Turns of a few observation tokens and a few action tokens; the reward on the last action token."""
    mask = np.zeros(length, bool)
    turns = np.zeros(length, np.int32)
    place, turn = 0, 0
    while place < length:
        observed, acted = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        mask[place + observed : place + observed + acted] = True
        turns[place : place + observed + acted] = turn
        place, turn = place + observed + acted, turn + 1
    rewards = np.zeros(length, np.float32)
    if mask.any():
        rewards[np.flatnonzero(mask)[-1]] = reward
    return Sequence(
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        action_mask=mask,
        rollout_logprobs=np.where(mask, rng.normal(-3.8, 0.3, length), 0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=rewards,
        turns=turns,
        **fields,  # type: ignore[arg-type]
    )


def make_rollout(
    index: int, sequences: tuple[Sequence, ...], *, stop: StopReason = StopReason.FINISHED, prompt: str = ""
) -> Rollout:
    return Rollout(
        id=f"r{index}",
        task_id=f"t{index}",
        prompt_id=prompt or f"p{index}",
        group_id=f"t{index}",
        attempt=0,
        sequences=sequences,
        stop_reason=stop,
    )


def make_batch(*, count: int = 6, seed: int = 0, step: int = 1, lengths: tuple[int, ...] | None = None) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = lengths or tuple(int(n) for n in rng.integers(5, 40, count))
    rollouts = [
        make_rollout(index, (make_sequence(rng, length, reward=float(index % 2)),))
        for index, length in enumerate(lengths)
    ]
    return Batch(step=step, rollouts=tuple(rollouts))


def make_core(
    architecture: str = "qwen3",
    *,
    algorithm: AlgorithmConfig | None = None,
    model: dict[str, object] | None = None,
    **fields: object,
) -> TrainerCore:
    algorithm = algorithm or AlgorithmConfig()
    settings: dict[str, object] = {"actor_lr": 1e-3, "critic_lr": 1e-3, "critic_warmup_steps": 2} | fields
    config = TrainerConfig(**settings)  # type: ignore[arg-type]
    actor = make_actor(architecture, **(model or {}))
    critic = None if algorithm.advantage == "given" else Critic.from_actor(actor, freeze=config.freeze)
    return TrainerCore(actor=actor, critic=critic, config=config, algorithm=algorithm)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def make_parts(folder: str, ranks: OneRank = ONE_RANK) -> tuple[TrainerCore, SnapshotStore]:
    """What a trainer's process builds first; importable from there."""
    return make_core(), SnapshotStore(folder)
