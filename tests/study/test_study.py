"""The whole machine on a tiny plan: killed and gone on, a failing arm, a changed plan, a report from what is kept."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import Result, refused, sao
from small_runs import small_config

from sao.config import to_toml
from sao.observe.run_data import read_metrics
from sao.study.keep import FAILED, KEPT, METRICS
from sao.study.plan import arm_configs, read_plan
from sao.study.prepare import begin_run
from sao.study.runner import folder_under_way

pytestmark = pytest.mark.timeout(900)

SFT = "sft=[{demonstrations=40, fit={epochs=1, batch_size=8}}]"
BASE = ('tasks.source="chain"', "tasks.chain.max_steps=2", 'environment.name="math_python"', SFT, "sft_threads=1",
        "evaluation.every_steps=2", "evaluation.tasks=6", "loop.steps=4", "loop.checkpoint_every=1",
        "value_pretraining.rollouts=8", "value_pretraining.fit.steps=2")  # fmt: skip
PLAN = """
name = "tiny"
question = "Does the machine work?"
base = "base.toml"
seeds = 2
set = ["loop.batch_size=4"]

[[arms]]
name = "sao"
recipe = "sao"
[[arms]]
name = "mean"
recipe = "running-mean"
[[arms]]
name = "broken"
recipe = "running-mean"
set = ["engine.probe_tolerance=1e-30"]

