"""Drawing of the report's figures, one message each; None where the run has no such data."""

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from sao.observe.run_data import RunData, Series, increments

# Okabe and Ito's palette: told apart with any colour vision, and in grey by the line styles beside it.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#333333",
)
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
STYLES = ("-", "--", "-.", ":", "-", "--")
MARKERS = ("o", "s", "^", "D", "v", "P")


def smooth(values: Series, width: int) -> Series:
    """Centred moving mean (N,) over up to `width` values, over fewer at the ends."""
    half = width // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _axes(title: str, x: str = "training step", y: str = "") -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 3.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=BLACK)
    axes.set_xlabel(x, color=BLACK)
    axes.set_ylabel(y, color=BLACK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors="#555555", labelsize=9)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    if x == "training step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _line(axes: Axes, steps: Series, values: Series, index: int, label: str, *, smoothed: bool = True) -> None:
    """A series: faint as it is and smoothed on top where there are enough steps, with markers where there are few."""
    colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
    width = max(1, len(values) // 20) * 2 + 1
    if smoothed and len(values) >= 20:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(values, width), color=colour, linestyle=style, linewidth=2, label=label)
    else:
        marker = MARKERS[index % len(MARKERS)] if len(values) < 20 else None
        axes.plot(steps, values, color=colour, linestyle=style, marker=marker, markersize=4, linewidth=1.6, label=label)


def _legend(axes: Axes) -> None:
    """Below the axes, where it hides nothing."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=len(labels))


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def lines(
    title: str, y: str, keys: Mapping[str, str], *, percent: bool = False, log: bool = False
) -> Callable[[RunData], Figure | None]:
    """A figure of one or several keys over training steps, with a legend where there are several."""

    def draw(run: RunData) -> Figure | None:
        found = {label: run.series(key) for key, label in keys.items()}
        found = {label: (steps, values) for label, (steps, values) in found.items() if len(values)}
        if not found:
            return None
        figure, axes = _axes(title, y=y)
        for index, (label, (steps, values)) in enumerate(found.items()):
            _line(axes, steps, values, index, label)
        if log and all((values > 0).all() for _, values in found.values()):
            _log_scale(axes)
        elif percent or all((values >= 0).all() for _, values in found.values()):
            axes.set_ylim(bottom=0)
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if len(keys) > 1:
            _legend(axes)
        return figure

    return draw


def reward(run: RunData) -> Figure | None:
    """Batch reward over the steps."""
    steps, values = run.series("rollout/reward")
    if not len(values):
        return None
    figure, axes = _axes("Reward of the rollouts trained on", y="mean reward of the batch")
    _line(axes, steps, values, 0, "smoothed")
    if values.min() >= 0 and values.max() <= 1:
        axes.set_ylim(0, 1)
    return figure


def evaluation(run: RunData) -> Figure | None:
    """Means with intervals over the steps, a line per data set."""
    found = run.evaluations()
    if not found:
        return None
    figure, axes = _axes("Reward on held-out tasks", y="mean, with its interval")
    for index, (name, rows) in enumerate(found.items()):
        steps = np.array([row["step"] for row in rows], dtype=float)
        means = np.array([row["mean"] for row in rows], dtype=float)
        lows = np.array([row["mean"] if row.get("low") is None else row["low"] for row in rows], dtype=float)
        highs = np.array([row["mean"] if row.get("high") is None else row["high"] for row in rows], dtype=float)
        axes.errorbar(
            steps,
            means,
            yerr=np.maximum([means - lows, highs - means], 0),
            color=COLOURS[index % len(COLOURS)],
            linestyle=STYLES[index % len(STYLES)],
            marker=MARKERS[index % len(MARKERS)],
            capsize=3,
            linewidth=1.6,
            markersize=5,
            label=name,
        )
    if all(0 <= row["mean"] <= 1 for rows in found.values() for row in rows):
        axes.set_ylim(0, 1)
    _legend(axes)
    return figure


def explained_variance(run: RunData) -> Figure | None:
    """Explained variance over the steps, cut at -1."""
    steps, values = run.series("critic/explained_variance")
    if not len(values):
        return None
    figure, axes = _axes("How much of the returns the critic explains", y="explained variance")
    _line(axes, steps, values, 0, "smoothed")
    axes.axhline(0, color=BLACK, linewidth=1, linestyle=":")
    # One bad step far below 0 would flatten all the rest.
    axes.set_ylim(max(float(values.min()) - 0.05, -1.0), 1.0)
    return figure


def calibration(run: RunData) -> Figure | None:
    """Mean return against predicted value, in ten bins of equal size."""
    sample = run.tokens
    if sample is None or not np.isfinite(sample.values).all() or len(sample.values) < 10:
        return None
    order = np.argsort(sample.values, kind="stable")
    bins = np.array_split(order, min(10, len(order)))
    predicted = np.array([sample.values[index].mean() for index in bins])
    returned = np.array([sample.returns[index].mean() for index in bins])
    spread = np.array([sample.returns[index].std() / np.sqrt(len(index)) for index in bins])
    figure, axes = _axes("Are the critic's values right?", x="predicted value (ten equal bins)", y="mean return")
    low, high = float(min(predicted.min(), returned.min())), float(max(predicted.max(), returned.max()))
    axes.plot([low, high], [low, high], color=BLACK, linestyle=":", linewidth=1, label="calibrated")
    axes.errorbar(predicted, returned, yerr=1.96 * spread, color=BLUE, marker="o", capsize=3, label="measured")
    _legend(axes)
    return figure


def value_by_position(run: RunData) -> Figure | None:
    """Value, return and error along the rollout."""
    sample = run.tokens
    if sample is None or not np.isfinite(sample.values).all() or not len(sample.values):
        return None
    bins = np.minimum((sample.positions * 10).astype(int), 9)
    present = [index for index in range(10) if (bins == index).any()]
    centres = np.array([index / 10 + 0.05 for index in present])
    figure, axes = _axes(
        "Does the critic see the ending come?", x="place in the rollout (share of its action tokens)", y="mean"
    )
    errors = np.array([np.abs(sample.values - sample.returns)[bins == index].mean() for index in present])
    values = np.array([sample.values[bins == index].mean() for index in present])
    returns = np.array([sample.returns[bins == index].mean() for index in present])
    for index, (label, series) in enumerate(
        (("predicted value", values), ("return", returns), ("absolute error", errors))
    ):
        _line(axes, centres, series, index, label, smoothed=False)
    axes.set_xlim(0, 1)
    _legend(axes)
    return figure


def age_histogram(run: RunData) -> Figure | None:
    """Shares of the ages of tokens."""
    sample = run.tokens
    if sample is None or not np.isfinite(sample.ages).any():
        return None
    ages = sample.ages[np.isfinite(sample.ages)].astype(int)
    figure, axes = _axes("Age of the tokens trained on", x="actor updates since the token was sampled", y="share")
    top = max(int(np.quantile(ages, 0.999)), 1)
    counts = np.bincount(np.minimum(ages, top), minlength=top + 1) / len(ages)
    axes.bar(np.arange(top + 1), counts, color=BLUE, width=0.85)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def throughput(run: RunData) -> dict[str, tuple[Series, Series]]:
    """Action tokens per second of the run's clock, by label: steps and values."""
    found: dict[str, tuple[Series, Series]] = {}
    for label, key in (("sampled", "engine/generated_tokens"), ("trained", "loop/trained")):
        steps, counter, clock, per_rollout = run.aligned(key, "time/clock", "rollout/action_tokens")
        seconds = increments(clock)
        tokens = increments(counter) * (per_rollout if key == "loop/trained" else 1.0)
        # The first step counts from the start of training; a later first row has no row before it to count from.
        valid = (seconds > 0) & (np.diff(steps, prepend=0) == 1)
        if valid.any():
            found[label] = steps[valid], tokens[valid] / seconds[valid]
    return found


