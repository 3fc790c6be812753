"""How a snapshot's weights get into a vLLM server: three transports, one order of routes.

    (once)  init_weight_transfer_engine
    (each)  start_weight_update -> update_weights [weights flow] -> finish_weight_update

The snapshot stands on disk in every case, because a resumed run and a replaced server need it; gloo and nccl read it
here and broadcast it. vLLM itself is never imported in this process.
"""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from sao.engines.protocol import EngineError
from sao.engines.vllm_http import VllmHttp
from sao.engines.vllm_plugin import broadcast, join_gloo, tensors_of
from sao.engines.vllm_server import free_port
from sao.engines.vllm_settings import VllmConfig
from sao.types import Snapshot


class Transport(Protocol):
    """Gives snapshots to one paused server."""

    async def send(self, snapshot: Snapshot) -> None:
        """Return when the server says that it holds the weights. Raises EngineError."""
        ...

    async def close(self) -> None:
        """Release what the transport holds. Safe to call twice."""
        ...


class FolderTransport:
    """The server reads the snapshot folder itself."""

    def __init__(self, server: VllmHttp) -> None:
        self._server = server
        self._begun = False

    async def send(self, snapshot: Snapshot) -> None:
        """See Transport."""
        if not self._begun:
            await self._server.transfer("init_weight_transfer_engine", {"init_info": {}})
            self._begun = True
        await self._server.transfer("start_weight_update", {})
        await self._server.transfer("update_weights", {"update_info": {"folder": snapshot.location}})
        await self._server.transfer("finish_weight_update", {"weight_version": str(snapshot.version)})

    async def close(self) -> None:
        """See Transport."""


class GlooTransport:
    """Broadcast over TCP: this process is rank 0 of a group with the server's workers, and sends from a thread."""

    def __init__(self, server: VllmHttp, config: VllmConfig, *, workers: int, timeout_s: float) -> None:
        self._server = server
        self._address = config.transfer_address
        self._world_size = 1 + workers
        self._timeout_s = timeout_s
        self._group: Any = None

    async def send(self, snapshot: Snapshot) -> None:
        """See Transport. A failure leaves the group: the next update makes a new one."""
        try:
            if self._group is None:
                self._group = await self._join()
            described = await asyncio.to_thread(_describe, snapshot.location)
            await self._server.transfer("start_weight_update", {})
            update = self._server.transfer("update_weights", {"update_info": described})
            await _both(update, asyncio.to_thread(_send_all, self._group, snapshot.location))
            await self._server.transfer("finish_weight_update", {"weight_version": str(snapshot.version)})
        except (RuntimeError, OSError) as error:
            await self.close()
            if isinstance(error, EngineError):
                raise
            what = f"the broadcast of version {snapshot.version} failed ({error})"
            where = f"check that vllm.transfer_address {self._address!r} is an address of this machine"
            hint = where + ", and that no firewall stands between"
            raise self._server.error("update (broadcast)", what, hint) from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See Transport."""
        self._group = None

    async def _join(self) -> Any:
        port = free_port(self._address)
        where: dict[str, Any] = {"master_address": self._address, "master_port": port, "rank_offset": 1}
        where |= {"world_size": self._world_size, "timeout_s": self._timeout_s}
        join = asyncio.to_thread(
            join_gloo, self._address, port, rank=0, world_size=self._world_size, timeout_s=self._timeout_s
        )
        ask = self._server.transfer("init_weight_transfer_engine", {"init_info": where})
        return (await _both(ask, join))[1]


class NcclTransport:
    """vLLM's own trainer side of `nccl`, in a process of vLLM's environment. Written by its documentation: untested."""

    def __init__(self, server: VllmHttp, config: VllmConfig, *, workers: int, timeout_s: float) -> None:
        self._server = server
        self._config = config
        self._world_size = 1 + workers
        self._timeout_s = timeout_s
        self._sender: asyncio.subprocess.Process | None = None

    async def send(self, snapshot: Snapshot) -> None:
        """See Transport."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._sender is None:
                    self._sender = await self._start()
                assert self._sender.stdin is not None
                assert self._sender.stdout is not None
                order = {"folder": snapshot.location, "version": str(snapshot.version)}
                self._sender.stdin.write(json.dumps(order).encode() + b"\n")
                answer = json.loads(await self._sender.stdout.readline() or b'{"error": "it ended"}')
        except (TimeoutError, OSError, ValueError) as error:
            await self.close()
            hint = "see the sender's lines on standard error, or raise engine.load_timeout_s"
            raise self._server.error("update (nccl)", f"the sender failed ({error!r})", hint) from error
        if answer.get("error"):
            await self.close()
            hint = "vllm.command must have vLLM, and a GPU besides the server's"
            raise self._server.error("update (nccl)", str(answer["error"]), hint)

    async def close(self) -> None:
        """See Transport."""
        sender, self._sender = self._sender, None
        if sender is not None:
            with suppress(ProcessLookupError):
                sender.kill()
            await sender.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        command = self._config.command
        if not command:
            hint = "set vllm.command to a Python with vLLM"
            raise self._server.error("update (nccl)", "there is no vLLM to send with", hint)
        script = Path(__file__).with_name("vllm_nccl_sender.py")
        settings = {
            "server": self._server.address,
            "master_address": self._config.transfer_address,
            "master_port": free_port(self._config.transfer_address),
            "world_size": self._world_size,
            "timeout_s": self._timeout_s,
        }
        return await asyncio.create_subprocess_exec(
            command, "-P", str(script), json.dumps(settings),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip


def make_transport(server: VllmHttp, config: VllmConfig, *, workers: int, timeout_s: float) -> Transport:
    """The transport that the configuration names."""
    if config.transport == "folder":
        return FolderTransport(server)
    kind = GlooTransport if config.transport == "gloo" else NcclTransport
    return kind(server, config, workers=workers, timeout_s=timeout_s)


async def _both(asked: Any, working: Any) -> list[Any]:
    """Await a request and the thread that serves it; the first failure is raised at once, whatever the other does."""
    tasks = [asyncio.ensure_future(asked), asyncio.ensure_future(working)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def _describe(folder: str) -> dict[str, Any]:
    described = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors_of(folder)
    ]
    names, dtype_names, shapes = (list(column) for column in zip(*described, strict=True))
    return {"names": names, "dtype_names": dtype_names, "shapes": shapes}


def _send_all(group: Any, folder: str) -> None:
    for _, tensor in tensors_of(folder):
        broadcast(group, tensor)
