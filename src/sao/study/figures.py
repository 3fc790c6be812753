"""Learning curves of a study: a line per arm, with the interval over its seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from sao.evaluate import paired_t_interval
from sao.observe.run_data import Series
from sao.study.results import Result

POINTS = 60
"""Of a curve over time, on which the runs of an arm are interpolated."""


def draw_curves(arms: Mapping[str, Sequence[Result]], folder: Path) -> list[str]:
    """Write equal_samples.png and equal_time.png; their names. Arms without two evaluations are left out."""
    curves = {arm: [run for run in runs if len(run.curve()[0]) > 1] for arm, runs in arms.items()}
    curves = {arm: runs for arm, runs in curves.items() if runs}
    if not curves:
        return []
    _draw(curves, folder / "equal_samples.png", label="rollouts trained on", over_time=False)
    _draw(curves, folder / "equal_time.png", label="seconds of the run's clock", over_time=True)
    return ["equal_samples.png", "equal_time.png"]


def _draw(arms: Mapping[str, Sequence[Result]], path: Path, *, label: str, over_time: bool) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    ends: list[float] = []
    for arm, runs in arms.items():
        x, columns = _on_one_grid(runs, over_time=over_time)
        ends.append(float(x[-1]))
        _band(axes, arm, x, columns)
    if over_time:
        # Beyond the end of the fastest arm only some are left to compare.
        axes.axvline(min(ends), color="0.7", linewidth=0.8, linestyle=":")
    axes.set(xlabel=label, ylabel="held-out tasks solved", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, ncols=2, fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _on_one_grid(runs: Sequence[Result], *, over_time: bool) -> tuple[Series, list[Series]]:
    """A grid of samples, or of seconds up to the first end of a run; and each run's means on it."""
    curves = [run.curve() for run in runs]
    scale = [run.seconds_at(steps) for run, (steps, _) in zip(runs, curves, strict=True)]
    if not over_time:
        scale = [steps * run.batch_size for run, (steps, _) in zip(runs, curves, strict=True)]
    end = min(float(places[-1]) for places in scale)
    first = scale[0]
    alike = all(len(places) == len(first) and bool((places == first).all()) for places in scale)
    grid = first if alike else np.linspace(0.0, end, POINTS)
    return grid, [np.interp(grid, places, means) for places, (_, means) in zip(scale, curves, strict=True)]


def _band(axes: Axes, arm: str, x: Series, columns: Sequence[Series]) -> None:
    table = np.stack(columns)
    name = f"{arm} ({len(columns)} seed{'s' if len(columns) > 1 else ''})"
    (line,) = axes.plot(x, table.mean(0), label=name, linewidth=1.6)
    if len(columns) > 1:
        intervals = [paired_t_interval(column.tolist()) for column in table.T]
        low, high = ([getattr(interval, end) for interval in intervals] for end in ("low", "high"))
        axes.fill_between(x, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
