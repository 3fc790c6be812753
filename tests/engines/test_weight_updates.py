"""New weights in mid-generation: every token is re-scored under every version's weights."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_toys import (
    PROBE,
    SMALL,
    VOCABULARY,
    answer,
    logprobs_of,
    packed_scores,
    prompt_of,
    snapshot,
    stop_of,
    tiny,
    tokens_of,
    until_tokens,
    versions_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao.clock import RealClock, VirtualClock, run_virtual
from sao.engines.local import LocalEngine
from sao.engines.protocol import EngineError, Sampling
from sao.engines.settings import EngineConfig
from sao.types import GenerationStop, Snapshot, TokenChunk

Reply = tuple[list[int], tuple[TokenChunk, ...]]


def check_versions(models: dict, replies: list[Reply]) -> int:
    """Each token's log-prob is that of its recorded version and of no other; returns how many tokens tell."""
    replies = [reply for reply in replies if tokens_of(reply[1])]
    prompts, answers = [prompt for prompt, _ in replies], [tokens_of(chunks) for _, chunks in replies]
    recorded = np.concatenate([logprobs_of(chunks) for _, chunks in replies])
    versions = np.concatenate([versions_of(chunks) for _, chunks in replies])
    for version, model in models.items():
        gap = np.abs(np.concatenate(packed_scores(model, prompts, answers)) - recorded)
        assert (gap[versions == version] < 1e-4).all(), f"tokens of version {version} are not scored as recorded"
        others = gap[versions != version]
        assert len(others) == 0 or (others > 1e-4).mean() > 0.9, f"the test cannot tell version {version} from others"
    for _, chunks in replies:
        assert versions_of(chunks) == sorted(versions_of(chunks))
    return len(recorded)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_every_token_is_of_the_version_it_names(architecture: str, tmp_path: Path):
    """Catches stale cache entries, a version that is stamped late or early, and weights that were never swapped."""
    models = {version: tiny(version, architecture) for version in (1, 2, 3)}
    snapshots = {version: snapshot(model, tmp_path, version) for version, model in models.items()}

    async def play() -> tuple[list[Reply], int]:
        engine = LocalEngine.from_snapshot(snapshots[1], RealClock(), SMALL)

        async def converse(seed: int) -> list[Reply]:
            prompt, replies = prompt_of(seed, 20), []
            for _ in range(2):
                chunks = await answer(engine, prompt, seed=seed, max_tokens=25)
                replies.append((prompt, chunks))
                prompt = [*prompt, *tokens_of(chunks), 1, 2, 3]
            return replies

        # Twelve sessions on eight rows: at each update some run, some are filled, some are parked, some wait.
        tasks = [asyncio.ensure_future(converse(seed)) for seed in range(12)]
        for version in (2, 3):
            await until_tokens(engine, 140 * (version - 1))
            await engine.load(snapshots[version])
            assert (await engine.health()).version == version
        replies = [reply for replies in await asyncio.gather(*tasks) for reply in replies]
        return replies, (await engine.health()).recomputed_tokens

    replies, recomputed = asyncio.run(play())
    assert check_versions(models, replies) == 600
    assert len({version for _, chunks in replies for version in versions_of(chunks)}) == 3
    assert recomputed > 100


def test_keep_goes_on_with_the_old_cache(tmp_path: Path):
    """Catches a switch without effect: after the update log-probs match neither version, and nothing is rebuilt."""
    models = {version: tiny(version) for version in (1, 2)}
    snapshots = {version: snapshot(model, tmp_path, version) for version, model in models.items()}

    async def play() -> tuple[Reply, int]:
        engine = LocalEngine.from_snapshot(snapshots[1], RealClock(), replace(SMALL, mode="keep"))
        prompt = list(range(30))
        task = asyncio.ensure_future(answer(engine, prompt, max_tokens=40))
        await until_tokens(engine, 12)
        await engine.load(snapshots[2])
        return (prompt, await task), (await engine.health()).recomputed_tokens

    (prompt, chunks), recomputed = asyncio.run(play())
    assert recomputed == 0
    after = np.array(versions_of(chunks)) == 2
    assert 0 < after.sum() < 40
    for model in models.values():
        gap = np.abs(packed_scores(model, [prompt], [tokens_of(chunks)])[0] - logprobs_of(chunks))
        assert gap[after].mean() > 0.01


