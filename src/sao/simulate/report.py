"""What `sao simulate` writes: results.json, a figure per curve, summary.md."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sao.observe.figures import COLOURS, MARKERS, STYLES
from sao.simulate.plan import Curve, Place
from sao.simulate.results import Cell, Runs, Spread

COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("updates/h", "updates_per_hour", "{:.1f}"),
    ("engine idle", "engine_idle", "{:.0%}"),
    ("trainer idle", "trainer_idle", "{:.0%}"),
    ("slots idle", "slots_idle", "{:.0%}"),
    ("age mean", "age_mean", "{:.2f}"),
    ("age p90", "age_p90", "{:.1f}"),
)
"""Heading, field of Measured, format."""


def table(curve: Curve, found: Sequence[Cell]) -> list[str]:
    """A curve as Markdown: medians over seeds, and the range of the speed-up."""
    measured = (heading for heading, _, _ in COLUMNS)
    headings = [curve.label, "schedule", "seeds", *measured, f"{found[0].arm} is faster by"]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for cell in found:
        numbers = [form.format(_no_minus_zero(cell.values[name].median)) for _, name, form in COLUMNS]
        lines.append("| " + " | ".join([f"{cell.x:g}", cell.arm, str(cell.seeds), *numbers, _range(cell)]) + " |")
    return lines


def _no_minus_zero(value: float) -> float:
    return 0.0 if abs(value) < 1e-3 else value


def _range(cell: Cell) -> str:
    found = cell.speed_up
    if found.low == found.high == 1.0:
        return ""
    spread = f" ({found.low:.2f} to {found.high:.2f})" if cell.seeds > 1 else ""
    return f"{found.median:.2f}{spread}"


def write_results(
    tables: Mapping[Curve, Sequence[Cell]], found: Sequence[Place], runs: Runs, folder: Path, command: str
) -> None:
    """Write everything into an existing folder."""
    rows = [
        {"curve": place.curve, "x": place.x, "arm": place.arm, "seed": place.config.seed}
        | {name: round(value, 6) for name, value in asdict(runs[place.config]).items()}
        for place in found
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    (folder / "results.json").write_text(f"[\n{lines}\n]\n")
    text = [f"Made by `{command}`; every run stands in results.json. What the model is: docs/simulate.md.", ""]
    text += ["Medians over seeds; in brackets the range over seeds of the speed-up, paired by seed.", ""]
    for curve, cells in tables.items():
        draw(curve, cells, folder / f"{curve.name}.png")
        text += [f"## {curve.name}", "", *table(curve, cells), "", f"![{curve.label}]({curve.name}.png)", ""]
    (folder / "summary.md").write_text("\n".join(text))


def draw(curve: Curve, found: Sequence[Cell], path: Path) -> None:
    """Three panels over x: speed-up of the first schedule, idle share of the trainer, mean age."""
    figure = Figure(figsize=(11, 3.4), dpi=130, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _panel(left, curve, found, lambda cell: cell.speed_up, f"{found[0].arm} is faster by")
    _panel(middle, curve, found, lambda cell: cell.values["trainer_idle"], "trainer waits for a batch")
    middle.yaxis.set_major_formatter(PercentFormatter(1.0))
    _panel(right, curve, found, lambda cell: cell.values["age_mean"], "mean age of trained tokens (updates)")
    handles, labels = middle.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Software": None})


def _panel(axes: Axes, curve: Curve, found: Sequence[Cell], value: Callable[[Cell], Spread], title: str) -> None:
    for index, arm in enumerate(dict.fromkeys(cell.arm for cell in found)):
        cells = [cell for cell in found if cell.arm == arm]
        x = [cell.x for cell in cells]
        spreads = [value(cell) for cell in cells]
        style = {"color": COLOURS[index % 6], "linestyle": STYLES[index % 6], "marker": MARKERS[index % 6]}
        axes.plot(x, [spread.median for spread in spreads], label=arm, markersize=4, **style)  # type: ignore[arg-type]
        lows, highs = [spread.low for spread in spreads], [spread.high for spread in spreads]
        axes.fill_between(x, lows, highs, color=COLOURS[index % 6], alpha=0.15, linewidth=0)
    if curve.logarithmic:
        axes.set_xscale("log")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(curve.label)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
