"""One episode: arrays worked by hand, every ending, every fault."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from rollout_fakes import PlayedEngine, PlayedEnvironment, byte_renderer, byte_tokenizer, chunk, task, tool

from sao.clock import RealClock, VirtualClock, run_virtual
from sao.engines.protocol import EngineError
from sao.engines.scripted import ScriptedEngine
from sao.envs.protocol import Step, WorldError
from sao.envs.toy import GuessConfig, GuessEnvironment, GuessTasks
from sao.rollout.worker import LocalWorker, RolloutConfig, rollout_id, rollout_seed
from sao.types import FailureKind, GenerationStop, Message, Rollout, StopReason, TokenChunk

RENDERER = byte_renderer()
TOKENIZER = byte_tokenizer()
END = RENDERER.stop_token_ids[0]
STOP = GenerationStop.STOP_TOKEN
CUT = GenerationStop.MAX_TOKENS
DONE = Step(reward=1.0, done=True)


def play(
    actions: Sequence[Sequence[TokenChunk | BaseException]],
    environment: PlayedEnvironment,
    *,
    engine_seconds: float = 1.0,
    **settings: Any,
) -> tuple[Rollout, PlayedEngine]:
    """One episode in virtual time."""

    async def main() -> tuple[Rollout, PlayedEngine]:
        clock = VirtualClock()
        engine = PlayedEngine(clock, actions, engine_seconds)
        worker = LocalWorker(lambda: environment, engine, RENDERER, clock, RolloutConfig(**settings))
        return await worker.run(task(), group_id="g", attempt=2, seed=11), engine

    return run_virtual(main())


def test_arrays_worked_by_hand() -> None:
    """Bug: a version, log-prob, reward or turn lands on another token than the one it belongs to."""
    environment = PlayedEnvironment([tool("12", reward=0.25, tool_seconds=2.0), DONE])
    first = [
        TokenChunk(token_ids=(10, 11), logprobs=(-0.1, -0.2), version=3),
        TokenChunk(token_ids=(END,), logprobs=(-0.3,), version=4, stop=STOP),
    ]
    second = [TokenChunk(token_ids=(12, END), logprobs=(-0.4, -0.5), version=5, stop=STOP)]
    rollout, engine = play([first, second], environment)

    opening = RENDERER.open([Message(role="user", content="hello")])
    tail = RENDERER.extend([10, 11, END], STOP, [Message(role="tool", content="12")])
    a, b = len(opening), len(tail)
    (sequence,) = rollout.sequences
    assert sequence.token_ids.tolist() == [*opening, 10, 11, END, *tail, 12, END]
    assert sequence.action_mask.tolist() == [False] * a + [True] * 3 + [False] * b + [True] * 2
    assert sequence.policy_versions.tolist() == [-1] * a + [3, 3, 4] + [-1] * b + [5, 5]
    expected = np.array([0.0] * a + [-0.1, -0.2, -0.3] + [0.0] * b + [-0.4, -0.5], dtype=np.float32)
    assert np.array_equal(sequence.rollout_logprobs, expected)
    assert sequence.rewards.tolist() == [0.0] * (a + 2) + [0.25] + [0.0] * (b + 1) + [1.0]
    assert sequence.turns.tolist() == [0] * (a + 3) + [1] * (b + 2)
    assert (rollout.id, rollout.task_id, rollout.prompt_id, rollout.group_id) == ("t@2", "t", "p/t", "g")
    assert (rollout.attempt, rollout.data_set, rollout.reward, rollout.num_turns) == (2, "toy", 1.25, 2)
    assert (rollout.stop_reason, rollout.failure, rollout.failure_text) == (StopReason.FINISHED, FailureKind.NONE, "")
    assert (rollout.timings.started, rollout.timings.finished) == (0.0, 3.0)
    assert (rollout.timings.generating, rollout.timings.tools) == (3.0, 2.0)
    assert environment.actions == [RENDERER.text([10, 11]), RENDERER.text([12])]
    assert environment.closed == 1

    contexts = [call[0] for call in engine.calls]
    assert contexts == [tuple(opening), (*opening, 10, 11, END, *tail)]
    assert [call[2].first_token_index for call in engine.calls] == [0, 3]
    assert {call[2].seed for call in engine.calls} == {11}
    assert {call[2].stop_token_ids for call in engine.calls} == {RENDERER.stop_token_ids}
    assert engine.closed == [engine.calls[0][3]]
    assert engine.cancelled == []


def test_the_last_value_of_a_mark_counts_also_where_a_limit_ends_the_episode() -> None:
    """Bug: a mark is the first turn's, or a sum, or lost where no step ended the episode; numpy in the log."""
    steps = [Step(messages=tool("12").messages, marks={"style": 0.25, "depth": np.float32(0.5)}), tool("3")]
    steps.append(Step(messages=tool("4").messages, marks={"style": 0.75}))
    actions = [[chunk([1, END], stop=STOP)] for _ in steps]
    rollout, _ = play(actions, PlayedEnvironment(steps), max_turns=3)
    assert (rollout.stop_reason, rollout.marks) == (StopReason.MAX_TURNS, {"style": 0.75, "depth": 0.5})
    assert [type(value) for value in rollout.marks.values()] == [float, float]


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"my style": 0.5}, "a mark is called 'my style'; it names a metric"),
        ({"": 0.5}, "a mark is called ''"),
        ({"overall/mean": 0.5}, "a mark is called 'overall/mean'"),
        ({"style": math.nan}, "mark style is nan; give a finite number"),
        ({"quality": 1.0, "style": "high"}, "mark style is 'high'; give a finite number"),
    ],
)
def test_marks_that_are_no_metrics_are_refused(marks: dict[str, Any], said: str) -> None:
    """Bug: a key that no page documents and every reader splits wrongly, or a mean that is nan from then on."""
    with pytest.raises(ValueError, match=said):
        Step(marks=marks)
    rollout, _ = play([[chunk([1, END], stop=STOP)]], PlayedEnvironment([lambda: Step(marks=marks)]))
    assert rollout.failure is FailureKind.INFRASTRUCTURE
    assert said in rollout.failure_text


