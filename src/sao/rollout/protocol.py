"""The seams of one episode: text to tokens, and a task to a rollout."""

from collections.abc import Sequence
from typing import Protocol

from sao.types import GenerationStop, Message, Rollout, Task


class Renderer(Protocol):
    """The only place that knows a chat template. Appending only: what was sampled is never tokenised again."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end an assistant turn."""

    def open(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the opening messages, up to where the assistant's first token is to be sampled."""
        ...

    def extend(self, sampled: Sequence[int], stop: GenerationStop, messages: Sequence[Message]) -> list[int]:
        """Tokens after the sampled ones: the turn's close where it is missing, `messages`, and the next opening."""
        ...

    def text(self, sampled: Sequence[int]) -> str:
        """The sampled tokens as text, without the turn's closing token."""
        ...


class RolloutWorker(Protocol):
    """Plays episodes."""

    async def run(self, task: Task, *, group_id: str, attempt: int, seed: int) -> Rollout:
        """Play one episode to its end. Endings and failures are in the rollout; only cancellation is raised."""
        ...

    async def stop(self) -> None:
        """Release everything. Safe to call twice."""
        ...
