"""One process of the grader's pool: compares two answers as mathematics, as long as that takes.

The parent has the time limit. This process ends with its parent, even from the middle of a computation.
"""

import json
import logging
import os
import re
import resource
import socket
import sys
import threading
import time
from typing import Any

from sao.envs.framing import receive_frame, send_frame

_LARGEST = 1 << 20


def compare(gold: str, answer: str) -> str:
    """ "equal", "different", or "unparsed" if either is not mathematics. Unbounded in time."""
    # Sympy takes a second to load, and only this process needs it.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    ways = [LatexExtractionConfig(), ExprExtractionConfig()]

    def parsed(text: str) -> list[Any]:
        # As plain text `3π/4` would be read as 3: everything is LaTeX.
        return parse(f"${text}$", extraction_config=ways, parsing_timeout=None)  # type: ignore[arg-type]

    gold_parsed, answer_parsed = parsed(gold), parsed(answer)
    if not gold_parsed or not answer_parsed:
        return "unparsed"
    if verify(gold_parsed, answer_parsed, timeout_seconds=None):
        return "equal"
    # A bare \log is read to base 10; beside \ln it means the natural one.
    natural = [re.sub(r"\\log(?!_)", r"\\ln", text) for text in (gold, answer)]
    if natural != [gold, answer] and ("\\ln" in gold or "\\ln" in answer):
        return "equal" if verify(parsed(natural[0]), parsed(natural[1]), timeout_seconds=None) else "different"
    return "different"


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main() -> None:
    """Serve comparisons on the socket whose number is on the command line."""
    limits = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(limits["parent"],), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    control = socket.socket(fileno=limits["control"])
    stream = control.makefile("rb")
    compare("1", "2")
    send_frame(control, {"ready": True})
    while True:
        try:
            request, _ = receive_frame(stream, _LARGEST)
        except (EOFError, ConnectionError):
            return
        # A long operation on a huge integer lets no other thread run: the kernel ends it if the parent cannot.
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + limits["timeout_s"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        send_frame(control, {"verdict": compare(request["gold"], request["answer"])})


if __name__ == "__main__":
    main()
