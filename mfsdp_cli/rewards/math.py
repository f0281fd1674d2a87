"""Competition answers: the last box, compared by value with the gold answer.

Policies, where mathematics leaves a choice:
- No box, or only a cut-off one: unparseable, 0. Nothing outside the last box counts.
- A decimal is the number that it spells: 0.33 is not 1/3.
- A percent sign is a unit or a hundredth: 50% equals 50 (a gold answer may lack the sign) and 1/2, but 50 is not 1/2.
- Units, currency and degree signs are dropped and never compared; a.m. and p.m. are not units.
- An answer list has no order and needs every element as often as the gold one; words in a list, tuples and intervals have
  order, and intervals must be open or closed on the same sides.
- Names on the left of `=` may be missing on one side, not differ. A column matrix equals the tuple of its entries.
- A ratio 3:4 must be written as in the gold answer. A numeral with a base must have the same digits and base.
- Form is not graded: an expanded polynomial equals its factors.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate

from mfsdp_cli.rewards import symbolic
from mfsdp_cli.rewards.base import RewardResult, graded, unparseable
from mfsdp_cli.rewards.latex import last_box, normalise, split_top, squeeze
from mfsdp_cli.rewards.numbers import GROUPED, Unreadable, exact_value

COUNTS = "zero one two three four five six seven eight nine ten eleven twelve".split()
RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in|approx|equiv|lt|gt)(?![a-zA-Z])")
NAME = re.compile(r"(?:\\angle\s*)?(?:\\?[a-zA-Z]+)(?:_(?:\w|\{\w+\}))?'?(?:\^\{-1\})?(?:\([a-zA-Z, ]+\))?")
SET = re.compile(r"[(\[]|\\\{|\\(?:mathbb|setminus|cup|cap|emptyset)")
BASED = re.compile(r"(-?[0-9A-Z]+)_\{?([0-9]+)\}?")
MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> RewardResult:
    """1 when the last box of the response means the same as the gold answer, else 0."""
    gold = normalise(ground_truth)  # what it raises is the data's fault, not the response's
    if not gold:
        raise ValueError(f"ground truth {ground_truth!r} is empty")
    answer = last_box(solution_str)
    if answer is None:
        return unparseable("no complete \\boxed{}")
    try:
        spelled = normalise(answer)
        return graded(equal(spelled, gold), answer) if spelled else unparseable("the last box is empty", answer)
    except (Unreadable, RecursionError) as error:
        return unparseable(str(error), answer)


def equal(answer: str, gold: str) -> bool:
    """Whether two answers, normalised, mean the same. Raises Unreadable when the answer means nothing."""
    if squeeze(answer) == squeeze(gold):
        return True
    gold_words, answer_words = words(gold), words(answer)
    if gold_words or answer_words:
        return same_words(answer, gold_words) if gold_words else bare_letters(answer) == bare_letters(gold)
    return any(same_lists(a, g) for a in readings(answer) for g in readings(gold))


# ---------------------------------------------------------------- words


def words(text: str) -> str:
    """A text answer in one spelling, such as "monday", "a,c" or "4:30pm"; empty when `text` is mathematics."""
    return bare_letters(text) if "\\text" in text and re.search("[A-Za-z]", bare_letters(text)) else ""


def bare_letters(text: str) -> str:
    return re.sub(r"\\text|[\s(){}\"']|\.(?![0-9])", "", text).casefold()


def same_words(answer: str, gold_words: str) -> bool:
    answer_words = bare_letters(answer)
    if gold_words in COUNTS:
        return answer_words in (gold_words, str(COUNTS.index(gold_words)))
    parts = [sorted(spelling.split(",")) for spelling in (answer_words, gold_words)]
    if all(len(letter) == 1 for letter in parts[1]):
        return parts[0] == parts[1]
    return answer_words == gold_words


# ---------------------------------------------------------------- structure


def readings(text: str) -> list[str]:
    """`1,250` can be a number or two. Inside brackets a comma separates."""
    grouped = re.compile(rf"(?<![0-9.,]){GROUPED}(?!,)")
    if not grouped.search(text) or re.search(r"[(\[]|\\\{", text):
        return [text]
    return [grouped.sub(lambda match: match[0].replace(",", ""), text), text]


def same_lists(answer: str, gold: str) -> bool:
    """Lists and sets, without order; a list of one is a plain answer. `x = 1, 2` and `1, 2` are the same list."""
    (answer_name, answer_value), (gold_name, gold_value) = named(answer), named(gold)
    is_plain = not any(RELATION.search(value) for value in (answer_value, gold_value))
    if answer_name == gold_name or (is_plain and not (answer_name and gold_name)):
        answer, gold = answer_value, gold_value
    if squeeze(answer) == squeeze(gold):
        return True
    answers, golds = elements(answer), elements(gold)
    if len(answers) == len(golds) == 1:
        return same_one(answers[0], golds[0])
    return same_unordered(answers, golds)


def elements(text: str) -> list[str]:
    """`\\{1, 2\\}`, `1, 2` and `\\pm 1` as their elements."""
    inner = text[2:-2].rstrip("\\") if text.startswith("\\{") and text.endswith("\\}") and "\\}" not in text[:-2] else text
    parts = [part for part in split_top(inner, ",") if part]
    return [part.replace("\\pm", sign, 1).strip().removeprefix("+") for part in parts
            for sign in (("+", "-") if part.count("\\pm") == 1 else ("",))]


def same_unordered(answers: list[str], golds: list[str]) -> bool:
    if len(answers) != len(golds):
        return False
    left = list(golds)
    for answer in answers:
        match = next((gold for gold in left if equal(answer, gold)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def same_ordered(answers: list[str], golds: list[str]) -> bool:
    return len(answers) == len(golds) and all(equal(a, g) for a, g in zip(answers, golds, strict=True))


def same_one(answer: str, gold: str) -> bool:
    """One answer: relation, time or ratio, union, tuple, interval, matrix, numeral with a base, or plain value."""
    if ":" in answer + gold:
        return False  # 4:30, 3:4; those of one spelling were found before
    if RELATION.search(answer) or RELATION.search(gold):
        return ("=" in answer) == ("=" in gold) and symbolic.equal(answer, gold)
    unions = split_top(answer, "\\cup"), split_top(gold, "\\cup")
    if len(unions[0]) == len(unions[1]) > 1 and same_unordered(*unions):
        return True
    if max(map(len, unions)) > 1 and not (SET.search(answer) and SET.search(gold)):
        return False
    shapes = rows(answer) or bracketed(answer), rows(gold) or bracketed(gold)
    if shapes[0] and shapes[1]:
        return shapes[0][0] == shapes[1][0] and same_ordered(shapes[0][1], shapes[1][1])
    if (shapes[0] or shapes[1]) and max(map(len, unions)) == 1:
        return False
    based = BASED.fullmatch(squeeze(answer)), BASED.fullmatch(squeeze(gold))
    if based[0] or based[1]:
        return bool(based[0] and based[1]) and based[0].groups() == based[1].groups()
    return same_value(answer, gold)


def bracketed(text: str) -> tuple[str, list[str]] | None:
    """(its two brackets, its elements) of a tuple or interval."""
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]"):
        return None
    depths = list(accumulate((char in "([{") - (char in ")]}") for char in text))
    inside = split_top(text[1:-1], ",")
    is_whole = depths[-1] == 0 and 0 not in depths[:-1]
    return (text[0] + text[-1], [part.removeprefix("+") for part in inside]) if is_whole and len(inside) > 1 else None


def rows(text: str) -> tuple[str, list[str]] | None:
    """(its shape, its entries) of a matrix; that of a column is written as a tuple's."""
    match = MATRIX.fullmatch(text.strip("()[] "))
    if match is None:
        return None
    table = [[cell.strip() for cell in split_top(row, "&")] for row in split_top(match[2], "\\\\") if row.strip()]
    shape = "()" if all(len(row) == 1 for row in table) else str([len(row) for row in table])
    return shape, [cell for row in table for cell in row]


