"""A teacher behind a real HTTP server on loopback, and rollouts as messages again."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from chat_server import Answer, ImpatientClock, chat_server, completion, refusal
from rollout_fakes import PlayedEngine, PlayedEnvironment, byte_renderer, chunk, task, tool

from sao.clock import RealClock, VirtualClock, run_virtual
from sao.envs.protocol import Step, WorldError
from sao.envs.tokenizer import save_tokenizer
from sao.envs.toy import GuessConfig, GuessEnvironment, GuessTasks
from sao.envs.traces import Trace, read_traces
from sao.rollout.renderer import ChatRenderer, load_renderer
from sao.rollout.teacher import Collected, TeacherConfig, TeacherError, collect_traces
from sao.rollout.transcript import trace_of
from sao.rollout.worker import LocalWorker, RolloutConfig
from sao.types import GenerationStop, Message, Rollout, Task

GAMES = GuessTasks(GuessConfig(highest=3, max_guesses=2), seed=2)


def collect(
    url: str, path: Path, tasks: list[Task], make: Any = None, clock: RealClock | None = None, **settings: Any
) -> Collected:
    config = TeacherConfig(base_url=url, model="big", **settings)
    make = make or (lambda: GuessEnvironment(GuessConfig(highest=3, max_guesses=2)))
    return asyncio.run(collect_traces(tasks, make, path, config, clock or ImpatientClock()))


def games(count: int) -> list[Task]:
    return [game for game in (GAMES.at(index) for index in range(count)) if game is not None]


def guess(body: dict[str, Any], _: int) -> Answer:
    """2, then 3: right for 2 and 3, wrong for 1."""
    return completion("guess 2" if body["messages"][-1]["content"].startswith("guess a") else "guess 3")


def test_right_traces_are_kept_and_a_second_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: wrong episodes become training data, or an interrupted collection starts over."""
    monkeypatch.setenv("TEACHER_KEY", "secret")
    path = tmp_path / "deep" / "traces.jsonl"
    right = [game for game in games(12) if game.answer != "1"]
    settings = {"api_key_variable": "TEACHER_KEY", "system_prompt": "play well", "concurrency": 3}
    with chat_server(guess) as (url, seen):
        first = collect(url, path, games(6), **settings)
        with path.open("a") as file:
            file.write('{"task_id": "guess/99", "mess')
        second = collect(url, path, games(12), **settings)
    assert (first.kept, first.wrong) == (
        len([g for g in games(6) if g.answer != "1"]),
        len([g for g in games(6) if g.answer == "1"]),
    )
    assert (second.already_there, second.kept) == (first.kept, len(right) - first.kept)
    traces = {trace.task_id: trace for trace in read_traces(path)}
    assert sorted(traces) == sorted(game.id for game in right)
    for game in right:
        said = [message.content for message in traces[game.id].messages]
        hints = [] if game.answer == "2" else ["higher", "guess 3"]
        assert said == ["guess a number from 1 to 3", "guess 2", *hints]
        assert traces[game.id].reward == 1.0
    where, key, body, _ = seen[0]
    assert (where, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "big")
    assert body["messages"][0] == {"role": "system", "content": "play well"}
    assert "secret" not in path.read_text()


def test_wrong_traces_are_kept_when_asked(tmp_path: Path) -> None:
    """Bug: the filter cannot be turned off, or another attempt is not made."""
    path = tmp_path / "traces.jsonl"
    with chat_server(guess) as (url, seen):
        assert collect(url, path, games(6), only_right=False).kept == 6
        wrong = [game for game in games(6) if game.answer == "1"][:1]
        before = len(seen)
        assert collect(url, tmp_path / "other.jsonl", wrong, attempts=3).wrong == 1
        assert len(seen) - before == 6


