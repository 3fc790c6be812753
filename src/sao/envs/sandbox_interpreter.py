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
        super().__init__(open(1, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", newline="\n")
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
        os.dup2(self.console_fd, 1)
        os.dup2(self.console_fd, 2)
        sys.stdout = sys.stderr = console = Console(self.limit)
        status = b"raised"
        try:
            try:
                self._execute(code, f"<call {number}>")
                status = b"ok"
            except BaseException as error:
                status = b"memory" if isinstance(error, MemoryError) else status
                self._explain(error, f"<call {number}>", console)
            console.flush()
        except BaseException:  # out of memory again while reporting, or the code closed the console
            with contextlib.suppress(BaseException):
                console.detach()
        return status

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

    def _explain(self, error: BaseException, name: str, console: Console) -> None:
        if isinstance(error, MemoryError):
            error.__traceback__ = None  # its frames hold what filled the memory
            console.write("MemoryError: the code needed more memory than its limit\n")
            return
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        console.write("".join(traceback.format_exception(type(error), error, trace)))
