"""An engine that only costs time: replicas that share their steps among the sessions that run."""

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

from sao.clock import Clock
from sao.engines.protocol import EngineHealth
from sao.simulate.settings import SimulationConfig
from sao.types import Snapshot

_SLACK = 1e-6
"""Of a decode step: rounding of times far from 0 must not leave a turn unfinished."""


@dataclass
class _Replica:
    """All sessions advance by one token a step, which takes step_seconds + session_seconds * sessions.

    So a turn of n tokens ends when the replica has made n more steps, however their length changed meanwhile: one
    event per turn, and exact but for steps that are cut where a session comes or goes.
    """

    step_seconds: float
    session_seconds: float
    steps: float = 0.0
    """Decode steps made by `since`."""
    since: float = 0.0
    """Seconds of the clock."""
    busy: float = 0.0
    """Seconds with a session running."""
    marks: list[tuple[float, int]] = field(default_factory=list)
    """(steps at which it came, version), oldest first."""
    turns: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    """Heap of (steps at which it ends, number, whom to wake)."""
    _timer: asyncio.TimerHandle | None = None
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def decode(self, tokens: int, now: float) -> float:
        """Return after so many steps; gives the steps made before the first."""
        self.advance(now)
        start = self.steps
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.turns, (start + tokens, next(self._numbers), done))
        if self._timer is None or self._next_end() < self._timer.when():
            self._set_timer()
        await done
        return start

    def advance(self, now: float) -> None:
        """Count the steps made by `now`."""
        if self.turns:
            self.steps += (now - self.since) / self._step()
            self.busy += now - self.since
        self.since = now

    def _step(self) -> float:
        return self.step_seconds + self.session_seconds * len(self.turns)

    def _next_end(self) -> float:
        return self.since + (self.turns[0][0] - self.steps) * self._step()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(max(self._next_end(), self.since), self._wake)

    def _wake(self) -> None:
        """The first turn may have ended, or sessions that came later have put it off."""
        self._timer = None
        self.advance(asyncio.get_running_loop().time())
        while self.turns and self.turns[0][0] <= self.steps + _SLACK:
            _, _, done = heapq.heappop(self.turns)
            if not done.done():
                done.set_result(None)
        if self.turns:
            self._set_timer()


class TimedEngine:
    """What the loop needs of an engine, in virtual time; `decode` stands for `generate`, with counts for tokens."""

    def __init__(self, clock: Clock, config: SimulationConfig) -> None:
        self._clock, self._config = clock, config
        self._replicas = [_Replica(config.step_seconds, config.session_seconds) for _ in range(config.replicas)]
        self._version = -1
        self._generated = 0

    async def decode(self, blocks: int) -> list[int]:
        """One turn: the version in force at the start of each of its blocks."""
        block = self._config.block_tokens
        replica = min(self._replicas, key=lambda each: len(each.turns))
        start = await replica.decode(blocks * block, self._clock.now())
        self._generated += blocks * block
        versions: list[int] = []
        for mark, version in reversed(replica.marks):
            left = blocks - len(versions)
            # Blocks start at start, start + block, ...: those at or after the mark, of what is left.
            before = min(left, max(0, -int(-(mark - start) // block)))
            versions += [version] * (left - before)
            if before == 0:
                break
        assert len(versions) == blocks, "a block has no version"
        return versions[::-1]

    async def load(self, snapshot: Snapshot) -> None:
        """Take the snapshot's version after load_seconds."""
        if self._version >= 0:
            await self._clock.sleep(self._config.load_seconds)
        self._version = snapshot.version
        for replica in self._replicas:
            replica.advance(self._clock.now())
            replica.marks.append((replica.steps, snapshot.version))

    async def health(self) -> EngineHealth:
        """Counters; busy_seconds is the mean over replicas."""
        for replica in self._replicas:
            replica.advance(self._clock.now())
        return EngineHealth(
            version=self._version,
            running=sum(len(replica.turns) for replica in self._replicas),
            generated_tokens=self._generated,
            recomputed_tokens=0,
            busy_seconds=sum(replica.busy for replica in self._replicas) / len(self._replicas),
            probe_gap=0.0,
            replicas=len(self._replicas),
        )
