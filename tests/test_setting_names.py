"""Errors call settings by the names that a configuration knows."""

import ast
import re
import typing
from pathlib import Path

import pytest

import sao
from sao.config import describe, from_tree
from sao.config_tree import ConfigError

KEYS = {key: default for key, default, _ in describe()}
NUMBERS = sorted(key for key, default in KEYS.items() if re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", default))
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
LISTS = ("sft", "evaluation_tasks")

SIGNED = ("chain.length_exponent",)
"""Ends of the keys that make sense below 0."""
MAY_BE_ZERO = (
    # None of it, or no limit.
    "held_out_share", "tasks.limit", "chain.length_exponent", "words_share", "error_probability", "grading_s",
    "chatter_words",
    "latency.median_s", "latency.sigma", "sandbox.processes", "vocab_size", "warmup_steps", "critic_only_steps",
    "weight_decay", "worker_processes", "fit.steps", "max_moves", "max_restarts", "max_restarts_per_hour",
    "max_batches_ahead", "max_age", "max_retries", "max_failure_share", "evaluation.tasks", "final_tasks",
    "engine_cpus", "engine_gpus", "trainer_cpus", "trainer_gpus", "worker_cpus",
    "stop_from_step", "reference_kl", "mixed_share",
    # Errors of the scripted expert.
    "wrong_operand", "wrong_operator", "skip_step", "give_up", "early_answer", "wrong_answer",
    # A seed, the end of a band, or of a recursion.
    "seed", "ratio_low", "lam", "gamma", "lambda_critic", "spo_rho_min", "teacher.temperature", "judge.temperature",
    # What the virtual clock charges.
    "step_seconds", "token_seconds", "load_seconds", "publish_seconds", "update_seconds",
)  # fmt: skip
"""Ends of the keys for which 0 makes sense."""


def tree_with(key: str, value: float) -> dict:
    first, *rest = key.split(".")
    inner: typing.Any = value
    for name in reversed(rest):
        inner = {name: inner}
    return {first: [inner] if first in LISTS else inner}


def texts_of_errors() -> dict[str, str]:
    """Every text in a `raise` of the source, placeholders as {}, and where it stands."""
    found = {}
    for path in Path(sao.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                for text in ast.walk(node):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        found[text.value] = f"{path.name}:{text.lineno}"
    return found


def complaint(key: str, value: float) -> str:
    """What is said of a configuration with this number, indexes of lists left out; nothing where it is accepted."""
    try:
        from_tree(tree_with(key, value))
    except ConfigError as error:
        return re.sub(r"\b(sft|evaluation_tasks)\.?0\b", r"\1", str(error))
    return ""


@pytest.mark.parametrize("key", NUMBERS)
def test_a_refused_number_is_named_by_its_key(key: str) -> None:
    """Catches a message about `sft.lr` or `engine cost` that sends someone to a key which does not exist."""
    section, _, name = key.rpartition(".")
    texts = {complaint(key, value) for value in (-1, -0.5, float("nan"), float("inf"), 0, 1e300)} - {""}
    assert texts, f"{key} takes anything"
    for text in texts:
        assert re.search(rf"\b{name}\b", text), text
        assert not section or f"{section}." in text or f"[{section}]" in text, text


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_out_of_its_range_is_refused(key: str) -> None:
    """Catches a setting without bounds: a temperature below 0 that every request is refused for, a divisor of 0."""
    assert bool(complaint(key, -1)) != key.endswith(SIGNED)
    assert complaint(key, float("nan"))
    assert complaint(key, float("inf")) or key.endswith("timeout_s")
    if not key.endswith(MAY_BE_ZERO):
        assert complaint(key, 0)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("teacher.temperature=2.5", "teacher.temperature is 2.5; it must lie between 0 and 2"),
        ("teacher.right_reward=0", "teacher.right_reward is 0.0; it must be finite and above 0"),
        ("sft=[{fit={epochs=0}}]", "sft.fit.epochs and sft.fit.steps are 0, so nothing would be fitted"),
        ("value_pretraining.fit.epochs=0", "value_pretraining.fit.steps are 0, so nothing would be fitted"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(override: str, said: str) -> None:
    """Catches a collection that keeps every wrong answer, and a stage that does nothing without a word."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_tree({}, [override])


def test_every_setting_that_an_error_names_exists() -> None:
    """Catches advice to change a setting that was renamed or moved."""
    pattern = re.compile(rf"(?<![\w./])((?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_]+)+)(?![\w{{(])")
    sections = {key.rpartition(".")[0] for key in KEYS}
    named = {name: where for text, where in texts_of_errors().items() for name in pattern.findall(text)}
    files = {name for name in named if name.endswith((".json", ".toml", ".py"))}
    unknown = {name: where for name, where in named.items() if name not in KEYS and name not in sections | files}
    assert not unknown
    assert len(named) > 20
