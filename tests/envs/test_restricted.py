"""The restricted tool: what it computes, and what it refuses."""

import ast
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sao.envs.restricted import MAX_CODE, MAX_OUTPUT, RestrictedTool

numbers = st.one_of(
    st.integers(-50, 50).map(lambda n: f"({n})"), st.integers(0, 10**12).map(str), st.floats(0, 1e6).map(repr)
)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        st.tuples(inner, st.integers(-3, 4)).map(lambda t: f"({t[0]} ** {t[1]})"),
        st.tuples(inner, st.sampled_from(["<", "<=", "==", "!="]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda e: f"(-{e})"),
        inner.map(lambda e: f"abs({e})"),
        st.tuples(inner, inner).map(lambda t: f"max({t[0]}, {t[1]})"),
    ),
    max_leaves=8,
)


@given(expressions)
@settings(max_examples=150, deadline=None)
def test_agrees_with_python(code: str) -> None:
    """Would catch a wrong operator, precedence, or rounding: the policy would be taught false arithmetic."""
    result = RestrictedTool().run(code)
    try:
        expected = eval(code)  # the strategy above writes arithmetic only
    except (ZeroDivisionError, OverflowError):
        assert not result.ok
        return
    if isinstance(expected, complex):
        assert not result.ok
    elif result.ok:
        assert result.output == str(expected)
    else:
        assert result.output == "error : number too large"
        assert abs(expected) > 10**500


NUMBERS = (
    "0 1 -1 0.0 -0.0 1e308 -1e308 1e999 (1e999-1e999) 1e-320 True (10**400) (-10**400) (10**999) (0.5) (-8) 9999 [] "
    "[1] [1e999,10**400] x math.pi"
)
FUNCTIONS = (
    "abs min max round sum len int float sqrt isqrt floor ceil gcd lcm factorial comb exp log log2 log10 sin acos "
    "math.hypot math.tan print nothing"
)
OPERATORS = "+ - * / // % ** ** ** < == and or @ << in"
nasty = st.recursive(
    st.sampled_from(NUMBERS.split(" ")),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(OPERATORS.split(" ")), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["-", "+", "not ", "~"]), inner).map(lambda t: f"({t[0]}{t[1]})"),
        st.tuples(st.sampled_from(FUNCTIONS.split(" ")), st.lists(inner, max_size=3)).map(
            lambda t: f"{t[0]}({', '.join(t[1])})"
        ),
        st.tuples(inner, inner).map(lambda t: f"[{t[0]}, {t[1]}]"),
    ),
    max_leaves=6,
)


@given(st.lists(st.one_of(nasty, nasty.map(lambda e: f"x = {e}"), nasty.map(lambda e: f"x **= {e}")), max_size=4))
@settings(max_examples=300, deadline=None)
@example(["2**(10**400)"])
@example(["(10**500)**(10**500)"])
@example(["x = 10**400", "x **= x"])
@example(["2.5**(10**400)"])
@example(["(-1)**(10**400)"])
def test_nothing_is_ever_raised(statements: list[str]) -> None:
    """Would catch an expression that ends as a failure of the world: retried, and never trained as the bad action."""
    tool = RestrictedTool()
    for code in ("\n".join(statements), *statements):
        result = tool.run(code)
        assert len(result.output) <= MAX_OUTPUT
        assert result.ok or "error : " in result.output


@pytest.mark.parametrize("code", ["(" * 1900, "-" * 3900 + "1", "[" * 90 + "]" * 90, "\ud800", "\0", "1\f+\v1"])
def test_text_that_no_parser_likes(code: str) -> None:
    """Would catch what the parser raises besides SyntaxError."""
    assert not RestrictedTool().run(code).ok


