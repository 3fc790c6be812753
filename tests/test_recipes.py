"""Systems by name: each is what its page says, and runs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from command import refused, sao, small_toml
from small_runs import TREE, run_small, small_config

from sao.config import RunConfig, departures, from_tree, resolve, to_toml
from sao.config_tree import ConfigError
from sao.observe.run_data import read_metrics
from sao.recipes import RECIPES, find_recipe, recipe_names, recipes_page

ROOT = Path(__file__).parent.parent
GROUPED = {"grpo", "grpo-clip", "grpo-dis", "icepop"}
WITHOUT_CRITIC = GROUPED | {"running-mean", "running-mean-per-prompt", "spo", "batch-mean"}
LOSSES = {
    "none": {"sao-no-dis", "grpo"},
    "ppo_clip": {"grpo-clip", "vapo", "vapo-long", "spo"},
    "decoupled_ppo": {"ppo"},
    "icepop": {"icepop"},
}
"""All others use DIS."""


def config_of(name: str) -> RunConfig:
    return from_tree({"recipe": name})


def changed(first: str, second: str) -> dict[str, tuple[Any, Any]]:
    """The keys in which two recipes resolve differently."""

    def leaves(value: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {key: leaf for name in value for key, leaf in leaves(value[name], f"{prefix}.{name}").items()}

    one, other = (leaves(dataclasses.asdict(config_of(name)), "") for name in (first, second))
    keys = one.keys() | other.keys()
    return {key[1:]: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)} | {}


def test_the_page_is_current() -> None:
    """Catches docs/recipes.md out of date: `sao recipes --markdown > docs/recipes.md`."""
    page = sao("recipes", "--markdown").out
    assert page == recipes_page() == (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert all(f"## `{recipe.name}`" in page for recipe in RECIPES)


def test_the_command_lists_and_shows() -> None:
    """Catches a recipe that cannot be found, and a mistyped one without the nearest name."""
    listed = sao("recipes").out
    assert "sao-dis-only" in listed
    assert "algorithm.policy_loss=dis" in sao("recipes", "grpo-dis").out
    assert "did you mean 'grpo-dis'" in refused("recipes", "grpodis")


def test_every_system_of_the_method_is_there() -> None:
    """Catches a system of the comparison that cannot be run, and two of one name."""
    wanted = "sao sao-dis-only sao-no-dis grpo grpo-clip grpo-dis vapo vapo-long running-mean running-mean-per-prompt"
    wanted += " step-mean step-last ppo icepop spo batch-mean sao-k1 sao-full-critic sao-no-pretraining"
    wanted += " sao-observation-inclusive sao-observation-inclusive-trained sao-fixed-lambda"
    assert sorted(wanted.split()) == sorted(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_what_a_recipe_is(name: str) -> None:
    """Catches a recipe with a group too many, a critic too many, or another loss than its page says."""
    config, recipe = config_of(name), find_recipe(name)
    assert config.loop.group_size == (8 if name in GROUPED else 1)
    assert (config.algorithm.advantage == "given") == (name in WITHOUT_CRITIC)
    assert config.algorithm.policy_loss == next((loss for loss, names in LOSSES.items() if name in names), "dis")
    assert (config.value_pretraining is None) == (name in WITHOUT_CRITIC | {"sao-dis-only", "sao-no-pretraining"})
    assert recipe.ratio_against.startswith("nothing") == (config.algorithm.policy_loss == "none")
    assert len({setting.split("=")[0] for setting in recipe.settings}) == len(recipe.settings)
    assert recipe.source
    assert recipe.deltas.endswith(".")


ONE_CHANGE = [
    ("sao", "sao-k1", {"trainer.critic_updates": (2, 1)}),
    ("sao", "sao-full-critic", {"trainer.freeze": ("attention", "none")}),
    ("sao", "sao-no-dis", {"algorithm.policy_loss": ("dis", "none")}),
    ("sao", "sao-fixed-lambda", {"algorithm.alpha": (1.5, None), "algorithm.lam": (1.0, 0.95)}),
    ("sao", "step-mean", {"algorithm.advantage": ("skip_observation", "step_mean")}),
    ("sao", "step-last", {"algorithm.advantage": ("skip_observation", "step_last")}),
    ("sao", "vapo-long", {"algorithm.policy_loss": ("dis", "ppo_clip")}),
    ("sao", "sao-observation-inclusive", {"algorithm.advantage": ("skip_observation", "observation_inclusive")}),
    ("sao-observation-inclusive", "sao-observation-inclusive-trained",
     {"algorithm.train_observation_values": (False, True)}),
    ("vapo", "vapo-long", {"algorithm.alpha": (0.05, 1.5)}),
    ("grpo", "grpo-dis", {"algorithm.policy_loss": ("none", "dis")}),
    ("grpo", "grpo-clip", {"algorithm.policy_loss": ("none", "ppo_clip")}),
    ("running-mean", "running-mean-per-prompt",
     {"baseline.kind": ("running_mean", "prompt_running_mean"), "baseline.window": (128, 8)}),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "difference"), ONE_CHANGE)
def test_what_an_ablation_changes(first: str, second: str, difference: dict[str, Any]) -> None:
    """Catches an ablation that changes more than its part, or nothing."""
    assert changed(first, second) == difference | {"recipe": (first, second)}


def test_sao_is_the_default() -> None:
    """Catches defaults of the method that drift away from its recipe."""
    plain, named = from_tree({"value_pretraining": {}}), config_of("sao")
    assert dataclasses.replace(named, recipe="") == plain


def test_the_file_and_set_win_over_the_recipe(tmp_path: Path) -> None:
    """Catches a recipe that overrides what someone wrote down, and one named by --set that is not applied."""
    path = tmp_path / "config.toml"
    path.write_text("[algorithm]\nratio_high = 4.0\n[loop]\nbatch_size = 32\n")
    config = resolve(path, ["recipe=grpo-dis", "loop.group_size=4"])
    assert (config.algorithm.ratio_high, config.algorithm.ratio_low) == (4.0, 0.7)
    assert (config.loop.group_size, config.baseline.kind) == (4, "group_normalised")
    saved = tmp_path / "saved.toml"
    saved.write_text(to_toml(config))
    assert resolve(saved) == config


def test_what_the_file_took_from_a_recipe_is_told(tmp_path: Path) -> None:
    """Catches an arm of a comparison that is not the system it is called, since the file below it says otherwise."""
    path = tmp_path / "config.toml"
    path.write_text("[algorithm]\nalpha = 1.0\nratio_low = 0.7\n[value_pretraining]\nrollouts = 8\n")
    assert departures(resolve(path)) == []
    assert departures(resolve(path, ["recipe=sao"])) == ["algorithm.alpha = 1.0 (its recipe: 1.5)"]
    assert departures(resolve(path, ["recipe=sao-dis-only", "algorithm.alpha=1.5"])) == [
        'value_pretraining = "a section" (its recipe: "none")'
    ]
    assert departures(resolve(path, ["recipe=grpo", "value_pretraining=none"])) == []
    small = small_toml(tmp_path, "recipe=sao-k1", "trainer.critic_updates=3", name="small.toml")
    assert "note not as recipe sao-k1 has it: trainer.critic_updates = 3 (its recipe: 1)" in sao("check", small).out
    with pytest.raises(ConfigError, match='take the section out, or set value_pretraining = "none"'):
        resolve(path, ["recipe=grpo"])


def test_an_unknown_recipe_names_the_nearest(tmp_path: Path) -> None:
    """Catches a mistyped recipe that silently runs the defaults."""
    with pytest.raises(ConfigError, match="recipe is 'vapo-lon', which is none; did you mean 'vapo-long'"):
        from_tree({"recipe": "vapo-lon"})
    with pytest.raises(ConfigError, match="recipe"):
        from_tree({"recipe": 3})
    assert "did you mean 'sao-k1'" in refused("check", small_toml(tmp_path), "--set", "recipe=sao-k_1")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_runs(name: str, tmp_path: Path) -> None:
    """Catches a system that resolves and cannot train, and one whose critic, gate or correction does nothing."""
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in TREE.items()}
    small = {"loop.steps": 2, "loop.batch_size": 8, "evaluation.tasks": 2}
    if config_of(name).value_pretraining is not None:
        small |= {"value_pretraining.rollouts": 8, "value_pretraining.fit.steps": 2}
    config = from_tree(tree, [f"recipe={name}", *(f"{key}={value}" for key, value in small.items())])
    outcome = run_small(tmp_path / "run", config)
    assert outcome is not None
    assert (outcome.steps, outcome.version) == (2, 2)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl").stage("train")
    assert all(("critic/loss" in row) == (name not in WITHOUT_CRITIC) for row in rows)
    assert all(("actor/gated_share" in row) == (name == "batch-mean") for row in rows)
    assert len(rows) == 2


def test_a_run_without_a_recipe_says_so() -> None:
    """Catches a resolved configuration that claims a system which it is not."""
    assert small_config().recipe == ""
