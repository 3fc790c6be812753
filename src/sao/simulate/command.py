"""The command `sao simulate`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from sao.simulate.plan import places, read_plan
from sao.simulate.report import table, write_results
from sao.simulate.results import cells, run_all

DEFAULT = Path("experiments/simulate/plan.toml")
"""The plan of this repository."""


def simulate(
    plan: Annotated[Path, typer.Argument(help="TOML plan of the simulation.")] = DEFAULT,
    override: Annotated[list[str] | None, typer.Option("--set", help="For all runs: key=value. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results, overwritten; runs/simulate by default.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once, a core each.", min=1)] = 1,
) -> None:
    """Predict throughput, idle shares and ages of schedules, from costs in seconds alone: docs/simulate.md."""
    what = read_plan(plan)
    found = list(places(what, override or ()))
    folder = out or Path("runs") / "simulate"
    folder.mkdir(parents=True, exist_ok=True)
    with typer.progressbar(length=len({place.config for place in found}), label="runs") as bar:
        runs = run_all(found, jobs=jobs, progress=lambda: bar.update(1))
    tables = {curve: cells(what, curve, found, runs) for curve in what.curves}
    for curve, rows in tables.items():
        typer.echo("\n".join([f"\n{curve.name}", *table(curve, rows)]))
    words = ["sao", "simulate", os.path.relpath(plan), *(w for o in override or () for w in ("--set", o))]
    write_results(tables, found, runs, folder, shlex.join(words))
    typer.echo(f"\nresults: {folder / 'summary.md'}")
