"""The table over seeds, from what an experiment keeps of its runs."""

import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sao.study.keep import METRICS

SCRIPT = Path(__file__).parents[1] / "experiments" / "run_seeds.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_seeds", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep(folder: Path, means: list[float], variance: float | None = None) -> None:
    """Results of a seed with an evaluation every ten steps."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"step": 10 * index, "stage": "eval"}
        | {f"eval/overall/{name}": mean + shift for name, shift in (("mean", 0.0), ("low", -0.1), ("high", 0.1))}
        for index, mean in enumerate(means)
    ]
    if variance is not None:
        rows.append(
            {"step": 0, "stage": "value_pretraining", "value_pretraining/explained_variance_held_out": variance}
        )
    (folder / METRICS).write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (folder / "environment.json").write_text('{"seconds": 60.4, "core_seconds": 90.0}')


def test_the_table_over_seeds(script: ModuleType, tmp_path: Path) -> None:
    """Would catch a summary that fails on a run with one evaluation or none, or that puts seed 10 before seed 2."""
    keep(tmp_path / "seed-10", [0.4, 0.5, 0.75], variance=0.25)
    keep(tmp_path / "seed-2", [0.5, 0.75])
    keep(tmp_path / "seed-3", [0.5])
    keep(tmp_path / "seed-4", [])
    keep(tmp_path / "seed-5.partial", [0.0, 1.0])
    text = script.summarise(tmp_path, "cmd")
    assert [line for line in text.splitlines() if line.startswith("| ") and "seed" not in line] == [
        "| 2 | 0.500 | 0.750 | +0.250 |  | 60 | 90 |",
        "| 3 | 0.500 | 0.500 |  |  | 60 | 90 |",
        "| 4 |  |  |  |  | 60 | 90 |",
        "| 10 | 0.400 | 0.750 | +0.350 | 0.250 | 60 | 90 |",
    ]
    assert "Gain over 2 seeds: +0.300" in text
    script.draw(tmp_path)
    assert (tmp_path / "evaluation.png").is_file()


def test_two_results_are_compared_seed_by_seed(script: ModuleType, tmp_path: Path) -> None:
    """Would catch a comparison of different seeds, with the wrong sign, or at another level than it says."""
    for seed, (here, there) in enumerate([(0.80, 0.79), (0.70, 0.72), (0.75, 0.71)]):
        keep(tmp_path / "here" / f"seed-{seed}", [0.4, here])
        keep(tmp_path / "there" / f"seed-{seed}", [0.4, there])
    keep(tmp_path / "here" / "seed-3", [0.4, 0.9])
    text = script.compare(tmp_path / "here", tmp_path / "there")
    assert "| 1 | 0.700 | 0.720 | -0.020 |" in text
    # Mean 0.01, deviation 0.03, t(2, 0.95) = 2.920: 0.01 +- 2.920 * 0.03 / sqrt(3).
    assert "Difference over 3 seeds: +0.010, 90 % paired t-interval -0.041 to +0.061." in text
