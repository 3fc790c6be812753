"""Runs a configuration for several seeds, and keeps of each what others need to check it, weights left out.

    python experiments/run_seeds.py experiments/demo/config.toml experiments/demo/results --seeds 0 1 2 3 4

A seed whose results are there already is not run again. The summary gives the gain over the starting policy on the same
held-out tasks, seed by seed, with a paired t-interval over seeds.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from sao.evaluate import paired_t_interval

KEPT = ("config.toml", "environment.json", "metrics.jsonl", "report")
"""Of a run folder; weights and the log stay out."""


def run_seed(config: Path, target: Path, seed: int, overrides: list[str]) -> None:
    """One run beside `target`, resumed if an earlier try was stopped; what is kept of it moves there at its end."""
    run = target.with_name(target.name + ".run")
    words = [word for override in (f"seed={seed}", *overrides) for word in ("--set", override)]
    start = ["resume", str(run)] if run.is_dir() else ["train", str(config), "--folder", str(run), *words]
    subprocess.run([sys.executable, "-m", "sao.cli", *start], check=True)
    draft = target.with_name(target.name + ".partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name in KEPT:
        place = run / name
        (shutil.copytree if place.is_dir() else shutil.copy)(place, draft / name)
    (draft / "report" / "report.html").unlink(missing_ok=True)
    draft.rename(target)
    shutil.rmtree(run)


def evaluations(results: Path) -> list[dict[str, float]]:
    """Evaluation rows of a run, in order of their steps."""
    rows = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    return sorted((row for row in rows if row["stage"] == "eval"), key=lambda row: row["step"])


def held_out_explained_variance(results: Path) -> float | None:
    """Of value pretraining; None where there was none."""
    rows = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if row["stage"] == "value_pretraining"]
    return found[-1].get("value_pretraining/explained_variance_held_out") if found else None


def summarise(results: Path, command: str) -> str:
    """The table over seeds, as Markdown."""
    folders = sorted(path for path in results.iterdir() if path.is_dir() and path.name.startswith("seed-"))
    lines = [f"Made by `{command}`.", "", "| seed | start | end | gain | held-out EV | seconds | core-seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    gains: list[float] = []
    for folder in folders:
        first, *_, final = evaluations(folder)
        start, end = first["eval/overall/mean"], final["eval/overall/mean"]
        gains.append(end - start)
        environment = json.loads((folder / "environment.json").read_text())
        variance = held_out_explained_variance(folder)
        shown = "" if variance is None else f"{variance:.3f}"
        seconds, core_seconds = environment["seconds"], environment["core_seconds"]
        lines.append(
            f"| {folder.name[5:]} | {start:.3f} | {end:.3f} | {end - start:+.3f} | {shown} | {seconds:.0f} "
            f"| {core_seconds:.0f} |"
        )
    if len(gains) > 1:
        interval = paired_t_interval(gains)
        lines += [
            "",
            f"Gain over {interval.count} seeds: {interval.mean:+.3f}, 95 % paired t-interval {interval.low:+.3f} to "
            f"{interval.high:+.3f}.",
        ]
    return "\n".join(lines) + "\n"


def draw(results: Path) -> None:
    """Held-out reward over steps, a line per seed, with its 95 % intervals."""
    figure, axes = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
    for folder in sorted(results.glob("seed-*")):
        rows = evaluations(folder)
        steps = [row["step"] for row in rows]
        means = [row["eval/overall/mean"] for row in rows]
        (line,) = axes.plot(steps, means, marker="o", markersize=3, label=folder.name.replace("-", " "))
        lows, highs = ([row[f"eval/overall/{end}"] for row in rows] for end in ("low", "high"))
        axes.fill_between(steps, lows, highs, alpha=0.08, color=line.get_color(), linewidth=0)
    axes.set(xlabel="training step", ylabel="held-out tasks solved", ylim=(0, 1), title="SAO after fine-tuning")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, ncols=3)
    figure.savefig(results / "evaluation.png", dpi=150)
    plt.close(figure)


def main() -> None:
    """Run what is missing, and write summary.md and evaluation.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    given = parser.parse_args()
    for seed in given.seeds:
        target = given.results / f"seed-{seed}"
        if target.is_dir():
            print(f"seed {seed}: {target} is there already")
            continue
        run_seed(given.config, target, seed, given.overrides)
    summary = summarise(given.results, f"python experiments/run_seeds.py {' '.join(sys.argv[1:])}")
    (given.results / "summary.md").write_text(summary)
    draw(given.results)
    print(summary)


if __name__ == "__main__":
    main()
