"""The program inside a sandbox: serves one socket, runs programs and one stateful interpreter, and enforces limits.

Standard library only: where it runs, nothing of the package is visible but framing and the sandbox_* files. In a
sandbox it is process 1, which code inside cannot kill.
"""

import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sao.envs.framing import receive_frame, send_frame
from sao.envs.sandbox_interpreter import LARGEST_CODE, Interpreter
from sao.envs.sandbox_limits import (
    become_ordinary,
    confine,
    end_descendants,
    end_strays,
    move_up,
    passed_limit,
    set_limit,
)

WATCH_S = 0.1
"""Seconds between two looks at memory, processes and files."""
PIPE_BYTES = 1 << 20
"""More than a pipe holds: reading this much after a reply takes everything written before it."""


class Capture:
    """Keeps the first and the last half of `limit` bytes of output."""

    def __init__(self, limit: int) -> None:
        self.half = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, piece: bytes) -> None:
        """Take more output."""
        self.total += len(piece)
        room = self.half - len(self.head)
        self.head += piece[:room]
        self.tail += piece[room:]
        if len(self.tail) > 4 * self.half + PIPE_BYTES:
            del self.tail[: -self.half]

    def text(self) -> tuple[str, bool]:
        """The output as text, and whether its middle was cut."""
        tail = self.tail[-self.half :] if self.half else b""
        cut = self.total - len(self.head) - len(tail)
        if not cut:
            return (self.head + tail).decode(errors="replace"), False
        note = f"\n[... {cut} bytes of output cut ...]\n"
        return self.head.decode(errors="replace") + note + tail.decode(errors="replace"), True


@dataclass
class Child:
    """A process of the agent and the pipe that it prints to."""

    pid: int
    """As the agent sees it, within the sandbox."""
    handle: int
    """Becomes readable when the process ends."""
    output: int
    """Descriptor of the pipe's reading end."""
    link: socket.socket | None = None
    """To the interpreter."""

    def close(self) -> None:
        """Forget the process."""
        os.close(self.handle)
        os.close(self.output)
        if self.link is not None:
            self.link.close()


