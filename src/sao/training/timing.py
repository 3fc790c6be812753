"""What a step cost: seconds of its parts, core-seconds and memory of the trainer's process."""

import resource
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from sao.observe.metrics import Metric, last

MEGABYTE = 1e6


class StepTimer:
    """Times the parts of a step, one after another, by a clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seconds: dict[str, Metric] = {}

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Time what happens within as `time/<name>`."""
        start = self._now()
        yield
        self._seconds[f"time/{name}"] = last(self._now() - start)

    def take(self) -> dict[str, Metric]:
        """The parts since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


def process_metrics() -> dict[str, Metric]:
    """Core-seconds of this process since it started, and its peak memory in megabytes, on the host and on its GPU."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"cpu/trainer": last(time.process_time()), "memory/trainer_mb": last(peak_bytes(peak) / MEGABYTE)}
    if torch.cuda.is_initialized():
        found["memory/trainer_gpu_mb"] = last(torch.cuda.max_memory_allocated() / MEGABYTE)
    return found


def peak_bytes(ru_maxrss: int, platform: str = sys.platform) -> int:
    """`ru_maxrss` in bytes: macOS counts bytes, other systems units of 1,024."""
    return ru_maxrss if platform == "darwin" else 1024 * ru_maxrss
