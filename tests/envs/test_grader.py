"""Grading: what counts as equal, and what happens when grading fails."""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import gone
from pydantic import TypeAdapter

from sao.envs import grader_worker
from sao.envs.grader import GraderConfig, MathGrader, _cannot_match
from sao.envs.protocol import Grade, WorldError
from sao.types import Task


def task(gold: str) -> Task:
    return Task(id="t", prompt_id="t", question="", answer=gold)


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    pool = MathGrader(GraderConfig(workers=1))
    yield pool
    pool.stop()


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("3", "3.0", 1), ("1234", "1,234", 1), ("3", "4", 0), ("18", "\\$18.00", 1), ("-3", "-3.", 1), ("0", "-0", 1),
    ],
)  # fmt: skip
def test_numbers_are_compared_without_a_process(gold: str, answer: str, reward: float) -> None:
    """Catches a pool of sympy processes started for integers, on every machine that runs the demo."""
    pool = MathGrader()
    assert pool.grade(task(gold), answer) == Grade(reward=reward, method="exact")
    assert not pool._running
    pool.stop()


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("\\frac{1}{2}", "0.5", 1),
        ("1/2", "\\dfrac{2}{4}", 1),
        ("1/3", "0.3333", 0),
        ("50\\%", "0.5", 1),
        ("50%", "1/2", 1),
        ("\\sqrt{2}/2", "\\frac{1}{\\sqrt{2}}", 1),
        ("\\{1,2,3\\}", "\\{3,2,1\\}", 1),
        ("\\{1,2,3\\}", "\\{1,2\\}", 0),
        ("(1,2)", "(1, 2)", 1),
        ("(1,2)", "(2,1)", 0),
        ("[0,1)\\cup(2,3]", "[0,1) \\cup (2,3]", 1),
        ("[0,1)\\cup(2,3]", "[0,1] \\cup (2,3]", 0),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", 1),
        ("3", "x=3", 1),
        ("90", "90^\\circ", 1),
        ("3\u03c0/4", "\\frac{3\\pi}{4}", 1),
        ("\\ln 2", "\\log(2)", 1),
        ("\\ln 2", "\\log_{10}(2)", 0),
        ("\\binom{5}{2}", "10", 1),
        ("2^{1012}-1", "-1+2^{1012}", 1),
        ("n(n+1)/2", "\\frac{n^2+n}{2}", 1),
        ("f(x)=c/x", "f(x)=\\frac{c}{x}", 1),
        ("x^2y^3", "y^3x^2", 1),
        ("\\text{Yes}", "Yes", 1),
        ("5", "five", 0),
        ("1", "nan", 0),
        ("1", "\\infty", 0),
        ("3", "2;3", 0),
        ("7", "7, 8", 0),
    ],
)
def test_forms_of_an_answer(gold: str, answer: str, reward: float, grader: MathGrader) -> None:
    """Catches the traps of math-verify: gold parsed as plain text, percents, order in tuples but not in sets."""
    assert grader.grade(task(gold), answer).reward == reward


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "$",
        "x" * 501,
        "9^{9^{9}}",
        "2^{10^9}",
        "3^{1000000}",
        "100000!",
        "(10^9)!",
        "((((",
        "\\frac{1}{",
        "\x00",
        "\ud800",
    ],
)
def test_cannot_match_answers_are_wrong_at_once(answer: str, grader: MathGrader) -> None:
    """Catches an answer that holds up the pool or fails it, when plainly it is not the gold one."""
    started = time.monotonic()
    assert grader.grade(task("\\frac{1}{2}"), answer).reward == 0.0
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("answer", ["(" * 400, "(" * 30 + "42" + ")" * 30, "[(" * 11 + "1" + ")]" * 11, "{" * 60])
def test_brackets_without_end_do_not_hold_up_the_pool(answer: str) -> None:
    """Catches a policy that occupies a grader for 20 s with a line of brackets, and escapes its reward by that."""
    unstarted = MathGrader()
    assert unstarted.grade(task("42"), answer) == Grade(reward=0.0, method="unparsed")
    assert _cannot_match("42", answer)
    assert not _cannot_match(answer, answer), "unless the gold answer is like it"


@pytest.mark.parametrize("answer", ["[0, 1)", "]0, 1[", "42)", "((1+2)*(3+(4)))", "\\frac{1}{1+" * 12 + "x" + "}" * 12])
def test_ordinary_brackets_are_graded(answer: str) -> None:
    """Catches half-open intervals, a bracket too many and continued fractions given up unread."""
    assert not _cannot_match("42", answer)


