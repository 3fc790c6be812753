"""Peak memory of log-probs, forward and backward, of 8k tokens over a vocabulary of 50k: chunked against unchunked.

    python benchmarks/logprob_memory.py

Each way runs in a process of its own and reports its peak resident memory minus what it had before; both start from the
same model and tokens and must give the same sum. Limit: chunked at most a quarter of unchunked.
"""

import argparse
import json
import resource
import subprocess
import sys

import torch
from report import verdict

from sao.models.load import ModelConfig, load_causal_lm
from sao.models.scoring import action_logprobs

LIMIT = 0.25


def measure(tokens: int, vocabulary: int, chunk: int) -> dict[str, float]:
    """Megabytes above the start, and the sum of the log-probs, of one forward and backward pass in this process."""
    torch.set_num_threads(1)
    config = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=tokens + 1,
    )
    model = load_causal_lm(config, seed=0)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, vocabulary, (1, tokens + 1), generator=generator)
    places = torch.arange(tokens + 1)
    # Touch what both ways need, gradients included, so that the baseline holds it.
    action_logprobs(model, token_ids[:, :8], places[None, :8], places[:7], token_ids[0, 1:8])[0].sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logprobs, entropy = action_logprobs(
        model, token_ids, places[None], places[:-1], token_ids[0, 1:], chunk_tokens=chunk
    )
    (logprobs.sum() / tokens).backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"megabytes": (peak - before) / 1000, "logprobs": float(logprobs.sum()), "entropy": float(entropy.sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens whose logits exist at once, chunked")
    parser.add_argument("--measure", type=int, help="chunk size to measure in this process")
    chosen = parser.parse_args()
    if chosen.measure is not None:
        print(json.dumps(measure(chosen.tokens, chosen.vocabulary, chosen.measure)))
        return
    found = []
    for name, chunk in (("unchunked", chosen.tokens), ("chunked", chosen.chunk)):
        command = [sys.executable, __file__, "--measure", str(chunk)]
        command += ["--tokens", str(chosen.tokens), "--vocabulary", str(chosen.vocabulary)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{name:9}  {chunk:6} tokens at once  {result['megabytes']:8.0f} MB above the start")
        found.append(result)
    unchunked, chunked = found
    for key in ("logprobs", "entropy"):
        assert abs(unchunked[key] - chunked[key]) < 1e-4 * abs(unchunked[key]), (key, found)
    ratio = chunked["megabytes"] / unchunked["megabytes"]
    verdict("memory of chunked, as a share of unchunked", ratio, LIMIT, want="at most")


if __name__ == "__main__":
    main()
