"""Runs what a plan lacks: a process for each run, several at once, seed by seed over all arms.

    pending runs --> prepared parts there? --no--> make them (once for all arms of the seed)
                          | yes
                          v
                     run folder in the work folder --> `sao resume` --> kept in the results, weights deleted
                        (one that was stopped goes on)        |
                                                              +-- failed: kept as a row with its reason

WORK/runs/ARM/seed-N-HASH    a run under way; the hash is of its configuration, so a changed plan never goes on with it
WORK/prepared/               see prepare.py
WORK/logs/                   what the children said
"""

import fcntl
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sao.config import RunConfig, to_toml
from sao.store.run_folder import STOPPED, RunFolder
from sao.study.jobs import Job, start_job, stop_all
from sao.study.keep import FAILED, keep_failure, keep_run
from sao.study.plan import Plan
from sao.study.prepare import STARTED_FROM, Part, begin_run, part_config, parts_of, started_from
from sao.study.results import kept_environment, run_folder, starts_kept

POLL_S = 0.2
MARGIN = 1.1
"""A run may take this much longer than those before it and still end within --hours."""
SAY_EVERY_S = 30.0
STOP_S = 300.0
"""Longest wait for a child to finish its step, its evaluation and a commit, when the study is stopped."""
LOCK_S = 120.0
"""Longest wait for a run folder that an orphan of a killed study still holds."""
EXIT_STOPPED = 130
"""Exit code of a run that was asked to stop."""
TRIES = 2
"""Starts of a part that a signal from outside ends."""

Key = tuple[str, int]


def folder_under_way(work: Path, arm: str, seed: int, config: RunConfig) -> Path:
    """Where a run is done, until it is kept."""
    stamp = hashlib.blake2b(to_toml(config).encode(), digest_size=4).hexdigest()
    return work / "runs" / arm / f"seed-{seed}-{stamp}"


@dataclass(kw_only=True, eq=False)
class _Run:
    """A run that is to be done."""

    key: Key
    config: RunConfig
    folder: Path
    """Under way."""
    target: Path
    """Kept."""
    parts: list[Part]

    @property
    def title(self) -> str:
        return f"{self.key[0]} seed {self.key[1]}"

    @property
    def name(self) -> str:
        return f"{self.key[0]}-seed-{self.key[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one call did, and what is left."""

    done: int
    """Runs that ended well."""
    failed: int
    """Runs that failed."""
    left: int
    """Runs that are still to be done."""


