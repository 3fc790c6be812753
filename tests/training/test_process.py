"""The trainer in its own process: the same numbers, and a death that is seen at once."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from training_toys import make_batch, make_core, make_parts

from sao.clock import RealClock, run_virtual
from sao.observe.metrics import Metric
from sao.training.core import TrainerCore
from sao.training.inline import InlineTrainer
from sao.training.parallel import OneRank
from sao.training.process import ProcessTrainer
from sao.training.protocol import TrainerError
from sao.training.requests import unless_silent
from sao.training.weights import SnapshotStore


def make_nothing(folder: str, ranks: OneRank) -> tuple[TrainerCore, SnapshotStore]:
    raise ValueError(f"there is no model folder {folder!r}")


class Shared:
    """One child for several tests, since starting one takes seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress: list[tuple[int, int]] = []
        self.trainer = ProcessTrainer(partial(make_parts, str(folder)), threads=1, timeout_s=60, progress=self._note)

    def _note(self, done: int, total: int, metrics: dict[str, Metric]) -> None:
        assert "value_pretraining/loss" in metrics
        self.progress.append((done, total))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("process"))
    yield made
    asyncio.run(made.trainer.stop())
    assert all(child.process.exitcode is not None for child in made.trainer._children)


def test_the_numbers_are_those_of_the_inline_trainer(shared: Shared, tmp_path: Path):
    """Settings, seeds or threads that differ in the child; a state that a request leaves behind."""
    inline = InlineTrainer(make_core(), SnapshotStore(tmp_path / "s"), RealClock())
    (tmp_path / "c").mkdir()

    async def play(trainer: InlineTrainer | ProcessTrainer) -> tuple:
        fitted = await trainer.fit_values(make_batch(count=8).rollouts)
        snapshots, metrics = [await trainer.publish_initial(0, None)], []
        for step in (1, 2):
            used_before = _core_seconds(shared.trainer.pids[0])
            update = await trainer.update_actor(make_batch(step=step, seed=step), version=step, parent=step - 1)
            snapshots.append(update.snapshot)
            report = await trainer.update_critic()
            metrics.append({k: m.value for k, m in report.metrics.items() if k.split("/")[0] in ("actor", "critic")})
        seconds = {key for key in report.metrics if key.startswith(("time/", "memory/", "cpu/"))}
        snapshots = [(s.checksum, s.probe_logprobs) for s in snapshots if s is not None]
        return fitted, metrics, snapshots, seconds, report.metrics["cpu/trainer"].value - used_before

    *here, here_seconds, _ = asyncio.run(play(inline))
    *there, seconds, since_start = asyncio.run(play(shared.trainer))
    assert repr(there) == repr(here)  # by repr, since an undefined explained variance is NaN
    assert {"time/values", "time/actor", "time/publish", "time/critic", "cpu/trainer", "memory/trainer_mb"} <= seconds
    assert here_seconds == seconds
    # Counted since the process started: never less than what the system has counted before the step.
    assert since_start > -2 / os.sysconf("SC_CLK_TCK")
    assert shared.progress[-1][0] == shared.progress[-1][1] == len(shared.progress)
    asyncio.run(shared.trainer.save(str(tmp_path / "c")))
    asyncio.run(shared.trainer.load(str(tmp_path / "c")))


def test_bad_input_stays_a_value_error_and_the_child_goes_on(shared: Shared, tmp_path: Path):
    """A corrupt checkpoint that looks like a crash of the trainer, or becomes one."""

    async def main() -> None:
        with pytest.raises(ValueError, match=r"trainer\.json cannot be read"):
            await shared.trainer.load(str(tmp_path))
        with pytest.raises(TrainerError, match=r"AssertionError.*begin\(\) comes first"):
            await shared.trainer.update_critic()
        assert (await shared.trainer.publish_initial(90, None)).version == 90

    asyncio.run(main())


def test_a_cancelled_wait_does_not_spoil_the_next_request(shared: Shared):
    """A reply to a cancelled request that is taken for the reply to the next one."""

    async def main() -> None:
        cancelled = asyncio.create_task(shared.trainer.update_actor(make_batch(count=20), version=91, parent=90))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        assert (await shared.trainer.publish_initial(92, None)).version == 92

    asyncio.run(main())


