"""Settings of vLLM servers. No torch and no vLLM, so that whoever speaks to a server needs neither.

What they share with the local engine stands in `[engine]`: dtype, max_context, threads, replicas, flush_tokens,
probe_tolerance, and the time limits of a start and of a weight update.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """vLLM servers (0.30 or later), for engine.kind = "vllm"."""

    servers: tuple[str, ...] = ()
    """Addresses of running servers, such as "http://127.0.0.1:8101", a replica each; they belong to this run alone
    while it lasts. Empty starts engine.replicas servers on this machine."""
    evaluation_servers: tuple[str, ...] = ()
    """Addresses of servers for evaluation, which holds other weights than training. Empty evaluates with a local
    engine in a process of its own: fine for small models."""
    command: str = ""
    """Python of the environment that has vLLM, to start servers with; empty takes the one that runs this program."""
    transport: Literal["folder", "gloo", "nccl"] = "folder"
    """How weights reach the servers. folder: they read the run's snapshot folder, so they must see it; works everywhere
    and is the default for that. gloo: broadcast over TCP. nccl: broadcast between GPUs, by vLLM's own code."""
    transfer_address: str = "127.0.0.1"
    """Address under which the servers reach this process; only for gloo and nccl."""
    kv_cache_mb: int = 256
    """Cache of a server on CPUs, in MB: the default holds 60,000 tokens of a tiny model. On GPUs vLLM takes what is
    free there."""
    connect_timeout_s: float = 5.0
    """Seconds for a server to accept a connection, and to say what it is."""
    pause_timeout_s: float = 60.0
    """Seconds for a server to stop, and to go on, around a weight update."""
    probe_timeout_s: float = 120.0
    """Seconds for a server to score the probe; the first request of all warms a server up, which takes long."""
    stall_timeout_s: float = 120.0
    """Seconds in which a server gives no token to any of its generations, after which it counts as stalled."""
    checksums: bool = False
    """Also compare the server's checksums before and after an update: if none differs, it kept the old weights. For
    bfloat16, where the probe cannot tell a small update from none. All weights are hashed while nothing is generated,
    on CPUs those that are not prepacked. Needs /weight_checker (vLLM 0.32 or later)."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for the servers that are started, such as "--gpu-memory-utilization=0.4"."""

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "pause_timeout_s", "probe_timeout_s", "stall_timeout_s", "kv_cache_mb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"vllm.{name} is {getattr(self, name)}; it must be above 0")
        for address in (*self.servers, *self.evaluation_servers):
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"the vLLM address {address!r} needs its scheme, such as http://127.0.0.1:8101")
        if len(set(self.servers + self.evaluation_servers)) < len(self.servers + self.evaluation_servers):
            raise ValueError(
                "a vLLM address stands twice in vllm.servers and vllm.evaluation_servers; each server can "
                "hold one version at a time, so name it once"
            )
