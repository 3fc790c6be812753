"""The vLLM engine against a small server with vLLM's routes over a real transformer, honest and not."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_toys import SMALL, VOCABULARY, answer, prompt_of, snapshot, stop_of, tiny, tokens_of, versions_of
from fake_vllm import FakeVllm
from test_weight_updates import check_versions

from sao.engines.protocol import EngineError, Sampling
from sao.engines.vllm import VllmEngine
from sao.engines.vllm_settings import VllmConfig
from sao.types import GenerationStop, Snapshot

ENGINE = replace(SMALL, kind="vllm", load_timeout_s=200.0)
CONFIG = VllmConfig(connect_timeout_s=30.0, pause_timeout_s=30.0, probe_timeout_s=30.0, stall_timeout_s=30.0)


def run(play: Callable[[FakeVllm], Awaitable[None]], model_seed: int = 1) -> None:
    async def within() -> None:
        server = await FakeVllm(tiny(model_seed)).start()
        try:
            await play(server)
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(within(), 300))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("transport", ["folder", "gloo"])
def test_an_update_in_mid_stream_has_exact_boundaries(transport: str, tmp_path: Path):
    """Catches a token stamped with a version that did not sample it, tokens lost or doubled where a request is cut,
    a request that goes on under the old cache, and anything but the probe sent before the probe has passed."""
    models = {version: tiny(version) for version in (1, 2, 3)}
    snapshots = {version: snapshot(model, tmp_path, version) for version, model in models.items()}

    async def play(server: FakeVllm) -> None:
        server.transport, server.first_folder = transport, snapshots[1].location
        config = replace(CONFIG, transport=transport)
        engine = await VllmEngine.connect(server.address, snapshots[1], ENGINE, config)

        async def converse(seed: int):
            prompt = prompt_of(seed, 20)
            return prompt, await answer(engine, prompt, seed=seed, max_tokens=40)

        tasks = [asyncio.ensure_future(converse(seed)) for seed in range(8)]
        for version in (2, 3):
            await until(lambda version=version: server.sampled > 90 * (version - 1))
            await engine.load(snapshots[version])
            assert (await engine.health()).version == version
        replies = await asyncio.gather(*tasks)
        assert check_versions(models, list(replies)) == 8 * 40
        assert {version for _, chunks in replies for version in versions_of(chunks)} == {1, 2, 3}
        assert set(server.salts) >= {"version-1", "version-2", "version-3"}
        health = await engine.health()
        assert health.probe_gap < 1e-4
        assert health.recomputed_tokens > 0
        assert health.running == 0
        assert health.update_seconds > 0
        assert health.update_bytes == (Path(snapshots[3].location) / "model.safetensors").stat().st_size
        resumed = [place for place, call in enumerate(server.calls) if call == "POST /resume"]
        assert len(resumed) == 3
        for place in resumed[1:]:
            assert server.calls[place - 3 : place] == [
                "POST /start_weight_update",
                "POST /update_weights",
                "POST /finish_weight_update",
            ]
            assert server.calls[place + 1] == "POST /v1/completions"
        await engine.stop()

    run(play)


def test_ends_and_draws(tmp_path: Path):
    """Catches a reason that the worker would take for another, draws that do not follow the seed and the first token's
    index, a lost request after cancel, and a prompt that the server would refuse."""
    first = snapshot(tiny(1), tmp_path, 1)

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, first, ENGINE, CONFIG)
        prompt = [1, 2, 3]
        reply = await answer(engine, prompt, seed=5, max_tokens=20)
        assert stop_of(reply) is GenerationStop.MAX_TOKENS
        assert tokens_of(reply) == tokens_of(await answer(engine, prompt, seed=5, max_tokens=20))
        assert tokens_of(reply) != tokens_of(await answer(engine, prompt, seed=6, max_tokens=20))
        assert tokens_of(reply) != tokens_of(await answer(engine, prompt, seed=5, max_tokens=20, first=1))
        stop = tokens_of(reply)[10]
        cut = await answer(engine, prompt, seed=5, max_tokens=20, stops=(stop,))
        assert stop_of(cut) is GenerationStop.STOP_TOKEN
        assert tokens_of(cut) == tokens_of(reply)[: tokens_of(reply).index(stop) + 1]
        full = await answer(engine, [1] * 120, seed=5, max_tokens=20)
        assert (stop_of(full), len(tokens_of(full))) == (GenerationStop.CONTEXT_FULL, 8)
        assert stop_of(await answer(engine, [1] * 128, seed=5)) is GenerationStop.CONTEXT_FULL

        server.token_seconds = 0.01
        running = asyncio.ensure_future(answer(engine, prompt, seed=9, max_tokens=100))
        began = server.sampled
        await until(lambda: server.sampled > began + 3)
        with pytest.raises(ValueError, match="one at a time"):
            await answer(engine, prompt, seed=9)
        await engine.cancel("s9")
        assert stop_of(await running) is GenerationStop.CANCELLED
        for bad, message in (([VOCABULARY], "token id 61"), ([], "empty")):
            with pytest.raises(ValueError, match=message):
                await answer(engine, bad)
        with pytest.raises(ValueError, match="max_tokens is 0"):
            await answer(engine, prompt, max_tokens=0)
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineError, match="stopped"):
            await answer(engine, prompt)

    run(play)


def test_a_server_that_keeps_the_old_weights_is_found_out(tmp_path: Path):
    """Catches tokens of old weights under a new version, both where the update is large and where it is smaller than
    the probe's tolerance; and a server that passes later but stays shut."""
    close = tiny(1)
    for parameter in close.parameters():
        parameter.data.mul_(1 + 1e-4)
    snapshots = {1: snapshot(tiny(1), tmp_path, 1), 2: snapshot(close, tmp_path, 2), 3: snapshot(tiny(3), tmp_path, 3)}
    small = np.abs(np.subtract(snapshots[1].probe_logprobs, snapshots[2].probe_logprobs)).max()
    assert 1e-4 < small < 3e-3

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, snapshots[1], replace(ENGINE, probe_tolerance=0.01), CONFIG)
        server.lies = True
        for version, message in ((2, "those of version 1, to the bit"), (3, "differ from the trainer's by")):
            running = asyncio.ensure_future(answer(engine, [1], seed=version, max_tokens=100))
            if version == 2:
                await until(lambda: server.sampled > 20)
            with pytest.raises(EngineError, match=message):
                await engine.load(snapshots[version])
            with pytest.raises(EngineError):
                await running
            with pytest.raises(EngineError, match=f"version {version} was not loaded"):
                await engine.health()
        server.lies = False
        await engine.load(snapshots[3])
        assert set(versions_of(await answer(engine, [1]))) == {3}
        await engine.stop()

    run(play)


