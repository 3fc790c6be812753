"""The engine's half of an engine in a process of its own; started by `ProcessEngine` as `python -m sao.engines.serve`.

It dies with its parent: standard input is a pipe that the parent holds open, and its end means the end. Interrupts and
requests to end are the parent's to handle, so they are ignored here.
"""

import asyncio
import json
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sao.clock import RealClock
from sao.engines.client import ERROR, READY, SETTINGS, SOCKET, JsonLines
from sao.engines.decoder import Generation
from sao.engines.local import LocalEngine
from sao.engines.protocol import EngineError, Sampling
from sao.engines.settings import EngineConfig
from sao.types import Snapshot, TokenChunk


def snapshot_from(fields: dict[str, Any]) -> Snapshot:
    """A snapshot from its JSON fields."""
    probe: dict[str, Any] = {name: tuple(fields[name]) for name in ("probe_token_ids", "probe_logprobs")}
    return Snapshot(**{**fields, **probe})


class EngineServer:
    """One connection of a client to a local engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self.lines = JsonLines(self._received, self._lost)
        self._engine = engine
        self._generations: dict[int, Generation] = {}
        self._sessions: set[str] = set()
        self._outbox: list[list[Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def _received(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "generate":
                self._generate(message)
            case "abandon":
                if message["id"] in self._generations:
                    self._engine.abandon(self._generations[message["id"]])
            case "cancel":
                self._spawn(self._engine.cancel(message["session"]))
            case "close":
                self._sessions.discard(message["session"])
                self._engine.forget(message["session"])
            case "load":
                self._spawn(self._load(message["id"], message["snapshot"]))
            case "health":
                self._spawn(self._health(message["id"]))
            case unknown:
                raise AssertionError(f"client and server are of one release, but {unknown!r} is not known")

    def _generate(self, message: dict[str, Any]) -> None:
        number = message["id"]
        sampling = message["sampling"]
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        self._sessions.add(message["session"])
        try:
            self._generations[number] = self._engine.submit(
                message["token_ids"],
                max_tokens=message["max_tokens"],
                sampling=Sampling(**sampling),
                session=message["session"],
                deliver=lambda chunk: self._deliver(number, chunk),
            )
        except Exception as error:  # unanswered, the caller would hang
            self._refuse(number, error)

    def _deliver(self, number: int, chunk: TokenChunk | EngineError) -> None:
        if isinstance(chunk, EngineError):
            self._generations.pop(number, None)
            self._refuse(number, chunk)
            return
        if chunk.stop is not None:
            self._generations.pop(number, None)
        if not self._outbox:
            # All chunks of one engine step leave as one message.
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append([number, chunk.token_ids, chunk.logprobs, chunk.version, chunk.stop])

    def _flush(self) -> None:
        chunks, self._outbox = self._outbox, []
        if chunks:
            self.lines.send({"chunks": chunks})

    async def _load(self, number: int, fields: dict[str, Any]) -> None:
        await self._reply(number, lambda: self._engine.load(snapshot_from(fields)))

    async def _health(self, number: int) -> None:
        async def fields() -> dict[str, Any]:
            return asdict(await self._engine.health()) | {"cpu_seconds": time.process_time()}

        await self._reply(number, fields)

    async def _reply(self, number: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            result = await work()
        except Exception as error:  # unanswered, the caller would wait out its time limit
            self._refuse(number, error if isinstance(error, EngineError) else EngineError(repr(error)))
        else:
            # Tokens of the former version must not arrive after the word that the next one is loaded.
            self._flush()
            self.lines.send({"id": number, "result": result})

    def _refuse(self, number: int, error: Exception) -> None:
        told = str(error) if isinstance(error, (ValueError, EngineError)) else repr(error)
        self.lines.send({"id": number, "error": told, "caller": isinstance(error, ValueError)})

    def _lost(self) -> None:
        for generation in self._generations.values():
            self._engine.abandon(generation)
        for session in self._sessions:
            self._engine.forget(session)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _serve(folder: Path) -> None:
    settings = json.loads((folder / SETTINGS).read_text())
    config = EngineConfig(**settings["config"])
    torch.set_num_threads(config.threads)
    engine = LocalEngine.from_snapshot(snapshot_from(settings["snapshot"]), RealClock(), config)
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: EngineServer(engine).lines, str(folder / SOCKET)
    )
    async with server:
        (folder / READY).touch()
        await server.serve_forever()


def _end_with_parent(folder: Path, parent: int) -> None:
    """Block until the parent closes its pipe or is gone, then leave at once, whatever the main thread does."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], 1.0)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Serve until the parent ends. Takes the private folder and the parent's process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with_parent, args=(folder, parent), daemon=True).start()
    try:
        asyncio.run(_serve(folder))
    except (EngineError, ValueError, OSError) as error:
        (folder / ERROR).write_text(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
