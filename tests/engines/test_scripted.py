"""The fake keeps the engine's contract."""

import asyncio
import subprocess
import sys

import pytest

from sao.clock import RealClock, VirtualClock, run_virtual
from sao.engines.protocol import EngineError, Sampling, complete
from sao.engines.scripted import ScriptedEngine
from sao.types import GenerationStop, Snapshot

STOP = Sampling(stop_token_ids=(9,))


def version(number: int) -> Snapshot:
    return Snapshot(version=number, parent=None, location="", checksum="")


def test_chunks_times_and_versions_by_hand():
    """Catches a version stamped when a chunk arrives instead of when it was begun: 5 tokens at 1 s, load at 2.5 s."""

    async def play() -> list:
        clock = VirtualClock()
        engine = ScriptedEngine(lambda prompt, session: [1, 2, 3, 4, 9, 7], clock, token_seconds=1, chunk_tokens=2)

        async def load() -> None:
            await clock.sleep(2.5)
            await engine.load(version(3))

        task = asyncio.ensure_future(load())
        seen = []
        async for chunk in engine.generate([5], max_tokens=10, sampling=STOP, session="a"):
            seen.append((clock.now(), chunk.token_ids, chunk.version, chunk.stop))
        await task
        return seen

    expected = [(2, (1, 2), 0, None), (4, (3, 4), 0, None), (5, (9,), 3, GenerationStop.STOP_TOKEN)]
    assert run_virtual(play()) == expected


def test_endings():
    """Catches an ending that differs from the real engine's."""

    async def play() -> None:
        engine = ScriptedEngine(lambda prompt, session: [1, 2, 3, 4], RealClock(), max_context=6)
        for prompt, limit, count, stop in (
            ([5], 3, 3, GenerationStop.MAX_TOKENS),
            ([5] * 4, 4, 2, GenerationStop.CONTEXT_FULL),
            ([5] * 6, 4, 0, GenerationStop.CONTEXT_FULL),
        ):
            chunks = await complete(engine, prompt, max_tokens=limit, sampling=STOP, session="a")
            assert (sum(len(chunk.token_ids) for chunk in chunks), chunks[-1].stop) == (count, stop)
        with pytest.raises(EngineError, match="without a stop token"):
            await complete(engine, [5], max_tokens=10, sampling=STOP, session="a")

    asyncio.run(play())


def test_cancel_and_stop():
    """Catches streams that outlive their engine."""

    async def play() -> None:
        clock = VirtualClock()
        engine = ScriptedEngine(lambda prompt, session: [1] * 100, clock, token_seconds=1, chunk_tokens=10)
        first, second = (
            asyncio.ensure_future(complete(engine, [5], max_tokens=100, sampling=STOP, session=name)) for name in "ab"
        )
        await clock.sleep(25)
        await engine.cancel("a")
        chunks = await first
        assert sum(len(chunk.token_ids) for chunk in chunks) == 20
        assert chunks[-1].stop is GenerationStop.CANCELLED
        await engine.stop()
        with pytest.raises(EngineError, match="stopped"):
            await second
        with pytest.raises(EngineError, match="stopped"):
            await engine.health()

    run_virtual(play())


def test_fake_and_client_need_no_torch():
    """Catches an import that makes thousands of worker processes load torch."""
    modules = "sao.engines.protocol, sao.engines.scripted, sao.engines.client, sao.engines.process"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
