"""Rollouts that only take time: turns, tokens and tools by keyed draws."""

import math

import numpy as np

from sao.clock import Clock
from sao.envs.keyed import generator, normal
from sao.rollout.worker import rollout_id
from sao.simulate.engine import TimedEngine
from sao.simulate.settings import SimulationConfig
from sao.types import OBSERVED, Rollout, Sequence, StopReason, Task, Timings


class Prompts:
    """Endless tasks without content."""

    name = "simulated"

    def at(self, index: int) -> Task | None:
        """Prompt `index`."""
        return Task(id=str(index), prompt_id=str(index), question="", answer="")


def script(config: SimulationConfig, prompt: int, member: int) -> tuple[list[int], list[float]]:
    """Blocks of each turn, and seconds of the tool after each but the last.

    Rollout i of a run has the same draws whatever the groups, but for what it shares with the others of its prompt.
    """
    draws = generator(config.seed, "rollout", prompt * config.loop.group_size + member)
    shared = math.sqrt(config.prompt_share) * normal(config.seed, "prompt", prompt)
    length = shared + math.sqrt(1 - config.prompt_share) * draws.standard_normal(1)
    turns = int(config.turns.of_normal(length, least=1.0)[0] + draws.random())
    tokens = config.turn_tokens.of_normal(draws.standard_normal(turns), least=config.block_tokens)
    blocks = np.floor(tokens / config.block_tokens + draws.random(turns)).astype(int)
    return blocks.tolist(), config.tool_seconds.of_normal(draws.standard_normal(turns - 1)).tolist()


class TimedWorker:
    """Plays scripts on a timed engine. Satisfies rollout.protocol.RolloutWorker."""

    def __init__(self, engine: TimedEngine, clock: Clock, config: SimulationConfig) -> None:
        self._engine, self._clock, self._config = engine, clock, config
        self._running, self._since, self._slot_seconds = 0, clock.now(), 0.0

    def slot_seconds(self) -> float:
        """Seconds in which a rollout ran, summed over the slots, up to now."""
        now = self._clock.now()
        self._slot_seconds += self._running * (now - self._since)
        self._since = now
        return self._slot_seconds

    def _occupy(self, slots: int) -> None:
        self.slot_seconds()
        self._running += slots

    async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
        """Turn by turn; each opens with one observed token, and has a token for each block."""
        blocks, tools = script(self._config, int(task.prompt_id), int(task.id.partition("#")[2] or 0))
        started = self._clock.now()
        versions: list[int] = []
        turns: list[int] = []
        self._occupy(+1)
        for turn, count in enumerate(blocks):
            versions += [OBSERVED, *await self._engine.decode(count)]
            turns += [turn] * (count + 1)
            if turn < len(tools):
                await self._clock.sleep(tools[turn])
        self._occupy(-1)
        finished, waited = self._clock.now(), sum(tools)
        return Rollout(
            id=rollout_id(task.id, attempt),
            task_id=task.id,
            prompt_id=task.prompt_id,
            group_id=group_id,
            attempt=attempt,
            sequences=(_sequence(versions, turns),),
            stop_reason=StopReason.FINISHED,
            timings=Timings(started=started, finished=finished, generating=finished - started - waited, tools=waited),
        )

    async def stop(self) -> None:
        """Nothing to release."""


def _sequence(versions: list[int], turns: list[int]) -> Sequence:
    policy_versions = np.array(versions, dtype=np.int32)
    zeros = np.zeros(len(versions), dtype=np.float32)
    return Sequence(
        token_ids=np.zeros(len(versions), dtype=np.int32),
        action_mask=policy_versions != OBSERVED,
        rollout_logprobs=zeros,
        policy_versions=policy_versions,
        rewards=zeros,
        turns=np.array(turns, dtype=np.int32),
    )
