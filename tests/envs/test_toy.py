"""The guessing game, end to end without a model."""

import asyncio

import pytest

from sao.envs.demonstrations import ReplayExpert, play
from sao.envs.toy import GuessConfig, GuessEnvironment, GuessTasks
from sao.types import Message, Task


def _play(answer: str, guesses: list[str], config: GuessConfig | None = None):
    task = Task(id="g/0", prompt_id="g", question="guess", answer=answer)
    return asyncio.run(play(task, GuessEnvironment(config or GuessConfig()), ReplayExpert(guesses)))


def test_hints_and_reward() -> None:
    """Would catch hints that point the wrong way, and a win without reward."""
    trace = _play("3", ["5", "it is 1", "what", "3"])
    assert [message.content for message in trace.messages[2::2]] == ["lower", "higher", "no number"]
    assert trace.reward == 1.0


def test_guesses_run_out() -> None:
    """Would catch a game that never ends."""
    trace = _play("9", ["1"] * 20, GuessConfig(max_guesses=3))
    assert trace.reward == 0.0
    assert sum(message.role == "assistant" for message in trace.messages) == 3


def test_tasks_are_functions_of_seed_and_index() -> None:
    """Would catch a resumed run that plays other games."""
    tasks = GuessTasks(GuessConfig())
    assert [tasks.at(i) for i in (5, 0, 5)] == [GuessTasks(GuessConfig()).at(i) for i in (5, 0, 5)]
    assert {tasks.at(i).answer for i in range(200)} == {str(n) for n in range(1, 10)}  # type: ignore[union-attr]


def test_bad_settings() -> None:
    """Would catch a game without numbers."""
    with pytest.raises(ValueError, match="highest is 0"):
        GuessConfig(highest=0)


def test_messages_are_plain() -> None:
    """Would catch an opening that the renderer cannot render."""
    opening = asyncio.run(GuessEnvironment(GuessConfig()).reset(GuessTasks(GuessConfig()).at(0)))  # type: ignore[arg-type]
    assert opening == (Message(role="user", content="guess a number from 1 to 9"),)
