"""What a process of a sandbox does to itself before it runs anything: limits, user, privileges.

Standard library only: it runs where nothing else is visible.
"""

import contextlib
import ctypes
import os
import resource
import signal
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24


def set_limit(which: int, value: int) -> None:
    """Lower a resource limit for good; one that is lower already stays."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


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
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user cleared it
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def become_ordinary() -> None:
    """Undo in a child what protects the agent: let it be traced by itself, and be the first to go without memory."""
    _prctl(_PR_SET_DUMPABLE, 1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def move_up(descriptor: int) -> int:
    """The same file at a number that code does not meet by counting from 0."""
    moved = os.dup2(descriptor, 200 + descriptor, inheritable=False)
    os.close(descriptor)
    return moved
