"""Answers in a text, and exact comparison."""

import time
from fractions import Fraction

import pytest

from sao.envs.answers import ExactGrader, as_number, exactly_equal, extract_answer, extract_code
from sao.types import Task


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 20 </answer>", "20"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer> <answer> 3 </answer>", "3"),
        ("<answer> cut", None),
        ("</answer> <answer>", None),
        ("<answer></answer>", ""),
        (r"so \boxed{\frac{1}{2}} and \boxed{\sqrt{x^{2}}}.", r"\sqrt{x^{2}}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"x{\boxed{3}", "3"),
        (r"<answer>4</answer> \boxed{5}", "4"),
        ("work <<1+1=2>>2\n#### 1,234\n", "1,234"),
        ("#### 1\n  #### 2", "2"),
        ("a #### 3", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    """Would catch the first answer taken for the last, braces cut short, and an answer read where none was given."""
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<python> b = 7 + 3 </python>", "b = 7 + 3"),
        ("<python>1</python> then <python>2</python>", "2"),
        ("<python> cut", None),
        ("no code", None),
        ("<python>\n    a = 1\n    b = 2\n</python>", "a = 1\nb = 2"),
        ("<python> for i in x:\n    print(i)\n</python>", "for i in x:\n    print(i)"),
        ("<python></python>", ""),
    ],
)
def test_extract_code(text: str, code: str | None) -> None:
    """Would catch an indent that makes right code a syntax error, and the wrong block run."""
    assert extract_code(text) == code


@pytest.mark.parametrize(
    "text", ["<answer>" * 50_000, "\\boxed{" * 50_000, "\n" * 300_000, "{" * 300_000, "#" * 300_000]
)
def test_extraction_is_linear(text: str) -> None:
    """Would catch a quadratic scan, with which a policy that repeats itself stalls its worker for minutes."""
    started = time.process_time()
    extract_answer(text)
    extract_code(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("18", "18.0", True),
        ("$1,234", "1234", True),
        ("$18$", "18.", True),
        ("+5", "5", True),
        ("007", "7", True),
        ("-0", "0", True),
        ("0.1", "0.10", True),
        ("1e3", "1000", False),
        ("1,2", "12", False),
        ("12,34", "1234", False),
        ("", "0", False),
        ("٣", "3", False),
        (r"\frac12", r"\frac12", True),
        ("x  + 1", "x + 1", True),
        ("x+1", "1+x", False),
    ],
)
def test_exact_comparison(answer: str, gold: str, equal: bool) -> None:
    """Would catch a list "1,2" read as the number 12, and floats compared after rounding."""
    assert exactly_equal(answer, gold) is equal
    task = Task(id="t", prompt_id="t", question="q", answer=gold)
    assert ExactGrader().grade(task, answer).reward == float(equal)


def test_numbers_are_exact_and_bounded() -> None:
    """Would catch 0.1 + rounding, and a million digits turned into a number."""
    assert as_number("0.1") == Fraction(1, 10)
    assert as_number("9" * 401) is None
