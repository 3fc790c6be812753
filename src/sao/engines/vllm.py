"""Engine over one stock vLLM server. A weight update with requests in flight has exact boundaries:

    load --> gate closed --> pause (abort) --> every request ends; its tokens stand under the old version
         --> transfer --> resume --> probe --> passed: gate open, prompt + tokens so far are sent again, new cache salt
                                          \\-> failed: EngineError, no generation until a later load passes

Nothing but the probe is sent between resume and a passed probe, so no token can be of weights that nobody proved. A
request belongs to one version from its first token to its last. vLLM's pause (keep) would save sending requests again,
not the rebuilding of their caches, and lets them go on before the probe has passed; so it is not used.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

import numpy as np

from sao.clock import Signal, Tasks, end_tasks
from sao.engines.protocol import EngineError, EngineHealth, Sampling, checked_tokens, probe_of
from sao.engines.settings import EngineConfig
from sao.engines.vllm_checks import check_server, check_words, snapshot_vocabulary
from sao.engines.vllm_generation import VllmGeneration
from sao.engines.vllm_http import Piece, VllmHttp
from sao.engines.vllm_settings import VllmConfig
from sao.engines.vllm_transports import Transport, make_transport
from sao.store.snapshots import check_snapshot
from sao.types import GenerationStop, Snapshot, TokenChunk

UNPROVED = -1
"""Version of a server that has yet to prove what it holds."""

DRAIN_S = 2.0
"""How long requests that were running get to hand in their last tokens once they are aborted."""

QUEUED_S = 0.05
"""The same for requests without a token: those that came after the pause wait in the server's queue until resume."""

MAX_VAIN_REQUESTS = 3
"""Requests of a generation in a row that the server may abort without a token although nobody asked it to."""

SAME = 2e-5
"""Nats by which float32 log-probs of equal weights may differ."""


class ServerProcess(Protocol):
    """A server's process, here or on another machine."""

    def ended(self) -> bool:
        """Whether it is gone."""
        ...

    def last_words(self) -> str:
        """The end of its output."""
        ...

    async def stop(self) -> None:
        """End it. Safe to call twice."""
        ...


