"""The command `sao simulate`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from sao.simulate.plan import places, read_plan
from sao.simulate.report import RESULTS, failures, table, write_results
from sao.simulate.results import cells, kept_runs, run_all

DEFAULT = Path("experiments/simulate/plan.toml")
"""The plan of this repository."""


def simulate(
    plan: Annotated[Path, typer.Argument(help="TOML plan of the simulation.")] = DEFAULT,
    override: Annotated[list[str] | None, typer.Option("--set", help="For all runs: key=value. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results; runs/simulate by default.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once, a core each.", min=1)] = 1,
) -> None:
    """Predict throughput, idle shares and ages of schedules, from costs in seconds alone: docs/simulate.md.

    Runs that are in the folder already are not repeated; those that failed are.
    """
    what = read_plan(plan)
    found = list(places(what, override or ()))
    folder = out or Path("runs") / "simulate"
    folder.mkdir(parents=True, exist_ok=True)
    configs = dict.fromkeys(place.config for place in found)
    kept = kept_runs(configs, folder / RESULTS)
    lacking = [config for config in configs if config not in kept]
    typer.echo(f"{len(kept)} of {len(configs)} runs are in {folder / RESULTS}")
    with typer.progressbar(length=len(lacking), label="runs") as bar:
        runs = kept | run_all(lacking, folder / RESULTS, jobs=jobs, progress=lambda: bar.update(1))
    tables = {curve: cells(what, curve, found, runs) for curve in what.curves}
    for curve, rows in tables.items():
        typer.echo("\n".join([f"\n{curve.name}", *table(what, curve, rows)]))
    words = ["sao", "simulate", os.path.relpath(plan), *(w for o in override or () for w in ("--set", o))]
    failed = failures(found, runs)
    write_results(what, tables, failed, folder, shlex.join(words))
    typer.echo("\n".join(["", *failed, f"results: {folder / 'summary.md'}"]))
    if failed:
        raise typer.Exit(1)