def test_replies_are_cut_behind_the_first_call_and_tool_output_goes_as_the_user(tmp_path: Path) -> None:
    """Bug: output that the teacher made up stays in the trace."""
    made: list[PlayedEnvironment] = []

    def environment() -> PlayedEnvironment:
        made.append(PlayedEnvironment([tool("12"), Step(reward=1.0, done=True)]))
        return made[-1]

    texts = ["think <python> 3*4 </python> output: 13 <answer> 13 </answer>", "<answer> 12 </answer> bye"]
    with chat_server(lambda _, number: completion(texts[number - 1])) as (url, seen):
        assert collect(url, tmp_path / "t.jsonl", [task()], environment).kept == 1
    assert made[0].actions == ["think <python> 3*4 </python>", "<answer> 12 </answer>"]
    assert made[0].closed == 1
    assert seen[1].body["messages"][-1] == {"role": "user", "content": "12"}
    (trace,) = read_traces(tmp_path / "t.jsonl")
    assert [message.role for message in trace.messages] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("status", "says"), [(401, "refuses the key.*MY_KEY"), (403, "refuses the key"), (404, "no model 'big'")]
)
def test_a_bad_key_or_model_stops_at_once(tmp_path: Path, status: int, says: str) -> None:
    """Bug: a typing error is retried for minutes, or shows as an empty file."""
    with (
        chat_server(lambda *_: refusal(status, {"error": "nope"})) as (url, seen),
        pytest.raises(TeacherError, match=says),
    ):
        collect(url, tmp_path / "t.jsonl", games(3), concurrency=1, api_key_variable="MY_KEY")
    assert len(seen) == 1


def test_an_unreachable_teacher_is_named(tmp_path: Path) -> None:
    """Bug: a wrong port hangs, or gives a traceback of the HTTP library."""
    with chat_server(guess) as (url, _):
        pass
    clock = ImpatientClock()
    with pytest.raises(TeacherError, match=rf"{url}.*did not answer in 4 tries.*ConnectError.*teacher.base_url"):
        collect(url, tmp_path / "t.jsonl", games(1), clock=clock, max_retries=3)
    assert clock.waits == [1.0, 2.0, 4.0]


def test_a_busy_teacher_is_asked_again_when_it_says(tmp_path: Path) -> None:
    """Bug: a rate limit ends the collection, or is hammered."""

    def busy(body: dict[str, Any], number: int) -> Answer:
        return refusal(429, retry_after="7") if number == 1 else refusal(503) if number == 2 else guess(body, number)

    clock = ImpatientClock()
    with chat_server(busy) as (url, _):
        assert collect(url, tmp_path / "t.jsonl", games(1), clock=clock, only_right=False).kept == 1
    assert clock.waits == [7.0, 2.0]


def test_a_reply_that_cannot_be_used_is_asked_for_again(tmp_path: Path) -> None:
    """Bug: a long episode is lost for one cut reply."""

    def cut(body: dict[str, Any], number: int) -> Answer:
        return completion("guess 2 or", "length") if number == 1 else guess(body, number)

    with chat_server(cut) as (url, seen):
        assert collect(url, tmp_path / "t.jsonl", games(1), only_right=False).kept == 1
    assert seen[0].body == seen[1].body


@pytest.mark.parametrize("key", ["sk-one\nsk-two", "sk-\u00e9", "sk-\x1b[0m"])
def test_a_key_that_no_request_can_carry(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the HTTP library's error, which shows the key, ends in a log."""
    monkeypatch.setenv("TEACHER_KEY", key)
    with chat_server(guess) as (url, seen), pytest.raises(TeacherError, match="variable TEACHER_KEY") as error:
        collect(url, tmp_path / "t.jsonl", games(1), api_key_variable="TEACHER_KEY")
    assert not seen
    assert "sk-" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (refusal(400, {"error": "context too long"}), "status 400.*context too long"),
        ((200, b"<html>", {}), "not JSON"),
        ((200, {"choices": []}, {}), "no chat completion"),
        (completion("  "), "empty"),
        (completion(None), "empty"),
        (completion("guess 2", "length"), "cut at teacher.max_tokens"),
    ],
)
def test_unusable_answers_are_counted_and_end_in_an_error_when_there_is_nothing_else(
    tmp_path: Path, answer: Answer, says: str
) -> None:
    """Bug: one bad answer ends everything, or a thousand of them go unnoticed."""
    with chat_server(lambda *_: answer) as (url, _):
        collected = collect(url, tmp_path / "t.jsonl", games(2))
        assert (collected.failed, collected.kept, sum(collected.reasons.values())) == (2, 0, 2)
        with pytest.raises(TeacherError, match=f"3 episodes in a row broke off.*{says}"):
            collect(url, tmp_path / "t.jsonl", games(5), max_failures_in_a_row=3)


