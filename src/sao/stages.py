"""What a run does, one stage after another, each kept in the run folder so that a resumed run does not repeat it.

prepare -> sft -> value pretraining -> train (evaluation within) -> report

tokenizer/  start/          what the run began with
sft/model/                  the fine-tuned policy, if the configuration has sft stages
value_pretraining/log/      rollouts of the starting policy
checkpoints/                the first commit ends value pretraining; the others are training's
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch

from sao.build import (
    cluster_rooms,
    make_engine,
    make_renderer,
    make_sinks,
    make_trainer,
    make_worker,
    prepare_model,
    prepare_tokenizer,
    worker_restarts,
)
from sao.clock import Clock, RealClock, VirtualClock, run_virtual
from sao.cluster.connect import cluster
from sao.config import RunConfig, SftStageConfig
from sao.envs.demonstrations import demonstrate
from sao.envs.select import make_expert, make_source, make_world
from sao.envs.traces import Trace, read_traces
from sao.evaluator import Evaluator
from sao.intake import play_all
from sao.interruptions import Restarts, Stops
from sao.loop import Outcome, Parts, Start
from sao.models.load import add_tokenizer, load_folder, save_model
from sao.observe.metrics import Metrics
from sao.observe.metrics import last as last_of
from sao.observe.sinks import MetricsSink
from sao.orchestrator import Orchestrator
from sao.pipeline.baselines import make_baseline
from sao.resume import commit_run, start_from, uncommitted
from sao.rollout.protocol import RolloutWorker
from sao.rollout.worker import rollout_seed
from sao.store.log import RolloutLogWriter, read
from sao.store.records import Finished
from sao.store.run_folder import Checkpoint, Manifest, RunFolder
from sao.training.protocol import Trainer, TrainerLostError
from sao.training.sft import fit_sft, render_trace
from sao.training.weights import prune_snapshots
from sao.types import Rollout

Last = Literal["sft", "value_pretraining", "train"]
"""The stage to stop after."""


class Reporter(Protocol):
    """Shows people what a run does."""

    def say(self, text: str) -> None:
        """A line."""
        ...

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """How far long work has come; done = total ends it."""
        ...

    def row(self, step: int, version: int, stage: str, metrics: Metrics) -> None:
        """A row of metrics was written."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What every later stage reads."""

    config: RunConfig
    """Resolved, as the folder keeps it."""
    folder: RunFolder
    """The run folder, open for writing."""
    tokenizer: Path
    """Folder of the tokenizer that rollouts are rendered with."""
    model: Path
    """Weights that training starts from."""
    reporter: Reporter
    """Who shows people what happens."""
    sinks: tuple[MetricsSink, ...]
    """Besides metrics.jsonl."""

    def emit(self, step: int, version: int, stage: str, metrics: Metrics) -> None:
        """Write a row of metrics, and show it."""
        self.write(step, version, stage, metrics)
        self.reporter.row(step, version, stage, metrics)

    def write(self, step: int, version: int, stage: str, metrics: Metrics) -> None:
        """Write a row of metrics."""
        row = {"step": step, "version": version, "stage": stage, **{key: m.value for key, m in metrics.items()}}
        self.folder.write_metrics(row)
        for sink in self.sinks:
            sink.write(row)