IDS = st.lists(st.integers(0, 261), min_size=1, max_size=5)
TURN = st.tuples(
    st.lists(IDS, min_size=1, max_size=3), st.booleans(), st.text("12ab <|>", max_size=6), st.floats(-2, 2)
)


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(TURN, min_size=1, max_size=5))
def test_what_was_sampled_is_what_is_recorded_and_shown_again(
    turns: list[tuple[list[list[int]], bool, str, float]],
) -> None:
    """Bug: an action's ids change on their way into the record or into the next context (any ids, any chunking)."""
    actions: list[list[TokenChunk]] = []
    version = 0
    for parts, stopped, _, _ in turns:
        ends = [GenerationStop.STOP_TOKEN if stopped else CUT]
        parts = [*parts[:-1], [*parts[-1], END]] if stopped else parts
        stops = [*[None] * (len(parts) - 1), *ends]
        action = []
        for ids, end in zip(parts, stops, strict=True):
            action.append(chunk(ids, version=version, stop=end, logprob=-1.0 - version))
            version += 1
        actions.append(action)
    steps = [tool(text, reward=reward) for _, _, text, reward in turns]
    environment = PlayedEnvironment(steps)
    rollout, engine = play(actions, environment, max_turns=len(turns), cut_turn="step")
    (sequence,) = rollout.sequences
    expected = [(token, part.version) for action in actions for part in action for token in part.token_ids]
    mask = sequence.action_mask
    assert list(zip(sequence.token_ids[mask], sequence.policy_versions[mask], strict=True)) == expected
    assert np.array_equal(sequence.rollout_logprobs[mask], -1.0 - sequence.policy_versions[mask])
    everything = sequence.token_ids.tolist()
    for context, action in zip((call[0] for call in engine.calls), actions, strict=True):
        sampled = [token for part in action for token in part.token_ids]
        assert everything[: len(context) + len(sampled)] == [*context, *sampled]
    assert rollout.reward == pytest.approx(sum(reward for *_, reward in turns), abs=1e-5)
    last_of_turn = np.flatnonzero(mask & ~np.append(mask[1:], False))
    assert np.allclose(sequence.rewards[last_of_turn], [reward for *_, reward in turns])


