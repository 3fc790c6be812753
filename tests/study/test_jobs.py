"""Children of a study: how they end, and what they leave."""

import time
from pathlib import Path

import pytest
from small_runs import small_config

from sao.config import to_toml
from sao.store.files import read_json_lines
from sao.study.jobs import start_job, stop_all
from sao.study.keep import FAILED, METRICS, keep_failure, keep_run

pytestmark = pytest.mark.timeout(600)


def test_a_failed_child_says_why(tmp_path: Path) -> None:
    """Catches a failure without the message that says what to do."""
    job = start_job("wrong", ["recipes", "grpodis"], tmp_path, "wrong")
    while job.ended() is None:
        time.sleep(0.1)
    assert job.ended() == 2
    assert job.last_words().startswith("exit code 2\n")
    assert "did you mean 'grpo-dis'" in job.last_words()


def test_a_stopped_child_commits(tmp_path: Path) -> None:
    """Catches a Ctrl-C that loses what a run has done, or that leaves it running."""
    config = tmp_path / "config.toml"
    config.write_text(to_toml(small_config("loop.steps=100000", "loop.checkpoint_every=100000")))
    job = start_job("long", ["train", str(config), "--folder", str(tmp_path / "run")], tmp_path / "logs", "long")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.is_file() and b'"train"' in metrics.read_bytes()):
        assert job.ended() is None, job.last_words()
        time.sleep(0.1)
    stop_all([job], patience_s=300.0)
    assert job.ended() == 130
    assert len(list((tmp_path / "run" / "checkpoints").glob("*-step-*"))) == 2
    stubborn = start_job("again", ["resume", str(tmp_path / "run")], tmp_path / "logs", "again")
    stop_all([stubborn], patience_s=0.0)
    assert stubborn.ended() in (-9, -15)
    assert "killed by signal" in stubborn.last_words()


def test_what_is_kept_appears_whole(tmp_path: Path) -> None:
    """Catches half a result after a crash, weights among it, and a good run that cannot take a failed one's place."""
    run, target = tmp_path / "run", tmp_path / "results" / "a" / "seed-0"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.toml", "environment.json", "events.log"):
        (run / name).write_text(name)
    with pytest.raises(OSError, match="metrics"):
        keep_run(run, target)
    assert not target.exists()
    keep_failure(run, target, f"exit code 2\nerror: {Path.cwd()}/runs/x is gone", "the plan's")
    assert sorted(path.name for path in target.iterdir()) == [FAILED, "config.toml", "environment.json"]
    assert (target / FAILED).read_text() == "exit code 2\nerror: runs/x is gone\n"
    assert (target / "config.toml").read_text() == "the plan's"
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    keep_run(run, target)
    assert sorted(path.name for path in target.iterdir()) == ["config.toml", "environment.json", METRICS]
    assert read_json_lines(target / METRICS).rows == [{"step": 1}]
    assert [path.name for path in target.parent.iterdir()] == ["seed-0"]
