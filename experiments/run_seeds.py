"""Runs a configuration for several seeds, and keeps of each what others need to check it, weights left out.

    python experiments/run_seeds.py experiments/demo/config.toml experiments/demo/results --seeds 0 1 2 3 4

A seed whose results are there already is not run again, and one that was stopped is resumed, if its settings are the
command's. The summary gives the gain over the starting policy on the same held-out tasks, seed by seed, with a paired
t-interval over seeds, and names seeds that were kept under other settings.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt

from sao.config import resolve
from sao.config_tree import ConfigError
from sao.evaluate import paired_t_interval
from sao.observe.run_data import Series, read_metrics
from sao.study.keep import METRICS, keep_run
from sao.study.results import changed_settings


def settings_of(seed: int, overrides: list[str]) -> list[str]:
    """What a seed sets above the configuration."""
    return [f"seed={seed}", *overrides]


def mismatches(config: Path, places: Iterable[Path], overrides: list[str]) -> list[str]:
    """A line for each folder of a seed that has other settings than these. Raises ConfigError."""
    lines: list[str] = []
    for place in places:
        seed = int(place.name.removeprefix("seed-").removesuffix(".run"))
        found = changed_settings(place / "config.toml", resolve(config, settings_of(seed, overrides)))
        if found:
            lines.append(f"seed {seed}: {'; '.join(found)}")
    return lines


def run_seed(config: Path, target: Path, seed: int, overrides: list[str]) -> None:
    """One run beside `target`, resumed if an earlier try was stopped; what is kept of it moves there at its end."""
    run = target.with_name(target.name + ".run")
    words = [word for override in settings_of(seed, overrides) for word in ("--set", override)]
    start = ["resume", str(run)] if run.is_dir() else ["train", str(config), "--folder", str(run), *words]
    subprocess.run([sys.executable, "-m", "sao.cli", *start], check=True)
    (run / "report" / "report.html").unlink(missing_ok=True)
    keep_run(run, target, "report")
    shutil.rmtree(run)


def seed_folders(results: Path) -> list[Path]:
    """What is kept of each seed, in order of the seeds."""
    folders = [path for path in results.glob("seed-*") if path.name.removeprefix("seed-").isdigit()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("seed-")))


def summarise(results: Path, command: str) -> str:
    """The table over seeds, as Markdown. A seed with fewer than two evaluations has no gain."""
    lines = [f"Made by `{command}`.", "", "| seed | start | end | gain | held-out EV | seconds | core-seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    gains: list[float] = []
    for folder in seed_folders(results):
        metrics = read_metrics(folder / METRICS)
        _, means = metrics.series("eval/overall/mean", "eval")
        gain = means[-1:] - means[:1] if len(means) > 1 else means[:0]
        gains += gain.tolist()
        _, variance = metrics.series("value_pretraining/explained_variance_held_out", "value_pretraining")
        shown = (
            *map(_three, (means[:1], means[-1:])),
            "".join(f"{value:+.3f}" for value in gain),
            _three(variance[-1:]),
        )
        environment = json.loads((folder / "environment.json").read_text())
        spent = (f"{environment[name]:.0f}" for name in ("seconds", "core_seconds"))
        lines.append(f"| {' | '.join((folder.name.removeprefix('seed-'), *shown, *spent))} |")
    if len(gains) > 1:
        interval = paired_t_interval(gains)
        lines += [
            "",
            f"Gain over {interval.count} seeds: {interval.mean:+.3f}, 95 % paired t-interval {interval.low:+.3f} to "
            f"{interval.high:+.3f}.",
        ]
    return "\n".join(lines) + "\n"


def compare(results: Path, against: Path) -> str:
    """The end of each seed here and in other results, and a 90 % paired t-interval of the difference."""
    lines = [
        "",
        f"Against `{against}`, the same seeds:",
        "",
        "| seed | end | end there | difference |",
        "|---|---|---|---|",
    ]
    differences: list[float] = []
    for folder in seed_folders(results):
        other = against / folder.name
        if other.is_dir():
            ends = [read_metrics(each / METRICS).series("eval/overall/mean", "eval")[1][-1] for each in (folder, other)]
            differences.append(float(ends[0] - ends[1]))
            shown = (folder.name.removeprefix("seed-"), *(f"{end:.3f}" for end in ends), f"{differences[-1]:+.3f}")
            lines.append(f"| {' | '.join(shown)} |")
    if len(differences) > 1:
        interval = paired_t_interval(differences, 0.9)
        lines += [
            "",
            f"Difference over {interval.count} seeds: {interval.mean:+.3f}, 90 % paired t-interval "
            f"{interval.low:+.3f} to {interval.high:+.3f}.",
        ]
    return "\n".join(lines) + "\n"


def _three(found: Series) -> str:
    """The number found, or nothing."""
    return "".join(f"{value:.3f}" for value in found)


def draw(results: Path) -> None:
    """Held-out reward over steps, a line per seed, with its 95 % intervals."""
    figure, axes = plt.subplots(figsize=(7.0, 3.6), layout="constrained")
    for folder in seed_folders(results):
        metrics = read_metrics(folder / METRICS)
        steps, means = metrics.series("eval/overall/mean", "eval")
        (line,) = axes.plot(steps, means, marker="o", markersize=3, label=folder.name.replace("-", " "))
        lows, highs = (metrics.series(f"eval/overall/{end}", "eval")[1] for end in ("low", "high"))
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
    parser.add_argument("--against", type=Path, help="other results to compare the ends with, seed by seed")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    given = parser.parse_args()
    begun = (given.results / f"seed-{seed}.run" for seed in given.seeds)
    try:
        differing = mismatches(given.config, filter(Path.is_dir, begun), given.overrides)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if differing:
        sys.exit(
            f"error: seeds in {given.results} were stopped under other settings than this command's; nothing was run:\n"
            + "".join(f"  {line}\n" for line in differing)
            + "Put the settings back (--set), or move these seeds' folders away"
        )
    for seed in given.seeds:
        target = given.results / f"seed-{seed}"
        if target.is_dir():
            print(f"seed {seed}: {target} is there already")
            continue
        run_seed(given.config, target, seed, given.overrides)
    summary = summarise(given.results, shlex.join(["python", "experiments/run_seeds.py", *sys.argv[1:]]))
    differing = mismatches(given.config, seed_folders(given.results), given.overrides)
    if differing:
        summary += "\nOther settings than the command's:\n\n" + "".join(f"- {line}\n" for line in differing)
    if given.against is not None:
        summary += compare(given.results, given.against)
    (given.results / "summary.md").write_text(summary)
    draw(given.results)
    print(summary)


if __name__ == "__main__":
    main()
