"""What a bash script is made of, as `shell_syntax` reads it: words of pieces, simple commands, compound ones."""

from __future__ import annotations

from dataclasses import dataclass


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
