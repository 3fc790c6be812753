"""A small HTTP server with vLLM's routes over a real tiny transformer, honest by default; its faults are fields."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from engine_toys import VOCABULARY
from transformers import PreTrainedModel

from sao.engines.vllm_plugin import join_gloo, received
from sao.models.load import load_folder

HEAD = "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{length}\r\n"


class RefusedError(Exception):
    """An HTTP error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeVllm:
    """One server. `flush` is --stream-interval; `calls` records every route in order."""

    def __init__(self, model: PreTrainedModel, *, flush: int = 4) -> None:
        self.model, self.flush = model, flush
        self.version, self.development, self.dtype, self.context = "0.32.0", True, "torch.float32", 128
        self.logprobs_mode, self.transport, self.vocabulary = "processed_logprobs", "folder", VOCABULARY
        self.label = "default"
        self.lies = False
        self.refuses_update = ""
        self.stalls_after = self.dies_after = 1 << 30
        self.token_seconds = 0.0
        self.hangs_up: set[str] = set()
        self.busy = 0
        """Requests that are still to be answered 503."""
        self.refuses_request = self.garbage = False
        self.model_top_k = -1
        """Of the model's generation_config.json, which a true server may take where a request says none."""
        self.queued: set[int] = set()
        """First tokens of prompts that get no turn."""
        self.sampled = 0
        self.calls: list[str] = []
        self.salts: list[str] = []
        self.prompts: list[int] = []
        self.paused = self.updating = False
        self.group: Any = None
        self._epoch = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.accepted = 0
        self.address = ""

    async def start(self, port: int = 0) -> "FakeVllm":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        """As SIGKILL would: connections break in mid-word, the port is closed."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        self.accepted += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while line := await reader.readline():
                method, target, _ = line.decode().split(" ", 2)
                length = 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = json.loads(await reader.readexactly(length)) if length else {}
                path = urlsplit(target).path
                if path in self.hangs_up:
                    # As where an idle connection is closed just when it is used again.
                    self.hangs_up.remove(path)
                    break
                await self._answer(method, target, body, reader, writer)
        self._connections.discard(writer)
        writer.close()

    async def _answer(self, method: str, target: str, body: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(target)
        self.calls.append(f"{method} {url.path}")
        try:
            if url.path == "/v1/completions" and body.get("stream"):
                await self._stream(body, reader, writer)
                return
            answer = await self._route(url.path, {key: value[0] for key, value in parse_qs(url.query).items()}, body)
            status, text = 200, json.dumps(answer)
        except RefusedError as error:
            status, text = error.status, json.dumps({"error": {"message": str(error)}})
        head = HEAD.format(status=status, length=f"content-length: {len(text)}\r\n")
        writer.write(head.encode() + text.encode())
        await writer.drain()

    async def _route(self, path: str, query: dict[str, str], body: Any) -> Any:
        if path == "/health":
            return {}
        if path == "/version":
            return {"version": self.version}
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": self.context}]}
        if path == "/v1/completions":
            return await self._complete(body)
        if not self.development:
            raise RefusedError(404, "Not Found")
        return await self._development(path, query, body)

    def abort(self) -> None:
        """End all running requests with what they have."""
        self._epoch += 1

    async def _development(self, path: str, query: dict[str, str], body: Any) -> Any:
        match path:
            case "/server_info":
                return {
                    "vllm_config": {
                        "model_config": {"dtype": self.dtype, "logprobs_mode": self.logprobs_mode},
                        "weight_transfer_config": {"backend": self.transport},
                        "parallel_config": {"world_size": 1},
                        "device_config": {"device": "cpu"},
                        "scheduler_config": {"enable_chunked_prefill": False},
                    }
                }
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/get_world_size":
                return {"world_size": 1}
            case "/weight_checker":
                state = self.model.state_dict().items()
                return {"checksums": {name: str(float(tensor.double().sum())) for name, tensor in state}}
            case "/pause":
                assert query == {"mode": "abort", "clear_cache": "true"}
                self.paused = True
                self.abort()
                self._resumed.clear()
            case "/resume":
                self.paused = False
                self._resumed.set()
            case "/init_weight_transfer_engine":
                if body["init_info"]:
                    info = body["init_info"]
                    place = {"rank": info["rank_offset"], "world_size": info["world_size"], "timeout_s": 20.0}
                    self.group = await asyncio.to_thread(
                        join_gloo, info["master_address"], info["master_port"], **place
                    )
            case "/start_weight_update":
                assert self.paused, "vLLM crashes when weights change under running requests"
                self.updating = True
            case "/update_weights":
                assert self.updating
                if self.refuses_update:
                    raise RefusedError(500, self.refuses_update)
                await self._receive(body["update_info"])
            case "/finish_weight_update":
                self.updating = False
                self.label = body["weight_version"]
            case _:
                raise RefusedError(404, "Not Found")
        return {}

    async def _receive(self, update: dict[str, Any]) -> None:
        if "folder" in update:
            model = load_folder(Path(update["folder"]), dtype=torch.float32)
        else:
            state = dict(await asyncio.to_thread(lambda: list(received(self.group, **update))))
            model = load_folder(Path(self.first_folder), dtype=torch.float32)
            model.load_state_dict(state, strict=False)
        if not self.lies:
            self.model = model

    first_folder = ""
    """Any folder of the model's shape, for the gloo transport."""

    async def _complete(self, body: Any) -> Any:
        allowed = body.get("allowed_token_ids")
        if allowed and allowed[0] >= self.vocabulary:
            raise RefusedError(400, "allowed_token_ids contains out-of-vocab token id!")
        await self._resumed.wait()
        prompt = body["prompt"]
        logprobs = self._logprobs(prompt)
        places = [
            {str(token): {"logprob": float(row[token])}} for token, row in zip(prompt[1:], logprobs, strict=False)
        ]
        return {"choices": [{"token_ids": [0], "finish_reason": "length", "prompt_logprobs": [None, *places]}]}

    def _logprobs(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([tokens]), use_cache=False).logits[0].float(), dim=-1)

    async def _stream(self, body: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        if self.busy:
            self.busy -= 1
            raise RefusedError(503, "the engine is paused")
        if self.refuses_request:
            raise RefusedError(400, "this prompt is not taken")
        self.salts.append(body["cache_salt"])
        self.prompts.append(len(body["prompt"]))
        head = HEAD.format(status=200, length="transfer-encoding: chunked\r\n")
        writer.write(head.encode())
        await self._resumed.wait()
        while body["prompt"][0] in self.queued:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if self.garbage:
            data = b'data: {"choices": [7]}\n\n'
            writer.write(f"{len(data):X}\r\n".encode() + data + b"\r\n0\r\n\r\n")
            return
        generator, tokens, epoch = torch.Generator().manual_seed(body["seed"]), list(body["prompt"]), self._epoch
        ids: list[int] = []
        scores: list[float] = []
        finish = None
        for count in range(1, body["max_tokens"] + 1):
            await asyncio.sleep(self.token_seconds)
            if self._epoch != epoch:
                finish = "abort"
                break
            await self._fault(writer)
            row = self._logprobs(tokens)[-1]
            if (kept := body.get("top_k", self.model_top_k)) > 0:
                row = torch.log_softmax(row.masked_fill(row < row.topk(kept).values[-1], -torch.inf), dim=-1)
            token = int(torch.multinomial(row.exp(), 1, generator=generator))
            tokens.append(token)
            self.sampled += 1
            ids, scores = [*ids, token], [*scores, float(row[token])]
            finish = (
                "stop" if token in body.get("stop_token_ids", ()) else "length" if count == body["max_tokens"] else None
            )
            if finish:
                break
            if count == 1 or len(ids) >= self.flush:
                self._event(writer, ids, scores, None)
                ids, scores = [], []
                await writer.drain()
        if len(tokens) > len(body["prompt"]):  # As the true one, it says nothing of a request that brought no token.
            self._event(writer, ids, scores, finish)
        writer.write(b"E\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    async def _fault(self, writer: asyncio.StreamWriter) -> None:
        if self.sampled >= self.stalls_after:
            await asyncio.sleep(3600)
        if self.sampled >= self.dies_after:
            await self.stop()
            raise ConnectionError

    def _event(self, writer: asyncio.StreamWriter, ids: list[int], scores: list[float], finish: str | None) -> None:
        choice = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": scores}, "finish_reason": finish}
        data = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        writer.write(f"{len(data):X}\r\n".encode() + data + b"\r\n")
