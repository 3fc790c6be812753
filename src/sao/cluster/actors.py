"""One actor of a run on some node: placed where there is room, asked, and ended.

Actors belong to the process that made them: Ray ends them with it. They are never restarted by Ray, since their state
would be lost; whoever uses one replaces it. An actor that died, with its node or alone, fails every call, after at most
the 15 seconds that Ray takes to miss a node.
"""

import asyncio
import hashlib
import importlib
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sao.clock import WaitTimeoutError, limit
from sao.cluster.settings import Room

NEEDS_RAY = "cluster.address is set, but Ray is not installed: pip install -e '.[ray]' in sao's checkout"
_LOG = logging.getLogger(__name__)


class ActorError(RuntimeError):
    """An actor could not be placed, or is lost; the message names it and says why."""


def load_ray() -> Any:
    """The package. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(NEEDS_RAY) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a node would run; must be the same on all."""

    sao: str
    """Version, and a checksum of the sources."""
    ray: str
    """Release; Ray's own protocol differs between them."""
    torch: str
    """Release, with its build."""
    python: str
    """Major and minor number: what is sent between nodes is pickled."""

    @classmethod
    @lru_cache(maxsize=1)
    def here(cls) -> "Software":
        """Of this process."""
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(sao=_own_version(), ray=metadata.version("ray"), torch=metadata.version("torch"), python=python)

    def differences(self, other: "Software") -> str:
        """What another node has instead; "" if nothing differs."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name} {theirs[name]} instead of {mine[name]}" for name in mine if mine[name] != theirs[name]
        )


def _own_version() -> str:
    root, total = Path(__file__).parents[1], hashlib.blake2b(digest_size=4)
    for file in sorted(root.rglob("*.py")):
        total.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return f"{metadata.version('sao')} (sources {total.hexdigest()})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where an actor runs."""

    node_id: str
    """Ray's name for the node, 56 hexadecimal digits."""
    host: str
    """The node's address, by which the others reach it."""
    pid: int
    """Of the actor's process, on that node."""

    def __str__(self) -> str:
        return f"process {self.pid} on node {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a process finds its files and modules."""

    folder: str
    """Working directory, at which relative paths of a configuration begin."""
    path: list[str]
    """Python's path to modules."""

    @classmethod
    def here(cls) -> "Home":
        """Of this process."""
        return cls(folder=str(Path.cwd()), path=list(sys.path))

    def enter(self) -> None:
        """Find them there from now on: modules after this node's own, files where the node has the folder."""
        sys.path += [place for place in self.path if place not in sys.path]
        if Path(self.folder).is_dir():
            os.chdir(self.folder)


class Resident:
    """Base of what lives in actors: says where it is, and asks whether it may be there."""

    def where(self, home: Home | None = None) -> tuple[Where, Software]:
        """The first call to any actor, which makes itself at home where its caller is."""
        if home is not None:
            home.enter()
        ray = load_ray()
        context = ray.get_runtime_context()
        host = ray.util.get_node_ip_address()
        return Where(node_id=context.get_node_id(), host=host, pid=os.getpid()), Software.here()


