"""Runs in real time for tests: short starts, their processes by name, and something that happens at a step."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from small_runs import Silent, run_small, small_config

from sao.config import RunConfig, to_toml
from sao.loop import Outcome
from sao.observe.metrics import Metrics
from sao.stages import run_stages
from sao.store.run_folder import RunFolder

MARKS = {
    "engine": "sao.engines.serve",
    "trainer": "multiprocessing.spawn",
    "worker": "sao.rollout.serve",
}
"""What the command line of each kind of child holds."""


def children(parent: int) -> dict[int, str]:
    """Command lines of the living children of a process."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            line = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if int(stat[1]) == parent and stat[0] != "Z":
            found[int(entry.name)] = line
    return found


def child(kind: str, parent: int | None = None) -> list[int]:
    """Process ids of the children of a kind, oldest first."""
    return sorted(pid for pid, line in children(parent or os.getpid()).items() if MARKS[kind] in line)


class AtStep(Silent):
    """A reporter that does something when a training step has been reported."""

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self._actions = actions
        self.steps: list[int] = []

    def row(self, step: int, version: int, stage: str, metrics: Metrics) -> None:
        if stage == "train":
            self.steps.append(step)
            if len(self.steps) in self._actions:
                self._actions[len(self.steps)]()


def begun(path: Path) -> RunConfig:
    """A run folder with one step done in virtual time, evaluation and all; returns its configuration in real time.

    What goes on from it in real time starts without an evaluation, which would need an engine of its own.
    """
    run_small(path, small_config("loop.steps=1"))
    config = small_config(
        "clock=real", "loop.steps=1000000", "loop.checkpoint_every=2", "evaluation.every_steps=1000000"
    )
    with RunFolder.resume(path) as folder:
        folder.write_config(to_toml(config))
    return config


def go_on(path: Path, config: RunConfig, actions: dict[int, Callable[[], None]] | None = None) -> Outcome | None:
    """Resume in this process; `actions` by the number of steps done in it."""
    with RunFolder.resume(path) as folder:
        return run_stages(config, folder, AtStep(actions or {}))


def finish(path: Path) -> int:
    """Resume in virtual time for two more steps; returns the last step."""
    checkpoint = RunFolder.open(path).latest_checkpoint()
    assert checkpoint is not None
    steps = checkpoint.manifest.step + 2
    outcome = go_on(path, small_config(f"loop.steps={steps}"))
    assert outcome is not None
    assert outcome.reason == "steps done"
    return steps


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    """Poll; fails the test when it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
