"""The local engine against one plain forward per sequence: same weights, same log-probs, whatever happens around it."""

import asyncio
import itertools

import numpy as np
import pytest
import torch
from engine_toys import (
    SMALL,
    answer,
    logprobs_of,
    packed_scores,
    prompt_of,
    stop_of,
    tiny,
    tokens_of,
    until_tokens,
)
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from sao.clock import RealClock, VirtualClock, run_virtual
from sao.engines.local import LocalEngine
from sao.engines.protocol import EngineError, Sampling, complete
from sao.engines.settings import EngineConfig, EngineCost
from sao.models.scoring import sequence_logprobs
from sao.types import GenerationStop


def scored_alone(model, prompt: list[int], sampled: list[int]) -> np.ndarray:
    return sequence_logprobs(model, prompt + sampled).numpy()[len(prompt) - 1 :]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_logprobs_equal_the_trainers_packed_forward(architecture: str):
    """Catches any difference of mask, position, cache or head between sampling and training."""
    prompts = [prompt_of(seed) for seed in range(20)]

    async def play() -> list:
        engine = LocalEngine(tiny(1, architecture), RealClock(), SMALL)
        chunks = await asyncio.gather(*[answer(engine, prompt, seed=seed) for seed, prompt in enumerate(prompts)])
        await engine.stop()
        return chunks

    replies = asyncio.run(play())
    scores = packed_scores(tiny(1, architecture), prompts, [tokens_of(chunks) for chunks in replies])
    for chunks, expected in zip(replies, scores, strict=True):
        np.testing.assert_allclose(logprobs_of(chunks), expected, atol=1e-4)


def test_a_reply_does_not_depend_on_the_company():
    """Catches randomness drawn from a shared generator, and rows that leak into one another."""
    prompts = [prompt_of(seed) for seed in range(32)]

    async def together() -> list:
        engine = LocalEngine(tiny(1), RealClock(), EngineConfig(max_sessions=32, max_context=128))
        return await asyncio.gather(*[answer(engine, prompt, seed=seed) for seed, prompt in enumerate(prompts)])

    async def alone(seed: int):
        return await answer(LocalEngine(tiny(1), RealClock(), SMALL), prompts[seed], seed=seed)

    replies = asyncio.run(together())
    for seed in (0, 7, 31):
        single = asyncio.run(alone(seed))
        assert tokens_of(single) == tokens_of(replies[seed])
        np.testing.assert_allclose(logprobs_of(single), logprobs_of(replies[seed]), atol=1e-5)


def test_a_later_turn_fills_only_its_tail():
    """Catches a cache that is dropped between turns. Virtual seconds count prefilled tokens: 19, then 7."""

    async def play() -> tuple[float, float, float]:
        clock = VirtualClock()
        cost = EngineCost(step_seconds=0, token_seconds=0, prefill_token_seconds=1)
        engine = LocalEngine(tiny(1), clock, SMALL, cost)
        prompt = list(range(20))
        first = await answer(engine, prompt, max_tokens=5, session="a")
        after_first = clock.now()
        # 20 + 5 tokens are held, the last of them not in the cache: it and six of the seven new ones are filled.
        prompt += [*tokens_of(first), 3, 1, 4, 1, 5, 9, 2]
        second = await answer(engine, prompt, max_tokens=5, session="a", first=5)
        gap = np.abs(logprobs_of(second) - scored_alone(tiny(1), prompt, tokens_of(second))).max()
        return after_first, clock.now() - after_first, float(gap)

    first, second, gap = run_virtual(play())
    assert (first, second) == (19, 7)
    assert gap < 1e-4


def test_turns_continue_one_keyed_stream():
    """Catches token indices that start again each turn: with the same text, the draws would repeat."""

    async def play() -> tuple[list[int], list[int]]:
        engine = LocalEngine(tiny(1), RealClock(), SMALL)
        whole = tokens_of(await answer(engine, [1, 2, 3], seed=5, max_tokens=20))
        head = tokens_of(await answer(engine, [1, 2, 3], seed=5, max_tokens=8, session="split"))
        tail = tokens_of(await answer(engine, [1, 2, 3, *head], seed=5, max_tokens=12, session="split", first=8))
        return whole, head + tail

    whole, split = asyncio.run(play())
    assert whole == split