def test_the_turn_limit_is_the_policys() -> None:
    """Bug: a rollout that never ends is blamed on the machines, and retried."""
    environment = PlayedEnvironment([tool("1"), tool("2")])
    rollout, _ = play([[chunk([1, END], stop=STOP)]] * 2, environment, max_turns=2)
    assert (rollout.stop_reason, rollout.failure) == (StopReason.MAX_TURNS, FailureKind.POLICY)
    assert (rollout.num_turns, rollout.sequences[0].action_mask[-1]) == (2, True)
    assert rollout.trainable


def test_a_cut_action_ends_the_rollout_or_is_closed_for_it() -> None:
    """Bug: a turn cut by its limit runs on without the template's close."""
    environment = PlayedEnvironment([])
    rollout, _ = play([[chunk([1, 2], stop=CUT)]], environment, max_action_tokens_per_turn=2)
    assert (rollout.stop_reason, rollout.failure, rollout.reward) == (StopReason.MAX_TOKENS, FailureKind.POLICY, 0.0)
    assert environment.actions == []

    environment = PlayedEnvironment([tool("x"), DONE])
    actions = [[chunk([1, 2], stop=CUT)], [chunk([3, END], stop=STOP)]]
    rollout, _ = play(actions, environment, max_action_tokens_per_turn=2, cut_turn="step")
    sequence = rollout.sequences[0]
    close = len(RENDERER.open([Message(role="user", content="hello")])) + 2
    assert (int(sequence.token_ids[close]), bool(sequence.action_mask[close])) == (END, False)
    assert (rollout.stop_reason, rollout.num_action_tokens) == (StopReason.FINISHED, 4)


def test_the_context_limit_is_the_policys_and_never_exceeded() -> None:
    """Bug: tokens beyond the context, or an observation at the end that no action follows."""
    opening = len(RENDERER.open([Message(role="user", content="hello")]))
    long = PlayedEnvironment([tool("x" * 500)])
    rollout, _ = play([[chunk([1, END], stop=STOP)]], long, max_tokens=opening + 50)
    assert (rollout.stop_reason, rollout.num_tokens) == (StopReason.CONTEXT_FULL, opening + 2)

    rollout, engine = play([[chunk([1, 2, 3], stop=CUT)]], PlayedEnvironment([]), max_tokens=opening + 3)
    assert (rollout.stop_reason, rollout.num_tokens, engine.calls[0][1]) == (StopReason.CONTEXT_FULL, opening + 3, 3)

    rollout, _ = play([[chunk([], stop=GenerationStop.CONTEXT_FULL)]], PlayedEnvironment([]))
    assert (rollout.stop_reason, rollout.failure) == (StopReason.CONTEXT_FULL, FailureKind.POLICY)
    assert not rollout.trainable

    rollout, engine = play([], PlayedEnvironment([]), max_tokens=opening)
    assert (rollout.stop_reason, engine.calls, rollout.trainable) == (StopReason.CONTEXT_FULL, [], False)


@pytest.mark.parametrize(
    ("actions", "steps", "says"),
    [
        ([[chunk([1]), EngineError("worker gone")]], [], "EngineError: worker gone"),
        ([[chunk([1, 2])]], [], "without a stop reason"),
        ([[chunk([1], stop=GenerationStop.CANCELLED)]], [], "was cancelled"),
        ([[chunk([], stop=CUT)]], [], "no token"),
        ([[chunk([1, END], stop=STOP), chunk([2])]], [], "went on after"),
        ([[chunk([1, END], stop=STOP, logprob=math.nan)]], [], "log-prob of nan"),
        ([[chunk([1, END], stop=STOP, logprob=-math.inf)]], [], "log-prob of -inf"),
        ([[chunk([1, END], stop=STOP, version=-1)]], [], "policy version -1"),
        ([[chunk([1], stop=STOP)]], [tool("x")], "stop token"),
        ([[chunk([1, END], stop=STOP)]], [WorldError("no sandbox")], "WorldError: no sandbox"),
        ([[chunk([1, END], stop=STOP)]], [KeyError("k")], "KeyError: 'k'"),
        ([[chunk([1, END], stop=STOP)]], [Step(reward=math.nan, done=True)], "reward of nan"),
        ([[chunk([1, END], stop=STOP)]], [Step()], "must return one"),
        ([[chunk([1, END], stop=STOP)]], [asyncio.CancelledError()], "CancelledError"),
    ],
)
def test_faults_of_the_machinery_are_never_trained_on(actions: Any, steps: Any, says: str) -> None:
    """Bug: a broken engine, sandbox or grader is trained as reward 0, or takes the whole run down."""
    environment = PlayedEnvironment(steps)
    rollout, engine = play(actions, environment)
    assert (rollout.stop_reason, rollout.failure) == (StopReason.ERROR, FailureKind.INFRASTRUCTURE)
    assert says in rollout.failure_text
    assert ".py:" in rollout.failure_text
    assert not rollout.trainable
    assert environment.closed == 1
    assert len(engine.closed) == 1


