"""A fake engine: replies come from a function, time from a number per token. No torch, both clocks."""

from collections.abc import AsyncIterator, Callable, Sequence

from sao.clock import Clock
from sao.engines.protocol import EngineError, EngineHealth, Sampling
from sao.types import GenerationStop, Snapshot, TokenChunk

Script = Callable[[Sequence[int], str], Sequence[int]]
"""(prompt token ids, session) -> reply token ids. It may raise EngineError, or be cut by a stop token."""


class _Stream:
    cancelled = False


class ScriptedEngine:
    """Engine that says what it is told to, at `token_seconds` per token, under the version last loaded.

    A chunk of up to `chunk_tokens` tokens is sampled at its start and arrives when its time is over; cancel, load and
    stop take effect between chunks. Every log-prob is `logprob`.
    """

    def __init__(
        self,
        script: Script,
        clock: Clock,
        *,
        token_seconds: float = 0.0,
        load_seconds: float = 0.0,
        chunk_tokens: int = 16,
        max_context: int = 1 << 20,
        logprob: float = -1.0,
        version: int = 0,
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
        self._script = script
        self._clock = clock
        self._token_seconds = token_seconds
        self._load_seconds = load_seconds
        self._chunk_tokens = chunk_tokens
        self._max_context = max_context
        self._logprob = logprob
        self._version = version
        self._generated = 0
        self._busy_seconds = 0.0
        self._streams: dict[str, _Stream] = {}
        self._stopped = False

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        """See Engine."""
        self._check_alive()
        former = self._streams.get(session)
        if former is not None and not former.cancelled:
            raise ValueError(f"session {session!r} has a generation under way; a session has one at a time")
        if not len(token_ids) or max_tokens < 1:
            raise ValueError(
                f"a generation needs a prompt (got {len(token_ids)} tokens) and max_tokens (got {max_tokens})"
            )
        stream = self._streams[session] = _Stream()
        try:
            reply, stop = self._cut(self._script(token_ids, session), len(token_ids), max_tokens, sampling)
            for start in range(0, max(len(reply), 1), self._chunk_tokens):
                piece = reply[start : start + self._chunk_tokens]
                version, seconds = self._version, self._token_seconds * len(piece)
                await self._clock.sleep(seconds)
                self._check_alive()
                if stream.cancelled:
                    yield TokenChunk(token_ids=(), logprobs=(), version=version, stop=GenerationStop.CANCELLED)
                    return
                self._generated += len(piece)
                self._busy_seconds += seconds
                ended = start + self._chunk_tokens >= len(reply)
                logprobs = (self._logprob,) * len(piece)
                yield TokenChunk(token_ids=piece, logprobs=logprobs, version=version, stop=stop if ended else None)
        finally:
            if self._streams.get(session) is stream:
                del self._streams[session]

    async def cancel(self, session: str) -> None:
        """See Engine."""
        if session in self._streams:
            self._streams[session].cancelled = True

    async def close(self, session: str) -> None:
        """See Engine."""
        await self.cancel(session)

    async def load(self, snapshot: Snapshot) -> None:
        """Take the snapshot's version; its weights are not read."""
        await self._clock.sleep(self._load_seconds)
        self._check_alive()
        self._version = snapshot.version

    async def health(self) -> EngineHealth:
        """See Engine; busy_seconds adds up over streams."""
        self._check_alive()
        return EngineHealth(
            version=self._version,
            running=len(self._streams),
            generated_tokens=self._generated,
            recomputed_tokens=0,
            busy_seconds=self._busy_seconds,
            probe_gap=0.0,
        )

    async def stop(self) -> None:
        """See Engine."""
        self._stopped = True

    def _cut(
        self, reply: Sequence[int], prompt_tokens: int, max_tokens: int, sampling: Sampling
    ) -> tuple[tuple[int, ...], GenerationStop]:
        room = self._max_context - prompt_tokens
        limit, reason = min((max_tokens, GenerationStop.MAX_TOKENS), (max(room, 0), GenerationStop.CONTEXT_FULL))
        stops = set(sampling.stop_token_ids)
        for place, token in enumerate(reply[:limit]):
            if token in stops:
                return tuple(reply[: place + 1]), GenerationStop.STOP_TOKEN
        if len(reply) < limit:
            raise EngineError(f"the script's reply of {len(reply)} tokens ends without a stop token")
        return tuple(reply[:limit]), reason

    def _check_alive(self) -> None:
        if self._stopped:
            raise EngineError("the engine was stopped")
