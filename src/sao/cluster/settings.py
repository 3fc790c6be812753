"""Where the parts of a run live on a Ray cluster. No Ray."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one actor needs of a node."""

    what: str
    """The part, for messages."""
    cpus: float
    """Cores that Ray sets aside; parts of one are allowed, and none."""
    gpus: float
    """As cpus; an actor sees only those it was given."""
    label: str
    """Custom resource that the node must have; "" for any node."""

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.what}: {self.cpus:g} CPUs{gpus}" + (f", a node with {self.label!r}" if self.label else "")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Places engines, the trainer's ranks and rollout workers on the nodes of a Ray cluster."""

    address: str = ""
    """"": no Ray, all on this machine. "local": start Ray here, to end with the run. "auto", or host:port of the head
    node: join a cluster of which this machine is a node."""
    host: str = ""
    """Address at which the nodes reach this machine; empty takes the one that Ray knows it by. Clients need a secret
    too, which is handed out over Ray, but nothing is encrypted: trusted networks only."""
    interface: str = ""
    """Network interface of the connections between the trainer's ranks, such as eth0; empty lets gloo and NCCL
    choose."""
    engine_cpus: float = 1.0
    """CPUs that Ray sets aside for each replica of the engine; evaluation needs one replica more."""
    engine_gpus: float = 0.0
    """GPUs for each replica; as many as a vLLM server spans."""
    engine_on: str = ""
    """Label of the nodes for engines: the name of a custom resource, given to `ray start` as
    --resources='{"NAME": 1000}'. Empty takes any node."""
    trainer_cpus: float = 1.0
    """CPUs that Ray sets aside for each rank of the trainer."""
    trainer_gpus: float = 0.0
    """GPUs for each rank: 1 where there are any."""
    trainer_on: str = ""
    """Label of the nodes for the trainer's ranks."""
    worker_cpus: float = 1.0
    """CPUs that Ray sets aside for each rollout worker, of which there are worker_processes; evaluation needs as many
    more. Sandboxes and graders run beside them."""
    worker_on: str = ""
    """Label of the nodes for rollout workers."""
    place_timeout_s: float = 120.0
    """Seconds for an actor to find a node with room and to start there; longer is an error that says what was asked
    for and what the nodes have."""

    @property
    def engine(self) -> Room:
        """For a replica."""
        return Room(what="an engine replica", cpus=self.engine_cpus, gpus=self.engine_gpus, label=self.engine_on)

    @property
    def trainer(self) -> Room:
        """For a rank."""
        return Room(what="a rank of the trainer", cpus=self.trainer_cpus, gpus=self.trainer_gpus, label=self.trainer_on)

    @property
    def worker(self) -> Room:
        """For a rollout worker."""
        return Room(what="a rollout worker", cpus=self.worker_cpus, gpus=0.0, label=self.worker_on)

    def __post_init__(self) -> None:
        if self.address not in ("", "local", "auto") and not self.address.rpartition(":")[2].isdigit():
            raise ValueError(
                f'cluster.address is {self.address!r}; use "local", "auto", or the head node\'s host:port, on a '
                "machine that is a node of the cluster (ray start --address=...)"
            )
        if "://" in self.address:
            raise ValueError(
                f"cluster.address is {self.address!r}; Ray's client mode is not supported: run sao on a node of the "
                "cluster, with its host:port"
            )
        for name in ("engine_cpus", "engine_gpus", "trainer_cpus", "trainer_gpus", "worker_cpus"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"cluster.{name} is {getattr(self, name)}; it must be 0 or above")
        for name in ("engine_on", "trainer_on", "worker_on"):
            if getattr(self, name) in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(
                    f"cluster.{name} is {getattr(self, name)!r}, which Ray counts itself; use another name"
                )
        if not self.place_timeout_s > 0:
            raise ValueError(f"cluster.place_timeout_s is {self.place_timeout_s}; it must be above 0 seconds")
