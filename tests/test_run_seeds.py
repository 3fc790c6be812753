"""Scripts over what an experiment keeps of its runs."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sao.config import resolve, to_toml
from sao.study.keep import METRICS

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(EXPERIMENTS / "run_seeds.py")


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


def test_seeds_of_other_settings_are_named_and_not_resumed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a run resumed under other settings, and kept ones in a table that says it is of this command."""
    config, results = tmp_path / "config.toml", tmp_path / "the results"
    config.write_text("[loop]\nsteps = 30\n")
    keep(results / "seed-0", [0.5, 0.75])
    (results / "seed-1.run").mkdir()
    for seed, place in enumerate(("seed-0", "seed-1.run")):
        stored = to_toml(resolve(config, [f"seed={seed}", 'tasks.path="a b"']))
        (results / place / "config.toml").write_text(stored)
    ran: list[int] = []

    def run_seed(config: Path, target: Path, seed: int, overrides: list[str]) -> None:
        ran.append(seed)
        (results / "seed-1.run").rename(target)
        keep(target / "kept", [0.5, 0.75])
        for path in (target / "kept").iterdir():
            path.rename(target / path.name)

    monkeypatch.setattr(script, "run_seed", run_seed)

    def main(*more: str) -> str:
        command = ["run_seeds.py", str(config), str(results), "--seeds", "0", "1", "--set", 'tasks.path="a b"', *more]
        monkeypatch.setattr(sys, "argv", command)
        script.main()
        return (results / "summary.md").read_text()

    config.write_text("[loop]\nsteps = 40\n")
    with pytest.raises(SystemExit, match=r"(?s)nothing was run.*seed 1: loop.steps was 30, is 40"):
        main()
    assert not ran
    assert not (results / "summary.md").exists()
    config.write_text("[loop]\nsteps = 30\n")
    same = main()
    assert ran == [1]
    assert "Other settings" not in same
    config.write_text("[loop]\nsteps = 40\n")
    assert "- seed 0: loop.steps was 30, is 40\n- seed 1: loop.steps was 30, is 40" in main()
    assert f"'{results}' --seeds 0 1 --set 'tasks.path=\"a b\"'`" in same


@pytest.mark.parametrize("folder", ["demo", "paper_shape"])
def test_the_simulation_reads_committed_runs(folder: str, tmp_path: Path) -> None:
    """Would catch a comparison with real runs that looks for metrics where none are kept, or that fails far from it."""
    against_real = load(EXPERIMENTS / "simulate" / "against_real.py")
    kept = EXPERIMENTS / folder / "results" / "seed-0"
    real = against_real.read(kept)
    assert [row["step"] for row in real.rows] == list(range(1, real.config["loop"]["steps"] + 1))
    (tmp_path / "config.toml").write_bytes((kept / "config.toml").read_bytes())
    with pytest.raises(FileNotFoundError, match=f"no metrics at {tmp_path / METRICS}"):
        against_real.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(gzip.decompress((kept / METRICS).read_bytes()))
    assert against_real.read(tmp_path) == real
