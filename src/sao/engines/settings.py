"""Settings of engines and the local one's cost in virtual time. No torch, so that whoever starts one needs none."""

import math
from dataclasses import dataclass
from typing import Literal

KILL_SECONDS = 30.0
"""For a killed process to be gone: one that waits for a disk or a driver may not be, and nothing here can end it."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine: the embedded one, or servers that `[vllm]` describes further."""

    kind: Literal["local", "vllm"] = "local"
    """local: our own, on `transformers`, which the laptop needs. vllm: stock vLLM servers, for larger models."""
    replicas: int = 1
    """Engines that share the sessions, in real time. More use more cores or GPUs; one that dies is replaced while the
    others go on. With vllm.servers it is the number of addresses that counts."""
    mode: Literal["recompute", "keep"] = "recompute"
    """What becomes of the local engine's cached tokens at a weight update. recompute rebuilds them, so that every later
    log-prob is the trainer's for its version, as vLLM's are in any case; keep goes on with them: faster, but the
    log-probs match no version."""
    max_sessions: int = 64
    """Sessions that hold a cache at once; more wait, or push out the one parked longest."""
    max_context: int = 1024
    """Longest prompt and answer of a session together, in tokens."""
    threads: int = 1
    """Torch threads of an engine in its own process; an inline engine shares its process's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engine's weights and cache; float32 agrees with a float32 trainer to 1e-4."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes; as `model.device`, of which it is independent. The GPU path is untested."""
    flush_tokens: int = 16
    """Tokens given out at once; a stop and a change of version give out what there is."""
    probe_tolerance: float = 1e-3
    """Largest accepted difference of a probe token's log-prob from the trainer's, in nats; bfloat16 needs about 0.3."""
    prefill_tokens: int = 512
    """Prompt tokens computed between two decode steps: more starts sessions sooner and delays the running ones."""
    start_timeout_s: float = 180.0
    """Seconds for an engine process to start and load its model; imports alone take ten on a busy machine."""
    load_timeout_s: float = 120.0
    """Seconds for an engine process to take new weights, or to answer at all."""

    def __post_init__(self) -> None:
        for name in ("replicas", "max_sessions", "threads", "flush_tokens", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_context < 2:
            raise ValueError(f"engine.max_context is {self.max_context}; a prompt and an answer need at least 2 tokens")
        for name in ("probe_tolerance", "start_timeout_s", "load_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"engine.{name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class EngineCost:
    """What the inline engine costs in virtual time, in seconds; the defaults are a tiny model's on one CPU core."""

    step_seconds: float = 1.5e-3
    """Of a decode step, whatever its size."""
    token_seconds: float = 15e-6
    """More for each session in the step."""
    prefill_token_seconds: float = 10e-6
    """More for each prompt token put into the cache before the step."""
    load_seconds: float = 0.05
    """To read new weights, while decoding goes on."""

    def __post_init__(self) -> None:
        for name in ("step_seconds", "token_seconds", "prefill_token_seconds", "load_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"engine_cost.{name} is {getattr(self, name)}; it must be finite and not negative")

    def of_step(self, decoded: int, prefilled: int) -> float:
        """Seconds of one engine step."""
        return self.step_seconds + self.token_seconds * decoded + self.prefill_token_seconds * prefilled
