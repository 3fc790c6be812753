"""Figures of a study over samples, time and steps: a line per arm, with the interval over its seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sao.evaluate import paired_t_interval
from sao.observe.run_data import Series
from sao.study.claims import OverSteps
from sao.study.results import Result

POINTS = 60
"""Of a curve over time, on which the runs of an arm are interpolated."""
BINS = 40
"""Of a metric over the steps, at most."""


def draw_curves(arms: Mapping[str, Sequence[Result]], folder: Path) -> list[str]:
    """Write equal_samples.png and equal_time.png; their names. Arms without two evaluations are left out."""
    curves = {arm: [run for run in runs if len(run.curve()[0]) > 1] for arm, runs in arms.items()}
    curves = {arm: runs for arm, runs in curves.items() if runs}
    if not curves:
        return []
    _draw(curves, folder / "equal_samples.png", label="rollouts trained on", over_time=False)
    _draw(curves, folder / "equal_time.png", label="seconds of the run's clock", over_time=True)
    return ["equal_samples.png", "equal_time.png"]


def draw_over_steps(figure: OverSteps, arms: Mapping[str, Sequence[Result]], folder: Path) -> bool:
    """Write ID.png; False, and nothing, where no run has the metrics. Steps are averaged in bins."""
    drawing, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    drawn = False
    for arm in figure.arms:
        found = [columns for run in arms[arm] if len((columns := run.metrics.aligned(*figure.keys))[0])]
        if not found:
            continue
        drawn = True
        end = min(steps[-1] for steps, *_ in found)
        edges = np.linspace(0.5, end + 0.5, min(int(end), BINS) + 1)
        _band(
            axes,
            arm,
            (edges[1:] + edges[:-1]) / 2,
            [_binned(edges, steps, np.sum(rest, axis=0)) for steps, *rest in found],
        )
    axes.set(xlabel="training step", ylabel=" + ".join(figure.keys))
    _finish(drawing, axes, folder / f"{figure.id}.png" if drawn else None)
    return drawn


def _binned(edges: Series, steps: Series, values: Series) -> Series:
    """Mean of the values in each bin of steps; between full bins a straight line where one is empty."""
    places = np.digitize(steps, edges) - 1
    inside = (places >= 0) & (places < len(edges) - 1)
    counts = np.bincount(places[inside], minlength=len(edges) - 1)
    sums = np.bincount(places[inside], values[inside], minlength=len(edges) - 1)
    full = np.flatnonzero(counts)
    return np.interp(np.arange(len(counts)), full, sums[full] / counts[full])


def _finish(figure: Figure, axes: Axes, path: Path | None) -> None:
    """What all figures share; write it to `path`, if there is anything to see."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if path is not None:
        axes.legend(frameon=False, ncols=2, fontsize=8)
        figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


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
    _finish(figure, axes, path)


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