def run_stages(
    config: RunConfig,
    folder: RunFolder,
    reporter: Reporter,
    *,
    last: Last = "train",
    checkpoint: Checkpoint | None = None,
) -> Outcome | None:
    """Do what the folder does not hold yet, up to the stage `last`. Returns how training ended, if it came to it.

    A first Ctrl-C or SIGTERM while training ends it after the step under way, committed; any other raises
    KeyboardInterrupt. An evaluation under way is waited for in virtual time; in real time it is cancelled: that of the
    step which the run stopped at comes again on resume, an earlier one is left out.
    """
    checkpoint = checkpoint or latest_commit(folder)
    tokenizer = prepare_tokenizer(config, folder.path / "tokenizer")
    model = prepare_model(config, tokenizer, folder.path / "start")
    sinks = make_sinks(config, folder.path)
    prepared = Prepared(config=config, folder=folder, tokenizer=tokenizer, model=model, reporter=reporter, sinks=sinks)
    try:
        if config.sft:
            prepared = replace(prepared, model=run_sft(prepared))
            torch.cuda.empty_cache()  # Trainer and engine need the memory that fine-tuning had on a GPU.
        if last == "sft":
            return None
        # In virtual time training happens here, and its numbers must not depend on the machine's cores.
        torch.set_num_threads(config.trainer.threads)
        if config.clock == "virtual":
            return run_virtual(train_run(prepared, checkpoint, last=last))
        with folder.warnings_as_events(), cluster(config.cluster, cluster_rooms(config)):
            return asyncio.run(train_run(prepared, checkpoint, last=last))
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
    finally:
        for sink in sinks:
            sink.close()


