"""A client of an OpenAI-compatible chat endpoint: one reply at a time, with retries and errors that say what to do.

The key comes from an environment variable, and is in no message, log or error of ours.
"""

import asyncio
import functools
import math
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from sao.clock import Clock, WaitTimeoutError, limit
from sao.envs.traces import shorten

T = TypeVar("T")

_RETRIED_STATUS = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_LONGEST_WAIT_S = 60.0


class EndpointError(RuntimeError):
    """The endpoint cannot be used; the message says why and what to do."""


class UnansweredError(RuntimeError):
    """One request got no usable answer; others may."""


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """A model behind a chat endpoint, and how it is asked."""

    section = ""
    """No setting. Section of the configuration that it stands in, for messages."""

    base_url: str = ""
    """Address up to and including the version: "http://127.0.0.1:8000/v1"; empty for none."""
    model: str = ""
    """Name under which the endpoint knows the model."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, so that no key is ever written into a run folder. Unset: no key."""
    temperature: float | None = None
    """From 0 to 2; none leaves it out of the request, as hosted reasoning models want."""
    max_tokens: int = 1024
    """Tokens of one reply; a model that thinks first needs more. A longer one cannot be used."""
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What a request calls it: max_tokens, or max_completion_tokens, which hosted reasoning models want."""
    concurrency: int = 8
    """Requests at once; others wait."""
    timeout_s: float = 60.0
    """Seconds for one reply."""
    max_retries: int = 2
    """Repeats of a request that was refused for the moment, or whose reply cannot be used; waiting 1, 2, 4 ... seconds
    before, or as long as the endpoint says, at most 60."""

    def __post_init__(self) -> None:
        section = self.section
        if self.base_url and not _is_address(self.base_url):
            raise ValueError(
                f"{section}.base_url is {self.base_url!r}; it must begin with http:// or https://, and name a host"
            )
        if self.base_url and not self.model:
            raise ValueError(f"{section}.model is empty; name the model as the endpoint knows it")
        for name in ("max_tokens", "concurrency", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{section}.{name} is {getattr(self, name)}; it must be above 0")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ValueError(f"{section}.temperature is {self.temperature}; it must lie between 0 and 2, or be none")
        if self.max_retries < 0:
            raise ValueError(f"{section}.max_retries is {self.max_retries}; it must be 0 or above")

    @property
    def who(self) -> str:
        """What the endpoint is to the run."""
        return self.section.rpartition(".")[2]

    @property
    def longest_s(self) -> float:
        """Seconds until a request has failed for good, however slow the endpoint."""
        return (self.max_retries + 1) * self.timeout_s + self.max_retries * _LONGEST_WAIT_S


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


class ChatClient:
    """One chat endpoint. Close it when done, on the loop that used it."""

    def __init__(self, config: EndpointConfig, clock: Clock) -> None:
        """Raises EndpointError for a key that is none."""
        self._config, self._clock = config, clock
        self._key = _key(config.api_key_variable)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._places = asyncio.Semaphore(config.concurrency)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=None, limits=httpx.Limits(max_connections=None), verify=_ssl_context()
        )

    async def reply(self, messages: Sequence[dict[str, str]]) -> str:
        """The next assistant message. Raises EndpointError if none will ever come, UnansweredError if not to this."""
        return await self.ask(messages, str)

    async def ask(self, messages: Sequence[dict[str, str]], read: Callable[[str], T]) -> T:
        """What `read` finds in the next assistant message; where it raises UnansweredError, the request is repeated.

        Raises as `reply`.
        """
        config = self._config
        body: dict[str, Any] = {"model": config.model, "messages": list(messages)}
        body[config.max_tokens_name] = config.max_tokens
        if config.temperature is not None:
            body["temperature"] = config.temperature
        async with self._places:
            return await self._repeat(body, read)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _repeat(self, body: dict[str, Any], read: Callable[[str], T]) -> T:
        config, trouble, answered = self._config, "", False
        for attempt in range(config.max_retries + 1):
            wait, answered = float(2 ** min(attempt, 6)), False
            try:
                async with limit(config.timeout_s, "the reply"):
                    response = await self._http.post(self._url, json=body)
            except (httpx.RequestError, WaitTimeoutError) as error:
                trouble = self._told(error)
            else:
                if response.is_success:
                    try:
                        return read(self._content(self._json(response)))
                    except UnansweredError as error:
                        trouble, answered = str(error), True
                else:
                    self._refuse(response)
                    trouble = f"status {response.status_code}: {self._shown(response.text)}"
                    wait = _retry_after(response) or wait
            if attempt < config.max_retries:
                await self._clock.sleep(min(wait, _LONGEST_WAIT_S))
        tries = f"{config.max_retries + 1} tries"
        if answered:
            raise UnansweredError(f"{trouble} (the last of {tries})")
        raise EndpointError(
            f"the {config.who} at {self._url} did not answer in {tries}; the last one: {trouble}. Check "
            f"{config.section}.base_url and that the server runs"
        )

    def _refuse(self, response: httpx.Response) -> None:
        """Raise for an answer that a repeated request would get again."""
        config, status, said = self._config, response.status_code, self._shown(response.text)
        if status in (401, 403):
            unset = "" if self._key else ", which is not set"
            raise EndpointError(
                f"the {config.who} at {self._url} refuses the key (status {status}: {said}); put a valid one into "
                f"the environment variable {config.api_key_variable}{unset}"
            )
        if status == 404:
            raise EndpointError(
                f"the {config.who} at {self._url} knows no model {config.model!r}, or no such address (status "
                f"404: {said}); check {config.section}.model and {config.section}.base_url"
            )
        if status not in _RETRIED_STATUS:
            raise UnansweredError(f"status {status}: {said}")

    def _told(self, error: Exception) -> str:
        """What went wrong on the way, for a message."""
        name = type(error).__name__
        # This one quotes the header that it refuses, escaped, so that no search would find the key.
        return name if isinstance(error, httpx.LocalProtocolError) else f"{name} {self._shown(str(error))}".strip()

    def _shown(self, text: str) -> str:
        """What the endpoint said, for a message; some repeat the key that they refuse."""
        return shorten(text.replace(self._key, "[the key]") if self._key else text)

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise UnansweredError(f"the answer is not JSON: {self._shown(response.text)}") from error

    def _content(self, answer: Any) -> str:
        try:
            choice = answer["choices"][0]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UnansweredError(f"the answer is no chat completion: {self._shown(str(answer))}") from error
        if finish == "length":
            raise UnansweredError(f"a reply was cut at {self._config.section}.max_tokens")
        if not isinstance(text, str) or not text.strip():
            raise UnansweredError("a reply was empty")
        return text


def _key(variable: str) -> str:
    """The key in an environment variable, "" for none. Raises EndpointError for what no request can carry."""
    found = os.environ.get(variable, "").strip()
    if not (found.isascii() and found.isprintable()):
        raise EndpointError(
            f"the environment variable {variable} holds a line break, or another character that no key has; write the "
            "key into it, and nothing else"
        )
    return found


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
