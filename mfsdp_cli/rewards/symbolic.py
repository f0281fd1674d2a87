"""Equality of expressions: math-verify reads the LaTeX, exact evaluation decides, math-verify's own comparison has the rest.

math-verify 0.9.0 is used with its time limits off, because they rest on signals that work in a main thread only: callers
run in a process with a deadline (`pool`). Its extraction by patterns is not used either: it finds a number inside what
it could not read, and then takes two unreadable formulas for equal (Math-Verify#82).
"""

from __future__ import annotations

import hashlib
import logging
import re
from functools import lru_cache

import math_verify.parser
import sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex

from mfsdp_cli.rewards.numbers import Unreadable

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns in every process that its time limits are off

# Units are dropped before, by a stricter rule: math-verify's takes the d of 3d for one.
NORMALISE = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
DIGITS = 50
SAME = sympy.Float("1e-25", DIGITS)
ZERO = sympy.Float("1e-40", DIGITS)
NUM_POINTS = 3


@lru_cache(maxsize=1024)
def parse(latex: str) -> sympy.Basic | sympy.MatrixBase:
    """Raises Unreadable for what latex2sympy cannot read."""
    try:
        return math_verify.parser.parse_latex_cached(normalize_latex(latex, NORMALISE))
    except Exception as error:  # its grammar, its visitor and sympy raise whatever they like
        raise Unreadable(f"no mathematical reading of {latex[:80]!r}: {type(error).__name__}") from None


def equal(answer: str, gold: str) -> bool:
    """Whether two normalised pieces of LaTeX mean the same. Raises Unreadable when the answer has no meaning."""
    answer_expr = parse(answer)
    try:
        gold_expr = parse(gold)
    except Unreadable:
        return False  # equal spelling was looked at before
    if case_differs(answer, gold):
        return False
    if isinstance(answer_expr, sympy.Expr) and isinstance(gold_expr, sympy.Expr):
        verdict = same_values(answer_expr, gold_expr)
        if verdict is not None:
            return verdict
    elif isinstance(answer_expr, sympy.Eq) and isinstance(gold_expr, sympy.Eq) and same_equation(answer_expr, gold_expr):
        return True
    return math_verify.verify(gold_expr, answer_expr, timeout_seconds=None, allow_set_relation_comp=True)


def case_differs(a: str, b: str) -> bool:
    """latex2sympy reads abc and ABC as the same product."""
    letters = [set(re.findall("[A-Za-z]", re.sub(r"\\[a-zA-Z]+", "", text))) for text in (a, b)]
    return letters[0] != letters[1] and {x.lower() for x in letters[0]} == {x.lower() for x in letters[1]}


def same_values(a: sympy.Expr, b: sympy.Expr) -> bool | None:
    """Compare at a few points, with the same value for each symbol on both sides, to 25 digits; None if it cannot be evaluated.

    Two different elementary expressions agree at such points with negligible probability. A decimal counts as the
    number it spells, so 0.333333 is not 1/3; sizes are relative, so a tiny difference of tiny numbers counts.
    """
    for point in range(NUM_POINTS if a.free_symbols or b.free_symbols else 1):
        x, y = value_at(a, point), value_at(b, point)
        if x is None or y is None:
            return None
        if point == NUM_POINTS - 1 and not (x.is_real and y.is_real):
            continue  # symbols are negative there: roots and logarithms differ by their branch only
        size = max(abs(x), abs(y))
        if abs(x - y) > SAME * size and (size > ZERO or (is_accurate(x) and is_accurate(y))):
            return False
    return True


def same_equation(a: sympy.Eq, b: sympy.Eq) -> bool:
    """Whether one is a constant multiple of the other, as 2x + 4y = 3 and y = 3/4 - x/2 are."""
    ratios = []
    for point in range(NUM_POINTS):
        x, y = (value_at(equation.lhs - equation.rhs, point) for equation in (a, b))
        if x is None or y is None or abs(x) < ZERO or abs(y) < ZERO:
            return False
        ratios.append(x / y)
    return all(abs(ratio - ratios[0]) <= SAME * abs(ratios[0]) for ratio in ratios)


def value_at(expr: sympy.Expr, point: int) -> sympy.Expr | None:
    """The number that `expr` is, to DIGITS digits, when its symbols take the values of this point."""
    values = {symbol: coordinate(symbol.name, point) for symbol in expr.free_symbols}
    try:
        exact = expr.xreplace({number: sympy.Rational(str(number)) for number in expr.atoms(sympy.Float)})
        value = sympy.N(exact.xreplace(values).doit(), DIGITS)
    except Exception:  # sympy has no common class for "cannot evaluate this"
        return None
    return value if value.is_number and value.is_finite and not value.free_symbols else None


def is_accurate(number: sympy.Expr) -> bool:
    """False for what is left of a cancellation, such as 0.e-125: evalf marks it by a precision of one bit."""
    return all(part._prec > 1 for part in number.atoms(sympy.Float))


def coordinate(name: str, point: int) -> sympy.Rational:
    """A value for a symbol: the same in both expressions and in every process; negative at the last point."""
    digest = hashlib.sha256(f"{name} {point}".encode()).digest()
    value = sympy.Rational(1 + int.from_bytes(digest[:2], "big"), 30011)
    return -value if point == NUM_POINTS - 1 else value
