"""How vLLM's processes wait for each other on CPUs. Its weight transfers are shown by test_real_vllm.py."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from true_vllm import PYTHON, needs_vllm

from sao.engines.vllm_plugin import POLL_SECONDS, rest_between_polls
from sao.engines.vllm_server import write_plugin


def stand_in(monkeypatch: pytest.MonkeyPatch, *, cpu: bool, **communicators: object) -> None:
    """Put the modules in vLLM's place that `rest_between_polls` looks at."""
    contents: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": communicators,
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def spin() -> None:
    """What vLLM does between two looks."""


def test_waits_on_a_cpu_sleep(monkeypatch: pytest.MonkeyPatch):
    """Catches servers that spin by sched_yield and starve all other processes of a small machine."""
    waits = SimpleNamespace(sched_yield=spin)
    stand_in(monkeypatch, cpu=True, shm_broadcast=waits)
    rest_between_polls()
    began = time.monotonic()
    waits.sched_yield()
    assert time.monotonic() - began >= POLL_SECONDS


def test_waits_beside_a_gpu_are_left(monkeypatch: pytest.MonkeyPatch):
    """Catches a sleep in the way of each step of a GPU."""
    waits = SimpleNamespace(sched_yield=spin)
    stand_in(monkeypatch, cpu=False, shm_broadcast=waits)
    rest_between_polls()
    assert waits.sched_yield is spin


def test_a_vllm_that_waits_otherwise_is_left(monkeypatch: pytest.MonkeyPatch):
    """Catches a server that does not start because a later vLLM has no such function, or no such module."""
    waits = SimpleNamespace()
    stand_in(monkeypatch, cpu=True, shm_broadcast=waits)
    rest_between_polls()
    assert not hasattr(waits, "sched_yield")
    stand_in(monkeypatch, cpu=True)
    rest_between_polls()


@needs_vllm
def test_the_true_vllm_has_the_wait_that_is_replaced(tmp_path: Path):
    """Catches a release of vLLM that renamed it: then its servers spin again, and nothing else fails."""
    code = (
        "import sao_vllm_plugin; sao_vllm_plugin.register(); "
        "from vllm.distributed.device_communicators import shm_broadcast; print(shm_broadcast.sched_yield.__module__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(write_plugin(tmp_path))}
    done = subprocess.run([PYTHON, "-P", "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.split()[-1:] == ["sao_vllm_plugin"], done.stderr[-2000:]