def test_weights_that_fail_the_probe_are_not_kept(tmp_path: Path):
    """Catches an engine that samples from weights the trainer never scored: old weights and version stay in force."""
    model = tiny(1)
    first = snapshot(model, tmp_path, 1)
    wrong = replace(snapshot(tiny(2), tmp_path, 2), probe_logprobs=first.probe_logprobs)
    broken = replace(first, version=3, probe_logprobs=(float("nan"),) * (len(PROBE) - 1))

    async def play() -> Reply:
        engine = LocalEngine.from_snapshot(first, RealClock(), SMALL)
        prompt = list(range(9))
        task = asyncio.ensure_future(answer(engine, prompt, max_tokens=60))
        await until_tokens(engine, 5)
        for bad in (wrong, broken):
            with pytest.raises(EngineError, match=rf"version {bad.version} fails its probe"):
                await engine.load(bad)
        chunks = await task
        assert (await engine.health()).version == 1
        return prompt, chunks

    prompt, chunks = asyncio.run(play())
    assert set(versions_of(chunks)) == {1}
    np.testing.assert_allclose(logprobs_of(chunks), packed_scores(model, [prompt], [tokens_of(chunks)])[0], atol=1e-4)
    with pytest.raises(EngineError, match="fails its probe"):
        LocalEngine.from_snapshot(wrong, RealClock(), SMALL)


def test_an_unreadable_snapshot_is_an_error_that_names_it(tmp_path: Path):
    """Catches an engine that stops, or goes on without a word, when a snapshot was deleted, cut short or changed by a
    bit that its probe need not notice."""
    first, second = snapshot(tiny(1), tmp_path, 1), snapshot(tiny(2), tmp_path, 2)
    file = Path(second.location) / "model.safetensors"
    whole = file.read_bytes()

    async def play() -> None:
        engine = LocalEngine.from_snapshot(first, RealClock(), SMALL)
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(EngineError, match=r"version 2 was not loaded: .*model\.safetensors was damaged"):
            await engine.load(second)
        with pytest.raises(EngineError, match=r"version 2: .*model\.safetensors was damaged or replaced"):
            LocalEngine.from_snapshot(second, RealClock(), SMALL)
        file.write_bytes(whole[:-100])
        with pytest.raises(EngineError, match=r"version 2 was not loaded: .*model\.safetensors is cut short"):
            await engine.load(second)
        shutil.rmtree(second.location)
        with pytest.raises(EngineError, match="there is no model folder"):
            await engine.load(second)
        assert set(versions_of(await answer(engine, [1, 2, 3]))) == {1}

    asyncio.run(play())


def test_the_newest_of_waiting_loads_wins(tmp_path: Path):
    """Catches loads that overtake one another, and a caller of an overtaken load that waits for ever."""
    snapshots = [snapshot(tiny(version), tmp_path, version) for version in (1, 2, 3, 4)]

    async def play() -> list[int]:
        clock = VirtualClock()
        engine = LocalEngine.from_snapshot(snapshots[0], clock, SMALL)
        seen: list[int] = []

        async def load(item: Snapshot) -> None:
            await engine.load(item)
            seen.append((await engine.health()).version)

        first = asyncio.ensure_future(load(snapshots[1]))
        await clock.sleep(0.001)
        await asyncio.gather(first, load(snapshots[2]), load(snapshots[3]))
        return seen

    # 2 is being read when 3 and 4 arrive; 3 is overtaken by 4.
    assert run_virtual(play()) == [2, 4, 4]


def test_an_idle_engine_takes_weights(tmp_path: Path):
    """Catches a swap that waits for a decode step that never comes."""
    snapshots = [snapshot(tiny(version), tmp_path, version) for version in (1, 2)]

    async def play() -> int:
        engine = LocalEngine.from_snapshot(snapshots[0], RealClock(), SMALL)
        await asyncio.wait_for(engine.load(snapshots[1]), 10)
        return (await engine.health()).version

    assert asyncio.run(play()) == 2


actions = st.lists(
    st.tuples(
        st.sampled_from(["talk", "talk", "talk", "cancel", "close", "load", "leave"]),
        st.integers(0, 5),
        st.integers(0, 12),
    ),
    min_size=5,
    max_size=25,
)


