"""Replicas of the engine in actors: an actor starts an engine process or a vLLM server on its node, and watches it.

    this process                               a node
    EnginePool -> RemoteEngine -- TCP, secret --> engine process <- pipe - actor
               -> VllmEngine   -- HTTP ---------> vLLM server    <- pipe - actor

Tokens do not pass through the actor. What it started ends with it.
"""

import asyncio
import contextlib

from sao.clock import Tasks
from sao.cluster.actors import Actor, ActorError, Resident
from sao.cluster.connect import host_of
from sao.cluster.settings import ClusterConfig
from sao.engines.client import EngineClient, ServedEngine
from sao.engines.process import ProcessEngine
from sao.engines.protocol import Engine, EngineError
from sao.engines.settings import EngineConfig
from sao.engines.vllm import VllmEngine
from sao.engines.vllm_server import VllmServer
from sao.engines.vllm_settings import VllmConfig
from sao.types import Snapshot

STOP_TIMEOUT_S = 10.0
"""Seconds for an actor to end what it started; then it is ended itself, which ends that too."""
_LOOK_EVERY_S = 0.5


class _EngineHost(Resident):
    """Lives on a node and holds what serves there."""

    def __init__(self) -> None:
        self._serving: ProcessEngine | VllmServer | None = None

    async def start_local(self, snapshot: Snapshot, config: EngineConfig, host: str) -> tuple[str, str]:
        """An engine process; returns its address and its secret. Raises EngineError."""
        self._serving = engine = await ProcessEngine.start(snapshot, config, host)
        return engine.address, engine.secret

    async def start_vllm(self, model: str, engine: EngineConfig, config: VllmConfig, place: int, host: str) -> str:
        """A vLLM server; returns its address. Raises EngineError."""
        self._serving = server = await VllmServer.start(model, engine, config, index=place, host=host)
        return server.address

    async def ended(self) -> str:
        """Returns, when what was started has ended, what it said last."""
        serving = self._serving
        assert serving is not None
        while not serving.ended():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)
        return serving.last_words() if isinstance(serving, VllmServer) else serving.describe_exit()

    async def stop(self) -> None:
        """End what was started."""
        if self._serving is not None:
            await self._serving.stop()


class RemoteEngine(ServedEngine):
    """An engine process on some node; satisfies Engine."""

    def __init__(self, actor: Actor, client: EngineClient) -> None:
        super().__init__(client)
        self._actor = actor
        self._stopped = False

    @property
    def node(self) -> str:
        """Where it is, for people."""
        return str(self._actor.where)

    async def stop(self) -> None:
        """See Engine."""
        if not self._stopped:
            self._stopped = True
            await self._client.stop()
            await self._actor.stop(STOP_TIMEOUT_S)


class _RemoteServer:
    """A vLLM server on some node, as the process that its engine owns."""

    def __init__(self, actor: Actor, address: str) -> None:
        self._actor, self.address = actor, address
        self._words: str | None = None
        self._tasks = Tasks()
        self._tasks.spawn(self._watch())

    def ended(self) -> bool:
        """Whether the server, or the actor that holds it, is gone."""
        return self._words is not None

    def last_words(self) -> str:
        """What it said last."""
        return self._words or ""

    async def stop(self) -> None:
        """End the server."""
        await self._tasks.stop()
        await self._actor.stop(STOP_TIMEOUT_S)

    async def _watch(self) -> None:
        try:
            self._words = await self._actor.call("ended")
        except Exception as error:  # whatever it is, nobody watches the server any more
            self._words = str(error)


async def _place(cluster: ClusterConfig) -> Actor:
    try:
        return await Actor.place(_EngineHost, cluster.engine, cluster.place_timeout_s)
    except ActorError as error:
        raise EngineError(str(error)) from error


async def local_replica(cluster: ClusterConfig, config: EngineConfig, snapshot: Snapshot) -> Engine:
    """An engine process where there is room, holding the snapshot. Raises EngineError."""
    actor = await _place(cluster)
    try:
        address, secret = await actor.call("start_local", snapshot, config, host_of(cluster, actor.where))
    except BaseException as error:
        actor.kill()
        if isinstance(error, ActorError):
            raise EngineError(str(error)) from error
        raise
    client = EngineClient(
        address,
        secret=secret,
        reply_timeout_s=config.load_timeout_s,
        describe_exit=lambda: f"({actor.where})",
    )
    return RemoteEngine(actor, client)


async def vllm_replica(
    cluster: ClusterConfig, config: EngineConfig, vllm: VllmConfig, place: int, snapshot: Snapshot
) -> Engine:
    """A vLLM server where there is room, holding the snapshot, and its engine. Raises EngineError."""
    actor = await _place(cluster)
    try:
        host = host_of(cluster, actor.where)
        address = await actor.call("start_vllm", snapshot.location, config, vllm, place, host)
    except BaseException as error:
        with contextlib.suppress(Exception):
            await actor.stop(STOP_TIMEOUT_S)
        if isinstance(error, ActorError):
            raise EngineError(str(error)) from error
        raise
    return await VllmEngine.connect(address, snapshot, config, vllm, process=_RemoteServer(actor, address))