def latest_commit(folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint; None before the first commit. Raises ValueError if it is damaged, or was taken away."""
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None and next(iter(read(folder.log)), None) is not None:
        raise ValueError(
            f"{folder.checkpoints} holds no checkpoint, but training was logged in {folder.log}: the checkpoints were "
            "deleted or moved. Put them back, or start a new run; its value_pretraining.logged may name this log"
        )
    return checkpoint


def check_settled(old: RunConfig, new: RunConfig, folder: RunFolder) -> None:
    """Raise ValueError for a setting that has done its work in this run, so that changing it would change nothing."""
    committed = bool(folder.checkpoint_paths())
    settled = {
        "seed": committed,
        "clock": committed,
        "tokenizer": True,
        "model": True,
        "sft": committed or (folder.path / "sft" / "model").is_dir(),
        "value_pretraining": committed,
    }
    # These are read whenever the weights are.
    kept = {name: getattr(old.model, name) for name in ("dtype", "attention", "device")}
    alike = replace(new, model=replace(new.model, **kept))
    for name in settled:
        if settled[name] and getattr(old, name) != getattr(alike, name):
            raise ValueError(
                f"{name} is settled in {folder.path}: the run was prepared with {getattr(old, name)}, and "
                f"{getattr(new, name)} would change nothing. Start a new run for it"
            )


def run_sft(prepared: Prepared) -> Path:
    """Fine-tune the starting policy, stage by stage; returns the folder of the result, which is kept."""
    config, target = prepared.config, prepared.folder.path / "sft" / "model"
    if target.is_dir():
        return target
    torch.set_num_threads(config.sft_threads)
    actor = load_folder(
        prepared.model,
        dtype=getattr(torch, config.model.dtype),
        attention=config.model.attention,
        device=config.model.device,
    )
    renderer = make_renderer(config, prepared.tokenizer)
    done_before = 0
    for number, stage in enumerate(config.sft, start=1):
        name = f"sft {number} of {len(config.sft)}"
        prepared.reporter.say(f"{name}: collecting traces")
        traces = sft_traces(config, stage, number)
        examples = [render_trace(trace.messages, renderer, renderer.encode_action) for trace in traces]

        def show(done: int, total: int, metrics: Metrics, name: str = name, before: int = done_before) -> None:
            prepared.reporter.progress(name, done, total, f"loss {metrics['sft/loss'].value:.3f}")
            if done % 10 == 0 or done == total:
                prepared.write(before + done, 0, "sft", metrics)

        done_before += len(fit_sft(actor, examples, stage.fit, seed=config.seed, progress=show))
    draft = target.with_name("model.partial")
    save_model(actor, draft)
    add_tokenizer(draft, prepared.tokenizer)
    draft.rename(target)
    prepared.folder.write_event(f"sft done: {done_before} updates in {len(config.sft)} stages")
    return target


def sft_traces(config: RunConfig, stage: SftStageConfig, number: int) -> list[Trace]:
    """Traces of a stage: from its file, or demonstrations. Raises ValueError if there is none."""
    if stage.traces:
        traces = [trace for trace in read_traces(Path(stage.traces)) if trace.reward > 0 or not stage.only_right]
    else:
        traces = demonstrate(
            make_source(config.tasks, "sft", seed=config.seed),
            lambda clock: make_world(config.environment, config.tasks, clock, seed=config.seed).make_environment(),
            make_expert(config.tasks, stage.noise, seed=config.seed),
            count=stage.demonstrations,
            max_turns=config.rollout.max_turns,
            only_right=stage.only_right,
        )
    if not traces:
        raise ValueError(f"stage {number} of sft has no traces left; check sft.traces and sft.only_right")
    return traces


async def train_run(prepared: Prepared, checkpoint: Checkpoint | None, *, last: Last) -> Outcome | None:
    """Value pretraining, if it is not done, and training; again after the trainer was lost, from the last commit."""
    stops, restarts = Stops(prepared.reporter.say), Restarts(prepared.config.trainer.max_restarts)
    found = prepared.folder.checkpoint_paths()[-1:]
    while True:
        try:
            return await _train(prepared, checkpoint, stops, restarts, last=last)
        except TrainerLostError as error:
            stops.orchestrator = None
            if stops.asked or (pause := restarts.another()) is None:
                raise
            if prepared.folder.checkpoint_paths()[-1:] != found:
                # Only a commit made here: the newest that was found may be one that `checkpoint` was chosen over.
                checkpoint = latest_commit(prepared.folder)
            said = f"the trainer was lost; starting again from the last commit: {error}"
            prepared.folder.write_event(said)
            prepared.reporter.say(said)
            await asyncio.sleep(pause)


async def _train(
    prepared: Prepared, checkpoint: Checkpoint | None, stops: Stops, restarts: Restarts, *, last: Last
) -> Outcome | None:
    """Everything started, driven and taken down, once."""
    config, folder = prepared.config, prepared.folder
    clock: Clock = VirtualClock() if config.clock == "virtual" else RealClock()
    clock.now()
    async with AsyncExitStack() as stack:
        trainer = make_trainer(config, clock, prepared.model, folder.snapshots, _show_fitting(prepared.reporter))
        stack.push_async_callback(trainer.stop)
        start = await _start(prepared, trainer, checkpoint)
        snapshot = await trainer.publish_initial(start.version, dict(start.edges)[start.version])
        engine = await make_engine(config, clock, snapshot)
        stack.push_async_callback(engine.stop)
        worker, world = await make_worker(
            config, clock, engine, prepared.tokenizer, purpose="training", on_restart=folder.write_event
        )
        stack.push_async_callback(worker.stop)
        if world is not None:
            stack.push_async_callback(world.stop)
        log = RolloutLogWriter(folder.log, inline=clock.virtual)
        stack.callback(log.close)

        async def commit(manifest: Manifest) -> None:
            await commit_run(folder, trainer, manifest, clock, prepared.tokenizer)
            restarts.committed()

        if checkpoint is None and config.value_pretraining is not None:
            await pretrain_values(prepared, clock, trainer, worker)
        if (beginning := uncommitted(checkpoint, folder)) is not None:
            await commit(beginning)
        if last == "value_pretraining":
            return None
        evaluator = Evaluator(config, clock, prepared.tokenizer, prepared.reporter.progress)
        stack.push_async_callback(evaluator.stop)
        parts = Parts(
            clock=clock,
            source=make_source(config.tasks, "train", seed=config.seed, tasks_per_step=config.tasks_per_step),
            worker=worker,
            engine=engine,
            trainer=trainer,
            baseline=make_baseline(config.baseline),
            log=log,
            commit=commit,
            evaluate=evaluator,
            evaluate_every=config.evaluation.every_steps,
            emit=partial(_emit_counted, prepared, restarts.count),
            prune=lambda keep: prune_snapshots(folder.snapshots, keep=keep),
            collapsed=config.evaluation.collapse_rule(start.evaluations),
            ends_differ=bool(config.evaluation.final_tasks),
            note=folder.write_event,
            worker_restarts=lambda: worker_restarts(worker),
        )
        orchestrator = Orchestrator(parts, config.loop, start, snapshot, seed=config.seed)
        stops.orchestrator = orchestrator
        stops.listen()
        outcome = await orchestrator.run()
        folder.write_event(f"ended at step {outcome.steps}: {outcome.reason}")
        return outcome


async def _start(prepared: Prepared, trainer: Trainer, checkpoint: Checkpoint | None) -> Start:
    """Where the loop begins, with the trainer's weights of there."""
    if checkpoint is None:
        return Start()
    folder = prepared.folder
    await trainer.load(str(checkpoint.path / "trainer"))
    start = start_from(checkpoint, folder, group_size=prepared.config.loop.group_size)
    folder.write_event(f"resumed at step {start.step}, version {start.version}")
    if start.quarantined:
        lost = f"{start.quarantined} damaged records of the log were left out"
        folder.write_event(lost)
        prepared.reporter.say(lost)
    return start


def _emit_counted(prepared: Prepared, restarts: int, step: int, version: int, stage: str, metrics: Metrics) -> None:
    counted = {"loop/trainer_restarts": last_of(restarts)} if stage == "train" else {}
    prepared.emit(step, version, stage, {**metrics, **counted})


def _show_fitting(reporter: Reporter) -> Callable[[int, int, Metrics], None]:
    def show(done: int, total: int, metrics: Metrics) -> None:
        reporter.progress("value pretraining", done, total, f"loss {metrics['value_pretraining/loss'].value:.3f}")

    return show


async def pretrain_values(prepared: Prepared, clock: Clock, trainer: Trainer, worker: RolloutWorker) -> None:
    """Fit the critic to returns of the starting policy's rollouts, logged first."""
    config, folder = prepared.config, prepared.folder
    stage = config.value_pretraining
    assert stage is not None
    if stage.logged:
        rollouts = logged_rollouts(Path(stage.logged))[: stage.rollouts]
        if not rollouts:
            raise ValueError(f"value_pretraining.logged: there is no trainable rollout in {stage.logged}")
    else:
        rollouts = await collect_rollouts(prepared, clock, worker, stage.rollouts)
    prepared.reporter.say(f"value pretraining on {len(rollouts)} rollouts")
    metrics = await trainer.fit_values(rollouts)
    prepared.emit(0, 0, "value_pretraining", metrics)
    folder.write_event(f"value pretraining done: {len(rollouts)} rollouts")


def logged_rollouts(log: Path) -> list[Rollout]:
    """Finished, trainable rollouts of a log, in completion order."""
    records = (record for record in read(log) if isinstance(record, Finished))
    return [record.rollout for record in records if record.rollout.trainable]


async def collect_rollouts(prepared: Prepared, clock: Clock, worker: RolloutWorker, count: int) -> list[Rollout]:
    """Rollouts of the starting policy on tasks of the sft stream, logged; those of an earlier try are kept."""
    config = prepared.config
    path = prepared.folder.path / "value_pretraining" / "log"
    path.mkdir(parents=True, exist_ok=True)
    done = {rollout.task_id: rollout for rollout in logged_rollouts(path)}
    source = make_source(config.tasks, "sft", seed=config.seed + 1)
    tasks = [task for task in map(source.at, range(count)) if task is not None]
    missing = [task for task in tasks if task.id not in done]
    log = RolloutLogWriter(path, inline=clock.virtual)
    try:
        ended = await play_all(
            missing,
            worker,
            log,
            config.loop,
            seed_of=lambda task, attempt: rollout_seed(config.seed, f"value pretraining {task.id}", attempt),
            position=len(done),
            on_end=lambda number: prepared.reporter.progress(
                "rollouts for value pretraining", len(tasks) - len(missing) + number, len(tasks)
            ),
        )
    finally:
        log.close()
    finished = [*done.values(), *(rollout for rollout in ended if rollout.trainable)]
    if len(finished) < max(2, count // 2):
        raise ValueError(
            f"only {len(finished)} of {count} rollouts for value pretraining can be trained on; look at the "
            "environment with `sao rollout` first"
        )
    return finished
