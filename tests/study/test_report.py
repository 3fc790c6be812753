"""Measures, pairs and reports, from results that are written by hand."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import small_config

from sao.config import RunConfig, to_toml
from sao.observe.run_data import read_metrics
from sao.study.caveats import caveat_lines
from sao.study.claims import AREA, FINAL, Against, Claim, Curve, Line, Measure, OverSteps
from sao.study.figures import _binned
from sao.study.keep import FAILED, METRICS
from sao.study.plan import Arm, Plan
from sao.study.prepare import parts_of
from sao.study.report import write_study_report
from sao.study.results import mismatches, pair, read_results, require_match, run_folder
from sao.study.verdicts import findings

STEPS = 40


def keep(
    folder: Path, arm: str, seed: int, means: list[float], *, steps: int = STEPS, config: RunConfig | None = None
) -> Path:
    """Results of a run that was evaluated every ten steps, each of which took half a second."""
    place = run_folder(folder, arm, seed)
    place.mkdir(parents=True)
    (place / "config.toml").write_text(to_toml(config or config_of(seed)))
    rows = [{"step": 10 * n, "stage": "eval", "eval/overall/mean": mean} for n, mean in enumerate(means)]
    for step in range(1, steps + 1):
        masked = {"actor/masked_low_share": 0.01, "actor/masked_high_share": 0.0}
        rows.append({"step": step, "stage": "train", "time/clock": step / 2, "age/mean": float(step), **masked})
    write_rows(place, rows)
    (place / "environment.json").write_text('{"seconds": 60.4, "core_seconds": 90.0}')
    return place


def write_rows(place: Path, rows: list[dict[str, Any]]) -> None:
    (place / METRICS).write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def config_of(seed: int) -> RunConfig:
    return small_config(
        f"loop.steps={STEPS}", f"seed={seed}", "evaluation.every_steps=10", "evaluation.stop_below=0.05"
    )


def plan_of(*claims: Claim, seeds: int = 3) -> Plan:
    arms = tuple(Arm(name=name) for name in ("a", "b", "c"))
    return Plan(name="hand", question="Which?", arms=arms, claims=claims, seeds=seeds)


def claim(id: str, better: str, worse: str, **more: object) -> Claim:
    return Claim(id=id, text=f"{better} beats {worse}.", better=better, worse=worse, **more)  # type: ignore[arg-type]


def configs_of(plan: Plan) -> dict[tuple[str, int], RunConfig]:
    return {(arm.name, seed): config_of(seed) for arm, seed in plan.runs()}


def test_measures_by_hand(tmp_path: Path) -> None:
    """Catches an area over evaluations and not over steps, and a collapsed run that is scored until its end only."""
    keep(tmp_path, "a", 0, [0.0, 0.5, 0.5, 0.5, 1.0])
    keep(tmp_path, "b", 0, [0.5, 0.5, 0.0], steps=20)
    results = read_results(plan_of(), tmp_path)
    whole, fallen = results["a", 0], results["b", 0]
    assert whole.measure(FINAL) == 1.0
    assert whole.measure(AREA) == pytest.approx((0.25 + 0.5 + 0.5 + 0.75) / 4)
    assert whole.measure(Measure(name="clock", key="time/clock")) == 20.0
    assert whole.measure(Measure(name="loss", key="critic/loss")) is None
    assert (whole.collapsed, fallen.collapsed) == (False, True)
    assert fallen.measure(AREA) == pytest.approx((0.5 + 0.25) / 4)
    assert fallen.curve()[0].tolist() == [0, 10, 20, 30, 40]
    assert fallen.seconds_at(np.array([0.0, 10.0, 40.0])).tolist() == [0.0, 5.0, 20.0]
    assert whole.later_mean("age/mean") == pytest.approx(np.mean(range(21, 41)))
    assert whole.later_mean("actor/masked_low_share", "actor/masked_high_share") == pytest.approx(0.01)
    assert whole.later_mean("critic/explained_variance") is None


def test_measures_of_windows_and_of_time_by_hand(tmp_path: Path) -> None:
    """Catches a window that lacks its ends or ended before them, and a time that is read at rows and not between."""
    keep(tmp_path, "a", 0, [0.0, 0.4, 0.8, 0.6, 1.0])
    keep(tmp_path, "b", 0, [0.5, 0.5, 0.0], steps=20)
    results = read_results(plan_of(), tmp_path)
    whole, fallen = results["a", 0], results["b", 0]
    age = Measure(name="age", of="mean", key="age/mean", steps=((3, 4), (11, 12)))
    assert whole.measure(age) == pytest.approx((3 + 4 + 11 + 12) / 4)
    assert fallen.measure(age) == whole.measure(age)
    late = Measure(name="late", of="mean", key="age/mean", steps=((11, 21),))
    assert (whole.measure(late), fallen.measure(late)) == (16.0, None)
    settled = Measure(name="settled", of="mean", steps=((20, 40),))
    assert whole.measure(settled) == pytest.approx((0.8 + 0.6 + 1.0) / 3)
    assert fallen.measure(settled) == 0.0

    def seconds_to(reach: float) -> Measure:
        return Measure(name="time", of="seconds_to", reach=reach)

    assert whole.measure(seconds_to(0.6)) == pytest.approx(15 / 2)
    assert whole.measure(seconds_to(0.9)) == pytest.approx((30 + 10 * 0.3 / 0.4) / 2)
    assert (whole.measure(seconds_to(0.0)), fallen.measure(seconds_to(0.5))) == (0.0, 0.0)
    assert fallen.measure(seconds_to(0.6)) == 20.0
    assert (whole.reached(seconds_to(0.6)), fallen.reached(seconds_to(0.6))) == (True, False)


def test_a_mean_has_every_planned_evaluation(tmp_path: Path) -> None:
    """Catches runs that are compared over different steps, for evaluations were lost."""
    place = keep(tmp_path, "a", 0, [0.0, 0.2, 0.4, 0.8, 1.0])
    rows = list(read_metrics(place / METRICS).rows)
    write_rows(place, [row for row in rows if row["stage"] != "eval" or row["step"] not in (20, 30)])
    run = read_results(plan_of(), tmp_path)["a", 0]
    assert run.lost_evaluations == [20, 30]
    # Straight from 0.2 to 1.0: 0.2 + 0.8 / 3 and 0.2 + 1.6 / 3.
    assert run.measure(Measure(name="late", of="mean", steps=((20, 40),))) == pytest.approx((0.4 + 2.4 / 3 + 1.0) / 3)
    assert run.measure(Measure(name="one", of="mean", steps=((30, 30),))) == pytest.approx(0.2 + 1.6 / 3)
    text = "\n".join(caveat_lines({("a", 0): run}))
    assert "Evaluations that are missing, whose place a straight line takes, by step: a seed 0: 20, 30." in text


def test_a_metric_that_ends_in_null_keeps_its_run(tmp_path: Path) -> None:
    """Catches a mean without the runs that solved, or lost, a whole last batch: explained variance is null there."""
    place = keep(tmp_path, "a", 0, [0.0, 1.0])
    rows = list(read_metrics(place / METRICS).rows)
    for row in rows:
        if row["stage"] == "train":
            row["critic/explained_variance"] = None if row["step"] > 38 else float(row["step"])
    write_rows(place, rows)
    run = read_results(plan_of(), tmp_path)["a", 0]
    explained = Measure(name="explained", of="mean", key="critic/explained_variance", steps=((35, 40),))
    assert run.measure(explained) == pytest.approx((35 + 36 + 37 + 38) / 4)


def test_a_run_whose_tasks_ended_has_failed(tmp_path: Path) -> None:
    """Catches a run out of tasks that counts as collapsed, at its last value, where the plan has no such rule."""
    config = small_config(f"loop.steps={STEPS}", "evaluation.every_steps=10")
    keep(tmp_path, "a", 0, [0.0, 0.5], steps=10, config=config)
    keep(tmp_path, "b", 0, [0.0, 0.5], config=config)
    results = read_results(plan_of(), tmp_path)
    assert results["a", 0].failure == f"its tasks ended at step 10 of {STEPS}"
    assert not results["a", 0].collapsed
    assert pair(plan_of(seeds=2), claim("x", "b", "a"), results).lost == ("a, seed 0 failed",)


def test_what_else_differs_is_told(tmp_path: Path) -> None:
    """Catches arms of other code or another processor in one pair, and stopped runs, of which nobody hears."""
    told = [
        ("a", 0, {"commit": "1" * 40, "processor": "P", "starts": 1}),
        ("b", 0, {"commit": "1" * 40 + "+", "processor": "P", "starts": 2}),
        ("a", 1, {"commit": "1" * 40, "processor": "P"}),
        ("b", 1, {"commit": "2" * 40, "processor": "P"}),
    ]
    for arm, seed, environment in told:
        place = keep(tmp_path, arm, seed, [0.0, 0.1, 0.2, 0.3, 0.4])
        (place / "environment.json").write_text(json.dumps(environment))
    plan = replace(plan_of(seeds=2), arms=(Arm(name="a"), Arm(name="b")))
    write_study_report(plan, configs_of(plan), tmp_path, "sao study hand.toml")
    text = (tmp_path / "README.md").read_text()
    assert "- Seed 1 was not run on one commit: 111111111111 (a); 222222222222 (b)." in text
    assert "- Stopped and gone on with, so that what was in flight was played again: b seed 0." in text
    assert "Seed 0 was not" not in text
    assert "processor" not in text
    assert "missing" not in text


def test_a_clock_that_a_resume_began_again_goes_on(tmp_path: Path) -> None:
    """Catches times of a stopped run that lack what came before the stop."""
    place = keep(tmp_path, "a", 0, [0.0, 0.4, 0.8])
    rows = list(read_metrics(place / METRICS).rows)
    for row in rows:
        if row["stage"] == "train" and row["step"] > 15:
            row["time/clock"] -= 15 / 2
    write_rows(place, rows)
    run = read_results(plan_of(), tmp_path)["a", 0]
    assert run.seconds_at(np.array([10.0, 16.0, 40.0])).tolist() == [5.0, 8.0, 20.0]
    assert run.measure(Measure(name="clock", key="time/clock")) == 20.0
    assert run.measure(Measure(name="time", of="seconds_to", reach=0.8)) == 10.0


def test_an_evaluation_before_the_first_step_is_that_of_its_policy(tmp_path: Path) -> None:
    """Catches a gain that is counted from step 20, and a start that is taken from another seed or other tasks."""

    def config(seed: int, *changes: str) -> RunConfig:
        return small_config(*CHAIN, f"loop.steps={STEPS}", f"seed={seed}", *changes)

    keep(tmp_path, "a", 0, [0.25, 0.5], config=config(0))
    keep(tmp_path, "a", 1, [0.75, 0.5], config=config(1))
    for arm, seed, changes in (("b", 1, ()), ("b", 0, ("evaluation.seed=3",))):
        place = keep(tmp_path, arm, seed, [0.0, 0.5], config=config(seed, *changes))
        write_rows(place, list(read_metrics(place / METRICS).rows[1:]))
    results = read_results(plan_of(), tmp_path)
    steps, means = results["b", 1].curve()
    assert (steps.tolist(), means.tolist()) == ([0.0, 10.0], [0.75, 0.5])
    assert results["b", 0].curve()[0].tolist() == [10.0]
    assert results["b", 0].measure(AREA) is None


def test_differences_from_one_arm(tmp_path: Path) -> None:
    """Catches a table with the wrong sign, and one that pairs seeds which are not there in both."""
    for seed in range(2):
        keep(tmp_path, "a", seed, [0.0, 0.5])
        keep(tmp_path, "b", seed, [0.0, 0.75 + 0.125 * seed])
    keep(tmp_path, "c", 1, [0.0, 0.25])
    plan = replace(plan_of(seeds=2), against=(Against(arm="a"), Against(arm="b", measure="area", arms=("a",))))
    write_study_report(plan, configs_of(plan), tmp_path, "sao study hand.toml")
    text = (tmp_path / "README.md").read_text()
    assert "| last evaluation, minus `a` | difference | pairs | by seed |" in text
    assert "| b | +0.312 (-0.482 to +1.107) | 2 | +0.250, +0.375 |" in text
    assert "| c | -0.250 | 1 | -0.250 |" in text
    assert "| mean height of the evaluation curve, minus `b` |" in text


def test_curves_over_a_setting(tmp_path: Path) -> None:
    """Catches places in the order of their names, a run without the measure counted, and an arm on a wrong place."""
    bounds = {"a": 10, "b": 2, "c": 0}
    for seed in range(2):
        for arm, end in (("a", 0.8), ("b", 0.6), ("c", 0.4 + 0.2 * seed)):
            keep(tmp_path, arm, seed, [0.0, end])
    plan = replace(
        plan_of(seeds=2),
        claims=(claim("fast", "a", "b", measure="half", kind="less"),),
        measures=(Measure(name="half", text="seconds to 0.5", of="seconds_to", reach=0.5),),
        curves=(
            Curve(
                id="bound", text="What the bound does.", x="loop.max_batches_ahead", measures=("final", "half"),
                lines=(Line(label="all", arms=("a", "b", "c")),),
            ),
        ),
    )  # fmt: skip
    configs = {
        (arm.name, seed): small_config(f"loop.max_batches_ahead={bounds[arm.name]}") for arm, seed in plan.runs()
    }
    (found,) = write_study_report(plan, configs, tmp_path, "sao study hand.toml")
    text = (tmp_path / "README.md").read_text()
    rows = [line for line in text.splitlines() if "| all |" in line]
    assert rows == [
        "| 0 | all | c | 2 | 0.500 (-0.771 to 1.771) | 12.083 (-88.507 to 112.674) (1 of 2 got there) |",
        "| 2 | all | b | 2 | 0.600 (0.600 to 0.600) | 4.167 (4.167 to 4.167) |",
        "| 10 | all | a | 2 | 0.800 (0.800 to 0.800) | 3.125 (3.125 to 3.125) |",
    ]
    assert (tmp_path / "bound.png").stat().st_size > 1000
    assert found.verdict == "holds"
    assert "a minus b, seconds to 0.5: -1.042" in text
    assert "The difference is below 0." in text


def test_a_metric_over_the_steps(tmp_path: Path) -> None:
    """Catches a figure over no run, a bin that mixes steps, and a short run whose empty bins are zeros."""
    plan = replace(
        plan_of(seeds=2),
        over_steps=(
            OverSteps(id="masked", text="Masked.", keys=("actor/masked_low_share", "age/mean"), arms=("a", "b")),
            OverSteps(id="none", text="Nothing.", keys=("critic/loss",), arms=("a",)),
        ),
    )
    for seed in range(2):
        keep(tmp_path, "a", seed, [0.0, 0.5])
        keep(tmp_path, "b", seed, [0.0, 0.0], steps=10)
        keep(tmp_path, "c", seed, [0.0, 0.5])
    write_study_report(plan, configs_of(plan), tmp_path, "sao study hand.toml")
    text = (tmp_path / "README.md").read_text()
    assert "![Masked.](masked.png)" in text
    assert "Nothing. No run has it yet." in text
    assert (tmp_path / "masked.png").is_file()
    assert not (tmp_path / "none.png").exists()
    edges = np.array([0.5, 2.5, 4.5, 6.5])
    assert _binned(edges, np.array([1.0, 2.0, 6.0, 9.0]), np.array([1.0, 3.0, 8.0, 100.0])).tolist() == [2.0, 5.0, 8.0]


def test_pairs_are_of_one_seed(tmp_path: Path) -> None:
    """Catches runs of different seeds in a pair, the wrong sign, and a run that failed as one that is still to come."""
    for seed, (a, b) in enumerate([(0.5, 0.25), (0.75, 0.25)]):
        keep(tmp_path, "b", seed, [0.0, b])
        keep(tmp_path, "a", seed, [0.0, a])
    (keep(tmp_path, "c", 0, [0.0, 0.125]) / FAILED).write_text("exit code 2\nwhy\n")
    plan = plan_of(claim("one", "a", "b"), claim("two", "c", "a"))
    results = read_results(plan, tmp_path)
    one, two = (pair(plan, each, results) for each in plan.claims)
    assert (one.differences, one.missing, one.lost) == ((0.25, 0.5), 1, ())
    assert (two.differences, two.missing, two.lost) == ((), 2, ("c, seed 0 failed",))
    assert [finding.verdict for finding in findings(plan, results)] == ["not yet", "not yet"]


def test_what_did_not_reproduce_comes_first(tmp_path: Path) -> None:
    """Catches a report that opens with what went well, and a verdict that its own interval does not carry."""
    for seed in range(3):
        keep(tmp_path, "a", seed, [0.25, 0.80 + 0.01 * seed])
        keep(tmp_path, "b", seed, [0.25, 0.50 + 0.02 * seed])
        keep(tmp_path, "c", seed, [0.25, 0.50 + 0.20 * (seed - 1)])
    plan = plan_of(
        claim("above", "a", "b", paper="97.3 against 79.8."),
        claim("open", "c", "b"),
        claim("wrong", "b", "a"),
        claim("alike", "a", "b", kind="equivalent", margin=0.5),
    )
    found = write_study_report(plan, configs_of(plan), tmp_path, "sao study hand.toml")
    assert [(finding.claim.id, finding.verdict) for finding in found] == [
        ("wrong", "does not hold"), ("open", "undecided"), ("above", "holds"), ("alike", "holds"),
    ]  # fmt: skip
    text = (tmp_path / "README.md").read_text()
    places = [text.index(f"### {finding.claim.id}: {finding.verdict}") for finding in found]
    assert places == sorted(places)
    assert "b minus a, last evaluation: -0.290, " in text
    assert "The difference is below 0: the claim is contradicted." in text
    assert "By seed: -0.300, -0.290, -0.280." in text
    assert "The paper: 97.3 against 79.8." in text
    assert "| a | 3 of 3 | 0.810 (0.785 to 0.835) | +0.560 (+0.535 to +0.585) |" in text
    assert "9 of 9 runs have ended." in text


def test_tables_hold_complete_seeds_only(tmp_path: Path) -> None:
    """Catches an arm that is shown over more seeds than another, and a failed run without its row."""
    for seed in range(2):
        keep(tmp_path, "a", seed, [0.0, 0.5])
        keep(tmp_path, "b", seed, [0.0, 0.5])
    (keep(tmp_path, "c", 0, [0.0]) / FAILED).write_text("exit code 2\nerror: a | b\n")
    plan = plan_of(claim("one", "a", "b"))
    write_study_report(plan, configs_of(plan), tmp_path, "sao study hand.toml")
    text = (tmp_path / "README.md").read_text()
    assert "5 of 9 runs have ended, 1 of them failed." in text
    assert "| a | 1 of 3 | 0.500 | +0.500 |" in text
    assert "| c | 0 of 3 |" in text
    assert r"| c | 0 | 40 | error: a \| b |" in text
    assert "nothing is decided yet" in text


def test_a_report_on_nothing(tmp_path: Path) -> None:
    """Catches a report that needs a run."""
    plan = plan_of(claim("one", "a", "b"))
    write_study_report(plan, configs_of(plan), tmp_path / "new", "sao study hand.toml")
    assert "0 of 9 runs have ended." in (tmp_path / "new" / "README.md").read_text()


def test_kept_runs_are_compared_by_their_values(tmp_path: Path) -> None:
    """Catches a setting that came new, at its default, taken for a change, and a real change passed over."""
    plan = plan_of()
    place = keep(tmp_path, "a", 0, [0.0])
    assert mismatches(configs_of(plan), tmp_path) == []
    text = (place / "config.toml").read_text()
    (place / "config.toml").write_text(text.replace("stop_from_step = 0\n", ""))
    require_match(configs_of(plan), tmp_path)
    (place / "config.toml").write_text(text.replace("batch_size = 6\n", "batch_size = 12\n", 1))
    assert mismatches(configs_of(plan), tmp_path) == ["a, seed 0: loop.batch_size was 12, is 6"]
    (place / "config.toml").write_text(text + "\n[gone]\nx = 1\n")
    with pytest.raises(ValueError, match=r"(?s)1 runs in .*a, seed 0: its configuration cannot be read: .*gone"):
        require_match(configs_of(plan), tmp_path)


CHAIN = ('tasks.source="chain"', 'environment.name="math_python"', "sft=[{demonstrations=40}]")


def test_parts_are_shared_by_what_they_depend_on() -> None:
    """Catches a policy of another seed or task that is shared, and one that is made again for another method."""

    def names(*changes: str) -> list[str]:
        return [part.name for part in parts_of(small_config(*CHAIN, "value_pretraining.rollouts=8", *changes))]

    sft, rollouts = names()
    assert (sft[:4], rollouts[:9]) == ("sft-", "rollouts-")
    alike = ("algorithm.alpha=1.0", "trainer.critic_updates=1", "loop.steps=9", "name=other", "evaluation.tasks=3")
    alike += ("value_pretraining.fit.lr=1e-3", "loop.max_batches_ahead=9", "trainer_cost.update_seconds=1.0")
    assert names(*alike) == [sft, rollouts]
    assert names("environment.math_python.latency.median_s=0.5")[0] == sft
    for change in (
        "environment.math_python.latency.median_s=0.5",
        "value_pretraining.rollouts=9",
        "rollout.max_turns=4",
    ):
        assert names(change)[1] != rollouts
    for change in ("seed=1", "tasks.chain.max_steps=3", "model.hidden_size=48", "sft.0.fit.lr=1e-3", "tasks.limit=7"):
        assert names(change)[0] != sft
        assert names(change)[1] != rollouts
    without = parts_of(replace(small_config(*CHAIN), value_pretraining=None))
    assert [part.name for part in without] == [sft]
    assert parts_of(small_config()) == []


def test_a_run_that_never_gets_there_is_not_the_faster(tmp_path: Path) -> None:
    """Catches a short run that misses the value beating a long one that reaches it, and two misses that differ."""
    half = Measure(name="half", of="seconds_to", reach=0.5)
    keep(tmp_path, "a", 0, [0.0, 0.25])
    keep(tmp_path, "a", 1, [0.0, 0.25])
    slow = keep(tmp_path, "b", 0, [0.0, 0.0, 0.0, 0.0, 0.5])
    keep(tmp_path, "b", 1, [0.0, 0.25])
    rows = list(read_metrics(slow / METRICS).rows)
    for row in rows:
        if row["stage"] == "train":
            row["time/clock"] *= 3
    write_rows(slow, rows)
    claims = (claim("fast", "a", "b", measure="half", kind="less"),)
    plan = replace(plan_of(seeds=2), claims=claims, measures=(half,))
    found = pair(plan, plan.claims[0], read_results(plan, tmp_path))
    assert found.differences == (0.0, 0.0)
    assert found.lost == ()


def test_a_collapsed_run_is_scored_at_every_evaluation_that_it_lacks(tmp_path: Path) -> None:
    """Catches a mean in which the time after a collapse counts as one evaluation."""
    keep(tmp_path, "a", 0, [0.5, 0.5, 0.0], steps=20)
    run = read_results(plan_of(), tmp_path)["a", 0]
    assert run.measure(Measure(name="late", of="mean", steps=((10, 40),))) == pytest.approx(0.5 / 4)
    assert run.measure(Measure(name="last", of="mean", steps=((30, 30),))) == 0.0
