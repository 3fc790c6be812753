"""Rows arrive at every sink, and a sink that is not installed says so."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sao.observe.metrics import last, merge, total
from sao.observe.sinks import TensorBoardSink, WandbSink

ROW = {"step": 3, "version": 3, "stage": "train", "actor/loss": np.float32(0.5), "actor/entropy": float("nan")}
EVAL = {"step": 3, "version": 3, "stage": "eval", "eval/chain/mean": 0.25}


def test_rows_in_tensorboard(tmp_path: Path) -> None:
    """Would catch a step or a tag that TensorBoard shows in another place; NaN is left out."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.write(ROW)
    sink.write(EVAL)
    sink.write({"step": 10, "stage": "sft", "sft/loss": 2.0})
    sink.close()
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"actor/loss", "eval/chain/mean", "sft/loss"}
    (scalar,) = events.Scalars("actor/loss")
    assert (scalar.step, scalar.value) == (3, 0.5)


def test_a_sink_that_is_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a traceback about an import instead of a hint."""
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[wandb\]'"):
        WandbSink(tmp_path, name="run")
    with pytest.raises(ValueError, match=r"pip install -e '\.\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


def test_rows_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch late evaluations that W&B drops because its own step never goes back."""
    logged: list[dict[str, Any]] = []
    finished: list[bool] = []
    run = SimpleNamespace(
        define_metric=lambda *args, **kwargs: None, log=logged.append, finish=lambda: finished.append(True)
    )
    starts: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: starts.append(given) or run))
    sink = WandbSink(tmp_path, name="run")
    sink.write(ROW)
    sink.write(EVAL)
    sink.write({"step": 4, "stage": "train"})
    sink.close()
    sink.close()
    assert logged == [{"step": 3, "actor/loss": 0.5}, {"step": 3, "eval/chain/mean": 0.25}]
    assert finished == [True]
    assert (starts[0]["name"], starts[0]["dir"]) == ("run", str(tmp_path))


def test_a_resumed_run_is_one_run_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a new run in W&B for each resume, or one run for two folders."""
    starts: list[dict[str, Any]] = []
    run = SimpleNamespace(define_metric=lambda *args, **kwargs: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: starts.append(given) or run))
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        WandbSink(tmp_path / name, name=name)
    (tmp_path / "a").rename(tmp_path / "moved")
    WandbSink(tmp_path / "moved", name="a")
    first, again, other, moved = (start["id"] for start in starts)
    assert first == again == moved != other
    assert all(start["resume"] == "allow" for start in starts)


def test_metrics_merge_by_their_reduction() -> None:
    """Would catch a count that forgets a part, or a state that adds up."""
    merged = merge([{"a/b": last(1.0), "a/c": total(2)}, {"a/b": last(4.0), "a/c": total(5)}])
    assert {key: metric.value for key, metric in merged.items()} == {"a/b": 4.0, "a/c": 7.0}
    with pytest.raises(ValueError, match="merged by"):
        merge([{"a/b": last(1.0)}, {"a/b": total(1.0)}])
