"""The report of whatever a run has left."""

import re
from pathlib import Path

import numpy as np
import pytest
from run_examples import BATCH, admit, make_run, train_row

from sao.observe.catalogue import PLOTS
from sao.observe.figures import idle, smooth, throughput
from sao.observe.report import write_report
from sao.observe.run_data import read_run
from sao.store.log import RolloutLogWriter
from sao.store.records import Dropped
from sao.store.run_folder import RunFolder


@pytest.fixture
def two_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the text: drawing all figures takes seconds."""
    monkeypatch.setattr("sao.observe.report.PLOTS", PLOTS[:2])


def test_a_whole_run_has_every_figure(tmp_path: Path) -> None:
    """Would catch a figure that silently disappears, and a number of the summary that is wrong."""
    path = make_run(tmp_path / "run", steps=30)
    report = write_report(path)
    text = report.read_text()
    assert report == path / "report" / "report.md"
    assert {file.stem for file in report.parent.glob("*.png")} == {plot.name for plot in PLOTS}
    assert "Not in this report" not in text
    for cell in (
        "configuration | example",
        "training steps | 30",
        "first (step 0) | 0.400 (0.350 to 0.450)",
        "last (step 30) | 0.700 (0.650 to 0.750)",
        "gain | +0.300",
        f"rollouts trained | {30 * BATCH}",
        "tasks dropped | 2",
        "core-seconds | 60",
        "trainer idle, mean | 20%",
        "engine idle, mean | 7%",
        "tokens sampled per second, median | 20",
        "tokens trained per second, median | 16",
        "critic's share of the step time | 67%",
        "critic's memory | 300 MB",
        "over_age | 2",
    ):
        assert cell in text
    # Every link leads to a file, so that the page shows its figures wherever the folder is moved.
    for link in re.findall(r"\]\((.*?)\)", text):
        assert (report.parent / link).is_file()


@pytest.mark.usefixtures("two_figures")
def test_the_page_is_one_file(tmp_path: Path) -> None:
    """Would catch a page that needs the network or the folder beside it, or that runs text of the run as markup."""
    path = make_run(tmp_path / "run", steps=3)
    with RunFolder.resume(path) as run:
        run.write_environment({"command": "sao train <script>alert(1)</script>", "packages": {"torch": "2"}})
    write_report(path)
    page = (path / "report" / "report.html").read_text()
    sources = re.findall(r'src="(.*?)"', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "torch 2" in page


@pytest.mark.parametrize(
    ("settings", "drawn", "missing"),
    [
        ({"steps": 0, "evaluate": False}, set(), {"Reward", "Evaluation", "Throughput"}),
        ({"steps": 2, "critic": False, "evaluate": False}, {"reward", "token_age_histogram"}, {"Explained variance"}),
        ({"steps": 2, "log": False}, {"reward", "evaluation", "critic_cost"}, {"Value calibration"}),
        ({"steps": 1}, {"reward", "value_calibration", "throughput"}, set()),
    ],
)
def test_a_partial_run_says_what_is_missing(
    tmp_path: Path, settings: dict[str, int], drawn: set[str], missing: set[str]
) -> None:
    """Would catch a report that fails on a run of two steps, without critic, evaluation or log."""
    report = write_report(make_run(tmp_path / "run", **settings))
    text = report.read_text()
    assert drawn <= {file.stem for file in report.parent.glob("*.png")}
    for title in missing:
        assert f"- {title}: the run has no data for it yet" in text
        assert f"![{title}]" not in text


@pytest.mark.usefixtures("two_figures")
def test_a_new_report_replaces_the_last(tmp_path: Path) -> None:
    """Would catch a figure of an earlier report that stays and lies; other people's files must stay."""
    path = make_run(tmp_path / "run", steps=2)
    write_report(path)
    (path / "report" / "mine.txt").write_text("kept")
    (path / "metrics.jsonl").write_text("")
    write_report(path)
    assert not (path / "report" / "reward.png").exists()
    assert (path / "report" / "mine.txt").exists()


