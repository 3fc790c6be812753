"""An engine's TCP socket: tokens for who knows the secret, and nothing for anybody else."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from sao.clock import RealClock
from sao.engines import client as client_module
from sao.engines.client import EngineClient, split_address
from sao.engines.gate import EngineGate
from sao.engines.protocol import EngineError, Sampling, complete
from sao.engines.scripted import ScriptedEngine


class Watched(ScriptedEngine):
    """Notes who asked."""

    def __init__(self) -> None:
        super().__init__(lambda tokens, session: [7, 8, 9], RealClock())
        self.asked: list[str] = []

    def generate(self, token_ids, *, max_tokens, sampling, session):  # type: ignore[no-untyped-def]
        self.asked.append(session)
        return super().generate(token_ids, max_tokens=max_tokens, sampling=sampling, session=session)


def at_gate(play: Callable[[EngineGate, Watched], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = Watched()
        gate = await EngineGate.open(engine, "127.0.0.1")
        try:
            async with asyncio.timeout(60):
                await play(gate, engine)
        finally:
            await gate.close()

    asyncio.run(main())


REQUEST = {
    "op": "generate", "id": 0, "session": "stranger", "token_ids": [1], "max_tokens": 3,
    "sampling": {"stop_token_ids": []},
}  # fmt: skip


async def hung_up(gate: EngineGate, *pieces: bytes) -> bool:
    """Whether the gate hangs up, without a word, on who says these."""
    host, port = split_address(gate.address) or ("", 0)
    reader, writer = await asyncio.open_connection(host, port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.02)
    said = await reader.read()
    writer.close()
    return said == b""


def test_who_knows_the_secret_is_served() -> None:
    """Catches a client that sends its first request before the secret, or a secret that eats into it."""

    async def play(gate: EngineGate, engine: Watched) -> None:
        client = EngineClient(gate.address, secret=gate.secret)
        chunks = await complete(client, [1, 2], max_tokens=3, sampling=Sampling(), session="friend")
        assert [token for chunk in chunks for token in chunk.token_ids] == [7, 8, 9]
        assert (await client.health()).generated_tokens == 3
        await client.stop()

    at_gate(play)


@pytest.mark.parametrize("secret", ["", "0" * 32, "0" * 31, "x" * 5000])
def test_a_wrong_secret_reaches_no_engine(secret: str) -> None:
    """Catches an engine that obeys whoever finds its port."""

    async def play(gate: EngineGate, engine: Watched) -> None:
        client = EngineClient(gate.address, secret=secret)
        with pytest.raises(EngineError, match="broke"):
            await complete(client, [1], max_tokens=3, sampling=Sampling(), session="stranger")
        assert not engine.asked

    at_gate(play)


def test_no_secret_is_not_a_message_and_bytes_without_end_are_not_kept() -> None:
    """Catches a stranger who fills the memory, or whose message is read beside a wrong or half a secret."""
    message = json.dumps(REQUEST).encode() + b"\n"

    async def play(gate: EngineGate, engine: Watched) -> None:
        assert await hung_up(gate, message)
        assert await hung_up(gate, b"x" * 100)
        assert await hung_up(gate, gate.secret[:-1].encode() + b"\n" + message)
        assert await hung_up(gate, gate.secret[:16].encode(), gate.secret[15:].encode() + b"\n", message)
        assert not engine.asked

    at_gate(play)


def test_a_secret_in_pieces_is_a_secret() -> None:
    """Catches a check that takes a segment of TCP for a line."""

    async def play(gate: EngineGate, engine: Watched) -> None:
        host, port = split_address(gate.address) or ("", 0)
        reader, writer = await asyncio.open_connection(host, port)
        for piece in (gate.secret[:5].encode(), gate.secret[5:].encode(), b"\n" + b'{"op":"health",', b'"id":3}\n'):
            writer.write(piece)
            await asyncio.sleep(0.02)
        assert json.loads(await reader.readline())["id"] == 3
        writer.close()

    at_gate(play)


def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches connections that a stranger keeps open by the thousand."""
    monkeypatch.setattr(client_module, "SECRET_LIMIT_S", 0.1)

    async def play(gate: EngineGate, engine: Watched) -> None:
        assert await hung_up(gate)

    at_gate(play)


def test_an_address_that_is_not_ours_is_an_error() -> None:
    """Catches a trace where cluster.host is mistyped."""

    async def main() -> None:
        with pytest.raises(EngineError, match=r"cannot listen at 203\.0\.113\.9"):
            await EngineGate.open(Watched(), "203.0.113.9")
        gone = EngineClient("127.0.0.1:1", secret="x")
        with pytest.raises(EngineError, match=r"cannot reach the engine at 127\.0\.0\.1:1"):
            await gone.health()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.5:8101", ("10.0.0.5", 8101)),
        ("/tmp/x:80/engine.sock", None),
        ("engine.sock", None),
        ("::1:90", ("::1", 90)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int] | None) -> None:
    """Catches a path with a colon that is taken for a host."""
    assert split_address(address) == parts
