"""Several engines as one: sessions stay with a replica, and a replica that fails is replaced while the others go on.

    generate --> the session's replica, else the least loaded --> chunks
                     |  EngineError, a stall, or taken out
                     '-> another replica, from prompt + tokens given out so far

    watch: every health_every_s, each replica's health, its version, and whether tokens come
    taken out --> stopped --> made anew by the factory, loaded with the newest weights --> serves

A replica is taken out when it fails, when no token of it came for too long, or when it does not hold what it was given.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from sao.clock import Signal, Tasks, WaitTimeoutError, end_tasks, limit
from sao.engines.gate import EngineGate
from sao.engines.protocol import Engine, EngineError, EngineHealth, RequestRefusedError, Sampling, last_words
from sao.types import GenerationStop, Snapshot, TokenChunk

_LOG = logging.getLogger(__name__)

MakeReplica = Callable[[int, Snapshot], Awaitable[Engine]]
"""Makes the engine of a place (0, 1, ...), holding the snapshot and proved. Raises EngineError."""


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """How the pool watches its replicas, and how patient it is."""

    health_every_s: float = 5.0
    """Seconds between looks at each replica; a dead one that nobody uses is noticed after this."""
    health_timeout_s: float = 10.0
    """Seconds for a replica to answer, or to give a token; longer means that it hangs."""
    stall_timeout_s: float = 120.0
    """Seconds without any token of a replica that has generations under way; then it is replaced."""
    load_timeout_s: float = 300.0
    """Seconds for a replica to take new weights; one that is slower is replaced, and the others go on."""
    max_moves: int = 3
    """How often a generation goes on elsewhere after its replica failed; above it the generation itself is suspected,
    and fails."""
    max_restarts: int = 20
    """Tries in a row to replace a replica, or to reach a lost server again, with pauses that grow to 30 s (eight
    minutes in all); then its place stays empty."""

    def __post_init__(self) -> None:
        for name in ("health_every_s", "health_timeout_s", "stall_timeout_s", "load_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"pool.{name} is {getattr(self, name)}; it must be above 0 seconds")
        for name in ("max_moves", "max_restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"pool.{name} is {getattr(self, name)}; it must be 0 or above")


class _Replica:
    """An engine in its place, and what the pool knows of it."""

    def __init__(self, place: int, engine: Engine, version: int) -> None:
        self.place = place
        self.engine = engine
        self.version = version
        self.generations = 0
        self.sessions: set[str] = set()
        self.loading = False
        self.last_sign = time.monotonic()
        self.health: EngineHealth | None = None
        self.lost = asyncio.Event()
        self.reason = ""


class EnginePool:
    """Satisfies Engine over replicas; make it with `start`. Real clock only.

    `address` lets clients in other processes use it (see EngineGate). Counters of its health are sums over all replicas
    it ever had; its version is the lowest of those that serve.
    """

    def __init__(self, make: MakeReplica, size: int, config: PoolConfig, snapshot: Snapshot) -> None:
        self._make, self._size, self._config = make, size, config
        self._newest = snapshot
        self._serving: list[_Replica] = []
        self._places: dict[str, _Replica] = {}
        self._cancelled: dict[str, bool] = {}
        self._empty: dict[int, str] = {}
        self._past: list[EngineHealth] = []
        self._taken_out = 0
        self._changed = Signal()
        self._tasks = Tasks()
        self._gate: EngineGate | None = None
        self._stopped = False

    @classmethod
    async def start(
        cls, make: MakeReplica, size: int, snapshot: Snapshot, config: PoolConfig | None = None, host: str = ""
    ) -> "EnginePool":
        """All replicas at once. Raises EngineError, with nothing left behind, if one of them does not start.

        With `host` clients reach the pool over TCP there, with its secret.
        """
        pool = cls(make, size, config or PoolConfig(), snapshot)
        made = await asyncio.gather(*(make(place, snapshot) for place in range(size)), return_exceptions=True)
        pool._serving = [
            _Replica(place, engine, snapshot.version)
            for place, engine in enumerate(made)
            if not isinstance(engine, BaseException)
        ]
        failed = next((error for error in made if isinstance(error, BaseException)), None)
        if failed is not None:
            await pool.stop()
            raise failed
        try:
            pool._gate = await EngineGate.open(pool, host)
        except BaseException:
            await pool.stop()
            raise
        pool._tasks.spawn(pool._watch())
        return pool

    @property
    def address(self) -> str:
        """Socket for EngineClient in other processes."""
        assert self._gate is not None
        return self._gate.address

    @property
    def secret(self) -> str:
        """What a client must know, if it comes over TCP."""
        assert self._gate is not None
        return self._gate.secret

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        """See Engine. Goes on with another replica when one fails: tokens, log-probs and versions stay exact."""
        if session in self._cancelled:
            raise ValueError(f"session {session!r} has a generation under way; a session has one at a time")
        self._cancelled[session] = False
        given: list[int] = []
        try:
            for move in range(self._config.max_moves + 1):
                replica = await self._replica_of(session)
                if self._cancelled[session]:
                    yield TokenChunk(token_ids=(), logprobs=(), version=replica.version, stop=GenerationStop.CANCELLED)
                    return
                stream = self._from_replica(replica, token_ids, given, max_tokens, sampling, session)
                try:
                    async for chunk in stream:
                        given += chunk.token_ids
                        yield chunk
                        if chunk.stop is not None:
                            return
                    raise EngineError(f"session {session}: the token stream ended without a stop reason")
                except RequestRefusedError:
                    raise
                except EngineError as error:
                    reason = replica.reason or str(error)
                    self._take_out(replica, reason)
                    if move == self._config.max_moves:
                        raise EngineError(
                            f"{move + 1} replicas failed under this generation; the last: {reason}"
                        ) from error
                finally:
                    await stream.aclose()
        finally:
            del self._cancelled[session]

    async def cancel(self, session: str) -> None:
        """See Engine."""
        if session in self._cancelled:
            self._cancelled[session] = True
            self._changed.notify()
        if session in self._places:
            with suppress(EngineError):
                await self._places[session].engine.cancel(session)

    async def close(self, session: str) -> None:
        """See Engine."""
        replica = self._places.pop(session, None)
        if replica is not None:
            replica.sessions.discard(session)
            with suppress(EngineError):
                await replica.engine.close(session)

    async def load(self, snapshot: Snapshot) -> None:
        """To all replicas at once; one that does not follow is taken out.

        Where none is left, returns when a replacement holds it. Raises EngineError if there will be none, and if none
        follows but some still hold a proved version: those go on with it.
        """
        if self._stopped:
            raise EngineError("the engine pool was stopped")
        await self._wait_for_one()
        former, self._newest = self._newest, snapshot
        replicas = list(self._serving)
        failures = await asyncio.gather(*(self._load_one(replica, snapshot) for replica in replicas))
        followed = [replica for replica, failure in zip(replicas, failures, strict=True) if not failure]
        if not followed:
            await asyncio.gather(*(self._look_at(replica) for replica in replicas))
            if not any(replica in self._serving for replica in replicas):
                # They died or broke, each for itself, while they were loaded: not a fault of the snapshot.
                return await self._wait_for_one()
            self._newest = former
            raise EngineError(f"no replica follows to version {snapshot.version}: " + "; ".join(filter(None, failures)))
        for replica, failure in zip(replicas, failures, strict=True):
            if failure:
                self._take_out(replica, failure)

    async def health(self) -> EngineHealth:
        """See Engine. Raises EngineError when no replica serves and none can be had."""
        await self._wait_for_one()
        await asyncio.gather(*(self._look_at(replica) for replica in list(self._serving)))
        await self._wait_for_one()
        now = [replica.health for replica in self._serving if replica.health is not None]
        every = [*self._past, *now]
        cpu = [health.cpu_seconds for health in every]
        return EngineHealth(
            version=min(replica.version for replica in self._serving),
            running=sum(health.running for health in now),
            generated_tokens=sum(health.generated_tokens for health in every),
            recomputed_tokens=sum(health.recomputed_tokens for health in every),
            busy_seconds=sum(health.busy_seconds for health in every),
            cpu_seconds=None if None in cpu else sum(filter(None, cpu)),
            probe_gap=max((health.probe_gap for health in now), default=0.0),
            update_seconds=max((health.update_seconds for health in now), default=0.0),
            update_bytes=sum(health.update_bytes for health in now),
            replicas=len(self._serving),
            taken_out=self._taken_out,
        )

    async def stop(self) -> None:
        """See Engine."""
        if self._stopped:
            return
        self._stopped = True
        replicas, self._serving = self._serving, []
        for replica in replicas:
            replica.reason = "the engine pool was stopped"
            replica.lost.set()
        self._changed.notify()
        if self._gate is not None:
            await self._gate.close()
        await self._tasks.stop()
        await asyncio.gather(*(replica.engine.stop() for replica in replicas), return_exceptions=True)

    async def _from_replica(
        self,
        replica: _Replica,
        prompt: Sequence[int],
        given: list[int],
        max_tokens: int,
        sampling: Sampling,
        session: str,
    ) -> AsyncGenerator[TokenChunk]:
        """The rest of a generation on one replica; ends with EngineError when the replica is taken out."""
        rest = replace(sampling, first_token_index=sampling.first_token_index + len(given))
        stream = replica.engine.generate(
            [*prompt, *given], max_tokens=max_tokens - len(given), sampling=rest, session=session
        )
        if not replica.generations:
            replica.last_sign = time.monotonic()
        replica.generations += 1
        lost = asyncio.ensure_future(replica.lost.wait())
        chunk: asyncio.Task[TokenChunk] | None = None
        try:
            while True:
                chunk = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
                await asyncio.wait([chunk, lost], return_when=asyncio.FIRST_COMPLETED)
                if not chunk.done():
                    raise EngineError(replica.reason)
                try:
                    value = chunk.result()
                except StopAsyncIteration:
                    return
                replica.last_sign = time.monotonic()
                yield value
        finally:
            replica.generations -= 1
            lost.cancel()
            if chunk is not None:
                # It may have failed just when this generation was cancelled: an error nobody reads is a warning.
                await end_tasks(chunk)
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    async def _replica_of(self, session: str) -> _Replica:
        """The session's replica while it serves, else the one with the fewest generations, then sessions."""
        replica = self._places.get(session)
        if replica in self._serving:
            return replica  # type: ignore[return-value]
        await self._wait_for_one()
        replica = min(self._serving, key=lambda each: (each.generations, len(each.sessions), each.place))
        self._places[session] = replica
        replica.sessions.add(session)
        return replica

    async def _wait_for_one(self) -> None:
        """Return when a replica serves. Raises EngineError when none will: every place has been given up."""
        await self._changed.until(lambda: bool(self._serving) or self._stopped or len(self._empty) == self._size)
        if self._stopped:
            raise EngineError("the engine pool was stopped")
        if not self._serving:
            raise EngineError(
                f"all {self._size} engine replicas are gone and could not be replaced; the last tries: "
                + "; ".join(f"replica {place}: {reason}" for place, reason in sorted(self._empty.items()))
            )

    async def _load_one(self, replica: _Replica, snapshot: Snapshot) -> str:
        """Why the replica did not follow; "" if it did."""
        replica.loading = True
        try:
            what = f"replica {replica.place} to load version {snapshot.version}"
            async with limit(self._config.load_timeout_s, what):
                await replica.engine.load(snapshot)
            replica.version = snapshot.version
        except (EngineError, WaitTimeoutError) as error:
            return str(error)
        finally:
            replica.loading = False
            replica.last_sign = time.monotonic()
        return ""

    async def _watch(self) -> None:
        """Takes nothing; takes out what is dead, stalled or not what it should be."""
        while True:
            await asyncio.sleep(self._config.health_every_s)
            await asyncio.gather(*(self._look_at(replica) for replica in list(self._serving)))

    async def _look_at(self, replica: _Replica) -> None:
        version = replica.version
        try:
            async with limit(self._config.health_timeout_s, f"the health of replica {replica.place}"):
                replica.health = await replica.engine.health()
        except (EngineError, WaitTimeoutError) as error:
            # An engine that is being loaded has a limit of its own; one that gives tokens lives, and is only busy.
            lives = replica.generations and time.monotonic() - replica.last_sign < self._config.health_timeout_s
            if isinstance(error, EngineError) or not (replica.loading or lives):
                self._take_out(replica, str(error))
            return
        if replica.loading:
            return
        if replica.version == version != replica.health.version:
            self._take_out(replica, f"it holds version {replica.health.version}, not {version}")
        elif replica.generations and time.monotonic() - replica.last_sign > self._config.stall_timeout_s:
            self._take_out(replica, f"no token for pool.stall_timeout_s = {self._config.stall_timeout_s:g} s")

    def _take_out(self, replica: _Replica, reason: str) -> None:
        if replica not in self._serving:
            return
        _LOG.warning("engine replica %d is taken out: %s%s", replica.place, reason, last_words(replica.engine))
        self._serving.remove(replica)
        self._taken_out += 1
        if replica.health is not None:
            self._past.append(replica.health)
        replica.reason = reason
        replica.lost.set()
        for session in replica.sessions:
            self._places.pop(session, None)
        self._tasks.spawn(self._replace(replica))

    async def _replace(self, former: _Replica) -> None:
        """Stop a replica and put another in its place. Nobody awaits it: what it does not catch ends without a word."""
        place, reason = former.place, former.reason
        try:
            await former.engine.stop()
        except Exception as error:
            reason += f"; then it did not stop: {error!r}"
            _LOG.warning("engine replica %d did not stop: %r", place, error)
        for attempt in range(self._config.max_restarts):
            try:
                replica = await self._made_anew(place)
            except Exception as error:
                reason = str(error) if isinstance(error, EngineError | OSError | ValueError) else repr(error)
                _LOG.warning("engine replica %d is not replaced yet: %s", place, reason)
                await asyncio.sleep(min(0.5 * 2**attempt, 30.0))
            else:
                _LOG.warning("engine replica %d serves again, with version %d", place, replica.version)
                self._serving.append(replica)
                self._changed.notify()
                return
        self._empty[place] = reason
        _LOG.error("engine replica %d is given up: %s", place, reason)
        self._changed.notify()

    async def _made_anew(self, place: int) -> _Replica:
        """With the newest weights. Raises EngineError if it does not follow to them; no engine is left then."""
        snapshot = self._newest
        replica = _Replica(place, await self._make(place, snapshot), snapshot.version)
        try:
            while replica.version != self._newest.version:
                if failure := await self._load_one(replica, self._newest):
                    raise EngineError(failure)
        except BaseException:
            with suppress(Exception):
                await replica.engine.stop()
            raise
        return replica
