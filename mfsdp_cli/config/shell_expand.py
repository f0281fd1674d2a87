"""Expansion of the words of a bash script from what its variables are known to be; what is not known says why. See `shell`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from mfsdp_cli.config.shell_math import arithmetic
from mfsdp_cli.config.shell_tree import Function, Piece, Word

LONGEST_TEXT = 100_000
MOST_WORDS = 10_000
DEFAULTS = (":-", "-", ":=", "=", ":?", "?", ":+", "+")
OUTSIDE = {"0": "where the script lies", "BASH_SOURCE": "where the script lies", "PWD": "where the script is started",
           "?": "how a command ended", "$": "the process", "!": "the process", "RANDOM": "chance", "SECONDS": "the clock",
           "HOSTNAME": "the machine", "EPOCHSECONDS": "the clock"}


@dataclass(frozen=True)
class Text:
    """A word as it would reach a command. why: what keeps it from being known; then `text` shows the source instead.

    whole  quoted where it was written as a default, so it does not come apart at blanks
    """

    text: str
    why: tuple[str, ...] = ()
    line: int = field(default=0, compare=False)
    whole: bool = field(default=False, compare=False)


@dataclass
class State:
    variables: dict[str, Text | tuple[Text, ...]]
    positional: tuple[Text, ...] | None  # None: the arguments are not known
    shifted: int = 0
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Function] = field(default_factory=dict)
    stopped: str = ""  # exit, return, break or continue, once one was met

    def copy(self) -> State:
        return replace(self, variables=dict(self.variables), exported=set(self.exported), functions=dict(self.functions))


class TooLong(Exception):
    """A script that makes more of itself than a launch script does."""


class Expander:
    """From words of the script to words of a command."""

    def expand(self, word: Word, state: State, split: bool = True) -> list[Text]:
        """The words that one word of the script becomes."""
        fields: list[list[Text]] = []
        fresh = True  # whether the next part begins a field
        for number, piece in enumerate(word.pieces):
            parts = self.piece(piece, state, split, word.line)
            if number == 0 and piece.kind == "text" and not piece.quoted and re.match(r"~(/|$)", piece.text) and "HOME" in state.variables:
                parts = [[replace(state.variables["HOME"], line=word.line), Text(piece.text[1:], (), word.line)]]
            for i, part in enumerate(parts):
                if i > 0:
                    fresh = True
                if part is None:
                    continue
                if fresh:
                    fields.append([])
                fields[-1] += part
                fresh = False
        if split and _has_braces(word):
            return [unknown(word.source, f"braces, as in line {word.line}, are not expanded", word.line)]
        alone = len(word.pieces) == 1 and word.pieces[0].kind == "parameter"
        return list(bounded(tuple(t if alone and t.line else replace(t, line=word.line) for t in map(joined, fields))))

    def piece(self, piece: Piece, state: State, split: bool, line: int) -> list[list[Text] | None]:
        """Parts of fields; between two of them a new field begins. None in a part: nothing there."""
        if piece.kind == "text":
            return [[Text(piece.text, (), line)]]
        if piece.kind == "command":
            return [[unknown(f"$({piece.text.strip()})", f"the output of a command, $({_short(piece.text)}), in line {line}", line)]]
        if piece.kind == "arithmetic":
            value = arithmetic(piece.text, lambda name: self.number(name, state))
            return [[unknown(f"$(({piece.text}))", f"$(({_short(piece.text)})) in line {line} cannot be worked out", line)
                     if value is None else Text(str(value), (), line)]]
        values, inner = self.parameter(piece, state, line), _list_within(piece)
        if not split:
            return [[joined(values, " ")]] if values else [None]
        if piece.quoted or (inner is not None and inner.quoted):
            every = inner is not None or "@" in (piece.text, piece.index)
            parts = [[value] for value in values] if every else [[joined(values, " ")]]
            return parts or [None]
        return self.split(values)

    def split(self, values: list[Text]) -> list[list[Text] | None]:
        """Unquoted: words come apart at blanks."""
        parts: list[list[Text] | None] = []
        for value in values:
            if value.why or value.whole:
                parts.append([value])
                continue
            words = [[replace(value, text=word)] for word in value.text.split()]
            words = ([None] if value.text[:1].isspace() else []) + words + ([None] if value.text[-1:].isspace() else [])
            parts += words or [None]
        return parts or [None]

    def arguments(self, state: State) -> list[Text]:
        return list((state.positional or ())[state.shifted:])

    def number(self, name: str, state: State) -> int | None:
        """The value of a variable within arithmetic."""
        value = state.variables.get(name)
        text = value.text if isinstance(value, Text) and not value.why else ""
        return int(text) if re.fullmatch(r"-?(0|[1-9]\d{0,17})", text) else None

    def is_set(self, name: str, state: State) -> bool | None:
        return name in state.variables

    def values(self, piece: Piece, state: State, line: int) -> list[Text] | None:
        """What a parameter holds, before its operator; None: it is not set."""
        name = piece.text
        if name in "@*":
            return self.arguments(state)
        if name.isdigit() and name != "0":
            if state.positional is None:
                return None
            found = self.arguments(state)[int(name) - 1:int(name)]
            return found or None
        if name == "#":
            known = state.positional is not None
            return [Text(str(len(self.arguments(state))), (), line) if known else
                    unknown("$#", f"the number of the script's arguments, in line {line}, is not known", line)]
        if name in OUTSIDE and name not in state.variables:
            return [unknown(f"${name}", f"${name} in line {line} is {OUTSIDE[name]}", line)]
        value = state.variables.get(name)
        if value is None or isinstance(value, Text):
            return [value] if value is not None and (value.why or piece.index in ("", "0", "@", "*")) else None
        if piece.index in ("@", "*"):
            return list(value)
        index = piece.index or "0"
        if not (index.isascii() and index.lstrip("-").isdigit()):
            return [unknown(f"${{{name}[{index}]}}", f"an element of {name} in line {line} that cannot be told", line)]
        return [value[int(index)]] if -len(value) <= int(index) < len(value) else None

    def parameter(self, piece: Piece, state: State, line: int) -> list[Text]:
        """The values of ${…}: one, or many for [@] and $@."""
        name, operator = piece.text, piece.operator
        source = f"${name}" + (f"[{piece.index}]" if piece.index else "")
        if piece.prefix == "!":
            return [unknown(f"${{!{name}}}", f"the variable that ${name} names, in line {line}, is not followed", line)]
        values = self.values(piece, state, line)
        if piece.prefix == "#":
            many = piece.index in ("@", "*") or name in ("@", "*")
            if values is None or any(v.why for v in values):
                return [unknown(f"${{#{name}}}", f"the length of ${name} in line {line} is not known", line)]
            return [Text(str(len(values) if many else len(values[0].text)), (), line)]
        if operator in DEFAULTS:
            return self.default(piece, values, state, line)
        if values is None:
            what = f"the script's argument {source}" if name.isdigit() else source
            if piece.index in ("@", "*"):
                return []
            return [unknown(source, f"{what} is not set in the script (line {line})", line)]
        return [_edited(value, operator, self.operand(piece, state), line) for value in values] if operator else values

    def default(self, piece: Piece, values: list[Text] | None, state: State, line: int) -> list[Text]:
        """${NAME:-word}, ${NAME:+word} and their kin."""
        operator, inner = piece.operator, _list_within(piece)
        empty = not values or (operator[0] == ":" and not any(v.why or v.text for v in values))
        if operator[-1] == "?" and empty:
            return [unknown(f"${piece.text}", f"${piece.text} must be given to the script (line {line})", line)]
        if empty is (operator[-1] == "+"):
            return [Text("", (), line)] if empty and inner is None else [] if empty else values
        found = self.parameter(inner, state, line) if inner is not None else [self.operand(piece, state)]
        if operator[-1] == "=" and len(found) == 1:
            state.variables[piece.text] = replace(found[0], whole=False)
        return found

    def operand(self, piece: Piece, state: State) -> Text:
        whole = bool(piece.argument.pieces) and all(part.quoted for part in piece.argument.pieces)
        return replace(as_one(self.expand(piece.argument, state, split=False), piece.argument), whole=whole)


def unknown(source: str, why: str, line: int) -> Text:
    return Text(source, (why,), line)


def as_one(texts: list[Text], word: Word) -> Text:
    return texts[0] if len(texts) == 1 else joined(texts, " ") if texts else Text("", (), word.line)


def joined(texts: list[Text], between: str = "") -> Text:
    text = between.join(t.text for t in texts)
    if len(text) > LONGEST_TEXT:
        raise TooLong
    whys = tuple(dict.fromkeys(why for t in texts for why in t.why))
    return Text(text, whys, texts[0].line if texts else 0)


def bounded(texts: tuple[Text, ...]) -> tuple[Text, ...]:
    if len(texts) > MOST_WORDS:
        raise TooLong
    return texts


def _edited(value: Text, operator: str, operand: Text, line: int) -> Text:
    """${NAME%pattern} and its kin, where the only wildcard is *."""
    if value.why or operand.why:
        return Text(value.text, value.why + operand.why, line)
    if operator in ("^^", ",,") and not operand.text:
        return replace(value, text=value.text.upper() if operator == "^^" else value.text.lower())
    if operator in ("#", "##", "%", "%%") and len(value.text) < 1000 and not re.search(r"[\[\]?\\]", operand.text):
        cuts = range(len(value.text) + 1)
        if operator[0] == "#":
            fits = [i for i in cuts if fnmatchcase(value.text[:i], operand.text)]
            return replace(value, text=value.text[(fits[-1] if len(operator) == 2 else fits[0]) if fits else 0:])
        fits = [i for i in cuts if fnmatchcase(value.text[i:], operand.text)]
        return replace(value, text=value.text[:(fits[0] if len(operator) == 2 else fits[-1]) if fits else len(value.text)])
    if operator in ("/", "//"):
        old, _, new = operand.text.partition("/")
        if old and not re.search(r"[\[\]*?\\#%&]", old) and "&" not in new:
            return replace(value, text=value.text.replace(old, new, 1 if operator == "/" else -1))
    return unknown(f"${{…{operator}{operand.text}}}", f"${{…{operator}{operand.text}}} in line {line} is not followed", line)


def _list_within(piece: Piece) -> Piece | None:
    """The "${A[@]}" of ${A[@]+"${A[@]}"} or ${X:-"$@"}."""
    parts = piece.argument.pieces if piece.operator in DEFAULTS and piece.argument is not None else ()
    return parts[0] if len(parts) == 1 and parts[0].kind == "parameter" and "@" in (parts[0].text, parts[0].index) else None


def _has_braces(word: Word) -> bool:
    bare = "".join(p.text for p in word.pieces if p.kind == "text" and not p.quoted)
    return re.search(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}", bare) is not None


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "…"
