"""The same GRPO work as TRL's GRPOTrainer, on two cores: action tokens per second of the whole loop.

    python3 -m venv trl-venv && trl-venv/bin/pip install torch==2.13.0 trl==1.16.*
    python benchmarks/against_trl.py --trl-python trl-venv/bin/python [--quick]

Both start from the same weights (a Qwen3 of 2 layers and width 64) and the demo's tokenizer: 64 completions of up to 64
tokens a step, groups of 8, one update of the actor at rate 1e-4, no KL, neutral sampling. TRL: one process, with one
thread and with two, of which the faster counts; its defaults but for gradient checkpointing, which is off. Ours: the
whole real-time loop with its log, engine and trainer in processes of one thread each, one batch ahead. Each side runs
in processes of its own, in turns; a few steps of warm-up do not count. The ratio is the median over the turns; at least
1, and the aim is 2.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import verdict

from sao.build import make_engine, make_renderer, make_trainer, prepare_model, prepare_tokenizer
from sao.clock import RealClock
from sao.config import RunConfig, from_tree
from sao.envs.protocol import Step
from sao.loop import Parts, Start
from sao.observe.metrics import Metrics
from sao.orchestrator import Orchestrator
from sao.pipeline.baselines import make_baseline
from sao.rollout.worker import LocalWorker
from sao.store.log import RolloutLogWriter
from sao.store.run_folder import Manifest
from sao.types import Message, Task

WARM_UP = 5
LIMIT, AIM = 1.0, 2.0
TREE = {
    "algorithm": {"advantage": "given", "policy_loss": "none", "whiten": False},
    "baseline": {"kind": "group_normalised"},
    "trainer": {"actor_lr": 1e-4, "micro_batch_tokens": 8192, "logprob_chunk_tokens": 8192},
    "engine": {"max_sessions": 64, "max_context": 96},
    "rollout": {"max_turns": 1, "max_tokens": 96, "max_action_tokens_per_turn": 64},
    "loop": {"batch_size": 64, "group_size": 8, "concurrency": 64, "max_batches_ahead": 1, "checkpoint_every": 100000},
}


class OneAnswer:
    """Endless copies of one prompt, and the environment that takes one answer to it."""

    name = "one answer"

    def at(self, index: int) -> Task | None:
        """The prompt."""
        return Task(id=str(index), prompt_id="", question="guess a number from 1 to 9", answer="")

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Ask."""
        return (Message(role="user", content=task.question),)

    async def step(self, action: Message) -> Step:
        """Share of characters that are digits."""
        digits = sum(character.isdigit() for character in action.content)
        return Step(reward=digits / max(len(action.content), 1), done=True)

    async def close(self) -> None:
        """Nothing to release."""


async def ours(config: RunConfig, model: Path, tokenizer: Path, folder: Path) -> tuple[float, float]:
    """Seconds and action tokens of the steps after the warm-up."""
    clock = RealClock()
    trainer = make_trainer(config, clock, model, folder / "snapshots")
    snapshot = await trainer.publish_initial(0, None)
    engine = await make_engine(config, clock, snapshot)
    (folder / "log").mkdir()
    log = RolloutLogWriter(folder / "log")
    ends: list[float] = []
    tokens: list[float] = []

    async def commit(manifest: Manifest) -> None:
        pass

    def emit(step: int, version: int, stage: str, metrics: Metrics) -> None:
        ends.append(time.perf_counter())
        tokens.append(metrics["rollout/action_tokens"].value * config.loop.batch_size)

    worker = LocalWorker(OneAnswer, engine, make_renderer(config, tokenizer), clock, config.rollout)
    parts = Parts(
        clock=clock, source=OneAnswer(), worker=worker, engine=engine, trainer=trainer, log=log, commit=commit,
        baseline=make_baseline(config.baseline), evaluate=None, evaluate_every=1, emit=emit,
        prune=lambda versions: None,
    )  # fmt: skip
    try:
        await Orchestrator(parts, config.loop, Start(), snapshot, seed=0).run()
    finally:
        await engine.stop()
        await trainer.stop()
        log.close()
    return ends[-1] - ends[WARM_UP - 1], sum(tokens[WARM_UP:])


def tokens_per_second(command: list[str], threads: int) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found["tokens"] / found["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="interpreter of an environment with trl")
    parser.add_argument("--quick", action="store_true", help="one short turn each")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ours", nargs=2, metavar=("MODEL", "TOKENIZER"), help="be our side")
    chosen = parser.parse_args()
    steps, turns = (10, 1) if chosen.quick else (chosen.steps, chosen.turns)
    config = from_tree(TREE, [f"loop.steps={WARM_UP + chosen.steps}"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.ours:
            seconds, tokens = asyncio.run(ours(config, Path(chosen.ours[0]), Path(chosen.ours[1]), folder))
            print(json.dumps({"seconds": seconds, "tokens": tokens}))
            return
        if not chosen.trl_python:
            parser.error("--trl-python names the interpreter of an environment with trl; see the head of this file")
        tokenizer = prepare_tokenizer(config, folder / "tokenizer")
        model = prepare_model(config, tokenizer, folder / "start")
        ours_command = [sys.executable, __file__, "--ours", str(model), str(tokenizer), "--steps", str(steps)]
        theirs = [chosen.trl_python, str(Path(__file__).with_name("trl_side.py")), str(model), str(tokenizer)]
        pairs = []
        for _ in range(turns):
            ours_speed = tokens_per_second(ours_command, 1)
            one, two = (tokens_per_second([*theirs, str(steps), str(threads)], threads) for threads in (1, 2))
            print(f"tokens/s: ours {ours_speed:6.0f}   TRL {one:6.0f} on one thread, {two:6.0f} on two", flush=True)
            pairs.append((ours_speed, max(one, two)))
    ratio = statistics.median(ours / trl for ours, trl in pairs)
    verdict("times as many action tokens per second as TRL", ratio, LIMIT, want="at least")
    print(f"the aim of {AIM:g} is {'reached' if ratio >= AIM else 'not reached'}")


if __name__ == "__main__":
    main()
