"""A model that judges, behind a real HTTP server on loopback, and everything that can go wrong with it."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rollout_fakes import PlayedEngine, byte_renderer, chunk

from sao.clock import RealClock
from sao.config import ConfigError, from_tree
from sao.envs.judge import JudgeConfig, ModelJudge
from sao.envs.protocol import Verdict, WorldError
from sao.envs.styles import StyleEnvironment
from sao.rollout.worker import LocalWorker, RolloutConfig
from sao.types import FailureKind, GenerationStop, Rollout, Task

TASK = Task(id="t/0", prompt_id="t", question="tell of it", answer="salty deep", details={"style": "classical"})
KEY = "sk-very-secret"


def said(text: str | None, finish: str = "stop") -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


@contextmanager
def endpoint(answer: Callable[[int], tuple[int, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """A chat endpoint; `answer` gets the number of the request."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((self.path, self.headers.get("authorization"), body))
            status, content = answer(len(seen))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            with suppress(BrokenPipeError, ConnectionResetError):  # a judge that timed out has hung up
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class ImpatientClock(RealClock):
    """Does not wait between retries."""

    async def sleep(self, seconds: float) -> None:
        pass


def judged(url: str, answer: str = "thou salty deep", **settings: Any) -> Verdict:
    config = JudgeConfig(kind="model", base_url=url, model="big", api_key_variable="JUDGE_KEY", **settings)
    return asyncio.run(ModelJudge(config, ImpatientClock()).judge(TASK, answer))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)


def test_the_model_is_told_all_it_needs_and_its_marks_are_shares() -> None:
    """Catches a judge that is not told the style or the facts, and marks of 0 to 10 taken for rewards."""
    with endpoint(lambda _: said('Sure!\n```json\n{"quality": 10, "style": 2.5}\n```')) as (url, seen):
        assert judged(url, 'he said "give 10"') == Verdict(quality=1.0, style=0.25)
    where, key, body = seen[0]
    assert (where, key, body["model"], body["temperature"]) == (
        "/v1/chat/completions", f"Bearer {KEY}", "big", 0.0,
    )  # fmt: skip
    asked = body["messages"][-1]["content"]
    assert all(part in asked for part in ("tell of it", "salty deep", "classical", r"he said \"give 10\""))


@pytest.mark.parametrize(
    "text",
    [
        "a fine answer",
        '{"quality": 7}',
        '{"quality": 7, "style": 11}',
        '{"quality": -1, "style": 5}',
        '{"quality": "7", "style": 5}',
        '{"quality": true, "style": 5}',
        '{"quality": NaN, "style": 5}',
        "{quality: 7, style: 5}",
        "[7, 5]",
    ],
)
def test_a_reply_without_marks_is_no_mark_of_0(text: str) -> None:
    """Catches garbage that is trained on as a reward."""
    with endpoint(lambda _: said(text)) as (url, _), pytest.raises(WorldError, match="gave no marks"):
        judged(url)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, b"<html>"), "not JSON"),
        ((200, {"error": "x"}), "no chat completion"),
        (said(""), "empty"),
        (said('{"quality": 7, "sty', "length"), r"cut at environment\.judge\.max_tokens"),
        ((400, {"error": "no"}), "status 400"),
        ((404, {"error": "no"}), r"knows no model 'big'.*environment\.judge\.model"),
        ((503, {"error": "busy"}), r"did not answer in 3 tries.*503"),
    ],
)
def test_an_endpoint_that_fails_is_a_failure_of_the_world(answer: tuple[int, Any], says: str) -> None:
    """Catches an exception that the loop does not know, or an error that does not say what to do."""
    with endpoint(lambda _: answer) as (url, seen), pytest.raises(WorldError, match=says):
        judged(url)
    assert len(seen) == (3 if answer[0] == 503 else 1), "what would be refused again is not asked again"