class Actor:
    """This process's end of an actor; made by `place`."""

    def __init__(self, handle: Any, where: Where) -> None:
        self.handle, self.where = handle, where

    @classmethod
    async def place(cls, resident: type[Resident], room: Room, timeout_s: float, **options: Any) -> "Actor":
        """Start an actor where there is room. Raises ActorError if nowhere is within `timeout_s`."""
        handle = start_actor(resident, room, **options)
        try:
            async with limit(timeout_s, "a place"):
                answer = await asyncio.wrap_future(handle.where.remote(Home.here()).future())
            return cls(handle, checked(answer, room))
        except BaseException as error:
            end_actor(handle)
            if isinstance(error, WaitTimeoutError):
                raise no_room(room, timeout_s) from error
            if isinstance(error, load_ray().exceptions.RayError):
                raise ActorError(f"{room.what} could not be started: {told(error)}") from error
            raise

    async def call(self, method: str, *inputs: Any) -> Any:
        """Call a method of the actor and wait. Raises what the method raises, and ActorError if the actor is lost."""
        exceptions = load_ray().exceptions
        try:
            return await asyncio.wrap_future(getattr(self.handle, method).remote(*inputs).future())
        except exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else ActorError(told(error)) from error
        except exceptions.RayError as error:
            raise ActorError(f"{self.where} is gone: {told(error)}") from error

    async def stop(self, timeout_s: float) -> None:
        """Call the actor's `stop`, then end it, after `timeout_s` in any case."""
        try:
            async with limit(timeout_s, "an actor to stop"):
                await self.call("stop")
        except Exception as error:
            _LOG.warning("%s did not stop by itself: %s", self.where, error)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the actor's process."""
        end_actor(self.handle)


def start_actor(resident: type[Resident], room: Room, **options: Any) -> Any:
    """A handle to an actor, which may wait for room for ever; `options` are Ray's."""
    ray = load_ray()
    groups = {"concurrency_groups": options.pop("concurrency_groups")} if "concurrency_groups" in options else {}
    # A label is not used up: as many actors fit on a node as its CPUs and GPUs allow.
    label = {room.label: 0.0001} if room.label else {}
    return (
        ray.remote(num_cpus=room.cpus, num_gpus=room.gpus, **groups)(resident)
        .options(resources=label, max_restarts=0, max_task_retries=0, **options)
        .remote()
    )


def end_actor(handle: Any) -> None:
    """End an actor's process, if it lives."""
    ray = load_ray()
    if ray.is_initialized():
        try:
            ray.kill(handle)
        except (ValueError, ray.exceptions.RayError):
            return


def checked(answer: tuple[Where, Software], room: Room) -> Where:
    """Where an actor is, if its node runs what this process runs. Raises ActorError."""
    where, software = answer
    differences = Software.here().differences(software)
    if differences:
        raise ActorError(f"{room.what} on node {where.host} runs {differences}; install the same everywhere")
    return where


def no_room(room: Room, timeout_s: float) -> ActorError:
    """What was asked for and what the nodes have."""
    return ActorError(
        f"no node had room within cluster.place_timeout_s = {timeout_s:g} s for {room}. Nodes: {describe_nodes()}. "
        "Start more nodes, or ask for less in [cluster]"
    )


def describe_nodes() -> str:
    """Free and all CPUs and GPUs of each node that lives, and its labels."""
    ray = load_ray()
    # Only Ray's inside knows what is free on each node; without that the message tells less.
    ask = getattr(importlib.import_module("ray._private.state"), "available_resources_per_node", dict[str, Any])
    free = ask()
    lines: list[str] = []
    for node in ray.nodes():
        if node["Alive"]:
            left, all_of_it = free.get(node["NodeID"], {}), node["Resources"]
            kinds = [name for name in ("CPU", "GPU") if name in all_of_it]
            counts = [f"{left.get(name, 0):g} of {all_of_it[name]:g} {name}s" for name in kinds]
            lines.append(f"{node['NodeManagerAddress']} has {', '.join([*counts, *labels_of(node)]) or 'nothing'} free")
    return "; ".join(lines) or "none"


def labels_of(node: dict[str, Any]) -> list[str]:
    """Custom resources of a node, as `ray.nodes()` tells of it."""
    builtin = ("CPU", "GPU", "memory", "object_store_memory")
    return sorted(name for name in node["Resources"] if name not in builtin and ":" not in name)


def told(error: BaseException) -> str:
    """What Ray says, without its advice: the first lines that tell something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])[:600]


def keep_signals(work: Callable[[], None]) -> None:
    """Do what replaces the handlers of SIGTERM and SIGINT, and put back those that were there."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        work()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