@pytest.mark.usefixtures("two_figures")
def test_skipped_updates_are_told(tmp_path: Path) -> None:
    """Would catch a report that hides gradients that were not finite."""
    path = make_run(tmp_path / "run", steps=0)
    generator = np.random.default_rng(0)
    with RunFolder.resume(path) as run:
        for step in (1, 2, 3):
            run.write_metrics(train_row(step, generator) | {"actor/skipped": float(step > 1)})
    assert "2 updates of the actor were skipped" in write_report(path).read_text()


@pytest.mark.usefixtures("two_figures")
def test_parts_that_were_replaced_are_told(tmp_path: Path) -> None:
    """Would catch a report that hides deaths: those of steps that a restart repeated, and of before a resume."""
    path = make_run(tmp_path / "run", steps=0)
    generator = np.random.default_rng(0)
    # Step 2 is lost with the trainer, and with it the counters of workers and engine begin anew.
    counts = [(1, 0, 0), (2, 2, 0), (2, 0, 1), (3, 1, 1)]
    with RunFolder.resume(path) as run:
        for step, workers, trainer in counts:
            counted = {"loop/worker_restarts": workers, "loop/trainer_restarts": trainer, "engine/taken_out": 0}
            run.write_metrics(train_row(step, generator) | counted)
    text = write_report(path).read_text()
    assert "A rollout process died or hung, and was replaced, times: 3 (`loop/worker_restarts`)" in text
    assert "went on from its last commit, times: 1 (`loop/trainer_restarts`)" in text
    assert "taken out" not in text


@pytest.mark.usefixtures("two_figures")
def test_drops_are_counted_by_their_kind(tmp_path: Path) -> None:
    """Would catch a row per lost group, which also pushes the other reasons out of the table."""
    path = make_run(tmp_path / "run", steps=2)
    writer = RolloutLogWriter(path / "log", inline=True)
    for index in range(40):
        admit(writer, f"member{index}", 100 + index)
        reason = f"its group lost chain/0/3 {index}:7@1" if index else "its group is incomplete after resume"
        writer.append(Dropped(rollout_id=f"member{index}.0", reason=reason))
    writer.close()
    rows = write_report(path).read_text().partition("| reason of a drop | rollouts |")[2].splitlines()[2:5]
    assert rows == [
        "| its group lost a rollout | 39 |",
        "| over_age | 2 |",
        "| its group is incomplete after resume | 1 |",
    ]


def test_no_run_no_report(tmp_path: Path) -> None:
    """Would catch a report folder made in a folder that is no run."""
    with pytest.raises(ValueError, match="no run folder"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_smoothing_keeps_length_and_level() -> None:
    """Would catch a smoothed line that is shifted, or drawn to 0 at its ends."""
    np.testing.assert_allclose(smooth(np.full(7, 3.0), 5), np.full(7, 3.0))
    np.testing.assert_allclose(smooth(np.array([0.0, 3.0, 6.0, 3.0]), 3), [1.5, 3.0, 4.0, 4.5])
    np.testing.assert_allclose(smooth(np.array([1.0, 2.0]), 1), [1.0, 2.0])


def test_rates_over_a_resume(tmp_path: Path) -> None:
    """Would catch a negative rate where the clock and the engine's counters begin again."""
    path = make_run(tmp_path / "run", steps=2, log=False)
    generator = np.random.default_rng(0)
    with RunFolder.resume(path) as run:
        for step in (3, 4):
            fresh = {"time/clock": 1.5 * (step - 2), "engine/generated_tokens": 30 * (step - 2)}
            run.write_metrics(train_row(step, generator) | fresh | {"engine/busy_seconds": 1.4 * (step - 2)})
    run = read_run(path)
    np.testing.assert_allclose(throughput(run)["sampled"][1], np.full(4, 20.0))
    np.testing.assert_allclose(throughput(run)["trained"][1], np.full(4, 16.0))
    np.testing.assert_allclose(idle(run)["engine"][1], np.full(4, 1 - 1.4 / 1.5))
