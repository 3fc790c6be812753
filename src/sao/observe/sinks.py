"""Where metrics go besides the run folder: TensorBoard and W&B, where they are asked for."""

import importlib
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sao.store.files import finite


class MetricsSink(Protocol):
    """Takes rows: "step", "version", "stage", and a number per metric key."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take a row. A value may be NaN."""
        ...

    def close(self) -> None:
        """Deliver what waits. Safe to call twice."""
        ...


class TensorBoardSink:
    """Scalars for TensorBoard, tagged `stage/key` where the stage is not "train"."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if TensorBoard is not installed."""
        _require("tensorboard", "tensorboard")
        files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = files.EventFileWriter(str(folder))
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one event with a value per metric that is a finite number."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(row)]
        if values:
            self._writer.add_event(self._event(step=int(row["step"]), summary=self._summary(value=values)))

    def close(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbSink:
    """A run of Weights & Biases, the same for every start of a run folder; needs the user's own login, or
    WANDB_MODE=offline."""

    def __init__(
        self, folder: Path, *, name: str, config: Mapping[str, Any] | None = None, project: str = "sao"
    ) -> None:
        """Raises ValueError if wandb is not installed."""
        _require("wandb", "wandb")
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=project, name=name, dir=str(folder), config=dict(config or {}), id=_run_id(folder), resume="allow"
        )
        # Evaluations arrive after later training steps, and wandb's own step never goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the row's finite numbers."""
        values = dict(_scalars(row))
        if values:
            self._run.log({"step": int(row["step"]), **values})

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _run_id(folder: Path) -> str:
    """W&B's id of a run folder, kept in it: it moves with the folder, and a new run at its path gets another."""
    place = folder / "wandb" / "sao_run_id"
    if not place.is_file():
        place.parent.mkdir(exist_ok=True)
        place.write_text(secrets.token_hex(8))
    return place.read_text()


def _require(module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"sink {module!r} needs the package {module}, which is not installed; "
            f"run `pip install -e '.[{extra}]'` in sao's checkout, or take {module!r} out of `sinks`"
        ) from error


def _scalars(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Tags and values of a row's finite metrics."""
    stage = row.get("stage", "train")
    for key, value in finite(row).items():
        if "/" in key and isinstance(value, int | float):
            yield (key if stage == "train" or key.startswith(f"{stage}/") else f"{stage}/{key}"), float(value)