def throughput_figure(run: RunData) -> Figure | None:
    """Tokens per second over the steps."""
    found = throughput(run)
    if not found:
        return None
    figure, axes = _axes("Throughput", y="action tokens per second")
    for index, (label, (steps, values)) in enumerate(found.items()):
        _line(axes, steps, values, index, label)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def idle(run: RunData) -> dict[str, tuple[Series, Series]]:
    """Share of the time that trainer and engine did not compute, by label: steps and values."""
    found: dict[str, tuple[Series, Series]] = {}
    steps, waited, worked = run.aligned("time/wait_for_batch", "time/step")
    whole = waited + worked
    if (whole > 0).any():
        found["trainer"] = steps[whole > 0], waited[whole > 0] / whole[whole > 0]
    steps, busy, clock = run.aligned("engine/busy_seconds", "time/clock")
    seconds = increments(clock)
    valid = (seconds > 0) & (np.diff(steps, prepend=0) == 1)
    if valid.any():
        share = 1 - increments(busy)[valid] / seconds[valid]
        # Counters are read a moment apart from the clock, so that a busy engine may seem more than busy.
        found["engine"] = steps[valid], np.clip(share, 0, 1)
    return found


def idle_figure(run: RunData) -> Figure | None:
    """Idle shares over the steps."""
    found = idle(run)
    if not found:
        return None
    figure, axes = _axes("Who waits for whom", y="share of the time idle")
    for index, (label, (steps, values)) in enumerate(found.items()):
        _line(axes, steps, values, index, label)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(axes)
    return figure


def critic_cost(run: RunData) -> Figure | None:
    """Seconds per step by part, stacked."""
    steps, values, critic = run.aligned("time/values", "time/critic")
    _, actor = run.aligned("time/actor") if len(steps) else (steps, steps)
    if not len(steps) or len(actor) != len(steps):
        return None
    figure, axes = _axes("What the critic costs in time", y="seconds per step")
    width = max(1, len(steps) // 20) * 2 + 1
    parts = [smooth(series, width) for series in (actor, values, critic)]
    axes.stackplot(
        steps,
        *parts,
        labels=("actor update", "values", "critic updates"),
        colors=(SKY, ORANGE, RED),
        edgecolor="white",
        linewidth=0.5,
    )
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def ratios(run: RunData) -> Figure | None:
    """Quantiles of the ratio over the steps, with the band of the configuration."""
    names = {
        "actor/ratio_max": "largest",
        "actor/ratio_p99": "99 %",
        "actor/ratio_p50": "median",
        "actor/ratio_p01": "1 %",
    }
    found = {label: run.series(key) for key, label in names.items()}
    if not any(len(values) for _, values in found.values()):
        return None
    figure, axes = _axes("Ratio of the actor to the policy that sampled", y="ratio")
    for index, (label, (steps, values)) in enumerate(found.items()):
        if len(values):
            _line(axes, steps, values, index, label)
    algorithm = run.config.get("algorithm", {})
    for bound in (algorithm.get("ratio_low"), algorithm.get("ratio_high")):
        if isinstance(bound, int | float) and bound > 0:
            axes.axhline(bound, color=BLACK, linestyle=":", linewidth=1)
    _log_scale(axes)
    _legend(axes)
    return figure