@given(script=actions, rows=st.integers(1, 4), prefill=st.sampled_from([3, 16, 64]), flush=st.sampled_from([1, 5]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything_in_any_order_equals_one_by_one(
    script: list, rows: int, prefill: int, flush: int, stress_snapshots: dict
):
    """Catches whatever goes wrong only in combination: sessions that come, talk on, are cut off, leave and return
    while weights change under them. Every token is re-scored one by one under its version."""
    models, snapshots = stress_snapshots
    config = EngineConfig(max_sessions=rows, max_context=64, prefill_tokens=prefill, flush_tokens=flush)

    async def play() -> list[Reply]:
        clock = VirtualClock()
        engine = LocalEngine.from_snapshot(snapshots[1], clock, config)
        replies: list[Reply] = []
        texts: dict[str, list[int]] = {}
        busy: dict[str, asyncio.Task[None]] = {}
        loads: list[asyncio.Task[None]] = []

        async def talk(name: str, number: int, size: int) -> None:
            prompt = texts[name] = [*texts.get(name, []), *prompt_of(number, 9)]
            chunks: list[TokenChunk] = []
            stream = engine.generate(prompt, max_tokens=3 + size, sampling=Sampling(seed=number), session=name)
            async for chunk in stream:
                chunks.append(chunk)
            assert chunks[-1].stop is not None
            replies.append((prompt, tuple(chunks)))
            texts[name] = [*prompt, *tokens_of(tuple(chunks))]

        for number, (action, who, size) in enumerate(script):
            name = f"session-{who}"
            idle = name not in busy or busy[name].done()
            if action == "talk" and idle:
                busy[name] = asyncio.ensure_future(talk(name, number, size))
            elif action == "cancel":
                await engine.cancel(name)
            elif action == "close":
                await engine.close(name)
            elif action == "leave" and not idle:
                busy[name].cancel()
            elif action == "load":
                loads.append(asyncio.ensure_future(engine.load(snapshots[2 + size % 2])))
            await clock.sleep(size * 0.0007)
        await asyncio.gather(*busy.values(), *loads, return_exceptions=True)
        assert all(task.cancelled() or task.exception() is None for task in [*busy.values(), *loads])
        assert (await engine.health()).running == 0
        await engine.stop()
        return replies

    for prompt, chunks in run_virtual(play()):
        if stop_of(chunks) is GenerationStop.CONTEXT_FULL:
            assert len(prompt) >= 64 or len(prompt) + len(tokens_of(chunks)) == 64
        for version in set(versions_of(chunks)):
            of_version = np.array(versions_of(chunks)) == version
            expected = packed_scores(models[version], [prompt], [tokens_of(chunks)])[0]
            np.testing.assert_allclose(logprobs_of(chunks)[of_version], expected[of_version], atol=1e-4)
        assert all(0 <= token < VOCABULARY for token in tokens_of(chunks))


@pytest.fixture(scope="module")
def stress_snapshots(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    folder = tmp_path_factory.mktemp("stress")
    models = {version: tiny(version) for version in (1, 2, 3)}
    return models, {version: snapshot(model, folder, version) for version, model in models.items()}


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), MemoryError("no room"), KeyError("lm_head")])
@pytest.mark.parametrize("place", ["reading", "proving"])
def test_any_error_is_that_of_the_load_and_the_next_one_works(
    error: Exception, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches an error of an unforeseen kind that ends the loading task: that load, and every later one, would hang."""
    first, second = snapshot(tiny(1), tmp_path, 1), snapshot(tiny(2), tmp_path, 2)

    def fail(*_: object) -> None:
        raise error

    async def play() -> None:
        engine = LocalEngine.from_snapshot(first, VirtualClock(), SMALL)
        with monkeypatch.context() as patch:
            if place == "reading":
                patch.setattr("sao.engines.local.read_weights", fail)
            else:
                patch.setattr(engine, "_prove", fail)
            with pytest.raises(EngineError, match=f"version 2 was not loaded: {type(error).__name__}"):
                await engine.load(second)
        assert set(versions_of(await answer(engine, [1, 2], session="before"))) == {1}
        await engine.load(second)
        assert set(versions_of(await answer(engine, [1, 2], session="after"))) == {2}
        await engine.stop()

    run_virtual(play())