def test_a_rewritten_prompt_is_not_read_from_the_old_cache():
    """Catches reuse beyond the longest common prefix, as after a compaction of the conversation."""

    async def play() -> None:
        engine = LocalEngine(tiny(1), RealClock(), SMALL)
        await answer(engine, list(range(30)), session="a")
        for prompt in ([*range(12), 50, 51, 52], list(range(9)), [9], list(range(30))):
            chunks = await answer(engine, prompt, session="a")
            np.testing.assert_allclose(logprobs_of(chunks), scored_alone(tiny(1), prompt, tokens_of(chunks)), atol=1e-4)

    asyncio.run(play())


def test_more_sessions_than_rows_are_evicted_and_rebuilt():
    """Catches an evicted session that reads another one's row; rebuilt tokens are counted, first fills are not."""

    async def play() -> tuple[int, int]:
        engine = LocalEngine(tiny(1), RealClock(), EngineConfig(max_sessions=2, max_context=128))

        async def converse(seed: int) -> None:
            prompt, first = prompt_of(seed, 20), 0
            for _ in range(3):
                chunks = await answer(engine, prompt, seed=seed, max_tokens=6, first=first)
                expected = scored_alone(tiny(1), prompt, tokens_of(chunks))
                np.testing.assert_allclose(logprobs_of(chunks), expected, atol=1e-4)
                first += 6
                prompt = [*prompt, *tokens_of(chunks), 1, 2]

        await converse(0)
        before = (await engine.health()).recomputed_tokens
        await asyncio.gather(*[converse(seed) for seed in range(1, 6)])
        return before, (await engine.health()).recomputed_tokens

    before, after = asyncio.run(play())
    assert before == 0
    assert after > 0


def test_endings():
    """Catches a wrong or missing reason, and a stop token that is dropped or passed over."""

    async def play() -> None:
        engine = LocalEngine(tiny(1), RealClock(), EngineConfig(max_sessions=4, max_context=40, flush_tokens=4))
        free = tokens_of(await answer(engine, [1, 2, 3], seed=9, max_tokens=20))
        cut = await answer(engine, [1, 2, 3], seed=9, max_tokens=20, stops=(60, free[6]))
        assert tokens_of(cut) == free[: free.index(free[6]) + 1]
        assert stop_of(cut) is GenerationStop.STOP_TOKEN
        short = await answer(engine, [1, 2, 3], seed=9, max_tokens=7)
        assert (tokens_of(short), stop_of(short)) == (free[:7], GenerationStop.MAX_TOKENS)
        assert [chunk.stop for chunk in short[:-1]] == [None] * (len(short) - 1)
        full = await answer(engine, [1] * 30, seed=9, max_tokens=100)
        assert (len(tokens_of(full)), stop_of(full)) == (10, GenerationStop.CONTEXT_FULL)
        over = await answer(engine, [1] * 40, seed=9)
        assert (tokens_of(over), stop_of(over)) == ([], GenerationStop.CONTEXT_FULL)

    asyncio.run(play())


def test_cancel_gives_what_there_is_and_frees_the_row():
    """Catches lost tokens, a stream that never ends, and rows that leak: 20 cancelled sessions pass two rows."""

    async def play() -> None:
        engine = LocalEngine(tiny(1), RealClock(), EngineConfig(max_sessions=2, max_context=128, flush_tokens=64))
        for number in range(20):
            task = asyncio.ensure_future(answer(engine, [1, 2], seed=number, max_tokens=100))
            await until_tokens(engine, (await engine.health()).generated_tokens + 3)
            await engine.cancel(f"s{number}")
            chunks = await task
            assert stop_of(chunks) is GenerationStop.CANCELLED
            np.testing.assert_allclose(logprobs_of(chunks), scored_alone(tiny(1), [1, 2], tokens_of(chunks)), atol=1e-4)
        # Two that wait for a row: cancelled there, they end without a token.
        tasks = [asyncio.ensure_future(answer(engine, [1], seed=number, max_tokens=60)) for number in range(4)]
        await until_tokens(engine, (await engine.health()).generated_tokens + 3)
        await engine.cancel("s3")
        assert tokens_of(await tasks[3]) == []
        assert [stop_of(await task) for task in tasks[:3]] == [GenerationStop.MAX_TOKENS] * 3
        await engine.cancel("never seen")
        await engine.close("never seen")

    asyncio.run(play())


