"""A thin client of one vLLM server's stock HTTP routes (0.30 and later). It keeps no state and knows no policy version.

Every wait has a limit, and every error names the server, the phase and what to do.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sao.engines.protocol import EngineError, RequestRefusedError
from sao.engines.vllm_settings import VllmConfig

NOT_UP = "start it (`sao serve-engine`), or correct vllm.servers"
NO_DEVELOPMENT_MODE = (
    "the server runs without its development mode: start it with VLLM_SERVER_DEV_MODE=1, or by `sao serve-engine`"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a completion brought."""

    token_ids: tuple[int, ...]
    """Tokens sampled since the event before, in order."""
    logprobs: tuple[float, ...]
    """One per token, in nats, of the distribution sampled from."""
    finish: str
    """"" while it goes on, else "stop", "length" or "abort"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself. An empty string or 0 where it does not say."""

    version: str
    """Release of vLLM, such as "0.32.0"."""
    model: str
    """Name to ask for."""
    max_context: int
    """Longest prompt and answer together that it takes, in tokens."""
    development: bool
    """Whether it has the routes of weight updates."""
    dtype: str = ""
    """Type of its weights, without "torch."."""
    logprobs_mode: str = ""
    """Which log-probs it reports; only "processed_logprobs" are of the distribution sampled from."""
    transport: str = ""
    """Backend of its weight transfer."""
    device: str = ""
    """"cpu" or "cuda"."""
    chunked_prefill: bool = False
    """Whether it computes long prompts in several steps."""
    workers: int = 1
    """Processes that hold weights."""


HUNG_UP = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