def test_a_request_aborted_before_its_first_token_is_sent_again(tmp_path: Path):
    """Catches a healthy server that is taken out since vLLM gives such a request no finish reason; and a generation
    that asks for ever where somebody else aborts it."""
    first, second = snapshot(tiny(1), tmp_path, 1), snapshot(tiny(2), tmp_path, 2)

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, first, ENGINE, CONFIG)
        server.token_seconds, asked = 0.5, len(server.salts)
        running = asyncio.ensure_future(answer(engine, [1], max_tokens=3))
        await until(lambda: len(server.salts) > asked)
        server.token_seconds = 0.001
        await engine.load(second)
        assert versions_of(await running) == [2, 2, 2]
        server.token_seconds = 0.2
        running = asyncio.ensure_future(answer(engine, [1], max_tokens=3))
        for _ in range(3):
            asked = len(server.salts)
            await until(lambda asked=asked: len(server.salts) > asked)
            server.abort()
        with pytest.raises(EngineError, match="aborted 3 requests in a row without a token"):
            await running
        await engine.stop()

    run(play)


def test_a_connection_that_was_idle_for_long_is_not_used_again(tmp_path: Path):
    """Catches an update that comes just when the server hangs up on an idle connection: its first request is lost."""

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, snapshot(tiny(1), tmp_path, 1), ENGINE, CONFIG)
        await engine.health()
        before = server.accepted
        await engine.health()
        assert server.accepted == before
        await asyncio.sleep(1.2)
        await engine.health()
        assert server.accepted > before
        await engine.stop()

    run(play)


def test_a_half_written_snapshot_stops_nothing(tmp_path: Path):
    """Catches a server that is paused, or loses its weights, for files that cannot be loaded."""
    first, second = snapshot(tiny(1), tmp_path, 1), snapshot(tiny(2), tmp_path, 2)
    file = Path(second.location) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, first, ENGINE, CONFIG)
        calls = server.calls.count("POST /pause")
        for broken, message in (
            (second, "is cut short or damaged"),
            (replace(first, version=4, checksum="crc32c:00000000"), "was damaged or replaced"),
            (replace(second, location=str(tmp_path / "nowhere")), "no model folder"),
        ):
            with pytest.raises(EngineError, match=message):
                await engine.load(broken)
        assert server.calls.count("POST /pause") == calls
        assert set(versions_of(await answer(engine, [1, 2]))) == {1}
        await engine.stop()

    run(play)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"development": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"vocabulary": 60}, "fewer than the policy's 61 tokens"),
        ({"vocabulary": 62}, "more than the policy's 61 tokens"),
        ({"dtype": "torch.bfloat16"}, "its dtype is bfloat16, engine.dtype is float32"),
        ({"version": "0.29.1"}, "it is vLLM 0.29.1"),
        ({"context": 64}, "--max-model-len=128"),
        ({"logprobs_mode": "raw_logprobs"}, "processed_logprobs"),
        ({"transport": "nccl"}, "its weight transfer is nccl, vllm.transport is folder"),
    ],
)
def test_an_unfit_server_is_refused_unharmed(fault: dict, message: str, tmp_path: Path):
    """Catches a run that trains for hours on tokens of a server that could never have fitted."""
    first = snapshot(tiny(1), tmp_path, 1)

    async def play(server: FakeVllm) -> None:
        for name, value in fault.items():
            setattr(server, name, value)
        with pytest.raises(EngineError, match=message) as caught:
            await VllmEngine.connect(server.address, first, ENGINE, CONFIG)
        assert server.address in str(caught.value)
        assert "POST /pause" not in server.calls

    run(play)


