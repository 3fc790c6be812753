"""Episodes in processes of their own: answers, deaths, stops. Real processes and sockets."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from rollout_fakes import byte_renderer, byte_tokenizer

from sao.clock import RealClock, VirtualClock
from sao.engines.protocol import EngineHealth, Sampling
from sao.envs.toy import GuessConfig, GuessEnvironment, GuessTasks
from sao.rollout.process import ProcessWorkers, ProcessWorkersConfig, WorkerParts, WorkerStartError
from sao.rollout.worker import LocalWorker, RolloutConfig
from sao.types import FailureKind, GenerationStop, Rollout, Snapshot, StopReason, Task, TokenChunk

GAMES = GuessTasks(GuessConfig(highest=5), seed=1)


class CountingEngine:
    """Guesses 1, 2, 3 ...; version is the id of the process it lives in. Sleeps `seconds` before each guess."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ids = [byte_tokenizer().token_to_id(str(digit)) for digit in range(10)]

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        await asyncio.sleep(self._seconds)
        guess = 1 + sampling.first_token_index // 2
        yield TokenChunk(
            token_ids=(self._ids[guess], sampling.stop_token_ids[0]),
            logprobs=(-1.0, -0.5),
            version=os.getpid(),
            stop=GenerationStop.STOP_TOKEN,
        )

    async def cancel(self, session: str) -> None:
        pass

    async def close(self, session: str) -> None:
        pass

    async def load(self, snapshot: Snapshot) -> None:
        raise NotImplementedError

    async def health(self) -> EngineHealth:
        raise NotImplementedError

    async def stop(self) -> None:
        pass


class MarkingEnvironment(GuessEnvironment):
    """Leaves a file behind when it is closed."""

    def __init__(self, folder: str) -> None:
        super().__init__(GuessConfig(highest=5))
        self._folder = folder

    async def close(self) -> None:
        (Path(self._folder) / f"closed-{os.getpid()}-{id(self)}").touch()


def make_parts(seconds: float, folder: str) -> WorkerParts:
    return WorkerParts(
        make_environment=lambda: MarkingEnvironment(folder), engine=CountingEngine(seconds), renderer=byte_renderer()
    )


async def make_parts_later(seconds: float, folder: str) -> WorkerParts:
    await asyncio.sleep(0)
    return make_parts(seconds, folder)


def refuse(reason: str) -> WorkerParts:
    raise ValueError(f"no tokenizer: {reason}")


def vanish() -> WorkerParts:
    os._exit(3)


def workers(seconds: float, folder: Path, make: object = make_parts, **settings: object) -> ProcessWorkers:
    config = ProcessWorkersConfig(**settings)  # type: ignore[arg-type]
    return ProcessWorkers(make, (seconds, str(folder)), RealClock(), RolloutConfig(), config)  # type: ignore[arg-type]


def game(index: int) -> Task:
    task = GAMES.at(index)
    assert task is not None
    return task


async def play(worker: ProcessWorkers | LocalWorker, index: int) -> Rollout:
    return await worker.run(game(index), group_id=game(index).id, attempt=0, seed=index)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def closed(folder: Path) -> int:
    """Environments that were closed."""
    return len(list(folder.iterdir()))


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process ends in time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_many_episodes_in_two_processes_equal_those_played_here(tmp_path: Path) -> None:
    """Bug: answers get mixed up between episodes, one process gets all, or arrays change on the way."""

    async def main() -> None:
        far = workers(0.01, tmp_path, make_parts_later, processes=2)
        await far.start()
        pids = far.pids
        rollouts = await asyncio.gather(*(play(far, index) for index in range(20)))
        here = LocalWorker(
            lambda: MarkingEnvironment(str(tmp_path)),
            CountingEngine(0.0),
            byte_renderer(),
            RealClock(),
            RolloutConfig(),
        )
        for index, rollout in enumerate(rollouts):
            expected = await play(here, index)
            assert (rollout.id, rollout.reward, rollout.stop_reason) == (expected.id, 1.0, StopReason.FINISHED)
            assert np.array_equal(rollout.sequences[0].token_ids, expected.sequences[0].token_ids)
            assert 0 <= rollout.timings.started <= rollout.timings.finished <= 60
        homes = [int(rollout.sequences[0].policy_versions.max()) for rollout in rollouts]
        assert sorted((homes.count(pid) for pid in pids), reverse=True) == [10, 10]
        await far.stop()
        await far.stop()
        assert all(gone(pid) for pid in pids)
        after = await play(far, 0)
        assert (after.failure, "stopped" in after.failure_text) == (FailureKind.INFRASTRUCTURE, True)

    asyncio.run(main())


