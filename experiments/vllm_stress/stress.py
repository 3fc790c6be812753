"""Stress of vLLM servers: many sessions on two replicas while weights change all the time; every token is re-scored.

    python experiments/vllm_stress/stress.py --vllm-python FOLDER/bin/python --out experiments/vllm_stress/results.json

Sessions talk without a pause: first without updates, then with one every few seconds, then without again. Each token's
log-prob must be that of the version it names, by the trainer's own forward, and no session may stop.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sao.engines.pool import EnginePool, PoolConfig
from sao.engines.protocol import Engine, Sampling
from sao.engines.settings import EngineConfig
from sao.engines.vllm import VllmEngine
from sao.engines.vllm_server import VllmServer, vllm_version
from sao.engines.vllm_settings import VllmConfig
from sao.models.load import ModelConfig, load_causal_lm
from sao.models.scoring import action_logprobs
from sao.training.weights import SnapshotStore
from sao.types import Snapshot, TokenChunk

VOCABULARY = 256
TOLERANCE = 1e-4
"""Nats; float32 log-probs of equal weights differ by less."""
SCORED_AT_ONCE = 8192

KEPT_THROUGHPUT = 0.3
"""Least share of the throughput without updates."""

IN_TIME = 0.8
"""Least share of the updates due: one that takes longer than the time between two puts the next off."""

MEMORY_GROWTH = 1.05
"""Most that the servers' memory may grow by from the first minute to the last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reply:
    """One generation, as it was recorded."""

    prompt: tuple[int, ...]
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


@dataclass(kw_only=True)
class Record:
    """What the sessions have done so far."""

    replies: list[Reply] = field(default_factory=list)
    tokens: int = 0
    last_token_at: dict[int, float] = field(default_factory=dict)
    longest_silence_s: float = 0.0

    def take(self, session: int, chunk: TokenChunk) -> None:
        """Note a chunk of a session."""
        now = time.monotonic()
        if session in self.last_token_at:
            self.longest_silence_s = max(self.longest_silence_s, now - self.last_token_at[session])
        self.last_token_at[session] = now
        self.tokens += len(chunk.token_ids)


async def talk(engine: Engine, session: int, record: Record, done: asyncio.Event) -> None:
    """One session: prompt after prompt until `done`."""
    random, turn = np.random.default_rng(session), 0
    while not done.is_set():
        prompt = random.integers(0, VOCABULARY, random.integers(4, 65)).tolist()
        sampling = Sampling(seed=session * 1_000_003 + turn)
        name, length = f"{session}-{turn}", int(random.integers(32, 257))
        chunks: list[TokenChunk] = []
        async for chunk in engine.generate(prompt, max_tokens=length, sampling=sampling, session=name):
            record.take(session, chunk)
            chunks.append(chunk)
        await engine.close(name)
        turn += 1
        record.replies.append(
            Reply(
                prompt=tuple(prompt),
                tokens=np.array([token for chunk in chunks for token in chunk.token_ids]),
                logprobs=np.array([logprob for chunk in chunks for logprob in chunk.logprobs], dtype=np.float32),
                versions=np.array([chunk.version for chunk in chunks for _ in chunk.token_ids]),
            )
        )
        assert len(record.replies[-1].tokens) == length, "a generation ended before its length"


