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


def spinning(monkeypatch: pytest.MonkeyPatch, *, cpu: bool, **names: object) -> ModuleType:
    """The module of vLLM whose waits are at stake, in a vLLM of these modules alone."""
    modules = {name: ModuleType(name) for name in ("vllm.distributed.device_communicators", "vllm.platforms")}
    modules["vllm.distributed.device_communicators"].shm_broadcast = ModuleType("shm_broadcast")  # type: ignore[attr-defined]
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: cpu)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed"):
        modules[name] = ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    module = modules["vllm.distributed.device_communicators"].shm_broadcast  # type: ignore[attr-defined]
    vars(module).update(names)
    return module


def test_waits_on_a_cpu_sleep(monkeypatch: pytest.MonkeyPatch):
    """Catches servers that spin by sched_yield and starve all other processes of a small machine."""
    module = spinning(monkeypatch, cpu=True, sched_yield=lambda: None)
    rest_between_polls()
    began = time.monotonic()
    module.sched_yield()
    assert time.monotonic() - began >= POLL_SECONDS


def test_waits_beside_a_gpu_are_left(monkeypatch: pytest.MonkeyPatch):
    """Catches a sleep in the way of each step of a GPU."""
    spin = lambda: None  # noqa: E731
    module = spinning(monkeypatch, cpu=False, sched_yield=spin)
    rest_between_polls()
    assert module.sched_yield is spin


def test_a_vllm_that_waits_otherwise_is_left(monkeypatch: pytest.MonkeyPatch):
    """Catches a server that does not start because a later vLLM has no such function."""
    module = spinning(monkeypatch, cpu=True)
    rest_between_polls()
    assert not hasattr(module, "sched_yield")


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
