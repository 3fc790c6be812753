"""A whole run on two Ray nodes of this machine, whose parts are killed in turn; how soon each is noticed.

    python tests/cluster/two_nodes.py FOLDER

The head node has room for this process and a rank of the trainer, the other node for two engine replicas, a rollout
worker and the second rank. Killed with SIGKILL, one after another, each once the run trains again: an engine replica,
the rollout worker, a rank, and the second node's raylet, for which a third node joins. Then the run is asked to stop,
and its folder is checked: nothing lost, nothing trained twice. Exits with 1 if something took longer than 20 seconds.
"""

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_processes import below, of_kind
from small_runs import Silent, small_config
from test_runs import check_history

from sao.config import RunConfig, to_toml
from sao.observe.metrics import Metrics
from sao.stages import run_stages
from sao.store.log import read
from sao.store.records import Dropped
from sao.store.run_folder import RunFolder

LIMIT_S = 20.0
"""Within which a death must be noticed."""
PATIENCE_S = 900.0
"""For the run to train again, on a busy machine."""


class Node:
    """A Ray node of this machine, in a process group of its own."""

    def __init__(self, number: int, head: str, *, cpus: int, label: str, folder: Path) -> None:
        """`head` is the address of the head node, which the first node becomes."""
        address = f"127.0.0.{number}"
        low = 21000 + 1000 * number
        first = ["--head", f"--port={head.rpartition(':')[2]}", f"--temp-dir={folder}", "--include-dashboard=false"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(first if number == 1 else [f"--address={head}"]),
            *(f"--node-ip-address={address}", f"--num-cpus={cpus}", f'--resources={{"{label}": 1000}}'),
            *("--object-store-memory=200000000", f"--min-worker-port={low}", f"--max-worker-port={low + 200}"),
        ]
        said = folder / f"node-{number}"
        with said.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "RAY_worker_niceness": "0"},
            )
        try:
            wait_for(lambda: b"Ray runtime started" in said.read_bytes(), f"node {number}", watch=self.process)
        except TimeoutError as error:
            self.stop()
            raise RuntimeError(f"node {number} did not start: {said.read_text()[-2000:]}") from error

    def kill(self) -> None:
        """As a machine that loses its power: its raylet first, on which all else depends."""
        for pid in of_kind("raylet", self.process.pid):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End all that was started here."""
        left = [*below(self.process.pid), self.process.pid]
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def wait_for(condition: Callable[[], bool], what: str, watch: "subprocess.Popen[bytes] | None" = None) -> float:
    """Poll; returns when it came true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline or (watch is not None and watch.poll() is not None):
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.05)
    return time.monotonic()


class Steps(Silent):
    """Counts the steps of the run; `failed` ends every wait."""

    def __init__(self) -> None:
        self.done = 0

    def row(self, step: int, version: int, stage: str, metrics: Metrics) -> None:
        self.done += stage == "train"


class Heard(logging.Handler):
    """What the program's log said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass(frozen=True, kw_only=True)
class Result:
    """One part that was killed."""

    what: str
    noticed_s: float
    """Until the run said so."""
    again_s: float
    """Until two more steps were trained."""


class Saboteur(threading.Thread):
    """Kills the parts in turn, then asks the run to stop."""

    def __init__(self, path: Path, steps: Steps, heard: Heard, nodes: list[Node], add_node: Callable[[], Node]) -> None:
        super().__init__(daemon=True)
        self._path, self._steps, self._heard, self._nodes, self._add_node = path, steps, heard, nodes, add_node
        self.results: list[Result] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            wait_for(lambda: self._steps.done >= 2, "the first steps")
            self._strike("an engine replica", "is taken out", lambda: self._kill("engine"))
            self._strike("a rollout worker", "it is replaced", lambda: self._kill("worker"))
            self._strike("a rank of the trainer", "the trainer was lost", lambda: self._kill("rank"))
            self._strike("the second node", "", self._nodes[1].kill, self._join)
        except BaseException as error:
            self.error = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _join(self) -> None:
        self._nodes.append(self._add_node())

    def _kill(self, kind: str) -> None:
        os.kill(of_kind(kind, self._nodes[1].process.pid)[0], signal.SIGKILL)

    def _strike(self, what: str, sign: str, kill: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        signs = (sign,) if sign else ("is taken out", "it is replaced", "the trainer was lost")
        before = self._count(signs)
        began = time.monotonic()
        kill()
        noticed = wait_for(lambda: self._count(signs) > before, f"{what} to be missed")
        if then is not None:
            then()
        done = self._steps.done
        again = wait_for(lambda: self._steps.done >= done + 2, f"the run to go on without {what}")
        self.results.append(Result(what=what, noticed_s=noticed - began, again_s=again - began))
        print(f"{what}: noticed after {noticed - began:.1f} s, trained again after {again - began:.1f} s", flush=True)

    def _count(self, signs: tuple[str, ...]) -> int:
        said = [*self._heard.lines, *(self._path / "events.log").read_text().splitlines()]
        return sum(any(sign in line for sign in signs) for line in said)


def settings(head: str) -> RunConfig:
    """The smallest run, on the cluster."""
    return small_config(
        "clock=real", "loop.steps=1000000", "loop.checkpoint_every=5", "evaluation.every_steps=1000000",
        "engine.replicas=2", "trainer.ranks=2", "trainer.step_timeout_s=600", f"cluster.address={head}",
        "cluster.host=127.0.0.1", "cluster.interface=lo", "cluster.engine_cpus=0.25", "cluster.engine_on=rollout",
        "cluster.worker_cpus=0.25", "cluster.worker_on=rollout", "cluster.trainer_cpus=1",
        "cluster.place_timeout_s=300", "loop.engine_timeout_s=900", "workers.start_timeout_s=300",
        "engine.start_timeout_s=300",
    )  # fmt: skip


def main(folder: Path) -> bool:
    """Whether all deaths were noticed in time. Raises AssertionError if something was lost."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{probe.getsockname()[1]}"
    heard, steps, nodes = Heard(), Steps(), list[Node]()
    # Ray's authentication, as on a real cluster: without the first, a node that joins asks for none and is refused.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    logging.getLogger("sao").addHandler(heard)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:

        def add_node() -> Node:
            number = len(nodes) + 1
            label, cpus = ("head", 1) if number == 1 else ("rollout", 2)
            return Node(number, head, cpus=cpus, label=label, folder=Path(scratch))

        try:
            for _ in range(2):
                nodes.append(add_node())
            print("two nodes are up", flush=True)
            config = settings(head)
            with RunFolder.create(path) as run:
                run.write_config(to_toml(config))
                run.write_event("begun")
                saboteur = Saboteur(path, steps, heard, nodes, add_node)
                saboteur.start()
                outcome = run_stages(config, run, steps)
        finally:
            for node in nodes:
                node.stop()
    if saboteur.error is not None:
        raise saboteur.error
    assert outcome is not None
    check_history(path, steps=outcome.steps)
    dropped = sum(isinstance(record, Dropped) for record in read(path / "log"))
    assert not dropped, f"{dropped} rollouts were dropped"
    print(f"{outcome.steps} steps in all; nothing was lost, nothing trained twice")
    return len(saboteur.results) == 4 and all(result.noticed_s <= LIMIT_S for result in saboteur.results)


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1])) else 1)
