"""Chains against hand-worked ones, and against an evaluation that shares no code with them."""

import math
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.envs.answers import ExactGrader
from sao.envs.chain import PEOPLE, Chain, ChainConfig, ChainTasks, Stream, chain_of, chain_words
from sao.envs.restricted import RestrictedTool
from sao.types import Task

STREAMS: tuple[Stream, ...] = ("train", "sft", "evaluation")
SPOKEN = {"adds": "+", "takes": "-", "multiplies": "*"}
CHAIN = Chain(start=7, operators=("+", "*", "-"), operands=(3, 2, 5), names=("bob", "cid", "dan"))
configs = st.builds(
    ChainConfig,
    min_steps=st.integers(1, 3),
    max_steps=st.integers(3, 6),
    length_exponent=st.floats(0.0, 3.0),
    max_value=st.integers(20, 150),
    max_operand=st.integers(2, 12),
    words_share=st.floats(0.0, 1.0),
)


def drawn(config: ChainConfig, stream: Stream, count: int, *, seed: int = 0) -> list[Task]:
    source = ChainTasks(config, stream=stream, seed=seed)
    return [task for index in range(count) if (task := source.at(index)) is not None]


def solved(question: str) -> list[int]:
    """Start and all values of a question, read from its text alone by Python's own arithmetic."""
    words = question.startswith("start")
    start, *clauses, asked = question.split(" . " if words else " ; ")
    values = [int(start.removeprefix("start with "))]
    known: dict[str, int] = {}
    for clause in clauses:
        name, operator, operand = clause.split()
        values.append(eval(f"{values[-1]} {SPOKEN[operator] if words else operator} {operand}"))
        assert name not in known, "a name marks one step"
        known[name] = values[-1]
    last = asked.removeprefix("after ").removesuffix(" ?")
    assert known[last] == values[-1], "the question asks for the last step"
    return values


def test_a_chain_by_hand() -> None:
    """Would catch a step applied to the wrong value, or one form that reads differently from the other."""
    assert CHAIN.values == (7, 10, 20, 15)
    assert CHAIN.as_symbols() == "7 ; bob + 3 ; cid * 2 ; dan - 5 ; dan ?"
    assert CHAIN.as_words() == "start with 7 . bob adds 3 . cid multiplies 2 . dan takes 5 . after dan ?"
    assert solved(CHAIN.as_symbols()) == solved(CHAIN.as_words()) == [7, 10, 20, 15]


def test_the_code_of_a_step_by_hand() -> None:
    """Would catch a call that computes with the true value where the policy saw another one."""
    assert [CHAIN.code(step) for step in (1, 2, 3)] == ["bob = 7 + 3", "cid = 10 * 2", "dan = 20 - 5"]
    assert CHAIN.code(2, 11) == "cid = 11 * 2"
    assert CHAIN.code(3, 0) == "dan = 0 - 5"
    assert CHAIN.code(3, -4) == "dan = -4 - 5"


@settings(max_examples=40, deadline=None)
@given(config=configs, stream=st.sampled_from(STREAMS), seed=st.integers(0, 2**40), index=st.integers(0, 2**40))
def test_every_task_of_every_setting_is_right(config: ChainConfig, stream: Stream, seed: int, index: int) -> None:
    """Would catch a wrong gold answer, a number out of bounds, or code that does not lead to the answer."""
    task = ChainTasks(config, stream=stream, seed=seed).at(index)
    assert task is not None
    values, chain = solved(task.question), chain_of(task)
    assert task.answer == str(values[-1])
    assert task.details["steps"] == chain.steps
    assert chain.values == tuple(values)
    assert config.min_steps <= chain.steps <= config.max_steps
    assert 1 <= chain.start <= config.max_value
    assert all(0 <= value <= config.max_value for value in values)
    assert all(1 <= operand <= config.max_operand for operand in chain.operands)
    tool = RestrictedTool()
    results = [tool.run(chain.code(step)) for step in range(1, chain.steps + 1)]
    assert all(result.ok for result in results)
    assert [result.output for result in results] == list(map(str, values[1:]))
    assert ExactGrader().grade(task, results[-1].output).reward == 1.0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**40), indices=st.permutations(range(6)), stream=st.sampled_from(STREAMS))
def test_order_of_asking_does_not_matter(seed: int, indices: list[int], stream: Stream) -> None:
    """Would catch a draw that depends on the ones before it."""
    source = ChainTasks(ChainConfig(max_steps=4), stream=stream, seed=seed)
    asked = {index: source.at(index) for index in indices}
    assert asked == {i: ChainTasks(ChainConfig(max_steps=4), stream=stream, seed=seed).at(i) for i in range(6)}


def test_seeds_and_streams_have_tasks_of_their_own() -> None:
    """Would catch a seed or a stream left out of the key."""
    questions = {(stream, seed): [t.question for t in drawn(ChainConfig(), stream, 10, seed=seed)]
                 for stream in STREAMS for seed in (0, 1)}  # fmt: skip
    assert len({tuple(found) for found in questions.values()}) == 6


def test_streams_share_out_all_chains() -> None:
    """Would catch streams that overlap, whatever names and seeds are used, or leave chains out."""
    config = ChainConfig(max_steps=1, max_value=12, max_operand=3)
    # By hand: start s has 12 - s or 3 sums, at most 3 differences, and products 2 s, 3 s while they fit.
    possible = {
        f"{start} {operator} {operand}"
        for start in range(1, 13)
        for operator, operand in [("+", 1), ("+", 2), ("+", 3), ("-", 1), ("-", 2), ("-", 3), ("*", 2), ("*", 3)]
        if 0 <= eval(f"{start} {operator} {operand}") <= 12
    }
    found = {
        stream: {
            f"{chain.start} {chain.operators[0]} {chain.operands[0]}"
            for seed in (0, 1)
            for chain in map(chain_of, drawn(config, stream, 350, seed=seed))
        }
        for stream in STREAMS
    }
    assert set.union(*found.values()) == possible
    assert sum(map(len, found.values())) == len(possible)
    assert len(found["train"]) > len(found["sft"]) > len(found["evaluation"]) > 0


