"""Model-written code under bubblewrap: a general sandbox, and a stateful Python tool on top of it.

No network, a read-only system without the user's files, an unprivileged user, limits on time, memory, processes, files
and output. Whatever the code does is a result; WorldError means that the sandbox itself cannot run. The kernel ends
everything inside when the process that made the sandbox ends, however it ends.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sao
from sao.envs import bubblewrap
from sao.envs.framing import receive_frame, send_frame
from sao.envs.protocol import ToolResult, WorldError
from sao.envs.seccomp import filter_program

_MIB = 1 << 20
_GRACE_S = 10.0
"""How much longer than its own limit the agent may take to say that the time is up."""


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Limits of one sandbox, which serves one rollout."""

    timeout_s: float = 10.0
    """Wall-clock seconds of one call. Ten leave room for a loaded machine; solutions of school mathematics need one."""
    memory_mb: int = 512
    """Address space of one process, and memory of all together. An interpreter with numpy needs about 200."""
    files_mb: int = 64
    """Size of the working folder, of /tmp and of /dev/shm, each held in memory, and of the largest file."""
    processes: int = 16
    """Processes and threads beside the interpreter."""
    cpu_s: int = 120
    """CPU seconds of one process over its life: ends what runs on between calls."""
    output_bytes: int = 4000
    """Output of one call; more loses its middle. About a thousand tokens."""
    start_timeout_s: float = 60.0
    """Seconds to wait for a sandbox to start before it counts as broken. It takes about 0.05 on an idle machine."""
    python: str = ""
    """Interpreter to run inside, a virtual environment's to offer its packages. "" is the one this package runs on,
    with the standard library only, so that data sets installed beside it stay out of reach."""

    def __post_init__(self) -> None:
        for name, lowest in (("timeout_s", 0.1), ("memory_mb", 64), ("files_mb", 1), ("processes", 0), ("cpu_s", 1),
                             ("output_bytes", 100), ("start_timeout_s", 1.0)):  # fmt: skip
            if not getattr(self, name) >= lowest:
                raise ValueError(f"sandbox {name} is {getattr(self, name)}; it must be at least {lowest:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What running something in a sandbox gave."""

    exit_code: int
    """Of the program; negative for the signal that ended it. For Python code 0, or 1 if it raised."""
    output: str
    """Standard output and error, in the order written, and a line in brackets for each limit that was met."""
    truncated: bool = False
    out_of_memory: bool = False
    timed_out: bool = False
    lost: bool = False
    """Whether what ran in the sandbox was ended: the interpreter's variables are gone."""


class _Agent:
    """A running sandbox_worker and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, errors: Any) -> None:
        self.process = process
        self.control = control
        self.errors = errors
        self.stream = control.makefile("rb")
        self.end = weakref.finalize(self, _end, process, control, (self.stream, control, errors))

    def ask(self, header: Mapping[str, Any], payload: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """One request and its reply. Raises OSError, EOFError or ValueError when the agent is gone or silent."""
        self.control.settimeout(timeout_s)
        send_frame(self.control, dict(header), payload)
        return self.hear(timeout_s)

    def hear(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """The next frame."""
        self.control.settimeout(timeout_s)
        return receive_frame(self.stream, 1 << 30)

    def complaint(self) -> str:
        """Last line of what it wrote to standard error before it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.poll()}"


