"""Model-written code under bubblewrap: a general sandbox, and a stateful Python tool on top of it.

No network, a read-only system without the user's files, an unprivileged user, limits on time, memory, processes, files
and output. Whatever the code does is a result; WorldError means that the sandbox itself cannot run. The kernel ends
everything inside when the process that made the sandbox ends, however it ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sao.envs.protocol import ToolResult, WorldError
from sao.envs.sandbox_host import Agent, SandboxConfig, launch_isolated, launch_unprotected

_GRACE_S = 10.0
"""How much longer than its own limit the agent may take to say that the time is up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What running something in a sandbox gave."""

    exit_code: int
    """Of the program; negative for the signal that ended it. For Python code 0, or 1 if it raised."""
    output: str
    """Standard output and error, in the order written, and a line in brackets for each limit that was met."""
    truncated: bool = False
    """The middle of the output was cut, for its length."""
    out_of_memory: bool = False
    """A limit on memory ended it."""
    timed_out: bool = False
    """The limit on time ended it."""
    lost: bool = False
    """Whether what ran in the sandbox was ended: the interpreter's variables are gone."""


class Sandbox:
    """A confined machine with a working folder and one Python interpreter. Blocking; one caller at a time."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._agent: Agent | None = None
        self._launch: Callable[[SandboxConfig], Agent] = launch_isolated

    def start(self) -> None:
        """Start; does nothing when running. Raises WorldError saying what is missing."""
        if self._agent is None:
            self._agent = self._launch(self.config)

    def exec(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Execution:
        """Run a program in the working folder to its end. At the time limit everything that runs inside is ended.

        A program that is not found has exit code 127. Raises ValueError for an empty `argv`.
        """
        if not argv:
            raise ValueError("argv is empty; give at least the program")
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
            self._sandbox.stop()  # the call may have started it again
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
        self._sandbox._launch = launch_unprotected


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
