"""Episodes in processes of their own: answers, deaths, stops. Real processes and sockets."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import gone, is_running
from rollout_fakes import byte_renderer, byte_tokenizer

from sao.clock import RealClock, VirtualClock
from sao.engines.protocol import EngineHealth, Sampling
from sao.envs.protocol import Step
from sao.envs.toy import GuessConfig, GuessEnvironment, GuessTasks
from sao.rollout import serve
from sao.rollout.pool import ProcessWorkersConfig, WorkerStartError
from sao.rollout.process import ProcessWorkers
from sao.rollout.serve import WorkerParts
from sao.rollout.worker import LocalWorker, RolloutConfig
from sao.types import FailureKind, GenerationStop, Message, Rollout, Snapshot, StopReason, Task, TokenChunk

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
    """Leaves a file behind when it begins, and one when it is closed; marks the number of guesses."""

    def __init__(self, folder: str) -> None:
        super().__init__(GuessConfig(highest=5))
        self._folder = folder

    async def reset(self, task: Task) -> tuple[Message, ...]:
        (Path(self._folder) / f"opened-{os.getpid()}-{id(self)}").touch()
        self._guesses = 0
        return await super().reset(task)

    async def step(self, action: Message) -> Step:
        self._guesses += 1
        return replace(await super().step(action), marks={"guesses": self._guesses})

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


def workers(
    seconds: float,
    folder: Path,
    make: object = make_parts,
    *,
    processes: int = 1,
    told: list[str] | None = None,
    clock: RealClock | None = None,
    **settings: object,
) -> ProcessWorkers:
    return ProcessWorkers(
        make,  # type: ignore[arg-type]
        (seconds, str(folder)),
        clock or RealClock(),
        RolloutConfig(),
        ProcessWorkersConfig(**settings),  # type: ignore[arg-type]
        processes=processes,
        on_restart=(told if told is not None else []).append,
    )


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
    return len(list(folder.glob("closed-*")))


def test_many_episodes_in_two_processes_equal_those_played_here(tmp_path: Path) -> None:
    """Bug: answers get mixed up between episodes, one process gets all, or arrays and marks change on the way."""

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
            assert rollout.marks == expected.marks == {"guesses": rollout.num_turns}
            assert 0 <= rollout.timings.started <= rollout.timings.finished <= far._clock.now()
        homes = [int(rollout.sequences[0].policy_versions.max()) for rollout in rollouts]
        assert sorted((homes.count(pid) for pid in pids), reverse=True) == [10, 10]
        await far.stop()
        await far.stop()
        assert all(gone(pid) for pid in pids)
        after = await play(far, 0)
        assert (after.failure, "stopped" in after.failure_text) == (FailureKind.INFRASTRUCTURE, True)

    asyncio.run(main())


class MovedClock(RealClock):
    """Real, but moved on by hand."""

    ahead: float = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def playing(folder: Path) -> int:
    """Episodes that have begun."""
    return len(list(folder.glob("opened-*")))


def test_a_process_that_dies_fails_its_episodes_and_is_replaced(tmp_path: Path) -> None:
    """Bug: episodes of a dead process are waited for forever, or are trained as the policy's failure."""

    async def main() -> None:
        told: list[str] = []
        far = workers(600.0, tmp_path, told=told, max_restarts_per_hour=1)
        await far.start()
        (first,) = far.pids
        running = [asyncio.create_task(play(far, index)) for index in range(3)]
        await until(lambda: playing(tmp_path) == 3)
        os.kill(first, signal.SIGKILL)
        for rollout in await asyncio.gather(*running):
            assert (rollout.failure, rollout.stop_reason) == (FailureKind.INFRASTRUCTURE, StopReason.ERROR)
            assert f"process {first} ended with exit code -9" in rollout.failure_text
        await until(lambda: bool(far.pids))
        assert (far.restarts, told) == (1, [f"rollout process {first} ended with exit code -9; it is replaced"])
        os.kill(far.pids[0], signal.SIGKILL)
        await until(lambda: not far.pids)
        lost = await play(far, 0)
        assert "no rollout process is left" in lost.failure_text
        await far.stop()

    asyncio.run(main())


def test_restarts_are_counted_by_the_hour(tmp_path: Path) -> None:
    """Bug: a run of weeks ends at its third lost process."""

    async def main() -> None:
        clock = MovedClock()
        far = workers(0.0, tmp_path, clock=clock, max_restarts_per_hour=1)
        await far.start()
        for lost in (1, 2, 3):
            clock.ahead += 3601.0
            before = far.pids
            os.kill(before[0], signal.SIGKILL)
            await until(lambda before=before: bool(far.pids) and far.pids != before)
            assert far.restarts == lost
        await far.stop()

    asyncio.run(main())


def make_stopped(seconds: float, folder: str) -> WorkerParts:
    """The loop of the process is blocked as soon as an episode begins, as by an environment's own code."""

    class Blocking(MarkingEnvironment):
        async def reset(self, task: Task) -> tuple[Message, ...]:
            if not os.listdir(folder):
                (Path(folder) / "blocked").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            return await super().reset(task)

    parts = make_parts(seconds, folder)
    return WorkerParts(make_environment=lambda: Blocking(folder), engine=parts.engine, renderer=parts.renderer)


