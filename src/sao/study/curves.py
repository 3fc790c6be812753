"""Curves of a study: measures over the values of a setting, an arm a point, as a table and a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sao.config import RunConfig
from sao.evaluate import Interval, paired_t_interval
from sao.observe.figures import COLOURS, MARKERS, STYLES
from sao.study.claims import Curve, Measure
from sao.study.plan import Plan, setting
from sao.study.results import Result, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An arm on a line."""

    line: str
    """Label of its line."""
    arm: str
    """Name of the arm."""
    x: str
    """The arm's value of the curve's setting."""
    runs: tuple[Result, ...]
    """The arm's that are shown, one per seed."""


def curve_lines(
    plan: Plan, configs: Mapping[tuple[str, int], RunConfig], shown: Mapping[str, Sequence[Result]], folder: Path
) -> list[str]:
    """The report's section on the plan's curves, as Markdown; writes a figure ID.png for each that has points."""
    lines = ["## Over a setting", ""] if plan.curves else []
    for curve in plan.curves:
        measures = [plan.measure(name) for name in curve.measures]
        points = _points(curve, configs, shown)
        lines += [f"### {curve.id}", "", curve.text, "", *_table(curve, measures, points), ""]
        if points:
            _draw(curve, measures, points, folder / f"{curve.id}.png")
            lines += [f"![{curve.text}]({curve.id}.png)", ""]
    return lines


def _points(
    curve: Curve, configs: Mapping[tuple[str, int], RunConfig], shown: Mapping[str, Sequence[Result]]
) -> list[Point]:
    """Line by line, from left to right; of the arms that have runs."""
    points = [
        Point(line=line.label, arm=arm, x=_shown(setting(configs[arm, 0], curve.x)), runs=tuple(shown[arm]))
        for line in curve.lines
        for arm in line.arms
        if shown[arm]
    ]
    return [point for line in curve.lines for point in _by_place([each for each in points if each.line == line.label])]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _table(curve: Curve, measures: Sequence[Measure], points: Sequence[Point]) -> list[str]:
    headings = [f"`{curve.x}`", "line", "arm", "seeds", *(measure.words for measure in measures)]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for point in points:
        cells = (cell(point.runs, measure) for measure in measures)
        lines.append(f"| {' | '.join((point.x, point.line, point.arm, str(len(point.runs)), *cells))} |")
    return lines


def cell(runs: Sequence[Result], measure: Measure) -> str:
    """A measure's mean and interval over runs, and how many have it, or reached what it waits for, where not all do."""
    values = measured(runs, measure)
    parts = [with_interval(values)]
    if len(values) < len(runs):
        parts.append(f"({len(values)} of {len(runs)} runs)")
    reached = sum(run.reached(measure) for run in runs) if measure.of == "seconds_to" else len(runs)
    if reached < len(runs):
        parts.append(f"({reached} of {len(runs)} got there)")
    return " ".join(parts).strip()


def with_interval(values: Sequence[float], sign: str = "") -> str:
    """Mean and 95 % t-interval over seeds, to three decimals; the number alone for one seed, "" for none."""
    if len(values) < 2:
        return "".join(f"{value:{sign}.3f}" for value in values)
    interval = paired_t_interval(values)
    return f"{interval.mean:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _draw(curve: Curve, measures: Sequence[Measure], points: Sequence[Point], path: Path) -> None:
    figure = Figure(figsize=(1.0 + 4.2 * len(measures), 3.6), dpi=130, layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(measures), squeeze=False)[0]
    places = list(dict.fromkeys(point.x for point in _by_place(points)))
    labels = [line.label for line in curve.lines]
    for axes, measure in zip(panels, measures, strict=True):
        for number, label in enumerate(labels):
            found = [
                (places.index(point.x), _interval(values))
                for point in points
                if point.line == label and (values := measured(point.runs, measure))
            ]
            _line(axes, number, label, found)
        axes.set_xticks(range(len(places)), places)
        axes.set_title(measure.words.replace("`", ""), fontsize=9, loc="left")
        axes.set_xlabel(curve.x)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    handles, named = panels[0].get_legend_handles_labels()
    figure.legend(handles, named, loc="outside upper center", ncols=max(len(named), 1), frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Software": None})


def _by_place(points: Sequence[Point]) -> list[Point]:
    """Numbers in their order, other values as they come."""
    try:
        return sorted(points, key=lambda point: float(point.x))
    except ValueError:
        return list(points)


def _interval(values: Sequence[float]) -> Interval:
    if len(values) > 1:
        return paired_t_interval(values)
    return Interval(mean=values[0], low=values[0], high=values[0], count=1)


def _line(axes: Axes, number: int, label: str, found: Sequence[tuple[int, Interval]]) -> None:
    x, means = [place for place, _ in found], [interval.mean for _, interval in found]
    below = [interval.mean - interval.low for _, interval in found]
    above = [interval.high - interval.mean for _, interval in found]
    axes.errorbar(
        x, means, yerr=[below, above], label=label, color=COLOURS[number % 6], linestyle=STYLES[number % 6],
        marker=MARKERS[number % 6], markersize=4, capsize=2, linewidth=1.4,
    )  # fmt: skip
