"""The local engine in a process of its own, so that generation and training overlap."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from sao.engines.client import ERROR, READY, SETTINGS, SOCKET, EngineClient, ServedEngine, new_secret
from sao.engines.protocol import EngineError
from sao.engines.settings import KILL_SECONDS, EngineConfig
from sao.types import Snapshot

_STOP_SECONDS = 2.0
"""What an engine process gets to leave by itself before it is killed."""


class ProcessEngine(ServedEngine):
    """Engine in a child process; `address` lets clients in other processes use it too. Real clock only.

    The child ends when this process ends, however it ends. If the child dies, every stream and call raises EngineError.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, secret: str = "") -> None:
        self._process = process
        self._folder = folder
        self._stopped = False
        self.address = str(folder / SOCKET)
        self.secret = secret
        super().__init__(EngineClient(self.address))

    @classmethod
    async def start(cls, snapshot: Snapshot, config: EngineConfig | None = None, host: str = "") -> "ProcessEngine":
        """Start a child that holds the snapshot, and wait for it. Raises EngineError when it fails or is too slow.

        With `host` it listens at a free TCP port there, for clients on other machines that know its secret.
        """
        config = config or EngineConfig()
        secret = new_secret() if host else ""
        engine = cls(*_launch(snapshot, config, host, secret), secret)
        try:
            await engine._wait_until_ready(config.start_timeout_s)
        except BaseException:
            await engine.stop()
            raise
        engine.address = (engine._folder / READY).read_text()
        engine._client = EngineClient(
            engine.address, secret=secret, reply_timeout_s=config.load_timeout_s, describe_exit=engine.describe_exit
        )
        return engine

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._process.pid

    async def stop(self) -> None:
        """See Engine."""
        if self._stopped:
            return
        self._stopped = True
        await self._client.stop()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        finally:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, KILL_SECONDS)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not (self._folder / READY).exists():
            if self._process.poll() is not None:
                raise EngineError(f"the engine process did not start {self.describe_exit()}")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine process was not ready within engine.start_timeout_s = {timeout_s:g} s"
                    f" {self.describe_exit()}"
                )
            await asyncio.sleep(0.02)

    def ended(self) -> bool:
        """Whether the child is gone."""
        return self._process.poll() is not None

    def describe_exit(self) -> str:
        """What is known of the child's end: its exit code and its last words."""
        with suppress(subprocess.TimeoutExpired):
            # The socket breaks an instant before the process is gone.
            self._process.wait(0.2)
        words = ""
        for name in (ERROR, "stderr"):
            file = self._folder / name
            if not words and file.is_file():
                words = file.read_text(errors="replace").strip()[-2000:]
        code = self._process.poll()
        state = "still runs" if code is None else f"ended with {code}"
        return f"(process {self._process.pid} {state}{': ' + words if words else ''})"


def _launch(snapshot: Snapshot, config: EngineConfig, host: str, secret: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the child; returns it and the private folder that holds its settings and its socket."""
    folder = Path(tempfile.mkdtemp(prefix="sao-engine-"))
    if len(str(folder / SOCKET).encode()) > 100:
        shutil.rmtree(folder)
        raise EngineError(f"{folder} is too long a path for a Unix socket; set TMPDIR to a shorter one")
    settings = {"snapshot": asdict(snapshot), "config": asdict(config), "host": host, "secret": secret}
    (folder / SETTINGS).write_text(json.dumps(settings))
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            # -P keeps a folder of the working directory from posing as the package.
            [sys.executable, "-P", "-m", "sao.engines.serve", str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": str(config.threads)},
            # Out of the terminal's group: Ctrl-C reaches the parent alone, which then unwinds in its own order.
            start_new_session=True,
        )
    return process, folder