def test_faults_of_the_world_and_endless_episodes_give_no_trace(tmp_path: Path) -> None:
    """Bug: a broken sandbox is kept as an episode of reward 0."""
    with chat_server(guess) as (url, _):
        broken = lambda: PlayedEnvironment([WorldError("no sandbox")])  # noqa: E731
        collected = collect(url, tmp_path / "t.jsonl", [task()], broken, only_right=False)
        assert (collected.failed, dict(collected.reasons)) == (1, {"no sandbox": 1})
        endless = lambda: PlayedEnvironment([tool("1"), tool("2")])  # noqa: E731
        collected = collect(url, tmp_path / "t.jsonl", [task()], endless, only_right=False, max_turns=2)
        assert (collected.wrong, dict(collected.reasons)) == (1, {"no end after 2 turns": 1})
    assert (tmp_path / "t.jsonl").read_text() == ""


def test_settings_out_of_range_and_foreign_files_are_told(tmp_path: Path) -> None:
    """Bug: traces are appended to a file that is none, or a bad address fails at the first request."""
    for address in ("localhost:80", "http://", "http://localhost:port", "http://[::1"):
        with pytest.raises(ValueError, match=rf"teacher\.base_url is {re.escape(repr(address))}"):
            TeacherConfig(base_url=address, model="m")
    with pytest.raises(ValueError, match=r"teacher\.model is empty"):
        TeacherConfig(base_url="http://localhost", model="")
    with pytest.raises(ValueError, match=r"teacher\.concurrency is 0"):
        TeacherConfig(base_url="http://localhost", model="m", concurrency=0)
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(ValueError, match=r"notes\.txt, line 1"):
        collect("http://127.0.0.1:9", tmp_path / "notes.txt", games(1))


def play(renderer: ChatRenderer, texts: list[str], environment: PlayedEnvironment) -> Rollout:
    stop = GenerationStop.STOP_TOKEN
    actions = [[chunk(renderer.encode_action(text), stop=stop)] for text in texts]

    async def main() -> Rollout:
        clock = VirtualClock()
        worker = LocalWorker(lambda: environment, PlayedEngine(clock, actions), renderer, clock, RolloutConfig())
        return await worker.run(task("t/1"), group_id="g", attempt=0, seed=0)

    return run_virtual(main())


@pytest.mark.parametrize("words", [True, False])
def test_a_logged_rollout_reads_as_messages_again(tmp_path: Path, words: bool) -> None:
    """Bug: a trace made of a rollout holds the template's own words, or loses a turn."""
    renderer = load_renderer(str(save_tokenizer(tmp_path / "demo"))) if words else byte_renderer()
    opening = (Message(role="system", content="the answer"), Message(role="user", content="guess a number"))
    steps = [tool("12"), Step(messages=(Message(role="user", content="higher"),)), Step(reward=1.0, done=True)]
    texts = ["<python> 3 </python>", "the number", "<answer> 12 </answer>"]
    rollout = play(renderer, texts, PlayedEnvironment(steps, opening=opening))
    answers = [Message(role="tool", content="12"), Message(role="user", content="higher")]
    said = [Message(role="assistant", content=text) for text in texts]
    expected = (*opening, said[0], answers[0], said[1], answers[1], said[2])
    assert trace_of(rollout, renderer) == Trace(task_id="t/1", messages=expected, reward=1.0)


def test_what_is_no_single_conversation_is_refused() -> None:
    """Bug: half a rollout becomes a trace."""
    renderer = byte_renderer()
    empty = play(renderer, [], PlayedEnvironment([], opening=()))
    with pytest.raises(ValueError, match="0 action tokens"):
        trace_of(empty, renderer)
    with pytest.raises(ValueError, match="no tail of the tokenizer"):
        renderer.read_back([65, 66], opening=False)
    assert renderer.read_back(renderer.open([Message(role="user", content=" a\n")]), opening=True)[0].content == " a\n"
