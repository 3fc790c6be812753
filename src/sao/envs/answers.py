"""What an assistant message says: a tool call, an answer, or neither; and the exact comparison of answers."""

import re
from fractions import Fraction

from sao.envs.protocol import Grade
from sao.types import Task

_CODE = re.compile(r"<python>(.*?)</python>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_GSM8K = re.compile(r"^\s*####[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_LONGEST_NUMBER = 400


def extract_code(text: str) -> str | None:
    """The code of the last `<python> ... </python>` block, dedented; None without one."""
    blocks = _CODE.findall(text)
    if not blocks:
        return None
    # A block opened twice runs from the last opening.
    return _dedent(blocks[-1].rpartition("<python>")[2])


def extract_answer(text: str) -> str | None:
    """The last `<answer>` block, else the last balanced `\\boxed{}`, else the last GSM8K line `#### x`; None without one."""
    blocks = _ANSWER.findall(text)
    if blocks:
        return blocks[-1].rpartition("<answer>")[2].strip()
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    lines = _GSM8K.findall(text)
    return lines[-1].strip() if lines else None


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


def _dedent(code: str) -> str:
    lines = code.strip("\r\n").rstrip().splitlines()
    if len(lines) <= 1:
        return code.strip()
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    # Code that starts beside its tag has lost the indent of its first line only.
    first = indents[0] if indents[0] == min(indents) else 0
    return "\n".join([lines[0].strip(), *(line[first:] if line[:first].isspace() or not first else line for line in lines[1:])])


def _last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{}` whose braces balance (escaped braces do not count)."""
    start = text.rfind("\\boxed")
    while start >= 0:
        opening = start + len("\\boxed")
        while text[opening : opening + 1].isspace():
            opening += 1
        if text[opening : opening + 1] == "{":
            closing = _matching_brace(text, opening)
            if closing is not None:
                return text[opening + 1 : closing]
        start = text.rfind("\\boxed", 0, start)
    return None


def _matching_brace(text: str, opening: int) -> int | None:
    depth = 0
    position = opening
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return position
        position += 1
    return None
