"""The loop itself: real orchestrator, admission and log rules; engine, world and trainer only cost time."""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.clock import Clock, RealClock, VirtualClock, run_virtual
from sao.engines.protocol import EngineHealth
from sao.loop import EvaluationLostError, LoopConfig, LoopError, Outcome, Parts, Start
from sao.observe.metrics import Metrics
from sao.orchestrator import Orchestrator
from sao.pipeline.baselines import Baseline, CriticBaseline, RunningMeanBaseline
from sao.rollout.worker import rollout_id
from sao.store.records import Admitted, AttemptEnded, Dropped, Finished, Published, Record, Trained
from sao.store.run_folder import Manifest
from sao.training.scripted import ScriptedTrainer
from sao.types import FailureKind, Rollout, Sequence, Snapshot, StopReason, Task, Timings

START = Snapshot(version=0, parent=None, location="", checksum="")


@dataclass
class ListLog:
    """Keeps records; durable at once."""

    records: list[Record] = field(default_factory=list)

    def append(self, record: Record) -> None:
        self.records.append(record)

    async def durable(self) -> None:
        await asyncio.sleep(0)

    def of(self, kind: type) -> list:
        return [record for record in self.records if isinstance(record, kind)]


@dataclass
class TimedEngine:
    """Holds a version; loading takes time."""

    load_seconds: float = 0.0
    version: int = -1

    async def load(self, snapshot: Snapshot) -> None:
        await asyncio.sleep(self.load_seconds)
        self.version = snapshot.version

    async def health(self) -> EngineHealth:
        return EngineHealth(
            version=self.version, running=0, generated_tokens=0, recomputed_tokens=0, busy_seconds=0.0, probe_gap=0.0
        )


@dataclass
class FiniteSource:
    """`size` tasks; endless where it is None."""

    size: int | None = None
    name: str = "test"

    def at(self, index: int) -> Task | None:
        if self.size is not None and index >= self.size:
            return None
        return Task(id=f"t{index}", prompt_id=f"t{index}", question="?", answer="1")


def make_rollout(task: Task, group_id: str, attempt: int, versions: list[int], failure: FailureKind) -> Rollout:
    """One observation token, then one action token per version."""
    count = len(versions) + 1
    mask = np.array([False] + [True] * len(versions))
    sequence = Sequence(
        token_ids=np.arange(count, dtype=np.int32),
        action_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.array([-1, *versions], dtype=np.int32),
        rewards=np.zeros(count, dtype=np.float32),
        turns=np.zeros(count, dtype=np.int32),
    )
    return Rollout(
        id=rollout_id(task.id, attempt),
        task_id=task.id,
        prompt_id=task.prompt_id,
        group_id=group_id,
        attempt=attempt,
        sequences=(sequence,),
        stop_reason=StopReason.ERROR if failure is FailureKind.INFRASTRUCTURE else StopReason.FINISHED,
        failure=failure,
        failure_text="",
        timings=Timings(),
    )


@dataclass
class TimedWorker:
    """Takes keyed random time; fails and comes back empty at keyed random."""

    engine: TimedEngine
    fail: float = 0.0
    empty: float = 0.0
    seconds: float = 1.0
    running: int = 0
    most_running: int = 0

    async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            draw = random.Random(f"{task.id} {attempt}")
            started = self.engine.version
            await asyncio.sleep(self.seconds * draw.expovariate(1.0))
            failed, empty = draw.random() < self.fail, draw.random() < self.empty
            versions = [] if empty else [started, self.engine.version]
            kind = FailureKind.INFRASTRUCTURE if failed else FailureKind.NONE
            return make_rollout(task, group_id, attempt, versions, kind)
        finally:
            self.running -= 1

    async def stop(self) -> None:
        pass


@dataclass
class Setting:
    """Everything a run was made of, for looking at afterwards."""

    log: ListLog
    worker: TimedWorker
    trainer: ScriptedTrainer
    rows: list[tuple[int, int, str, dict]]
    commits: list[Manifest]
    outcome: Outcome | None = None