@dataclass(kw_only=True, eq=False)
class Runner:
    """One slice of a study."""

    plan: Plan
    """What is studied."""
    configs: Mapping[Key, RunConfig]
    """Of every run."""
    results: Path
    """Folder in which runs are kept."""
    work: Path
    """Folder for what is under way; not for committing."""
    jobs: int
    """Children at once."""
    hours: float | None
    """No run starts that would not end within them; None for no limit."""
    command: Sequence[str]
    """What people typed."""
    say: Callable[[str], None]
    """Shows a line."""
    only: Collection[str] = ()
    """Arms to run; empty for all."""
    again: bool = False
    """Whether runs that failed are repeated."""
    _running: dict[str, tuple[Job, _Run | Part]] = field(default_factory=dict)
    """Children, and what each does, by the name of that."""
    _took: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of what ended, by arm, or "part"."""
    _done: int = 0
    """Runs that ended well in this slice."""
    _failed: int = 0
    """Runs that failed in it."""
    _tried: Counter[str] = field(default_factory=Counter)
    """Starts of each part in this slice."""
    _broken: dict[str, str] = field(default_factory=dict)
    """Parts that failed, with the reason."""

    def run(self) -> Slice:
        """Run what is lacking and may be started. Children are stopped, to be gone on with, if this is interrupted.

        Raises ValueError if another process works on the study.
        """
        with _alone(self.work):
            return self._run()

    def _run(self) -> Slice:
        self._recall()
        runs = [self._run_of(arm.name, seed) for arm, seed in self.plan.runs()]
        self._sweep(runs)
        pending = self._pending(runs)
        deadline = None if self.hours is None else time.monotonic() + 3600 * self.hours
        said = -SAY_EVERY_S
        stopped: list[_Run] = []
        try:
            while pending or self._running:
                self._start(pending, deadline)
                if not self._running:
                    break
                changed = self._reap(stopped)
                if changed or time.monotonic() - said >= SAY_EVERY_S:
                    said = time.monotonic()
                    self.say(self._progress(pending))
                time.sleep(0.0 if changed else POLL_S)
        finally:
            stop_all([job for job, _ in self._running.values()], STOP_S)
            self._reap(stopped, stopping=True)
        return Slice(done=self._done, failed=self._failed, left=len(pending) + len(stopped))

    def _recall(self) -> None:
        """How long the runs took that are kept."""
        for (arm, seed), _ in self.configs.items():
            place = run_folder(self.results, arm, seed)
            seconds = kept_environment(place).get("seconds")
            if seconds is not None and not (place / FAILED).is_file():
                self._took.setdefault(arm, []).append(float(seconds))

    def _sweep(self, runs: Sequence[_Run]) -> None:
        """Delete the weights of runs that are kept: a study that was killed between the two has left them."""
        for run in runs:
            if run.target.is_dir() and not (run.target / FAILED).is_file():
                shutil.rmtree(run.folder, ignore_errors=True)

    def _pending(self, runs: Sequence[_Run]) -> list[_Run]:
        found: list[_Run] = []
        for run in runs:
            known = run.target.is_dir() and not (self.again and (run.target / FAILED).is_file())
            if not known and (not self.only or run.key[0] in self.only):
                found.append(run)
        return found

    def _run_of(self, arm: str, seed: int) -> _Run:
        config = self.configs[arm, seed]
        return _Run(
            key=(arm, seed),
            config=config,
            folder=folder_under_way(self.work, arm, seed, config),
            target=run_folder(self.results, arm, seed),
            parts=parts_of(config),
        )

    def _start(self, pending: list[_Run], deadline: float | None) -> None:
        """Start what fits: of the runs in their order the first that lacks nothing, or the part that it lacks."""
        for run in list(pending):
            if len(self._running) >= self.jobs:
                return
            if deadline is not None and time.monotonic() + MARGIN * self._expected(run) > deadline:
                continue
            broken = next((part for part in run.parts if part.name in self._broken), None)
            if broken is not None:
                pending.remove(run)
                self._keep_failure(run, f"{broken.title} failed: {self._broken[broken.name]}")
                continue
            lacking = next((part for part in run.parts if not (self._prepared / part.name).is_dir()), None)
            if lacking is None:
                pending.remove(run)
                self._begin(run)
            elif lacking.name not in self._running:
                self._prepare(lacking)

    @property
    def _prepared(self) -> Path:
        return self.work / "prepared"

    def _prepare(self, part: Part) -> None:
        draft = self._prepared / f"{part.name}.run"
        shutil.rmtree(draft, ignore_errors=True)
        self._prepared.mkdir(parents=True, exist_ok=True)
        config = self._prepared / f"{part.name}.toml"
        config.write_text(to_toml(part_config(part, self._prepared)), encoding="utf-8")
        words = [part.command, str(config), "--folder", str(draft)]
        self._tried[part.name] += 1
        self._running[part.name] = start_job(part.title, words, self.work / "logs", part.name), part

    def _begin(self, run: _Run) -> None:
        if run.folder.is_dir():
            _wait_for(run.folder)
            end = RunFolder.open(run.folder).end
            if end not in ("", STOPPED):
                self._keep(run)
                return
            if run.config.clock == "virtual" and end != STOPPED:
                # Killed: its log is ahead of its last commit, and a resume would train on what it sampled in between,
                # under weights that are no more. In virtual time it can be had again as it would have been.
                shutil.rmtree(run.folder)
        self._require_same_start(run)
        if not run.folder.is_dir():
            run.folder.parent.mkdir(parents=True, exist_ok=True)
            begin_run(run.config, run.folder, self._prepared, self.command)
        job = start_job(run.title, ["resume", str(run.folder)], self.work / "logs", run.name)
        self._running[run.name] = job, run

    def _require_same_start(self, run: _Run) -> None:
        """Raise ValueError if a run would start from other parts than the kept runs that it is compared with."""
        kept = starts_kept(self.configs, self.results)
        begun = kept_environment(run.folder).get(STARTED_FROM) if run.folder.is_dir() else None
        for part, digest in (begun or started_from(run.config, self._prepared)).items():
            others = [name for other, runs in kept.get(part, {}).items() if other != digest for name in runs]
            if others:
                raise ValueError(
                    f"{run.title} would start from another {part} than the kept {', '.join(others)}: it was made again "
                    "since, on another machine or by other versions, and arms of a seed are compared in pairs. Move "
                    f"those runs out of {self.results}, to have them run again, or put back the work folder they had"
                )

    def _reap(self, stopped: list[_Run], *, stopping: bool = False) -> bool:
        """Take in children that ended; whether there was one. While the study is `stopping`, signals are its own."""
        ended = [name for name, (job, _) in self._running.items() if job.ended() is not None]
        for name in ended:
            job, what = self._running.pop(name)
            code = job.process.returncode
            asked = code == EXIT_STOPPED or (stopping and code < 0)
            if isinstance(what, Part):
                if not asked:
                    self._reap_part(what, job)
            elif asked:
                self.say(f"{what.title} was stopped; the next call goes on with it")
                stopped.append(what)
            elif code:
                self._keep_failure(what, job.last_words())
            else:
                self._took.setdefault(what.key[0], []).append(job.seconds)
                self._keep(what)
        return bool(ended)

    def _reap_part(self, part: Part, job: Job) -> None:
        draft = self._prepared / f"{part.name}.run"
        if job.process.returncode < 0 and self._tried[part.name] < TRIES:
            self.say(f"{part.title} was {job.last_words().splitlines()[0]}; it is begun again")
        elif job.process.returncode:
            self._broken[part.name] = job.last_words()
            self.say(f"{part.title} failed; see {job.errors}")
        else:
            draft.rename(self._prepared / part.name)
            self._took.setdefault("part", []).append(job.seconds)

    def _keep(self, run: _Run) -> None:
        keep_run(run.folder, run.target)
        shutil.rmtree(run.folder)
        self._done += 1

    def _keep_failure(self, run: _Run, reason: str) -> None:
        keep_failure(run.folder, run.target, reason, to_toml(run.config))
        self._failed += 1
        self.say(f"{run.title} failed: {reason.splitlines()[-1]}")

    def _expected(self, run: _Run) -> float:
        """Seconds until a run would end that started now: its arm's mean, or the slowest arm's; 0 where none ended."""
        lacking = sum(not (self._prepared / part.name).is_dir() for part in run.parts)
        return self._mean(run.key[0]) + lacking * _mean(self._took.get("part", []))

    def _mean(self, arm: str) -> float:
        arms = {name: _mean(took) for name, took in self._took.items() if name != "part"}
        return arms.get(arm, max(arms.values(), default=0.0))

    def _progress(self, pending: Sequence[_Run]) -> str:
        kept = sum(run_folder(self.results, arm.name, seed).is_dir() for arm, seed in self.plan.runs())
        running = [_shown(job, what) for job, what in self._running.values()]
        left = sum(self._expected(run) for run in pending)
        for job, what in self._running.values():
            expected = _mean(self._took.get("part", [])) if isinstance(what, Part) else self._mean(what.key[0])
            left += max(0.0, expected - job.seconds)
        line = f"{kept} of {len(self.configs)} runs ended"
        line += f", {self._failed} of them failed just now" if self._failed else ""
        line += f"; running: {', '.join(running)}" if running else ""
        return line + (f"; about {_clock(left / self.jobs)} left" if left else "")


def _shown(job: Job, what: _Run | Part) -> str:
    if isinstance(what, Part):
        return job.title
    step = _last_step(what.folder / "metrics.jsonl")
    return f"{job.title} (step {step} of {what.config.loop.steps})"


def _last_step(metrics: Path) -> int:
    """Of the last row in a file that may be long, and may be being written."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 20_000))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("stage") == "train":
            return int(row["step"])
    return 0


@contextmanager
def _alone(work: Path) -> Generator[None]:
    """Hold the work folder; two studies would start the same runs."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process works in {work}; wait until it ends, or stop it") from error
        yield


def _wait_for(folder: Path) -> None:
    """Return once no other process writes a run folder. Raises ValueError if that takes too long."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            RunFolder.resume(folder).close()
            return
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(minutes, 1)} min"