def test_an_environment_that_cannot_be_made_or_closed() -> None:
    """Bug: a fault outside of step escapes the runner, or a failed clean-up throws good tokens away."""

    def broken() -> PlayedEnvironment:
        raise WorldError("no bubblewrap")

    async def main() -> Rollout:
        clock = VirtualClock()
        worker = LocalWorker(broken, PlayedEngine(clock, []), RENDERER, clock, RolloutConfig())
        return await worker.run(task(), group_id="t", attempt=0, seed=0)

    rollout = run_virtual(main())
    assert (rollout.failure, rollout.sequences) == (FailureKind.INFRASTRUCTURE, ())
    assert "no bubblewrap" in rollout.failure_text

    environment = PlayedEnvironment([DONE], close_error=OSError("busy"))
    rollout, _ = play([[chunk([1, END], stop=STOP)]], environment)
    assert (rollout.stop_reason, rollout.reward) == (StopReason.FINISHED, 1.0)

    rollout, _ = play([], PlayedEnvironment([], opening=()))
    assert "reset must return at least one" in rollout.failure_text


def play_for_real(
    environment: PlayedEnvironment, *, engine_seconds: float, **settings: Any
) -> tuple[Rollout, PlayedEngine]:
    async def main() -> tuple[Rollout, PlayedEngine]:
        clock = RealClock()
        engine = PlayedEngine(clock, [[chunk([1, END], stop=STOP)]] * 3, engine_seconds)
        worker = LocalWorker(lambda: environment, engine, RENDERER, clock, RolloutConfig(**settings))
        return await worker.run(task(), group_id="t", attempt=0, seed=0), engine

    return asyncio.run(main())


def test_a_time_limit_is_the_policys_only_if_its_own_tool_used_the_time_up() -> None:
    """Bug: a slow engine or grader is trained as a failure of the policy."""

    async def slow(tool_seconds: float) -> Step:
        await asyncio.sleep(0.6)
        return tool("x", tool_seconds=tool_seconds)

    rollout, _ = play_for_real(PlayedEnvironment([lambda: slow(0.6)]), engine_seconds=0.0, timeout_s=0.5)
    assert (rollout.stop_reason, rollout.failure) == (StopReason.TIMEOUT, FailureKind.POLICY)
    rollout, _ = play_for_real(PlayedEnvironment([lambda: slow(0.0)]), engine_seconds=0.0, timeout_s=0.5)
    assert (rollout.stop_reason, rollout.failure) == (StopReason.TIMEOUT, FailureKind.INFRASTRUCTURE)

    rollout, engine = play_for_real(PlayedEnvironment([]), engine_seconds=5.0, timeout_s=0.05)
    assert (rollout.stop_reason, rollout.failure) == (StopReason.TIMEOUT, FailureKind.INFRASTRUCTURE)
    assert "the engine's tokens" in rollout.failure_text
    assert engine.cancelled == engine.closed == [engine.calls[0][3]]

    async def hang() -> Step:
        await asyncio.sleep(60)
        return DONE

    rollout, _ = play_for_real(PlayedEnvironment([hang]), engine_seconds=0.0, step_timeout_s=0.05)
    assert (rollout.stop_reason, rollout.failure) == (StopReason.TIMEOUT, FailureKind.INFRASTRUCTURE)
    assert "the step" in rollout.failure_text


