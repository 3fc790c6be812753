"""Packed against padded training on heavy-tailed lengths: one actor pass, forward and backward, in tokens per second.

    python benchmarks/packing.py

Padded rows stand on the right, where causal attention needs no mask for them: the fastest padded form there is. Each
padded micro-batch holds as many rows as fit into the token budget, padding included, which is also what the packed one
may hold. Both compute the same loss, which is checked. Limits: at least 2 times padded in arrival order, at least 1
times padded after sorting by length.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from report import verdict
from torch import Tensor
from transformers import PreTrainedModel

from sao.algorithm.sao import AlgorithmConfig, actor_loss
from sao.models.load import ModelConfig, load_causal_lm
from sao.models.packed_attention import use_packed_attention
from sao.pipeline.packing import pack
from sao.training.passes import actor_pass
from sao.training.sft import SftExample

LIMITS = {"unsorted": 2.0, "length-sorted": 1.0}
ALGORITHM = AlgorithmConfig()
VOCABULARY = 512


def heavy_tailed(count: int, *, seed: int, longest: int) -> list[SftExample]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.0, 1.0, count).astype(int), 8, longest)
    return [
        SftExample(
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            action_mask=(np.arange(length) % 4 > 0),
        )
        for length in lengths
    ]


def padded_batches(examples: list[SftExample], budget: int) -> list[list[SftExample]]:
    batches: list[list[SftExample]] = []
    for example in examples:
        width = max(len(one.token_ids) for one in [*(batches[-1] if batches else []), example])
        if batches and width * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(example)
        else:
            batches.append([example])
    return batches


def train_padded(model: PreTrainedModel, batches: list[list[SftExample]], denominator: float) -> float:
    total = 0.0
    for batch in batches:
        width = max(len(example.token_ids) for example in batch)
        token_ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros((len(batch), width), dtype=torch.bool)
        for row, example in enumerate(batch):
            token_ids[row, : len(example.token_ids)] = torch.from_numpy(example.token_ids)
            mask[row, : len(example.token_ids)] = torch.from_numpy(example.action_mask)
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, token_ids[:, 1:, None])[..., 0]
        loss = loss_of(logprobs[mask[:, 1:]], denominator)
        loss.backward()
        total += float(loss.detach())
    return total


def loss_of(logprobs: Tensor, denominator: float) -> Tensor:
    recorded, advantages = torch.full_like(logprobs, -6.0), torch.ones_like(logprobs)
    chosen = torch.ones_like(logprobs, dtype=torch.bool)
    rows = (logprobs[None], recorded[None], advantages[None], chosen[None])
    return actor_loss(*rows, denominator=denominator, config=ALGORITHM)[0]


def train_packed(model: PreTrainedModel, examples: list[SftExample], budget: int, denominator: float) -> float:
    shape = len(examples), max(len(example.token_ids) for example in examples)
    return actor_pass(
        model,
        pack(examples, budget),
        rollout_logprobs=torch.full(shape, -6.0),
        advantages=torch.ones(shape),
        denominator=denominator,
        algorithm=ALGORITHM,
        chunk_tokens=1024,
        train=True,
    ).loss


def best_seconds(model: PreTrainedModel, work: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Least CPU seconds of several runs, and the loss."""
    seconds, loss = [], work()
    for _ in range(repeats):
        model.zero_grad()
        start = time.process_time()
        loss = work()
        seconds.append(time.process_time() - start)
    return min(seconds), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch, padding included")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--architecture", choices=["qwen3", "qwen3_moe"], default="qwen3")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    config = ModelConfig(
        architecture=chosen.architecture,
        vocab_size=VOCABULARY,
        hidden_size=chosen.hidden,
        intermediate_size=3 * chosen.hidden,
        head_dim=chosen.hidden // 4,
    )
    padded_model, packed_model = load_causal_lm(config, seed=0), load_causal_lm(config, seed=0)
    use_packed_attention(packed_model)
    examples = heavy_tailed(chosen.sequences, seed=0, longest=1024)
    lengths = [len(example.token_ids) for example in examples]
    denominator = float(sum(example.action_mask.sum() for example in examples))
    print(
        f"{len(lengths)} sequences, {sum(lengths)} tokens: "
        f"mean {np.mean(lengths):.0f}, median {np.median(lengths):.0f}, longest {max(lengths)}"
    )
    packed, packed_loss = best_seconds(
        packed_model, lambda: train_packed(packed_model, examples, chosen.budget, denominator), chosen.repeats
    )
    print(f"packed                 {sum(lengths) / packed:8.0f} tokens/s")
    for name, ordered in (
        ("unsorted", examples),
        ("length-sorted", sorted(examples, key=lambda example: len(example.token_ids))),
    ):
        batches = padded_batches(ordered, chosen.budget)
        filled = sum(len(batch) * max(len(one.token_ids) for one in batch) for batch in batches)
        padded, loss = best_seconds(
            padded_model, lambda batches=batches: train_padded(padded_model, batches, denominator), chosen.repeats
        )
        assert abs(loss - packed_loss) < 1e-3 * abs(packed_loss), (loss, packed_loss)
        ratio = padded / packed
        print(f"padded {name:13}   {sum(lengths) / padded:8.0f} tokens/s   {1 - sum(lengths) / filled:4.0%} padding")
        verdict(f"packed against {name}, times as fast", ratio, LIMITS[name], want="at least")


if __name__ == "__main__":
    main()