def test_length_shares_by_hand() -> None:
    """Would catch an exponent of the wrong sign, or shares that do not add up."""
    assert ChainConfig(max_steps=3, length_exponent=1.0).length_shares == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert ChainConfig(max_steps=4, length_exponent=0.0).length_shares == pytest.approx([0.25] * 4)
    assert ChainConfig(min_steps=2, max_steps=4, length_exponent=2.0).length_shares == pytest.approx(
        [36 / 61, 16 / 61, 9 / 61]
    )


@pytest.mark.parametrize(("exponent", "stream"), [(0.0, "train"), (0.8, "sft"), (2.0, "evaluation")])
def test_lengths_follow_the_power_law(exponent: float, stream: Stream) -> None:
    """Would catch lengths bent by the rejection that keeps streams apart."""
    config, count = ChainConfig(max_steps=6, length_exponent=exponent), 900
    lengths = Counter(chain_of(task).steps for task in drawn(config, stream, count))
    weights = [n**-exponent for n in range(1, 7)]
    expected = [count * weight / sum(weights) for weight in weights]
    chi_square = sum((lengths[n] - expected[n - 1]) ** 2 / expected[n - 1] for n in range(1, 7))
    assert chi_square < 20.5  # 99.9 % of the chi-square distribution with 5 degrees of freedom


def test_operators_all_occur() -> None:
    """Would catch products crowded out by the bound on values, which admits few of them."""
    counts = Counter(operator for task in drawn(ChainConfig(), "train", 200) for operator in chain_of(task).operators)
    assert min(counts[operator] for operator in "+-*") > 0.05 * counts.total()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_both_forms_occur_at_the_share_set(share: float) -> None:
    """Would catch the two forms swapped, or names of one form in the other."""
    tasks = drawn(ChainConfig(words_share=share, max_steps=3), "train", 600)
    told = [task for task in tasks if task.details["form"] == "words"]
    assert abs(len(told) / 600 - share) <= 4 * math.sqrt(share * (1 - share) / 600)
    for task in tasks:
        people = set(chain_of(task).names) <= set(PEOPLE)
        assert people == (task.details["form"] == "words") == task.question.startswith("start with")


def test_every_name_comes_first_sometimes() -> None:
    """Would catch names tied to steps: the policy could learn that "b" is the first one."""
    tasks = drawn(ChainConfig(max_steps=1, words_share=0.0), "train", 400)
    assert len({chain_of(task).names for task in tasks}) == 26


def test_every_word_of_a_question_is_listed() -> None:
    """Would catch a word that a vocabulary made from this list lacks."""
    words = set(chain_words())
    for task in drawn(ChainConfig(), "train", 150):
        chain = chain_of(task)
        texts = [task.question, *(chain.code(step) for step in range(1, chain.steps + 1))]
        assert {word for text in texts for word in text.split() if not re.fullmatch(r"\d+", word)} <= words | set("+-*")


def test_refused_sources() -> None:
    """Would catch a misspelled stream that trains on held-out chains, and an empty evaluation."""
    with pytest.raises(ValueError, match="stream is 'test'; choose one of evaluation, sft, train"):
        ChainTasks(ChainConfig(), stream="test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size is 0"):
        ChainTasks(ChainConfig(), stream="train", size=0)


def test_streams_share_no_chain() -> None:
    """Would catch evaluation on problems that were trained on, under other names or in other words."""
    short = ChainConfig(max_steps=2)
    seen = {
        stream: {
            (chain.start, chain.operators, chain.operands)
            for seed in (0, 1)
            for chain in map(chain_of, drawn(short, stream, 250, seed=seed))
        }
        for stream in STREAMS
    }
    assert not seen["train"] & seen["sft"]
    assert not seen["train"] & seen["evaluation"]
    assert not seen["sft"] & seen["evaluation"]


def test_finite_source_ends() -> None:
    """Would catch an evaluation that never ends."""
    source = ChainTasks(ChainConfig(), stream="evaluation", size=3)
    assert source.at(2) is not None
    assert source.at(3) is None


@pytest.mark.parametrize(
    "settings",
    [{"min_steps": 0}, {"max_steps": 40}, {"min_steps": 5, "max_steps": 4}, {"max_operand": 1}, {"words_share": 1.5}],
)
def test_bad_settings(settings: dict[str, int]) -> None:
    """Would catch settings for which no task exists."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        ChainConfig(**settings)  # type: ignore[arg-type]


def test_no_chain_left() -> None:
    """Would catch a draw that loops for ever when a stream has no chain of a length."""
    tiny = ChainConfig(max_value=2, max_operand=2, max_steps=1)

    def draw_all() -> None:
        for stream in STREAMS:
            ChainTasks(tiny, stream=stream).at(0)

    with pytest.raises(ValueError, match="no chain of 1 steps"):
        draw_all()


def test_other_tasks_are_refused() -> None:
    """Would catch a KeyError deep in the expert for a task that is no chain."""
    with pytest.raises(ValueError, match="it is not a chain"):
        chain_of(Task(id="x", prompt_id="x", question="q", answer="1"))
