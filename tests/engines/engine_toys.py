"""Tiny models whose distributions are far from uniform, and snapshots of them."""

import asyncio
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from sao.engines.local import LocalEngine
from sao.engines.protocol import Sampling, complete
from sao.engines.settings import EngineConfig
from sao.models.load import ModelConfig, load_causal_lm, save_model
from sao.models.scoring import action_logprobs, sequence_logprobs
from sao.store.snapshots import folder_checksum
from sao.types import GenerationStop, Snapshot, TokenChunk

VOCABULARY = 61
PROBE = tuple(range(5, 17))


def tiny(seed: int, architecture: str = "qwen3") -> PreTrainedModel:
    """Fresh random weights are nearly uniform over tokens, which hides mistakes; these are not."""
    config = ModelConfig(
        architecture=architecture,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        num_experts=4,
        max_positions=256,
    )
    model = load_causal_lm(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def snapshot(model: PreTrainedModel, folder: Path, version: int) -> Snapshot:
    """Written as the trainer writes it, with the trainer's log-probs of the probe."""
    target = folder / f"version-{version}"
    save_model(model, target)
    return Snapshot(
        version=version,
        parent=None,
        location=str(target),
        checksum=folder_checksum(target),
        probe_token_ids=PROBE,
        probe_logprobs=tuple(sequence_logprobs(model, PROBE).tolist()),
    )


def packed_scores(model: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]) -> list[np.ndarray]:
    """Log-probs of each answer by the trainer's packed forward: all sequences in one row."""
    tokens, positions, predictors, targets = [], [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        start = len(tokens)
        tokens += prompt + answer
        positions += range(len(prompt) + len(answer))
        predictors += range(start + len(prompt) - 1, start + len(prompt) + len(answer) - 1)
        targets += answer
    with torch.no_grad():
        logprobs, _ = action_logprobs(
            model, torch.tensor([tokens]), torch.tensor([positions]), torch.tensor(predictors), torch.tensor(targets)
        )
    return np.split(logprobs.numpy(), np.cumsum([len(answer) for answer in answers])[:-1])


def tokens_of(chunks: tuple[TokenChunk, ...]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs_of(chunks: tuple[TokenChunk, ...]) -> np.ndarray:
    return np.array([logprob for chunk in chunks for logprob in chunk.logprobs])


def versions_of(chunks: tuple[TokenChunk, ...]) -> list[int]:
    return [chunk.version for chunk in chunks for _ in chunk.token_ids]


def stop_of(chunks: tuple[TokenChunk, ...]) -> GenerationStop | None:
    return chunks[-1].stop


def prompt_of(seed: int, longest: int = 40) -> list[int]:
    random = np.random.default_rng(seed)
    return random.integers(0, VOCABULARY, random.integers(1, longest)).tolist()


async def answer(
    engine: LocalEngine, prompt: list[int], *, seed: int = 0, max_tokens: int = 30, session: str = "", stops=(), first=0
) -> tuple[TokenChunk, ...]:
    sampling = Sampling(seed=seed, stop_token_ids=stops, first_token_index=first)
    return await complete(engine, prompt, max_tokens=max_tokens, sampling=sampling, session=session or f"s{seed}")


async def until_tokens(engine: LocalEngine, count: int) -> None:
    """Wait until the engine has sampled this many tokens."""
    while (await engine.health()).generated_tokens < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


SMALL = EngineConfig(max_sessions=8, max_context=128, flush_tokens=4, prefill_tokens=32)