def test_a_consumer_that_walks_away_ends_its_generation():
    """Catches an engine that goes on sampling for nobody, holding a row for good."""

    async def play() -> int:
        engine = LocalEngine(tiny(1), RealClock(), EngineConfig(max_sessions=1, max_context=128, flush_tokens=2))
        stream = engine.generate([1], max_tokens=120, sampling=Sampling(), session="a")
        async for _ in stream:
            break
        await stream.aclose()
        again = await answer(engine, [1, 2, 3], session="a", max_tokens=5)
        assert len(tokens_of(again)) == 5
        return (await engine.health()).generated_tokens

    assert asyncio.run(play()) < 20


def test_close_then_reuse_of_the_name_starts_afresh():
    """Catches a close that arrives late and takes the row of the name's next owner."""

    async def play() -> None:
        engine = LocalEngine(tiny(1), RealClock(), SMALL)
        first = await answer(engine, list(range(20)), session="a")
        await engine.close("a")
        second = await answer(engine, list(range(20)), session="a")
        assert tokens_of(first) == tokens_of(second)
        assert (await engine.health()).recomputed_tokens == 0

    asyncio.run(play())


def test_bad_requests_are_refused_and_harm_nobody():
    """Catches an index error deep in the model, which would end every other session's stream."""

    async def play() -> None:
        engine = LocalEngine(tiny(1), RealClock(), SMALL)
        neighbour = asyncio.ensure_future(answer(engine, [1, 2], session="a", max_tokens=50))
        await until_tokens(engine, 1)
        with pytest.raises(ValueError, match="token id 61 is not in the model's vocabulary of 61"):
            await answer(engine, [1, 61], session="b")
        with pytest.raises(ValueError, match="empty"):
            await answer(engine, [], session="b")
        with pytest.raises(ValueError, match="max_tokens is 0"):
            await answer(engine, [1], session="b", max_tokens=0)
        with pytest.raises(ValueError, match="'a' has a generation under way"):
            await answer(engine, [1], session="a")
        with pytest.raises(ValueError, match="temperature -1"):
            await complete(engine, [1], max_tokens=1, sampling=Sampling(temperature=-1), session="b")
        assert len(tokens_of(await neighbour)) == 50

    asyncio.run(play())


def test_an_error_in_a_step_reaches_every_stream():
    """Catches rollouts that hang when the engine breaks: running, filling and waiting ones all get EngineError."""

    async def play() -> None:
        model = tiny(1)
        engine = LocalEngine(model, RealClock(), EngineConfig(max_sessions=2, max_context=128))
        tasks = [asyncio.ensure_future(answer(engine, [1, 2], seed=seed, max_tokens=100)) for seed in range(5)]
        await until_tokens(engine, 4)
        next(model.parameters()).data.fill_(torch.nan)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) and "not finite" in str(result) for result in results)
        with pytest.raises(EngineError, match="not finite"):
            await answer(engine, [1])
        with pytest.raises(EngineError):
            await engine.health()

    asyncio.run(asyncio.wait_for(play(), 20))


def test_stop_ends_streams_with_an_error_twice_over():
    """Catches a stream that waits for a task that is gone."""

    async def play() -> None:
        engine = LocalEngine(tiny(1), RealClock(), SMALL)
        task = asyncio.ensure_future(answer(engine, [1, 2], max_tokens=100))
        await until_tokens(engine, 4)
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineError, match="stopped"):
            await task

    asyncio.run(asyncio.wait_for(play(), 20))


