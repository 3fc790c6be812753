"""Resumed training equals uninterrupted training, and damage is named."""

import json
from pathlib import Path

import pytest
import torch
from training_toys import make_batch, make_core, weights

from sao.algorithm.sao import AlgorithmConfig
from sao.training.checkpoint import load_trainer, save_trainer
from sao.training.core import TrainerCore


def play(core: TrainerCore, steps: range) -> list[dict[str, float]]:
    found = []
    for step in steps:
        core.begin(make_batch(step=step, seed=step))
        core.actor_update()
        core.critic_update()
        found.append({key: metric.value for key, metric in core.report().metrics.items()})
    return found


def same(one: TrainerCore, other: TrainerCore) -> bool:
    pairs = [(one.actor, other.actor)]
    if one.critic is not None:
        assert other.critic is not None
        pairs.append((one.critic, other.critic))
    return all(
        torch.equal(first, second)
        for mine, theirs in pairs
        for first, second in zip(weights(mine).values(), weights(theirs).values(), strict=True)
    )


@pytest.mark.parametrize(
    ("architecture", "model", "fields"),
    [
        ("qwen3", {}, {}),
        ("qwen3_moe", {}, {}),
        ("qwen3", {"dtype": "bfloat16"}, {}),
        ("qwen3", {"tie_embeddings": False}, {"critic_only_steps": 3, "actor_warmup_steps": 3}),
    ],
)
def test_resumed_equals_uninterrupted(architecture: str, model: dict, fields: dict, tmp_path: Path):
    """Moments, fp32 copies, warm-up or critic-only counts that a checkpoint forgets."""
    through = make_core(architecture, model=model, **fields)
    play(through, range(1, 3))
    save_trainer(through, tmp_path)
    resumed = make_core(architecture, model=model | {"seed": 9}, **fields)
    assert not same(through, resumed)
    load_trainer(resumed, tmp_path)
    assert same(through, resumed)
    assert play(through, range(3, 6)) == play(resumed, range(3, 6))
    assert same(through, resumed)


def test_a_resumed_trainer_has_the_reference_of_the_start(tmp_path: Path):
    """A reference taken from the checkpoint, which would let the actor drift a little further at every resume."""
    fields = {"reference_kl": 10.0, "actor_lr": 1e-2}
    through = make_core(**fields)
    play(through, range(1, 3))
    save_trainer(through, tmp_path)
    resumed = make_core(**fields)
    load_trainer(resumed, tmp_path)
    rest = play(through, range(3, 6))
    assert abs(rest[0]["actor/reference_kl"]) > 1e-4, "a reference that equals the actor would show nothing"
    assert play(resumed, range(3, 6)) == rest
    assert same(through, resumed)


def test_a_changed_rate_is_obeyed(tmp_path: Path):
    """A resumed scheduler that goes on with the rate of the checkpoint."""
    core = make_core(critic_warmup_steps=0)
    play(core, range(1, 2))
    save_trainer(core, tmp_path)
    resumed = make_core(actor_lr=5e-5, critic_lr=7e-5, critic_warmup_steps=4)
    load_trainer(resumed, tmp_path)
    (found,) = play(resumed, range(2, 3))
    assert found["actor/lr"] == 5e-5
    assert found["critic/lr"] == pytest.approx(7e-5 * 2 / 4)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    core = make_core()
    play(core, range(1, 2))
    save_trainer(core, tmp_path)
    return tmp_path


FILES = [
    "actor/model.safetensors",
    "actor/config.json",
    "critic.safetensors",
    "actor_optimiser.safetensors",
    "critic_optimiser.safetensors",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_every_damaged_file_is_named_and_nothing_is_loaded(name: str, damage: str, saved: Path):
    """A run that resumes with half of its state, or a traceback that does not say which file."""
    file = saved / name
    content = file.read_bytes()
    match damage:
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(content[: len(content) // 2])
        case _:
            file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    core, untouched = make_core(), make_core()
    with pytest.raises(ValueError, match=name) as caught:
        load_trainer(core, saved)
    assert str(saved) in str(caught.value)
    assert same(core, untouched)
    assert core.counters.steps == 0


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"files": {}}', '{"files": {}, "counters": {"x": 1}, "format": 1}']
)
def test_a_damaged_manifest_is_named(content: str | None, saved: Path):
    """A manifest that is taken for an empty one."""
    file = saved / "trainer.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"checkpoint .*(trainer\.json|has no actor_optimiser).*(resume|format)"):
        load_trainer(make_core(), saved)


def test_a_checkpoint_of_another_model_is_refused(saved: Path):
    """Weights loaded as far as they fit."""
    core = make_core("qwen3_moe")
    with pytest.raises(ValueError, match=str(saved)):
        load_trainer(core, saved)


def test_a_checkpoint_without_the_critic_is_refused_where_one_is_needed(tmp_path: Path):
    """A critic that silently starts anew."""
    save_trainer(make_core(algorithm=AlgorithmConfig(advantage="given")), tmp_path)
    with pytest.raises(ValueError, match=r"has no critic\.safetensors"):
        load_trainer(make_core(), tmp_path)


def test_saving_into_nothing_is_refused(tmp_path: Path):
    """A checkpoint beside the folder that is to be renamed into place."""
    with pytest.raises(ValueError, match="is no folder"):
        save_trainer(make_core(), tmp_path / "absent")


def test_foreign_files_are_left_alone(saved: Path):
    """A manifest that covers what the orchestrator writes into the same folder afterwards."""
    (saved / "manifest.json").write_text("{}")
    save_trainer(make_core(), saved)
    assert "manifest.json" not in json.loads((saved / "trainer.json").read_text())["files"]
