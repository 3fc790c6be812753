"""The client's half of an engine in another process: newline-delimited JSON over a Unix socket. No torch.

To the engine:   {"op": "generate", "id", "session", "token_ids", "max_tokens", "sampling"}, {"op": "abandon", "id"},
                 {"op": "cancel" | "close", "session"}, {"op": "load", "id", "snapshot"}, {"op": "health", "id"}
From the engine: {"chunks": [[id, token_ids, logprobs, version, stop or null], ...]} once per engine step,
                 {"id", "result"} or {"id", "error", "caller": whether the caller is at fault}
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sao.clock import WaitTimeoutError, limit
from sao.engines.protocol import EngineError, EngineHealth, Sampling
from sao.types import GenerationStop, Snapshot, TokenChunk

SETTINGS, SOCKET, READY, ERROR = "settings.json", "engine.sock", "ready", "error.txt"
"""Files of the private folder that an engine process shares with whoever started it."""


class JsonLines(asyncio.Protocol):
    """One JSON object per line, both ways."""

    def __init__(self, received: Callable[[dict[str, Any]], None], lost: Callable[[], None]) -> None:
        self._received = received
        self._lost = lost
        self._partial: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with any number of bytes."""
        *complete, rest = data.split(b"\n")
        if complete:
            complete[0] = b"".join([*self._partial, complete[0]])
            self._partial = []
        self._partial.append(rest)
        for line in complete:
            self._received(json.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._transport = None
        self._lost()

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message; dropped if the connection is gone, which `lost` has told."""
        if self._transport is not None:
            self._transport.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


class EngineClient:
    """Engine at a socket; several clients of one engine may live in several processes.

    Connects at the first call. When the connection breaks, every stream and every call raises EngineError; the engine
    forgets the sessions of a client that hangs up.
    """

    def __init__(
        self, path: str | Path, *, reply_timeout_s: float = 120.0, describe_exit: Callable[[], str] = str
    ) -> None:
        self._path = str(path)
        self._reply_timeout_s = reply_timeout_s
        self._describe_exit = describe_exit
        self._lines: JsonLines | None = None
        self._connecting = asyncio.Lock()
        self._ids = itertools.count()
        self._streams: dict[int, asyncio.Queue[TokenChunk | Exception]] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._failure = ""

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        """See Engine."""
        lines = await self._connected()
        number = next(self._ids)
        chunks = self._streams[number] = asyncio.Queue()
        lines.send(
            {
                "op": "generate",
                "id": number,
                "session": session,
                "token_ids": [int(token) for token in token_ids],
                "max_tokens": max_tokens,
                "sampling": asdict(sampling),
            }
        )
        ended = False
        try:
            while not ended:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    ended = True
                    raise chunk
                ended = chunk.stop is not None
                yield chunk
        finally:
            del self._streams[number]
            if not ended:
                lines.send({"op": "abandon", "id": number})

    async def cancel(self, session: str) -> None:
        """See Engine. An engine that is gone samples no more."""
        if not self._failure:
            (await self._connected()).send({"op": "cancel", "session": session})

    async def close(self, session: str) -> None:
        """See Engine. An engine that is gone has forgotten the session."""
        if not self._failure:
            (await self._connected()).send({"op": "close", "session": session})

    async def load(self, snapshot: Snapshot) -> None:
        """See Engine."""
        await self._call(f"version {snapshot.version} to be loaded", {"op": "load", "snapshot": asdict(snapshot)})

    async def health(self) -> EngineHealth:
        """See Engine."""
        return EngineHealth(**await self._call("the engine's health", {"op": "health"}))

    async def stop(self) -> None:
        """Hang up; the engine itself goes on for its other clients."""
        self._fail("the engine's client was stopped")
        if self._lines is not None:
            self._lines.close()

    async def _connected(self) -> JsonLines:
        async with self._connecting:
            if self._failure:
                raise EngineError(self._failure)
            if self._lines is None:
                try:
                    _, self._lines = await asyncio.get_running_loop().create_unix_connection(
                        lambda: JsonLines(self._received, self._lost), self._path
                    )
                except OSError as error:
                    raise EngineError(
                        f"cannot reach the engine at {self._path}: {error} {self._describe_exit()}"
                    ) from error
            return self._lines

    async def _call(self, waiting_for: str, message: dict[str, Any]) -> Any:
        lines = await self._connected()
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        lines.send({**message, "id": number})
        try:
            async with limit(self._reply_timeout_s, waiting_for):
                return await reply
        except WaitTimeoutError as error:
            raise EngineError(str(error)) from error
        finally:
            del self._replies[number]

    def _received(self, message: dict[str, Any]) -> None:
        if "chunks" in message:
            for number, token_ids, logprobs, version, stop in message["chunks"]:
                if number in self._streams:
                    chunk = TokenChunk(
                        token_ids=tuple(token_ids),
                        logprobs=tuple(logprobs),
                        version=version,
                        stop=None if stop is None else GenerationStop(stop),
                    )
                    self._streams[number].put_nowait(chunk)
            return
        number = message["id"]
        if "error" in message:
            error = ValueError(message["error"]) if message["caller"] else EngineError(message["error"])
            if number in self._streams:
                self._streams[number].put_nowait(error)
            elif number in self._replies and not self._replies[number].done():
                self._replies[number].set_exception(error)
        elif number in self._replies and not self._replies[number].done():
            self._replies[number].set_result(message["result"])

    def _lost(self) -> None:
        self._fail(f"the connection to the engine at {self._path} broke {self._describe_exit()}".strip())

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for chunks in self._streams.values():
            chunks.put_nowait(EngineError(self._failure))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineError(self._failure))
