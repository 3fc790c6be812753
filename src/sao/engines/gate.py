"""The engine's half of the socket that `EngineClient` speaks to, for any engine. No torch."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from sao.clock import Tasks
from sao.engines.client import SOCKET, JsonLines, new_secret
from sao.engines.protocol import Engine, EngineError, EngineHealth, Sampling
from sao.store.records import snapshot_from
from sao.types import Snapshot, TokenChunk

Deliver = Callable[[TokenChunk | EngineError | ValueError], None]


class Submits(Protocol):
    """What a connection needs of an engine: generations by callback, so that a step's chunks leave together."""

    def submit(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str, deliver: Deliver
    ) -> Any:
        """Begin a generation. Raises ValueError or EngineError."""
        ...

    def abandon(self, generation: Any) -> None:
        """End a generation."""
        ...

    def forget(self, session: str) -> None:
        """Close a session, without waiting."""
        ...

    async def cancel(self, session: str) -> None:
        """See Engine."""
        ...

    async def load(self, snapshot: Snapshot) -> None:
        """See Engine."""
        ...

    async def health(self) -> EngineHealth:
        """See Engine."""
        ...


class EngineServer:
    """One connection of a client to an engine; `own_process`: nothing else runs in this process.

    A client must say `secret` first, if there is one.
    """

    def __init__(self, engine: Submits, *, own_process: bool = False, secret: str = "") -> None:
        self._own_process = own_process
        self.lines = JsonLines(self._received, self._lost, expects=secret)
        self._engine = engine
        self._generations: dict[int, Any] = {}
        self._sessions: set[str] = set()
        self._outbox: list[list[Any]] = []
        self._tasks = Tasks()

    def _received(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "generate":
                self._generate(message)
            case "abandon":
                if message["id"] in self._generations:
                    self._engine.abandon(self._generations[message["id"]])
            case "cancel":
                self._tasks.spawn(self._engine.cancel(message["session"]))
            case "close":
                self._sessions.discard(message["session"])
                self._engine.forget(message["session"])
            case "load":
                self._tasks.spawn(self._load(message["id"], message["snapshot"]))
            case "health":
                self._tasks.spawn(self._health(message["id"]))
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

    def _deliver(self, number: int, chunk: TokenChunk | EngineError | ValueError) -> None:
        if isinstance(chunk, (EngineError, ValueError)):
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
            health = asdict(await self._engine.health())
            return health | {"cpu_seconds": time.process_time()} if self._own_process else health

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


class _Streamed:
    """An Engine's streams as callbacks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks = Tasks()
        self.cancel, self.load, self.health = engine.cancel, engine.load, engine.health

    def submit(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str, deliver: Deliver
    ) -> asyncio.Task[None]:
        stream = self._engine.generate(token_ids, max_tokens=max_tokens, sampling=sampling, session=session)

        async def play() -> None:
            try:
                async for chunk in stream:
                    deliver(chunk)
            except (EngineError, ValueError) as error:
                deliver(error)
            except Exception as error:  # unanswered, the caller would hang
                deliver(EngineError(repr(error)))
            finally:
                if isinstance(stream, AsyncGenerator):
                    await stream.aclose()

        return self._tasks.spawn(play())

    def abandon(self, generation: asyncio.Task[None]) -> None:
        generation.cancel()

    def forget(self, session: str) -> None:
        self._tasks.spawn(self._close(session))

    async def stop(self) -> None:
        await self._tasks.stop()

    async def _close(self, session: str) -> None:
        with suppress(EngineError):
            await self._engine.close(session)


class EngineGate:
    """A socket through which other processes use an engine of this one: in a private folder, or TCP with a secret."""

    def __init__(self, engine: Engine) -> None:
        """Listens once `open` has made it do so."""
        self._streamed = _Streamed(engine)
        self._connections: list[EngineServer] = []
        self._server: asyncio.Server | None = None
        self._folder: Path | None = None
        self.address = self.secret = ""

    @classmethod
    async def open(cls, engine: Engine, host: str = "") -> "EngineGate":
        """Listen: in a private folder, or at a free port of `host` for clients on other machines.

        Raises EngineError where the folder's path is too long for a socket, or the host is not this machine's.
        """
        gate = cls(engine)
        await (gate._listen_at(host) if host else gate._listen_here())
        return gate

    async def _listen_here(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="sao-gate-"))
        self.address = str(folder / SOCKET)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(self._accept, self.address)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError(f"cannot listen in {folder}: {error}; set TMPDIR to a shorter path") from error
        self._folder = folder

    async def _listen_at(self, host: str) -> None:
        self.secret = new_secret()
        self._server, self.address = await listen(self._accept, host)

    def _accept(self) -> JsonLines:
        self._connections.append(EngineServer(self._streamed, secret=self.secret))
        return self._connections[-1].lines

    async def close(self) -> None:
        """Hang up. The engine goes on."""
        if self._server is not None:
            self._server.close()
        await self._streamed.stop()
        for connection in self._connections:
            connection.lines.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


async def listen(accept: Callable[[], JsonLines], host: str) -> tuple[asyncio.Server, str]:
    """A server at a free TCP port of `host`, and its address. Raises EngineError if the host is not this machine's."""
    try:
        server = await asyncio.get_running_loop().create_server(accept, host, 0)
    except OSError as error:
        raise EngineError(f"cannot listen at {host}: {error}; name an address of this machine") from error
    return server, f"{host}:{server.sockets[0].getsockname()[1]}"
