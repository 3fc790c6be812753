"""Configuration: what users get wrong is named, with the nearest right thing."""

import dataclasses
import math
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sao.config import RunConfig, from_tree, resolve, to_toml
from sao.config_tree import ConfigError


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
        ("[loop]\nmax_failure_share = nan", r"loop\.max_failure_share is nan; it must be a finite number"),
        ("[loop]\nengine_timeout_s = 0", r"loop\.engine_timeout_s is 0\.0; it must be above 0 seconds"),
        ("[loop]\nmax_retries = -1", r"loop\.max_retries is -1; it must be 0 or above"),
        ("[loop]\nsteps = 0", r"loop\.steps is 0; it must be at least 1"),
        (
            "[environment.grader]\ntimeout_s = 1e9",
            r"environment\.grader\.timeout_s is 1e\+09; .* at most 1e\+06 seconds$",
        ),
        ("[loop]\nbatch_timeout_s = 1e9", r"loop\.batch_timeout_s is 1e\+09; .* at most 1e\+06 seconds, or inf"),
        ("sft_threads = 0", "sft_threads is 0; it must be at least 1"),
        ("seed = -1", r"seed is -1; it must be at least 0 and below 2\^63"),
        ("seed = 9223372036854775808", "seed is a number of 64 bits"),
        ("[model]\ninit_std = 0.0", r"model\.init_std is 0\.0; it must be finite and above 0"),
        ("[evaluation]\nfinal_tasks = -1", r"evaluation\.final_tasks is -1; it must be at least 0"),
        (
            "[tasks.chain]\nlength_exponent = 1e300",
            r"tasks\.chain\.length_exponent is 1e\+300; it must lie between -20",
        ),
        (
            "[environment.math_python]\ngrading_s = inf",
            r"environment\.math_python\.grading_s is inf; it must be a finite",
        ),
        ('[engine_cost]\nload_seconds = "nan"', r"engine_cost\.load_seconds is nan; it must be a finite number"),
        ("[trainer]\nbetas = [0.9, nan]", r"trainer\.betas is nan; it must be a finite number"),
        ("[[sft]]\n[sft.fit]\nlr = inf", r"sft\.0\.fit\.lr is inf; it must be a finite number"),
        ('name = "a\\nb"', r"name is 'a\\nb'; it names a folder"),
        ('name = "a\\u0000b"', r"name is 'a\\x00b'; it names a folder"),
        ('name = ".hidden"', r"name is '\.hidden'; it names a folder"),
        (
            "[algorithm]\nratio_low = 2.0",
            r"algorithm\.ratio_low, ratio_high are \(2\.0, 6\.0\); they must enclose 1",
        ),
        ("[algorithm]\nclip_ratio_high = 0.5", r"algorithm\.clip_ratio_low, clip_ratio_high are \(0\.8, 0\.5\)"),
        ("[algorithm]\ngamma = 2", r"algorithm\.gamma is 2\.0; it must be in \[0, 1\]"),
        ("seed = " + "9" * 5000, r"config\.toml is not TOML: .*digits"),
        ("seed = " + "[" * 5000, r"config\.toml is not TOML: "),
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