def test_a_process_that_dies_fails_its_episodes_and_is_replaced(tmp_path: Path) -> None:
    """Bug: episodes of a dead process are waited for forever, or are trained as the policy's failure."""

    async def main() -> None:
        far = workers(0.3, tmp_path, processes=1, max_restarts=1)
        await far.start()
        (first,) = far.pids
        running = [asyncio.create_task(play(far, index)) for index in range(3)]
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        for rollout in await asyncio.gather(*running):
            assert (rollout.failure, rollout.stop_reason) == (FailureKind.INFRASTRUCTURE, StopReason.ERROR)
            assert f"process {first} ended with exit code -9" in rollout.failure_text
        retried = await play(far, 0)
        assert (retried.reward, far.restarts) == (1.0, 1)
        os.kill(far.pids[0], signal.SIGKILL)
        await until(lambda: not far.pids)
        lost = await play(far, 0)
        assert "no rollout process is left" in lost.failure_text
        await far.stop()

    asyncio.run(main())


def test_cancelled_and_stopped_episodes_close_their_environments(tmp_path: Path) -> None:
    """Bug: an episode that nobody waits for goes on, or its tools outlive the run."""

    async def main() -> None:
        far = workers(60.0, tmp_path, processes=1)
        await far.start()
        running = [asyncio.create_task(play(far, index)) for index in range(2)]
        await asyncio.sleep(0.1)
        running[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await running[0]
        await until(lambda: closed(tmp_path) == 1)
        await far.stop()
        assert (await running[1]).failure is FailureKind.INFRASTRUCTURE
        assert closed(tmp_path) == 2

    asyncio.run(main())


def test_the_parents_loop_stays_free(tmp_path: Path) -> None:
    """Bug: the orchestrator's loop waits for a process to start or to answer."""

    async def main() -> None:
        far = workers(0.05, tmp_path, processes=1)
        turns_of_the_loop = 0

        async def tick() -> None:
            nonlocal turns_of_the_loop
            while True:
                await asyncio.sleep(0.001)
                turns_of_the_loop += 1

        ticking = asyncio.create_task(tick())
        await far.start()
        assert turns_of_the_loop > 5
        before = turns_of_the_loop
        await play(far, 0)
        assert turns_of_the_loop > before + 5
        ticking.cancel()
        await far.stop()

    asyncio.run(main())


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Bug: a bad tokenizer path shows as a dead process, or as a hang."""

    async def main(make: object, arguments: tuple[object, ...], **settings: object) -> None:
        config = ProcessWorkersConfig(processes=2, **settings)  # type: ignore[arg-type]
        far = ProcessWorkers(make, arguments, RealClock(), RolloutConfig(), config)  # type: ignore[arg-type]
        await far.start()

    with pytest.raises(WorkerStartError, match="could not build its parts: ValueError: no tokenizer: t5"):
        asyncio.run(main(refuse, ("t5",)))
    with pytest.raises(WorkerStartError, match="ended with exit code 3"):
        asyncio.run(main(vanish, ()))
    with pytest.raises(WorkerStartError, match=r"waited 0.05 s for rollout process"):
        asyncio.run(main(make_parts, (0.0, str(tmp_path)), start_timeout_s=0.05))


def test_what_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    """Bug: a lambda as a factory fails in a child; virtual time or sharpened sampling slips into a process."""
    config = ProcessWorkersConfig()
    with pytest.raises(ValueError, match="cannot be sent"):
        ProcessWorkers(lambda: refuse(""), (), RealClock(), RolloutConfig(), config)
    with pytest.raises(ValueError, match="no virtual time"):
        ProcessWorkers(refuse, (), VirtualClock(), RolloutConfig(), config)
    with pytest.raises(ValueError, match="set both to 1 for training"):
        ProcessWorkers(refuse, (), RealClock(), RolloutConfig(temperature=0.5), config)
    with pytest.raises(ValueError, match=r"workers.processes is 0"):
        ProcessWorkersConfig(processes=0)


def test_processes_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Bug: kill -9 of the run leaves rollout processes, and their sandboxes, behind."""
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_process as t
from pathlib import Path
async def main():
    far = t.workers(60.0, Path({str(tmp_path)!r}))
    await far.start()
    asyncio.create_task(t.play(far, 0))
    await asyncio.sleep(0.1)
    print(far.pids[0], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, signal.SIGINT)
    time.sleep(0.1)
    assert not gone(child, within_s=0.1)
    parent.kill()
    parent.wait()
    assert gone(child)
    assert closed(tmp_path) == 1
