"""The system call filter, run by a small interpreter of classic BPF."""

import errno
import struct

import pytest

from sao.envs.seccomp import filter_program

ALLOW, KILL = 0x7FFF0000, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


def decide(machine: str, architecture: int, number: int, first_argument: int = 0) -> int:
    """What the filter returns for one call."""
    program = filter_program(machine)
    assert program is not None
    words = struct.pack("=IIQQ", number, architecture, 0, first_argument) + bytes(40)
    accumulator, place = 0, 0
    instructions = list(struct.iter_unpack("=HBBI", program))
    for _ in range(len(instructions)):
        code, if_true, if_false, value = instructions[place]
        place += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", words, value)[0]
        elif code == 0x54:
            accumulator &= value
        elif code in (0x15, 0x35):
            place += if_true if (accumulator == value if code == 0x15 else accumulator >= value) else if_false
        else:
            assert code == 0x06
            return value
    raise AssertionError("the filter did not return")


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        ("x86_64", X86, {"read": 0, "execve": 59, "clone": 56, "clone3": 435, "ptrace": 101, "unshare": 272,
                         "memfd_create": 319, "socket": 41, "prlimit64": 302, "setns": 308}),
        ("aarch64", ARM, {"read": 63, "execve": 221, "clone": 220, "clone3": 435, "ptrace": 117, "unshare": 97,
                          "memfd_create": 279, "socket": 198, "prlimit64": 261, "setns": 268}),
    ],
)  # fmt: skip
def test_what_is_allowed_and_denied(machine: str, architecture: int, calls: dict[str, int]) -> None:
    """Catches a jump that is off by one, or one architecture's numbers used for the other."""

    def answer(name: str, first_argument: int = 0) -> int:
        return decide(machine, architecture, calls[name], first_argument)

    denied = 0x50000 | errno.EPERM
    assert answer("read") == answer("execve") == ALLOW
    assert {answer(name) for name in ("ptrace", "unshare", "memfd_create", "setns")} == {denied}
    assert answer("clone3") == 0x50000 | errno.ENOSYS
    assert answer("clone", 17) == answer("clone", 0x3D0F00) == ALLOW  # fork, pthread_create
    for new_namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer("clone", new_namespace | 17) == denied
    assert [answer("socket", family) for family in (1, 2, 10)] == [ALLOW] * 3
    assert {answer("socket", family) for family in (0, 3, 16, 17, 38, 40)} == {0x50000 | errno.EAFNOSUPPORT}
    assert answer("prlimit64", 0) == ALLOW
    assert answer("prlimit64", 1) == denied
    assert decide(machine, architecture ^ 1, calls["read"]) == KILL


def test_other_entries_and_machines() -> None:
    """Catches the second set of numbers on x86-64 being left open, and a guess on a machine that is not known."""
    assert decide("x86_64", X86, 0x40000000 | 101) == 0x50000 | errno.EPERM
    assert filter_program("riscv64") is None