class Agent:
    """Serves requests, one after another, until its socket closes."""

    def __init__(self, control: socket.socket, limits: dict[str, Any]) -> None:
        self.control = control
        self.limits = limits
        self.isolated: bool = limits["isolated"]
        self.interpreter: Child | None = None
        self.number = 0
        self.parent = select.poll()
        self.parent.register(control, select.POLLIN)
        self.lifelines = [control.fileno()]
        if limits["monitor"] is not None:
            self.parent.register(limits["monitor"], 0)
            self.lifelines.append(limits["monitor"])

    def serve(self) -> None:
        """Answer until the other side is gone, then end with everything inside."""
        stream = self.control.makefile("rb")
        send_frame(self.control, {"ready": True})
        handlers: dict[str, Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]] = {
            "python": self._python, "exec": self._exec, "read": self._read, "write": self._write,
            "snapshot": self._snapshot, "restore": self._restore,
        }  # fmt: skip
        try:
            while True:
                self._watch_parent(self.parent.poll())
                header, payload = receive_frame(stream, 1 << 40)
                try:
                    reply, content = handlers[header["op"]](header, payload)
                except (OSError, MemoryError, RecursionError, tarfile.TarError) as error:
                    number = error.errno if isinstance(error, OSError) else None
                    reply, content = {"error": f"{type(error).__name__}: {error}", "errno": number}, b""
                send_frame(self.control, reply, content)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._kill_all()

    def _watch_parent(self, events: list[tuple[int, int]]) -> None:
        """Raises EOFError when our maker, or bubblewrap above us, has ended.

        The kernel's signal for that does not reach us: bubblewrap has no right to signal another user. And our maker's
        socket may live on in a fork of it.
        """
        if any(fd in self.lifelines and event & (select.POLLHUP | select.POLLERR) for fd, event in events):
            raise EOFError

    def _python(self, header: dict[str, Any], code: bytes) -> tuple[dict[str, Any], bytes]:
        deadline = time.monotonic() + header["timeout_s"]
        capture = Capture(self.limits["output_bytes"])
        if len(code) > LARGEST_CODE:
            capture.add(f"the code has {len(code)} bytes; at most {LARGEST_CODE} can be run".encode())
            return self._reply(capture, 1), b""
        if self.interpreter is not None and select.select([self.interpreter.handle], [], [], 0)[0]:
            capture.add(b"[the interpreter had ended since the last call: its variables are lost]\n")
            self._kill_all()
        if self.interpreter is None:
            self.interpreter = self._start_interpreter()
        child, link = self.interpreter, self.interpreter.link
        assert link is not None
        self.number += 1
        try:
            link.send(b"%d\n" % self.number + code)
        except OSError:
            return self._lost(capture, "the code closed its own connection"), b""
        ending = self._wait(child, capture, deadline, self._replied)
        if ending in ("ok", "raised", "memory") and self.isolated and not end_strays(child.pid):
            ending = "processes"
        if ending in ("ok", "raised", "memory"):
            return self._reply(capture, int(ending != "ok"), out_of_memory=ending == "memory"), b""
        if ending == "broken":
            return self._lost(capture, "the code closed its own connection"), b""
        if ending == "exit":
            reason = _describe_status(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
            return self._lost(capture, f"the code ended its own interpreter ({reason})"), b""
        return self._stopped(capture, ending, header["timeout_s"], "variables are lost"), b""

    def _replied(self) -> str | None:
        assert self.interpreter is not None
        assert self.interpreter.link is not None
        try:
            message = self.interpreter.link.recv(64)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        if not message:  # closed: by its end, or by the code
            return "exit" if select.select([self.interpreter.handle], [], [], 0.5)[0] else "broken"
        number, _, status = message.partition(b"\n")
        return status.decode() if number == b"%d" % self.number and status in (b"ok", b"raised", b"memory") else None

    def _exec(self, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        deadline = time.monotonic() + header["timeout_s"]
        capture = Capture(self.limits["output_bytes"])
        argv: list[str] = header["argv"]
        environment = {**os.environ, **header["env"]}

        def program() -> None:
            try:
                os.execvpe(argv[0], argv, environment)
            except OSError as error:
                os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
                os._exit(127 if isinstance(error, FileNotFoundError) else 126)

        child = self._fork(lambda output: program(), None)
        ending = self._wait(child, capture, deadline, None)
        if ending != "exit":
            child.close()
            return self._stopped(capture, ending, header["timeout_s"], "everything running was ended"), b""
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        child.close()
        return self._reply(capture, code), b""

    def _wait(self, child: Child, capture: Capture, deadline: float, replied: Callable[[], str | None] | None) -> str:
        """Collect output until the child ends or replies ("exit", a status) or is to be stopped (the reason)."""
        poller = select.poll()
        poller.register(child.output, select.POLLIN)
        poller.register(child.handle, select.POLLIN)
        for lifeline in self.lifelines:
            poller.register(lifeline, 0)
        if child.link is not None:
            poller.register(child.link, select.POLLIN)
        watched = time.monotonic()
        while True:
            events = dict(poller.poll(WATCH_S * 1000))
            self._watch_parent(list(events.items()))
            if child.output in events and not _drain(child.output, capture, 1 << 16):
                poller.unregister(child.output)
            ending = "exit" if child.handle in events else None
            if ending is None and replied is not None and child.link is not None and child.link.fileno() in events:
                ending = replied()
            if ending is not None:
                _drain(child.output, capture, PIPE_BYTES)
                return ending
            now = time.monotonic()
            if now >= deadline:
                return "time"
            if now - watched >= WATCH_S:
                watched = now
                self._reap(child)
                if self.isolated and (excess := passed_limit(self.limits)):
                    return excess

    def _reap(self, child: Child) -> None:
        """Take orphans that have ended; they would count as processes."""
        own = {child.pid, self.interpreter.pid if self.interpreter is not None else child.pid}
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in own:
                    return
                os.waitpid(found.si_pid, 0)

    def _start_interpreter(self) -> Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)

        def interpret(output: int) -> None:
            link = socket.socket(fileno=move_up(theirs.detach()))
            for kept in (ours, self.control):
                kept.close()
            Interpreter(link, output, self.limits["output_bytes"]).serve()

        try:
            child = self._fork(interpret, ours)
        except OSError:  # processes left behind by earlier code fill the limit
            self._kill_all()
            child = self._fork(interpret, ours)
        theirs.close()
        return child

    def _fork(self, work: Callable[[int], None], link: socket.socket | None) -> Child:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                set_limit(resource.RLIMIT_CPU, self.limits["cpu_s"])
                become_ordinary()
                console = move_up(write_end)
                nothing = os.open("/dev/null", os.O_RDONLY)
                os.dup2(nothing, 0)
                os.dup2(console, 1)
                os.dup2(console, 2)
                work(console)
            finally:
                os._exit(125)
        os.close(write_end)
        os.set_blocking(read_end, False)
        return Child(pid=pid, handle=os.pidfd_open(pid), output=read_end, link=link)

    def _kill_all(self) -> None:
        if self.isolated:
            assert os.getpid() == 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            end_descendants()
        if self.interpreter is not None:
            self.interpreter.close()
            self.interpreter = None
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _stopped(self, capture: Capture, ending: str, timeout_s: float, loss: str) -> dict[str, Any]:
        reason = {
            "time": f"ran longer than {timeout_s:g} s",
            "memory_total": "its processes together needed more memory than the limit",
            "processes": "started more processes than the limit",
            "files": "made more files than the limit",
        }[ending]
        self._kill_all()
        loss = loss if ending != "files" else "variables and files are lost"
        capture.add(f"\n[stopped: {reason}; {loss}]".encode())
        flags = {
            "timed_out": ending == "time",
            "out_of_memory": ending == "memory_total",
            "finished": ending == "files",
        }
        return self._reply(capture, -9, lost=True, **flags)

    def _lost(self, capture: Capture, reason: str) -> dict[str, Any]:
        self._kill_all()
        capture.add(f"\n[{reason}; variables are lost]".encode())
        return self._reply(capture, -9, lost=True)

    def _reply(self, capture: Capture, exit_code: int, **flags: bool) -> dict[str, Any]:
        output, truncated = capture.text()
        return {"exit_code": exit_code, "output": output, "truncated": truncated, **flags}

    def _path(self, name: str) -> str:
        return os.path.join(self.limits["directory"], name)

    def _read(self, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        # Not to hang on a pipe that the code made under this name.
        file = os.open(self._path(header["path"]), os.O_RDONLY | os.O_NONBLOCK)
        with open(file, "rb") as stream:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(22, "not a regular file", header["path"])
            return {}, stream.read()

    def _write(self, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        path = self._path(header["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o777), "wb") as stream:
            stream.write(payload)
        return {}, b""

    def _snapshot(self, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name in sorted(os.listdir(self.limits["directory"])):
                tar.add(self._path(name), arcname=name)
        return {}, archive.getvalue()

    def _restore(self, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        with tarfile.open(fileobj=io.BytesIO(payload)) as tar:
            tar.extractall(self.limits["directory"], filter="tar")
        return {}, b""


def _drain(source: int, capture: Capture, at_most: int) -> bool:
    """Take what a pipe holds now; False at its end."""
    while at_most > 0:
        try:
            piece = os.read(source, 1 << 16)
        except BlockingIOError:
            return True
        if not piece:
            return False
        capture.add(piece)
        at_most -= len(piece)
    return True


def _describe_status(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGXCPU:
        return "it used up its CPU time"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def main() -> None:
    """Take the limits and the number of the socket from the command line; confine this process; serve."""
    limits: dict[str, Any] = json.loads(sys.argv[1])
    confine(limits)
    sys.path.pop(0)  # where this file was found
    sys.argv = [""]
    control = socket.socket(fileno=limits["control"])
    control.set_inheritable(False)
    limits["monitor"] = None if limits["monitor"] is None else move_up(limits["monitor"])
    os.closerange(3, limits["control"])
    os.chdir(limits["directory"])
    Agent(control, limits).serve()
    if not limits["isolated"]:  # elsewhere the folder ends with its name space
        shutil.rmtree(limits["directory"], ignore_errors=True)


if __name__ == "__main__":
    main()
