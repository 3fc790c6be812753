"""A run's parts in actors of a Ray that is started here: the same numbers, and nothing lost when one of them dies."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import cluster_parts
import pytest
from processes import gone
from ray_processes import of_kind
from real_runs import AtStep, wait_for
from small_runs import small_config
from test_ranks import CONFIG, _play
from test_runs import check_history
from training_toys import make_actor, make_batch

from sao.build import cluster_rooms, make_core, make_engine, make_trainer
from sao.clock import RealClock
from sao.cluster.connect import ClusterError, check_nodes, cluster
from sao.cluster.settings import ClusterConfig, Room
from sao.cluster.trainer import RayTrainer
from sao.cluster.workers import RayWorkers
from sao.config import to_toml
from sao.engines.protocol import EngineError
from sao.envs.toy import GuessConfig, GuessTasks
from sao.models.load import save_model
from sao.rollout.pool import ProcessWorkersConfig, WorkerStartError
from sao.rollout.worker import RolloutConfig
from sao.stages import run_stages
from sao.store.files import read_json_lines
from sao.store.run_folder import RunFolder
from sao.training.inline import InlineTrainer
from sao.training.protocol import TrainerLostError
from sao.training.weights import SnapshotStore
from sao.types import FailureKind, Rollout, Task

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("ray")]

HERE = ClusterConfig(
    address="local", engine_cpus=0.1, trainer_cpus=0.1, worker_cpus=0.1, trainer_on="trainer", place_timeout_s=300
)
GAMES = GuessTasks(GuessConfig(highest=5), seed=1)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with cluster(HERE, (HERE.trainer,)):
        yield


def kill(kind: str) -> None:
    os.kill(of_kind(kind, os.getpid())[0], signal.SIGKILL)


def test_a_whole_run_whose_engine_worker_and_rank_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a part that is not replaced or outlives the run, a rollout that is lost or trained twice, and actors that
    look for a relative run folder where Ray was started."""
    monkeypatch.chdir(tmp_path)
    path = Path("run")
    config = small_config(
        "clock=real", "loop.steps=16", "evaluation.every_steps=1000000", "engine.replicas=2", "trainer.ranks=2",
        "trainer.step_timeout_s=300",
    )  # fmt: skip
    config = replace(config, cluster=HERE)
    # The rank first: its loss takes the run back to the last commit, and with it the rows that count earlier losses.
    actions = {2: partial(kill, "rank"), 6: partial(kill, "engine"), 8: partial(kill, "worker")}
    with RunFolder.create(path) as folder:
        folder.write_config(to_toml(config))
        outcome = run_stages(config, folder, AtStep(actions))
    assert outcome is not None
    assert (outcome.steps, outcome.reason) == (16, "steps done")
    check_history(path, steps=16)
    events = (path / "events.log").read_text()
    assert "the trainer was lost; starting again from the last commit" in events
    assert "rollout worker: process" in events
    rows = [row for row in read_json_lines(path / "metrics.jsonl").rows if row["stage"] == "train"]
    assert max(row["engine/taken_out"] for row in rows) >= 1
    assert max(row["loop/worker_restarts"] for row in rows) == 1
    assert rows[-1]["loop/trainer_restarts"] == 1
    left = ("engine", "engine actor", "worker", "rank")
    wait_for(lambda: not any(of_kind(kind, os.getpid()) for kind in left), "the actors to end", 60)