@pytest.mark.parametrize(("code", "output"), [("2**3321", str(2**3321)), ("10**999", str(10**999)), ("2**-2", "0.25")])
def test_large_powers_that_fit(code: str, output: str) -> None:
    """Would catch a bound on powers that is tighter than the bound on numbers."""
    assert RestrictedTool().run(code).output == output


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "from math import *",
        "__import__('os')",
        "open('/etc/passwd')",
        "eval('1')",
        "(1).__class__",
        "math.__dict__",
        "math.sqrt.__self__",
        "math.fsum([1])",
        "lambda: 1",
        "(lambda: 1)()",
        "[x for x in [1, 2]]",
        "{1: 2}",
        "{1}",
        "'a' * 10**9",
        "b'a'",
        "f'{1}'",
        "1j",
        "...",
        "None",
        "def f(): pass",
        "class A: pass",
        "while True: pass",
        "for i in [1]: pass",
        "if 1: x = 1",
        "with x: pass",
        "del x",
        "global x",
        "a, b = 1, 2",
        "a = b = 1",
        "[a] = [1]",
        "a[0]",
        "x: int = 1",
        "(y := 3)",
        "1 if 1 else 2",
        "1 << 3",
        "1 & 3",
        "~1",
        "1 is 1",
        "1 in [1]",
        "max(*[1, 2])",
        "max(1, 2, key=abs)",
        "print(1, end='')",
        "1 + print(1)",
        "raise ValueError",
        "assert 0",
        "await x",
        "yield 1",
        "exec",
        "abs",
        "math",
        "getattr(math, 'sqrt')",
        "max(1)(2)",
    ],
)
def test_refuses_everything_else(code: str) -> None:
    """Would catch a hole in the whitelist: model-written code would run unprotected."""
    result = RestrictedTool().run(code)
    assert not result.ok
    assert result.output.startswith("error : ")


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_result(code: str) -> None:
    """Would catch an exception that escapes: the rollout would be called an infrastructure failure."""
    RestrictedTool().run(code)


@pytest.mark.parametrize(
    "code",
    [
        "9 ** 9 ** 9",
        "10 ** 10 ** 10",
        "(-2) ** 100000000",
        "a = 9 ** 900 ; a * a ; b = a * a",
        "factorial(100000)",
        "comb(10**9, 10**8)",
        "round(5, -10**9)",
        "x = 2 ** 3000 ; x ** 3000",
        "9" * 3000,
        "-" * 3900 + "1",
        "(" * 1900 + ")" * 1900,
        "1" + "+1" * 1990,
        "1;" * 10**6,
        "print(" + "2**3000," * 300 + "1)",
        "sum([" + "1," * 1999 + "1])",
    ],
)
def test_bombs_are_refused_at_once(code: str) -> None:
    """Would catch work that grows beyond the text of the call: one policy could stall its worker."""
    result = RestrictedTool().run(code)
    assert not result.ok
    assert len(result.output) <= MAX_OUTPUT


def test_variables_last_between_calls_and_not_between_tools() -> None:
    """Would catch state lost within a rollout, or leaking from one rollout into another."""
    tool, other = RestrictedTool(), RestrictedTool()
    assert tool.run("b = 7 + 3").output == "10"
    assert tool.run("c = b * 2 ; c += 1").output == "21"
    assert other.run("b").output == "error : name b is not defined"
    tool.stop()
    tool.stop()
    assert not tool.run("c").ok


def test_statements_before_a_fault_keep_their_effect() -> None:
    """Would catch a rollback that Python does not have."""
    tool = RestrictedTool()
    result = tool.run("print(1)\na = 4\na / 0\na = 5")
    assert (result.ok, result.output) == (False, "1\nerror : division by zero")
    assert tool.run("a").output == "4"


def test_output_is_what_was_printed_and_the_last_value() -> None:
    """Would catch a value printed twice, or an assignment that shows nothing."""
    tool = RestrictedTool()
    assert tool.run("a = 2\nprint(a, a + 1)\na * 10").output == "2 3\n20"
    assert tool.run("print(a)").output == "2"
    assert tool.run("").output == ""
    assert tool.run("[a, 2.5, a > 1]").output == "[2, 2.5, True]"


def test_functions_by_both_names() -> None:
    """Would catch math.sqrt refused, or a variable named like a function still being called."""
    tool = RestrictedTool()
    assert tool.run("math.sqrt(9) + sqrt(16)").output == "7.0"
    assert tool.run("round(math.pi, 4)").output == str(round(math.pi, 4))
    assert tool.run("sum([1, 2]) + len((1, 2, 3)) + int(2.9) + gcd(12, 18)").output == "14"
    assert not tool.run("max = 3 ; max(1, 2)").ok
    assert not tool.run("math = 3 ; math.sqrt(4)").ok


def test_code_is_limited_in_length() -> None:
    """Would catch a parser fed with megabytes."""
    assert not RestrictedTool().run("1" + " " * MAX_CODE).ok


def test_a_parse_that_another_thread_disturbed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches right code that is called wrong, or an error of the interpreter that ends the rollout."""
    parse, calls = ast.parse, []

    def disturbed(code: str) -> ast.Module:
        calls.append(code)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=201, after=253)")
        return parse(code)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert RestrictedTool().run("print(6 * 7)").output.strip() == "42"
    assert len(calls) == 2
