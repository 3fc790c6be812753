"""Configuration: what users get wrong is named, with the nearest right thing."""

import tomllib
from pathlib import Path

import pytest

from sao.config import ConfigError, RunConfig, from_tree, resolve, to_toml


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[loop]\nbatchsize = 4", r"unknown key loop\.batchsize; did you mean loop\.batch_size"),
        ("[algoritm]\nalpha = 1.0", r"unknown key algoritm; did you mean algorithm"),
        ("[loop]\nratio_low = 0.5", r"did you mean algorithm\.ratio_low"),
        ('[loop]\nbatch_size = "many"', r"loop\.batch_size is 'many'"),
        ("[loop]\nbatch_size = 10\ngroup_size = 4", r"not a multiple of loop\.group_size 4.*batch_size = 8"),
        ("[rollout]\ntemperature = 0.7", "importance ratio"),
        ('[environment]\ntool = "unprotected"', "allow_unprotected"),
        ('[baseline]\nkind = "running_mean"', "given"),
        ("[[sft]]\n[sft.fit]\nlearning_rate = 1.0", r"unknown key sft\.0\.fit\.learning_rate"),
        ("[loop]\nsteps = ", "not TOML"),
        ("[sft]\ndemonstrations = 5", r"\[sft\] is a list of sections; write \[\[sft\]\]"),
        ("[[trainer]]\nactor_lr = 1.0", r"\[\[trainer\]\] is one section; write \[trainer\]"),
        ("[loop]\nmax_failure_share = nan", r"loop\.max_failure_share is nan; it must lie between 0 and 1"),
        ("[loop]\nengine_timeout_s = 0", r"loop\.engine_timeout_s is 0\.0; it must be above 0 seconds"),
        ("[loop]\nmax_retries = -1", r"loop\.max_retries is -1; it must be 0 or above"),
        ("[loop]\nsteps = 0", r"loop\.steps is 0; it must be at least 1"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    """Catches a mistyped key that is silently ignored, and a message without the offending value."""
    with pytest.raises(ConfigError, match=r"(?s)" + said):
        resolve(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Catches a trace instead of a message."""
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.toml"):
        resolve(tmp_path / "none.toml")


def test_overrides(tmp_path: Path) -> None:
    """Catches an override that is kept as text, or that cannot reach into a list or create a section."""
    path = write(tmp_path, 'name = "a"\n[[sft]]\ndemonstrations = 5\n')
    config = resolve(path, ["loop.steps=7", "name=b", "sft.0.fit.lr=0.5", "value_pretraining.rollouts=9"])
    assert (config.loop.steps, config.name, config.sft[0].fit.lr) == (7, "b", 0.5)
    assert config.value_pretraining is not None
    assert config.value_pretraining.rollouts == 9
    for bad in ("loop.steps", "sft.3.demonstrations=1", "name.x=1"):
        with pytest.raises(ConfigError, match="override"):
            resolve(path, [bad])


def test_the_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    """Catches a saved configuration that does not describe the run: None, lists of sections, strings with quotes."""
    config = from_tree(
        {
            "name": 'x"y',
            "algorithm": {"alpha": "none", "lam": 0.9},
            "sft": [{"demonstrations": 3}, {"demonstrations": 4, "fit": {"lr": 1e-3}}],
            "evaluation_tasks": [{"source": "guess"}],
            "value_pretraining": {"rollouts": 10},
        }
    )
    assert config.algorithm.alpha is None
    text = to_toml(config)
    tomllib.loads(text)
    assert resolve(write(tmp_path, text)) == config
    assert resolve(write(tmp_path, to_toml(RunConfig()))) == RunConfig()