def test_cancelling_closes_everything_and_is_raised() -> None:
    """Bug: a cancelled rollout leaks its session and sandbox, or comes back as a result."""
    environment = PlayedEnvironment([])

    async def main() -> PlayedEngine:
        clock = VirtualClock()
        engine = PlayedEngine(clock, [[chunk([1]), chunk([2])]], seconds=10.0)
        worker = LocalWorker(lambda: environment, engine, RENDERER, clock, RolloutConfig())
        running = asyncio.create_task(worker.run(task(), group_id="t", attempt=0, seed=0))
        await clock.sleep(15)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return engine

    engine = run_virtual(main())
    assert engine.cancelled == engine.closed == [engine.calls[0][3]]
    assert environment.closed == 1


def test_a_real_game_is_the_same_every_time() -> None:
    """Bug: something in the worker draws from a shared generator or reads the wall clock in virtual time."""
    digits = {str(digit): TOKENIZER.token_to_id(str(digit)) for digit in range(10)}

    def halve(token_ids: Sequence[int], _: str) -> list[int]:
        low, high, guess = 1, 9, 5
        for hint in [word for word in TOKENIZER.decode(list(token_ids)).split() if word in ("higher", "lower")]:
            low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
            guess = (low + high) // 2
        return [digits[str(guess)], END]

    async def main() -> list[Rollout]:
        clock = VirtualClock()
        games = GuessTasks(GuessConfig(), seed=3)
        engine = ScriptedEngine(halve, clock, token_seconds=0.25, version=4)
        worker = LocalWorker(lambda: GuessEnvironment(GuessConfig()), engine, RENDERER, clock, RolloutConfig())
        tasks = [games.at(index) for index in range(12)]
        runs = [worker.run(t, group_id=t.id, attempt=0, seed=rollout_seed(5, t.id, 0)) for t in tasks if t]
        return list(await asyncio.gather(*runs))

    first, second = run_virtual(main()), run_virtual(main())
    assert [rollout.reward for rollout in first] == [1.0] * 12
    assert len({rollout.num_turns for rollout in first}) > 1
    assert first[0].timings.finished == 0.5 * first[0].num_turns
    for one, other in zip(first, second, strict=True):
        assert one.timings == other.timings
        for name in ("token_ids", "action_mask", "rollout_logprobs", "policy_versions", "rewards", "turns"):
            assert np.array_equal(getattr(one.sequences[0], name), getattr(other.sequences[0], name))


def test_sampling_that_is_not_neutral_is_refused_for_training() -> None:
    """Bug: log-probs of a sharpened distribution are taken for the policy's, and the ratio means nothing."""
    clock = VirtualClock()
    for sharpened in ({"temperature": 0.7}, {"top_p": 0.9}):
        config = RolloutConfig(**sharpened)
        with pytest.raises(ValueError, match="set both to 1 for training"):
            LocalWorker(lambda: PlayedEnvironment([]), PlayedEngine(clock, []), RENDERER, clock, config)
        LocalWorker(
            lambda: PlayedEnvironment([]), PlayedEngine(clock, []), RENDERER, clock, config, purpose="evaluation"
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_turns", 0), ("max_tokens", -1), ("timeout_s", 0.0), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_limits_out_of_range_are_told(field: str, value: float) -> None:
    """Bug: a limit of 0 gives rollouts without an action."""
    with pytest.raises(ValueError, match=f"rollout.{field} is {value}"):
        TypeAdapter(RolloutConfig).validate_python({field: value})


def test_seeds_and_names_differ_between_attempts() -> None:
    """Bug: a retry samples the same tokens again, or two tasks share their randomness."""
    seeds = {rollout_seed(run, name, attempt) for run in (0, 1) for name in ("a", "a1", "b") for attempt in (0, 1, 11)}
    assert len(seeds) == 18
    assert max(seeds) >= 2**32
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert rollout_seed(0, "a", 0) == 0x6B448447D7DF8CE6, "seeds changed: runs of before cannot be resumed alike"
    assert rollout_id("a", 1) != rollout_id("a", 2)
