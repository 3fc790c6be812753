"""Which GPUs of this machine the vLLM servers get that a run starts. No torch."""

import os
import re
from collections.abc import Sequence

_SPANS = re.compile(
    r"(?:--(?:tensor|pipeline|data)-parallel-size|-tp|-pp|-dp)[= ](\d+)(?= |$)",
)
_SHARE = "--gpu-memory-utilization"


def gpus_per_server(extra_args: Sequence[str]) -> int:
    """GPUs that a server spans by its arguments for tensor, pipeline and data parallelism."""
    span = 1
    for number in _SPANS.findall(" ".join(extra_args)):
        span *= max(int(number), 1)
    return span


def visible_gpus(count: int) -> tuple[str, ...]:
    """The `count` GPUs that torch finds, by the names that CUDA_VISIBLE_DEVICES gives them."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named or map(str, range(count)))[:count]


def share_gpus(gpus: Sequence[str], *, servers: int, trainer: int, extra_args: Sequence[str]) -> list[tuple[str, ...]]:
    """The GPUs of each of `servers`, none of which share one.

    They follow the first `trainer` of `gpus`, which are the trainer's; where too few are left, the servers take the
    last ones, and share them with the trainer. Without `gpus` each gets none: whatever it finds is its own affair.

    Raises ValueError for servers that need more than there are, and for a server that would leave the trainer on its
    GPU no memory.
    """
    span = gpus_per_server(extra_args)
    if not gpus:
        return [()] * servers
    if servers * span > len(gpus):
        raise ValueError(
            f"{servers} vLLM servers of {span} GPUs each need {servers * span}, and this machine shows {len(gpus)} "
            f"({', '.join(gpus)}): lower engine.replicas to {max(len(gpus) // span, 1)}, or what vllm.extra_args says "
            "of parallelism, or see CUDA_VISIBLE_DEVICES"
        )
    first = min(trainer, len(gpus) - servers * span)
    if first < trainer and not any(argument.startswith(_SHARE) for argument in extra_args):
        raise ValueError(
            f"the trainer and a vLLM server share GPU {gpus[first]}, of which the server would take nine tenths: say "
            f'in vllm.extra_args what it may take, such as "{_SHARE}=0.3" (docs/one_gpu.md has the arithmetic)'
        )
    return [tuple(gpus[first + index * span :][:span]) for index in range(servers)]
