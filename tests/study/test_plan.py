"""Plans: what is below what, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sao.config_tree import ConfigError
from sao.study.plan import arm_configs, read_plan, setting

ROOT = Path(__file__).parents[2]
BASE = """
[loop]
batch_size = 32
group_size = 2
[algorithm]
ratio_low = 0.4
"""
PLANS = sorted(path for path in (ROOT / "experiments/paper").glob("*.toml") if "[[arms]]" in path.read_text())
PLAN = """
name = "p"
base = "base.toml"
seeds = 2
set = ["loop.steps=7", "loop.batch_size=16"]
[[arms]]
name = "a"
recipe = "grpo-dis"
seeds = 3
set = ["loop.batch_size=24"]
[[arms]]
name = "b"
[[claims]]
id = "c"
text = "A is better."
better = "a"
worse = "b"
"""
CURVE = """
[[curves]]
id = "k"
text = "Over the slots."
x = "loop.concurrency"
measures = ["final"]
[[curves.lines]]
label = "all"
arms = ["a", "b"]
"""


def write(folder: Path, plan: str = PLAN, base: str = BASE) -> Path:
    (folder / "base.toml").write_text(base)
    path = folder / "plan.toml"
    path.write_text(plan)
    return path


def test_what_lies_above_what(tmp_path: Path) -> None:
    """Catches a base that overrides the recipe, and an arm that does not override the plan."""
    path = write(tmp_path, PLAN + "[collapse]\nbelow = 0.05\nfrom_step = 3\nin_a_row = 2\n")
    plan = read_plan(path)
    configs = arm_configs(plan, path)
    assert list(configs) == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    a, b = configs["a", 1], configs["b", 1]
    assert (a.loop.steps, a.loop.batch_size, a.loop.group_size) == (7, 24, 8)
    assert (b.loop.steps, b.loop.batch_size, b.loop.group_size) == (7, 16, 2)
    assert (a.algorithm.ratio_low, b.algorithm.ratio_low) == (0.7, 0.4)
    assert (a.recipe, a.seed, a.name, b.recipe) == ("grpo-dis", 1, "p-a", "")
    assert (a.evaluation.stop_below, a.evaluation.stop_from_step, a.evaluation.stop_in_a_row) == (0.05, 3, 2)
    assert plan.pairs(plan.claims[0]) == 2


def test_what_only_the_settings_tell(tmp_path: Path) -> None:
    """Catches a window beyond a run's end and a curve over no setting that show after hours of runs."""
    window = '[[measures]]\nname = "m"\nof = "mean"\nsteps = [[5, 8]]\n'
    misspelt = CURVE.replace("loop.concurrency", "loop.concurency")
    for more, said in (
        (window, r"the window \[5, 8\]; runs have 7 steps"),
        (misspelt, r"'loop\.concurency' is no setting; did you mean 'loop\.concurrency'"),
    ):
        path = write(tmp_path, PLAN + more)
        with pytest.raises(ConfigError, match=said):
            arm_configs(read_plan(path), path)
    path = write(tmp_path, PLAN + CURVE)
    config = arm_configs(read_plan(path), path)["a", 0]
    assert (setting(config, "loop.steps"), setting(config, "value_pretraining.fit.lr")) == (7, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('better = "a"', 'better = "aa"'), "claim 'c' names the arm 'aa', .* did you mean 'a'"),
        (('better = "a"', 'better = "b"'), "claim 'c' compares 'b' with itself"),
        (('name = "b"', 'name = "a"'), "two arms are called 'a'"),
        (('name = "b"', 'name = "../b"'), r"arms\.name is '\.\./b'; it names a folder"),
        (("seeds = 2", "seeds = 1"), "arm 'b' has 1 seed; an interval needs at least 2"),
        (('worse = "b"', 'worse = "b"\nkind = "equivalent"'), "claim 'c' says equivalent with margin 0; it"),
        (('worse = "b"', 'worse = "b"\nkind = "better"'), r"claims\.0\.kind"),
        (("[[claims]]", "[[claim]]"), "unknown key claim; did you mean claims"),
        (('recipe = "grpo-dis"', 'recipes = "grpo-dis"'), r"unknown key arms\.0\.recipes; did you mean arms\.0\."),
        (('id = "c"', ""), "id"),
        (('worse = "b"', 'worse = "b"\nmeasure = "arae"'), "measure 'arae' is neither .* did you mean 'area'"),
        (("[[claims]]", '[[measures]]\nname = "final"\n[[claims]]'), "two measures are called 'final'"),
        (("[[claims]]", '[[measures]]\nname = "m"\nof = "mean"\n[[claims]]'), "'m' is of 'mean' with 0 windows"),
        (
            ("[[claims]]", '[[measures]]\nname = "m"\nof = "mean"\nsteps = [[5, 2]]\n[[claims]]'),
            r"the window \[5, 2\]; need 0 <= first <= last",
        ),
        (("[[claims]]", '[[measures]]\nname = "m"\nof = "seconds_to"\n[[claims]]'), "'seconds_to' with reach = None"),
        (("[[claims]]", '[[measures]]\nname = "m"\nreach = 0.5\n[[claims]]'), "'m' is of 'last' with reach = 0.5"),
        (("loop.batch_size=24", "recipe=sao"), "'recipe=sao' cannot be set: an arm has it as `recipe`"),
        (("loop.batch_size=24", "seed=3"), "'seed=3' cannot be set: `seeds` says how many"),
        (("[[claims]]", CURVE.replace('"a"', '"aa"') + "[[claims]]"), "curve 'k' names the arm 'aa'"),
    ],
)  # fmt: skip
def test_mistakes_in_a_plan_are_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    """Catches a mistake that shows after hours of runs, or as a trace."""
    with pytest.raises(ConfigError, match=said):
        read_plan(write(tmp_path, PLAN.replace(*change, 1)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("grpo-dis", "grpodis"), "arm 'a': recipe is 'grpodis', which is none; did you mean 'grpo-dis'"),
        (("loop.batch_size=24", "loop.batchsize=24"), r"arm 'a': unknown key loop\.batchsize; did you"),
        (("loop.batch_size=24", "loop.batch_size=25"), "arm 'a': .*not a multiple"),
        (("base.toml", "none.toml"), r"cannot read the configuration .*none\.toml"),
    ],
)  # fmt: skip
def test_mistakes_in_an_arm_are_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    """Catches an unknown recipe or override without the nearest name."""
    path = write(tmp_path, PLAN.replace(*change, 1))
    with pytest.raises(ConfigError, match=said):
        arm_configs(read_plan(path), path)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_of_this_repository_are_whole(path: Path) -> None:
    """Catches a plan that a renamed setting broke, arms that are the same, and one kept under another's name."""
    plan = read_plan(path)
    assert plan.name == path.stem
    configs = arm_configs(plan, path)
    first = [replace(configs[arm.name, 0], name="x", recipe="") for arm in plan.arms]
    assert len({repr(config) for config in first}) == len(first)


def test_the_plan_of_the_page_can_be_run(tmp_path: Path) -> None:
    """Catches an example in the docs that is refused by those who copy it."""
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/studies.md").read_text(), re.DOTALL)
    path = tmp_path / "mine.toml"
    path.write_text(example)
    (tmp_path / "config.toml").write_text((ROOT / "experiments/demo/config.toml").read_text())
    plan = read_plan(path)
    assert len(arm_configs(plan, path)) == 5 + 5 + 8


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_of_this_repository_ask_for_metrics_that_there_are(path: Path) -> None:
    """Catches a mistyped metric, which shows as a claim that no run has measured, after hours."""
    page = re.findall(r"^\| `([^`]+/[^`]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    known = [re.compile(re.sub(r"<\w+>", "[^/]+", key)) for key in page]
    plan = read_plan(path)
    asked = {plan.measure(claim.measure).key for claim in plan.claims} | {measure.key for measure in plan.measures}
    asked |= {key for figure in plan.over_steps for key in figure.keys}
    assert [key for key in asked if not any(pattern.fullmatch(key) for pattern in known)] == []
