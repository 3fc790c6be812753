"""A code tool that evaluates arithmetic and assignments itself: no process, no `eval`, nothing but numbers.

Allowed: integers, floats and lists of them; + - * / // % **; comparisons, and/or/not; names, `=` and `+=`; several
statements; print() and the functions below, those of `math` with or without `math.` before them. All else is refused.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from sao.envs.protocol import ToolResult

MAX_CODE = 4000
"""Characters of one call."""
PARSES = 3
"""Tries to parse one call."""
MAX_DIGITS = 1000
"""Digits of an integer; more is an error, so that 9**9**9 costs nothing."""
MAX_STEPS = 2000
"""Syntax nodes evaluated in one call."""
MAX_DEPTH = 100
MAX_OUTPUT = 4000
"""Characters of one call's output."""

Number = int | float
Value = int | float | tuple[int | float, ...]

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": round, "sum": sum, "len": len, "int": int, "float": float,
}  # fmt: skip
_MATH_NAMES = "sqrt isqrt floor ceil gcd lcm factorial comb exp log log2 log10 sin cos tan asin acos atan hypot"
_MATH: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in _MATH_NAMES.split(" ")}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_LIMITED = {"factorial": 400, "comb": 3000}


class _RefusedError(Exception):
    """The code does what is not allowed, or fails; the text goes to the policy."""


class RestrictedTool:
    """Evaluates code of one rollout and keeps its variables. Every fault is a result with `ok` False, never raised.

    The output is what was printed, then the value of the last statement (of an expression or assignment), one a line.
    Statements before a failing one keep their effect, as in Python.
    """

    def __init__(self) -> None:
        self._variables: dict[str, Value] = {}

    def run(self, code: str) -> ToolResult:
        """Evaluate; see the class."""
        evaluation = _Evaluation(self._variables)
        try:
            value = evaluation.run(_parse(code))
            lines, ok = [*evaluation.printed, *([] if value is None else [_show(value)])], True
        except _RefusedError as error:
            lines, ok = [*evaluation.printed, f"error : {error}"], False
        except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError):
            # Raised, it would count as a failure of the world: retried and not trained, so that a policy could
            # escape a bad reward by what it writes.
            lines, ok = [*evaluation.printed, "error : wrong value"], False
        output = "\n".join(lines)
        return ToolResult(output=output[:MAX_OUTPUT], ok=ok, truncated=len(output) > MAX_OUTPUT)

    def stop(self) -> None:
        """Forget the variables."""
        self._variables.clear()


