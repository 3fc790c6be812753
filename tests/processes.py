"""Whether processes of the system live."""

import time
from pathlib import Path


def is_running(process_id: int) -> bool:
    """Whether it exists and is no zombie, which only waits for its parent to ask after it."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(process_id: int, seconds: float = 60.0) -> bool:
    """Whether it ends in time."""
    deadline = time.monotonic() + seconds
    while is_running(process_id) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(process_id)
