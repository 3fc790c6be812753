"""Episodes in actors: as in processes of this machine (`rollout/process.py`), on whatever nodes have room.

A ping every second runs on the same loop as the episodes, so an environment whose code blocks it is found out. Rollouts
come as bytes: arrays that lie in Ray's store would fill it while they wait to be trained on.
"""

import asyncio
import contextlib
import pickle
from collections.abc import Callable
from typing import Any

from sao.clock import Clock, Tasks, WaitTimeoutError, limit
from sao.cluster.actors import Actor, ActorError, Resident
from sao.cluster.settings import ClusterConfig
from sao.rollout.pool import PlayerHandle, ProcessWorkersConfig, WorkerPool, WorkerStartError
from sao.rollout.serve import BEAT_S, MakeParts, Player
from sao.rollout.worker import Purpose, RolloutConfig, describe
from sao.types import Task

_CALLS = 100_000
"""Episodes, and pings, of an actor at once; Ray's own limit of 1,000 would keep pings waiting."""


class _PlayerHost(Resident):
    """Lives on a node and plays episodes there."""

    def __init__(self) -> None:
        self._player: Player | None = None

    async def build(self, setup: bytes) -> str:
        """Build the parts; returns "" or what went wrong."""
        try:
            self._player = await Player.build(*pickle.loads(setup))
        except Exception as error:
            return describe(error)
        return ""

    async def play(self, number: int, task: Task, group_id: str, attempt: int, seed: int) -> bytes:
        """See Player.begin; b"" for one that was cancelled."""
        assert self._player is not None
        try:
            return await self._player.begin(number, task, group_id, attempt, seed)
        except asyncio.CancelledError:
            return b""

    async def cancel(self, number: int) -> None:
        """End an episode."""
        assert self._player is not None
        self._player.cancel(number)

    async def ping(self) -> None:
        """A sign of life."""

    async def stop(self) -> None:
        """End all episodes."""
        if self._player is not None:
            await self._player.close()


class RayWorkers(WorkerPool):
    """Players are actors of the cluster."""

    def __init__(
        self,
        cluster: ClusterConfig,
        make_parts: MakeParts,
        arguments: tuple[Any, ...],
        clock: Clock,
        rollout: RolloutConfig,
        config: ProcessWorkersConfig,
        *,
        processes: int = 1,
        purpose: Purpose = "training",
        on_restart: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """See WorkerPool."""
        super().__init__(
            make_parts, arguments, clock, rollout, config, processes=processes, purpose=purpose, on_restart=on_restart
        )
        self._cluster = cluster

    async def _make_player(self) -> PlayerHandle:
        try:
            actor = await Actor.place(
                _PlayerHost, self._cluster.worker, self._cluster.place_timeout_s, max_concurrency=_CALLS
            )
        except ActorError as error:
            raise WorkerStartError(str(error)) from error
        try:
            async with limit(self._config.start_timeout_s, f"the rollout worker, {actor.where}, to be ready"):
                trouble = await actor.call("build", self._setup)
            if trouble:
                raise WorkerStartError(f"the rollout worker, {actor.where}, could not build its parts: {trouble}")
        except (ActorError, WaitTimeoutError) as error:
            actor.kill()
            raise WorkerStartError(str(error)) from error
        except BaseException:
            actor.kill()
            raise
        return _ActorPlayer(actor)


class _ActorPlayer(PlayerHandle):
    """This end of one actor."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self._actor = actor
        self._tasks = Tasks()
        self._told = f"{actor.where} was ended"

    @property
    def pid(self) -> int:
        """See PlayerHandle."""
        return self._actor.where.pid

    def _send_task(self, number: int, task: Task, group_id: str, attempt: int, seed: int) -> None:
        self._tasks.spawn(self._play(number, task, group_id, attempt, seed))

    def _send_cancel(self, number: int) -> None:
        self._actor.handle.cancel.remote(number)

    async def _play(self, *episode: Any) -> None:
        try:
            rollout = await self._actor.call("play", *episode)
            if rollout:
                self._deliver(*pickle.loads(rollout))
        except ActorError:
            return  # The ping fails too, and whoever reads it deals with all episodes.
        except Exception as error:  # unpickling raises many kinds
            self._deliver(episode[0], describe(error), 0.0)

    async def _read(self) -> None:
        while True:
            try:
                await self._actor.call("ping")
            except ActorError as error:
                self._told = str(error)
                return
            self._heard()
            await asyncio.sleep(BEAT_S)

    async def _end(self) -> str:
        self._actor.kill()
        await self._tasks.stop()
        return f"rollout worker: {self._actor.where} {self._fault}" if self._fault else f"rollout worker: {self._told}"

    async def stop(self, timeout_s: float) -> None:
        """See PlayerHandle."""
        with contextlib.suppress(ActorError):
            await self._actor.stop(timeout_s)
        await self.reap()
