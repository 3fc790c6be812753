"""Single requests of the vLLM engine that go wrong, or wait, while the server is well; and its NCCL sender's pipe."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from engine_toys import answer, snapshot, stop_of, tiny, tokens_of, versions_of
from fake_vllm import FakeVllm
from test_vllm import CONFIG, ENGINE, run, until

from sao.engines import vllm
from sao.engines.pool import EnginePool, PoolConfig
from sao.engines.protocol import Engine, EngineError, RequestRefusedError
from sao.engines.vllm import VllmEngine
from sao.engines.vllm_http import VllmHttp
from sao.engines.vllm_transports import NcclTransport
from sao.types import GenerationStop, Snapshot


def test_a_request_in_the_queue_of_a_paused_server_does_not_hold_the_update_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches updates that wait the whole time for requests that a paused server keeps until it is resumed."""
    snapshots = {version: snapshot(tiny(version), tmp_path, version) for version in (1, 2)}
    monkeypatch.setattr(vllm, "DRAIN_S", 600.0)

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, snapshots[1], ENGINE, CONFIG)
        server.queued = {3}
        waiting = asyncio.ensure_future(answer(engine, [3], max_tokens=4))
        await until(lambda: len(server.salts) > 0 and server.prompts[-1] == 1)
        await asyncio.wait_for(engine.load(snapshots[2]), 120)
        server.queued = set()
        chunks = await waiting
        assert versions_of(chunks) == [2] * 4
        await engine.stop()

    run(play)


def test_a_request_may_queue_for_as_long_as_others_get_tokens(tmp_path: Path):
    """Catches a healthy replica taken out because more generations were asked of it than it runs at once."""
    start = snapshot(tiny(1), tmp_path, 1)

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, start, ENGINE, replace(CONFIG, stall_timeout_s=1.5))
        server.queued, server.token_seconds = {3}, 0.1
        waiting = asyncio.ensure_future(answer(engine, [3], max_tokens=4))
        others = await answer(engine, [5], seed=1, max_tokens=40)
        assert len(tokens_of(others)) == 40
        assert not waiting.done()
        server.queued = set()
        assert stop_of(await waiting) is GenerationStop.MAX_TOKENS
        await engine.stop()

    run(play)


def test_the_models_own_sampling_defaults_do_not_count(tmp_path: Path):
    """Catches tokens cut to the top_k of a model's generation_config.json, whose log-probs are of another policy."""
    start = snapshot(tiny(1), tmp_path, 1)

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, start, ENGINE, CONFIG)
        plain = tokens_of(await answer(engine, [3], max_tokens=16))
        server.model_top_k = 1
        assert tokens_of(await answer(engine, [3], max_tokens=16)) == plain
        await engine.stop()

    run(play)


def test_a_server_that_answers_503_is_asked_again(tmp_path: Path):
    """Catches a replica taken out by the answer that later versions of vLLM give while they are paused; and an endless
    loop where it is all that a server ever says."""
    start = snapshot(tiny(1), tmp_path, 1)

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, start, ENGINE, CONFIG)
        server.busy = 2
        assert len(tokens_of(await answer(engine, [3], max_tokens=4))) == 4
        server.busy = 1 << 30
        with pytest.raises(EngineError, match="aborted 3 requests in a row without a token"):
            await answer(engine, [3], max_tokens=4)
        await engine.stop()

    run(play)


def test_a_refused_request_costs_no_replica(tmp_path: Path):
    """Catches one prompt that a server will not take ending every replica in turn."""
    start = snapshot(tiny(1), tmp_path, 1)

    async def play(server: FakeVllm) -> None:
        async def connect(place: int, snapshot: Snapshot) -> Engine:
            return await VllmEngine.connect(server.address, snapshot, ENGINE, CONFIG)

        pool = await EnginePool.start(connect, 1, start, PoolConfig())
        server.refuses_request = True
        with pytest.raises(RequestRefusedError, match=r"phase generate: .* answered 400: .*this prompt is not taken"):
            await answer(pool, [3], max_tokens=4)
        server.refuses_request = False
        assert len(tokens_of(await answer(pool, [3], max_tokens=4))) == 4
        assert (await pool.health()).taken_out == 0
        await pool.stop()

    run(play)


def test_an_answer_that_nobody_foresaw_is_an_error(tmp_path: Path):
    """Catches a generation that waits for ever because the task that reads its answer has died."""
    start = snapshot(tiny(1), tmp_path, 1)

    async def play(server: FakeVllm) -> None:
        engine = await VllmEngine.connect(server.address, start, ENGINE, CONFIG)
        server.garbage = True
        with pytest.raises(EngineError, match=r"phase generate: not understood \(.*Error"):
            await asyncio.wait_for(answer(engine, [3], max_tokens=4), 60)
        await engine.stop()

    run(play)


def test_checksums_find_a_server_that_keeps_its_weights_in_bfloat16(tmp_path: Path):
    """Catches an update that is ignored while it is smaller than what the probe tolerates."""
    snapshots = {version: snapshot(tiny(version), tmp_path, version) for version in (1, 2)}
    engine = replace(ENGINE, dtype="bfloat16", probe_tolerance=100.0)

    async def play(server: FakeVllm) -> None:
        server.dtype = "bfloat16"
        blind = await VllmEngine.connect(server.address, snapshots[1], engine, CONFIG)
        await blind.load(snapshots[2])
        server.lies = True
        await blind.load(snapshots[1])  # what the probe alone lets pass
        seeing = await VllmEngine.connect(server.address, snapshots[2], engine, replace(CONFIG, checksums=True))
        with pytest.raises(EngineError, match=r"phase checksum: .*under version 1 are those of version 2"):
            await seeing.load(snapshots[1])
        server.lies = False
        await seeing.load(snapshots[1])
        await seeing.load(snapshots[2])
        for each in (blind, seeing):
            await each.stop()

    run(play)


STUB = """
print("INFO a line that vLLM logs when it is imported")
import sys, types

class Factory:
    @staticmethod
    def trainer_init(init, client, source):
        print("INFO Creating weight transfer trainer engine")
        return types.SimpleNamespace(send_weights=lambda: print("INFO sent", source.folder, client.version))

class Client:
    def __init__(self, address, timeout):
        pass
    def finish_weight_update(self, weight_version=None):
        pass

for name, parts in {
    "vllm.distributed": {}, "vllm.distributed.weight_transfer": {"WeightTransferTrainerFactory": Factory},
    "vllm.distributed.weight_transfer.base": {"ParamMeta": tuple, "WeightSource": object},
    "vllm.distributed.weight_transfer.clients": {"HTTPVLLMWeightSyncClient": Client},
    "vllm.distributed.weight_transfer.nccl_engine": {"NCCLTrainerInitInfo": dict},
}.items():
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(parts)
"""


def test_what_vllm_prints_is_no_answer_of_the_nccl_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches every update over NCCL failing because vLLM logs to the pipe of the answers. vLLM is a stand-in: it needs
    GPUs there."""
    (tmp_path / "vllm.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = snapshot(tiny(1), tmp_path / "snapshots", 1)

    async def play() -> None:
        config = replace(CONFIG, transport="nccl", command=sys.executable)
        transport = NcclTransport(
            VllmHttp("http://127.0.0.1:9", config, update_timeout_s=60.0), config, workers=1, timeout_s=60.0
        )
        await transport.send(start)
        await transport.send(start)
        await transport.close()

    asyncio.run(play())