def test_a_large_gold_answer_is_still_graded(grader: MathGrader) -> None:
    """Catches the guard against large answers refusing the right one."""
    assert grader.grade(task("2^{1000000}"), "2^{1000000}").reward == 1.0
    assert grader.grade(task("\\text{" + "a" * 600 + "}"), "\\text{" + "a" * 600 + "}").reward == 1.0


def test_a_hung_grading_is_a_failure_of_the_world_and_the_next_one_works() -> None:
    """Catches reward 0 for a right answer that could not be checked, and a pool that loses a process per hang."""
    pool = MathGrader(GraderConfig(workers=1, timeout_s=5.0))
    assert pool.grade(task("1/2"), "2/4").reward == 1.0
    (hanging,) = pool._running
    with pytest.raises(WorldError, match=r"took more than 5 s"):
        pool.grade(task("3"), "\\binom{10^9}{10^8}")
    assert hanging.process.returncode is not None
    assert len(pool._running) == 0
    assert pool.grade(task("1/2"), "3/6").reward == 1.0
    pool.stop()


def test_a_process_that_died_is_replaced_and_several_threads_share_the_pool() -> None:
    """Catches a dead process that fails the next rollout, and replies that reach the wrong thread."""
    pool = MathGrader(GraderConfig(workers=2))
    assert pool.grade(task("1/2"), "2/4").reward == 1.0
    (worker,) = pool._running
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    pairs = [(f"\\frac{{{n}}}{{7}}", f"{2 * n if n % 2 else n}/14") for n in range(1, 25)]
    with ThreadPoolExecutor(6) as threads:
        rewards = list(threads.map(lambda pair: pool.grade(task(pair[0]), pair[1]).reward, pairs))
    assert rewards == [1.0 if n % 2 else 0.0 for n in range(1, 25)]
    assert len(pool._running) <= 2
    running = list(pool._running)
    pool.stop()
    pool.stop()
    assert all(worker.process.returncode is not None for worker in running)
    with pytest.raises(WorldError, match="stopped"):
        pool.grade(task("1/2"), "2/4")
    assert pool.grade(task("1"), "1").reward == 1.0


def test_stopping_ends_a_grading_under_way() -> None:
    """Catches Ctrl-C that waits for the grader's time limit."""
    pool = MathGrader(GraderConfig(workers=1, timeout_s=60))
    pool.grade(task("1/2"), "2/4")
    threading.Timer(0.3, pool.stop).start()
    started = time.monotonic()
    with pytest.raises(WorldError, match="stopped"):
        pool.grade(task("3"), "\\binom{10^9}{10^8}")
    assert time.monotonic() - started < 50


def test_a_wait_for_a_free_process_ends_and_says_so() -> None:
    """Catches answers that wait for ever behind others, which shows as an environment that hangs."""
    pool = MathGrader(GraderConfig(workers=1, queue_timeout_s=0.1))
    pool._idle.get()
    with pytest.raises(WorldError, match=r"waited 0\.1 s for one of 1 grading processes"):
        pool.grade(task("1/2"), "2/4")
    pool.stop()


def _grade_in_daemon(link: "multiprocessing.connection.Connection") -> None:
    pool = MathGrader(GraderConfig(workers=1))
    link.send((pool.grade(task("1/2"), "2/4").reward, [worker.process.pid for worker in pool._running]))
    time.sleep(60)


def test_a_daemonic_process_can_grade_and_its_sudden_end_leaves_nothing() -> None:
    """Catches "daemonic processes are not allowed to have children", and orphans of a killed rollout worker."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_grade_in_daemon, args=(theirs,), daemon=True)
    process.start()
    reward, pids = ours.recv()
    assert reward == 1.0
    process.kill()
    process.join()
    assert all(gone(pid) for pid in pids)


def test_a_process_that_cannot_start_is_a_failure_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a missing library that would grade every answer 0."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    pool = MathGrader(GraderConfig(workers=1))
    for _ in range(2):
        with pytest.raises(WorldError, match="did not start"):
            pool.grade(task("1/2"), "2/4")
    assert not pool._running
    pool.stop()


def test_a_reward_is_a_number(grader: MathGrader) -> None:
    """Catches a NaN that would enter the advantages."""
    rewards = [
        grader.grade(task(gold), answer).reward for gold in ("nan", "\\text{NaN}", "") for answer in ("nan", "0/0", "1")
    ]
    assert all(math.isfinite(reward) and reward in (0.0, 1.0) for reward in rewards)
    assert grader_worker.compare("x", "") == "unparsed"


def test_configuration_is_checked_at_the_edge() -> None:
    """Catches a pool without processes, in which every grading waits for ever."""
    with pytest.raises(ValueError, match="workers is 0"):
        GraderConfig(workers=0)
    assert TypeAdapter(GraderConfig).validate_python({"workers": 3}) == GraderConfig(workers=3)
