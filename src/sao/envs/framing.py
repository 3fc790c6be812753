"""Messages over a local socket: one line of JSON whose `size` counts the raw bytes that follow it.

Standard library only: it also runs inside a sandbox.
"""

import io
import json
import socket
from typing import Any

_LARGEST_HEADER = 1 << 20


def send_frame(link: socket.socket, header: dict[str, Any], payload: bytes = b"") -> None:
    """Write one frame."""
    link.sendall(json.dumps({**header, "size": len(payload)}).encode() + b"\n" + payload)


def receive_frame(stream: io.BufferedIOBase, largest: int) -> tuple[dict[str, Any], bytes]:
    """Read one frame with at most `largest` raw bytes; its header is returned without `size`.

    Raises EOFError at the end of the stream, ValueError for what is not a frame.
    """
    line = stream.readline(_LARGEST_HEADER)
    if not line:
        raise EOFError("the other side is gone")
    header = json.loads(line)
    if (
        not isinstance(header, dict)
        or not isinstance(size := header.pop("size", None), int)
        or not 0 <= size <= largest
    ):
        raise ValueError("not a frame")
    payload = stream.read(size)
    if len(payload) < size:
        raise EOFError("the other side is gone")
    return header, payload
