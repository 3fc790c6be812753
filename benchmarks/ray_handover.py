"""Handing a batch to the trainer: to an actor of Ray, to a process through its pipe, and to an object of this process.

    python benchmarks/ray_handover.py [--quick] [--times 7]

The trainer lays the batch out as rows and packs it, as every step begins, and does nothing else; so a hand-over holds
all that a step must do with a batch before any model sees it. Batches: 32 rollouts of 2,048 tokens and 128 of 4,096,
half of them actions. The three ways take turns, the median of each counts. Ray is started here, on one node: a batch
that crosses a network is not measured.

    ratio = seconds through Ray / seconds in this process        at most 5: milliseconds of a step
    ratio = seconds through Ray / seconds through the pipe       at most 2
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median

import numpy as np
from report import verdict

from sao.cluster.connect import cluster
from sao.cluster.settings import ClusterConfig
from sao.cluster.trainer import RayTrainer
from sao.pipeline.packing import pack, rows
from sao.training.parallel import OneRank
from sao.training.process import ProcessTrainer
from sao.types import Batch, Rollout, Sequence, StopReason

LIMITS = {"this process": 5.0, "a pipe": 2.0}
SIZES = ((32, 2048), (128, 4096))


class Reader:
    """The first thing a trainer does with a batch."""

    def begin(self, batch: Batch) -> None:
        """Read all of it."""
        laid_out = rows(batch.rollouts)
        pack([sequence for rollout in batch.rollouts for sequence in rollout.sequences], 8192)
        self.seen = int(laid_out.token_ids.sum())

    def actor_update(self) -> str:
        """No update."""
        return "critic_only"


def make_reader(ranks: OneRank) -> tuple[Reader, None]:
    """In place of a core and its snapshots."""
    return Reader(), None


def make_batch(count: int, tokens: int) -> Batch:
    rng = np.random.default_rng(0)
    action_mask = np.arange(tokens) % 64 >= 32
    sequences = [
        Sequence(
            token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
            action_mask=action_mask,
            rollout_logprobs=np.where(action_mask, -rng.random(tokens), 0).astype(np.float32),
            policy_versions=np.where(action_mask, 3, -1).astype(np.int32),
            rewards=np.zeros(tokens, np.float32),
            turns=(np.arange(tokens) // 64).astype(np.int32),
        )
        for _ in range(count)
    ]
    rollouts = tuple(
        Rollout(
            id=f"t{index}@0",
            task_id=f"t{index}",
            prompt_id=f"t{index}",
            group_id=f"t{index}",
            attempt=0,
            sequences=(each,),
            stop_reason=StopReason.FINISHED,
        )
        for index, each in enumerate(sequences)
    )
    return Batch(step=1, rollouts=rollouts)


async def compare(batch: Batch, ways: dict[str, Callable[[Batch], Awaitable[object]]], times: int) -> dict[str, float]:
    """Median seconds of each way, in turns; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(times + 1):
        for name, hand_over in ways.items():
            began = time.perf_counter()
            await hand_over(batch)
            seconds[name].append(time.perf_counter() - began)
    return {name: median(each[1:]) for name, each in seconds.items()}


async def measure(sizes: tuple[tuple[int, int], ...], times: int, config: ClusterConfig) -> None:
    reader = Reader()
    pipe = ProcessTrainer(make_reader, threads=1, timeout_s=600)  # type: ignore[arg-type]
    actor = RayTrainer(make_reader, config, threads=1, timeout_s=600)  # type: ignore[arg-type]

    async def here(batch: Batch) -> None:
        reader.begin(batch)

    try:
        for count, tokens in sizes:
            batch = make_batch(count, tokens)
            ways = {
                "this process": here,
                "a pipe": lambda batch: pipe.update_actor(batch, version=1, parent=0),
                "Ray": lambda batch: actor.update_actor(batch, version=1, parent=0),
            }
            seconds = await compare(batch, ways, times)
            megabytes = count * tokens * 21 / 1e6
            told = ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in seconds.items())
            print(f"{count} x {tokens} tokens, {megabytes:.1f} MB: {told}")
            for other, most in LIMITS.items():
                name = f"  {count} x {tokens}: Ray against {other}"
                verdict(name, seconds["Ray"] / seconds[other], most, want="at most")
    finally:
        await actor.stop()
        await pipe.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small batch, once")
    parser.add_argument("--times", type=int, default=7)
    arguments = parser.parse_args()
    config = ClusterConfig(address="local", trainer_cpus=0.1, place_timeout_s=300)
    sizes = ((4, 256),) if arguments.quick else SIZES
    with cluster(config, (config.trainer,)):
        asyncio.run(measure(sizes, 1 if arguments.quick else arguments.times, config))


if __name__ == "__main__":
    main()
