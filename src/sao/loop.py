"""What a run of the loop is given, and what it gives: settings, start, parts, commit and outcome."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sao.clock import Clock
from sao.engines.protocol import Engine
from sao.envs.protocol import TaskSource
from sao.observe.metrics import Metrics
from sao.pipeline.admission import Member
from sao.pipeline.baselines import Baseline
from sao.rollout.protocol import RolloutWorker
from sao.store.records import Record
from sao.store.run_folder import Manifest
from sao.training.protocol import Trainer
from sao.types import Rollout, Snapshot

Evaluated = Literal["never", "between", "at an end"]
"""Of some weights: an evaluation at an end of the run may take other tasks than those between."""


class LoopError(RuntimeError):
    """The run cannot go on; the message says why and what to do. The run folder can be resumed."""


class EvaluationLostError(RuntimeError):
    """An evaluation could not be finished; the run goes on without it."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How many rollouts, how far ahead, and when to give up."""

    steps: int = 1000
    """Training steps of the whole run, critic-only steps included."""
    batch_size: int = 128
    """Rollouts per step (paper: 128 x 1)."""
    group_size: int = 1
    """Rollouts per prompt: 1 for SAO, 8 in the paper's GRPO controls. Must divide batch_size."""
    concurrency: int = 128
    """Rollouts running at once."""
    max_batches_ahead: int = 4
    """eta: at most (eta + 1) * batch_size rollouts are in the system, and the engine is at most eta versions behind
    when one is admitted. 0 is synchronous."""
    batch_order: Literal["finished", "admitted"] = "finished"
    """Which rollouts make a batch. finished: those that ended first, so that short ones come sooner. admitted: those
    that began first, so that batches are of mixed lengths; they wait for the slowest, and age meanwhile."""
    over_age: Literal["train", "drop", "wait"] = "train"
    """What happens to rollouts older than max_age: DIS decides token by token, they are dropped (and counted), or the
    trainer holds its next update until none is running that would become so; those that have ended may age further
    while they wait for their batch, by max_batches_ahead at most."""
    max_age: int = 16
    """Actor updates; only for over_age = "drop" and "wait"."""
    max_retries: int = 3
    """Further tries after infrastructure failures, per rollout."""
    max_failure_share: float = 0.5
    """The run stops when more than this share of the last 100 attempts (at least 20) failed by infrastructure, and of
    the last 100 retries (at least 5) too: one incident fails all that is running, a broken world also what follows."""
    batch_timeout_s: float = 1800.0
    """Longest wait for a batch, in seconds of real time."""
    trainer_timeout_s: float = 7200.0
    """Longest half of a step, in seconds of real time."""
    engine_timeout_s: float = 300.0
    """Longest wait for the engine to load weights or answer, in seconds of real time."""
    evaluation_timeout_s: float = 21600.0
    """Longest evaluation, in seconds of real time; a longer one is given up and counted, and the run goes on."""
    checkpoint_every: int = 50
    """Steps between commits; the last step always commits."""
    supervise_every_s: float = 5.0
    """Seconds between looks at the engine's health, in real time."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "group_size", "concurrency", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"loop.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_batches_ahead", "max_retries", "max_age"):
            if getattr(self, name) < 0:
                raise ValueError(f"loop.{name} is {getattr(self, name)}; it must be 0 or above")
        for name in (
            "batch_timeout_s", "trainer_timeout_s", "engine_timeout_s", "evaluation_timeout_s", "supervise_every_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"loop.{name} is {getattr(self, name)}; it must be above 0 seconds")
        if not 0 <= self.max_failure_share <= 1:
            raise ValueError(f"loop.max_failure_share is {self.max_failure_share}; it must lie between 0 and 1")
        if self.batch_size % self.group_size:
            raise ValueError(
                f"loop.batch_size {self.batch_size} is not a multiple of loop.group_size {self.group_size}; "
                f"admission could never fill a batch with whole groups. Try batch_size = "
                f"{max(1, self.batch_size // self.group_size) * self.group_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: fresh, or after the commit it resumes from."""

    step: int = 0
    """Steps done."""
    version: int = 0
    """Version of the trainer's weights."""
    edges: tuple[tuple[int, int | None], ...] = ((0, None),)
    """Published versions with their parents, oldest first."""
    highest: int = 0
    """Highest version number ever used in the run folder; none is used twice."""
    cursor: int = 0
    """Tasks taken from the source."""
    position: int = 0
    """Rollouts that ever finished in the run folder."""
    pending: tuple[Member, ...] = ()
    """Interrupted rollouts, to be played again."""
    finished: tuple[Rollout, ...] = ()
    """Finished and not consumed, in completion order."""
    groups: tuple[str, ...] = ()
    """Ids of all groups that were ever admitted, in that order."""
    consumed: tuple[str, ...] = ()
    """Ids of the rollouts trained so far, in order."""
    baseline: dict[str, object] = field(default_factory=dict)
    """State of the baseline."""
    accounts: dict[str, int] = field(default_factory=dict)
    """Counts so far."""
    quarantined: int = 0
    """Records of the log that were lost to damage."""
    evaluated: Evaluated = "never"
    """Whether these weights have had their evaluation, and as what."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """Mean reward over all data sets by step, of the evaluations so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Training steps done over the whole life of the run folder."""
    version: int
    """Version of the last weights."""
    reason: Literal["steps done", "source exhausted", "stopped", "collapsed"]
    """Why no further step was made; collapsed: an evaluation said so (`Parts.collapsed`)."""
    partial_batch: int = 0
    """Rollouts of the last batch if it was not full."""


class Log(Protocol):
    """What the loop needs of the durable log."""

    def append(self, record: Record) -> object:
        """Queue a record; order is kept. Raises when an earlier write failed."""
        ...

    async def durable(self) -> None:
        """Return once everything appended so far is on disk."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop drives. Each knows nothing of the loop."""

    clock: Clock
    """Real or virtual: every wait and every cost goes through it."""
    source: TaskSource
    """Where tasks come from, by index."""
    worker: RolloutWorker
    """Plays one task to a rollout."""
    engine: Engine
    """Samples for the worker, and takes published weights."""
    trainer: Trainer
    """Updates actor and critic, and publishes."""
    baseline: Baseline
    """Gives advantages where there is no critic; remembers what it must."""
    log: Log
    """What happened, durable before it is acted on."""
    commit: Callable[[Manifest], Awaitable[None]]
    """Save the trainer and rename the checkpoint into place."""
    evaluate: Callable[[Snapshot, int, bool], Awaitable[Metrics]] | None
    """Evaluate pinned weights after a step; the flag says that it is the first or the last evaluation of the run.
    Raises EvaluationLostError. None: no evaluation during training."""
    evaluate_every: int
    """Steps between two evaluations."""
    emit: Callable[[int, int, str, Metrics], None]
    """Write one row: step, version, stage, metrics."""
    prune: Callable[[set[int]], None]
    """Delete snapshots except these versions."""
    collapsed: Callable[[int, Metrics], bool] = lambda step, metrics: False
    """Whether the evaluation after a step says that the run is to end."""
    ends_differ: bool = False
    """Whether the first and the last evaluation take other tasks than those between."""
    note: Callable[[str], None] = lambda text: None
    """Write a line into the events of the run."""
    worker_restarts: Callable[[], int] = lambda: 0
    """Rollout processes that were lost and replaced."""
