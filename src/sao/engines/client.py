"""The client's half of an engine in another process: newline-delimited JSON over a Unix or TCP socket. No torch.

Over TCP the first line is a secret, which whoever made the engine gave to its clients; without it nothing is read.

To the engine:   {"op": "generate", "id", "session", "token_ids", "max_tokens", "sampling"}, {"op": "abandon", "id"},
                 {"op": "cancel" | "close", "session"}, {"op": "load", "id", "snapshot"}, {"op": "health", "id"}
From the engine: {"chunks": [[id, token_ids, logprobs, version, stop or null], ...]} once per engine step,
                 {"id", "result"} or {"id", "error", "caller": whether the caller is at fault}
"""

import asyncio
import hmac
import itertools
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sao.clock import WaitTimeoutError, limit
from sao.engines.protocol import EngineError, EngineHealth, Sampling
from sao.types import GenerationStop, Snapshot, TokenChunk

SETTINGS, SOCKET, READY, ERROR = "settings.json", "engine.sock", "ready", "error.txt"
"""Files of the private folder that an engine process shares with whoever started it."""


SECRET_LIMIT_S = 10.0
"""Seconds for whoever connects to say the secret."""
_GONE_S = 15
"""Seconds after which a machine that went without a word is taken for gone, by both ends of a TCP connection."""


def new_secret() -> str:
    """128 random bits as text."""
    return secrets.token_hex(16)


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of an address of TCP; None for a path, which is a Unix socket's."""
    host, separator, port = address.rpartition(":")
    return (host, int(port)) if separator and "/" not in address and port.isdigit() else None


class JsonLines(asyncio.Protocol):
    """One JSON object per line, both ways."""

    def __init__(
        self, received: Callable[[dict[str, Any]], None], lost: Callable[[], None], *, expects: str = ""
    ) -> None:
        """`expects`: the secret that must come first; whoever says anything else, or nothing, is hung up on."""
        self._received = received
        self._lost = lost
        self._expects = expects.encode()
        self._partial: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        _keep_alive(transport.get_extra_info("socket"))
        if self._expects:
            asyncio.get_running_loop().call_later(SECRET_LIMIT_S, self._require_secret)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with any number of bytes."""
        if self._expects:
            data = self._after_secret(data)
        if not data:
            return
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

    def _after_secret(self, data: bytes) -> bytes:
        """What follows the secret; hangs up when it is not the right one."""
        said = b"".join([*self._partial, data])
        line, end, rest = said.partition(b"\n")
        if not end and len(line) <= len(self._expects):
            self._partial = [said]
            return b""
        self._partial = []
        if not hmac.compare_digest(line, self._expects):
            self.close()
            return b""
        self._expects = b""
        return rest

    def _require_secret(self) -> None:
        if self._expects:
            self.close()

    def say(self, secret: str) -> None:
        """Send the secret; before anything else."""
        if self._transport is not None:
            self._transport.write(secret.encode() + b"\n")

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message; dropped if the connection is gone, which `lost` has told."""
        if self._transport is not None:
            self._transport.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


def _keep_alive(connection: socket.socket) -> None:
    """Let TCP notice a machine that lost its power or its network, which says nothing."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 6, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * _GONE_S}
    for name, number in options.items():
        if hasattr(socket, name):  # Linux's
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)


class EngineClient:
    """Engine at a socket, by its path or as host:port; several clients of one engine may live in several processes.

    Connects at the first call. When the connection breaks, every stream and every call raises EngineError; the engine
    forgets the sessions of a client that hangs up.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        secret: str = "",
        reply_timeout_s: float = 120.0,
        describe_exit: Callable[[], str] = str,
    ) -> None:
        self._address, self._secret = str(address), secret
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
                    self._lines = await self._connect()
                except (OSError, WaitTimeoutError) as error:
                    raise EngineError(
                        f"cannot reach the engine at {self._address}: {error} {self._describe_exit()}"
                    ) from error
            return self._lines

    async def _connect(self) -> JsonLines:
        loop, place = asyncio.get_running_loop(), split_address(self._address)

        def lines() -> JsonLines:
            return JsonLines(self._received, self._lost)

        if place is None:
            return (await loop.create_unix_connection(lines, self._address))[1]
        async with limit(_GONE_S, "a connection"):
            _, connected = await loop.create_connection(lines, *place)
        connected.say(self._secret)
        return connected

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
        self._fail(f"the connection to the engine at {self._address} broke {self._describe_exit()}".strip())

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for chunks in self._streams.values():
            chunks.put_nowait(EngineError(self._failure))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineError(self._failure))


class ServedEngine:
    """Base of an Engine that lives in another process: all but `stop` goes through a client."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        """See Engine."""
        return self._client.generate(token_ids, max_tokens=max_tokens, sampling=sampling, session=session)

    async def cancel(self, session: str) -> None:
        """See Engine."""
        await self._client.cancel(session)

    async def close(self, session: str) -> None:
        """See Engine."""
        await self._client.close(session)

    async def load(self, snapshot: Snapshot) -> None:
        """See Engine."""
        await self._client.load(snapshot)

    async def health(self) -> EngineHealth:
        """See Engine."""
        return await self._client.health()
