"""Lateness of the orchestrator's event loop under 10,000 concurrent rollouts, in real time.

    python benchmarks/event_loop.py [--quick] [--seconds 60] [--rollouts 10000]

Real: orchestrator, admission, workers, renderer, the guessing game, and a durable log that syncs to disk. Scripted: the
engine (answers of up to 500 words, heavy-tailed, at 4 tokens a second, so that a rollout lasts a minute) and
the trainer (a batch of 128 takes it no time).

A ticker on the loop wants to wake every 10 ms, at times fixed in advance; how late it wakes is the lateness, and a tick
that passed while the loop was blocked counts with its own lateness. A control ticks on an idle loop in a process of its
own during the same seconds. The start, when 10,000 rollouts are admitted at once, counts.

    excess = p99.9 lateness of the orchestrator's loop - p99.9 lateness of the idle loop        at most 100 ms
"""

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np
from report import verdict

from sao.clock import RealClock
from sao.engines.scripted import Script, ScriptedEngine
from sao.envs.keyed import uniform
from sao.envs.tokenizer import save_tokenizer
from sao.envs.toy import GuessConfig, GuessEnvironment, GuessTasks
from sao.loop import LoopConfig, Parts, Start
from sao.observe.metrics import Metrics
from sao.orchestrator import Orchestrator
from sao.pipeline.baselines import CriticBaseline
from sao.rollout.renderer import ChatRenderer, load_renderer
from sao.rollout.worker import LocalWorker, RolloutConfig
from sao.store.log import RolloutLogWriter
from sao.store.run_folder import Manifest
from sao.training.scripted import ScriptedTrainer

TICK_S = 0.01
LIMIT_MS = 100.0
BATCH = 128
TOKEN_SECONDS = 0.25


async def tick(lateness: list[float], until: float) -> None:
    """Wake every 10 ms by a fixed plan and note how late, in seconds; `until` is on the loop's clock."""
    loop = asyncio.get_running_loop()
    due = loop.time() + TICK_S
    while due < until:
        await asyncio.sleep(due - loop.time())
        now = loop.time()
        while due <= now:
            lateness.append(now - due)
            due += TICK_S


def percentile_ms(lateness: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return 1000 * float(np.quantile(lateness, share))


def make_script(renderer: ChatRenderer) -> Script:
    """Some words, then a guess; how many words (lognormal) and which digit is keyed by session and turn."""
    word = renderer.encode_action("a")[0]
    normal = NormalDist()

    def script(token_ids: Sequence[int], session: str) -> list[int]:
        draw = normal.inv_cdf(min(max(uniform(0, session, len(token_ids)), 1e-6), 1 - 1e-6))
        words = min(500, int(30 * math.exp(draw)))
        guess = 1 + int(9 * uniform(1, session, len(token_ids)))
        return [word] * words + renderer.encode_action(str(guess))

    return script


async def run(rollouts: int, seconds: float, folder: Path) -> tuple[list[float], int, int, float]:
    """Lateness of each tick, rollouts trained, and most running at once, of so many seconds."""
    clock = RealClock()
    clock.now()
    renderer = load_renderer(str(save_tokenizer(folder / "tokenizer")))
    engine = ScriptedEngine(make_script(renderer), clock, token_seconds=TOKEN_SECONDS)
    trainer = ScriptedTrainer(clock=clock)
    (folder / "log").mkdir()
    log = RolloutLogWriter(folder / "log")
    worker = LocalWorker(
        lambda: GuessEnvironment(GuessConfig()), engine, renderer, clock, RolloutConfig(max_action_tokens_per_turn=600)
    )
    running: list[float] = []

    async def commit(manifest: Manifest) -> None:
        pass

    def emit(step: int, version: int, stage: str, metrics: Metrics) -> None:
        running.append(metrics["loop/running"].value)

    parts = Parts(
        clock=clock, source=GuessTasks(GuessConfig()), worker=worker, engine=engine, trainer=trainer,
        baseline=CriticBaseline(), log=log, commit=commit, evaluate=None, evaluate_every=1, emit=emit,
        prune=lambda versions: None,
    )  # fmt: skip
    config = LoopConfig(
        steps=10**9, batch_size=BATCH, concurrency=rollouts, max_batches_ahead=math.ceil(rollouts / BATCH) + 8
    )
    snapshot = await trainer.publish_initial(0, None)
    orchestrator = Orchestrator(parts, config, Start(), snapshot, seed=0)
    lateness: list[float] = []
    began, cpu = time.monotonic(), time.process_time()
    loop = asyncio.get_running_loop()
    ticker = asyncio.create_task(tick(lateness, loop.time() + seconds))
    ticker.add_done_callback(lambda _: orchestrator.stop())
    await orchestrator.run()
    busy = (time.process_time() - cpu) / (time.monotonic() - began)
    log.close()
    return lateness, len(trainer.consumed), int(max(running, default=0)), busy


def control(seconds: float) -> None:
    """Tick on an idle loop and print the lateness."""

    async def idle() -> list[float]:
        lateness: list[float] = []
        await tick(lateness, asyncio.get_running_loop().time() + seconds)
        return lateness

    print(json.dumps(asyncio.run(idle())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="15 seconds")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--control", action="store_true", help="be the idle control")
    chosen = parser.parse_args()
    seconds = 15.0 if chosen.quick else chosen.seconds
    if chosen.control:
        return control(seconds)
    command = [sys.executable, __file__, "--control", "--seconds", str(seconds)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as idle,
    ):
        lateness, trained, most, busy = asyncio.run(run(chosen.rollouts, seconds, Path(folder)))
        assert idle.stdout is not None
        idle_lateness = json.loads(idle.stdout.read())
    for name, found in (("orchestrator", lateness), ("idle control", idle_lateness)):
        shares = "  ".join(f"p{100 * share:g} {percentile_ms(found, share):.1f}" for share in (0.5, 0.99, 0.999, 1))
        print(f"{name:13} lateness in ms: {shares}   ({len(found)} ticks)")
    print(f"{most} rollouts at once, {trained / seconds:.0f} rollouts/s, {busy:.0%} of a core")
    excess = percentile_ms(lateness, 0.999) - percentile_ms(idle_lateness, 0.999)
    verdict("p99.9 lateness beyond the idle loop's", excess, LIMIT_MS, want="at most", unit=" ms")


if __name__ == "__main__":
    main()