async def run_loop(
    config: LoopConfig,
    *,
    size: int | None = None,
    fail: float = 0.0,
    empty: float = 0.0,
    load_seconds: float = 0.0,
    actor_seconds: float = 1.0,
    critic_seconds: float = 1.0,
    skip_steps: frozenset[int] = frozenset(),
    start: Start | None = None,
    baseline: Baseline | None = None,
    worker: type[TimedWorker] = TimedWorker,
    evaluations: list[int] | None = None,
    evaluate: Callable[[Snapshot, int, bool], Awaitable[Metrics]] | None = None,
    ends_differ: bool = False,
    notes: list[str] | None = None,
    stop_after: float | None = None,
    pruned: list[set[int]] | None = None,
    clock: Clock | None = None,
    collapsed: Callable[[int, Metrics], bool] = lambda step, metrics: False,
) -> Setting:
    clock = clock or VirtualClock()
    engine = TimedEngine(load_seconds)
    trainer = ScriptedTrainer(
        clock=clock, actor_seconds=actor_seconds, critic_seconds=critic_seconds, skip_steps=skip_steps
    )
    setting = Setting(ListLog(), worker(engine, fail, empty), trainer, [], [])

    async def commit(manifest: Manifest) -> None:
        setting.commits.append(manifest)

    async def evaluate_at_once(snapshot: Snapshot, step: int, at_an_end: bool) -> Metrics:
        assert evaluations is not None
        evaluations.append(step)
        return {}

    parts = Parts(
        clock=clock,
        source=FiniteSource(size),
        worker=setting.worker,
        engine=engine,  # type: ignore[arg-type]
        trainer=trainer,
        baseline=baseline or CriticBaseline(),
        log=setting.log,
        commit=commit,
        evaluate=evaluate or (None if evaluations is None else evaluate_at_once),
        collapsed=collapsed,
        evaluate_every=2,
        emit=lambda step, version, stage, metrics: setting.rows.append(
            (step, version, stage, {key: metric.value for key, metric in metrics.items()})
        ),
        prune=([] if pruned is None else pruned).append,
        ends_differ=ends_differ,
        note=([] if notes is None else notes).append,
    )
    orchestrator = Orchestrator(parts, config, start or Start(), START, seed=0)
    if stop_after is not None:
        asyncio.get_running_loop().call_later(stop_after, orchestrator.stop)
    setting.outcome = await orchestrator.run()
    return setting


def loop_config(**changes: object) -> LoopConfig:
    defaults = {"steps": 5, "batch_size": 4, "concurrency": 4, "max_batches_ahead": 1, "max_failure_share": 1.0}
    return LoopConfig(**{**defaults, **changes})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(st.none(), st.integers(0, 40)),
    group=st.sampled_from([1, 2, 4]),
    batches=st.integers(1, 3),
    concurrency=st.integers(1, 12),
    eta=st.integers(0, 3),
    fail=st.sampled_from([0.0, 0.2, 0.6]),
    empty=st.sampled_from([0.0, 0.3]),
    load=st.sampled_from([0.0, 5.0]),
    over_age=st.sampled_from(["train", "drop", "wait"]),
    retries=st.integers(0, 2),
    order=st.sampled_from(["finished", "admitted"]),
)
def test_no_mixture_of_failures_groups_and_ends_hangs_the_loop(
    size, group, batches, concurrency, eta, fail, empty, load, over_age, retries, order
):
    """Catches a place that is never freed, a batch that never fills, a group trained in part, an id trained twice."""
    config = loop_config(
        batch_size=group * batches,
        group_size=group,
        concurrency=concurrency,
        max_batches_ahead=eta,
        over_age=over_age,
        max_age=3,
        max_retries=retries,
        batch_order=order,
    )
    setting = run_virtual(asyncio.wait_for(run_loop(config, size=size, fail=fail, empty=empty, load_seconds=load), 1e6))
    outcome = setting.outcome
    assert outcome is not None
    assert outcome.reason == ("steps done" if outcome.steps == config.steps else "source exhausted")
    assert setting.worker.most_running <= concurrency
    assert len(set(setting.trainer.consumed)) == len(setting.trainer.consumed)
    for trained in setting.log.of(Trained):
        groups = Counter(rollout_id.split("@")[0].split("#")[0] for rollout_id in trained.rollout_ids)
        assert set(groups.values()) == {group}
    trained_ids = {each for trained in setting.log.of(Trained) for each in trained.rollout_ids}
    dropped_ids = {record.rollout_id for record in setting.log.of(Dropped)}
    assert not trained_ids & dropped_ids
    assert trained_ids <= {record.rollout.id for record in setting.log.of(Finished)}
    if outcome.reason == "source exhausted":
        final = trained_ids | dropped_ids
        tasks = {record.task.id for record in setting.log.of(Admitted)}
        assert tasks == {each.split("@")[0] for each in final}, "a task of a finite source was lost"


