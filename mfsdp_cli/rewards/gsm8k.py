"""Grade-school answers: a number after the last `####`. Spelling does not count, the value does.

The marker must be there (strict), but spaces, currency signs, bold, units, a trailing dot, .00 and thousands commas are
not errors: a correct answer that scores 0 teaches the wrong thing. The whole response is searched, however long the
text after the answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

from mfsdp_cli.rewards.base import RewardResult, graded, unparseable
from mfsdp_cli.rewards.numbers import NUMBER, Unreadable, decimal_value

MINUS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " "})
DECORATION = r"(?:[\s*_`~$€£¥:(]|\\\$|\\\(|\\boxed\{|\\text\{)*+"
FRACTION = rf"{NUMBER}(?:\s*/\s*{NUMBER})?"
# What would make the number a part of another one: 1,25 · 1.2.3 · 1e9 · 20 + 22
CONTINUES = r"(?![0-9]|[.,][0-9]|[eE][-+]?[0-9]|\s*(?:[-+*/^=×÷]|\\times|\\cdot|\\div)\s*[0-9($\\])"
MARKED = re.compile(rf"####{DECORATION}(?:([-+]){DECORATION})?({FRACTION}){CONTINUES}")
LAST = re.compile(rf"((?:(?<![\w)\]}}])[-+])?)(?:\\?\$)?(?<![\w.])({FRACTION})(?![0-9]|[.,][0-9])")


def marked_answer(text: str) -> str | None:
    """The number after the last `####` that is followed by one, without decoration; None if there is no such marker."""
    found = MARKED.findall(text.translate(MINUS))
    return "".join(found[-1]) if found else None


def last_number(text: str) -> str | None:
    found = LAST.findall(text.translate(MINUS))
    return "".join(found[-1]) if found else None


def value_of(number: str) -> Fraction:
    """The value of a number as `marked_answer` returns it: sign, thousands commas, decimals, one fraction bar."""
    above, bar, below = number.replace(" ", "").partition("/")
    if not bar:
        return decimal_value(above)
    if decimal_value(below) == 0:
        raise Unreadable(f"{number!r} divides by zero")
    return decimal_value(above) / decimal_value(below)


def gold_value(ground_truth: str) -> Fraction:
    """Raises ValueError when the data set's answer is not a number: the fault is then not the response's."""
    plain = ground_truth.translate(MINUS).replace("$", "").replace(" ", "").rstrip(".")
    if not re.fullmatch(rf"[-+]?{FRACTION}", plain):
        raise ValueError(f"ground truth {ground_truth!r} is not a number")
    return value_of(plain)


def compare(answer: str | None, ground_truth: str, missing: str) -> RewardResult:
    gold = gold_value(ground_truth)
    if answer is None:
        return unparseable(missing)
    try:
        return graded(value_of(answer) == gold, answer)
    except Unreadable as error:
        return unparseable(str(error), answer)


def score_strict(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> RewardResult:
    """1 when the number after the last marker equals the gold one, 0 otherwise. Without a marker: unparseable."""
    return compare(marked_answer(solution_str), ground_truth, "no #### followed by a number")


def score_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> RewardResult:
    """As score_strict, but the last number of the text counts when there is no marker."""
    return compare(marked_answer(solution_str) or last_number(solution_str), ground_truth, "no number")
