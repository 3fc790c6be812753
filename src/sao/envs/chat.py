"""A client of an OpenAI-compatible chat endpoint: one reply at a time, with retries and errors that say what to do.

The key comes from an environment variable, and is in no message, log or error of ours.
"""

import functools
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sao.clock import Clock
from sao.envs.traces import shorten

_RETRIED_STATUS = (408, 409, 425, 429, 500, 502, 503, 504, 529)


class EndpointError(RuntimeError):
    """The endpoint cannot be used; the message says why and what to do."""


class UnansweredError(RuntimeError):
    """One request got no usable answer; others may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model is, and how patiently it is asked."""

    section: str
    """Section of the configuration that it stands in, for messages: "teacher"."""
    base_url: str
    """Address up to and including the version."""
    model: str
    """Name under which the endpoint knows the model."""
    api_key_variable: str
    """Environment variable that holds the key; unset: no key."""
    timeout_s: float
    """Seconds for one reply."""
    max_retries: int
    """Repeats of a request that was refused for the moment."""

    @property
    def who(self) -> str:
        """What the endpoint is to the run."""
        return self.section.rpartition(".")[2]


class ChatClient:
    """One chat endpoint. Close it when done."""

    def __init__(self, endpoint: Endpoint, clock: Clock) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._key = os.environ.get(endpoint.api_key_variable, "")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._url = f"{endpoint.base_url.rstrip('/')}/chat/completions"
        self._http = httpx.AsyncClient(headers=headers, timeout=endpoint.timeout_s, verify=_ssl_context())

    async def reply(self, messages: Sequence[dict[str, str]], *, temperature: float, max_tokens: int) -> str:
        """The next assistant message. Raises EndpointError if none will ever come, UnansweredError if not to this."""
        body = {
            "model": self._endpoint.model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        return self._content(await self._post(body))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _post(self, body: dict[str, Any]) -> Any:
        endpoint, trouble = self._endpoint, ""
        for attempt in range(endpoint.max_retries + 1):
            wait = float(2**attempt)
            try:
                response = await self._http.post(self._url, json=body)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__} {error}".strip()
            else:
                if response.is_success:
                    return self._json(response)
                self._refuse(response)
                trouble = f"status {response.status_code}: {self._shown(response.text)}"
                wait = _retry_after(response) or wait
            if attempt < endpoint.max_retries:
                await self._clock.sleep(min(wait, 60.0))
        raise EndpointError(
            f"the {endpoint.who} at {self._url} did not answer in {endpoint.max_retries + 1} tries; the last one: "
            f"{trouble}. Check {endpoint.section}.base_url and that the server runs"
        )

    def _refuse(self, response: httpx.Response) -> None:
        """Raise for an answer that a repeated request would get again."""
        endpoint, status, said = self._endpoint, response.status_code, self._shown(response.text)
        if status in (401, 403):
            raise EndpointError(
                f"the {endpoint.who} at {self._url} refuses the key (status {status}: {said}); put a valid one into "
                f"the environment variable {endpoint.api_key_variable}"
            )
        if status == 404:
            raise EndpointError(
                f"the {endpoint.who} at {self._url} knows no model {endpoint.model!r}, or no such address (status "
                f"404: {said}); check {endpoint.section}.model and {endpoint.section}.base_url"
            )
        if status not in _RETRIED_STATUS:
            raise UnansweredError(f"status {status}: {said}")

    def _shown(self, text: str) -> str:
        """What the endpoint said, for a message; some repeat the key that they refuse."""
        return shorten(text.replace(self._key, "[the key]") if self._key else text)

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise UnansweredError(f"the answer is not JSON: {self._shown(response.text)}") from error

    def _content(self, answer: Any) -> str:
        try:
            choice = answer["choices"][0]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UnansweredError(f"the answer is no chat completion: {self._shown(str(answer))}") from error
        if finish == "length":
            raise UnansweredError(f"a reply was cut at {self._endpoint.section}.max_tokens")
        if not isinstance(text, str) or not text.strip():
            raise UnansweredError("a reply was empty")
        return text


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Shared, because reading the certificates takes longer than a request."""
    return httpx.create_ssl_context()


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait, if it says so in seconds."""
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if seconds > 0 else None
