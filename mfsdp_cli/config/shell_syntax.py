"""Bash scripts as trees: the grammar that launch scripts use. Nothing is run and nothing is expanded; `shell` does the reading.

Covers simple commands, lists, pipes, redirections, here-documents, functions, if, for, while, case, [[ ]], (( )), arrays, and all
quoting. Command substitutions and the insides of arithmetic stay text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n=\s]*\])?(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[^\]\n]*\])?")
OPERATOR = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//?|:|\^\^?|,,?|@")
OPERATORS = re.compile(r"&&|\|\||;;&|;;|;&|\|&|&>>|&>|<<<|<<-|<<|>>|>&|<&|<>|>\||[;&|<>()\n]")
RUN, QUOTED_RUN = re.compile(r"[^\s\\'\"`$};&|<>()]*"), re.compile(r"[^\\\"`$}]*")  # letters that mean nothing but themselves
REDIRECTIONS = {"<", ">", ">>", "<<", "<<-", "<<<", ">&", "<&", "<>", ">|", "&>", "&>>"}
QUOTATION = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|`(?:[^`\\]|\\.)*`', re.S)
ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}
DECLARE = {"export", "declare", "local", "readonly", "typeset"}
ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "\\": "\\", "'": "'", '"': '"'}


class ShellSyntaxError(ValueError):
    """What stands in a line that is no shell."""

    def __init__(self, line: int, why: str):
        super().__init__(why)
        self.line, self.why = line, why


@dataclass(frozen=True)
class Piece:
    """Part of a word. kind: text, parameter (${prefix name [index] operator argument}), arithmetic or command (text is its inside)."""

    kind: str
    text: str
    quoted: bool
    prefix: str = ""
    index: str = ""
    operator: str = ""
    argument: Word | None = None


@dataclass(frozen=True)
class Word:
    pieces: tuple[Piece, ...]
    source: str
    line: int

    @property
    def literal(self) -> str | None:
        """The text of a word without quotes and expansions, as a keyword is."""
        return self.pieces[0].text if len(self.pieces) == 1 and self.pieces[0].kind == "text" and not self.pieces[0].quoted else None


@dataclass(frozen=True)
class Assign:
    name: str
    index: str  # with its brackets; empty: none
    append: bool
    value: Word | tuple[Word, ...]  # a tuple for NAME=( … )
    line: int


@dataclass(frozen=True)
class Simple:
    assignments: tuple[Assign, ...]
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Chain:
    """first, then (&& or ||, node) in turn; a pipe is a Chain of |."""

    first: object
    rest: tuple[tuple[str, object], ...]
    line: int


@dataclass(frozen=True)
class Not:
    node: object
    line: int


@dataclass(frozen=True)
class Block:
    nodes: tuple
    line: int
    subshell: bool = False


@dataclass(frozen=True)
class If:
    branches: tuple[tuple[Block, Block], ...]
    otherwise: Block | None
    line: int


@dataclass(frozen=True)
class For:
    name: str
    words: tuple[Word, ...] | None  # None: "$@"
    body: Block
    line: int


@dataclass(frozen=True)
class While:
    condition: Block
    body: Block
    line: int


@dataclass(frozen=True)
class Case:
    word: Word
    arms: tuple[tuple[tuple[Word, ...], Block], ...]
    line: int


@dataclass(frozen=True)
class Function:
    name: str
    body: object
    line: int


@dataclass(frozen=True)
class Arithmetic:
    text: str
    line: int


@dataclass
class Parser:
    """Recursive descent over the characters; `parse` gives the script. Raises ShellSyntaxError, and RecursionError when nested absurdly."""

    text: str
    pos: int = 0
    here: list[tuple[str, bool]] = field(default_factory=list)  # here-documents whose bodies follow the next line break

    def __post_init__(self):
        self.starts = [0] + [m.end() for m in re.finditer("\n", self.text)]

    def parse(self) -> Block:
        block = self.block(set())
        if self.pos < len(self.text):
            raise self.error(f"{self.peek_operator() or self.rest_of_line()} has no beginning")
        return block

    # --- places -----------------------------------------------------------------------------------------------------

    def line(self, pos: int | None = None) -> int:
        return bisect_right(self.starts, self.pos if pos is None else pos)

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
        match = re.compile(r"[^\s;&|<>()'\"\\$`#]+(?=[\s;&|<>()]|$)").match(self.text, self.pos)
        return match[0] if match else ""

    def expect(self, keyword: str, since: int) -> None:
        self.skip_lines()
        if self.keyword() != keyword:
            found = self.rest_of_line() or "the end"
            raise self.error(f"{found} where {keyword} was expected, for line {self.line(since)}")
        self.pos += len(keyword)

    # --- commands ---------------------------------------------------------------------------------------------------

    def block(self, ends: set[str]) -> Block:
        """Commands up to one of the keywords or operators, which is not taken."""
        nodes, start = [], self.line()
        while True:
            self.skip_lines()
            while self.take(";", "&"):
                self.skip_lines()
            found = self.peek_operator()
            if self.pos >= len(self.text) or found in (")", ";;", ";&", ";;&"):
                break
            if self.keyword() in (ends | (ENDS if not ends else set())):
                break
            nodes.append(self.chain())
        return Block(tuple(nodes), start)

    def chain(self):
        line, first, rest = self.line(), self.pipe(), []
        while operator := self.take("&&", "||"):
            self.skip_lines()
            rest.append((operator, self.pipe()))
        return Chain(first, tuple(rest), line) if rest else first

    def pipe(self):
        self.skip_blanks()
        line = self.line()
        if self.keyword() == "!":
            self.pos += 1
            return Not(self.pipe(), line)
        first, rest = self.command(), []
        while operator := self.take("|", "|&"):
            self.skip_lines()
            rest.append(("|", self.command()))
        return Chain(first, tuple(rest), line) if rest else first

    def command(self):
        self.skip_blanks()
        start, line, word = self.pos, self.line(), self.keyword()
        compound = {"if": self.if_, "for": self.for_, "while": self.while_, "until": self.while_, "case": self.case}.get(word)
        if compound is not None:
            self.pos += len(word)
            node = compound(start)
        elif word == "{":
            self.pos += 1
            node = self.block({"}"})
            self.expect("}", start)
        elif self.at("((") and (inside := self.balanced("((", "))")) is not None:
            node = Arithmetic(inside, line)
        elif self.at("("):
            self.pos += 1
            node = Block(self.block({")"}).nodes, line, subshell=True)
            if not self.take(")"):
                raise self.error("the ( is never closed", start)
        elif match := re.compile(r"(?:function[ \t]+([\w:.-]+)[ \t]*(?:\([ \t]*\))?|([\w:.-]+)[ \t]*\([ \t]*\))").match(self.text, start):
            self.pos = match.end()
            self.skip_lines()
            return Function(match[1] or match[2], self.command(), line)
        elif word in ENDS:
            raise self.error(f"{word} without a beginning")
        else:
            return self.simple()
        while self.redirection():
            pass
        return node

    def if_(self, start: int) -> If:
        branches, otherwise = [], None
        while True:
            condition = self.block({"then"})
            self.expect("then", start)
            branches.append((condition, self.block({"elif", "else", "fi"})))
            if self.keyword() != "elif":
                break
            self.pos += len("elif")
        if self.keyword() == "else":
            self.pos += len("else")
            otherwise = self.block({"fi"})
        self.expect("fi", start)
        return If(tuple(branches), otherwise, self.line(start))

    def for_(self, start: int) -> For:
        self.skip_blanks()
        if self.at("((") and self.balanced("((", "))") is not None:
            name, words = "", ()
        else:
            match = NAME.match(self.text, self.pos)
            if match is None:
                raise self.error("for needs the name of a variable")
            name, words, self.pos = match[0], None, match.end()
            self.skip_lines()
            if self.keyword() == "in":
                self.pos += 2
                words = tuple(self.words())
        self.take(";")
        self.expect("do", start)
        body = self.block({"done"})
        self.expect("done", start)
        return For(name, words, body, self.line(start))

    def while_(self, start: int) -> While:
        condition = self.block({"do"})
        self.expect("do", start)
        body = self.block({"done"})
        self.expect("done", start)
        return While(condition, body, self.line(start))

    def case(self, start: int) -> Case:
        word, arms = self.word(), []
        self.expect("in", start)
        while True:
            self.skip_lines()
            if self.keyword() == "esac":
                self.pos += len("esac")
                return Case(word, tuple(arms), self.line(start))
            self.take("(")
            patterns = [self.word()]
            while self.take("|"):
                patterns.append(self.word())
            if not self.take(")"):
                raise self.error(f"{self.rest_of_line() or 'the end'} where a pattern and ) were expected, for line {self.line(start)}")
            arms.append((tuple(patterns), self.block({"esac"})))
            self.take(";;", ";&", ";;&")

    def simple(self) -> Simple:
        """Assignments, words and redirections up to the end of the command."""
        line, assignments, words, redirected = self.line(), [], [], False
        while True:
            if self.redirection():
                redirected = True
                continue
            declares = not words or words[0].literal in DECLARE
            match = ASSIGNMENT.match(self.text, self.pos) if declares else None
            if match is not None:
                assignments.append(self.assignment(match))
            elif self.pos >= len(self.text) or self.peek_operator():
                break
            else:
                words.append(self.word())
                if len(words) == 1 and words[0].literal == "[[":
                    words += self.inside_test()
        if not words and not assignments and not redirected:
            raise self.error(f"{self.rest_of_line() or 'the end'} where a command was expected")
        return Simple(tuple(assignments), tuple(words), line)

    def assignment(self, match: re.Match) -> Assign:
        line, self.pos = self.line(), match.end()
        value: Word | tuple[Word, ...]
        if self.at("("):
            start = self.pos
            self.pos += 1
            items = []
            self.skip_lines()
            while not self.at(")"):
                if self.pos >= len(self.text):
                    raise self.error(f"the ( of {match[1]} is never closed", start)
                if self.peek_operator():
                    raise self.error(f"{self.peek_operator()} within the ( ) of {match[1]}, which begins in line {self.line(start)}")
                items.append(self.word())
                self.skip_lines()
            self.pos += 1
            value = tuple(items)
        else:
            value = self.word(empty=True)
        return Assign(match[1], match[2] or "", match[3] == "+", value, line)

    def words(self) -> list[Word]:
        found = []
        self.skip_blanks()
        while self.pos < len(self.text) and not self.peek_operator():
            found.append(self.word())
            self.skip_blanks()
        return found

    def inside_test(self) -> list[Word]:
        """The words up to ]], where operators stand for themselves."""
        found, start = [], self.pos
        while True:
            self.skip_lines()
            if self.pos >= len(self.text):
                raise self.error("the [[ is never closed", start)
            if operator := self.peek_operator():
                found.append(Word((Piece("text", operator, False),), operator, self.line()))
                self.pos += len(operator)
                continue
            found.append(self.word())
            if found[-1].literal == "]]":
                return found

    def redirection(self) -> bool:
        """Take one, if one stands here. Where the output goes is of no interest."""
        self.skip_blanks()
        match = re.compile(r"\d+(?=[<>])|\{\w+\}(?=[<>])").match(self.text, self.pos)
        start, self.pos = self.pos, match.end() if match else self.pos
        operator = self.peek_operator()
        if operator not in REDIRECTIONS:
            self.pos = start
            return False
        self.pos += len(operator)
        self.skip_blanks()
        target = self.word()
        if operator in ("<<", "<<-"):
            self.here.append(("".join(p.text for p in target.pieces), operator == "<<-"))
        return True

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
        match = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])").match(self.text, start)
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
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.S).match(self.text, self.pos)
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