def test_the_bound_on_places_holds_at_every_moment():
    """Catches admission that runs ahead of the trainer: ages would grow without bound."""
    config = loop_config(steps=20, concurrency=100, max_batches_ahead=2)
    setting = run_virtual(run_loop(config, actor_seconds=10.0))
    assert max(row[3]["loop/places_held"] for row in setting.rows) <= 3 * config.batch_size
    assert max(row[3]["age/max"] for row in setting.rows) <= 3 + 2


def test_zero_batches_ahead_is_synchronous():
    """Catches a rollout that was sampled before the update it should have waited for."""
    setting = run_virtual(run_loop(loop_config(steps=6, max_batches_ahead=0), load_seconds=3.0))
    assert all(row[3]["age/max"] == 0 for row in setting.rows)
    assert [row[1] for row in setting.rows] == [1, 2, 3, 4, 5, 6]


def test_a_batch_is_in_completion_order():
    """Catches batches in admission order, which wait for stragglers."""
    setting = run_virtual(run_loop(loop_config(steps=3, concurrency=8)))
    finished = [record.rollout.id for record in setting.log.of(Finished)]
    assert setting.trainer.consumed == finished[: len(setting.trainer.consumed)]
    assert [record.position for record in setting.log.of(Finished)] == list(range(len(finished)))


@pytest.mark.parametrize("group", [1, 2])
def test_a_batch_may_be_in_the_order_of_admission(group: int):
    """Catches short rollouts that come sooner than longer ones which began before them."""
    config = loop_config(steps=4, concurrency=12, max_batches_ahead=2, batch_order="admitted", group_size=group)
    setting = run_virtual(run_loop(config))
    admitted = [record.rollout_id for record in setting.log.of(Admitted)]
    assert setting.trainer.consumed == admitted[:16]
    finished = [record.rollout.id for record in setting.log.of(Finished)]
    assert finished[:16] != admitted[:16]


def test_weights_are_on_record_before_an_engine_holds_them():
    """Catches tokens whose version a crash would leave unknown."""
    setting = run_virtual(run_loop(loop_config()))
    known: set[int] = set()
    for record in setting.log.records:
        if isinstance(record, Published):
            known.add(record.snapshot.version)
        if isinstance(record, Finished):
            versions = record.rollout.sequences[0].policy_versions
            assert {int(version) for version in versions if version >= 0} <= known


def test_a_skipped_update_makes_no_version_and_ages_nothing():
    """Catches a version number, or an age, that counts steps instead of actor updates."""
    setting = run_virtual(run_loop(loop_config(steps=4), skip_steps=frozenset({2, 3})))
    assert [row[1] for row in setting.rows] == [1, 1, 1, 2]
    assert setting.rows[-1][3]["loop/skipped_steps"] == 2
    assert setting.rows[2][3]["age/max"] <= 1


def test_infrastructure_failures_beyond_the_share_stop_the_run():
    """Catches a run that burns through its tasks while the sandbox is down."""
    with pytest.raises(LoopError, match=r"max_failure_share"):
        run_virtual(run_loop(loop_config(steps=50, max_failure_share=0.5, max_retries=1), fail=1.0))


def test_infrastructure_failures_are_retried_and_counted_never_trained():
    """Catches reward 0 trained for a crashed sandbox."""
    setting = run_virtual(run_loop(loop_config(steps=10), fail=0.3))
    counts = setting.rows[-1][3]
    assert counts["loop/infrastructure_failures"] > 0
    assert counts["loop/retried"] > 0
    failed = {record.rollout_id for record in setting.log.of(AttemptEnded)}
    assert failed
    assert not failed & set(setting.trainer.consumed)
    attempts = setting.log.of(AttemptEnded)
    assert all(attempt.rollout is not None and attempt.rollout.id == attempt.rollout_id for attempt in attempts)
    assert any(attempt.rollout.sequences for attempt in attempts), "their tokens are lost"


