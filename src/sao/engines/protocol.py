"""The seam between rollouts and whatever samples tokens: tokens in, tokens out. No engine sees text."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sao.types import Snapshot, TokenChunk


class EngineError(RuntimeError):
    """The engine failed, not the policy. A rollout it hits is an infrastructure failure."""


class RequestRefusedError(EngineError):
    """The engine is well, and will not take this generation; another replica would not either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw the tokens of one generation, with randomness keyed by token."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Share of probability, in (0, 1], that the most likely tokens to draw from must reach; 1 draws from all."""
    stop_token_ids: tuple[int, ...] = ()
    """A sampled stop token ends the generation and is part of it."""
    seed: int = 0
    """64 bits, from (run seed, rollout id, attempt): the draw for a token depends on this and its index alone."""
    first_token_index: int = 0
    """Index in its rollout of the first token to sample, counted over action tokens."""

    @property
    def neutral(self) -> bool:
        """Whether recorded log-probs are those of the policy itself, so that the ratio means something."""
        return self.temperature == 1.0 and self.top_p == 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """What an engine says of itself; counters run from its start."""

    version: int
    """Latest version that was loaded and proved by its probe."""
    running: int
    """Generations under way."""
    generated_tokens: int
    """Tokens sampled, of whatever became of their rollouts."""
    recomputed_tokens: int
    """Tokens whose cache entries were rebuilt after a weight update or an eviction."""
    busy_seconds: float
    """Seconds (of the clock) spent computing."""
    probe_gap: float
    """Largest absolute difference between the engine's and the trainer's log-probs on the last probe."""
    cpu_seconds: float | None = None
    """Core-seconds of the engine's process since it started; None where it has none of its own, or does not tell."""
    update_seconds: float = 0.0
    """Seconds for which the last weight update stopped generation; 0 where it goes on."""
    update_bytes: int = 0
    """Bytes of the weights that the last update moved: read from the snapshot's files, or sent to a server."""
    replicas: int = 1
    """Engines that serve."""
    taken_out: int = 0
    """Replicas taken out so far: dead, stalled, or not holding what they were given."""


class Engine(Protocol):
    """Samples tokens under the newest weights it has proved to hold."""

    def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        """Sample after `token_ids` (T,) until a stop token, `max_tokens` or the end of the context.

        The last chunk, and only it, carries the reason. A session has at most one generation at a time; its cache is
        kept between generations, and reused for the longest common prefix. Raises EngineError.
        """
        ...

    async def cancel(self, session: str) -> None:
        """End the session's generation; its iterator gives a last chunk with CANCELLED."""
        ...

    async def close(self, session: str) -> None:
        """Forget the session and its cache. Unknown sessions are ignored."""
        ...

    async def load(self, snapshot: Snapshot) -> None:
        """Take new weights between two decode steps, generations going on, and prove them by the probe.

        Returns when later tokens carry the snapshot's version. Raises EngineError if its files are not what was
        published, by its checksum, or if the probe does not match; then the old weights and version stay in force.
        """
        ...

    async def health(self) -> EngineHealth:
        """Counters and the verified version. Raises EngineError if the engine is gone."""
        ...

    async def stop(self) -> None:
        """Release everything; generations under way end with EngineError. Safe to call twice."""
        ...


def checked_tokens(token_ids: Sequence[int], max_tokens: int, sampling: Sampling, vocab_size: int) -> NDArray[np.int64]:
    """The tokens (T,) of a request to `generate`. Raises ValueError for what the model or the sampling cannot take."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError("token_ids is empty; a model needs at least one token to go on from")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise ValueError(f"token id {bad} is not in the model's vocabulary of {vocab_size}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise ValueError(f"temperature {sampling.temperature} must be at least 0 and top_p {sampling.top_p} in (0, 1]")
    return tokens


def probe_of(snapshot: Snapshot, *, longest: int) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """Tokens (T,) of a snapshot's probe, and the trainer's log-probs (T-1,) of all but the first; empty if it has none.

    Raises EngineError for a probe that does not fit itself, or is of more than `longest` tokens.
    """
    tokens, expected = snapshot.probe_token_ids, np.array(snapshot.probe_logprobs, dtype=np.float64)
    if len(tokens) < 2:
        return (), expected[:0]
    if len(expected) != len(tokens) - 1 or len(tokens) > longest:
        raise EngineError(
            f"the probe of policy version {snapshot.version} has {len(tokens)} tokens and {len(expected)} log-probs; "
            f"the engine takes at most {longest} tokens (engine.max_context), with a log-prob for each but the first"
        )
    return tokens, expected


async def complete(
    engine: Engine, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
) -> tuple[TokenChunk, ...]:
    """Run a generation to its end and return its chunks. Raises EngineError if it ends without a reason."""
    stream = engine.generate(token_ids, max_tokens=max_tokens, sampling=sampling, session=session)
    chunks = [chunk async for chunk in stream]
    if not chunks or chunks[-1].stop is None:
        raise EngineError(f"session {session}: the token stream ended without a stop reason")
    return tuple(chunks)


@runtime_checkable
class _Speaking(Protocol):
    def last_words(self) -> str: ...


def last_words(engine: Engine) -> str:
    """What the process behind an engine said last, where it keeps that: it is gone when the engine is stopped."""
    words = engine.last_words() if isinstance(engine, _Speaking) else ""
    return f"; its last lines:\n{words}" if words else ""