class VllmHttp:
    """One server. Calls raise EngineError; `close` ends them."""

    def __init__(self, address: str, config: VllmConfig, *, update_timeout_s: float) -> None:
        self.address = address.rstrip("/")
        self.model = ""
        self._config = config
        self._update_timeout_s = update_timeout_s
        # The server hangs up on connections that were idle for 5 seconds: one must not be used just then.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=1.0)
        # The environment's proxies are for the world outside, not for engines.
        self._http = httpx.AsyncClient(limits=limits, trust_env=False)

    async def close(self) -> None:
        """Hang up; calls under way fail."""
        await self._http.aclose()

    async def facts(self) -> ServerFacts:
        """Ask what the server is, and remember its model's name."""
        seconds = self._config.connect_timeout_s
        version = str((await self._json("GET", "/version", "connect", seconds, NOT_UP)).get("version", ""))
        models = (await self._json("GET", "/v1/models", "connect", seconds, NOT_UP)).get("data") or [{}]
        self.model = str(models[0].get("id", ""))
        development = (await self._send("GET", "/is_paused", "connect", seconds, NOT_UP)).status_code == 200
        answered: Any = None
        workers: Any = None
        if development:
            # Collecting what it says of its system takes a server seconds, the first time.
            path = "/server_info?config_format=json"
            answer = await self._send("GET", path, "connect", self._config.probe_timeout_s, NOT_UP)
            answered = answer.json().get("vllm_config") if answer.status_code == 200 else None
            # Unlike parallel_config.world_size it counts data-parallel workers too.
            answer = await self._send("GET", "/get_world_size", "connect", seconds, NOT_UP)
            workers = answer.json().get("world_size") if answer.status_code == 200 else None
        described: dict[str, Any] = answered if isinstance(answered, dict) else {}
        model, parallel = described.get("model_config") or {}, described.get("parallel_config") or {}
        device = described.get("device_config") or {}
        return ServerFacts(
            version=version,
            model=self.model,
            max_context=int(models[0].get("max_model_len") or 0),
            development=development,
            dtype=str(model.get("dtype") or "").removeprefix("torch."),
            logprobs_mode=str(model.get("logprobs_mode") or ""),
            transport=str((described.get("weight_transfer_config") or {}).get("backend") or ""),
            device=str(device.get("device_type") or device.get("device") or ""),
            chunked_prefill=bool((described.get("scheduler_config") or {}).get("enable_chunked_prefill")),
            workers=int(workers or parallel.get("world_size") or 1),
        )

    async def healthy(self) -> None:
        """Raises EngineError unless the server's engine lives."""
        await self._json("GET", "/health", "health", self._config.connect_timeout_s, "restart the server")

    async def weight_version(self) -> str:
        """Label of the weights as last finished: what `finish_update` was told."""
        seconds = self._config.connect_timeout_s
        answer = await self._json("GET", "/weight_info", "health", seconds, "restart the server")
        return str(answer.get("weight_version", ""))

    async def checksums(self) -> dict[str, str]:
        """Of the weights, by name, where the server can tell them; of all there are no more than it has unpacked."""
        hint = "set vllm.checksums = false: not every version of vLLM has this route"
        seconds, body = self._config.probe_timeout_s, {"action": "checksum"}
        return (await self._json("POST", "/weight_checker", "checksum", seconds, hint, body)).get("checksums") or {}

    async def pause(self) -> None:
        """End all running requests with "abort" and schedule none until `resume`; caches are forgotten."""
        path, hint = "/pause?mode=abort&clear_cache=true", "restart the server"
        await self._json("POST", path, "pause", self._config.pause_timeout_s, hint)

    async def resume(self) -> None:
        """Schedule requests again."""
        await self._json("POST", "/resume", "resume", self._config.pause_timeout_s, "restart the server")

    async def transfer(self, step: str, body: dict[str, Any]) -> None:
        """One step of a weight update: init_weight_transfer_engine, start_weight_update, update_weights, finish_..."""
        hint = (
            f'start the server with --weight-transfer-config \'{{"backend": "{self._config.transport}"}}\' and our '
            "plugin (`sao serve-engine` does both), and look at its log"
        )
        await self._json("POST", f"/{step}", f"update ({step})", self._update_timeout_s, hint, body)

    async def score(self, token_ids: Sequence[int], *, cache_salt: str) -> list[float]:
        """Log-probs of tokens 1.. given those before, as the server's own forward pass has them."""
        body = {
            "model": self.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "return_tokens_as_token_ids": True,
            "cache_salt": cache_salt,
        }
        hint = "look at the server's log; it must answer /v1/completions with prompt_logprobs"
        answer = await self._json("POST", "/v1/completions", "probe", self._config.probe_timeout_s, hint, body)
        try:
            places = answer["choices"][0]["prompt_logprobs"][1:]
            return [float(place[str(token)]["logprob"]) for token, place in zip(token_ids[1:], places, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self.error("probe", f"its prompt_logprobs are not understood ({error!r})", hint) from error

    async def knows_token(self, token_id: int) -> bool:
        """Whether the model's vocabulary has the token, without showing it to the model."""
        body = {"model": self.model, "prompt": [0], "max_tokens": 1, "allowed_token_ids": [token_id]}
        body["return_tokens_as_token_ids"] = True
        seconds = self._config.probe_timeout_s
        response = await self._send("POST", "/v1/completions", "check", seconds, NOT_UP, body)
        if response.status_code not in (200, 400):
            raise self._refused("check", response, "look at the server's log")
        return response.status_code == 200

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[Piece]:
        """Stream a completion; ends after the piece with a finish. Leaving it early aborts the request.

        The server may take its time, since a request may queue: how long is the caller's to say. Raises
        RequestRefusedError for one that it will not take, EngineError for all else.
        """
        body = {"model": self.model, "stream": True, "logprobs": 0, "return_token_ids": True, **body}
        timeout = httpx.Timeout(None, connect=self._config.connect_timeout_s)
        request = self._http.build_request("POST", self.address + "/v1/completions", json=body, timeout=timeout)
        try:
            response = await _sent(lambda: self._http.send(request, stream=True))
            try:
                if response.status_code == 503:
                    # A paused server that does not queue requests: it ends them before their first token.
                    yield Piece((), (), "abort")
                    return
                if response.status_code != 200:
                    await response.aread()
                    refused = self._refused("generate", response, "look at the server's log")
                    raise RequestRefusedError(str(refused)) if response.status_code in (400, 422) else refused
                async for line in response.aiter_lines():
                    piece = self._piece(line)
                    if piece is not None:
                        yield piece
                        if piece.finish:
                            return
            finally:
                await response.aclose()
        except EngineError:
            raise
        except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:
            raise self.error("generate", f"the connection broke ({error!r})", "look at the server's log") from error
        raise self.error("generate", "the stream ended without a finish reason", "look at the server's log")

    def error(self, phase: str, what: str, hint: str) -> EngineError:
        """An EngineError that names server, phase and remedy."""
        return EngineError(f"vLLM server {self.address}, phase {phase}: {what}; {hint}")

    def _piece(self, line: str) -> Piece | None:
        if line == "data: [DONE]":
            # Of a request aborted before its first token vLLM says no more than this.
            return Piece((), (), "abort")
        if not line.startswith("data:"):
            return None
        event = json.loads(line[5:])
        if "error" in event:
            raise self.error("generate", str(event["error"].get("message", event["error"]))[:500], "see its log")
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        token_ids = tuple(choice.get("token_ids") or ())
        logprobs = tuple((choice.get("logprobs") or {}).get("token_logprobs") or ())
        if len(token_ids) != len(logprobs):
            what = f"{len(token_ids)} token ids came with {len(logprobs)} log-probs"
            raise self.error("generate", what, "it must honour return_token_ids and logprobs: use vLLM 0.30 or later")
        return Piece(token_ids, logprobs, choice.get("finish_reason") or "")

    async def _json(
        self, method: str, path: str, phase: str, seconds: float, hint: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        response = await self._send(method, path, phase, seconds, hint, body)
        if response.status_code != 200:
            raise self._refused(phase, response, hint)
        if not response.content:
            return {}
        try:
            answer = response.json()
        except ValueError as error:
            raise self.error(phase, f"{path} did not answer JSON", "is a vLLM server behind this address?") from error
        return answer if isinstance(answer, dict) else {}

    async def _send(
        self, method: str, path: str, phase: str, seconds: float, hint: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        timeout = httpx.Timeout(seconds, connect=min(seconds, self._config.connect_timeout_s))
        request = self._http.build_request(method, self.address + path, json=body, timeout=timeout)
        try:
            if phase.startswith("update"):
                return await self._http.send(request)
            return await _sent(lambda: self._http.send(request))
        except httpx.TimeoutException as error:
            raise self.error(phase, f"{path} did not answer within {seconds:g} s", hint) from error
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            raise self.error(phase, f"{path} cannot be reached ({str(error) or repr(error)})", hint) from error

    def _refused(self, phase: str, response: httpx.Response, hint: str) -> EngineError:
        path, text = response.request.url.path, " ".join(response.text.split())[:500]
        if response.status_code == 404 and not path.startswith("/v1/") and path != "/weight_checker":
            hint = NO_DEVELOPMENT_MODE
        return self.error(phase, f"{path} answered {response.status_code}: {text}", hint)


async def _sent(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """Send once more what a server hung up on unanswered: that was an idle connection which it was closing.

    Not for the steps of a weight update, which must not be done twice.
    """
    try:
        return await send()
    except HUNG_UP:
        return await send()