class _Evaluation:
    """One call: counts its steps and collects what it prints."""

    def __init__(self, variables: dict[str, Value]) -> None:
        self.printed: list[str] = []
        self._variables = variables
        self._steps = 0

    def run(self, module: ast.Module) -> Value | None:
        """Execute the statements; the value of the last, if it has one."""
        value: Value | None = None
        for statement in module.body:
            match statement:
                case ast.Expr(ast.Call(ast.Name("print"), arguments, [])) if "print" not in self._variables:
                    self._print(" ".join(_show(self.value(argument, 1)) for argument in arguments))
                    value = None
                case ast.Expr(expression):
                    value = self.value(expression, 1)
                case ast.Assign([ast.Name(name)], expression):
                    value = self._variables[name] = self.value(expression, 1)
                case ast.AugAssign(ast.Name(name), operation, expression):
                    value = _binary(operation, self._lookup(name), self.value(expression, 1))
                    self._variables[name] = value
                case _:
                    raise _RefusedError("not allowed")
        return value

    def value(self, node: ast.expr, depth: int) -> Value:
        """Evaluate an expression."""
        self._steps += 1
        if self._steps > MAX_STEPS or depth > MAX_DEPTH:
            raise _RefusedError("too long")
        match node:
            case ast.Constant(bool() | int() | float() as constant):
                return _checked(constant)
            case ast.Name(name):
                return self._lookup(name)
            case ast.Attribute(ast.Name("math"), name) if name in _CONSTANTS and "math" not in self._variables:
                return _CONSTANTS[name]
            case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
                return _guarded(_UNARY[type(operation)], _number(self.value(operand, depth + 1)))
            case ast.BinOp(left, operation, right):
                return _binary(operation, self.value(left, depth + 1), self.value(right, depth + 1))
            case ast.Compare(left, operations, comparators):
                return self._compare(left, operations, comparators, depth)
            case ast.BoolOp(operation, operands):
                return self._boolean(operation, operands, depth)
            case ast.List(elements) | ast.Tuple(elements):
                return tuple(_number(self.value(element, depth + 1)) for element in elements)
            case ast.Call(function, arguments, []):
                return self._call(function, arguments, depth)
            case _:
                raise _RefusedError("not allowed")

    def _print(self, line: str) -> None:
        if sum(map(len, self.printed)) + len(line) > MAX_OUTPUT:
            raise _RefusedError("too much output")
        self.printed.append(line)

    def _lookup(self, name: str) -> Value:
        if name in self._variables:
            return self._variables[name]
        raise _RefusedError(f"name {name} is not defined")

    def _compare(self, left: ast.expr, operations: list[ast.cmpop], rights: list[ast.expr], depth: int) -> bool:
        value = _number(self.value(left, depth + 1))
        for operation, right in zip(operations, rights, strict=True):
            if type(operation) not in _COMPARE:
                raise _RefusedError("not allowed")
            next_value = _number(self.value(right, depth + 1))
            if not _COMPARE[type(operation)](value, next_value):
                return False
            value = next_value
        return True

    def _boolean(self, operation: ast.boolop, operands: list[ast.expr], depth: int) -> Value:
        value: Value = 0
        for operand in operands:
            value = _number(self.value(operand, depth + 1))
            if bool(value) is isinstance(operation, ast.Or):
                break
        return value

    def _call(self, function: ast.expr, arguments: list[ast.expr], depth: int) -> Value:
        match function:
            case ast.Name(name) if name not in self._variables and (name in _BUILTINS or name in _MATH):
                called = _BUILTINS.get(name) or _MATH[name]
            case ast.Attribute(ast.Name("math"), name) if name in _MATH and "math" not in self._variables:
                called = _MATH[name]
            case _:
                raise _RefusedError("not allowed")
        values = [self.value(argument, depth + 1) for argument in arguments]
        limit = _LIMITED.get(name)
        if limit is not None and any(not isinstance(value, tuple) and value > limit for value in values):
            raise _RefusedError("number too large")
        # round(5, -10**9) would compute 10**10**9.
        if name == "round" and len(values) == 2 and not (isinstance(values[1], int) and abs(values[1]) <= MAX_DIGITS):
            raise _RefusedError("number too large")
        return _guarded(called, *values)


def _parse(code: str) -> ast.Module:
    if len(code) > MAX_CODE:
        raise _RefusedError("too long")
    for _ in range(PARSES):
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise _RefusedError("syntax") from error
        except SystemError:
            # Python before 3.11.8: parses that overlap in two threads miscount each other's depth (gh-106905).
            continue
    raise _RefusedError("syntax")


def _binary(operation: ast.operator, left: Value, right: Value) -> Value:
    left, right = _number(left), _number(right)
    if isinstance(operation, ast.Pow):
        return _power(left, right)
    if type(operation) not in _BINARY:
        raise _RefusedError("not allowed")
    return _guarded(_BINARY[type(operation)], left, right)


def _power(base: Number, exponent: Number) -> Value:
    both_integers = isinstance(base, int) and isinstance(exponent, int)
    # Not exponent * digits: the product with a float overflows for an exponent of 400 digits.
    if both_integers and abs(base) > 1 and abs(exponent) > MAX_DIGITS / math.log10(abs(base)):
        raise _RefusedError("number too large")
    return _guarded(operator.pow, base, exponent)


def _guarded(function: Callable[..., Any], *values: Value) -> Value:
    """Call on checked values; whatever it raises becomes a refusal."""
    try:
        return _checked(function(*values))
    except ZeroDivisionError as error:
        raise _RefusedError("division by zero") from error
    except OverflowError as error:
        raise _RefusedError("number too large") from error
    except (TypeError, ValueError) as error:
        raise _RefusedError("wrong value") from error


def _checked(value: Any) -> Value:
    if isinstance(value, complex):
        raise _RefusedError("wrong value")
    if isinstance(value, int) and value.bit_length() > MAX_DIGITS * 3.33:
        raise _RefusedError("number too large")
    assert isinstance(value, (int, float, tuple))
    return value


def _number(value: Value) -> Number:
    if isinstance(value, tuple):
        raise _RefusedError("wrong value")
    return value


def _show(value: Value) -> str:
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)