def test_a_finite_source_ends_with_a_stated_partial_batch():
    """Catches an end of data that hangs, or that loses the last rollouts."""
    setting = run_virtual(run_loop(loop_config(steps=100), size=10))
    assert setting.outcome == Outcome(steps=3, version=3, reason="source exhausted", partial_batch=2)
    assert len(setting.trainer.consumed) == 10


def test_the_same_seed_gives_the_same_run():
    """Catches an order that depends on anything but virtual time and sequence numbers."""

    def once() -> list:
        return run_virtual(run_loop(loop_config(steps=8, concurrency=7), fail=0.2, load_seconds=0.7)).rows

    assert once() == once()


def test_dropping_by_age_counts_and_frees_the_places():
    """Catches a drop that leaks its place, so that the loop starves."""
    config = loop_config(steps=15, over_age="drop", max_age=1, max_batches_ahead=4, concurrency=20)
    setting = run_virtual(run_loop(config, actor_seconds=0.1, critic_seconds=0.1))
    assert setting.outcome is not None
    assert setting.outcome.steps == 15
    assert all(row[3]["age/max"] <= 1 for row in setting.rows)
    assert setting.rows[-1][3]["loop/dropped"] == len(setting.log.of(Dropped)) > 0


def test_waiting_for_stragglers_keeps_ages_within_the_bound():
    """Catches over_age = "wait" that looks only at rollouts which have finished."""
    config = loop_config(steps=15, over_age="wait", max_age=2, max_batches_ahead=4, concurrency=20)
    setting = run_virtual(run_loop(config, actor_seconds=0.1, critic_seconds=0.1))
    # The trainer holds while a *running* rollout would pass the bound; ready ones may wait their turn beyond it.
    assert all(row[3]["age/queue"] <= row[3]["age/max"] for row in setting.rows)
    assert max(row[3]["age/max"] for row in setting.rows) <= 2 + config.max_batches_ahead


def test_stopping_finishes_the_step_and_commits():
    """Catches Ctrl-C that loses the step under way."""

    async def interrupted() -> tuple[Outcome, list[Manifest]]:
        clock = VirtualClock()
        engine = TimedEngine()
        trainer = ScriptedTrainer(clock=clock, actor_seconds=1.0)
        commits: list[Manifest] = []

        async def commit(manifest: Manifest) -> None:
            commits.append(manifest)

        parts = Parts(
            clock=clock, source=FiniteSource(), worker=TimedWorker(engine), engine=engine,  # type: ignore[arg-type]
            trainer=trainer, baseline=CriticBaseline(), log=ListLog(), commit=commit, evaluate=None, evaluate_every=10,
            emit=lambda *row: None, prune=lambda versions: None,
        )  # fmt: skip
        orchestrator = Orchestrator(parts, loop_config(steps=1000), Start(), START, seed=0)
        asyncio.get_running_loop().call_later(20.5, orchestrator.stop)
        return await orchestrator.run(), commits

    outcome, commits = run_virtual(interrupted())
    assert outcome.reason == "stopped"
    assert 0 < outcome.steps < 1000
    assert commits[-1].step == outcome.steps
    assert len(commits[-1].consumed) == outcome.steps * 4


def test_a_collapse_that_a_stop_waited_for_ends_the_run():
    """Catches a stopped run that goes on, though the evaluation under way at the stop had found it collapsed."""

    async def evaluate(snapshot: Snapshot, step: int, at_an_end: bool) -> Metrics:
        await asyncio.sleep(100.0)
        return {}

    def outcome(*, collapses: bool) -> str:
        setting = run_virtual(
            run_loop(
                loop_config(steps=50), evaluate=evaluate, stop_after=20.5, collapsed=lambda step, metrics: collapses
            )
        )
        assert setting.outcome is not None
        return setting.outcome.reason

    assert [outcome(collapses=False), outcome(collapses=True)] == ["stopped", "collapsed"]


