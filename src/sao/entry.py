"""Where the command `sao` starts: an interrupt while the libraries load, which takes seconds, leaves no trace."""

import signal

_before = signal.getsignal(signal.SIGINT)
if _before is signal.default_int_handler:
    # Some libraries swallow a KeyboardInterrupt that meets them half loaded; the system's way of ending cannot be.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from sao.cli import main  # noqa: E402

signal.signal(signal.SIGINT, _before)

__all__ = ["main"]
