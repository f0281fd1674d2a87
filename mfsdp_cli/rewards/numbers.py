"""Exact numbers out of text: rational arithmetic only, no floats, so that 1/2^60 and 1/2^61 differ and 18.9 equals 18.90."""

from __future__ import annotations

import re
from fractions import Fraction

GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])"  # thousands: 1,250 but not 1,25 or 1,2500
NUMBER = rf"(?:(?:{GROUPED}|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++)"
TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(\\frac|\\cdot|\\times|\\div|[-+*/^(){}])|(.))", re.DOTALL)
MAX_POWER_BITS = 1_000_000


class Unreadable(Exception):
    """Text that has no value we would answer for; the text of the exception is the reason."""


class NotRational(Exception):
    """Not rational arithmetic: a symbol, a root. Another reader may understand it."""


def decimal_value(text: str) -> Fraction:
    """The value of `1,250.00`, `-3` or `.5`. Raises Unreadable above 4300 digits, Python's own limit."""
    try:
        return Fraction(text.replace(",", ""))
    except ValueError as error:
        raise Unreadable(f"{text[:40]!r} is not a number: {error}") from None


def exact_value(latex: str) -> Fraction | None:
    """The value of rational arithmetic in LaTeX or plain text, such as `-6\\frac{3}{4}`, `2^{10}/3`, `2 2/3`; None if it is not that.

    Two numbers side by side are a mixed number, which must be proper: `4 10/3` raises Unreadable, as do powers of
    more than a million bits.
    """
    try:
        reader = Reader(latex)
        value = reader.sum()
        return value if reader.at == len(reader.tokens) else None
    except (NotRational, ZeroDivisionError):
        return None


class Reader:
    """Recursive descent; each method reads one level of precedence from `tokens[at]` on."""

    def __init__(self, text: str):
        self.tokens: list[str] = []
        self.at = 0
        for number, sign, other in TOKEN.findall(text.strip()):
            if other:
                raise NotRational
            self.tokens.append(number or sign)

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, *allowed: str) -> bool:
        """Step over the next token if it is one of these."""
        is_next = self.peek() in allowed
        self.at += is_next
        return is_next

    def need(self, token: str):
        if not self.take(token):
            raise NotRational

    def sum(self) -> Fraction:
        value = self.product()
        while self.peek() in ("+", "-"):
            value += self.product()  # which reads the sign
        return value

    def product(self) -> Fraction:
        if self.take("-"):
            return -self.product()
        self.take("+")
        value = self.power()
        while True:
            if self.take("*", "\\cdot", "\\times"):
                value *= self.signed()
            elif self.take("/", "\\div"):
                value /= self.signed()
            elif self.peek() == "(":
                value *= self.power()
            elif self.peek() == "\\frac" or self.peek()[:1].isdigit():
                raise Unreadable("two numbers side by side are neither a product nor a proper mixed number")
            else:
                return value

    def signed(self) -> Fraction:
        return -self.power() if self.take("-") else self.power()

    def power(self) -> Fraction:
        value = self.atom()
        if not self.take("^"):
            return value
        exponent = self.signed()
        if exponent.denominator != 1:
            raise NotRational
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        if bits > 1 and abs(exponent) * bits > MAX_POWER_BITS:
            raise Unreadable("the power is too large to work out")
        return value**exponent.numerator

    def atom(self) -> Fraction:
        for opening, closing in (("(", ")"), ("{", "}")):
            if self.take(opening):
                value = self.sum()
                self.need(closing)
                return value
        if self.take("\\frac"):
            return self.braced() / self.braced()
        token = self.peek()
        if not token[:1].isdigit() and token[:1] != ".":
            raise NotRational
        self.at += 1
        value = decimal_value(token)
        return value + self.proper_fraction() if token.isdigit() else value

    def braced(self) -> Fraction:
        self.need("{")
        value = self.sum()
        self.need("}")
        return value

    def proper_fraction(self) -> Fraction:
        """The fraction of a mixed number, when one follows a whole number: `\\frac{a}{b}` or `a/b` with 0 < a < b."""
        following = self.tokens[self.at:self.at + 7]
        if following[:1] == ["\\frac"] and [following[i] for i in (1, 3, 4, 6) if i < len(following)] == ["{", "}", "{", "}"]:
            above, below, width = following[2], following[5], 7
        elif len(following) > 2 and following[1] == "/":
            above, below, width = following[0], following[2], 3
        else:
            return Fraction(0)
        if not (above.isdigit() and below.isdigit() and 0 < int(above) < int(below)):
            return Fraction(0)
        self.at += width
        return Fraction(int(above), int(below))