def test_the_numbers_of_two_ranks_are_those_of_the_inline_trainer_and_a_dead_one_is_named(tmp_path: Path) -> None:
    """Catches ranks that do not meet, a batch that changes on its way, and a wait for a rank that is gone."""
    model = tmp_path / "model"
    save_model(make_actor("qwen3_moe"), model)
    trainer = make_trainer(replace(CONFIG, cluster=HERE), RealClock(), model, tmp_path / "snapshots")
    assert isinstance(trainer, RayTrainer)
    alone = replace(CONFIG, trainer=replace(CONFIG.trainer, ranks=1))
    inline = InlineTrainer(*make_core(alone, model, tmp_path / "s"), RealClock())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()

    async def main() -> None:
        expected = await _play(inline, tmp_path / "one")
        found = await _play(trainer, tmp_path / "two")
        for mine, theirs in zip(found[0], expected[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5, nan_ok=True)
        assert found[1] == pytest.approx(expected[1], abs=1e-5)
        with pytest.raises(ValueError, match=r"trainer\.json cannot be read"):
            await trainer.load(str(tmp_path))
        work = asyncio.create_task(trainer.fit_values(make_batch(count=400).rollouts))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        os.kill(trainer.places[1].pid, signal.SIGKILL)
        where = rf"rank 1 of 2 \(process {trainer.places[1].pid} on node [0-9.]+\) is gone"
        with pytest.raises(TrainerLostError, match=where):
            await work
        assert time.monotonic() - began < 20
        with pytest.raises(TrainerLostError, match=where):
            await trainer.update_critic()
        assert gone(trainer.places[0].pid, 20), "rank 0 would wait for rank 1"
        await trainer.stop()

    asyncio.run(main())


def players(folder: Path, **settings: float) -> RayWorkers:
    return RayWorkers(
        HERE, cluster_parts.make_parts, (str(folder),), RealClock(), RolloutConfig(max_turns=3),
        ProcessWorkersConfig(start_timeout_s=300, **settings),
    )  # fmt: skip


def played(workers: RayWorkers, task: Task) -> "asyncio.Task[Rollout]":
    return asyncio.ensure_future(workers.run(task, group_id=task.id, attempt=0, seed=1))


def task(name: str) -> Task:
    return replace(GAMES.at(0), id=name)


def test_an_environment_that_blocks_is_found_out_and_its_actor_replaced(tmp_path: Path) -> None:
    """Catches a ping that is answered while the episodes stand still."""

    async def main() -> None:
        workers = players(tmp_path, silent_timeout_s=5)
        await workers.start()
        try:
            assert (await played(workers, task("game"))).failure is not FailureKind.INFRASTRUCTURE
            rollout = await played(workers, task("block"))
            assert rollout.failure is FailureKind.INFRASTRUCTURE
            assert "gave no sign of life for 5 s" in rollout.failure_text
            assert (await played(workers, task("game"))).failure is not FailureKind.INFRASTRUCTURE
            assert workers.restarts == 1
        finally:
            await workers.stop()

    asyncio.run(main())


def test_cancellation_reaches_the_episode(tmp_path: Path) -> None:
    """Catches an environment that goes on for a rollout which nobody waits for."""

    def left(mark: str) -> bool:
        return any(tmp_path.glob(f"{mark}-*"))

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def main() -> None:
        workers = players(tmp_path)
        await workers.start()
        try:
            playing = played(workers, task("wait"))
            await until(lambda: left("opened"))
            assert not left("closed")
            playing.cancel()
            await until(lambda: left("closed"))
        finally:
            await workers.stop()

    asyncio.run(main())


def test_parts_that_cannot_be_built_are_an_error_that_says_why(tmp_path: Path) -> None:
    """Catches a start that waits out its limit."""
    workers = RayWorkers(
        HERE, cluster_parts.refuse, ("gone",), RealClock(), RolloutConfig(), ProcessWorkersConfig(start_timeout_s=300)
    )
    with pytest.raises(WorkerStartError, match="no tokenizer: gone"):
        asyncio.run(workers.start())


def test_no_room_says_what_was_asked_and_what_there_is(tmp_path: Path) -> None:
    """Catches an actor that waits for ever for a node that nobody will start."""
    there = replace(HERE, engine_gpus=8.0, engine_on="trainer", place_timeout_s=2.0)
    config = replace(small_config("clock=real"), cluster=there)
    snapshot = SnapshotStore(tmp_path).write(make_actor(), version=0, parent=None)
    asked = r"within cluster\.place_timeout_s = 2 s for an engine replica: 0\.1 CPUs, 8 GPUs, a node with 'trainer'"
    with pytest.raises(EngineError, match=asked + r"\. Nodes: .* CPUs, trainer free"):
        asyncio.run(make_engine(config, RealClock(), snapshot))


def test_nodes_are_looked_at(tmp_path: Path) -> None:
    """Catches a check that leaves files, or lets a run start whose parts cannot all be placed."""
    config = replace(small_config("clock=real"), cluster=HERE)
    (line,) = check_nodes(HERE, tmp_path, cluster_rooms(config), None)
    assert "trainer, sees the run folder" in line
    assert not list(tmp_path.iterdir())
    with pytest.raises(ClusterError, match=r"no node has the resource 'moon'"):
        check_nodes(HERE, tmp_path, (Room(what="a rank", cpus=1, gpus=0, label="moon"),), None)
    with pytest.raises(
        ClusterError, match=r"needs 8 GPUs on nodes with 'trainer', which have 0: 2 x a rank: 0 CPUs, 4"
    ):
        check_nodes(HERE, tmp_path, (Room(what="a rank", cpus=0, gpus=4, label="trainer"),) * 2, None)
