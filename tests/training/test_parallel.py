"""Several ranks give what one gives: losses, numbers per token, gradients, weights, checkpoints."""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor
from training_toys import make_actor, make_batch, make_rollout, make_sequence, weights

from sao.algorithm.sao import AlgorithmConfig
from sao.models.load import read_weights
from sao.training.checkpoint import load_trainer, save_trainer
from sao.training.core import TrainerCore
from sao.training.critic import Critic
from sao.training.parallel import ONE_RANK, OneRank
from sao.training.settings import TrainerConfig
from sao.training.value_pretraining import ValuePretrainingConfig
from sao.training.weights import SnapshotStore
from sao.types import Batch

SHAPE = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8}
Found = tuple[list[dict[str, float]], list[list[np.ndarray]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(4)
    yield made
    made.stop()


def make_core(
    ranks: OneRank,
    architecture: str = "qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tie_embeddings: bool = True,
    **fields: object,
) -> TrainerCore:
    settings: dict[str, object] = {"actor_lr": 1e-4, "critic_lr": 1e-4, "critic_warmup_steps": 2}
    config = TrainerConfig(**settings | {"micro_batch_tokens": 50} | fields)  # type: ignore[arg-type]
    actor = make_actor(architecture, seed=seed, dtype=dtype, tie_embeddings=tie_embeddings, **SHAPE)
    critic = Critic.from_actor(actor)
    torch.manual_seed(seed + 1)
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    return TrainerCore(
        actor=actor,
        critic=critic,
        config=config,
        algorithm=AlgorithmConfig(),
        value_pretraining=ValuePretrainingConfig(steps=2, lr=1e-4, freeze="none", micro_batch_tokens=50),
        ranks=ranks,
    )


def uneven_batch(step: int) -> Batch:
    """Seven rollouts; the longest keeps no token, and has a micro-batch of its own; one sequence has no action."""
    batch = make_batch(count=7, seed=step, step=step)
    rng = np.random.default_rng(step)
    far = make_sequence(rng, 49, reward=1.0)
    far = replace(far, rollout_logprobs=np.where(far.action_mask, -40, 0).astype(np.float32))
    silent = make_rollout(8, (make_sequence(rng, 45, reward=1.0), make_sequence(rng, 1)))
    return Batch(step=step, rollouts=(*batch.rollouts, make_rollout(7, (far,)), silent))


def play(core: TrainerCore, steps: tuple[int, ...]) -> Found:
    metrics, tokens = [], []
    for step in steps:
        core.begin(uneven_batch(step))
        core.actor_update()
        core.critic_update()
        report = core.report()
        metrics.append({key: metric.value for key, metric in report.metrics.items()})
        tokens.append(
            [
                np.stack([found.actor_logprobs, found.values, found.advantages, found.returns])
                for rollout in report.tokens
                for found in rollout
            ]
        )
    return metrics, tokens, state(core)


def state(core: TrainerCore) -> dict[str, Tensor]:
    assert core.critic is not None
    both = {f"actor.{name}": weight for name, weight in weights(core.actor).items()}
    both |= {f"critic.{name}": weight for name, weight in weights(core.critic).items()}
    return {name: whole(weight) for name, weight in both.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - tensor.float()).abs().max()) for name, tensor in other.items())


def assert_same(found: Found, expected: Found, tolerance: float) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance, nan_ok=True)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, abs=tolerance)
    assert gap(found[2], expected[2]) <= tolerance


def pretrain_and_play(ranks: OneRank, architecture: str, dtype: str) -> tuple[dict[str, float], Found]:
    core = make_core(ranks, architecture, dtype=dtype)
    fitted = core.fit_values(make_batch(count=12, seed=9).rollouts)
    return {key: metric.value for key, metric in fitted.items()}, play(core, (1, 2))


@pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance"),
    [("qwen3", "float32", 1e-5), ("qwen3_moe", "float32", 1e-5), ("qwen3", "bfloat16", 5e-2)],
)
def test_two_ranks_equal_one(architecture: str, dtype: str, tolerance: float, pool: RankPool):
    """Gradients averaged over ranks, a micro-batch that is lost or counted twice, weights that a pass without
    gradients left gathered and stale, a freeze that does not reach the shards."""
    expected = pretrain_and_play(ONE_RANK, architecture, dtype)
    found = pool.run(pretrain_and_play, architecture, dtype)
    assert repr(found[0][0]) == repr(found[1][0])
    assert repr(found[0][1][0]) == repr(found[1][1][0])
    for fitted, played in found:
        assert fitted == pytest.approx(expected[0], rel=tolerance, abs=tolerance, nan_ok=True)
        assert_same(played, expected[1], tolerance)


