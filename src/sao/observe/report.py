"""The report of a run, finished or not: report.md with figures, and report.html in one file for a double click."""

import base64
import html
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sao.observe.catalogue import PLOTS
from sao.observe.figures import idle, throughput
from sao.observe.run_data import REPLACED, RunData, increments, is_number, read_run
from sao.store.replay import Fate

_CSS = """
body { font: 16px/1.55 system-ui, sans-serif; color: #222; max-width: 50rem; margin: 2.5rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; padding-bottom: .3rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { text-align: left; padding: .35rem 1.2rem .35rem 0; }
th { font-weight: 600; } tr { border-bottom: 1px solid #eee; } td { font-variant-numeric: tabular-nums; }
figure { margin: 1.5rem 0; } img { width: 100%; height: auto; } figcaption { color: #555; font-size: .92rem; }
code { background: #f4f4f4; padding: .1rem .3rem; border-radius: 3px; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    name: str
    title: str
    caption: str
    png: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _List:
    items: tuple[str, ...]


_Block = str | _Table | _Picture | _List


def write_report(folder: Path | str) -> Path:
    """Write `report/` of a run folder anew, from whatever the run has left so far; returns report.md.

    What the run has no data for is named in the report. Raises ValueError if the folder is no run folder.
    """
    run = read_run(folder)
    pictures, missing = _pictures(run)
    target = run.path / "report"
    target.mkdir(exist_ok=True)
    for plot in PLOTS:
        (target / f"{plot.name}.png").unlink(missing_ok=True)
    for picture in pictures:
        (target / f"{picture.name}.png").write_bytes(picture.png)
    title = f"Run {run.name}"
    sections: list[tuple[str, list[_Block]]] = [
        ("Summary", [_summary(run), *_notes(run)]),
        *([("Evaluation", [table])] if (table := _evaluation_table(run)) else []),
        ("Figures", list(pictures)),
        ("What became of the rollouts", _fates(run)),
        *([("Not in this report", [_List(items=tuple(missing))])] if missing else []),
        ("The run", [_origin(run)]),
    ]
    (target / "report.html").write_text(_to_html(title, sections), encoding="utf-8")
    path = target / "report.md"
    path.write_text(_to_markdown(title, sections), encoding="utf-8")
    return path


def _pictures(run: RunData) -> tuple[list[_Picture], list[str]]:
    pictures: list[_Picture] = []
    missing: list[str] = []
    for plot in PLOTS:
        figure = plot.draw(run)
        if figure is None:
            missing.append(f"{plot.title}: the run has no data for it yet; it needs {plot.needs}.")
            continue
        buffer = io.BytesIO()
        # Without software and date in the file, the same data gives the same bytes.
        figure.savefig(buffer, format="png", metadata={"Software": None})
        pictures.append(_Picture(name=plot.name, title=plot.title, caption=plot.caption, png=buffer.getvalue()))
    return pictures, missing


def _number(value: object, digits: int = 3) -> str:
    if not is_number(value):
        return "-"
    assert isinstance(value, int | float)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"


def _interval(row: Any) -> str:
    mean, low, high = row.get("mean"), row.get("low"), row.get("high")
    return _number(mean) + (f" ({_number(low)} to {_number(high)})" if is_number(low) and is_number(high) else "")


def _summary(run: RunData) -> _Table:
    steps, rewards = run.series("rollout/reward")
    rows: list[tuple[str, str]] = [("configuration", run.name)]
    rows.append(("training steps", _number(int(steps[-1]) if len(steps) else len(run.state.steps))))
    rows.append(("policy version", _number(run.state.steps[-1].version if run.state.steps else None)))
    for name, found in run.evaluations().items():
        first, last = found[0], found[-1]
        rows.append((f"evaluation `{name}`, first (step {first['step']})", _interval(first)))
        if last is not first:
            rows.append((f"evaluation `{name}`, last (step {last['step']})", _interval(last)))
            rows.append((f"evaluation `{name}`, gain", f"{last['mean'] - first['mean']:+.3f}"))
    if len(rewards):
        share = max(1, len(rewards) // 10)
        rows.append(
            ("batch reward, first and last tenth", f"{rewards[:share].mean():.3f}, {rewards[-share:].mean():.3f}")
        )
    counts = run.state.counts
    rows += [
        ("rollouts trained", _number(sum(len(step.rollout_ids) for step in run.state.steps))),
        ("tasks dropped", _number(counts[Fate.DROPPED.value])),
        ("infrastructure failures, attempts", _number(sum(run.state.infrastructure_failures.values()))),
        ("infrastructure failures, tasks lost", _number(counts[Fate.INFRASTRUCTURE_FAILURE.value])),
    ]
    rows += _cost(run)
    return _Table(head=("", ""), rows=tuple(rows))


def _cost(run: RunData) -> list[tuple[str, str]]:
    """Time, speed and memory."""
    rows: list[tuple[str, str]] = []
    _, clock = run.series("time/clock")
    if len(clock):
        virtual = run.config.get("clock") == "virtual"
        kind = "virtual seconds" if virtual else "seconds"
        rows.append((f"{kind} of training", _number(float(increments(clock).sum()), 1)))
    cores = run.environment.get("core_seconds")
    if not is_number(cores):
        # No start of the run has ended yet: what its processes said last.
        parts = [run.series(key)[1] for key in ("cpu/trainer", "cpu/engine")]
        cores = sum(float(increments(part).sum()) for part in parts) if any(len(part) for part in parts) else None
    if is_number(cores):
        rows.append(("core-seconds", _number(cores, 0)))
    for label, (_, values) in throughput(run).items():
        rows.append((f"action tokens {label} per second, median", _number(float(np.median(values)), 0)))
    for label, (_, values) in idle(run).items():
        rows.append((f"{label} idle, mean", f"{values.mean():.0%}"))
    _, critic = run.series("time/critic")
    _, values = run.series("time/values")
    _, step = run.series("time/step")
    if len(critic) and len(step):
        share = (critic.sum() + values.sum()) / step.sum() if step.sum() else 0.0
        rows.append(("critic's share of the step time", f"{share:.0%}"))
    for label, key in (
        ("critic's memory", "memory/critic_mb"),
        ("trainer's peak memory", "memory/trainer_mb"),
        ("trainer's peak memory on its GPU", "memory/trainer_gpu_mb"),
    ):
        _, memory = run.series(key)
        if len(memory):
            rows.append((label, f"{_number(float(memory.max()), 1)} MB"))
    return rows


def _notes(run: RunData) -> list[_Block]:
    """What a reader must know before believing the numbers."""
    notes: list[str] = []
    if run.state.quarantined:
        notes.append(f"{run.state.quarantined} records of the log are damaged, and were skipped.")
    if run.broken_lines:
        notes.append(f"{run.broken_lines} lines of metrics.jsonl are damaged, and were skipped.")
    for key, what in REPLACED.items():
        if run.replaced[key]:
            notes.append(f"{what}, times: {run.replaced[key]} (`{key}`); `events.log` says why.")
    for name in ("actor", "critic"):
        _, skipped = run.series(f"{name}/skipped")
        if skipped.any():
            notes.append(f"{int(skipped.sum())} updates of the {name} were skipped: the gradient was not finite.")
    held_out = run.series("value_pretraining/explained_variance_held_out", "value_pretraining")[1]
    if len(held_out):
        notes.append(f"Value pretraining ended at explained variance {held_out[-1]:.3f} on held-out rollouts.")
    _, loss = run.series("sft/loss", "sft")
    if len(loss):
        notes.append(f"Supervised fine-tuning went from loss {loss[0]:.3f} to {loss[-1]:.3f}.")
    return [_List(items=tuple(notes))] if notes else []


def _evaluation_table(run: RunData) -> _Table | None:
    rows: list[tuple[str, ...]] = []
    for name, found in run.evaluations().items():
        for row in found:
            passes = ", ".join(
                f"{key.replace('pass_at_', 'pass@')} {_number(row[key])}" for key in row if key.startswith("pass_at")
            )
            cells = (_number(row.get("version")), _interval(row), passes or "-")
            rows.append((name, _number(row["step"]), *cells, _number(row.get("prompts")), _number(row.get("failed"))))
    if not rows:
        return None
    head = ("data set", "step", "version", "mean (interval)", "pass@k", "prompts", "failed")
    return _Table(head=head, rows=tuple(rows))


def _fates(run: RunData) -> list[_Block]:
    meanings = {
        Fate.TRAINED: "consumed by a step of the surviving history",
        Fate.WAITING: "finished, not consumed",
        Fate.DROPPED: "never trained, by rule",
        Fate.INFRASTRUCTURE_FAILURE: "lost for good through no fault of the policy",
        Fate.INTERRUPTED: "admitted and not finished when the log ended",
        Fate.UNFINISHED: "admitted and not finished at the end of the run",
    }
    counts = run.state.counts
    rows = [(fate.value.replace("_", " "), _number(counts[fate.value]), text) for fate, text in meanings.items()]
    blocks: list[_Block] = [_Table(head=("fate of an admitted task", "tasks", "meaning"), rows=tuple(rows))]
    reasons = Counter(_kind(reason) for reason in run.state.drop_reasons.values())
    if reasons:
        rows_of_reasons = tuple((reason, _number(count)) for reason, count in reasons.most_common(12))
        blocks.append(_Table(head=("reason of a drop", "rollouts"), rows=rows_of_reasons))
    return blocks


def _kind(reason: str) -> str:
    """Reason of a drop without its particulars: what stands after a colon, or the rollout that a group lost."""
    lost = "its group lost "
    return f"{lost}a rollout" if reason.startswith(lost) else reason.split(":")[0]


def _origin(run: RunData) -> _Table:
    rows = [("folder", f"`{run.path}`")]
    for key, value in run.environment.items():
        text = ", ".join(f"{name} {version}" for name, version in value.items()) if isinstance(value, dict) else value
        rows.append((key.replace("_", " "), str(text)))
    if len(rows) == 1:
        rows.append(("machine and versions", "environment.json is missing"))
    return _Table(head=("", ""), rows=tuple(rows))


def _to_markdown(title: str, sections: Iterable[tuple[str, list[_Block]]]) -> str:
    lines = [f"# {title}", ""]
    for heading, blocks in sections:
        lines += [f"## {heading}", ""]
        for block in blocks:
            match block:
                case str():
                    lines += [block, ""]
                case _List():
                    lines += [*(f"- {item}" for item in block.items), ""]
                case _Picture():
                    lines += [f"### {block.title}", "", f"![{block.title}]({block.name}.png)", "", block.caption, ""]
                case _Table():
                    cells = [block.head, tuple("---" for _ in block.head), *block.rows]
                    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
                    lines.append("")
    return "\n".join(lines)


def _text(text: str) -> str:
    """Escaped, with `code` marked."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _to_html(title: str, sections: Iterable[tuple[str, list[_Block]]]) -> str:
    body = [f"<h1>{_text(title)}</h1>"]
    for heading, blocks in sections:
        body.append(f"<h2>{_text(heading)}</h2>")
        for block in blocks:
            match block:
                case str():
                    body.append(f"<p>{_text(block)}</p>")
                case _List():
                    body.append("<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>")
                case _Picture():
                    image = base64.b64encode(block.png).decode()
                    body.append(
                        f'<figure><h3>{_text(block.title)}</h3><img alt="{html.escape(block.title)}" '
                        f'src="data:image/png;base64,{image}"><figcaption>{_text(block.caption)}</figcaption></figure>'
                    )
                case _Table():
                    body.append(_html_table(block))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{html.escape(title)}</title><style>{_CSS}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _html_table(table: _Table) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in table.head) if any(table.head) else ""
    rows = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{rows}</table>"
