"""The sandbox holds against code that tries to break it."""

import os
import socket
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sao.envs import bubblewrap, sandbox, sandbox_host
from sao.envs.protocol import ToolResult, WorldError
from sao.envs.sandbox import Sandbox, SandboxConfig, SandboxPython, sandbox_problem
from sao.envs.sandbox_worker import Capture

PROBLEM = sandbox_problem()
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
QUICK = SandboxConfig(timeout_s=6.0)
"""For code that runs into the limit; a busy machine takes seconds for what takes milliseconds."""
WAYS = [launcher.privileges for launcher in bubblewrap.launchers(bubblewrap.find_interpreter(""))]


@pytest.fixture(params=list(dict.fromkeys(WAYS)))
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxPython]:
    """A tool under each way of giving up privileges that works here."""
    launchers = bubblewrap.launchers(bubblewrap.find_interpreter(""))
    monkeypatch.setitem(sandbox_host._working, "", next(way for way in launchers if way.privileges == request.param))
    tool = SandboxPython(SandboxConfig(timeout_s=5.0))
    yield tool
    tool.stop()


@pytest.fixture
def quick() -> Iterator[SandboxPython]:
    tool = SandboxPython(QUICK)
    yield tool
    tool.stop()


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


def test_memory_is_limited_for_one_process_and_for_all_together(python: SandboxPython) -> None:
    """Catches limits that a fork gets around: each child stays under its own."""
    tool = SandboxPython(SandboxConfig(timeout_s=30.0))
    result = tool.run("a = bytearray(10**9)")
    assert (result.ok, result.out_of_memory) == (False, True)
    assert tool.run("a = []\nwhile True: a.append('x' * 10**6)").out_of_memory
    tool.run("del a")
    forks = "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        a = bytearray(150_000_000)\n"
    result = tool.run(forks + "        time.sleep(60)\ntime.sleep(25)\nprint('survived')")
    assert (result.ok, result.out_of_memory) == (False, True)
    shared = forks.replace("bytearray(150_000_000)", "mmap.mmap(-1, 150_000_000); a.write(bytes(150_000_000))")
    result = tool.run("import mmap\n" + shared + "        time.sleep(60)\ntime.sleep(25)\nprint('survived')")
    assert (result.ok, result.out_of_memory) == (False, True)
    assert tool.run("1").output == "1\n"
    tool.stop()


def test_forks_that_share_memory_are_not_counted_twice() -> None:
    """Catches a sum of resident sizes: a pool that inherits a table of 60 MB would be stopped at four processes."""
    tool = SandboxPython(SandboxConfig(timeout_s=20, memory_mb=256))
    code = "import mmap, os, time\na, b = b'1' * 60_000_000, mmap.mmap(-1, 60_000_000)\nb.write(a)\n"
    fork = "for _ in range(6):\n    if os.fork() == 0:\n        a[::4096] == b[::4096]; time.sleep(60)\n"
    assert tool.run(code + fork + "time.sleep(1)\n'went on'").output == "'went on'\n"
    tool.stop()


def test_cpu_time_is_limited_over_the_calls() -> None:
    """Catches a thread that computes on between calls, for ever."""
    tool = SandboxPython(SandboxConfig(timeout_s=20, cpu_s=1))
    assert "it used up its CPU time" in tool.run("while True: pass").output
    assert tool.run("1").output == "1\n"
    tool.stop()


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
    again = quick.run("6 * 7")
    # Processes that the code left behind may still print.
    assert again.ok, (result, again)
    assert "42\n" in again.output, (result, again)


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


def test_programs_files_and_snapshots() -> None:
    """Catches a general sandbox that mixes up exit codes, loses files at a time limit or restores the wrong ones."""
    box = Sandbox(SandboxConfig(timeout_s=5))
    box.start()
    box.start()
    with pytest.raises(ValueError, match="argv is empty"):
        box.exec([])
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


@settings(deadline=None)
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