class VllmEngine:
    """Satisfies Engine for one server. Real clock only; make it with `connect`.

    Draws differ from the local engine's: vLLM seeds a request, not a token, so a generation that an update or another
    replica interrupts goes on with the seed of (Sampling.seed, index of its next token), and its draws depend on where
    it was cut. The recorded log-probs are exact in any case. A failed load leaves no weights to go back to: unlike the
    local engine's, a server then takes no generation until a later load passes.
    """

    def __init__(
        self,
        server: VllmHttp,
        transport: Transport,
        engine: EngineConfig,
        *,
        vocab_size: int,
        config: VllmConfig,
        process: ServerProcess | None = None,
    ) -> None:
        self._server, self._transport, self._config, self._process = server, transport, engine, process
        self._vocab_size, self._stall_timeout_s, self._checksums = vocab_size, config.stall_timeout_s, config.checksums
        self._version = UNPROVED
        self._failure = "no weights were loaded yet"
        self._stopped = False
        self._open = False
        self._changed = Signal()
        self._loading = asyncio.Lock()
        self._asked: Snapshot | None = None
        self._measured: np.ndarray | None = None
        self._expected: np.ndarray | None = None
        self._generations: dict[str, VllmGeneration] = {}
        self._tasks = Tasks()
        self._generated = self._recomputed = 0
        self._busy_seconds, self._busy_since, self._last_token_at = 0.0, 0.0, 0.0
        self._probe_gap = self._update_seconds = 0.0
        self._update_bytes = 0

    @classmethod
    async def connect(
        cls,
        address: str,
        snapshot: Snapshot,
        engine: EngineConfig,
        config: VllmConfig,
        *,
        process: ServerProcess | None = None,
    ) -> "VllmEngine":
        """An engine whose server holds the snapshot, proved by probe and by a few sampled tokens. Raises EngineError.

        It owns `process`, which ends with it.
        """
        server = VllmHttp(address, config, update_timeout_s=engine.load_timeout_s)
        connected: VllmEngine | None = None
        try:
            facts = await server.facts()
            vocab_size = snapshot_vocabulary(snapshot.location)
            await check_server(server, facts, engine, config, vocab_size=vocab_size)
            transport = make_transport(server, config, workers=facts.workers, timeout_s=engine.load_timeout_s)
            connected = cls(server, transport, engine, vocab_size=vocab_size, config=config, process=process)
            await connected.load(snapshot)
            await check_words(server, engine, config, vocab_size=vocab_size)
        except BaseException:
            await (connected.stop() if connected is not None else server.close())
            if connected is None and process is not None:
                await process.stop()
            raise
        return connected

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        """See Engine. Raises ValueError for token ids the model does not know, or a session that is busy."""
        self._check_usable()
        generation = self._checked(token_ids, max_tokens, sampling)
        former = self._generations.get(session)
        if former is not None and not former.cancelled:
            raise ValueError(f"session {session!r} has a generation under way; a session has one at a time")
        if not self._generations:
            self._busy_since = time.monotonic()
        self._generations[session] = generation
        self._tasks.spawn(self._play(generation))
        try:
            while True:
                chunk = await generation.chunks.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                yield chunk
                if chunk.stop is not None:
                    return
        finally:
            self._abandon(generation)
            if self._generations.get(session) is generation:
                del self._generations[session]
                if not self._generations:
                    self._busy_seconds += time.monotonic() - self._busy_since

    async def cancel(self, session: str) -> None:
        """See Engine."""
        if session in self._generations:
            self._abandon(self._generations[session])

    async def close(self, session: str) -> None:
        """See Engine. vLLM keeps its cache by content, not by session."""
        await self.cancel(session)

    async def load(self, snapshot: Snapshot) -> None:
        """See Engine. Loads queue; one that a newer one overtakes in the queue returns with the newer one."""
        if self._stopped:
            raise EngineError(self._failure)
        self._asked = snapshot
        async with self._loading:
            if self._asked.version != self._version:
                await self._take(self._asked)

    async def health(self) -> EngineHealth:
        """See Engine. Asks the server, and notices one that was restarted or given weights by someone else."""
        self._check_usable()
        if self._process is not None and self._process.ended():
            self._unprove(f"vLLM server {self._server.address} has ended:\n{self._process.last_words()}")
        self._check_usable()
        if not self._loading.locked():
            version = self._version
            await self._server.healthy()
            label = await self._server.weight_version()
            if label != str(version) and version == self._version and not self._loading.locked():
                what = f"holds weights labelled {label!r}, not {version}: restarted, or updated by someone else"
                self._unprove(str(self._server.error("health", what, "give the server to this run alone")))
                self._check_usable()
        running = self._busy_seconds + (time.monotonic() - self._busy_since if self._generations else 0.0)
        return EngineHealth(
            version=self._version,
            running=len(self._generations),
            generated_tokens=self._generated,
            recomputed_tokens=self._recomputed,
            busy_seconds=running,
            probe_gap=self._probe_gap,
            update_seconds=self._update_seconds,
            update_bytes=self._update_bytes,
        )

    async def stop(self) -> None:
        """See Engine."""
        self._stopped = True
        self._unprove("the engine was stopped")
        await self._tasks.stop()
        await self._transport.close()
        await self._server.close()
        if self._process is not None:
            await self._process.stop()

    def last_words(self) -> str:
        """The end of what the server said, if it was started for this engine."""
        return self._process.last_words() if self._process is not None else ""

    def _check_usable(self) -> None:
        if self._failure:
            raise EngineError(self._failure)

    def _checked(self, token_ids: Sequence[int], max_tokens: int, sampling: Sampling) -> VllmGeneration:
        prompt: list[int] = checked_tokens(token_ids, max_tokens, sampling, self._vocab_size).tolist()
        room = max(self._config.max_context - len(prompt), 0)
        return VllmGeneration(prompt, min(max_tokens, room), room < max_tokens, sampling)

    async def _play(self, generation: VllmGeneration) -> None:
        """Requests until the generation ends; each waits for the gate and is of one version."""
        vain = 0
        try:
            while not generation.ended:
                if len(generation.given) >= generation.limit:
                    # No room from the start, or a request that was aborted after its last token.
                    full = generation.cut_by_context
                    self._end(generation, GenerationStop.CONTEXT_FULL if full else GenerationStop.MAX_TOKENS)
                    return
                await self._changed.until(lambda: self._open or bool(self._failure) or generation.cancelled)
                if generation.cancelled:
                    self._end(generation, GenerationStop.CANCELLED)
                    return
                self._check_usable()
                version, before = self._version, len(generation.given)
                generation.answered = False
                generation.request = asyncio.create_task(self._request(generation, version))
                await self._attend(generation.request)
                updated = not self._open or self._version != version
                vain = vain + 1 if not updated and len(generation.given) == before else 0
                if vain >= MAX_VAIN_REQUESTS and not generation.ended and not generation.cancelled:
                    what = f"it aborted {vain} requests in a row without a token, and no update was under way"
                    raise self._server.error("generate", what, "give the server to this run alone; see its log")
        except Exception as error:  # an answer that nobody foresaw must not leave the caller waiting
            generation.ended = True
            if not isinstance(error, EngineError):
                error = self._server.error("generate", f"not understood ({error!r})", "is it vLLM 0.30 or later?")
            generation.chunks.put_nowait(error)
        finally:
            if generation.request is not None:
                generation.request.cancel()

    async def _attend(self, request: asyncio.Task[bool]) -> None:
        """Wait until a request ends or is cancelled. It may queue for as long as the server gives tokens to others."""
        seconds, since = self._stall_timeout_s, time.monotonic()
        while not request.done():
            left = max(since, self._last_token_at) + seconds - time.monotonic()
            if left <= 0:
                what = f"no token, for any generation, within vllm.stall_timeout_s = {seconds:g} s"
                raise self._server.error("generate", what, "restart the server, or raise it")
            await asyncio.wait([request], timeout=left)
        if not request.cancelled():
            request.result()

    async def _request(self, generation: VllmGeneration, version: int) -> bool:
        """One request, of one version; returns whether it ended the generation, and not an abort."""
        body = generation.body(version)
        self._recomputed += len(body["prompt"]) if generation.given else 0
        async with aclosing(self._server.complete(body)) as pieces:
            async for piece in pieces:
                stop = self._stop_of(generation, piece)
                if piece.token_ids:
                    generation.answered, self._last_token_at = True, time.monotonic()
                generation.given += piece.token_ids
                self._generated += len(piece.token_ids)
                generation.ended = stop is not None
                if piece.token_ids or stop is not None:
                    chunk = TokenChunk(token_ids=piece.token_ids, logprobs=piece.logprobs, version=version, stop=stop)
                    generation.chunks.put_nowait(chunk)
        return generation.ended

    def _stop_of(self, generation: VllmGeneration, piece: Piece) -> GenerationStop | None:
        if piece.finish in ("", "abort"):
            return None
        if piece.finish == "stop":
            return GenerationStop.STOP_TOKEN
        if piece.finish != "length":
            raise self._server.error("generate", f"a request ended by {piece.finish!r}", "look at the server's log")
        return GenerationStop.CONTEXT_FULL if generation.cut_by_context else GenerationStop.MAX_TOKENS

    def _end(self, generation: VllmGeneration, stop: GenerationStop) -> None:
        generation.ended = True
        version = max(self._version, 0)
        generation.chunks.put_nowait(TokenChunk(token_ids=(), logprobs=(), version=version, stop=stop))

    def _abandon(self, generation: VllmGeneration) -> None:
        if not generation.ended and not generation.cancelled:
            generation.cancelled = True
            if generation.request is not None:
                # Hanging up is how vLLM is told to drop a request.
                generation.request.cancel()
            self._changed.notify()

    async def _take(self, snapshot: Snapshot) -> None:
        """Replace the weights. Before the pause an error changes nothing; after it, the server is unproved."""
        try:
            size = await asyncio.to_thread(check_snapshot, snapshot)
        except (ValueError, OSError) as error:
            raise EngineError(f"policy version {snapshot.version} was not loaded: {error}") from error
        if snapshot_vocabulary(snapshot.location) != self._vocab_size:
            raise EngineError(f"policy version {snapshot.version} has another vocabulary than the server's model")
        began, former = time.monotonic(), self._version
        self._open, self._failure = False, ""
        try:
            await self._server.pause()
            await self._drain()
            await self._transfer(snapshot, former)
            await self._server.resume()
            self._probe_gap = await self._prove(snapshot, former)
        except BaseException as error:
            # A cancellation and a time limit have no words of their own.
            self._unprove(f"policy version {snapshot.version} was not loaded: {str(error) or repr(error)}")
            raise
        self._version, self._open = snapshot.version, True
        self._update_seconds, self._update_bytes = time.monotonic() - began, size
        self._changed.notify()

    async def _transfer(self, snapshot: Snapshot, former: int) -> None:
        """Send the weights; a server that had others must have changed, by its own account too if that is asked for."""
        before = await self._server.checksums() if self._checksums else {}
        await self._transport.send(snapshot)
        if before and former not in (UNPROVED, snapshot.version) and before == await self._server.checksums():
            what = f"its checksums under version {snapshot.version} are those of version {former}"
            raise self._server.error("checksum", what, "restart the server, and check its plugin (docs/vllm.md)")

    async def _drain(self) -> None:
        """Wait for what the aborted requests still hand in; leave those that the server, stopped, will not end."""
        running = {each.request for each in self._generations.values() if each.request is not None and each.answered}
        queued = {each.request for each in self._generations.values() if each.request is not None} - running
        for requests, seconds in ((running, DRAIN_S), (queued, QUEUED_S)):
            if requests:
                _, left = await asyncio.wait(requests, timeout=seconds)
                await end_tasks(*left)

    async def _prove(self, snapshot: Snapshot, former: int) -> float:
        """Largest gap between the server's and the trainer's log-probs on the probe; raises if it is too large."""
        # To score a prompt, vLLM samples a token after it.
        tokens, expected = probe_of(snapshot, longest=self._config.max_context - 1)
        if not tokens:
            return 0.0
        measured = np.array(await self._server.score(tokens, cache_salt=f"version-{snapshot.version}"))
        gap = float(np.abs(measured - expected).max())
        last_measured, last_expected = self._measured, self._expected
        self._measured, self._expected = measured, expected
        hint = "the server keeps other weights than it was sent: restart it, and check its plugin (docs/vllm.md)"
        if not gap <= self._config.probe_tolerance:
            what = (
                f"log-probs of version {snapshot.version} differ from the trainer's by {gap:g}, more than "
                f"engine.probe_tolerance {self._config.probe_tolerance:g}"
            )
            raise self._server.error("probe", what, hint + "; or engine.dtype needs a wider tolerance")
        # A small update hides below the tolerance; old weights still show, because they score the probe as before.
        if self._config.dtype == "float32" and last_measured is not None and last_expected is not None:
            comparable = last_expected.shape == expected.shape
            if comparable and np.abs(last_expected - expected).max() > SAME and (last_measured == measured).all():
                what = f"log-probs are those of version {former}, to the bit, and not of version {snapshot.version}"
                raise self._server.error("probe", what, hint)
        return gap

    def _unprove(self, reason: str) -> None:
        self._version, self._open = UNPROVED, False
        self._failure = reason
        for generation in self._generations.values():
            if generation.request is not None:
                generation.request.cancel()
        self._changed.notify()