class Policy:
    """A small model whose weights wander: version v differs from v - 1 by far more than the tolerance."""

    def __init__(self, folder: Path) -> None:
        # vLLM's CPU attention needs heads of 32 or more.
        shape = ModelConfig(vocab_size=VOCABULARY, head_dim=32, max_positions=512, init_std=0.15)
        self.model: PreTrainedModel = load_causal_lm(shape, seed=0)
        self.store = SnapshotStore(folder)
        self.versions: dict[int, dict[str, torch.Tensor]] = {}

    def next_version(self) -> Snapshot:
        """Change the weights a little, and write them."""
        version = len(self.versions)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02 * parameter.std())
        self.versions[version] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return self.store.write(self.model, version=version, parent=version - 1 if version else None)

    def scores(self, version: int, replies: Sequence[Reply]) -> list[np.ndarray]:
        """The trainer's log-probs of each reply under a version."""
        self.model.load_state_dict(self.versions[version])
        scored: list[np.ndarray] = []
        tokens, positions, predictors, targets, lengths = [], [], [], [], []

        def flush() -> None:
            with torch.no_grad():
                logprobs, _ = action_logprobs(
                    self.model, torch.tensor([tokens]), torch.tensor([positions]), torch.tensor(predictors),
                    torch.tensor(targets), with_entropy=False,
                )  # fmt: skip
            scored.extend(np.split(logprobs.numpy(), np.cumsum(lengths)[:-1]))
            for each in (tokens, positions, predictors, targets, lengths):
                each.clear()

        for reply in replies:
            start, whole = len(tokens), [*reply.prompt, *reply.tokens.tolist()]
            tokens += whole
            positions += range(len(whole))
            predictors += range(start + len(reply.prompt) - 1, start + len(whole) - 1)
            targets += reply.tokens.tolist()
            lengths.append(len(reply.tokens))
            if len(tokens) > SCORED_AT_ONCE:
                flush()
        if tokens:
            flush()
        return scored


def rescore(policy: Policy, replies: list[Reply]) -> dict[str, float | int]:
    """How far each token is from its own version and from the one before it."""
    own, other = [], []
    for version in policy.versions:
        concerned = [reply for reply in replies if (reply.versions == version).any()]
        later = [reply for reply in replies if (reply.versions == version + 1).any()]
        for group, named, gaps in ((concerned, version, own), (later, version + 1, other)):
            for reply, scores in zip(group, policy.scores(version, group), strict=True):
                mask = reply.versions == named
                gaps.append(np.abs(scores - reply.logprobs)[mask])
    mine, former = np.concatenate(own), np.concatenate(other)
    return {
        "tokens": len(mine),
        "versions_seen": len({int(version) for reply in replies for version in set(reply.versions.tolist())}),
        "replies": len(replies),
        "replies_over_several_versions": sum(len(set(reply.versions.tolist())) > 1 for reply in replies),
        "tokens_of_a_wrong_version": int((mine > TOLERANCE).sum()),
        "largest_gap_nats": float(mine.max()),
        "mean_gap_nats": float(mine.mean()),
        "share_told_apart_from_the_version_before": float((former > TOLERANCE).mean()),
    }


def resident_mb(processes: Sequence[int]) -> float:
    """Of these process groups together."""
    pages = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(file.read_text().rsplit(")", 1)[1].split()[2]) in processes:
                pages += int((file.parent / "statm").read_text().split()[1])
        except (OSError, ValueError):
            continue
    return pages * resource.getpagesize() / 2**20


async def watch_updates(pool: EnginePool, stalls: list[float]) -> None:
    """Beside the updates, since a busy server takes its time to say how it is."""
    while True:
        await asyncio.sleep(1)
        seconds = (await pool.health()).update_seconds
        if seconds and seconds not in stalls[-1:]:
            stalls.append(seconds)


