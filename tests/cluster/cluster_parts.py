"""Parts of rollout workers for tests; imported in their actors."""

import asyncio
import os
import time
from pathlib import Path

from rollout_fakes import byte_renderer

from sao.clock import RealClock
from sao.engines.scripted import ScriptedEngine
from sao.envs.toy import GuessConfig, GuessEnvironment
from sao.rollout.serve import WorkerParts
from sao.types import Message, Task


class Playground(GuessEnvironment):
    """Does what a task's question asks for: hangs politely, blocks its process, or is an ordinary game."""

    def __init__(self, folder: str) -> None:
        super().__init__(GuessConfig(highest=5))
        self._folder = Path(folder)

    async def reset(self, task: Task) -> tuple[Message, ...]:
        (self._folder / f"opened-{os.getpid()}").touch()
        if "wait" in task.id:
            await asyncio.sleep(3600)
        if "block" in task.id:
            time.sleep(3600)  # noqa: ASYNC251  as somebody's code may do
        return await super().reset(task)

    async def close(self) -> None:
        (self._folder / f"closed-{os.getpid()}").touch()


def make_parts(folder: str) -> WorkerParts:
    renderer = byte_renderer()
    engine = ScriptedEngine(lambda tokens, session: [49, renderer.stop_token_ids[0]], RealClock())
    return WorkerParts(make_environment=lambda: Playground(folder), engine=engine, renderer=renderer)


def refuse(reason: str) -> WorkerParts:
    raise ValueError(f"no tokenizer: {reason}")
