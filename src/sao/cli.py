"""The command `sao`: reinforcement learning of language model agents.

Ctrl-C, or SIGTERM, stops a run after the step under way, to be resumed; a second one stops it at once. With
SAO_TRACEBACK=1 in the environment an error shows where it came from; events.log in the run folder holds that too.
"""

import asyncio
import json
import os
import resource
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sao.build import describe_machine, make_renderer, prepare_tokenizer
from sao.clock import WaitTimeoutError
from sao.config import RunConfig, departures, describe, from_tree, resolve, to_markdown, to_toml
from sao.engines.placement import share_gpus, visible_gpus
from sao.engines.protocol import EngineError
from sao.engines.vllm_server import VllmServer
from sao.envs.protocol import WorldError
from sao.loop import LoopError
from sao.observe.inspector import format_rollout, format_summaries, inspect_rollout, summarise
from sao.observe.report import write_report
from sao.preflight import preflight
from sao.progress import ConsoleReporter
from sao.recipes import RECIPES, find_recipe, recipe_lines, recipes_page
from sao.rollout.pool import WorkerStartError
from sao.rollout.teacher import TeacherError
from sao.simulate.command import simulate
from sao.single import (
    Policy,
    collect,
    collect_from_teacher,
    evaluate_policy,
    policy_of_config,
    policy_of_run,
    save_evaluation,
)
from sao.stages import Last, check_settled, run_stages
from sao.store.files import describe_error
from sao.store.log import LogWriteError
from sao.store.run_folder import STOPPED, Checkpoint, RunFolder, read_checkpoint
from sao.study.command import study
from sao.training.protocol import TrainerError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.command()(study)
app.command()(simulate)

ConfigPath = Annotated[Path, typer.Argument(help="TOML configuration of the run.", show_default=False)]
RunPath = Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value. Repeatable.")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Run folder to create; runs/NAME-TIME by default.")]

USER_ERRORS = (
    ValueError,
    LoopError,
    TrainerError,
    EngineError,
    WorldError,
    WaitTimeoutError,
    LogWriteError,
    TeacherError,
    WorkerStartError,
    OSError,
)
"""Errors whose message says all there is to say; others are faults of this program and show where they came from."""


@app.command()
def train(config: ConfigPath, override: Set = None, folder: Folder = None) -> None:
    """The whole run: (sft) -> (value pretraining) -> SAO -> evaluation -> report, as the configuration names them."""
    _new_run(config, override, folder, last="train")


@app.command()
def sft(config: ConfigPath, override: Set = None, folder: Folder = None) -> None:
    """Only the supervised fine-tuning; `sao resume` goes on from there."""
    _new_run(config, override, folder, last="sft")


@app.command("pretrain-value")
def pretrain_value(config: ConfigPath, override: Set = None, folder: Folder = None) -> None:
    """Up to the value pretraining; `sao resume` goes on from there."""
    _new_run(config, override, folder, last="value_pretraining")


@app.command()
def resume(
    run: RunPath,
    override: Set = None,
    checkpoint: Annotated[Path | None, typer.Option(help="An older checkpoint to go on from.")] = None,
) -> None:
    """Go on after a stop or a crash. The folder's configuration holds; --set changes it, for later resumes too."""
    with RunFolder.resume(run) as folder:
        resolved = resolve(folder.config, override or ())
        chosen = read_checkpoint(checkpoint) if checkpoint is not None else None
        if override:
            check_settled(resolve(folder.config), resolved, folder)
            _refuse_problems(resolved, folder.path)
            folder.write_event("resumed with " + " ".join(override))
            folder.write_config(to_toml(resolved))
        _go(resolved, folder, last="train", checkpoint=chosen)


@app.command()
def check(config: ConfigPath, override: Set = None) -> None:
    """Preflight: everything that can be known before starting."""
    console = Console(highlight=False)
    problems = 0
    resolved = resolve(config, override or ())
    for departure in departures(resolved):
        console.print(f"[yellow]note[/] not as recipe {resolved.recipe} has it: {escape(departure)}", soft_wrap=True)
    for finding in preflight(resolved):
        mark = "[green]ok  [/]" if finding.good else "[red]FAIL[/]"
        console.print(f"{mark} {escape(finding.text)}", soft_wrap=True)
        problems += not finding.good
    if problems:
        raise typer.Exit(2)


@app.command("config")
def show_config(
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/configuration.md holds it.")] = False,
) -> None:
    """Every key of the configuration with its default and meaning."""
    if markdown:
        typer.echo(to_markdown(), nl=False)
        return
    table = Table("key", "default", "meaning", show_lines=False)
    for key, default, meaning in describe():
        table.add_row(escape(key), escape(default), escape(meaning))
    Console().print(table)