def test_the_loop_goes_on_while_the_child_works(shared: Shared):
    """An orchestrator that stands still while the trainer trains."""

    async def main() -> float:
        work = asyncio.create_task(shared.trainer.fit_values(make_batch(count=60).rollouts))
        longest = 0.0
        while not work.done():
            start = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - start)
        await work
        return longest

    start = time.perf_counter()
    longest = asyncio.run(main())
    assert longest < 0.5 * (time.perf_counter() - start)


def test_ctrl_c_does_not_end_the_child(shared: Shared):
    """A trainer that dies with its state on Ctrl-C, before the loop has saved."""
    os.kill(shared.trainer.pids[0], signal.SIGINT)
    assert asyncio.run(shared.trainer.publish_initial(93, None)).version == 93


def test_waits_are_limited(shared: Shared, monkeypatch: pytest.MonkeyPatch):
    """A trainer that hangs, and a run that hangs with it without saying on what."""
    # The first wait of all has minutes more, for the child to start.
    asyncio.run(shared.trainer.publish_initial(94, None))
    monkeypatch.setattr(shared.trainer, "_timeout_s", 0.3)

    async def main() -> None:
        with pytest.raises(TrainerError, match=r"waited 0\.3 s for the critic's updates; .*step_timeout_s"):
            await shared.trainer.update_critic()

    os.kill(shared.trainer.pids[0], signal.SIGSTOP)
    try:
        asyncio.run(main())
    finally:
        os.kill(shared.trainer.pids[0], signal.SIGCONT)


def test_a_dead_child_fails_the_wait_at_once(shared: Shared):
    """A loop that waits an hour for a trainer that the kernel has killed. The last test of the shared child."""

    async def main() -> None:
        work = asyncio.create_task(shared.trainer.fit_values(make_batch(count=400).rollouts))
        await asyncio.sleep(0.2)
        os.kill(shared.trainer.pids[0], signal.SIGKILL)
        async with asyncio.timeout(5):
            with pytest.raises(TrainerError, match="killed by SIGKILL; the machine may be out of memory"):
                await work
            with pytest.raises(TrainerError, match="killed by SIGKILL"):
                await shared.trainer.update_critic()

    asyncio.run(main())


def test_a_model_that_cannot_be_built_is_named(tmp_path: Path):
    """A missing model folder that is reported as a dead process."""
    trainer = ProcessTrainer(partial(make_nothing, str(tmp_path / "absent")), threads=1, timeout_s=60)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"no model folder .*absent"):
                await trainer.publish_initial(0, None)
        await trainer.stop()
        await trainer.stop()
        with pytest.raises(ValueError, match="no model folder"):
            await trainer.update_critic()

    asyncio.run(main())


def test_long_work_lives_as_long_as_it_reports(tmp_path: Path):
    """A healthy value pretraining that dies at the limit of one step; one that hangs and never does."""

    async def work(reports: list[float], ends_at: float) -> str:
        loop, heard = asyncio.get_running_loop(), 0.0

        def note() -> None:
            nonlocal heard
            heard = loop.time()

        reply: asyncio.Future[str] = loop.create_future()
        for moment in reports:
            loop.call_at(moment, note)
        loop.call_at(ends_at, lambda: reply.done() or reply.set_result("done"))
        try:
            return await unless_silent(reply, 1.0, "the fit", heard=lambda: heard)
        except TrainerError as error:
            return f"{error} at {loop.time()}"

    assert run_virtual(work([0.9, 1.8, 2.7], 3.6)) == "done"
    assert run_virtual(work([], 0.9)) == "done"
    silent = "waited 1 s for the fit; if it is only slow, raise trainer.step_timeout_s at "
    assert run_virtual(work([], 3.6)) == silent + "1.0"
    assert run_virtual(work([0.5], 3.6)) == silent + "1.5"


PARENT = """
import asyncio, sys, time
from functools import partial
from training_toys import make_parts
from sao.training.process import ProcessTrainer

if __name__ == "__main__":
    trainer = ProcessTrainer(partial(make_parts, sys.argv[1]), threads=1, timeout_s=60)
    asyncio.run(trainer.publish_initial(0, None))
    print(trainer.pids[0], flush=True)
    time.sleep(600)
"""


def test_the_child_ends_with_its_parent(tmp_path: Path):
    """Trainers that pile up, with their memory, after each crash of a run."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "s")], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        try:
            child = int(parent.stdout.readline())
        finally:
            parent.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _state(child) != "Z":
        time.sleep(0.05)
    assert _state(child) == "Z"


def _core_seconds(pid: int) -> float:
    """What the system has counted for a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _state(pid: int) -> str:
    """Z for a process that is gone, or only waits to be collected."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "Z"
