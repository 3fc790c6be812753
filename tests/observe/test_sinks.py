"""Rows arrive at every sink, and a sink that is not installed says so."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sao.observe.metrics import mean, merge, total
from sao.observe.sinks import TensorBoardSink, WandbSink

ROW = {"step": 3, "version": 3, "stage": "train", "actor/loss": np.float32(0.5), "actor/entropy": float("nan")}
EVAL = {"step": 3, "version": 3, "stage": "eval", "eval/chain/mean": 0.25}


def test_rows_in_tensorboard(tmp_path: Path) -> None:
    """Would catch a step or a tag that TensorBoard shows in another place; NaN is left out."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.write(ROW)
    sink.write(EVAL)
    sink.write({"step": 10, "stage": "sft_1", "sft/loss": 2.0})
    sink.close()
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"actor/loss", "eval/chain/mean", "sft_1/sft/loss"}
    (scalar,) = events.Scalars("actor/loss")
    assert (scalar.step, scalar.value) == (3, 0.5)


def test_a_sink_that_is_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a traceback about an import instead of a hint."""
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'sao\[wandb\]'"):
        WandbSink(tmp_path, name="run")
    with pytest.raises(ValueError, match=r"pip install 'sao\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


def test_rows_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch late evaluations that W&B drops because its own step never goes back."""
    logged: list[dict[str, Any]] = []
    finished: list[bool] = []
    run = SimpleNamespace(
        define_metric=lambda *args, **kwargs: None, log=logged.append, finish=lambda: finished.append(True)
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kwargs: run))
    assert importlib.import_module("wandb").init() is run
    sink = WandbSink(tmp_path, name="run")
    sink.write(ROW)
    sink.write(EVAL)
    sink.write({"step": 4, "stage": "train"})
    sink.close()
    sink.close()
    assert logged == [{"step": 3, "actor/loss": 0.5}, {"step": 3, "eval/chain/mean": 0.25}]
    assert finished == [True]


def test_metrics_merge_by_their_reduction() -> None:
    """Would catch a mean over micro-batches that forgets their sizes."""
    merged = merge([{"a/b": mean(1.0, 1), "a/c": total(2)}, {"a/b": mean(4.0, 3), "a/c": total(5)}])
    assert merged["a/b"].value == pytest.approx(3.25)
    assert merged["a/c"].value == 7
    with pytest.raises(ValueError, match="merged by"):
        merge([{"a/b": mean(1.0)}, {"a/b": total(1.0)}])
