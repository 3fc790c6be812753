"""What ends training early, and what a run makes of it: requests to stop, and a trainer that is lost."""

import asyncio
import signal
import threading
from collections.abc import Callable

from sao.orchestrator import Orchestrator


class Stops:
    """Ctrl-C and SIGTERM while training: the first ends it after the step under way, committed; any other at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Make it in the task that is to end."""
        self._say, self._task = say, asyncio.current_task()
        self.orchestrator: Orchestrator | None = None
        """What trains now; without it a first request ends the task at once, too."""
        self.asked = False

    def listen(self) -> None:
        """Take both signals, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        if self.asked or self.orchestrator is None:
            if self._task is not None:
                self._task.cancel()
            return
        self.asked = True
        self._say(
            "stopping once this step is committed, and in virtual time a running evaluation has ended "
            "(Ctrl-C again stops at once, at the last commit)"
        )
        self.orchestrator.stop()


PAUSES_S = (0.0, 5.0, 20.0)
"""Before the first, second and any further restart in a row: Ray takes 15 s to see that a node is dead, and until then
may place ranks on it."""


class Restarts:
    """How often a run went on from its last commit by itself, and whether it may once more."""

    def __init__(self, most: int) -> None:
        """`most` restarts without a commit between them."""
        self._most, self._in_a_row = most, 0
        self.count = 0

    def committed(self) -> None:
        """The run has come further than before."""
        self._in_a_row = 0

    def another(self) -> float | None:
        """Count a restart, if one is left: the seconds to wait before it, or None."""
        if self._in_a_row >= self._most:
            return None
        pause = PAUSES_S[min(self._in_a_row, len(PAUSES_S) - 1)]
        self._in_a_row += 1
        self.count += 1
        return pause
