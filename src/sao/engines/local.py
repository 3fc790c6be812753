"""The embedded engine: one transformer, many sessions, continuous batching, weights replaced between decode steps."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from sao.clock import Clock, Tasks
from sao.engines.decoder import Decoder, Delivery, Generation
from sao.engines.protocol import EngineError, EngineHealth, Sampling, checked_tokens, probe_of
from sao.engines.settings import EngineConfig, EngineCost
from sao.models.load import DTYPES, find_device, load_folder, read_weights
from sao.store.snapshots import check_snapshot
from sao.types import GenerationStop, Snapshot, TokenChunk

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Swap:
    """Weights that were read and wait for the gap between two steps."""

    snapshot: Snapshot
    weights: Mapping[str, Tensor]
    size: int
    """Bytes that were read."""
    done: asyncio.Future[None]


class LocalEngine:
    """Engine over a transformer of this process; takes `model` for its own (its attention and weights are replaced).

    All work happens in one task of the running loop, one step at a time through the clock; requests take effect
    between steps. An error in a step ends every stream, and every later call, with EngineError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        clock: Clock,
        config: EngineConfig | None = None,
        cost: EngineCost | None = None,
        *,
        version: int = 0,
    ) -> None:
        self._config = config or EngineConfig()
        self._cost = cost or EngineCost()
        self._clock = clock
        positions = int(getattr(model.config, "max_position_embeddings", self._config.max_context))
        if positions < self._config.max_context:
            raise ValueError(
                f"engine.max_context is {self._config.max_context}, but the model knows {positions} positions"
            )
        nn.Module.to(model, find_device(self._config.device), DTYPES[self._config.dtype])
        self._decoder = Decoder(
            model,
            version=version,
            rows=self._config.max_sessions,
            max_context=self._config.max_context,
            flush_tokens=self._config.flush_tokens,
        )
        self._active: dict[str, Generation] = {}
        self._waiting: list[Generation] = []
        self._cancelled: list[Generation] = []
        self._closing: list[str] = []
        self._loads: list[tuple[Snapshot, asyncio.Future[None]]] = []
        self._swap: _Swap | None = None
        self._tasks = Tasks()
        self._stepper: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._failure = ""
        self._busy_seconds = 0.0
        self._probe_gap = 0.0
        self._update_bytes = 0

    @classmethod
    def from_snapshot(
        cls, snapshot: Snapshot, clock: Clock, config: EngineConfig | None = None, cost: EngineCost | None = None
    ) -> "LocalEngine":
        """An engine that holds a published snapshot, proved by its checksum and its probe. Raises EngineError."""
        config = config or EngineConfig()
        try:
            size = check_snapshot(snapshot)
            model = load_folder(snapshot.location, dtype=DTYPES[config.dtype], device=config.device)
        except Exception as error:
            raise EngineError(f"policy version {snapshot.version}: {_told(error)}") from error
        engine = cls(model, clock, config, cost, version=snapshot.version)
        engine._probe_gap, engine._update_bytes = engine._prove(snapshot), size
        return engine

    def submit(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling,
        session: str,
        deliver: Callable[[TokenChunk | EngineError], None],
    ) -> Generation:
        """What `generate` does, with chunks (or the error that ends them) handed to a callback. Raises like it."""
        self._check_alive()
        generation = Generation(
            session,
            checked_tokens(token_ids, max_tokens, sampling, self._decoder.vocab_size),
            max_tokens,
            sampling,
            deliver,
        )
        former = self._active.get(session)
        if former is not None and not former.cancelled:
            raise ValueError(f"session {session!r} has a generation under way; a session has one at a time")
        self._active[session] = generation
        self._waiting.append(generation)
        self._notify()
        return generation

    def abandon(self, generation: Generation) -> None:
        """End a generation between two steps; nothing happens if it has ended."""
        if not generation.ended and not generation.cancelled:
            generation.cancelled = True
            self._cancelled.append(generation)
            self._wake.set()

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        """See Engine. Raises ValueError for token ids the model does not know, or a session that is busy."""
        chunks: asyncio.Queue[TokenChunk | EngineError] = asyncio.Queue()
        generation = self.submit(
            token_ids, max_tokens=max_tokens, sampling=sampling, session=session, deliver=chunks.put_nowait
        )
        try:
            while True:
                chunk = await chunks.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                yield chunk
                if chunk.stop is not None:
                    return
        finally:
            self.abandon(generation)

    def forget(self, session: str) -> None:
        """What `close` does, without waiting for anything."""
        if session in self._active:
            self.abandon(self._active[session])
        self._closing.append(session)
        self._wake.set()

    async def cancel(self, session: str) -> None:
        """See Engine."""
        if session in self._active:
            self.abandon(self._active[session])

    async def close(self, session: str) -> None:
        """See Engine."""
        self.forget(session)

    async def load(self, snapshot: Snapshot) -> None:
        """See Engine. Requests queue; one that a newer request overtakes in the queue returns with the newer one."""
        self._check_alive()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads.append((snapshot, done))
        if len(self._loads) == 1:
            self._tasks.spawn(self._load_pending())
        await done

    async def health(self) -> EngineHealth:
        """See Engine."""
        self._check_alive()
        return EngineHealth(
            version=self._decoder.version,
            running=len(self._active),
            generated_tokens=self._decoder.generated_tokens,
            recomputed_tokens=self._decoder.recomputed_tokens,
            busy_seconds=self._busy_seconds,
            probe_gap=self._probe_gap,
            update_bytes=self._update_bytes,
        )

    async def stop(self) -> None:
        """See Engine."""
        self._fail("the engine was stopped")
        await self._tasks.stop()

    def _check_alive(self) -> None:
        if self._failure:
            raise EngineError(self._failure)

    def _notify(self) -> None:
        self._wake.set()
        if self._stepper is None:
            self._stepper = self._tasks.spawn(self._run())

    async def _run(self) -> None:
        """Step while there is work; takes requests between steps, gives chunks, is woken by every request."""
        try:
            while True:
                self._wake.clear()
                self._end_cancelled()
                if self._swap is not None:
                    await self._take_weights(self._swap)
                self._admit_waiting()
                plan = self._decoder.plan(self._config.prefill_tokens)
                if plan.decoded or plan.fills:
                    cost = self._cost.of_step(plan.decoded, plan.prefilled)
                    self._deliver(await self._compute(lambda plan=plan: self._decoder.step(plan), cost))
                else:
                    await self._wake.wait()
        except Exception as error:  # whatever torch raises must reach every stream, or rollouts would hang
            self._fail(f"the engine failed: {error!r}")

    async def _compute(self, work: Callable[[], T], cost: float) -> T:
        started = self._clock.now()
        try:
            return await self._clock.compute(work, cost=cost)
        finally:
            self._busy_seconds += self._clock.now() - started

    def _end_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for generation in cancelled:
            if generation.ended:
                continue
            if generation in self._waiting:
                self._waiting.remove(generation)
                self._end_without_tokens(generation, GenerationStop.CANCELLED)
            else:
                self._deliver(self._decoder.cancel(generation))
        closing, self._closing = self._closing, []
        for session in closing:
            self._decoder.close(session)

    def _admit_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for place, generation in enumerate(waiting):
            if len(generation.token_ids) >= self._config.max_context:
                self._end_without_tokens(generation, GenerationStop.CONTEXT_FULL)
            elif not self._decoder.admit(generation):
                self._waiting = waiting[place:]
                return

    def _end_without_tokens(self, generation: Generation, stop: GenerationStop) -> None:
        generation.ended = True
        self._deliver([(generation, TokenChunk(token_ids=(), logprobs=(), version=self._decoder.version, stop=stop))])

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for generation, chunk in deliveries:
            if generation.ended and chunk.stop is not None and self._active.get(generation.session) is generation:
                del self._active[generation.session]
            generation.deliver(chunk)

    async def _load_pending(self) -> None:
        """Read and swap until no request is left; of several that wait, only the newest is read."""
        while self._loads:
            requests = list(self._loads)
            snapshot = requests[-1][0]
            failure = ""
            try:
                weights, size = await self._clock.external(
                    lambda snapshot=snapshot: self._read(snapshot),
                    cost=self._cost.load_seconds,
                )
                self._swap = _Swap(snapshot, weights, size, asyncio.get_running_loop().create_future())
                self._notify()
                await self._swap.done
            except Exception as error:  # whatever a damaged file or torch raises must reach who asked, who would hang
                failure = f"policy version {snapshot.version} was not loaded: {_told(error)}"
            del self._loads[: len(requests)]
            for _, done in requests:
                if done.done():
                    continue
                if failure:
                    done.set_exception(EngineError(failure))
                else:
                    done.set_result(None)

    def _read(self, snapshot: Snapshot) -> tuple[dict[str, Tensor], int]:
        """The weights, if they are what was published, and their bytes; in a thread, while decoding goes on."""
        size = check_snapshot(snapshot)
        return read_weights(snapshot.location, self._decoder.model), size

    async def _take_weights(self, swap: _Swap) -> None:
        """Between two steps: give out what the former version sampled, swap, prove, and go on or go back."""
        self._swap = None
        self._deliver(self._decoder.flush())
        probe_cost = self._cost.prefill_token_seconds * len(swap.snapshot.probe_token_ids)
        former = self._decoder.replace_weights(swap.weights)
        try:
            self._probe_gap = await self._compute(lambda: self._prove(swap.snapshot), probe_cost)
        except Exception as error:  # EngineError, or what torch raises
            self._decoder.replace_weights(former)
            swap.done.set_exception(error)
            return
        self._decoder.version, self._update_bytes = swap.snapshot.version, swap.size
        if self._config.mode == "recompute":
            self._decoder.invalidate()
        swap.done.set_result(None)

    def _prove(self, snapshot: Snapshot) -> float:
        """Largest gap between own and trainer's log-probs on the probe; raises EngineError if it is too large."""
        tokens, expected = probe_of(snapshot, longest=self._config.max_context)
        if not tokens:
            return 0.0
        gap = float(np.abs(self._decoder.score(tokens) - expected).max())
        if not gap <= self._config.probe_tolerance:
            raise EngineError(
                f"policy version {snapshot.version} fails its probe: log-probs differ from the trainer's by {gap:g},"
                f" more than engine.probe_tolerance {self._config.probe_tolerance:g}; the weights in"
                f" {snapshot.location} are not what the trainer scored, or the engine's dtype needs a wider tolerance"
            )
        return gap

    def _fail(self, reason: str) -> None:
        if self._failure:
            return
        self._failure = reason
        active, self._active, self._waiting = list(self._active.values()), {}, []
        for generation in active:
            generation.ended = True
            generation.deliver(EngineError(reason))
        if self._swap is not None and not self._swap.done.done():
            self._swap.done.set_exception(EngineError(reason))
        for _, done in self._loads:
            if not done.done():
                done.set_exception(EngineError(reason))


def _told(error: Exception) -> str:
    """The message, with the type's name where the message was not written for people."""
    return str(error) if isinstance(error, (ValueError, OSError, EngineError)) else repr(error)
