"""The child's half of episodes in processes of their own; started by `ProcessWorkers`.

It gives a sign of life every second from its loop, which code that blocks it keeps from coming. Interrupts and requests
to end are the parent's to handle, so they are ignored here; the process ends its episodes when the parent hangs up.
"""

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sao.clock import RealClock, Tasks, end_tasks
from sao.engines.protocol import Engine
from sao.envs.protocol import EnvironmentFactory
from sao.rollout.protocol import Renderer
from sao.rollout.worker import LocalWorker, Purpose, RolloutConfig, describe
from sao.types import Task

BEAT_S = 1.0
"""Seconds between two signs of life."""
_HEADER_BYTES = 8
_ORPHAN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """What plays episodes, built inside a process."""

    make_environment: EnvironmentFactory
    """Gives a fresh one for each episode."""
    engine: Engine
    """Client of the engine, which lives elsewhere."""
    renderer: Renderer
    """Turns messages into tokens, and back."""
    stop: Callable[[], Awaitable[None]] | None = None
    """Releases what the parts hold (grader pools, connections), when the process ends."""


MakeParts = Callable[..., WorkerParts | Awaitable[WorkerParts]]
"""A function at the top of an importable module; its arguments are picklable. Called on the process's loop."""


class Stream:
    """Pickled messages between parent and child, with their length before them. Both ends are our own code.

    To the child: its set-up once, then (number, task, group_id, attempt, seed) to play and (number,) to cancel.
    From the child: "" once it is ready, or what went wrong; then () as a sign of life, and (number, rollout, the
    child's time), with a text in place of a rollout that could not be sent.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> "Stream":
        """On this process's end of a pair of sockets."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: object) -> None:
        """Queue a message; dropped when the other end is gone."""
        self.send_bytes(pickle.dumps(message))

    def send_bytes(self, body: bytes) -> None:
        """The same for one that is pickled already."""
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(_HEADER_BYTES, "big"))
            self._writer.write(body)

    async def receive(self) -> Any:
        """The next message. Raises EOFError when the other end is gone, and anything for what is no message."""
        try:
            header = await self._reader.readexactly(_HEADER_BYTES)
            return pickle.loads(await self._reader.readexactly(int.from_bytes(header, "big")))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def end(self) -> None:
        """Say that nothing more will be sent."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    async def drain(self) -> None:
        """Wait until what was sent is on its way."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()


def main(fd: int) -> None:
    """Run as a rollout process: episodes come and rollouts go over the socket `fd`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_outlive_briefly, args=(os.getppid(),), daemon=True).start()
    asyncio.run(_serve(socket.socket(fileno=fd)))


def _outlive_briefly(parent: int) -> None:
    """End a process whose loop hangs in somebody's code when its parent is long dead."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_ORPHAN_S)
    os._exit(1)


class Player:
    """The episodes of one process, by number."""

    def __init__(self, parts: WorkerParts, config: RolloutConfig, purpose: Purpose) -> None:
        self._parts, self._clock = parts, RealClock()
        self._worker = LocalWorker(
            parts.make_environment, parts.engine, parts.renderer, self._clock, config, purpose=purpose
        )
        self._episodes: dict[int, asyncio.Task[bytes]] = {}

    @classmethod
    async def build(
        cls, make_parts: MakeParts, arguments: tuple[Any, ...], config: RolloutConfig, purpose: Purpose
    ) -> "Player":
        """Raises whatever the parts raise."""
        made = make_parts(*arguments)
        return cls(await made if inspect.isawaitable(made) else made, config, purpose)

    def begin(self, number: int, task: Task, group_id: str, attempt: int, seed: int) -> asyncio.Task[bytes]:
        """Play an episode; gives, pickled, (number, rollout or why it could not be sent, time now)."""
        episode = asyncio.create_task(self._play(number, task, group_id, attempt, seed))
        self._episodes[number] = episode
        episode.add_done_callback(lambda _: self._episodes.pop(number, None))
        return episode

    def cancel(self, number: int) -> None:
        """End an episode, if it still runs."""
        if number in self._episodes:
            self._episodes[number].cancel()

    async def close(self) -> None:
        """End all episodes and release the parts."""
        await end_tasks(*self._episodes.values())
        if self._parts.stop is not None:
            await self._parts.stop()

    async def _play(self, number: int, task: Task, group_id: str, attempt: int, seed: int) -> bytes:
        rollout = await self._worker.run(task, group_id=group_id, attempt=attempt, seed=seed)
        try:
            return pickle.dumps((number, rollout, self._clock.now()))
        except Exception as error:  # pickle raises many kinds
            return pickle.dumps((number, describe(error), self._clock.now()))


async def _serve(end: socket.socket) -> None:
    stream = await Stream.over(end)
    try:
        player = await Player.build(*await stream.receive())
    except Exception as error:
        stream.send(describe(error))
        await stream.drain()
        return
    stream.send("")
    sending = Tasks()

    async def send(episode: asyncio.Task[bytes]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            stream.send_bytes(await episode)
            await stream.drain()

    async def beat() -> None:
        while True:
            stream.send(())
            await asyncio.sleep(BEAT_S)

    beating = asyncio.create_task(beat())
    with contextlib.suppress(EOFError):
        while True:
            number, *rest = await stream.receive()
            if rest:
                sending.spawn(send(player.begin(number, *rest)))
            else:
                player.cancel(number)
    beating.cancel()
    await player.close()
    # Threads of hung tools must not keep the process; everything that is to be closed is closed.
    os._exit(0)
