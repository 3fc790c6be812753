"""What `sao simulate` writes when its runs have ended: a figure per curve, and summary.md."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sao.observe.figures import COLOURS, MARKERS, STYLES
from sao.simulate.plan import Curve, Place, SimulationPlan
from sao.simulate.results import Cell, Runs, Spread

RESULTS = "results.jsonl"
"""Every run with its settings, and what it gave."""
COLUMNS = (
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("updates/h", "updates_per_hour", "{:.1f}"),
    ("engine idle", "engine_idle", "{:.0%}"),
    ("trainer idle", "trainer_idle", "{:.0%}"),
    ("slots idle", "slots_idle", "{:.0%}"),
    ("age mean", "age_mean", "{:.2f}"),
    ("age p90", "age_p90", "{:.1f}"),
    ("age max", "age_max", "{:.0f}"),
    ("dropped", "dropped", "{:.0%}"),
)
"""Heading, field of Measured, format."""


def table(plan: SimulationPlan, curve: Curve, found: Sequence[Cell]) -> list[str]:
    """A curve as Markdown: medians over seeds, and the range of the speed-up."""
    measured, first = (heading for heading, _, _ in COLUMNS), plan.arms_of(curve)[0].name
    headings = [curve.label, "schedule", "seeds", *measured, _speed_up_of(first)]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for cell in found:
        numbers = [form.format(_no_minus_zero(cell.values[name].median)) for _, name, form in COLUMNS]
        times = "" if cell.arm == first else _times(cell)
        lines.append("| " + " | ".join([f"{cell.x:g}", cell.arm, str(cell.seeds), *numbers, times]) + " |")
    return lines


def _speed_up_of(first: str) -> str:
    return f"tokens/s, {first} / this"


def _no_minus_zero(value: float) -> float:
    return 0.0 if abs(value) < 1e-3 else value


def _times(cell: Cell) -> str:
    found = cell.speed_up
    if found is None:
        return ""
    return f"{found.median:.2f}x " + (f"({found.low:.2f} to {found.high:.2f})" if cell.seeds > 1 else "(one seed)")


def failures(found: Sequence[Place], runs: Runs) -> list[str]:
    """A line for each place of the plan whose run failed, with the reason."""
    outcomes = ((place, runs[place.config]) for place in found)
    return [
        f"failed: curve {place.curve}, x = {place.x:g}, {place.arm}, seed {place.config.seed}: {outcome}"
        for place, outcome in outcomes
        if isinstance(outcome, str)
    ]


def write_results(
    plan: SimulationPlan, tables: Mapping[Curve, Sequence[Cell]], failed: Sequence[str], folder: Path, command: str
) -> None:
    """Write everything into an existing folder."""
    text = [f"Made by `{command}`; every run stands in {RESULTS}. What the model is: docs/simulate.md.", ""]
    text += ["Medians over seeds; in brackets the range over seeds of the speed-up, paired by seed.", ""]
    text += [*(f"- {line}" for line in failed), ""] if failed else []
    for curve, cells in tables.items():
        text += [f"## {curve.name}", "", *table(plan, curve, cells), ""]
        if cells:
            draw(plan, curve, cells, folder / f"{curve.name}.png")
            text += [f"![{curve.label}]({curve.name}.png)", ""]
    (folder / "summary.md").write_text("\n".join(text), encoding="utf-8")


def draw(plan: SimulationPlan, curve: Curve, found: Sequence[Cell], path: Path) -> None:
    """Three panels over x: speed-up of the first schedule, idle share of the trainer, mean age. Hollow: one seed."""
    figure = Figure(figsize=(11, 3.4), dpi=130, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _panel(left, curve, found, lambda cell: cell.speed_up, _speed_up_of(plan.arms_of(curve)[0].name))
    _panel(middle, curve, found, lambda cell: cell.values["trainer_idle"], "trainer waits for a batch")
    middle.yaxis.set_major_formatter(PercentFormatter(1.0))
    _panel(right, curve, found, lambda cell: cell.values["age_mean"], "mean age of trained tokens (updates)")
    handles, labels = middle.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Software": None})


def _panel(axes: Axes, curve: Curve, found: Sequence[Cell], value: Callable[[Cell], Spread | None], title: str) -> None:
    for index, arm in enumerate(dict.fromkeys(cell.arm for cell in found)):
        drawn = [(cell, spread) for cell in found if cell.arm == arm and (spread := value(cell)) is not None]
        colour, marker, x = COLOURS[index % 6], MARKERS[index % 6], [cell.x for cell, _ in drawn]
        medians = [spread.median for _, spread in drawn]
        axes.plot(x, medians, label=arm, color=colour, linestyle=STYLES[index % 6], marker=marker, markersize=4)
        lows, highs = [spread.low for _, spread in drawn], [spread.high for _, spread in drawn]
        axes.fill_between(x, lows, highs, color=colour, alpha=0.15, linewidth=0)
        hollow = [(cell.x, spread.median) for cell, spread in drawn if cell.seeds == 1]
        style = {"marker": marker, "markersize": 4, "color": colour, "markerfacecolor": "white", "linestyle": ""}
        axes.plot([x for x, _ in hollow], [median for _, median in hollow], **style)  # type: ignore[arg-type]
    if curve.logarithmic:
        axes.set_xscale("log")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(curve.label + (" (hollow: one seed)" if any(cell.seeds == 1 for cell in found) else ""))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