def test_a_process_that_gives_no_sign_of_life_is_replaced(tmp_path: Path) -> None:
    """Bug: code that blocks the loop of a process holds the places of all its episodes for ever."""

    async def main() -> None:
        told: list[str] = []
        far = workers(0.0, tmp_path, make_stopped, told=told, silent_timeout_s=5.0)
        await far.start()
        (first,) = far.pids
        lost = await play(far, 0)
        assert lost.failure is FailureKind.INFRASTRUCTURE
        assert f"process {first} gave no sign of life for 5 s" in lost.failure_text
        assert (await play(far, 0)).reward == 1.0
        assert told
        assert gone(first)
        await far.stop()

    asyncio.run(main())


class Unreadable(Rollout):
    """Can be pickled, but not read."""

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("no number",))


class Unsendable(Rollout):
    """Cannot be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("not to be sent")


def make_strange(kind: str, folder: str) -> WorkerParts:
    """The first rollout of the first process is of a strange kind."""

    class Strange(LocalWorker):
        async def run(self, *arguments: Any, **settings: Any) -> Rollout:
            rollout = await super().run(*arguments, **settings)
            if (Path(folder) / "done").exists():
                return rollout
            (Path(folder) / "done").touch()
            fields = {name: getattr(rollout, name) for name in Rollout.__dataclass_fields__}
            return (Unreadable if kind == "unreadable" else Unsendable)(**fields)

    serve.LocalWorker = Strange  # type: ignore[misc]  (in the process, which is the test's own)
    return make_parts(0.0, folder)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("unreadable", "sent what is no rollout: ValueError"), ("unsendable", "could not be sent: TypeError: not to be")],
)
def test_an_answer_that_is_no_rollout_fails_its_episode_only(kind: str, reason: str, tmp_path: Path) -> None:
    """Bug: an error of pickle ends what reads the answers, and every episode of the process hangs."""

    async def main() -> None:
        far = ProcessWorkers(make_strange, (kind, str(tmp_path)), RealClock(), RolloutConfig(), ProcessWorkersConfig())
        await far.start()
        lost = await play(far, 0)
        assert (lost.failure, reason in lost.failure_text) == (FailureKind.INFRASTRUCTURE, True), lost.failure_text
        assert (await play(far, 1)).reward == 1.0
        assert far.restarts == (1 if kind == "unreadable" else 0)
        await far.stop()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_cancelled_and_stopped_episodes_close_their_environments(tmp_path: Path) -> None:
    """Bug: an episode that nobody waits for goes on, or its tools outlive the run."""

    async def main() -> None:
        far = workers(600.0, tmp_path, stop_timeout_s=60.0)
        await far.start()
        running = [asyncio.create_task(play(far, index)) for index in range(2)]
        await until(lambda: playing(tmp_path) == 2)
        running[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await running[0]
        await until(lambda: closed(tmp_path) == 1)
        await far.stop()
        assert (await running[1]).failure is FailureKind.INFRASTRUCTURE
        assert closed(tmp_path) == 2

    asyncio.run(main())


def test_the_parents_loop_stays_free(tmp_path: Path) -> None:
    """Bug: the orchestrator's loop waits for a process to start or to answer, and nothing else goes on."""

    async def main() -> None:
        far = workers(600.0, tmp_path)
        starting = asyncio.create_task(far.start())
        await asyncio.sleep(0)
        assert not starting.done()
        await starting
        running = asyncio.create_task(play(far, 0))
        await until(lambda: playing(tmp_path) == 1)
        assert not running.done()
        await far.stop()

    asyncio.run(main())


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Bug: a bad tokenizer path shows as a dead process, or as a hang."""

    async def main(make: object, arguments: tuple[object, ...], **settings: object) -> None:
        config = ProcessWorkersConfig(**settings)  # type: ignore[arg-type]
        far = ProcessWorkers(make, arguments, RealClock(), RolloutConfig(), config, processes=2)  # type: ignore[arg-type]
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
    with pytest.raises(ValueError, match=r"workers.silent_timeout_s is 0"):
        ProcessWorkersConfig(silent_timeout_s=0)


def test_processes_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Bug: kill -9 of the run leaves rollout processes, and their sandboxes, behind."""
    program = f"""
import asyncio, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
import test_process as t
from pathlib import Path
async def main():
    far = t.workers(600.0, Path({str(tmp_path)!r}))
    await far.start()
    playing = asyncio.create_task(t.play(far, 0))
    await t.until(lambda: t.playing(Path({str(tmp_path)!r})))
    print(far.pids[0], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    for ask in (signal.SIGINT, signal.SIGTERM):
        os.kill(child, ask)
    assert is_running(child)
    parent.kill()
    parent.wait()
    assert gone(child)
    assert closed(tmp_path) == 1
