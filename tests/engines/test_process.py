"""An engine in a process of its own: same tokens, clear errors, and no process left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_toys import SMALL, answer, logprobs_of, snapshot, stop_of, tiny, tokens_of, versions_of
from processes import gone, is_running

from sao.clock import RealClock
from sao.engines.client import EngineClient
from sao.engines.decoder import Generation
from sao.engines.local import LocalEngine
from sao.engines.process import ProcessEngine
from sao.engines.protocol import EngineError, EngineHealth
from sao.engines.serve import EngineServer
from sao.types import GenerationStop, Snapshot

NOWHERE = Snapshot(version=1, parent=None, location="/nonexistent", checksum="")


def test_the_life_of_an_engine_process(tmp_path: Path):
    """Catches a wire that changes tokens or log-probs, clients that disturb one another, errors of one caller that end
    another's stream, a Ctrl-C that kills the engine before its parent, and streams that hang when the engine dies."""
    first, second = snapshot(tiny(1), tmp_path, 1), snapshot(tiny(2), tmp_path, 2)

    async def play() -> None:
        engine = await ProcessEngine.start(first, SMALL)
        try:
            local = LocalEngine.from_snapshot(first, RealClock(), SMALL)
            prompts = [list(range(seed + 1)) for seed in range(6)]
            other = EngineClient(engine.address)
            replies = await asyncio.gather(
                *[answer(engine if seed % 2 else other, prompt, seed=seed) for seed, prompt in enumerate(prompts)]
            )
            for seed, prompt in enumerate(prompts):
                expected = await answer(local, prompt, seed=seed)
                assert tokens_of(replies[seed]) == tokens_of(expected)
                np.testing.assert_allclose(logprobs_of(replies[seed]), logprobs_of(expected), atol=1e-5)

            with pytest.raises(ValueError, match="token id 61"):
                await answer(engine, [61])
            with pytest.raises(EngineError, match="no model folder"):
                await engine.load(replace(second, location="/nonexistent"))
            with pytest.raises(EngineError, match=r"version-2/model\.safetensors was damaged or replaced"):
                await engine.load(replace(second, checksum=first.checksum))
            running = asyncio.ensure_future(answer(engine, [1], seed=9, max_tokens=120))
            os.kill(engine.process_id, signal.SIGINT)
            await engine.load(second)
            assert (await engine.health()).version == 2
            assert (await running)[-1].version == 2
            assert set(versions_of(await answer(other, [1, 2], session="later"))) == {2}

            cut = asyncio.ensure_future(answer(engine, [1], seed=10, max_tokens=126))
            await asyncio.sleep(0)
            await engine.cancel("s10")
            assert stop_of(await cut) in (GenerationStop.CANCELLED, GenerationStop.MAX_TOKENS)

            left = asyncio.ensure_future(answer(other, [1], session="left behind", max_tokens=126))
            await asyncio.sleep(0.01)
            await other.stop()
            with pytest.raises(EngineError, match="stopped"):
                await left
            while (await engine.health()).running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

            streams = [asyncio.ensure_future(answer(engine, [1], seed=seed, max_tokens=126)) for seed in range(20, 28)]
            await asyncio.sleep(0.005)
            os.kill(engine.process_id, signal.SIGKILL)
            ends = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 30.0)
            errors = [end for end in ends if isinstance(end, EngineError)]
            assert errors
            assert all("ended with -9" in str(error) for error in errors)
            with pytest.raises(EngineError, match="ended with -9"):
                await engine.health()
            await engine.close("s20")
        finally:
            await engine.stop()
            await engine.stop()

    asyncio.run(asyncio.wait_for(play(), 120))


def test_an_error_of_any_kind_is_answered(tmp_path: Path):
    """Catches a request whose error the server drops, so that its caller waits out a time limit."""

    class Broken(LocalEngine):
        async def health(self) -> EngineHealth:
            raise RuntimeError("no such counter")

        def submit(self, *_: object, **__: object) -> Generation:
            raise OverflowError("too large")

    async def play() -> None:
        engine = Broken(tiny(1), RealClock(), SMALL)
        address = str(tmp_path / "socket")
        server = await asyncio.get_running_loop().create_unix_server(lambda: EngineServer(engine).lines, address)
        client = EngineClient(address)
        async with server:
            with pytest.raises(EngineError, match="no such counter"):
                await client.health()
            with pytest.raises(EngineError, match="too large"):
                await answer(client, [1])  # type: ignore[arg-type]
            await client.stop()

    asyncio.run(asyncio.wait_for(play(), 60))


def test_a_failed_start_says_why():
    """Catches a start that waits out its whole time limit, or fails without the child's own words."""
    with pytest.raises(EngineError, match=r"did not start .*no model folder '/nonexistent'"):
        asyncio.run(ProcessEngine.start(NOWHERE))


def test_a_slow_start_is_given_up_and_leaves_nothing():
    """Catches a child that goes on loading after its parent has given up."""

    async def play() -> int:
        with pytest.raises(EngineError, match=r"start_timeout_s = 0\.2 s .*process (\d+) still runs") as caught:
            await ProcessEngine.start(NOWHERE, replace(SMALL, start_timeout_s=0.2))
        return int(str(caught.value).split("(process ")[1].split()[0])

    assert not is_running(asyncio.run(play()))


PARENT = """
import asyncio, sys
from sao.engines.process import ProcessEngine
from sao.engines.settings import EngineConfig
from sao.types import Snapshot

async def main():
    snapshot = Snapshot(version=1, parent=None, location=sys.argv[1], checksum=sys.argv[2])
    engine = await ProcessEngine.start(snapshot, EngineConfig(max_context=128))
    print(engine.process_id, engine.address, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path):
    """Catches engine processes that stay behind, holding memory and a core, after kill -9 of the run."""
    first = snapshot(tiny(1), tmp_path, 1)
    command = [sys.executable, "-c", PARENT, first.location, first.checksum]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, address = parent.stdout.readline().split()
        assert is_running(int(child))
        parent.kill()
        parent.wait()
        assert gone(int(child))
        assert not Path(address).parent.exists()