def gradients(ranks: OneRank, checkpointing: bool) -> tuple[float, float, dict[str, Tensor]]:
    core = make_core(ranks, activation_checkpointing=checkpointing)
    assert core.critic is not None
    core.begin(uneven_batch(1))
    step = core._begun()
    loss = core._actor_pass(step, core._actor_denominator(step), train=True).loss
    value_loss = core._critic_pass(step)
    named = [*core.actor.named_parameters(prefix="actor"), *core.critic.named_parameters(prefix="critic")]
    return loss, value_loss, {name: whole(p.grad) for name, p in named if p.grad is not None}


@pytest.mark.parametrize(
    ("num_ranks", "sequence_ranks", "checkpointing"), [(2, 1, False), (2, 2, False), (4, 4, True), (4, 2, False)]
)
def test_gradients_are_exact(num_ranks: int, sequence_ranks: int, checkpointing: bool, pool: RankPool):
    """Heads or tokens in the wrong order after an exchange, a gradient counted once per rank, padding that is seen."""
    expected = gradients(ONE_RANK, False)
    for found in pool.run(gradients, checkpointing, num_ranks=num_ranks, sequence_ranks=sequence_ranks):
        assert found[:2] == pytest.approx(expected[:2], abs=1e-6)
        assert gap(found[2], expected[2]) < 1e-6


def spoil_one_rank(ranks: OneRank) -> tuple[str, float, bool, str]:
    core = make_core(ranks)
    core.begin(uneven_batch(1))
    before, scored = state(core), ranks.action_logprobs

    def spoiled(*inputs, **settings):
        logprobs, entropy = scored(*inputs, **settings)
        if logprobs.requires_grad:
            logprobs.register_hook(lambda gradient: gradient * math.inf)
        return logprobs, entropy

    if ranks.rank == 1:
        ranks.action_logprobs = spoiled  # type: ignore[method-assign]
    skipped = core.actor_update()
    unchanged = gap(state(core), before) == 0
    core.critic_update()
    skips = core.report().metrics["actor/skipped"].value
    ranks.action_logprobs = scored  # type: ignore[method-assign]
    core.begin(uneven_batch(2))
    return skipped, skips, unchanged, core.actor_update()


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(pool: RankPool):
    """A rank that updates its shard while another skips: weights of no version."""
    assert pool.run(spoil_one_rank) == [("not_finite", 1.0, True, "")] * 2


def play_mixed(ranks: OneRank) -> tuple[set[torch.dtype], Found]:
    core = make_core(ranks, "qwen3_moe")
    return {p.dtype for p in core.actor.parameters()}, play(core, (1, 2))


def test_bfloat16_computes_on_float32_weights(pool: RankPool):
    """Masters that are rounded with the weights that compute, a value head in bfloat16, or a setting without effect."""
    expected = play(make_core(ONE_RANK, "qwen3_moe"), (1, 2))
    (dtypes, found), (_, other) = pool.run(play_mixed, compute_dtype="bfloat16")
    assert dtypes == {torch.float32}
    assert repr(found[0]) == repr(other[0])
    keys = ("actor/ratio_mean", "actor/entropy", "critic/loss", "critic/value_mean")
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert [mine[key] for key in keys] == pytest.approx([theirs[key] for key in keys], abs=0.02)
    assert 0 < gap(found[2], expected[2]) < 0.01


def train_and_save(ranks: OneRank, folder: str) -> Found:
    core = make_core(ranks, "qwen3_moe")
    play(core, (1, 2))
    save_trainer(core, Path(folder))
    return play(core, (3,))


def load_and_train(ranks: OneRank, folder: str) -> tuple[Found, bool]:
    core = make_core(ranks, "qwen3_moe", seed=5)
    load_trainer(core, Path(folder))
    return play(core, (3,)), core.counters.steps == 3


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, pool.run(train_and_save, str(folder))[0]


