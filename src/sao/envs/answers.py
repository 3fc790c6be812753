"""What an assistant message says: a tool call, an answer, or neither; and the exact comparison of answers."""

import re
import textwrap
from fractions import Fraction

from sao.envs.protocol import Grade
from sao.types import Task

_GSM8K = re.compile(r"^[ \t]*####(.*)$", re.MULTILINE)
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LONGEST_NUMBER = 400


def extract_code(text: str) -> str | None:
    """The code of the last `<python> ... </python>` block, dedented; None without one."""
    block = _last_block(text, "python")
    if block is None:
        return None
    first, line_break, rest = block.partition("\n")
    # Code that starts beside its tag has no indent to share with the lines after it.
    return (first.strip() + line_break + rest if first.strip() else textwrap.dedent(rest)).strip()


def extract_answer(text: str) -> str | None:
    """The last `<answer>` block, else the last balanced `\\boxed{}`, else GSM8K's last line `#### x`; else None."""
    block = _last_block(text, "answer")
    if block is None:
        block = _last_boxed(text)
    if block is None:
        lines = _GSM8K.findall(text)
        block = lines[-1] if lines else None
    return None if block is None else block.strip()


def normalise(answer: str) -> str:
    """An answer without dollar signs, spaces at its ends or doubled, a final full stop, and thousands separators."""
    text = " ".join(answer.split()).strip("$ ").removesuffix(".").strip("$ ").replace("\\$", "").strip()
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def as_number(answer: str) -> Fraction | None:
    """The exact value of a plain integer or decimal; None for anything else, or beyond 400 characters."""
    text = normalise(answer)
    if len(text) > _LONGEST_NUMBER or not text.isascii() or not _DECIMAL.fullmatch(text):
        return None
    return Fraction(text)


def exactly_equal(answer: str, gold: str) -> bool:
    """Whether two answers are the same number, or the same text after `normalise`. No algebra."""
    number, gold_number = as_number(answer), as_number(gold)
    if number is not None and gold_number is not None:
        return number == gold_number
    return normalise(answer) == normalise(gold)


class ExactGrader:
    """Reward 1 for an answer that is exactly the gold one, 0 otherwise; needs no pool and cannot fail."""

    def grade(self, task: Task, answer: str) -> Grade:
        """Compare with the task's gold answer."""
        return Grade(reward=float(exactly_equal(answer, task.answer)), method="exact")

    def stop(self) -> None:
        """Nothing to end."""


def _last_block(text: str, tag: str) -> str | None:
    closing = text.rfind(f"</{tag}>")
    opening = text.rfind(f"<{tag}>", 0, max(closing, 0))
    if opening < 0:
        return None
    return text[opening + len(tag) + 2 : text.index(f"</{tag}>", opening)]


def _last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{}` whose braces balance; escaped braces do not count. Linear in the text."""
    openings: list[int] = []
    last = (-1, -1)
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            openings.append(brace.start())
        elif brace.group() == "}" and openings:
            opening = openings.pop()
            if opening > last[0] and text[max(0, opening - 20) : opening].rstrip().endswith("\\boxed"):
                last = (opening, brace.start())
    return text[last[0] + 1 : last[1]] if last[0] >= 0 else None
