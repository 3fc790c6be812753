"""Episodes in processes of their own, so that rendering and tools never hold up the orchestrator's loop.

    orchestrator --- socket: tasks, cancellations ---> N processes, many episodes each ---> engine's socket
                 <-- socket: rollouts ---------------

When the parent dies its end of the socket closes, and the processes end their episodes and go.
"""

import asyncio
import contextlib
import socket
import sys

from sao.clock import limit
from sao.rollout.pool import PlayerHandle, WorkerPool, WorkerStartError
from sao.rollout.serve import Stream
from sao.types import Task

_ENTRY = "import sys; sys.path[:] = {path!r}; from sao.rollout.serve import main; main({fd})"


class ProcessWorkers(WorkerPool):
    """Players are processes of this machine."""

    async def _make_player(self) -> PlayerHandle:
        return await _Child.start(self._setup, self._config.start_timeout_s)


class _Child(PlayerHandle):
    """The parent's end of one process."""

    def __init__(self, process: asyncio.subprocess.Process, stream: Stream) -> None:
        super().__init__()
        self._process = process
        self._stream = stream

    @classmethod
    async def start(cls, setup: bytes, timeout_s: float) -> "_Child":
        """Start a process and wait until its parts are built. Raises WorkerStartError."""
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own, so that Ctrl-C reaches the parent alone, which ends the episodes in order.
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    _ENTRY.format(path=sys.path, fd=theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise WorkerStartError(f"a rollout process could not be started: {error}") from error
        child = cls(process, await Stream.over(ours))
        try:
            async with limit(timeout_s, f"rollout process {process.pid} to be ready"):
                child._stream.send_bytes(setup)
                trouble = await child._stream.receive()
            if trouble:
                raise WorkerStartError(f"rollout process {process.pid} could not build its parts: {trouble}")
        except (EOFError, TimeoutError) as error:
            told = await child.reap()
            raise WorkerStartError(str(error) if isinstance(error, TimeoutError) else told) from error
        except BaseException:
            await child.reap()
            raise
        return child

    @property
    def pid(self) -> int:
        """See PlayerHandle."""
        return self._process.pid

    def _send_task(self, number: int, task: Task, group_id: str, attempt: int, seed: int) -> None:
        self._stream.send((number, task, group_id, attempt, seed))

    def _send_cancel(self, number: int) -> None:
        self._stream.send((number,))

    async def _read(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                message = await self._stream.receive()
                self._heard()
                if message:
                    self._deliver(*message)

    async def _end(self) -> str:
        try:
            if not self._fault:
                await self._ended(1.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                if self._process.returncode is None:
                    self._process.kill()
        code = await self._process.wait()
        self._stream.close()
        return f"rollout process {self.pid} {self._fault or f'ended with exit code {code}'}"

    async def stop(self, timeout_s: float) -> None:
        """See PlayerHandle."""
        self._stream.end()
        await self._ended(timeout_s)
        await self.reap()

    async def _ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout_s)
        return self._process.returncode is not None
