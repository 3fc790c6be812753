"""Every metric key of the source stands on its page, and the page names no key that is gone."""

import re
from pathlib import Path

import sao
from sao.algorithm.diagnostics import PolicyDiagnostics
from sao.pipeline.accounts import Accounts
from sao.training import fitting
from sao.training.sft import SftConfig
from sao.training.value_pretraining import ValuePretrainingConfig

STAGES = "rollout|age|actor|critic|time|cpu|engine|loop|memory|sft|value_pretraining|eval"
SOURCE = {path: path.read_text() for path in Path(sao.__file__).parent.rglob("*.py")}
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    return set(re.findall(rf"^\| `((?:{STAGES})/[^`]+)` \|", PAGE.read_text(), flags=re.MULTILINE))


def literals() -> dict[str, str]:
    """Keys written out in the source, and the file of each."""
    pattern = re.compile(rf"""["']((?:{STAGES})/[a-z0-9_]+)["']""")
    return {key: path.name for path, text in SOURCE.items() for key in pattern.findall(text)}


def test_every_key_of_the_source_is_documented() -> None:
    """Would catch a metric that nobody can read because its meaning stands nowhere."""
    missing = {key: file for key, file in literals().items() if key not in documented()}
    assert not missing, f"not in docs/metrics.md: {missing}"


def test_keys_put_together_from_names_are_documented() -> None:
    """Would catch a counter or a diagnostic that got a key without being written out."""
    one = PolicyDiagnostics(tokens=1.0, ratio_sum=1.0, ratio_square_sum=1.0)
    keys = {f"loop/{name}" for name in Accounts.NAMES} | {f"actor/{name}" for name in one.summary()}
    every_fit = re.findall(r'f"{stage}/([a-z_]+)"', Path(fitting.__file__).read_text())
    assert len(every_fit) == 3
    keys |= {f"{config.stage}/{name}" for config in (SftConfig, ValuePretrainingConfig) for name in every_fit}
    assert keys <= documented()


def test_the_page_names_no_key_that_is_gone() -> None:
    """Would catch documentation of a metric that was renamed."""
    everything = "\n".join(text for path, text in SOURCE.items() if "observe" not in path.parts)
    for key in documented():
        name = "pass_at_" if key.endswith("/pass_at_k") else key.rpartition("/")[2]
        assert re.search(rf"""["'/]{re.escape(name)}\b|{name}{{""", everything), f"{key} is not in the source"
    assert len(documented()) > 70
