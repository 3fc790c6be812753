"""A chat endpoint on loopback, for the tests of who asks one."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from sao.clock import RealClock

Answer = tuple[int, Any, dict[str, str]]
"""Status, content (JSON, or bytes as they are), headers."""


class Request(NamedTuple):
    """What the endpoint was sent."""

    path: str
    key: str | None
    body: dict[str, Any]
    port: int
    """Of the client: one per connection."""


def completion(text: str | None, finish: str = "stop") -> Answer:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}, {}


def refusal(status: int, content: Any = None, **headers: str) -> Answer:
    return status, content or {}, {name.replace("_", "-"): value for name, value in headers.items()}


@contextmanager
def chat_server(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[tuple[str, list[Request]]]:
    """Its address, and its requests as they come; `answer` gets the body and the number of the request."""
    seen: list[Request] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                seen.append(Request(self.path, self.headers.get("authorization"), body, self.client_address[1]))
                number = len(seen)
            status, content, headers = answer(body, number)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            with suppress(BrokenPipeError, ConnectionResetError):  # who gave up has hung up
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class ImpatientClock(RealClock):
    """Does not wait between retries, and remembers how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
