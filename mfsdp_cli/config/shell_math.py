"""Arithmetic and tests of the shell, decided from known values only; None where they cannot be. See `shell`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mfsdp_cli.config.shell import Text

EXPRESSION = re.compile(r"(?:\s|\$\{[A-Za-z_]\w*\}|\$?\b[A-Za-z_]\w*\b|\b\d+\b|[-+*/%()]|[<>]=?|[=!]=)*")
OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}
COMPARISONS = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge}
LARGEST = 2**63


def arithmetic(text: str, number: Callable[[str], int | None]) -> int | None:
    """The value of what stands in $(( )); None when a variable is not a known integer, or an operator is not among the common ones.

    >>> arithmetic("1024 * (n + 1)", {"n": 7}.get)
    8192
    """
    if len(text) > 300 or EXPRESSION.fullmatch(text) is None:
        return None
    try:
        tree = ast.parse(" ".join(re.sub(r"\$\{?(\w+)\}?", r"\1", text).split()), mode="eval")
        return _value(tree.body, number)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
        return None


def _value(node, number) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        result = node.value
    elif isinstance(node, ast.Name):
        result = number(node.id)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        inner = _value(node.operand, number)
        result = inner if inner is None or isinstance(node.op, ast.UAdd) else -inner
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        result = _operation(node.ops[0], _value(node.left, number), _value(node.comparators[0], number))
    elif isinstance(node, ast.BinOp):
        result = _operation(node.op, _value(node.left, number), _value(node.right, number))
    else:
        return None
    return None if result is None or abs(result) >= LARGEST else int(result)


def _operation(kind, a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return None
    if type(kind) in OPERATIONS:
        return OPERATIONS[type(kind)](a, b)
    if isinstance(kind, (ast.Div, ast.Mod)):  # C's: towards zero
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if isinstance(kind, ast.Div) else a - b * quotient
    return a**b if isinstance(kind, ast.Pow) and 0 <= b < 64 else None


def test(name: str, words: list[Text], is_set: Callable[[str], bool | None]) -> bool | None:
    """The status of [ … ], [[ … ]] or test …; None when it cannot be decided, also for one that looks at files."""
    inside = words[1:] if name == "test" else words[1:-1]
    if name != "test" and (not words or words[-1].text != {"[": "]", "[[": "]]"}[name]):
        return None
    parser = _Test(inside, name == "[[", is_set)
    status = parser.either() if inside else False
    return status if parser.at == len(inside) else None


class _Test:
    """or, and, not, parentheses and primaries over the words, in three-valued logic."""

    def __init__(self, words: list[Text], double: bool, is_set):
        self.words, self.double, self.is_set, self.at = words, double, is_set, 0

    def peek(self, ahead: int = 0) -> str | None:
        at = self.at + ahead
        return self.words[at].text if at < len(self.words) else None

    def either(self) -> bool | None:
        status = self.both()
        while self.peek() in ("||", "-o"):
            self.at += 1
            right = self.both()
            status = True if status or right else None if status is None or right is None else False
        return status

    def both(self) -> bool | None:
        status = self.one()
        while self.peek() in ("&&", "-a"):
            self.at += 1
            right = self.one()
            status = False if status is False or right is False else None if status is None or right is None else True
        return status

    def one(self) -> bool | None:
        if self.peek() == "!" and self.peek(1) is not None:
            self.at += 1
            status = self.one()
            return None if status is None else not status
        if self.peek() == "(" and self.peek(2) is not None and self.peek(1) not in ("=", "==", "!="):
            self.at += 1
            status = self.either()
            self.at += 1
            return status
        return self.primary()

    def primary(self) -> bool | None:
        rest, binary = len(self.words) - self.at, self.peek(1)
        if rest >= 3 and (binary in COMPARISONS or binary in ("=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef")):
            left, right, self.at = self.words[self.at], self.words[self.at + 2], self.at + 3
            return self.compare(left, binary, right)
        if rest >= 2 and re.fullmatch(r"-[a-zA-Z]", self.peek() or ""):
            what, word, self.at = self.peek(), self.words[self.at + 1], self.at + 2
            if what in ("-z", "-n") and not word.why:
                return (word.text == "") == (what == "-z")
            return self.is_set(word.text) if what == "-v" and not word.why else None
        word, self.at = self.words[self.at] if rest > 0 else None, self.at + 1
        return None if word is None or word.why else word.text != ""

    def compare(self, left: Text, how: str, right: Text) -> bool | None:
        if left.why or right.why:
            return None
        if how in COMPARISONS:
            whole = all(re.fullmatch(r"\s*-?(0|[1-9]\d{0,17})\s*", t.text) for t in (left, right))
            return COMPARISONS[how](int(left.text), int(right.text)) if whole else None
        if how in ("=", "==", "!="):
            if self.double and re.search(r"[\[\]\\(]", right.text):
                return None
            equal = fnmatchcase(left.text, right.text) if self.double else left.text == right.text
            return equal == (how != "!=")
        return None