@app.command()
def recipes(
    name: Annotated[str, typer.Argument(help="Recipe to show whole; none lists all.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/recipes.md holds them.")] = False,
) -> None:
    """Systems that a configuration can name: `recipe = "NAME"`."""
    if markdown:
        typer.echo(recipes_page(), nl=False)
    elif name:
        typer.echo("\n".join(recipe_lines(find_recipe(name))))
    else:
        table = Table("recipe", "what it is", "ratio against")
        for recipe in RECIPES:
            table.add_row(recipe.name, escape(recipe.deltas), recipe.ratio_against)
        Console().print(table)


def _new_run(config: Path, override: list[str] | None, folder: Path | None, *, last: Last) -> None:
    resolved = resolve(config, override or ())
    if last == "sft" and not resolved.sft:
        raise ValueError(f"{config} has no [[sft]] stage, so there is nothing to fine-tune on; add one")
    if last == "value_pretraining" and resolved.value_pretraining is None:
        raise ValueError(f"{config} has no [value_pretraining] section, so there is nothing to fit; add one")
    path = folder or Path("runs") / f"{resolved.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    _refuse_problems(resolved, path)
    with RunFolder.create(path) as run:
        run.write_config(to_toml(resolved))
        run.write_environment(describe_machine(resolved, sys.argv))
        for departure in departures(resolved):
            run.write_event(f"not as recipe {resolved.recipe} has it: {departure}")
        _go(resolved, run, last=last, checkpoint=None)


def _refuse_problems(config: RunConfig, folder: Path) -> None:
    problems = [finding.text for finding in preflight(config, folder) if not finding.good]
    if problems:
        raise ValueError("\n".join(problems))


def _go(config: RunConfig, folder: RunFolder, *, last: Last, checkpoint: Checkpoint | None) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"run folder: {folder.path}")
    started, go_on = time.monotonic(), f"go on with: sao resume {shlex.quote(str(folder.path))}"
    try:
        with ConsoleReporter(config.loop.steps, console) as reporter:
            outcome = run_stages(config, folder, reporter, last=last, checkpoint=checkpoint)
    except KeyboardInterrupt:
        _note(folder, "stopped at once")
        console.print(f"stopped; {go_on}")
        raise typer.Exit(130) from None
    except Exception as error:
        # What reads as a user's error may be a fault of this program.
        _note(folder, f"ended by an error: {error}", *"".join(traceback.format_exception(error)).splitlines())
        if "sao resume" not in str(error):
            error.add_note(f"once that is repaired, {go_on}")
        raise
    finally:
        _count_time(folder, time.monotonic() - started)
    if outcome is None:
        console.print(f"stopped after {last}; {go_on}")
        return
    console.print(f"report: {write_report(folder.path)}")
    console.print(f"model: {folder.checkpoint_paths()[-1] / 'trainer' / 'actor'}")
    if outcome.reason == STOPPED:
        console.print(f"stopped at step {outcome.steps}; {go_on}")
        raise typer.Exit(130)
    console.print(f"ended after {outcome.steps} steps: {outcome.reason}")


@app.command("eval")
def evaluate_command(
    what: Annotated[Path, typer.Argument(help="Run folder, or TOML configuration.", show_default=False)],
    override: Set = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint of the run; the newest by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for every outcome.")] = None,
) -> None:
    """Evaluate the policy of a run or of a configuration: a row per data set."""
    if out is not None and out.exists():
        raise ValueError(f"{out} exists already; name another file")
    with tempfile.TemporaryDirectory() as scratch, ConsoleReporter(0) as reporter:
        policy = _policy(what, override, checkpoint, Path(scratch))
        evaluation = evaluate_policy(policy, Path(scratch), reporter.progress)
    if out is not None:
        save_evaluation(evaluation, policy.config, out)
    settings = policy.config.evaluation
    table = Table("data set", f"mean@{settings.samples}", f"{settings.confidence:.0%} interval", "prompts", "failed")
    for k in settings.pass_k:
        table.add_column(f"pass@{k}")
    for row in evaluation.rows(settings):
        interval = "" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        passes = ["" if value is None else f"{value:.3f}" for _, value in row.pass_at]
        mean = "" if row.mean is None else f"{row.mean:.3f}"
        table.add_row(row.data_set, mean, interval, str(row.prompts), str(row.failed), *passes)
    Console().print(table)
    if evaluation.failed_tasks:
        typer.echo(f"lost to infrastructure, and left out: {', '.join(evaluation.failed_tasks[:10])}", err=True)