async def stress(words: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Sessions without, with, and without updates; what was found."""
    torch.set_num_threads(1)
    policy = Policy(folder)
    engine = EngineConfig(
        kind="vllm", max_context=384, max_sessions=words.sessions, start_timeout_s=600.0, load_timeout_s=120.0
    )
    config = VllmConfig(command=words.vllm_python, kv_cache_mb=64, connect_timeout_s=30.0, probe_timeout_s=300.0)
    servers: list[VllmServer] = []

    async def make(place: int, start: Snapshot) -> Engine:
        servers.append(await VllmServer.start(start.location, engine, config, index=place))
        return await VllmEngine.connect(servers[-1].address, start, engine, config, process=servers[-1])

    pool = await EnginePool.start(make, 2, policy.next_version(), PoolConfig(health_timeout_s=30.0))
    record, done = Record(), asyncio.Event()
    sessions = [asyncio.create_task(talk(pool, number, record, done)) for number in range(words.sessions)]

    async def rate(seconds: float) -> float:
        before, started = record.tokens, time.monotonic()
        await asyncio.wait(sessions, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return (record.tokens - before) / (time.monotonic() - started)

    try:
        await rate(20)  # warm
        quiet = [await rate(words.quiet_seconds)]
        rates, stalls, loads, memory = [], [], [], []
        started = time.monotonic()
        watching = asyncio.create_task(watch_updates(pool, stalls))
        while (elapsed := time.monotonic() - started) < words.seconds:
            due = asyncio.create_task(asyncio.sleep(words.every_seconds))
            before, began = record.tokens, time.monotonic()
            snapshot = await asyncio.to_thread(policy.next_version)
            asked = time.monotonic()
            await pool.load(snapshot)
            loads.append(time.monotonic() - asked)
            await due
            rates.append((record.tokens - before) / (time.monotonic() - began))
            memory.append((elapsed, resident_mb([server.process_id for server in servers])))
            silent = [number for number, at in record.last_token_at.items() if time.monotonic() - at > 60]
            assert not silent, f"sessions {silent} have had no token for a minute"
        if watching.done():
            watching.result()
        watching.cancel()
        quiet.append(await rate(words.quiet_seconds))
        done.set()
        await asyncio.wait_for(asyncio.gather(*sessions), 120)
        health = await pool.health()
    finally:
        await pool.stop()
    after = [size for at, size in memory if at >= 60] or [size for _, size in memory]
    tenth = max(len(after) // 10, 1)
    return {
        "updates": len(rates),
        "tokens_per_second_without_updates": quiet,
        "tokens_per_second_with_updates": float(np.mean(rates)),
        "share_of_throughput_kept": float(np.mean(rates) / np.mean(quiet)),
        "update_takes_s": {"median": float(np.median(loads)), "max": float(np.max(loads))},
        "update_stops_generation_s": {"median": float(np.median(stalls)), "max": float(np.max(stalls))},
        "longest_silence_of_a_session_s": record.longest_silence_s,
        "replicas_taken_out": health.taken_out,
        "servers_resident_mb": {
            "after_the_first_minute": float(np.mean(after[:tenth])),
            "at_the_end": float(np.mean(after[-tenth:])),
            "highest": max(after),
        },
        "rescored": rescore(policy, record.replies),
    }


def bars(found: dict[str, Any], *, updates_due: float) -> dict[str, bool]:
    """What must hold. That no session ever stops is asserted while it runs."""
    memory, rescored = found["servers_resident_mb"], found["rescored"]
    return {
        "no_token_of_a_wrong_version": rescored["tokens_of_a_wrong_version"] == 0,
        "versions_can_be_told_apart": rescored["share_told_apart_from_the_version_before"] > 0.9,
        "throughput_kept": found["share_of_throughput_kept"] >= KEPT_THROUGHPUT,
        "memory_flat": memory["at_the_end"] <= MEMORY_GROWTH * memory["after_the_first_minute"],
        "updates_in_time": found["updates"] >= IN_TIME * updates_due,
        "no_replica_lost": found["replicas_taken_out"] == 0,
    }


def main() -> None:
    """The command; exits with 1 if a bar fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="Python with vLLM (scripts/install_vllm_cpu.sh)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0, help="with updates")
    parser.add_argument("--every-seconds", type=float, default=5.0, help="from update to update")
    parser.add_argument("--quiet-seconds", type=float, default=60.0, help="without updates, before and after")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sao-stress-") as folder:
        found = asyncio.run(stress(words, Path(folder)))
    settings = {name: value for name, value in vars(words).items() if name not in ("out", "vllm_python")}
    machine = {
        "cores": os.cpu_count(), "python": platform.python_version(), "torch": metadata.version("torch"),
        "vllm": vllm_version(words.vllm_python),
    }  # fmt: skip
    verdicts = bars(found, updates_due=words.seconds / words.every_seconds)
    results = {"settings": settings, "machine": machine, **found, "bars": verdicts}
    words.out.write_text(json.dumps(results, indent=2) + "\n")
    print(words.out.read_text())
    for name, holds in verdicts.items():
        print(f"{name}: {'HOLDS' if holds else 'FAILS'}")
    sys.exit(not all(verdicts.values()))


if __name__ == "__main__":
    main()
