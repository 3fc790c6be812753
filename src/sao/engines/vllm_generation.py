"""One generation on a vLLM server, over as many requests as weight updates cut it into."""

import asyncio
from typing import Any

import numpy as np

from sao.engines.protocol import EngineError, Sampling
from sao.engines.sampling import splitmix64
from sao.types import TokenChunk


class VllmGeneration:
    """What was asked, what was given so far, and the request under way."""

    def __init__(self, prompt: list[int], limit: int, cut_by_context: bool, sampling: Sampling) -> None:
        self.prompt = prompt
        self.limit = limit
        self.cut_by_context = cut_by_context
        self.sampling = sampling
        self.given: list[int] = []
        self.chunks: asyncio.Queue[TokenChunk | EngineError] = asyncio.Queue()
        self.cancelled = False
        self.ended = False
        self.request: asyncio.Task[bool] | None = None
        self.answered = False
        """Whether the request under way has given a token: then the server runs it, and an abort ends it at once."""

    def body(self, version: int) -> dict[str, Any]:
        """The request for the tokens that are missing. Its seed is of (Sampling.seed, index of the next token)."""
        sampling = self.sampling
        index = sampling.first_token_index + len(self.given)
        key = np.array([sampling.seed & (2**64 - 1)], dtype=np.uint64) ^ splitmix64(np.array([index], dtype=np.uint64))
        return {
            "prompt": self.prompt + self.given,
            "max_tokens": self.limit - len(self.given),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # What is left out a server takes from the model's generation_config.json: another distribution than ours.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            # Only our stop tokens end a generation, and not what the model's configuration calls its end.
            "ignore_eos": True,
            "seed": int(splitmix64(key)[0] >> np.uint64(1)),
            "return_tokens_as_token_ids": True,
            "cache_salt": f"version-{version}",
        }