class Sandbox:
    """A confined machine with a working folder and one Python interpreter. Blocking; one caller at a time."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._agent: _Agent | None = None
        self._launch: Callable[[SandboxConfig], _Agent] = _launch_isolated

    def start(self) -> None:
        """Start; does nothing when running. Raises WorldError saying what is missing."""
        if self._agent is None:
            self._agent = self._launch(self.config)

    def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Execution:
        """Run a program in the working folder to its end. At the time limit everything that runs inside is ended."""
        return self._execute({"op": "exec", "argv": list(argv), "env": dict(env or {})}, b"", timeout_s)

    def python(self, code: str, *, timeout_s: float | None = None) -> Execution:
        """Run code in the sandbox's interpreter, which keeps its variables between calls."""
        return self._execute({"op": "python"}, code.encode(errors="replace"), timeout_s)

    def read(self, path: str) -> bytes:
        """Content of a file, relative to the working folder. Raises OSError as `open` does."""
        return self._ask({"op": "read", "path": path}, b"")

    def write(self, path: str, content: bytes) -> None:
        """Write a file, making its folders. Raises OSError, for a full file system too."""
        self._ask({"op": "write", "path": path}, content)

    def snapshot(self) -> bytes:
        """The working folder as a tar archive; processes and variables are not in it."""
        return self._ask({"op": "snapshot"}, b"")

    def reset(self, snapshot: bytes | None = None) -> None:
        """Start anew with an empty working folder, or with that of `snapshot`."""
        self.stop()
        self.start()
        if snapshot is not None:
            self._ask({"op": "restore"}, snapshot)

    def stop(self) -> None:
        """End everything inside; files are gone. Safe to call twice, and from another thread during a call."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.end()

    def _execute(self, header: dict[str, Any], payload: bytes, timeout_s: float | None) -> Execution:
        self.start()
        agent = self._agent
        assert agent is not None
        limit = self.config.timeout_s if timeout_s is None else timeout_s
        try:
            reply, _ = agent.ask({**header, "timeout_s": limit}, payload, limit + _GRACE_S)
        except TimeoutError:
            self.stop()
            text = f"[stopped: ran longer than {limit:g} s; variables and files are lost]"
            return Execution(exit_code=-9, output=text, timed_out=True, lost=True)
        except (OSError, EOFError, ValueError):
            self.stop()
            return Execution(
                exit_code=-9, output="[the code ended its sandbox; variables and files are lost]", lost=True
            )
        if "error" in reply:
            return Execution(exit_code=-9, output=f"[{reply['error']}]")
        if reply.pop("finished", False):
            self.stop()
        return Execution(**reply)

    def _ask(self, header: dict[str, Any], payload: bytes) -> bytes:
        self.start()
        agent = self._agent
        assert agent is not None
        try:
            reply, content = agent.ask(header, payload, self.config.timeout_s + _GRACE_S)
        except (OSError, EOFError, ValueError) as error:
            self.stop()
            raise WorldError(f"the sandbox ended during {header['op']}: {error!r}") from error
        if "error" in reply:
            raise OSError(reply["errno"], reply["error"])
        return content


class SandboxPython:
    """A Python tool of one rollout in a sandbox of its own, started by the first call."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._sandbox = Sandbox(config)
        self._stopped = False

    def run(self, code: str) -> ToolResult:
        """Execute; the value of a last expression is printed. Raises WorldError when the sandbox cannot start."""
        if self._stopped:
            raise WorldError("the Python tool was stopped; it serves one rollout")
        done = self._sandbox.python(code)
        if self._stopped:
            raise WorldError("the Python tool was stopped during a call")
        return ToolResult(
            output=done.output,
            ok=done.exit_code == 0,
            timed_out=done.timed_out,
            truncated=done.truncated,
            out_of_memory=done.out_of_memory,
        )

    def stop(self) -> None:
        """End the sandbox. Safe to call twice, and from another thread during a call."""
        self._stopped = True
        self._sandbox.stop()


class UnprotectedPython(SandboxPython):
    """The same tool WITHOUT a sandbox: model-written code runs as this user, with its files and its network."""

    def __init__(self, config: SandboxConfig | None = None, *, unprotected: bool = False) -> None:
        if not unprotected:
            raise ValueError(
                "unprotected is False: running model-written Python without a sandbox gives it your files and network; "
                "use SandboxPython, or set unprotected = true where losing this machine does not matter"
            )
        super().__init__(config)
        self._sandbox._launch = _launch_unprotected


def sandbox_problem(config: SandboxConfig | None = None) -> str | None:
    """Start a sandbox and compute in it: None if that works, else what is missing and how to get it."""
    sandbox = Sandbox(config)
    try:
        done = sandbox.python("6 * 7")
        return None if done.output == "42\n" else f"the sandbox started, but 6 * 7 gave {done.output!r}"
    except (WorldError, ValueError) as error:
        return str(error)
    finally:
        sandbox.stop()


_working: dict[str, bubblewrap.Launcher] = {}
"""By interpreter, the way to start that worked first."""
_spawner_lock = threading.Lock()
_spawner: ThreadPoolExecutor | None = None


def _forget_spawner() -> None:
    global _spawner
    _spawner = None


os.register_at_fork(after_in_child=_forget_spawner)


