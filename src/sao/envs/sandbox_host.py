"""Starting the agent of a sandbox, and talking with it."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import sao
from sao.envs import bubblewrap
from sao.envs.framing import receive_frame, send_frame
from sao.envs.protocol import WorldError
from sao.envs.seccomp import filter_program

_MIB = 1 << 20


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


class Agent:
    """A running sandbox_worker and the socket to it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        errors: IO[bytes],
        *,
        largest: int,
        grace_s: float,
    ) -> None:
        self.process = process
        self.control = control
        self.errors = errors
        self.largest = largest
        self.stream = control.makefile("rb")
        files = (self.stream, control, errors)
        self.end = weakref.finalize(self, _end, os.getpid(), process, control, files, grace_s)

    def ask(self, header: Mapping[str, Any], payload: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """One request and its reply. Raises OSError, EOFError or ValueError when the agent is gone or silent."""
        self.control.settimeout(timeout_s)
        send_frame(self.control, dict(header), payload)
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """The next frame."""
        self.control.settimeout(timeout_s)
        return receive_frame(self.stream, self.largest)

    def failure_reason(self) -> str:
        """Last line of what it wrote to standard error before it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.poll()}"


_working: dict[str, bubblewrap.Launcher] = {}
"""By interpreter, the way to start that worked first."""
_spawner_lock = threading.Lock()
_spawner: ThreadPoolExecutor | None = None


def _forget_spawner() -> None:
    global _spawner, _spawner_lock
    _spawner, _spawner_lock = None, threading.Lock()


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


def launch_isolated(config: SandboxConfig) -> Agent:
    """Start an agent under bubblewrap. Raises WorldError saying what is missing."""
    interpreter = _interpreter(config)
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


def _interpreter(config: SandboxConfig) -> bubblewrap.Interpreter:
    try:
        return bubblewrap.find_interpreter(config.python)
    except (ValueError, OSError) as error:
        raise WorldError(str(error)) from error


def _launch_with(launcher: bubblewrap.Launcher, interpreter: bubblewrap.Interpreter, config: SandboxConfig) -> Agent:
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


def launch_unprotected(config: SandboxConfig) -> Agent:
    """Start an agent with nothing around it. Raises WorldError."""
    interpreter = _interpreter(config)
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
) -> Agent:
    ours, theirs = socket.socketpair()
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the agent)
    with theirs:
        arguments = [json.dumps({**limits, "control": theirs.fileno()})]
        try:
            process = _spawn(
                line(arguments), pass_fds=[theirs.fileno(), *inherited], env=environment, cwd="/",
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            errors.close()
            raise WorldError(f"{name}{error}") from error
    # Without a process name space above it, only the agent can end what the code started.
    grace_s = 0.0 if limits["isolated"] else 5.0
    agent = Agent(process, ours, errors, largest=4 * config.files_mb * _MIB, grace_s=grace_s)
    try:
        agent.receive(config.start_timeout_s)
    except (OSError, EOFError, ValueError) as error:
        late = isinstance(error, TimeoutError)
        reason = f"not ready after {config.start_timeout_s:g} s" if late else agent.failure_reason()
        agent.end()
        raise WorldError(name + reason) from error
    return agent


def _limits(config: SandboxConfig, *, isolated: bool, uid: int | None, directory: str) -> dict[str, Any]:
    rlimits = {
        "RLIMIT_AS": config.memory_mb * _MIB,
        "RLIMIT_FSIZE": config.files_mb * _MIB,
        "RLIMIT_NOFILE": 128,
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


def _end(
    owner: int, process: subprocess.Popen[bytes], control: socket.socket, open_files: tuple[Any, ...], grace_s: float
) -> None:
    if os.getpid() != owner:  # a fork that forgets its copy
        return
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # wakes a call that waits in another thread
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    for file in open_files:
        file.close()
