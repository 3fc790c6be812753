"""A whole environment on one screen: guess a number from the hints "higher" and "lower".

Data, step, reward. Copy it to start an environment of your own: docs/environments.md.
"""

import re
from dataclasses import dataclass

from sao.envs.keyed import uniform
from sao.envs.protocol import Step
from sao.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class GuessConfig:
    """Which games are played."""

    highest: int = 9
    """The number is one of 1 .. highest; 9 keeps every guess one digit."""
    max_guesses: int = 5
    """Guesses before the game is lost; halving needs about log2(highest) + 1."""

    def __post_init__(self) -> None:
        if self.highest < 1 or self.max_guesses < 1:
            raise ValueError(f"highest is {self.highest} and max_guesses {self.max_guesses}; both must be at least 1")


class GuessTasks:
    """Endless games; the number of game i depends on the seed, the name and i alone."""

    def __init__(self, config: GuessConfig, *, name: str = "guess", seed: int = 0) -> None:
        self.name = name
        self._config = config
        self._seed = seed

    def at(self, index: int) -> Task | None:
        """Game `index`."""
        number = 1 + int(uniform(self._seed, self.name, index) * self._config.highest)
        return Task(
            id=f"{self.name}/{index}",
            prompt_id=f"{self.name}/{number}",
            question=f"guess a number from 1 to {self._config.highest}",
            answer=str(number),
            data_set=self.name,
        )


class GuessEnvironment:
    """One game. Reward 1 for the right number, 0 when the guesses run out."""

    def __init__(self, config: GuessConfig) -> None:
        self._guesses_left = config.max_guesses
        self._number = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Ask."""
        self._number = int(task.answer)
        return (Message(role="user", content=task.question),)

    async def step(self, action: Message) -> Step:
        """Take the first number in the message as the guess."""
        self._guesses_left -= 1
        found = re.search(r"\d{1,9}", action.content)
        guess = int(found.group()) if found else None
        if guess == self._number:
            return Step(reward=1.0, done=True)
        if self._guesses_left == 0:
            return Step(done=True)
        hint = "no number" if guess is None else "higher" if guess < self._number else "lower"
        return Step(messages=(Message(role="user", content=hint),))

    async def close(self) -> None:
        """Nothing to release."""