def test_virtual_time_is_charged_by_hand():
    """Catches a cost charged twice or not at all: two sessions of 3 and 5 tokens, each step 1 s + 0.1 s per session.

    The two start together after filling 1 + 3 tokens at 0.01 s: 3 steps of 1.2 s, then 2 of 1.1 s.
    """

    async def play() -> list[float]:
        clock = VirtualClock()
        cost = EngineCost(step_seconds=1, token_seconds=0.1, prefill_token_seconds=0.01)
        engine = LocalEngine(tiny(1), clock, SMALL, cost)

        async def ends(prompt: list[int], count: int) -> float:
            await answer(engine, prompt, max_tokens=count, session=str(count))
            return clock.now()

        times = list(await asyncio.gather(ends([1, 2], 3), ends([1, 2, 3, 4], 5)))
        return [*times, (await engine.health()).busy_seconds]

    assert run_virtual(play()) == pytest.approx([3.64, 5.84, 5.84])


def test_virtual_runs_repeat_bit_for_bit():
    """Catches an order that hangs on real time or on hashes."""

    async def play() -> list:
        clock = VirtualClock()
        engine = LocalEngine(tiny(1), clock, EngineConfig(max_sessions=3, max_context=128, prefill_tokens=16))
        seen: list = []

        async def converse(seed: int) -> None:
            await clock.sleep(seed * 0.003)
            stream = engine.generate(prompt_of(seed), max_tokens=20, sampling=Sampling(seed=seed), session=str(seed))
            async for chunk in stream:
                seen.append((clock.now(), seed, chunk))

        await asyncio.gather(*[converse(seed) for seed in range(8)])
        return seen

    assert run_virtual(play()) == run_virtual(play())


def test_long_prompts_do_not_stop_running_sessions():
    """Catches a prefill that ignores its budget: one step fills 16 tokens and decodes, so the runner is done first."""

    async def play() -> list[str]:
        engine = LocalEngine(tiny(1), VirtualClock(), EngineConfig(max_sessions=4, max_context=256, prefill_tokens=16))
        order: list[str] = []

        async def run(name: str, prompt: list[int], count: int) -> None:
            await answer(engine, prompt, max_tokens=count, session=name)
            order.append(name)

        await asyncio.gather(run("short", [1], 10), run("long", [1] * 200, 1))
        return order

    assert run_virtual(play()) == ["short", "long"]


@pytest.mark.parametrize("order", list(itertools.permutations([("a", 30), ("b", 6), ("c", 14)])))
def test_rows_change_places(order: tuple):
    """Catches a swap of rows that forgets part of what belongs to a row: sessions end first, middle and last."""

    async def play() -> None:
        engine = LocalEngine(tiny(1), RealClock(), SMALL)

        async def run(name: str, count: int) -> None:
            prompt = prompt_of(count)
            chunks = await answer(engine, prompt, seed=count, max_tokens=count, session=name)
            expected = scored_alone(tiny(1), prompt, tokens_of(chunks))
            np.testing.assert_allclose(logprobs_of(chunks), expected, atol=1e-4)

        await asyncio.gather(*[run(name, count) for name, count in order])

    asyncio.run(play())


def test_sliding_and_hybrid_models_are_refused():
    """Catches a window that is ignored in silence, so that log-probs match no trainer."""
    shape = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "head_dim": 8}
    shape |= {"intermediate_size": 16, "num_key_value_heads": 1}
    hybrid = Gemma3ForCausalLM(Gemma3TextConfig(**shape))
    with pytest.raises(ValueError, match="sliding_attention"):
        LocalEngine(hybrid, RealClock(), EngineConfig(max_context=32))
    sliding = MistralForCausalLM(MistralConfig(**shape, sliding_window=8))
    with pytest.raises(ValueError, match="sliding window"):
        LocalEngine(sliding, RealClock(), EngineConfig(max_context=32))


def test_a_context_longer_than_the_model_knows_is_refused():
    """Catches positions beyond those the model was built for."""
    with pytest.raises(ValueError, match="max_context is 512, but the model knows 256 positions"):
        LocalEngine(tiny(1), RealClock(), EngineConfig(max_context=512))
