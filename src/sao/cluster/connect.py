"""Joins a Ray cluster, or starts one of a single node here, and checks that its nodes can do the run's work."""

import importlib
import math
import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sao.cluster.actors import Resident, Software, Where, describe_nodes, keep_signals, labels_of, load_ray, told
from sao.cluster.settings import ClusterConfig, Room
from sao.engines.protocol import EngineError
from sao.engines.vllm_server import vllm_version

CHECK_TIMEOUT_S = 120.0
"""For a node to answer; the first process on a busy node takes long to start."""

CONNECT_TIMEOUT_S = 10.0
"""For the head node to accept a connection."""

_LOCAL = "127.0.0.1"


class ClusterError(ValueError):
    """The cluster cannot do what the configuration asks; the message says what to change."""


@contextmanager
def cluster(config: ClusterConfig, needed: tuple[Room, ...]) -> Generator[None]:
    """Joined within; nothing without an address. A Ray that was started here ends with it.

    `needed` is all that the run asks for, which a local Ray is given whatever the machine has.
    """
    if not config.address or joined():
        yield
        return
    _join(config, needed)
    try:
        yield
    finally:
        load_ray().shutdown()


def joined() -> bool:
    """Whether this process is part of a cluster."""
    return load_ray().is_initialized()


def _check_reachable(address: str) -> None:
    """Raise ClusterError where nobody listens: Ray itself would try for ten minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"cannot join the Ray cluster at {address}: {error}; start its head node (ray start --head), or see "
            "cluster.address"
        ) from error


def _join(config: ClusterConfig, needed: tuple[Room, ...]) -> None:
    ray = load_ray()
    if config.address not in ("local", "auto"):
        _check_reachable(config.address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Actors without GPUs keep the variables of their node; a later Ray does so anyway.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would give actors, which do all of the work here, what other processes leave of the processors.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"address": config.address}
    if config.address == "local":
        options |= {
            "num_cpus": max(os.cpu_count() or 1, math.ceil(sum(room.cpus for room in needed))),
            "resources": {room.label: 1000 for room in needed if room.label},
            "include_dashboard": False,
        }

    def start() -> None:
        ray.init(**options, log_to_driver=False, logging_level="ERROR", configure_logging=False)

    try:
        try:
            keep_signals(start)
        except Exception as error:  # Ray raises bare exceptions
            if config.address != "local" or "timed out" not in str(error).lower():
                raise
            # It allows its own processes 30 seconds, which a busy machine may not leave them.
            ray.shutdown()
            keep_signals(start)
    except Exception as error:
        raise ClusterError(
            f"cannot {'start Ray here' if config.address == 'local' else f'join the Ray cluster at {config.address}'}: "
            f"{told(error)}"
        ) from error


def own_host(config: ClusterConfig) -> str:
    """Where the nodes reach this process."""
    if config.host or config.address == "local":
        return config.host or _LOCAL
    return load_ray().util.get_node_ip_address()


def host_of(config: ClusterConfig, where: Where) -> str:
    """Where what an actor serves is reached."""
    return _LOCAL if config.address == "local" else where.host


class _Inspector(Resident):
    """Looks at its node."""

    def look(self, folder: str, token: str, vllm_command: str | None) -> tuple[Where, Software, str, str]:
        """Where, what is installed, what is wrong with the folder ("": nothing), and the version of vLLM there.

        Raises EngineError for a Python that cannot start vLLM.
        """
        where, software = self.where()
        version = vllm_version(vllm_command) if vllm_command is not None else ""
        try:
            if (Path(folder) / f".sao-{token}").read_text() != token:
                return where, software, f"it reads something else in {folder}", version
            (Path(folder) / f".sao-{token}-{where.node_id}").write_text(token)
        except OSError as error:
            return where, software, f"it cannot read and write in {folder}: {error.strerror}", version
        return where, software, "", version


def check_nodes(config: ClusterConfig, folder: Path, needed: tuple[Room, ...], vllm_command: str | None) -> list[str]:
    """Look at every node: software, the shared folder, and whether there is room for all; a line about each.

    `vllm_command`: the Python that must have vLLM on the nodes for engines, if servers are to be started. Raises
    ClusterError.
    """
    ray, token = load_ray(), secrets.token_hex(8)
    folder = folder.absolute()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    mark = folder / f".sao-{token}"
    mark.write_text(token)
    try:
        asked = [_inspect(ray, node, folder, token, _vllm_on(config, node, vllm_command)) for node in nodes]
        found = [_finding(ray, node, each, folder, token) for node, each in zip(nodes, asked, strict=True)]
    finally:
        for file in folder.glob(f".sao-{token}*"):
            with suppress(OSError):
                file.unlink()
    _check_room(nodes, needed)
    return found


def _vllm_on(config: ClusterConfig, node: dict[str, Any], command: str | None) -> str | None:
    return command if not config.engine_on or config.engine_on in labels_of(node) else None


def _inspect(ray: Any, node: dict[str, Any], folder: Path, token: str, vllm_command: str | None) -> tuple[Any, Any]:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    actor = ray.remote(num_cpus=0)(_Inspector).options(scheduling_strategy=there).remote()
    return actor, actor.look.remote(str(folder), token, vllm_command)


def _finding(ray: Any, node: dict[str, Any], asked: tuple[Any, Any], folder: Path, token: str) -> str:
    name = f"node {node['NodeManagerAddress']}"
    try:
        where, software, problem, version = ray.get(asked[1], timeout=CHECK_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(f"{name} did not answer within {CHECK_TIMEOUT_S:g} s; look after it, or end it") from error
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        reason = str(cause) if isinstance(cause, EngineError) else f"it cannot run sao: {told(error)}"
        raise ClusterError(f"{name}: {reason}") from error
    finally:
        ray.kill(asked[0])
    differences = Software.here().differences(software)
    if differences:
        raise ClusterError(f"{name} has {differences}; install the same everywhere")
    if not problem and not (folder / f".sao-{token}-{where.node_id}").is_file():
        problem = f"what it writes in {folder} does not arrive here"
    if problem:
        raise ClusterError(
            f"{name}: {problem}. The run folder, models and tokenizers must lie on a disk that all nodes see, under "
            "the same path"
        )
    labels = ", ".join(labels_of(node))
    counts = [f"{node['Resources'][kind]:g} {kind}s" for kind in ("CPU", "GPU") if kind in node["Resources"]]
    return f"{name}: {', '.join(counts) or 'no CPU'}{f', {labels}' if labels else ''}, sees the run folder" + (
        f", vLLM {version}" if version else ""
    )


def _check_room(nodes: list[dict[str, Any]], needed: tuple[Room, ...]) -> None:
    """Raise ClusterError if the nodes together, or those with a label, could not hold all even when empty."""
    for label in sorted({room.label for room in needed}):
        asked = [room for room in needed if not label or room.label == label]
        having = [node["Resources"] for node in nodes if not label or label in node["Resources"]]
        on = f" with {label!r}" if label else ""
        if label and not having:
            raise ClusterError(f"no node has the resource {label!r} of [cluster]. Nodes: {describe_nodes()}")
        for kind, total in (("CPU", sum(room.cpus for room in asked)), ("GPU", sum(room.gpus for room in asked))):
            there = sum(resources.get(kind, 0.0) for resources in having)
            if total > there:
                raise ClusterError(
                    f"the run needs {total:g} {kind}s on nodes{on}, which have {there:g}: {_sum_up(asked)}. Start more "
                    "nodes, or ask for less in [cluster]"
                )


def _sum_up(rooms: list[Room]) -> str:
    counts = {str(room): rooms.count(room) for room in rooms}
    return "; ".join(f"{count} x {room}" for room, count in counts.items())
