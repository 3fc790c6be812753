"""What must hold of a vLLM server before a run trusts it: version, mode, model, dtype, context, and its words."""

import json
import re
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

from sao.clock import WaitTimeoutError, limit
from sao.engines.protocol import EngineError
from sao.engines.settings import EngineConfig
from sao.engines.vllm_http import NO_DEVELOPMENT_MODE, ServerFacts, VllmHttp
from sao.engines.vllm_settings import VllmConfig

OLDEST = (0, 30)
"""First release with all routes of a weight update."""

WORDS = 4
"""Tokens sampled to see that a server's words come with their log-probs."""


def snapshot_vocabulary(location: str) -> int:
    """Tokens of the model in a folder, by its config.json. Raises EngineError."""
    file = Path(location) / "config.json"
    try:
        config = json.loads(file.read_text())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{file} does not tell the model's vocabulary ({error!r}); the folder is not whole"
        ) from error


def too_old(version: str) -> str:
    """What is wrong with a release of vLLM; "" if nothing."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        return f"it is vLLM {version}; weight updates need {OLDEST[0]}.{OLDEST[1]} or later"
    return ""


def problems(facts: ServerFacts, engine: EngineConfig, config: VllmConfig) -> Iterator[str]:
    """What is wrong with a server by its own account, and what to do."""
    if problem := too_old(facts.version):
        yield problem
    if not facts.model:
        yield "/v1/models lists no model; is it a vLLM server?"
    if not facts.development:
        yield NO_DEVELOPMENT_MODE
    if 0 < facts.max_context < engine.max_context:
        yield (
            f"its context is {facts.max_context} tokens, engine.max_context is {engine.max_context}; start it with "
            f"--max-model-len={engine.max_context}, or lower engine.max_context"
        )
    if facts.dtype and facts.dtype != engine.dtype:
        yield f"its dtype is {facts.dtype}, engine.dtype is {engine.dtype}; make them the same"
    if facts.logprobs_mode and facts.logprobs_mode != "processed_logprobs":
        yield f"it reports {facts.logprobs_mode}; start it with --logprobs-mode processed_logprobs"
    if facts.development and facts.transport != config.transport:
        yield (
            f"its weight transfer is {facts.transport or 'off'}, vllm.transport is {config.transport}; start it with "
            f'--weight-transfer-config \'{{"backend": "{config.transport}"}}\''
        )
    if facts.chunked_prefill and "cpu" in facts.device:
        yield "it splits prompts, which kills a CPU server at a seeded request: use --no-enable-chunked-prefill"


async def check_server(
    server: VllmHttp, facts: ServerFacts, engine: EngineConfig, config: VllmConfig, *, vocab_size: int
) -> None:
    """Raises EngineError with everything that is wrong."""
    found = list(problems(facts, engine, config))
    if not found and not await server.knows_token(vocab_size - 1):
        found.append(f"its model has fewer than the policy's {vocab_size} tokens; start it with the policy's model")
    elif not found and await server.knows_token(vocab_size):
        found.append(f"its model has more than the policy's {vocab_size} tokens; start it with the policy's model")
    if found:
        raise EngineError(f"vLLM server {server.address}, phase check: " + ". Also: ".join(found))


async def check_words(server: VllmHttp, engine: EngineConfig, config: VllmConfig, *, vocab_size: int) -> float:
    """Sample a few tokens and let the server score them: what it records must be what its own forward pass gives.

    Returns the largest gap in nats; raises EngineError above engine.probe_tolerance.
    """
    prompt = [place % vocab_size for place in range(3, 8)]
    body = {
        "prompt": prompt,
        "max_tokens": WORDS,
        "temperature": 1.0,
        "ignore_eos": True,
        "seed": 1,
        "return_tokens_as_token_ids": True,
        "cache_salt": "check",
    }
    token_ids: list[int] = []
    logprobs: list[float] = []
    hint = "look at its log; nobody else may pause it"
    try:
        async with limit(config.probe_timeout_s, "sampled tokens"), aclosing(server.complete(body)) as pieces:
            async for piece in pieces:
                token_ids += piece.token_ids
                logprobs += piece.logprobs
    except WaitTimeoutError as error:
        what = f"{WORDS} tokens did not come within vllm.probe_timeout_s = {config.probe_timeout_s:g} s"
        raise server.error("check", what, hint) from error
    if len(token_ids) != WORDS:
        raise server.error("check", f"{len(token_ids)} tokens came where {WORDS} were asked for", hint)
    scored = (await server.score([*prompt, *token_ids], cache_salt="check"))[-WORDS:]
    gap = max(abs(recorded - own) for recorded, own in zip(logprobs, scored, strict=True))
    if not gap <= engine.probe_tolerance:
        what = f"tokens are recorded {gap:g} nats away from the server's own score of them"
        raise server.error("check", what, "start it with --logprobs-mode processed_logprobs")
    return gap