def _spawn(line: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process from one thread that lives as long as we do: the kernel's "parent died" means the thread."""
    global _spawner
    with _spawner_lock:
        if _spawner is None:
            _spawner = ThreadPoolExecutor(1, thread_name_prefix="sandbox-spawner")
        future: Future[Any] = _spawner.submit(subprocess.Popen, line, start_new_session=True, **options)
    process: subprocess.Popen[bytes] = future.result()
    return process


def _launch_isolated(config: SandboxConfig) -> _Agent:
    try:
        interpreter = bubblewrap.find_interpreter(config.python)
    except ValueError as error:
        raise WorldError(str(error)) from error
    known = _working.get(config.python)
    errors: list[str] = []
    for launcher in [known] if known is not None else bubblewrap.launchers(interpreter):
        try:
            agent = _launch_with(launcher, interpreter, config)
        except WorldError as error:
            errors.append(str(error))
        else:
            _working[config.python] = launcher
            return agent
    raise WorldError(bubblewrap.advice(errors))


def _launch_with(launcher: bubblewrap.Launcher, interpreter: bubblewrap.Interpreter, config: SandboxConfig) -> _Agent:
    limits = _limits(config, isolated=True, uid=bubblewrap.choose_uid(launcher), directory=bubblewrap.DIRECTORY)
    package = Path(sao.__path__[0])
    with contextlib.ExitStack() as stack:
        monitor, lifeline = os.pipe()
        stack.callback(os.close, monitor)
        stack.callback(os.close, lifeline)
        files = {name: stack.enter_context(open(package / name, "rb")).fileno() for name in bubblewrap.WORKER_FILES}
        seccomp_file = None
        if (program := filter_program()) is not None:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(program)
            file.seek(0)
            seccomp_file = file.fileno()

        def line(arguments: list[str]) -> list[str]:
            return bubblewrap.command(
                launcher, interpreter, files_bytes=config.files_mb * _MIB, worker_files=files,
                seccomp_file=seccomp_file, lifeline=lifeline, arguments=arguments,
            )  # fmt: skip

        limits["monitor"] = monitor
        inherited = [monitor, lifeline, *files.values(), *([seccomp_file] if seccomp_file is not None else [])]
        return _launch(line, limits, inherited, config, f"{launcher.binary} ({launcher.privileges}): ", {})


def _launch_unprotected(config: SandboxConfig) -> _Agent:
    interpreter = bubblewrap.find_interpreter(config.python)
    directory = tempfile.mkdtemp(prefix="sao-unprotected-")
    limits = _limits(config, isolated=False, uid=None, directory=directory)
    root = str(Path(sao.__path__[0]).parent)
    environment = {**bubblewrap.ENVIRONMENT, "HOME": directory, "TMPDIR": directory}

    def line(arguments: list[str]) -> list[str]:
        return bubblewrap.agent_command(interpreter.executable, root, arguments)

    try:
        agent = _launch(line, limits, [], config, "", environment)
    except WorldError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(agent, shutil.rmtree, directory, ignore_errors=True)
    return agent


def _launch(
    line: Callable[[list[str]], list[str]],
    limits: dict[str, Any],
    inherited: list[int],
    config: SandboxConfig,
    name: str,
    environment: dict[str, str],
) -> _Agent:
    ours, theirs = socket.socketpair()
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the agent)
    with theirs:
        arguments = [json.dumps({**limits, "control": theirs.fileno()})]
        process = _spawn(
            line(arguments), pass_fds=[theirs.fileno(), *inherited], env=environment, cwd="/",
            stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
        )  # fmt: skip
    agent = _Agent(process, ours, errors)
    try:
        agent.hear(config.start_timeout_s)
    except (OSError, EOFError, ValueError) as error:
        reason = (
            f"not ready after {config.start_timeout_s:g} s" if isinstance(error, TimeoutError) else agent.complaint()
        )
        agent.end()
        raise WorldError(name + reason) from error
    return agent


def _limits(config: SandboxConfig, *, isolated: bool, uid: int | None, directory: str) -> dict[str, Any]:
    rlimits = {
        "RLIMIT_AS": config.memory_mb * _MIB,
        "RLIMIT_FSIZE": config.files_mb * _MIB,
        "RLIMIT_NOFILE": 512,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
    }
    if isolated and _counts_processes(uid):
        rlimits["RLIMIT_NPROC"] = config.processes + 2  # the agent and the interpreter
    return {
        "isolated": isolated,
        "monitor": None,
        "uid": uid,
        "directory": directory,
        "rlimits": rlimits,
        "cpu_s": config.cpu_s,
        "processes": config.processes,
        "memory_bytes": config.memory_mb * _MIB,
        "output_bytes": config.output_bytes,
    }


def _counts_processes(uid: int | None) -> bool:
    """Whether the kernel's limit counts the sandbox alone: by its own user, or by namespace since Linux 5.14."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit())
    return uid is not None or release >= (5, 14)


def _end(process: subprocess.Popen[bytes], control: socket.socket, open_files: tuple[Any, ...]) -> None:
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # wakes a call that waits in another thread
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    for file in open_files:
        file.close()