@dataclass(kw_only=True)
class WatchedBaseline(RunningMeanBaseline):
    """The running mean, with what it gave."""

    given: list[tuple[float, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(128, per_prompt=False)

    def advantages(self, rollouts: list[Rollout]) -> tuple[float, ...]:
        self.given.append(super().advantages(rollouts))
        return self.given[-1]


def test_a_baseline_sees_a_batch_only_after_it_was_compared_with_what_came_before():
    """Catches a reward in its own baseline, and a batch that is compared before the one before it was observed.

    All rewards are 0: the first batch is compared with the start of the mean, 0.5, and every later one with 0.
    """
    baseline = WatchedBaseline()
    setting = run_virtual(run_loop(loop_config(steps=3, concurrency=12), baseline=baseline))
    assert baseline.given == [(-0.5,) * 4, (0.0,) * 4, (0.0,) * 4]
    assert setting.commits[-1].baseline == {"rewards": {"": [0.0] * 12}}


def test_an_incident_that_fails_all_that_is_running_does_not_stop_the_run():
    """Catches one dead process of a hundred episodes taken for a broken world: what is tried again succeeds."""

    class OneIncident(TimedWorker):
        async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
            rollout = await super().run(task, group_id=group_id, attempt=attempt, seed=seed)
            died = attempt == 0 and int(task.id[1:]) < 100
            return make_rollout(task, group_id, attempt, [], FailureKind.INFRASTRUCTURE) if died else rollout

    config = loop_config(steps=8, batch_size=50, concurrency=100, max_failure_share=0.3)
    setting = run_virtual(run_loop(config, worker=OneIncident))
    assert setting.outcome is not None
    assert setting.outcome.reason == "steps done"
    counts = setting.rows[-1][3]
    assert (counts["loop/infrastructure_failures"], counts["loop/retried"], counts["loop/dropped"]) == (100, 100, 0)


def test_a_finished_run_that_is_resumed_only_evaluates_what_it_has_not():
    """Catches a final evaluation that a crash took for ever, and one that is repeated with every resume."""
    for evaluated, expected in (("never", [5]), ("between", []), ("at an end", [])):
        asked: list[int] = []
        start = Start(step=5, version=0, evaluated=evaluated)
        run_virtual(run_loop(loop_config(steps=5), start=start, evaluations=asked))
        assert asked == expected


def test_every_evaluation_happens_once():
    """Catches a step that is evaluated twice because it is due and also the last."""
    for size, expected in ((None, [0, 2, 4, 5]), (12, [0, 2, 3])):
        asked: list[int] = []
        run_virtual(run_loop(loop_config(steps=5), size=size, evaluations=asked))
        assert asked == expected


def test_slow_evaluations_do_not_pile_up():
    """Catches a queue without bound, each entry with a snapshot on the disk, that the run's end then waits for."""
    asked: list[tuple[int, bool]] = []
    notes: list[str] = []
    pruned: list[set[int]] = []

    async def slowly(snapshot: Snapshot, step: int, at_an_end: bool) -> Metrics:
        asked.append((step, at_an_end))
        await asyncio.sleep(200.0)
        return {}

    setting = run_virtual(run_loop(loop_config(steps=100), evaluate=slowly, notes=notes, pruned=pruned))
    steps = [step for step, _ in asked]
    assert steps[0] == 0
    assert steps[-1] == 100
    assert 2 < len(steps) < 10
    assert [at_an_end for _, at_an_end in asked] == [True, *[False] * (len(steps) - 2), True]
    # One is due every second step; each was played, or left out and told.
    assert len(notes) == 51 - len(steps)
    assert notes[0] == "the evaluation of step 2 is left out: that of step 4 was due before it began"
    counts = [row[3]["loop/evaluations_lost"] for row in setting.rows if row[2] == "train"]
    assert 0 < counts[-1] <= len(notes)
    # The engine's, the trainer's, the one that is evaluated, and the one that waits.
    assert max(len(versions) for versions in pruned) <= 4


@pytest.mark.parametrize("error", [EvaluationLostError("its engine failed"), None])
def test_an_evaluation_that_is_lost_costs_no_run(error: Exception | None):
    """Catches a run that ends, or waits for ever, because the evaluation's engine hangs."""
    notes: list[str] = []

    async def lose(snapshot: Snapshot, step: int, at_an_end: bool) -> Metrics:
        if error is None:
            await asyncio.get_running_loop().create_future()
        raise error or AssertionError

    config = loop_config(steps=1, batch_size=1, evaluation_timeout_s=0.1)
    setting = asyncio.run(
        run_loop(config, evaluate=lose, notes=notes, actor_seconds=0.0, critic_seconds=0.0, clock=RealClock())
    )
    assert setting.outcome is not None
    assert setting.outcome.reason == "steps done"
    assert [row[2] for row in setting.rows] == ["train"]
    assert ("its engine failed" if error else "waited 0.1 s for an evaluation") in notes[-1]


def test_a_failure_in_the_last_evaluation_leaves_nothing_behind():
    """Catches a run that has ended, and a task of it that waits for its last evaluation for ever."""

    async def fail_at_last(snapshot: Snapshot, step: int, at_an_end: bool) -> Metrics:
        await asyncio.sleep(100.0)
        if step == 5:
            raise RuntimeError("a fault of the evaluation")
        return {}

    async def main() -> None:
        with pytest.raises(RuntimeError, match="a fault"):
            await run_loop(loop_config(steps=5), evaluate=fail_at_last)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


class RealSeconds(VirtualClock):
    """Seconds of a virtual loop that pass for real ones."""

    virtual = False


@pytest.mark.parametrize("stop_after", [20.5, 1000.0])
@pytest.mark.parametrize("real", [False, True])
def test_a_stop_cancels_an_evaluation_in_real_time_only(stop_after: float, real: bool):
    """Catches Ctrl-C that waits an hour for an evaluation, in the middle of training or after the last step; and a
    study that lacks an evaluation because it was stopped."""
    cancelled: list[int] = []

    async def slowly(snapshot: Snapshot, step: int, at_an_end: bool) -> Metrics:
        try:
            await asyncio.sleep(1e4)
        except asyncio.CancelledError:
            cancelled.append(step)
            raise
        return {}

    async def timed() -> tuple[Setting, float]:
        clock = RealSeconds() if real else VirtualClock()
        setting = await run_loop(loop_config(steps=50), evaluate=slowly, stop_after=stop_after, clock=clock)
        return setting, asyncio.get_running_loop().time()

    setting, ended = run_virtual(timed())
    assert setting.outcome is not None
    assert setting.outcome.reason == "stopped"
    assert (setting.outcome.steps == 50) == (stop_after == 1000.0)
    assert (ended < 1010.0) == real
    assert cancelled == ([0] if real else [])


@pytest.mark.parametrize(
    ("size", "expected"), [(8, [(0, True), (2, False), (2, True)]), (12, [(0, True), (2, False), (3, True)])]
)
def test_the_evaluation_at_the_end_of_a_source_is_a_last_one(size: int, expected: list[tuple[int, bool]]):
    """Catches a run whose source ends, with its last evaluation on the few tasks of those between."""
    asked: list[tuple[int, bool]] = []

    async def evaluate(snapshot: Snapshot, step: int, at_an_end: bool) -> Metrics:
        asked.append((step, at_an_end))
        return {}

    run_virtual(run_loop(loop_config(steps=50), size=size, evaluate=evaluate, ends_differ=True))
    assert asked == expected


def test_ages_are_looked_at_once_a_batch(monkeypatch: pytest.MonkeyPatch):
    """Catches every ready rollout's ages computed at every notification: quadratic in what is in the system."""
    looked: list[str] = []
    over_age = Orchestrator._over_age

    def count(orchestrator: Orchestrator, rollout: Rollout) -> bool:
        looked.append(rollout.id)
        return over_age(orchestrator, rollout)

    monkeypatch.setattr(Orchestrator, "_over_age", count)
    config = loop_config(steps=10, batch_size=20, concurrency=20, over_age="drop", max_age=100, max_batches_ahead=0)
    setting = run_virtual(run_loop(config))
    assert looked == setting.trainer.consumed


def test_the_collector_is_still_while_a_real_run_lasts():
    """Catches full collections, which stop the loop for half a second at 10,000 rollouts, and one left off for good."""
    seen: list[bool] = []

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.1, lambda: seen.append(gc.isenabled()))
        await run_loop(loop_config(steps=1, batch_size=1), actor_seconds=0.2, critic_seconds=0.0, clock=RealClock())

    asyncio.run(run())
    assert seen == [False]
    assert gc.isenabled()