@app.command()
def rollout(
    what: Annotated[Path, typer.Argument(help="Run folder, or TOML configuration.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to create: log/ and traces.jsonl.")],
    count: Annotated[int, typer.Option(help="Tasks to play.", min=1)] = 100,
    only_right: Annotated[
        bool | None,
        typer.Option(help="Keep only traces that were graded right; by default a teacher's (teacher.only_right)."),
    ] = None,
    override: Set = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint of the run; the newest by default.")] = None,
    teacher: Annotated[str, typer.Option(help="Address of an OpenAI-compatible teacher, such as .../v1.")] = "",
    teacher_model: Annotated[str, typer.Option(help="Name of the teacher's model; with an address.")] = "",
) -> None:
    """Collect rollouts of a policy (for value pretraining) and traces (for sft), or traces of a teacher."""
    with tempfile.TemporaryDirectory() as scratch, ConsoleReporter(0) as reporter:
        config = _config_of(what, override)
        said: dict[str, Any] = {"base_url": teacher, "model": teacher_model, "only_right": only_right}
        settings = replace(config.teacher, **{key: value for key, value in said.items() if value not in ("", None)})
        if settings.base_url:
            kept = collect_from_teacher(config, settings, out, count=count, progress=reporter.progress).kept
        else:
            policy = _policy(what, override, checkpoint, Path(scratch))
            try:
                kept = collect(
                    policy, Path(scratch), out, count=count, only_right=bool(only_right), progress=reporter.progress
                )
            except KeyboardInterrupt as error:
                typer.echo("\n".join(["stopped", *getattr(error, "__notes__", ())]))
                raise typer.Exit(130) from None
    typer.echo(f"{kept} traces in {out / 'traces.jsonl'}")


@app.command("serve-engine")
def serve_engine(
    model: Annotated[Path, typer.Argument(help="Folder of the model to start with.", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="TOML configuration whose sections engine and vllm hold.")] = None,
    override: Set = None,
    port: Annotated[int, typer.Option(help="TCP port.")] = 8101,
    host: Annotated[str, typer.Option(help="Address to listen at. The routes can do anything: trusted nets only.")] = (
        "127.0.0.1"
    ),
    place: Annotated[
        int, typer.Option(help="0, 1, ...: which cores it takes on a CPU, which GPUs where there are.")
    ] = 0,
) -> None:
    """Serve a model with vLLM, with the flags that training needs, until Ctrl-C."""
    settings = resolve(config, override or ()) if config is not None else from_tree({}, override or ())

    visible, extra_args = visible_gpus(torch.cuda.device_count()), settings.vllm.extra_args
    gpus = share_gpus(visible, servers=place + 1, trainer=0, extra_args=extra_args)[place]

    async def serve() -> None:
        server = await VllmServer.start(
            str(model.absolute()), settings.engine, settings.vllm, index=place, host=host, port=port, gpus=gpus
        )
        try:
            typer.echo(f"serving at {server.address}; end with Ctrl-C")
            await server.wait()
            raise EngineError(f"the server has ended:\n{server.last_words()}")
        finally:
            await server.stop()

    asyncio.run(serve())


@app.command("inspect")
def inspect_command(
    run: RunPath,
    rollout_id: Annotated[str, typer.Argument(help="Rollout to show token by token; none lists all.")] = "",
    every_token: Annotated[bool, typer.Option(help="Observation tokens one by one, too.")] = False,
) -> None:
    """Rollouts as text: a line each, or one token by token with version, log-probs, ratio, mask, value, advantage."""
    folder = RunFolder.open(run)
    if not rollout_id:
        lines = format_summaries(summarise(folder.path))
    else:
        config = resolve(folder.config)
        renderer = make_renderer(config, prepare_tokenizer(config, folder.path / "tokenizer"))
        inspected = inspect_rollout(folder.path, rollout_id, decode=lambda token: renderer.decode([token]))
        lines = format_rollout(inspected, every_token=every_token)
    for line in lines:
        typer.echo(line)


def _config_of(what: Path, override: list[str] | None) -> RunConfig:
    return resolve(RunFolder.open(what).config if what.is_dir() else what, override or ())


def _policy(what: Path, override: list[str] | None, checkpoint: Path | None, scratch: Path) -> Policy:
    config = _config_of(what, ["clock=real", *(override or ())])
    if what.is_dir():
        return policy_of_run(config, RunFolder.open(what), checkpoint)
    return policy_of_config(config, scratch)


def _note(folder: RunFolder, *lines: str) -> None:
    """Lines in the run's events, if the disk still takes them."""
    with suppress(OSError):
        for line in lines:
            folder.write_event(line)


def _count_time(folder: RunFolder, seconds: float) -> None:
    """Add this start, its seconds, and this process's core-seconds with its children's, to those before it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = {"starts": 1, "seconds": seconds, "core_seconds": sum(each.ru_utime + each.ru_stime for each in used)}
    # A full disk, or a file that is missing, must not hide what ended the run.
    with suppress(OSError, ValueError):
        environment = json.loads(folder.environment.read_text())
        for name, number in spent.items():
            environment[name] = round(environment.get(name, 0) + number, 1)
        folder.write_environment(environment)


@app.command()
def report(run: RunPath) -> None:
    """Write the report of a run, finished or not."""
    typer.echo(write_report(RunFolder.open(run).path))


def main() -> None:
    """Entry point: user errors as one message and exit code 2, faults of the program with their trace and 1."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Schedulers and `docker stop` ask so; a run that trains has a handler of its own.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except USER_ERRORS as error:
        if os.environ.get("SAO_TRACEBACK"):
            traceback.print_exc()
        text = "\n".join([f"error: {describe_error(error)}", *getattr(error, "__notes__", ())])
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, style="red", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
