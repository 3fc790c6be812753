"""A byte-level ChatML tokenizer, an engine that plays given tokens, and environments with faults."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sao.clock import Clock
from sao.engines.protocol import EngineHealth, Sampling
from sao.envs.protocol import Step
from sao.rollout.renderer import ChatRenderer
from sao.types import GenerationStop, Message, Snapshot, Task, TokenChunk

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Bytes, a few merges, and ChatML's special tokens: any text has many tokenisations."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("1", "2"), ("a", "b")]
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    return tokenizer


def byte_renderer(template: str = CHATML, **settings: object) -> ChatRenderer:
    """ChatML over bytes."""
    return ChatRenderer(byte_tokenizer(), template, special_tokens={"eos_token": "<|endoftext|>"}, **settings)  # type: ignore[arg-type]


def task(name: str = "t", answer: str = "7") -> Task:
    return Task(id=name, prompt_id=f"p/{name}", question="q", answer=answer, data_set="toy")


@dataclass
class PlayedEngine:
    """Plays the given chunks, one list per call of `generate`; an exception among them is raised."""

    clock: Clock
    actions: Sequence[Sequence[TokenChunk | BaseException]]
    seconds: float = 1.0
    calls: list[tuple[tuple[int, ...], int, Sampling, str]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int, sampling: Sampling, session: str
    ) -> AsyncIterator[TokenChunk]:
        self.calls.append((tuple(token_ids), max_tokens, sampling, session))
        for chunk in self.actions[len(self.calls) - 1]:
            await self.clock.sleep(self.seconds)
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    async def cancel(self, session: str) -> None:
        self.cancelled.append(session)

    async def close(self, session: str) -> None:
        self.closed.append(session)

    async def load(self, snapshot: Snapshot) -> None:
        raise NotImplementedError

    async def health(self) -> EngineHealth:
        raise NotImplementedError

    async def stop(self) -> None:
        pass


@dataclass
class PlayedEnvironment:
    """Answers with the given steps; a step may be an exception, or a coroutine function to await first."""

    steps: Sequence[Step | BaseException | Callable[[], object]]
    opening: tuple[Message, ...] = (Message(role="user", content="hello"),)
    actions: list[str] = field(default_factory=list)
    closed: int = 0
    close_error: BaseException | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return self.opening

    async def step(self, action: Message) -> Step:
        self.actions.append(action.content)
        step = self.steps[len(self.actions) - 1]
        if isinstance(step, BaseException):
            raise step
        if not isinstance(step, Step):
            made = step()
            step = await made if asyncio.iscoroutine(made) else made  # type: ignore[assignment]
        assert isinstance(step, Step)
        return step

    async def close(self) -> None:
        self.closed += 1
        if self.close_error is not None:
            raise self.close_error


def chunk(
    ids: Sequence[int], version: int = 0, stop: GenerationStop | None = None, logprob: float = -0.5
) -> TokenChunk:
    return TokenChunk(token_ids=tuple(ids), logprobs=(logprob,) * len(ids), version=version, stop=stop)


def tool(text: str, **rest: float) -> Step:
    return Step(messages=(Message(role="tool", content=text),), **rest)