def test_a_checkpoint_loads_on_another_number_of_ranks(saved: tuple[Path, Found], pool: RankPool, tmp_path: Path):
    """Rows or moments that are lost, or land at another rank's place, where 32 rows meet 3 ranks."""
    folder, expected = saved
    one = load_and_train(ONE_RANK, str(folder))
    here = train_and_save(ONE_RANK, str(tmp_path))
    for found, counted in (one, *pool.run(load_and_train, str(folder), num_ranks=3)):
        assert counted
        assert_same(found, expected, 1e-5)
    for found, _ in pool.run(load_and_train, str(tmp_path)):
        assert_same(found, here, 1e-5)
    actor = make_actor("qwen3_moe", seed=7, **SHAPE)
    two, one = (read_weights(saved_by / "actor", actor) for saved_by in (folder, tmp_path))
    assert gap(two, one) < 1e-5
    assert gap(two, weights(actor)) > 0.01


def train_frozen(ranks: OneRank) -> Found:
    """A critic of its head alone, and an actor with a head of its own."""
    core = make_core(ranks, freeze="backbone", tie_embeddings=False)
    assert len({name for name, _ in core.actor.named_parameters() if "lm_head" in name}) == 1
    return play(core, (1, 2))


def test_a_head_of_its_own_and_a_frozen_backbone(pool: RankPool):
    """A head that is sharded as if it were the embedding, or ranks that wait for gradients of a backbone without."""
    expected = train_frozen(ONE_RANK)
    for found in pool.run(train_frozen):
        assert_same(found, expected, 1e-5)


def try_to_load(ranks: OneRank, folder: str) -> str:
    core = make_core(ranks, "qwen3_moe", seed=5)
    before = state(core)
    with pytest.raises(ValueError, match="critic_optimiser") as caught:
        load_trainer(core, Path(folder))
    assert gap(state(core), before) == 0
    return str(caught.value)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.parametrize("damage", [Path.unlink, _cut])
def test_a_damaged_shard_is_named_by_all_ranks(
    damage: Callable[[Path], None], saved: tuple[Path, Found], pool: RankPool, tmp_path: Path
):
    """A rank that waits for ever for the one that found the damage, or half of the state loaded."""
    folder = tmp_path / "c"
    shutil.copytree(saved[0], folder)
    damage(folder / "critic_optimiser-00002-of-00002.safetensors")
    texts = pool.run(try_to_load, str(folder))
    assert texts[0] == texts[1]
    assert "critic_optimiser-00002-of-00002.safetensors" in texts[0]


def write_snapshot(ranks: OneRank, folder: str):
    core = make_core(ranks, "qwen3_moe")
    return SnapshotStore(folder, ranks).write(core.actor, version=3, parent=1)


def test_a_snapshot_is_the_plain_folder_that_one_rank_writes(pool: RankPool, tmp_path: Path):
    """Shards exported as if they were whole, experts under other names, a probe of gathered weights that are stale."""
    expected = write_snapshot(ONE_RANK, str(tmp_path / "one"))
    first, second = pool.run(write_snapshot, str(tmp_path / "two"))
    assert first == second
    assert first.checksum == expected.checksum
    assert first.probe_logprobs == pytest.approx(expected.probe_logprobs, abs=1e-5)
    actor = make_actor("qwen3_moe", seed=4, **SHAPE)
    assert gap(read_weights(first.location, actor), read_weights(expected.location, actor)) == 0


def test_settings_that_do_not_fit_are_refused():
    """Ranks that wait for each other because one belongs to no group."""
    with pytest.raises(ValueError, match=r"trainer\.sequence_ranks is 2, which does not divide trainer\.ranks = 3"):
        TrainerConfig(ranks=3, sequence_ranks=2)
    with pytest.raises(ValueError, match=r"trainer\.ranks is 0"):
        TrainerConfig(ranks=0)


def refuse(ranks: OneRank) -> str:
    with pytest.raises(ValueError, match="sequence_ranks is 2") as caught:
        ranks.shard_actor(make_actor(num_heads=2, num_kv_heads=1))
    return str(caught.value)


def test_too_few_heads_are_refused(pool: RankPool):
    """Query heads that meet the wrong keys, or an error about shapes deep inside a layer."""
    texts = pool.run(refuse, sequence_ranks=2)
    assert all("does not divide the model's 1 key and value heads" in text for text in texts)
