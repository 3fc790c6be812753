"""Series of a run, after resumes and with damage."""

from pathlib import Path

import numpy as np
import pytest
from run_examples import BATCH, eval_row, make_run

from sao.observe.run_data import increments, read_metrics, read_run, surviving
from sao.store.run_folder import RunFolder


def test_a_resume_voids_what_it_repeats() -> None:
    """Would catch a report that shows the steps of a dead branch beside those that replaced them."""
    rows = [
        {"step": 0, "stage": "eval", "x": 0},
        {"step": 10, "stage": "sft", "x": -1},
        {"step": 20, "stage": "sft", "x": -2},
        {"step": 10, "stage": "sft", "x": 1},
        {"step": 1, "stage": "train", "x": 2},
        {"step": 2, "stage": "train", "x": 3},
        {"step": 1, "stage": "eval", "x": 4},
        {"step": 3, "stage": "train", "x": 5},
        {"step": 2, "stage": "eval", "x": 6},
        {"step": 2, "stage": "train", "x": 7},
        {"step": 1, "stage": "eval", "x": 8},
        {"stage": "train", "x": 9},
    ]
    assert [row["x"] for row in surviving(rows)] == [0, 1, 2, 7, 8]


def test_increments_of_a_counter_that_was_restarted() -> None:
    """Would catch a throughput far below zero at every resume."""
    np.testing.assert_array_equal(increments(np.array([3.0, 5.0, 2.0, 2.0])), [3.0, 2.0, 2.0, 0.0])
    assert len(increments(np.zeros(0))) == 0


def test_a_series_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    """Would catch null taken for 0, or a step and a value of different rows."""
    make_run(tmp_path / "run", steps=0, evaluate=False)
    with RunFolder.resume(tmp_path / "run") as run:
        for step, value in ((1, 0.5), (2, float("nan")), (3, True), (4, 2)):
            run.write_metrics({"step": step, "stage": "train", "a/b": value, "a/c": 1.0})
    data = read_run(tmp_path / "run")
    steps, values = data.series("a/b")
    assert (steps.tolist(), values.tolist()) == ([1, 4], [0.5, 2.0])
    assert [column.tolist() for column in data.aligned("a/c", "a/b")] == [[1, 4], [1, 1], [0.5, 2]]
    assert len(data.series("a/b", "eval")[0]) == 0


def test_tokens_are_those_of_the_second_half(tmp_path: Path) -> None:
    """Would catch a calibration over observations, or over a critic that had not learnt yet."""
    data = read_run(make_run(tmp_path / "run", steps=6))
    sample = data.tokens
    assert sample is not None
    assert (sample.first_step, sample.last_step, sample.rollouts) == (4, 6, 3 * BATCH)
    assert sample.values.shape == (3 * BATCH * 6,)
    assert set(sample.returns.tolist()) <= {0.0, 1.0}
    np.testing.assert_allclose(sample.positions[:6], [0, 0.2, 0.4, 0.6, 0.8, 1], atol=1e-6)
    assert set(sample.ages.tolist()) == {1.0}


def test_the_row_over_all_is_left_out_for_one_data_set(tmp_path: Path) -> None:
    """Would catch every evaluation shown twice."""
    make_run(tmp_path / "run", steps=0, evaluate=False)
    one, overall = eval_row(0, 0.4, "chain"), eval_row(0, 0.4, "overall")
    with RunFolder.resume(tmp_path / "run") as run:
        run.write_metrics(one | overall)
    assert list(read_run(run.path).evaluations()) == ["chain"]
    with RunFolder.resume(tmp_path / "run") as run:
        run.write_metrics(one | eval_row(0, 0.3, "gsm8k") | overall)
    assert list(read_run(run.path).evaluations()) == ["chain", "gsm8k", "overall"]


def test_damage_is_counted(tmp_path: Path) -> None:
    """Would catch a report that fails on, or hides, a torn file."""
    path = make_run(tmp_path / "run", steps=2)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')
    (segment,) = (path / "log").iterdir()
    segment.write_bytes(segment.read_bytes()[:-5])
    (path / "config.toml").write_text("= broken")
    (path / "environment.json").write_text("[]")
    data = read_run(path)
    assert (data.broken_lines, data.state.quarantined) == (1, 1)
    assert data.name == "run"
    with pytest.raises(ValueError, match="no run folder"):
        read_run(tmp_path / "nothing")


def test_only_a_run_folder_may_lack_metrics(tmp_path: Path) -> None:
    """Would catch a wrong path read as a run without rows, and a report that needs a row."""
    path = make_run(tmp_path / "run", steps=0, evaluate=False)
    assert not (path / "metrics.jsonl").exists()
    assert read_run(path).rows == ()
    with pytest.raises(FileNotFoundError, match=r"no metrics at .*metrics\.jsonl; a run folder has"):
        read_metrics(path / "metrics.jsonl")
