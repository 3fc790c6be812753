"""Single stages outside a run: evaluating a policy, and collecting rollouts of a policy or of a teacher."""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sao.build import cluster_rooms, make_engine, make_renderer, make_worker, prepare_model, prepare_tokenizer
from sao.clock import RealClock
from sao.cluster.connect import cluster
from sao.config import RunConfig
from sao.envs.protocol import WorldError
from sao.envs.select import make_source, make_world
from sao.envs.traces import write_traces
from sao.evaluate import Evaluation, evaluate
from sao.evaluator import evaluation_tasks
from sao.intake import play_all
from sao.models.load import load_folder
from sao.rollout.protocol import RolloutWorker
from sao.rollout.renderer import ChatRenderer
from sao.rollout.teacher import Collected, TeacherConfig, collect_traces
from sao.rollout.transcript import trace_of
from sao.rollout.worker import Purpose, rollout_seed
from sao.store.log import RolloutLogWriter, read
from sao.store.records import Finished
from sao.store.run_folder import RunFolder, read_checkpoint
from sao.training.weights import SnapshotStore
from sao.types import Task

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Weights with their tokenizer."""

    config: RunConfig
    """Says how it is played: environment, limits, engine."""
    model: Path
    """Folder with config and safetensors, or a hub name."""
    tokenizer: Path
    """Folder of its tokenizer."""

    @property
    def renderer(self) -> ChatRenderer:
        """Text to tokens and back."""
        return make_renderer(self.config, self.tokenizer)


def policy_of_config(config: RunConfig, scratch: Path) -> Policy:
    """The configuration's own model; built models and tokenizers are written below `scratch`."""
    tokenizer = prepare_tokenizer(config, scratch / "tokenizer")
    return Policy(config=config, model=prepare_model(config, tokenizer, scratch / "start"), tokenizer=tokenizer)


def policy_of_run(config: RunConfig, folder: RunFolder, checkpoint: Path | None = None) -> Policy:
    """The policy a run has come to: its newest checkpoint, or its fine-tuned or starting model before the first."""
    tokenizer = prepare_tokenizer(config, folder.path / "tokenizer")
    chosen = folder.latest_checkpoint() if checkpoint is None else read_checkpoint(checkpoint)
    candidates = [chosen.path / "trainer" / "actor"] if chosen is not None else []
    candidates += [folder.path / "sft" / "model", folder.path / "start"]
    model = next((candidate for candidate in candidates if candidate.is_dir()), Path(config.model.path))
    return Policy(config=config, model=model, tokenizer=tokenizer)


@asynccontextmanager
async def playing(policy: Policy, scratch: Path, *, purpose: Purpose) -> AsyncGenerator[RolloutWorker]:
    """A worker that plays the policy, with an engine of its own."""
    clock = RealClock()
    model = load_folder(policy.model)
    snapshot = SnapshotStore(scratch / "snapshots").write(model, version=0, parent=None)
    with cluster(policy.config.cluster, cluster_rooms(policy.config)):
        engine = await make_engine(policy.config, clock, snapshot, purpose=purpose)
        try:
            worker, world = await make_worker(policy.config, clock, engine, policy.tokenizer, purpose=purpose)
            try:
                yield worker
            finally:
                await worker.stop()
                if world is not None:
                    await world.stop()
        finally:
            await engine.stop()


def evaluate_policy(policy: Policy, scratch: Path, progress: Progress) -> Evaluation:
    """Play the evaluation tasks. Raises WorldError if nothing could be measured."""
    config = policy.config.evaluation
    tasks = evaluation_tasks(policy.config, config.final_tasks or config.tasks)

    async def run() -> Evaluation:
        async with playing(policy, scratch, purpose="evaluation") as worker:
            return await evaluate(
                tasks,
                worker,
                samples=config.samples,
                concurrency=policy.config.loop.concurrency,
                seed=config.seed,
                on_progress=lambda done, total: progress("evaluation", done, total),
            )

    evaluation = asyncio.run(run())
    if evaluation.outcomes and all(outcome.reward is None for outcome in evaluation.outcomes):
        raise WorldError(
            f"all {len(evaluation.outcomes)} rollouts were lost to infrastructure, so nothing was measured. The first: "
            f"{evaluation.outcomes[0].failure_text}"
        )
    return evaluation


def save_evaluation(evaluation: Evaluation, config: RunConfig, path: Path) -> None:
    """Every outcome and every row, as JSON."""
    rows = {key: metric.value for key, metric in evaluation.metrics(config.evaluation).items()}
    outcomes = [[each.task_id, each.sample, each.reward] for each in evaluation.outcomes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "outcomes": outcomes}, indent=1) + "\n")


def collect(policy: Policy, scratch: Path, out: Path, *, count: int, only_right: bool, progress: Progress) -> int:
    """Play `count` training tasks: rollouts into the log folder `out`/log, traces into `out`/traces.jsonl.

    Returns the number of traces. Whatever ends it early, Ctrl-C too, the traces of what was played are written, and a
    note on the exception says so. The log is what `value_pretraining.logged` reads, the traces what `sft.traces` reads.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; name another folder")
    config = policy.config
    source = make_source(config.tasks, "train", seed=config.seed, tasks_per_step=config.tasks_per_step)
    tasks = [task for task in map(source.at, range(count)) if task is not None]
    if not tasks:
        raise ValueError(f"the task source {source.name} has no task")
    (out / "log").mkdir(parents=True)
    log = RolloutLogWriter(out / "log")

    async def run() -> None:
        async with playing(policy, scratch, purpose="training") as worker:
            await play_all(
                tasks,
                worker,
                log,
                config.loop,
                seed_of=lambda task, attempt: rollout_seed(config.seed, task.id, attempt),
                on_end=lambda ended: progress("rollouts", ended, len(tasks)),
            )

    def write() -> tuple[int, int]:
        """Traces written, and rollouts played, as the log has them."""
        log.close()
        done = [record.rollout for record in read(out / "log") if isinstance(record, Finished)]
        if not done:
            shutil.rmtree(out)
            return 0, 0
        kept = [rollout for rollout in done if rollout.reward > 0 or not only_right]
        traces = [trace_of(rollout, policy.renderer) for rollout in kept]
        return write_traces(out / "traces.jsonl", traces), len(done)

    try:
        asyncio.run(run())
    except BaseException as error:
        traces, played = write()
        if played:
            error.add_note(f"{traces} traces of the {played} rollouts played so far are in {out / 'traces.jsonl'}")
        raise
    traces, played = write()
    if not played:
        raise WorldError(f"none of {len(tasks)} tasks gave a rollout that can be trained on; see the messages above")
    return traces


def collect_from_teacher(
    config: RunConfig, teacher: TeacherConfig, out: Path, *, count: int, progress: Progress
) -> Collected:
    """Let an OpenAI-compatible model play `count` training tasks; traces go to `out`/traces.jsonl, resumable."""
    clock = RealClock()
    source = make_source(config.tasks, "train", seed=config.seed, tasks_per_step=config.tasks_per_step)
    done = 0

    def report(task: Task, trace: object) -> None:
        nonlocal done
        done += 1
        progress("teacher", done, count)

    async def collect() -> Collected:
        world = make_world(config.environment, config.tasks, clock, seed=config.seed)
        make, path = world.make_environment, out / "traces.jsonl"
        tasks = [task for task in map(source.at, range(count)) if task is not None]
        try:
            return await collect_traces(tasks, make, path, teacher, clock, progress=report)
        finally:
            await world.stop()

    return asyncio.run(collect())