[[claims]]
id = "first"
text = "A critic is worth something."
better = "sao"
worse = "mean"
paper = "97.3 against 79.8."
[[claims]]
id = "second"
text = "A broken run loses."
better = "mean"
worse = "broken"
measure = "area"
"""


@dataclass(frozen=True)
class Place:
    """Where a study is done."""

    plan: Path
    results: Path
    work: Path

    def words(self, *more: str) -> list[str]:
        return ["study", str(self.plan), "--folder", str(self.results), "--work", str(self.work), *more]

    def parts(self) -> dict[str, float]:
        """Prepared parts, and when they were made."""
        return {path.name: path.stat().st_mtime for path in (self.work / "prepared").glob("*-*") if path.is_dir()}

    def ended(self) -> list[str]:
        return sorted(f"{path.parent.name}/{path.name}" for path in self.results.glob("*/seed-[0-9]"))


@dataclass(frozen=True)
class Done:
    """A study that was killed outright, and gone on with to its end."""

    place: Place
    before: list[str]
    parts_before: dict[str, float]
    last: Result


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("study")
    base = small_config(*BASE)
    (folder / "base.toml").write_text(to_toml(base))
    (folder / "plan.toml").write_text(PLAN)
    place = Place(folder / "plan.toml", folder / "results", folder / "work")
    with (folder / "first.out").open("w") as out:
        first = subprocess.Popen([sys.executable, "-m", "sao.cli", *place.words()], stdout=out, stderr=out)
        while not place.ended() and first.poll() is None:
            time.sleep(0.1)
        assert first.poll() is None, (folder / "first.out").read_text()
        first.send_signal(signal.SIGKILL)
        first.wait()
    before, parts = place.ended(), place.parts()
    # A kill between keeping a run and deleting its folder leaves the folder, weights and all.
    arm, seed = before[-1].split("/seed-")
    config = arm_configs(read_plan(place.plan), place.plan)[arm, int(seed)]
    left = folder_under_way(place.work, arm, int(seed), config)
    left.mkdir(parents=True, exist_ok=True)
    (left / "model.safetensors").write_text("weights")
    return Done(place, before, parts, sao(*place.words()))


def test_a_killed_study_goes_on(done: Done) -> None:
    """Catches finished runs that are done again, a killed one that is lost or counts twice, and weights that stay."""
    assert done.last.code == 0, done.last
    assert 0 < len(done.before) < 6
    assert f"{4 - len([name for name in done.before if 'broken' not in name])} runs ended" in done.last.out
    everything = [f"{arm}/seed-{seed}" for arm in ("broken", "mean", "sao") for seed in (0, 1)]
    assert done.place.ended() == everything
    for name in everything[2:]:
        kept = done.place.results / name
        assert sorted(path.name for path in kept.iterdir()) == sorted(KEPT)
        rows = read_metrics(kept / METRICS).rows
        assert {row["step"] for row in rows if row["stage"] == "train"} == {1, 2, 3, 4}
        assert json.loads((kept / "environment.json").read_text())["core_seconds"] > 0
    assert not [*done.place.work.glob("runs/sao/*"), *done.place.work.glob("runs/mean/*")]
    assert not list(done.place.results.glob("**/*.safetensors"))


def test_arms_of_a_seed_share_what_they_start_from(done: Done) -> None:
    """Catches a policy fine-tuned again for each arm, which costs hours, and parts that a kill made void."""
    parts = done.place.parts()
    assert sorted(name.split("-")[0] for name in parts) == ["rollouts", "rollouts", "sft", "sft"]
    assert done.parts_before.items() <= parts.items()
    starts = {}
    for name in ("sao", "mean"):
        for seed in (0, 1):
            first = read_metrics(done.place.results / name / f"seed-{seed}" / METRICS).stage("eval")[0]
            assert first["step"] == 0
            starts[name, seed] = first["eval/overall/mean"]
    assert starts["sao", 0] == starts["mean", 0]
    assert starts["sao", 1] == starts["mean", 1]


def test_a_kept_run_is_the_run_of_its_configuration(done: Done, tmp_path: Path) -> None:
    """Catches shared parts that change a run: its configuration alone must give the same numbers."""
    kept = done.place.results / "sao" / "seed-1"
    result = sao("train", kept / "config.toml", "--folder", tmp_path / "run")
    assert result.code == 0, result

    def numbers(path: Path) -> list[float]:
        rows = read_metrics(path).stage("train")
        return [row[key] for row in rows for key in ("actor/entropy", "rollout/action_tokens", "critic/value_mean")]

    assert len(numbers(kept / METRICS)) == 12
    assert numbers(kept / METRICS) == pytest.approx(numbers(tmp_path / "run" / "metrics.jsonl"), rel=1e-4)
    assert str(done.place.work.parent) not in (kept / "config.toml").read_text()


def test_a_failed_run_is_a_row_with_its_reason(done: Done) -> None:
    """Catches a gap in the tables, a failure that is silently repeated, and a verdict without it."""
    for seed in (0, 1):
        failed = done.place.results / "broken" / f"seed-{seed}"
        told = (failed / FAILED).read_text()
        assert told.startswith("exit code 2")
        assert "fails its probe" in told
        assert tomllib.loads((failed / "config.toml").read_text())["engine"]["probe_tolerance"] == 1e-30
    readme = (done.place.results / "README.md").read_text()
    assert "6 of 6 runs have ended, 2 of them failed." in readme
    assert "## Runs that failed" in readme
    assert "### second: undecided" in readme
    assert "Undecided: broken, seed 0 failed; broken, seed 1 failed" in readme
    assert "0 runs ended, 0 failed" in sao(*done.place.words()).out


def test_the_report(done: Done) -> None:
    """Catches a report without its question, command, claims, arms, figures, or what the paper says."""
    readme = (done.place.results / "README.md").read_text()
    told = ("Does the machine work?", "Made by `sao study ", "sao minus mean, last evaluation: ", "97.5% interval")
    told += ("97.3 against 79.8", "| sao | 2 of 2 |", "| broken | 0 of 2 |", "equal_samples.png", "equal_time.png")
    assert [text for text in told if text not in readme] == []
    assert readme.index("### second") < readme.index("### first") or "### first: undecided" in readme
    assert all((done.place.results / name).is_file() for name in ("equal_samples.png", "equal_time.png"))


def test_the_report_needs_only_what_is_kept(done: Done, tmp_path: Path) -> None:
    """Catches a report that reads weights, logs, or the work folder."""
    shutil.copytree(done.place.plan.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("work", "*.md", "*.png"))
    before = (done.place.results / "README.md").read_text()
    result = sao("study", tmp_path / "copy" / "plan.toml", "--folder", tmp_path / "copy" / "results", "--report")
    assert result.code == 0, result
    after = (tmp_path / "copy" / "results" / "README.md").read_text()

    def body(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("Made by")]

    assert body(after) == body(before)


def test_a_slice_runs_one_arm_and_decides_nothing(done: Done, tmp_path: Path) -> None:
    """Catches a verdict before all planned seeds are there, and --hours that starts what cannot end in time."""
    for name in ("plan.toml", "base.toml"):
        shutil.copy(done.place.plan.parent / name, tmp_path / name)
    shutil.copytree(done.place.results / "sao" / "seed-0", tmp_path / "results" / "sao" / "seed-0")
    place = Place(tmp_path / "plan.toml", tmp_path / "results", tmp_path / "work")
    result = sao(*place.words("--hours", "0"))
    assert "0 runs ended, 0 failed; 5 are left for the next call" in result.out
    assert "first: not yet. 0 of 2 pairs are there" in result.out
    readme = (place.results / "README.md").read_text()
    assert "so nothing is decided yet" in readme
    assert "| **not yet** | A critic is worth something. |" in readme
    assert "minus" not in readme
    assert "did you mean 'mean'" in refused(*place.words("--only", "means"))


def test_a_changed_plan_lists_what_no_longer_matches(done: Done, tmp_path: Path) -> None:
    """Catches runs of two plans in one table, and results that are deleted for it."""
    shutil.copy(done.place.plan.parent / "base.toml", tmp_path / "base.toml")
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace('recipe = "sao"', 'recipe = "sao"\nset = ["trainer.critic_updates=3"]', 1))
    before = done.place.ended()
    said = refused("study", plan, "--folder", done.place.results, "--work", tmp_path / "work")
    assert "2 runs in" in said
    assert "sao, seed 0: trainer.critic_updates was 2, is 3" in said
    assert "mean, seed" not in said
    assert done.place.ended() == before
    assert not (tmp_path / "work").exists()


def test_arms_that_did_not_start_alike_are_not_paired(done: Done, tmp_path: Path) -> None:
    """Catches a policy fine-tuned again after its work folder was lost, that the other arms of the seed never had."""
    shutil.copytree(done.place.plan.parent, tmp_path / "copy")
    copy = tmp_path / "copy"
    place = Place(copy / "plan.toml", copy / "results", copy / "work")
    told = place.results / "sao" / "seed-1" / "environment.json"
    environment = json.loads(told.read_text())
    part = next(name for name in environment["started_from"] if name.startswith("sft"))
    told.write_text(json.dumps(environment | {"started_from": {part: "another"}}))

    said = refused(*place.words("--report"))
    assert f"did not start from the same {part}" in said
    assert "  sao seed 1\n" in said
    assert "  mean seed 1" in said

    shutil.rmtree(place.results / "mean" / "seed-1")
    said = refused(*place.words())
    assert f"mean seed 1 would start from another {part} than the kept sao seed 1" in said
    assert "out of" in said


def test_what_a_kill_left_is_not_trained_on(done: Done, tmp_path: Path) -> None:
    """Catches a killed run that goes on with rollouts of weights that are no more, and one that passes its end."""
    shutil.copytree(done.place.plan.parent, tmp_path / "copy")
    copy = tmp_path / "copy"
    place = Place(copy / "plan.toml", copy / "results", copy / "work")
    configs = arm_configs(read_plan(place.plan), place.plan)
    before = read_metrics(place.results / "sao" / "seed-0" / METRICS).stage("train")
    row = {"step": 1, "stage": "train", "made/up": 1.0}
    for seed, events in ((0, "resumed at step 0"), (1, "resumed at step 0\n1 2 ended at step 1: collapsed")):
        shutil.rmtree(place.results / "sao" / f"seed-{seed}")
        folder = folder_under_way(place.work, "sao", seed, configs["sao", seed])
        begin_run(configs["sao", seed], folder, place.work / "prepared", ["sao", "study"])
        told = folder / "environment.json"
        told.write_text(json.dumps(json.loads(told.read_text()) | {"starts": 1}))
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "events.log").write_text(f"1 2 {events}\n")

    result = sao(*place.words("--only", "sao"))
    assert "2 runs ended, 0 failed" in result.out, result
    killed, ended = (read_metrics(place.results / "sao" / f"seed-{seed}" / METRICS).stage("train") for seed in (0, 1))
    assert [each["actor/entropy"] for each in killed] == [each["actor/entropy"] for each in before]
    assert list(ended) == [row]
    environment = json.loads((place.results / "sao" / "seed-0" / "environment.json").read_text())
    assert environment["starts"] == 1


def test_failed_runs_are_repeated_when_asked_to(done: Done) -> None:
    """Catches --again that does nothing, or that loses the row of a run which fails again."""
    told = done.place.results / "broken" / "seed-0" / FAILED
    told.write_text("as before\n")
    os.utime(told, (1, 1))
    result = sao(*done.place.words("--again", "--only", "broken"))
    assert "0 runs ended, 2 failed" in result.out
    assert "as before" not in told.read_text()
    assert len(done.place.ended()) == 6


def test_quick_stands_for_a_plan() -> None:
    """Catches --quick that is ignored beside a plan, and a command without either."""
    assert "--quick stands for experiments" in refused("study", "plan.toml", "--quick")
    assert "name a plan, or --quick" in refused("study")
