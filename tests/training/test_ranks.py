"""The trainer in several processes, as a run starts it: the same numbers, and no wait that outlives a rank."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from training_toys import VOCABULARY, make_actor, make_batch
from training_toys import make_core as make_toy

from sao.build import make_core, make_trainer
from sao.clock import RealClock
from sao.config import RunConfig
from sao.models.load import ModelConfig, save_model
from sao.preflight import preflight
from sao.training import requests
from sao.training.core import TrainerCore
from sao.training.inline import InlineTrainer
from sao.training.parallel import OneRank, Place
from sao.training.process import ProcessTrainer
from sao.training.protocol import Trainer, TrainerError
from sao.training.settings import TrainerConfig
from sao.training.weights import SnapshotStore

SETTINGS = TrainerConfig(
    ranks=2, actor_lr=1e-4, critic_lr=1e-4, micro_batch_tokens=50, step_timeout_s=60, critic_warmup_steps=2
)
CONFIG = RunConfig(trainer=SETTINGS, model=ModelConfig(vocab_size=VOCABULARY))


class Shared:
    """Two ranks for several tests, since starting them takes seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        save_model(make_actor("qwen3_moe"), self.model)
        trainer = make_trainer(CONFIG, RealClock(), self.model, folder / "snapshots")
        assert isinstance(trainer, ProcessTrainer)
        self.trainer = trainer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("ranks"))
    yield made
    asyncio.run(made.trainer.stop())
    assert all(child.process.exitcode is not None for child in made.trainer._children)
    assert not Path(made.trainer._meeting).exists()


async def _play(trainer: Trainer, checkpoint: Path) -> tuple[list[dict[str, float]], list[float]]:
    metrics, probe = [], []
    probe += (await trainer.publish_initial(0, None)).probe_logprobs
    for step in (1, 2):
        update = await trainer.update_actor(make_batch(step=step, seed=step), version=step, parent=step - 1)
        assert update.snapshot is not None
        probe += update.snapshot.probe_logprobs
        report = await trainer.update_critic()
        metrics.append({k: m.value for k, m in report.metrics.items() if k.split("/")[0] in ("actor", "critic")})
        await trainer.save(str(checkpoint))
        await trainer.load(str(checkpoint))
    return metrics, probe


def test_the_numbers_are_those_of_the_inline_trainer(shared: Shared, tmp_path: Path):
    """Ranks that start from weights of their own: only rank 0 reads them. A reply of another rank than 0."""
    alone = replace(CONFIG, trainer=replace(SETTINGS, ranks=1))
    inline = InlineTrainer(*make_core(alone, shared.model, tmp_path / "s"), RealClock())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    expected = asyncio.run(_play(inline, tmp_path / "one"))
    found = asyncio.run(_play(shared.trainer, tmp_path / "two"))
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5, nan_ok=True)
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


def test_bad_input_is_a_value_error_and_the_ranks_go_on(shared: Shared, tmp_path: Path):
    """Ranks that wait for each other after an error, or are ended by it."""

    async def main() -> None:
        with pytest.raises(ValueError, match=r"trainer\.json cannot be read"):
            await shared.trainer.load(str(tmp_path))
        assert (await shared.trainer.publish_initial(90, None)).version == 90

    asyncio.run(main())


@pytest.mark.parametrize("rank", [1])
def test_a_dead_rank_fails_the_wait_at_once_and_the_others_end(rank: int, shared: Shared):
    """A run that waits an hour because a rank waits for a dead one. The last test of the shared ranks."""

    async def main() -> float:
        work = asyncio.create_task(shared.trainer.fit_values(make_batch(count=400).rollouts))
        await asyncio.sleep(0.5)
        os.kill(shared.trainer.pids[rank], signal.SIGKILL)
        start = time.monotonic()
        async with asyncio.timeout(20):
            with pytest.raises(TrainerError, match=rf"rank {rank} of 2 .*ended: killed by SIGKILL"):
                await work
            with pytest.raises(TrainerError, match="killed by SIGKILL"):
                await shared.trainer.update_critic()
        return time.monotonic() - start

    assert asyncio.run(main()) < 20
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in shared.trainer.pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in shared.trainer.pids)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


class FailsAlone(TrainerCore):
    """Rank 1 fails where rank 0 goes on to wait for it."""

    def begin(self, batch) -> None:
        if self.ranks.rank == 1:
            raise MemoryError("no memory left on this rank")
        super().begin(batch)


def make_failing(folder: str, ranks: OneRank) -> tuple[TrainerCore, SnapshotStore]:
    toy = make_toy()
    core = FailsAlone(actor=toy.actor, critic=toy.critic, config=toy.config, algorithm=toy.algorithm, ranks=ranks)
    return core, SnapshotStore(folder, ranks)


def test_an_error_of_one_rank_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A wait until the time limit for a rank that waits for the failed one, and an error that names neither."""
    monkeypatch.setattr(requests, "ERROR_GRACE_S", 0.5)
    trainer = ProcessTrainer(
        partial(make_failing, str(tmp_path)), threads=1, timeout_s=60, place=Place(num_ranks=2, device="cpu")
    )

    async def main() -> None:
        try:
            with pytest.raises(TrainerError, match=r"rank 1 of 2 .*failed: .*MemoryError.*no memory left"):
                await trainer.update_actor(make_batch(), version=1, parent=0)
        finally:
            await trainer.stop()

    asyncio.run(main())
    assert not any(_alive(pid) for pid in trainer.pids)


def test_virtual_time_refuses_ranks():
    """Processes started inside a run that is to be deterministic, at costs that nobody stated."""
    with pytest.raises(ValueError, match=r"trainer\.ranks = 2 .*virtual time"):
        replace(CONFIG, clock="virtual")


def test_preflight_knows_ranks_that_cannot_start():
    """Ranks that wait for cores or heads that are not there, found after the fine-tuning of an hour."""
    many = replace(SETTINGS, ranks=512)
    shared_heads = replace(SETTINGS, ranks=3, sequence_ranks=3)
    texts = []
    for settings in (many, shared_heads):
        findings = preflight(replace(CONFIG, trainer=settings))
        texts.append(" ".join(finding.text for finding in findings if not finding.good))
    assert "trainer: 512 ranks, computing in float32, " in texts[0]
    assert "sequence_ranks is 3, which does not divide the model's 2 key and value heads" in texts[1]