# ---------------------------------------------------------------- names and values


def named(text: str) -> tuple[str, str]:
    """(name, value) of `x = 5`, `x \\in [0, 1]`, `2 + 3 = 5`, `2/3 \\approx 0.67`; ("", text) when it is not one value with its name."""
    text = text.split("\\approx")[0].strip()
    sides = [side.strip() for side in re.split(r"(?<!\\)=|\\in(?![a-zA-Z])", text)]
    if len(sides) == 1 or any(RELATION.search(side) for side in sides):
        return "", text
    names = [squeeze(side) for side in sides[:-1] if NAME.fullmatch(squeeze(side))]
    values = [value(side) for side in sides if squeeze(side) not in names]
    if len(names) == len(sides) - 1 or (None not in values and len(set(values)) == 1):
        return "=".join(names), sides[-1]
    return "", text


def value(text: str) -> Fraction | None:
    """The rational number that `text` is, a percent sign counted as a hundredth."""
    number = exact_value(text.rstrip("% "))
    return number / 100 if number is not None and text.endswith("%") else number


def same_value(answer: str, gold: str) -> bool:
    plain = answer.rstrip("% "), gold.rstrip("% ")
    values = [exact_value(text) for text in plain]
    if None not in values:
        return values[0] == values[1] or (answer.endswith("%") != gold.endswith("%") and value(answer) == value(gold))
    if values != [None, None] and any(has_variable(text) for text in plain):
        return False  # without parsing, which is slow; nobody writes 5 as 5 + x - x
    return symbolic.equal(*plain)


def has_variable(text: str) -> bool:
    return re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+|[ei]", "", text)) is not None