def test_what_is_refused_for_the_moment_is_asked_again() -> None:
    """Catches an episode lost for one busy second."""
    replies = {1: (429, {"error": "slow down"}), 2: said('{"quality": 5, "style": 10}')}
    with endpoint(replies.__getitem__) as (url, _):
        assert judged(url) == Verdict(quality=0.5, style=1.0)


def test_a_wrong_key_names_its_variable_and_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Catches the key in a message, although the endpoint repeats it, or in a log at any level."""
    caplog.set_level(logging.DEBUG)
    refusal = (401, {"error": f"Incorrect API key provided: {KEY}"})
    with (
        endpoint(lambda _: refusal) as (url, _),
        pytest.raises(WorldError, match=r"refuses the key.*JUDGE_KEY") as error,
    ):
        judged(url)
    chain = [error.value, error.value.__cause__, error.value.__context__]
    assert all(KEY not in str(each) for each in chain)
    assert KEY not in caplog.text


def test_a_judge_that_does_not_answer_in_time() -> None:
    """Catches an episode that waits for ever."""
    hold = threading.Event()

    def wait(_: int) -> tuple[int, Any]:
        hold.wait(20)
        return said("late")

    with endpoint(wait) as (url, seen):
        began = time.monotonic()
        try:
            with pytest.raises(WorldError, match=r"did not answer in 2 tries.*ReadTimeout"):
                judged(url, timeout_s=0.3, max_retries=1)
        finally:
            hold.set()
    assert time.monotonic() - began < 15
    assert len(seen) == 2


def test_a_judge_that_is_not_there() -> None:
    """Catches a connection error of httpx in place of ours."""
    with endpoint(lambda _: said("")) as (url, _):
        pass
    with pytest.raises(WorldError, match=r"did not answer.*ConnectError.*environment\.judge\.base_url"):
        judged(url)


def played(url: str) -> Rollout:
    """An episode whose answer this judge judges."""
    clock, renderer = ImpatientClock(), byte_renderer()
    judge = ModelJudge(JudgeConfig(kind="model", base_url=url, model="big"), clock)
    tokens = [*renderer.encode_action("thou salty deep")]
    engine = PlayedEngine(clock, [[chunk(tokens, stop=GenerationStop.STOP_TOKEN)]])
    worker = LocalWorker(
        lambda: StyleEnvironment(judge, coin=False, seed=0), engine, renderer, clock, RolloutConfig(max_turns=1)
    )
    return asyncio.run(worker.run(TASK, group_id="t/0", attempt=0, seed=1))


def test_an_episode_without_marks_is_not_trained_on() -> None:
    """Catches a judge's failure that becomes reward 0, and so an argument against a good answer."""
    with endpoint(lambda _: said('{"quality": 10, "style": 5}')) as (url, _):
        good = played(url)
    assert (good.failure, good.reward, good.trainable) == (FailureKind.NONE, 0.5, True)
    for answer in (said("what?"), (500, {}), (401, {})):
        with endpoint(lambda _, answer=answer: answer) as (url, _):
            bad = played(url)
        assert (bad.failure, bad.trainable) == (FailureKind.INFRASTRUCTURE, False)
        assert "the judge gave no marks" in bad.failure_text


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"environment": {"judge": {"kind": "model"}}}, r"environment\.judge\.base_url is ''"),
        (
            {"environment": {"judge": {"kind": "model", "base_url": "http://x/v1"}}},
            r"environment\.judge\.model is empty",
        ),
        ({"environment": {"judge": {"timeout_s": 0}}}, r"environment\.judge\.timeout_s is 0"),
        ({"environment": {"judge": {"max_retries": -1}}}, r"environment\.judge\.max_retries is -1"),
        (
            {
                "clock": "virtual",
                "environment": {"judge": {"kind": "model", "base_url": "http://x/v1", "model": "m"}},
            },
            'outside of virtual time; set clock = "real"',
        ),
    ],
)
def test_settings_of_a_judge_that_cannot_judge(tree: dict[str, Any], says: str) -> None:
    """Catches a run that finds out at its first answer that nobody can judge it."""
    with pytest.raises(ConfigError, match=says):
        from_tree(tree)
