"""The stateful interpreter of a sandbox: runs code call by call, like a REPL, in a process of its own.

Standard library only: it runs where nothing else is visible.
"""

import ast
import contextlib
import io
import linecache
import os
import socket
import sys
import traceback
import types

LARGEST_CODE = 100_000
"""Bytes of code in one call: one message of a local socket."""


class Console(io.TextIOWrapper):
    """Standard output and error of the interpreter: what fits the limit leaves at once, the rest is buffered."""

    def __init__(self, limit: int) -> None:
        binary = io.BufferedWriter(io.FileIO(1, "wb", closefd=False))
        super().__init__(binary, encoding="utf-8", errors="backslashreplace", newline="\n")
        self.unbuffered = limit

    def write(self, text: str, /) -> int:
        """Write; a process that is killed later has its first output seen."""
        count = super().write(text)
        if self.unbuffered > 0:
            self.unbuffered -= count
            self.flush()
        return count


class Interpreter:
    """One long-lived namespace; runs in a process of its own, one message per call in both directions."""

    def __init__(self, link: socket.socket, console_fd: int, limit: int) -> None:
        self.link = link
        self.console_fd = console_fd
        self.limit = limit
        self.pid = os.getpid()
        self.module = types.ModuleType("__main__")
        sys.modules["__main__"] = self.module

    def serve(self) -> None:
        """Run calls until the agent ends this process."""
        while True:
            try:
                message = self.link.recv(LARGEST_CODE + 64)
            except KeyboardInterrupt:  # a thread of earlier code interrupts the main one
                continue
            if not message:
                os._exit(0)
            number, _, code = message.partition(b"\n")
            status = self._run(int(number), code.decode(errors="replace"))
            if os.getpid() != self.pid:  # a fork that came back from the code would answer too
                os._exit(0)
            self.link.send(number + b"\n" + status)

    def _run(self, number: int, code: str) -> bytes:
        _reap_children()
        self._connect()
        sys.stdout = sys.stderr = console = Console(self.limit)
        status, report = b"ok", ""
        try:
            self._execute(code, f"<call {number}>")
        except BaseException as error:
            status = b"memory" if isinstance(error, MemoryError) else b"raised"
            report = _explain(error, f"<call {number}>")
        self._connect()  # the code may have closed what it prints to
        with contextlib.suppress(ValueError):
            console.flush()
        sys.stdout = sys.stderr = None
        rest = memoryview(report.encode(errors="backslashreplace"))
        while rest:
            rest = rest[os.write(1, rest) :]
        return status

    def _connect(self) -> None:
        os.dup2(self.console_fd, 1)
        os.dup2(self.console_fd, 2)

    def _execute(self, code: str, name: str) -> None:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), self.module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), self.module.__dict__)
            if value is not None:
                print(repr(value))
                self.module.__dict__["_"] = value


def _explain(error: BaseException, name: str) -> str:
    """The traceback from the frame of the code on."""
    try:
        if isinstance(error, MemoryError):
            error.__traceback__ = None  # its frames hold what filled the memory
            return "MemoryError: the code needed more memory than its limit\n"
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException as second:  # an exception whose text cannot be made, or no memory for it
        return f"{type(error).__name__}, whose text raised {type(second).__name__}\n"


def _reap_children() -> None:
    """What an earlier call left behind was ended; unless waited for it counts as a process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
