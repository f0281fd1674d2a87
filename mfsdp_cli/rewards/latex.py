"""Where the answer stands in a response, and its LaTeX in one spelling. Text in, text out; no mathematics here."""

from __future__ import annotations

import re

from mfsdp_cli.rewards.numbers import Unreadable

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BARE = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|[A-Za-z](?=\$)")  # `\boxed 5`; but `\boxed as requested` is prose
CHARACTERS = str.maketrans({"−": "-", "–": "-", "×": "\\times ", "÷": "\\div ", "·": "\\cdot ", "π": "\\pi ", "θ": "\\theta ", "∞": "\\infty ",
                            "∪": "\\cup ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "°": "^\\circ ", "√": "\\sqrt ",
                            "\u00a0": " ", "\u202f": " ", "\u2009": " "})
FONTS = r"\\(?:text(?:bf|it|rm|normal|sf|tt|up)?|math(?:bf|it|rm|sf|tt)|boldsymbol|bm|mbox|hbox|operatorname\*?)(?![a-zA-Z])\s*"
FUNCTIONS = r"(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|frac|mod|max|min|arc\w*)"
REWRITES = [(re.compile(pattern, re.DOTALL), replacement) for pattern, replacement in (
    (r"(?<=[0-9])(?:,\s*\\!\s*|\\!,|\{,\}|,?\\[,;: ]\s*)(?=[0-9]{3}(?![0-9]))", ""),  # thousands, as typeset
    (r"\*\*|__", ""),
    (r"\\\$|\$", ""),
    (r"^\s*\\[(\[]|\\[)\]]\s*$", ""),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
    (r"\\(?:displaystyle|textstyle|limits|nolimits|thinspace|hfill)(?![a-zA-Z])", " "),
    (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|.)", " "),
    (r"(?<!\\)\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~|\s+", " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"(?<![a-zA-Z\\])(sin|cos|tan|cot|sec|csc|log|ln|sqrt|pi)(?![a-zA-Z])", r"\\\1"),
    (FONTS, r"\\text"),
    (r"\{\s*\\(?:rm|bf|it)(?![a-zA-Z])\s*", r"{"),
    (r"\\l(?:brace|angle)(?![a-zA-Z])", lambda m: "\\{" if "brace" in m[0] else "("),
    (r"\\r(?:brace|angle)(?![a-zA-Z])", lambda m: "\\}" if "brace" in m[0] else ")"),
    (r"\\(le|ge)(?:q|qslant)(?![a-zA-Z])", r"\\\1"),
    (r"\\neq(?![a-zA-Z])", r"\\ne"),
    (r"([<>])=", lambda m: "\\le " if m[1] == "<" else "\\ge "),
    (r"\\(?:infin|inf)(?![a-zA-Z])|(?<![a-zA-Z\\])(?:infinity|infty)(?![a-zA-Z])", r"\\infty"),
    (r"\\text\s*\{\s*\}", ""),
    (r"\\text\s*\{\s*([0-9.,]+|[a-zA-Z])\s*\}", r"{\1}"),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|\{\s*\\degree\s*\})(?![a-zA-Z])|\\degree(?![a-zA-Z])", ""),
    (r"\\text\s*\{\s*per\s?cent(?:age)?\s*\}|\bper\s?cent(?:age)?\b|\\%", "%"),
    (r"\s*,?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\s*,?\s+(?:and|or)\s+", ", "),
    (r"^\s*(?:\\approx|=|:)\s*", ""),
)]
WORD_UNIT = re.compile(rf"^(-?(?:[0-9.,/ ]*[0-9]|\\frac\{{\d+\}}\{{\d+\}}))\s+(?![ap]\.?\s?m\b|{FUNCTIONS}\b)"
                       r"(?:[A-Za-z]{3,}[A-Za-z .]*|cm|mm|km|ft|in|kg|lb|hr)(?:\s*\^?\s*\{?[23]\}?)?$")
TEXT_UNIT = re.compile(r"(?<=[\w)}%.])\s*\\text\s*\{(?!\s*[ap]\.?\s?m\.?\s*\})[^{}]*\}(?:\s*\^\s*(?:[0-9]|\{[0-9]\}))?\s*\.?$")
CHOICE_LABEL = re.compile(r"^\\text\s*\{\s*\(?[A-J]\)?[.:]?\s*\}\s*(?=[^\s,_^])")


def last_box(text: str) -> str | None:
    """What the last `\\boxed{…}`, `\\fbox{…}` or `\\boxed 5` holds, braces balanced. A cut-off or prose mention is passed over; None if
    no box is left."""
    for match in reversed(list(BOX.finditer(text))):
        if text.startswith("{", match.end()):
            end = closing_brace(text, match.end())
            if end is not None:
                return text[match.end() + 1:end].strip()
        elif bare := BARE.match(text, match.end()):
            return bare[0].rstrip(",")
    return None


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`; escaped braces do not count. None if the text ends before it."""
    depth, at = 0, start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at
        at += 1
    return None


def normalise(latex: str) -> str:
    """One spelling for what is written in several: spacing, fonts, sizes, fraction commands, currency, degrees, units, thousands."""
    text = latex.translate(CHARACTERS)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = without_units(brace_arguments(text.strip(" ;,").rstrip(" .;,")))
    return CHOICE_LABEL.sub("", text)


def without_units(text: str) -> str:
    """Drops what is measured from the end: `5\\text{ cm}^2`, `42 apples`. Units are never compared."""
    before = None
    while before != text:
        before, text = text, WORD_UNIT.sub(r"\1", TEXT_UNIT.sub("", text)).rstrip(" .;,")
    return text


def brace_arguments(text: str) -> str:
    """`\\frac12`, `\\frac 9{20}`, `\\sqrt5` with all their braces."""
    out, at = [], 0
    while match := re.compile(r"\\(frac|sqrt)(?![a-zA-Z])\s*(\[[^\]]*\])?").search(text, at):
        out += [text[at:match.start()], f"\\{match[1]}{match[2] or ''}"]
        at = match.end()
        for _ in range(2 if match[1] == "frac" else 1):
            argument, at = take_argument(text, at)
            out.append(f"{{{brace_arguments(argument)}}}")
    return "".join(out) + text[at:]


def take_argument(text: str, at: int) -> tuple[str, int]:
    """The argument of a command from `at` on, as TeX takes it (a group, a command or one character), and where it ends."""
    while text.startswith(" ", at):
        at += 1
    if text.startswith("{", at):
        end = closing_brace(text, at)
        if end is None:
            raise Unreadable("braces do not balance")
        return text[at + 1:end], end + 1
    if parenthesis := re.compile(r"\(([^()]*)\)").match(text, at):  # sqrt(2), as people type it
        return parenthesis[1], parenthesis.end()
    match = re.compile(r"\\[a-zA-Z]+(?:\{[^{}]*\})?|[^\\]").match(text, at)
    if match is None:
        raise Unreadable("a fraction or root lacks its argument")
    return match[0], match.end()


def squeeze(text: str) -> str:
    """For comparing as text: no spaces, no braces around one character."""
    return re.sub(r"\{([^{}\\])\}", r"\1", re.sub(r"\s+", "", text))


def split_top(text: str, separator: str) -> list[str]:
    """Split at `separator` (a character or command) outside of all brackets. Half-open intervals count as brackets."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if depth == 0 and text.startswith(separator, at):
            parts.append(text[start:at])
            at += len(separator)
            start = at
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return [part.strip() for part in [*parts, text[start:]]]
