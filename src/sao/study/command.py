"""The command `sao study`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from sao.config import RunConfig
from sao.preflight import preflight
from sao.study.plan import Plan, arm_configs, read_plan, require_arm
from sao.study.report import write_study_report
from sao.study.results import require_match, run_folder
from sao.study.runner import Runner
from sao.study.verdicts import sentence

QUICK = Path("experiments/paper/quick.toml")
"""The small plan of this repository."""

PlanPath = Annotated[Path | None, typer.Argument(help="TOML plan of the study.", show_default=False)]
Folder = Annotated[
    Path | None, typer.Option("--folder", help="Folder of results; results/NAME beside the plan by default.")
]
Work = Annotated[Path | None, typer.Option("--work", help="Folder for what is under way; runs/study-NAME by default.")]


def study(
    plan: PlanPath = None,
    folder: Folder = None,
    work: Work = None,
    jobs: Annotated[int, typer.Option(help="Runs at once, a core each.", min=1)] = 2,
    hours: Annotated[float | None, typer.Option(help="Start no run that would not end within these.", min=0.0)] = None,
    only: Annotated[list[str] | None, typer.Option(help="Arm to run. Repeatable; all by default.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat runs that failed.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Run nothing: report on what is kept.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help=f"The small plan {QUICK}, in place of PLAN.")] = False,
) -> None:
    """Compare recipes over seeds: run what the plan lacks, and report with a verdict per claim.

    What ended counts as done, so the same command goes on after a kill, or in slices by --hours.
    """
    path = _plan_path(plan, quick=quick)
    what = read_plan(path)
    for name in only or ():
        require_arm(what, name, "--only")
    configs = arm_configs(what, path)
    beside = Path("runs") / what.name if quick else path.parent / "results" / what.name
    results = folder or beside
    require_match(configs, results)
    typed = f"sao study {shlex.quote(os.path.relpath(path))}"
    if not report:
        _refuse_problems(what, configs, results, only or ())
        runner = Runner(
            plan=what,
            configs=configs,
            results=results,
            work=work or Path("runs") / f"study-{what.name}",
            jobs=jobs,
            hours=hours,
            command=shlex.split(typed),
            say=typer.echo,
            only=only or (),
            again=again,
        )
        done = runner.run()
        left = f"; {done.left} are left for the next call" if done.left else ""
        typer.echo(f"{done.done} runs ended, {done.failed} failed{left}")
    found = write_study_report(what, configs, results, typed)
    for finding in found:
        typer.echo(f"{finding.claim.id}: {finding.verdict}. {sentence(finding, what)}")
    typer.echo(f"report: {results / 'README.md'}")


def _plan_path(plan: Path | None, *, quick: bool) -> Path:
    if quick and plan is not None:
        raise ValueError(f"--quick stands for {QUICK}; leave out {plan}, or --quick")
    if not quick and plan is None:
        raise ValueError(f"name a plan, or --quick for {QUICK}")
    return QUICK if plan is None else plan


def _refuse_problems(
    plan: Plan, configs: dict[tuple[str, int], RunConfig], results: Path, only: list[str] | tuple[()]
) -> None:
    """Raise ValueError for what can be known before hours of runs: preflight of each arm that has any to do."""
    problems: list[str] = []
    for arm in plan.arms:
        seeds = [seed for seed in range(plan.seeds_of(arm.name)) if not run_folder(results, arm.name, seed).is_dir()]
        if seeds and (not only or arm.name in only):
            found = preflight(configs[arm.name, seeds[0]])
            problems += [f"arm {arm.name}: {finding.text}" for finding in found if not finding.good]
    if problems:
        raise ValueError("\n".join(problems))