def test_files_of_other_editors(tmp_path: Path) -> None:
    """Catches a byte order mark refused as a wrong statement, and another encoding without the name of the file."""
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbf" + b'name = "marked"\r\n')
    assert resolve(tmp_path / "config.toml").name == "marked"
    (tmp_path / "config.toml").write_bytes('name = "café"'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.toml is not UTF-8 .*save the file as UTF-8"):
        resolve(tmp_path / "config.toml")


def test_an_index_into_a_list_that_is_not_there(tmp_path: Path) -> None:
    """Catches "unknown key sft.0" for a key that is known."""
    path = write(tmp_path, "")
    for override in ("sft.0.fit.lr=1", "sft.0=1"):
        with pytest.raises(ConfigError, match=r"override sft\.0\S*: the file has no \[\[sft\]\] to override"):
            resolve(path, [override])


def number_keys(declared: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of the tree that takes a number, with its type."""
    for name, hint in typing.get_type_hints(declared).items():
        inner = [each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)]
        if inner:
            yield from number_keys(inner[0], (*path, name))
        elif {int, float} & {hint, *typing.get_args(hint)}:
            yield (*path, name), hint


NUMBER_KEYS = list(number_keys(RunConfig))
STRANGE = (
    math.nan,
    math.inf,
    -math.inf,
    "nan",
    "-inf",
    "1e999",
    -1,
    -1.0,
    0,
    2**63,
    10**400,
    2**62,
    1e300,
    -1e300,
    5e-324,
)


def tree_with(path: tuple[str, ...], value: object, hint: Any) -> dict[str, Any]:
    tree: Any = [value] * (2 if path[-1] == "betas" else 1) if typing.get_origin(hint) is tuple else value
    for place in reversed(range(len(path))):
        tree = {path[place]: tree}
        if place and path[place - 1] in ("sft", "evaluation_tasks"):
            tree = [tree]
    return tree


def outcome(tree: dict[str, Any]) -> tuple[RunConfig | None, str]:
    """The configuration, or what is said against it."""
    try:
        return from_tree(tree), ""
    except ConfigError as error:
        return None, str(error)


def test_no_number_gives_anything_but_a_message() -> None:
    """Catches a key without a bound: a traceback at the start, or NaN after an hour."""
    assert len(NUMBER_KEYS) > 100
    endless = set()
    for path, hint in NUMBER_KEYS:
        for value in STRANGE:
            config, said = outcome(tree_with(path, value, hint))
            if config is None:
                assert path[-1] in said, (path, value, said)
                assert path[0] in said, (path, value, said)
                continue
            assert value not in ("nan", "-inf", -math.inf, 2**63, 10**400), (path, value)
            assert not (isinstance(value, float) and math.isnan(value)), path
            if path[-1].endswith(("_s", "_seconds")):
                assert value not in (1e300, 2**62), "sockets refuse such a limit when it is used"
            if "betas" in path:
                assert 0 <= value < 1, path
            if value in (math.inf, "1e999"):
                endless.add(".".join(path))
            assert from_tree(tomllib.loads(to_toml(config))) == config, (path, value)
    assert endless == {
        "engine.start_timeout_s", "engine.load_timeout_s", "rollout.timeout_s", "rollout.step_timeout_s",
        "loop.batch_timeout_s", "loop.trainer_timeout_s", "loop.engine_timeout_s",
    }  # fmt: skip


@pytest.mark.parametrize("source", [{"chain": {"length_exponent": each, "min_steps": 2}} for each in (-20, 20)])
def test_the_steepest_chains_can_be_drawn(source: dict[str, Any]) -> None:
    """Catches a bound at which shares are 0 / 0."""
    assert np.isfinite(from_tree({"tasks": source}).tasks.chain.length_shares).all()


def test_overrides(tmp_path: Path) -> None:
    """Catches an override that is kept as text, or that cannot reach into a list or create a section."""
    path = write(tmp_path, 'name = "a"\n[[sft]]\ndemonstrations = 5\n')
    config = resolve(path, ["loop.steps=7", "name=b", "sft.0.fit.lr=0.5", "value_pretraining.rollouts=9"])
    assert (config.loop.steps, config.name, config.sft[0].fit.lr) == (7, "b", 0.5)
    assert config.value_pretraining is not None
    assert config.value_pretraining.rollouts == 9
    assert resolve(path, ["tokenizer.path= a=b "]).tokenizer.path == "a=b"
    for bad in ("loop.steps", "loop.steps=1\nx=2", "sft.3.demonstrations=1", "name.x=1"):
        with pytest.raises(ConfigError, match="override"):
            resolve(path, [bad])


@pytest.mark.parametrize("sharded", ["trainer.ranks=2", "trainer.compute_dtype=bfloat16"])
def test_sums_of_gradients_in_bfloat16_are_refused(sharded: str) -> None:
    """Catches shards in bfloat16, to which FSDP2 adds each micro-batch's gradient in that type."""
    with pytest.raises(ConfigError, match=r"add up the gradients.*set model\.dtype = \"float32\""):
        from_tree({}, [sharded, "model.dtype=bfloat16"])
    from_tree({}, [sharded])
    from_tree({}, ["model.dtype=bfloat16"])


def test_the_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    """Catches a saved configuration that does not describe the run: None, lists of sections, strings with quotes."""
    config = from_tree(
        {
            "name": "x.y-1",
            "environment": {"math_python": {"system_prompt": 'quoted "text"\n\t\x7f \x1f é'}},
            "rollout": {"timeout_s": "inf"},
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
