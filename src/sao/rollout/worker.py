"""Plays one episode: what the policy sampled and what the world answered become the arrays of one rollout.

    reset -> open -> [ sample -> step -> extend ] ... -> rollout

Every ending is data. This is the only place where catching broadly makes a rollout: whatever breaks here is a failure
of the infrastructure, is written into the rollout, and is never trained on. Only cancellation is raised.
"""

import asyncio
import hashlib
import logging
import math
import traceback
from collections.abc import AsyncGenerator, AsyncIterator
from collections.abc import Sequence as Items
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sao.clock import Clock, WaitTimeoutError, limit
from sao.engines.protocol import Engine, EngineError, Sampling
from sao.envs.protocol import Environment, EnvironmentFactory, Step, WorldError
from sao.rollout.protocol import Renderer
from sao.types import (
    OBSERVED,
    FailureKind,
    GenerationStop,
    Message,
    Rollout,
    Sequence,
    StopReason,
    Task,
    Timings,
    TokenChunk,
)

_LOG = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 30.0

Purpose = Literal["training", "evaluation"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The limits of an episode, and how its tokens are sampled."""

    max_turns: int = 50
    """Actions in a rollout. 50 is the paper's limit with a Python tool; 300 for coding."""
    max_tokens: int = 8192
    """Tokens of a rollout, observations included. The paper's is 131072; the default fits small models."""
    max_action_tokens_per_turn: int = 1024
    """Tokens of one action, its stop token included. The paper has no limit of its own for a turn."""
    cut_turn: Literal["end", "step"] = "end"
    """What an action cut by its limit leads to: "end" ends the rollout there, so that a policy that rambles is cheap;
    "step" gives the cut text to the environment and goes on."""
    timeout_s: float | None = 3600.0
    """Seconds of wall clock for a rollout; None, and virtual time, mean no limit. Long enough for 131072 tokens."""
    step_timeout_s: float = 300.0
    """Seconds of wall clock for one answer of the environment. Beyond it the environment hangs, which is not
    the policy's fault: tools and graders have limits of their own, far below."""
    temperature: float = 1.0
    """1 samples the policy itself. Training refuses anything else: the recorded log-probs would not be the policy's."""
    top_p: float = 1.0
    """1 keeps every token. Training refuses anything else, for the same reason."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_action_tokens_per_turn", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}; it must be above 0")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"rollout.timeout_s is {self.timeout_s}; it must be above 0, or left out for no limit")
        if self.cut_turn not in ("end", "step"):
            raise ValueError(f'rollout.cut_turn is {self.cut_turn!r}; use "end" or "step"')
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"rollout.temperature is {self.temperature}; it must be 0 or above, and 1 for training")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p is {self.top_p}; it must lie in (0, 1], and be 1 for training")

    def require_neutral(self) -> None:
        """Raises ValueError if what is sampled is not the policy itself."""
        if self.temperature != 1.0 or self.top_p != 1.0:
            raise ValueError(
                f"rollout.temperature = {self.temperature} and rollout.top_p = {self.top_p} sample another "
                "distribution than the policy's, so the importance ratio of its tokens would mean nothing; set both "
                "to 1 for training (evaluation may use any)"
            )


def rollout_id(task_id: str, attempt: int) -> str:
    """Name of one attempt at a task, unique within the run."""
    return f"{task_id}@{attempt}"


def rollout_seed(run_seed: int, task_id: str, attempt: int) -> int:
    """64 bits that key all randomness of one attempt."""
    key = f"{run_seed}\0{task_id}\0{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


class LocalWorker:
    """Plays episodes on the caller's loop. Satisfies rollout.protocol.RolloutWorker."""

    def __init__(
        self,
        make_environment: EnvironmentFactory,
        engine: Engine,
        renderer: Renderer,
        clock: Clock,
        config: RolloutConfig,
        *,
        purpose: Purpose = "training",
    ) -> None:
        """Raises ValueError for sampling that is not neutral, unless the purpose is "evaluation"."""
        if purpose == "training":
            config.require_neutral()
        self._make_environment = make_environment
        self._engine = engine
        self._renderer = renderer
        self._clock = clock
        self._config = config

    async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
        """Play one episode to its end. Endings and failures are in the rollout; only cancellation is raised."""
        episode = _Episode(rollout_id(task.id, attempt), seed, self._clock, self._config)
        environment: Environment | None = None
        try:
            environment = self._make_environment()
            ending = await self._play(task, environment, episode)
        except asyncio.CancelledError as error:
            if _cancelled_from_outside():
                raise
            ending = _Ending(StopReason.ERROR, FailureKind.INFRASTRUCTURE, describe(error))
        except WaitTimeoutError as error:
            ending = _Ending(StopReason.TIMEOUT, FailureKind.INFRASTRUCTURE, describe(error))
        except Exception as error:
            ending = _Ending(StopReason.ERROR, FailureKind.INFRASTRUCTURE, describe(error))
        finally:
            await self._close(episode, environment)
        return episode.rollout(task, group_id, attempt, ending)

    async def stop(self) -> None:
        """Nothing to release: engine and environments belong to their owners."""

    async def _play(self, task: Task, environment: Environment, episode: "_Episode") -> "_Ending":
        config = self._config
        async with episode.answer("reset"):
            messages = await environment.reset(task)
        tokens = self._renderer.open(messages)
        if not tokens:
            raise ValueError("the renderer opened the episode without a token")
        for turn in range(config.max_turns):
            room = config.max_tokens - len(episode.token_ids) - len(tokens)
            if room < 1:
                episode.observe(tokens if turn == 0 else (), turn)
                return _limit(StopReason.CONTEXT_FULL, f"the context of {config.max_tokens} tokens is full")
            episode.observe(tokens, turn)
            action, stop = await self._sample(episode, turn, min(room, config.max_action_tokens_per_turn))
            if stop is GenerationStop.CONTEXT_FULL or (stop is GenerationStop.MAX_TOKENS and len(action) >= room):
                return _limit(StopReason.CONTEXT_FULL, f"the context is full after {len(episode.token_ids)} tokens")
            if stop is GenerationStop.MAX_TOKENS and config.cut_turn == "end":
                return _limit(StopReason.MAX_TOKENS, f"an action was cut at {len(action)} tokens")
            left = episode.seconds_left()
            async with episode.answer("step"):
                step = await environment.step(Message(role="assistant", content=self._renderer.text(action)))
            episode.credit(step)
            if step.done:
                return _Ending(StopReason.FINISHED)
            if episode.seconds_left() <= 0:
                return episode.timed_out(policy=step.tool_seconds >= left)
            if turn + 1 < config.max_turns:
                tokens = self._renderer.extend(action, stop, step.messages)
        return _limit(StopReason.MAX_TURNS, f"no end after {config.max_turns} turns")

    async def _sample(self, episode: "_Episode", turn: int, max_tokens: int) -> tuple[list[int], GenerationStop]:
        """One action, recorded chunk by chunk."""
        sampling = Sampling(
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            stop_token_ids=tuple(self._renderer.stop_token_ids),
            seed=episode.seed,
            first_token_index=episode.num_action_tokens,
        )
        action: list[int] = []
        stop: GenerationStop | None = None
        context = tuple(episode.token_ids)
        stream = self._engine.generate(context, max_tokens=max_tokens, sampling=sampling, session=episode.session)
        async with episode.generation(), _closing(stream):
            async for chunk in stream:
                if stop is not None:
                    raise EngineError("the engine went on after its stop reason")
                episode.act(chunk, turn)
                action.extend(chunk.token_ids)
                stop = chunk.stop
        if stop is None:
            raise EngineError("the token stream ended without a stop reason")
        if stop is GenerationStop.CANCELLED:
            raise EngineError("the generation was cancelled")
        if not action and stop is not GenerationStop.CONTEXT_FULL:
            raise EngineError(f"the engine gave no token, and {stop.value} as the reason")
        return action, stop

    async def _close(self, episode: "_Episode", environment: Environment | None) -> None:
        """Release session and environment. What fails here is logged: the episode's tokens are good without it."""
        try:
            async with episode.answer("close of the engine's session", _CLOSE_LIMIT_S):
                if episode.generating:
                    await self._engine.cancel(episode.session)
                await self._engine.close(episode.session)
        except Exception as error:
            _LOG.warning("%s: closing the engine's session failed: %s", episode.id, describe(error))
        finally:
            try:
                if environment is not None:
                    async with episode.answer("close of the environment", _CLOSE_LIMIT_S):
                        await environment.close()
            except Exception as error:
                _LOG.warning("%s: closing the environment failed: %s", episode.id, describe(error))


@dataclass(frozen=True, slots=True)
class _Ending:
    stop_reason: StopReason
    failure: FailureKind = FailureKind.NONE
    text: str = ""


def _limit(reason: StopReason, text: str) -> _Ending:
    """A limit that was the policy's to keep."""
    return _Ending(reason, FailureKind.POLICY, text)


def describe(error: BaseException) -> str:
    """An exception for people: type, message, and where it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(
        f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    )
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return f"{text} [{places}]" if places else text


@asynccontextmanager
async def _closing(stream: AsyncIterator[TokenChunk]) -> AsyncGenerator[None]:
    """Ends a stream that was left before its end at once, and not when it is collected."""
    try:
        yield
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


def _cancelled_from_outside() -> bool:
    """Whether this task is being cancelled, and not merely something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class _Episode:
    """What is recorded of one episode: five arrays that grow together, its marks, and its times."""

    def __init__(self, id: str, seed: int, clock: Clock, config: RolloutConfig) -> None:
        self.id = id
        self.seed = seed
        self.session = f"{id}#{seed:016x}"
        self.generating = False
        self.num_action_tokens = 0
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._rewards: list[float] = []
        self._turns: list[int] = []
        self._marks: dict[str, float] = {}
        self._clock = clock
        self._config = config
        self._started = clock.now()
        self._generation_seconds = 0.0
        self._tool_seconds = 0.0

    def observe(self, token_ids: Items[int], turn: int) -> None:
        """Append tokens that no policy sampled."""
        self._append(token_ids, [0.0] * len(token_ids), OBSERVED, turn)

    def act(self, chunk: TokenChunk, turn: int) -> None:
        """Append sampled tokens as they were recorded when they were sampled."""
        if chunk.version < 0:
            raise EngineError(f"the engine reports policy version {chunk.version}")
        for logprob in chunk.logprobs:
            if not math.isfinite(logprob):
                raise EngineError(f"the engine recorded a log-prob of {logprob}; it must be finite")
        self._append(chunk.token_ids, chunk.logprobs, chunk.version, turn)
        self.num_action_tokens += len(chunk.token_ids)

    def credit(self, step: Step) -> None:
        """Fold the reward onto the last token of the action it answers, and keep the marks."""
        if not math.isfinite(step.reward):
            raise WorldError(f"the environment returned a reward of {step.reward}; it must be finite")
        self._tool_seconds += step.tool_seconds
        self._rewards[-1] += step.reward
        self._marks |= {name: float(value) for name, value in step.marks.items()}

    def _append(self, token_ids: Items[int], logprobs: Items[float], version: int, turn: int) -> None:
        self.token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._versions.extend([version] * len(token_ids))
        self._rewards.extend([0.0] * len(token_ids))
        self._turns.extend([turn] * len(token_ids))

    def seconds_left(self) -> float:
        """Wall-clock seconds until the rollout's limit; infinite without one."""
        if self._clock.virtual or self._config.timeout_s is None:
            return math.inf
        return self._started + self._config.timeout_s - self._clock.now()

    def answer(self, what: str, seconds: float | None = None) -> AbstractAsyncContextManager[None]:
        """Bounds one answer of the world. The tools in it have limits of their own, so running into this is a hang."""
        return limit(None if self._clock.virtual else seconds or self._config.step_timeout_s, f"the {what}")

    @asynccontextmanager
    async def generation(self) -> AsyncGenerator[None]:
        """Bounds and times one generation; `generating` stays set when it did not end by itself."""
        began, left = self._clock.now(), self.seconds_left()
        self.generating = True
        try:
            async with limit(None if math.isinf(left) else left, "the engine's tokens"):
                yield
            self.generating = False
        finally:
            self._generation_seconds += self._clock.now() - began

    def timed_out(self, *, policy: bool) -> _Ending:
        """The wall-clock limit passed in a step: the policy's doing only if its own tool used the time up."""
        text = f"timed out after {self._config.timeout_s} s, {self._tool_seconds:.1f} s of them in tools"
        return _Ending(StopReason.TIMEOUT, FailureKind.POLICY if policy else FailureKind.INFRASTRUCTURE, text)

    def rollout(self, task: Task, group_id: str, attempt: int, ending: _Ending) -> Rollout:
        """The record. Tokens of a failed episode are kept for people to read."""
        versions = np.array(self._versions, dtype=np.int32)
        sequence = Sequence(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            action_mask=versions != OBSERVED,
            rollout_logprobs=np.array(self._logprobs, dtype=np.float32),
            policy_versions=versions,
            rewards=np.array(self._rewards, dtype=np.float32),
            turns=np.array(self._turns, dtype=np.int32),
        )
        timings = Timings(
            admitted=self._started,
            started=self._started,
            finished=self._clock.now(),
            generating=self._generation_seconds,
            tools=self._tool_seconds,
        )
        return Rollout(
            id=self.id,
            task_id=task.id,
            prompt_id=task.prompt_id,
            group_id=group_id,
            attempt=attempt,
            sequences=(sequence,) if len(sequence.token_ids) else (),
            stop_reason=ending.stop_reason,
            failure=ending.failure,
            failure_text=ending.text,
            timings=timings,
            data_set=task.data_set,
            marks=self._marks,
        )
