"""What confines a sandbox from within: limits and privileges of each process, and limits of all together.

Standard library only: it runs where nothing else is visible.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import time
from typing import Any

INODES = 20_000
"""Files in one of the sandbox's file systems: a tmpfs of limited size does not limit empty files."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36


def set_limit(which: int, value: int) -> None:
    """Lower a resource limit for good; one that is lower already stays."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # A second between the limits on CPU time lets the kernel say which signal it was.
    resource.setrlimit(which, (value, value + 1 if which == resource.RLIMIT_CPU and hard < 0 else value))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def confine(limits: dict[str, Any]) -> None:
    """Take the resource limits and the user of the agent, for it and for all that it starts."""
    for which, value in limits["rlimits"].items():
        set_limit(getattr(resource, which), value)
    if limits["uid"] is not None:
        for capability in range(64):
            _prctl(_PR_CAPBSET_DROP, capability)
        os.setgroups([])
        os.setresgid(limits["uid"], limits["uid"], limits["uid"])
        os.setresuid(limits["uid"], limits["uid"], limits["uid"])
    _prctl(_PR_SET_DUMPABLE, 0)
    if limits["isolated"]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def become_ordinary() -> None:
    """Undo in a child what protects the agent from being read by its own user."""
    _prctl(_PR_SET_DUMPABLE, 1)


def passed_limit(limits: dict[str, Any]) -> str | None:
    """Which limit all processes of the sandbox together have passed: those of single ones do not add up to it."""
    processes = _processes()
    if sum(_resident(pid) for pid in processes) > limits["memory_bytes"]:
        # What forks share was counted for each; dividing it takes longer.
        shares = [_proportional(pid) for pid in processes]
        if sum(shares) > limits["memory_bytes"]:
            return "memory_total"
    count = sum(not _is_zombie(pid) for pid in processes)
    if count > limits["processes"] + 1:
        return "processes"
    for folder in (limits["directory"], "/tmp", "/dev/shm"):
        usage = os.statvfs(folder)
        if usage.f_files - usage.f_ffree > INODES:
            return "files"
    return None


def end_strays(spared: int) -> bool:
    """End what code left running beside `spared`, lest it print into a later call; False if it multiplies faster."""
    for attempt in range(60):
        strays = [pid for pid in _processes() if pid != spared and not _is_zombie(pid)]
        if not strays:
            return True
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001 * attempt)  # to free much memory takes a while
    return False


def end_descendants() -> None:
    """End all descendants without a process name space to do it: orphans become children of this subreaper."""
    own = os.getpid()
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/{own}/task/{own}/children") as children:
                for pid in children.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def move_up(descriptor: int) -> int:
    """The same file at a number that code does not meet by counting from 0."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64)
    os.close(descriptor)
    return moved


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _fields(path: str, *names: str) -> int | None:
    """Sum of lines such as `RssAnon: 12 kB` in bytes; None where the file cannot be read."""
    try:
        with open(path) as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(names))
    except (OSError, IndexError):
        return None


def _resident(pid: int) -> int:
    return _fields(f"/proc/{pid}/status", "RssAnon:", "RssShmem:") or 0


def _proportional(pid: int) -> int:
    share = _fields(f"/proc/{pid}/smaps_rollup", "Pss_Anon:", "Pss_Shmem:")
    return _resident(pid) if share is None else share


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True
