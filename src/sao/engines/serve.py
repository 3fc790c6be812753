"""The engine's half of an engine in a process of its own; started by `ProcessEngine` as `python -m sao.engines.serve`.

It dies with its parent: standard input is a pipe that the parent holds open, and its end means the end. Interrupts and
requests to end are the parent's to handle, so they are ignored here.
"""

import asyncio
import json
import os
import select
import shutil
import signal
import sys
import threading
from pathlib import Path

import torch

from sao.clock import RealClock
from sao.engines.client import ERROR, READY, SETTINGS, SOCKET, JsonLines
from sao.engines.gate import EngineServer, listen
from sao.engines.local import LocalEngine
from sao.engines.protocol import EngineError
from sao.engines.settings import EngineConfig
from sao.store.records import snapshot_from


async def _serve(folder: Path) -> None:
    settings = json.loads((folder / SETTINGS).read_text())
    config = EngineConfig(**settings["config"])
    torch.set_num_threads(config.threads)
    engine = LocalEngine.from_snapshot(snapshot_from(settings["snapshot"]), RealClock(), config)
    host, secret, address = settings["host"], settings["secret"], str(folder / SOCKET)

    def accept() -> JsonLines:
        return EngineServer(engine, own_process=True, secret=secret).lines

    if host:
        server, address = await listen(accept, host)
    else:
        server = await asyncio.get_running_loop().create_unix_server(accept, address)
    async with server:
        draft = folder / f"{READY}.partial"
        draft.write_text(address)
        draft.rename(folder / READY)
        await server.serve_forever()


def _end_with_parent(folder: Path, parent: int) -> None:
    """Block until the parent closes its pipe or is gone, then leave at once, whatever the main thread does."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], 1.0)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> None:
    """Serve until the parent ends. Takes the private folder and the parent's process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with_parent, args=(folder, parent), daemon=True).start()
    try:
        asyncio.run(_serve(folder))
    except (EngineError, ValueError, OSError) as error:
        (folder / ERROR).write_text(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