def test_a_connection_that_was_just_closed_costs_nothing(tmp_path: Path):
    """Catches a replica taken out because it closed an idle connection at the moment of its next use, and an error that
    blames the development mode for it; a step of an update must not be sent twice."""
    snapshots = {version: snapshot(tiny(version), tmp_path, version) for version in (1, 2)}

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, snapshots[1], ENGINE, CONFIG)
        server.hangs_up |= {"/health", "/weight_info", "/pause", "/resume", "/v1/completions"}
        assert (await engine.health()).version == 1
        await engine.load(snapshots[2])
        assert not server.hangs_up
        server.hangs_up |= {"/v1/completions"}
        assert set(versions_of(await answer(engine, [1]))) == {2}
        server.hangs_up |= {"/update_weights"}
        with pytest.raises(EngineError, match=r"/update_weights cannot be reached") as caught:
            await engine.load(snapshots[1])
        assert "DEV_MODE" not in str(caught.value)
        await engine.load(snapshots[1])
        server.development = False
        with pytest.raises(EngineError, match=r"phase pause: /pause answered 404: .*VLLM_SERVER_DEV_MODE=1"):
            await engine.load(snapshots[2])
        await engine.stop()

    run(play)


def test_every_wait_ends(tmp_path: Path):
    """Catches a run that hangs on a server that is dead, silent, refuses an update, or was restarted by someone."""
    snapshots = {version: snapshot(tiny(version), tmp_path, version) for version in (1, 2)}
    short = replace(CONFIG, stall_timeout_s=2.0)

    async def play(server: FakeVllm) -> None:
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:9, phase connect: .*sao serve-engine"):
            await VllmEngine.connect("http://127.0.0.1:9", snapshots[1], ENGINE, CONFIG)
        engine = await VllmEngine.connect(server.address, snapshots[1], ENGINE, short)
        server.stalls_after = server.sampled + 5
        with pytest.raises(EngineError, match=r"no token, for any generation, within vllm\.stall_timeout_s = 2 s"):
            await answer(engine, [1])
        server.stalls_after = 1 << 30
        server.label = "someone else's"
        with pytest.raises(EngineError, match="restarted, or updated by someone else"):
            await engine.health()
        await engine.load(snapshots[2])
        server.refuses_update = "no space left"
        with pytest.raises(EngineError, match=r"phase update \(update_weights\): .* answered 500: .*no space left"):
            await engine.load(snapshots[1])
        with pytest.raises(EngineError, match="version 1 was not loaded"):
            await answer(engine, [1])
        server.refuses_update = ""
        await engine.load(snapshots[1])
        server.dies_after = server.sampled + 5
        with pytest.raises(EngineError, match="phase generate: the connection broke"):
            await answer(engine, [1])
        with pytest.raises(EngineError, match="phase health"):
            await engine.health()
        await engine.stop()

    run(play)


def test_a_server_that_somebody_pauses_before_its_first_words_is_refused(tmp_path: Path):
    """Catches a start, or a replacement, that waits for ever for the words of a server that a second user paused."""
    first = snapshot(tiny(1), tmp_path, 1)

    async def play(server: FakeVllm) -> None:
        server.queued = {3}  # the check's prompt begins so
        connecting = VllmEngine.connect(server.address, first, ENGINE, replace(CONFIG, probe_timeout_s=3.0))
        with pytest.raises(EngineError, match=r"phase check: 4 tokens did not come within vllm\.probe_timeout_s = 3 s"):
            await asyncio.wait_for(connecting, 60)
        assert server.calls[-1] == "POST /v1/completions"

    run(play)


def test_of_loads_that_wait_only_the_newest_is_done(tmp_path: Path):
    """Catches a server that is stopped once for every version that a fast trainer publishes."""
    snapshots: dict[int, Snapshot] = {version: snapshot(tiny(version), tmp_path, version) for version in (1, 2, 3, 4)}

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, snapshots[1], ENGINE, CONFIG)
        await asyncio.gather(*(engine.load(snapshots[version]) for version in (2, 3, 4)))
        assert (await engine.health()).version == 4
        assert server.calls.count("POST /pause") <= 3
        assert set(versions_of(await answer(engine, [1]))) == {4}
        assert Sampling().neutral
        await engine.stop()

    run(play)
