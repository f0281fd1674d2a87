"""Words of bash: quotation, expansions, here-documents. Command substitutions and the insides of arithmetic stay text."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from mfsdp_cli.config.shell_tree import Piece, ShellSyntaxError, Word

PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[^\]\n]*\])?")
SIMPLE_PARAMETER = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])")
KEYWORD = re.compile(r"[^\s;&|<>()'\"\\$`#]+(?=[\s;&|<>()]|$)")
ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.S)
OPERATOR = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//?|:|\^\^?|,,?|@")
OPERATORS = re.compile(r"&&|\|\||;;&|;;|;&|\|&|&>>|&>|<<<|<<-|<<|>>|>&|<&|<>|>\||[;&|<>()\n]")
RUN, QUOTED_RUN = re.compile(r"[^\s\\'\"`$};&|<>()]*"), re.compile(r"[^\\\"`$}]*")  # letters that mean nothing but themselves
QUOTATION = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|`(?:[^`\\]|\\.)*`', re.S)
ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "\\": "\\", "'": "'", '"': '"'}


@dataclass
class WordParser:
    """Moves over the characters of a script. Raises ShellSyntaxError."""

    text: str
    before: int = 0  # lines before the text, where it is part of a script
    pos: int = 0
    depth: int = 0
    here: list[tuple[str, bool]] = field(default_factory=list)  # here-documents whose bodies follow the next line break

    def __post_init__(self):
        self.starts = [0] + [m.end() for m in re.finditer("\n", self.text)]

    def line(self, pos: int | None = None) -> int:
        return self.before + bisect_right(self.starts, self.pos if pos is None else pos)

    def error(self, why: str, pos: int | None = None) -> ShellSyntaxError:
        return ShellSyntaxError(self.line(pos), why)

    def rest_of_line(self) -> str:
        return self.text[self.pos:].partition("\n")[0][:40]

    def at(self, text: str) -> bool:
        return self.text.startswith(text, self.pos)

    def skip_blanks(self) -> None:
        while self.pos < len(self.text):
            if self.text[self.pos] in " \t":
                self.pos += 1
            elif self.at("\\\n"):
                self.pos += 2
            elif self.at("#"):
                end = self.text.find("\n", self.pos)
                self.pos = len(self.text) if end < 0 else end
            else:
                return

    def skip_lines(self) -> None:
        """Blanks, line breaks, and the bodies of here-documents behind them."""
        self.skip_blanks()
        while self.at("\n"):
            self.pos += 1
            for end, tabs in self.here:
                self.skip_here(end, tabs)
            self.here = []
            self.skip_blanks()

    def skip_here(self, end: str, tabs: bool) -> None:
        start = self.pos
        while self.pos < len(self.text):
            stop = self.text.find("\n", self.pos)
            stop = len(self.text) if stop < 0 else stop
            line, self.pos = self.text[self.pos:stop], min(stop + 1, len(self.text))
            if (line.lstrip("\t") if tabs else line) == end:
                return
        raise self.error(f"the here-document never ends with {end}", start)

    def peek_operator(self) -> str:
        match = OPERATORS.match(self.text, self.pos)
        if match is None or (match[0] in "<>" and self.text.startswith("(", match.end())):
            return ""  # <( … ) is a word
        return match[0]

    def take(self, *operators: str) -> str:
        self.skip_blanks()
        found = self.peek_operator()
        if found not in operators:
            return ""
        self.pos += len(found)
        return found

    def keyword(self) -> str:
        """The unquoted word that comes next, not taken."""
        self.skip_blanks()
        match = KEYWORD.match(self.text, self.pos)
        return match[0] if match else ""

    def expect(self, keyword: str, since: int) -> None:
        self.skip_lines()
        if self.keyword() != keyword:
            found = self.rest_of_line() or "the end"
            raise self.error(f"{found} where {keyword} was expected, for line {self.line(since)}")
        self.pos += len(keyword)

    # --- words ------------------------------------------------------------------------------------------------------

    def word(self, empty: bool = False) -> Word:
        self.skip_blanks() if not empty else None
        start, pieces = self.pos, []
        while self.pos < len(self.text) and self.text[self.pos] not in " \t" and not self.peek_operator():
            if self.at("\\\n"):
                self.pos += 2
                continue
            pieces += self.pieces_here(quoted=False)
        if self.pos == start and not empty:
            raise self.error(f"{self.rest_of_line() or 'the end'} where a word was expected")
        return Word(_joined(pieces), self.text[start:self.pos], self.line(start))

    def pieces_here(self, quoted: bool) -> list[Piece]:
        """The next quotation, expansion or letter; at least one character is taken."""
        start, letter = self.pos, self.text[self.pos]
        if letter == "\\":
            self.pos = min(start + 2, len(self.text))
            inside = self.text[start + 1:self.pos] or letter
            return [Piece("text", letter + inside if quoted and inside not in '$`"\\' else inside, True)]
        if letter == "'" and not quoted:
            return [Piece("text", self.until("'", "the ' is never closed"), True)]
        if letter == '"':
            self.pos += 1
            return self.double_quoted(start)
        if letter == "`":
            return [Piece("command", self.until("`", "the ` is never closed"), quoted)]
        if letter in "<>" and self.text.startswith("(", start + 1):
            self.pos += 1
            return [Piece("command", self.need("(", ")"), quoted)]
        if letter == "$":
            return self.expansion(quoted)
        self.pos = (QUOTED_RUN if quoted else RUN).match(self.text, start + 1).end()
        return [Piece("text", self.text[start:self.pos], quoted)]

    def double_quoted(self, start: int) -> list[Piece]:
        pieces: list[Piece] = []
        while not self.at('"'):
            if self.pos >= len(self.text):
                raise self.error('the " is never closed', start)
            if self.at("\\\n"):
                self.pos += 2
                continue
            pieces += self.pieces_here(quoted=True)
        self.pos += 1
        return pieces or [Piece("text", "", True)]  # "" is an empty word, "$@" may be none

    def expansion(self, quoted: bool) -> list[Piece]:
        start = self.pos
        if self.at("$'") and not quoted:
            return [Piece("text", self.ansi(), True)]
        if self.at('$"') and not quoted:
            self.pos += 2
            return self.double_quoted(start)
        if self.at("$((") and (inside := self.balanced("$((", "))")) is not None:
            return [Piece("arithmetic", inside, quoted)]
        if self.at("$("):
            self.pos += 1
            return [Piece("command", self.need("(", ")"), quoted)]
        if self.at("${"):
            return [self.braced(quoted)]
        match = SIMPLE_PARAMETER.match(self.text, start)
        if match is None:
            self.pos += 1
            return [Piece("text", "$", quoted)]
        self.pos = match.end()
        return [Piece("parameter", match[1], quoted)]

    def braced(self, quoted: bool) -> Piece:
        start = self.pos
        match = PARAMETER.match(self.text, start + 2)
        if match is None:
            raise self.error("${ without the name of a variable", start)
        self.pos = match.end()
        operator = OPERATOR.match(self.text, self.pos)
        self.pos = operator.end() if operator else self.pos
        begin, pieces = self.pos, []
        while not self.at("}"):
            if self.pos >= len(self.text):
                raise self.error("the ${ is never closed", start)
            pieces += self.pieces_here(quoted)
        argument = Word(_joined(pieces), self.text[begin:self.pos], self.line(begin))
        self.pos += 1
        if pieces and operator is None:
            raise self.error(f"{self.text[start:self.pos]} is no expansion", start)
        return Piece("parameter", match[2], quoted, match[1], (match[3] or "")[1:-1], operator[0] if operator else "", argument)

    def until(self, mark: str, why: str) -> str:
        """The text from behind the mark where we stand to the next one."""
        start = self.pos
        end = self.text.find(mark, start + 1)
        if end < 0:
            raise self.error(why, start)
        self.pos = end + 1
        return self.text[start + 1:end]

    def ansi(self) -> str:
        match = ANSI_QUOTED.match(self.text, self.pos)
        if match is None:
            raise self.error("the $' is never closed")
        self.pos = match.end()
        return re.sub(r"\\(.)", lambda m: ANSI.get(m[1], m[0]), match[1], flags=re.S)

    def need(self, opening: str, closing: str) -> str:
        start = self.pos
        inside = self.balanced(opening, closing)
        if inside is None:
            raise self.error("the $( is never closed", start)
        return inside

    def balanced(self, opening: str, closing: str) -> str | None:
        """The text between the brackets where we stand, taken with them; None, and nothing taken, when they are not closed so."""
        start, depth, at = self.pos, 0, self.pos + len(opening)
        while at < len(self.text):
            letter = self.text[at]
            if letter == "\\":
                at += 1
            elif letter == '"' or (letter in "'`" and len(closing) == 1):
                match = QUOTATION.match(self.text, at)
                if match is None:
                    return None
                at = match.end() - 1
            elif letter == "(":
                depth += 1
            elif letter == ")" and depth:
                depth -= 1
            elif letter == ")":
                if not self.text.startswith(closing, at):
                    return None
                self.pos = at + len(closing)
                return self.text[start + len(opening):at]
            at += 1
        return None


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbouring letters as one text."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and piece.kind == last.kind == "text" and piece.quoted == last.quoted:
            joined[-1] = Piece("text", last.text + piece.text, piece.quoted)
        else:
            joined.append(piece)
    return tuple(joined)
