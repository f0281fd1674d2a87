"""Bash scripts as trees: the grammar that launch scripts use. Nothing is run and nothing is expanded; `shell` does the reading.

Covers simple commands, lists, pipes, redirections, here-documents, functions, if, for, while, case, [[ ]], (( )) and arrays.
`shell_words` has the words, `shell_tree` the nodes.
"""

from __future__ import annotations

import re

from mfsdp_cli.config.shell_tree import Arithmetic, Assign, Block, Case, Chain, For, Function, If, Not, Piece, Simple, While, Word
from mfsdp_cli.config.shell_words import WordParser

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n=\s]*\])?(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
FUNCTION = re.compile(r"(?:function[ \t]+([\w:.-]+)[ \t]*(?:\([ \t]*\))?|([\w:.-]+)[ \t]*\([ \t]*\))")
DESCRIPTOR = re.compile(r"\d+(?=[<>])|\{\w+\}(?=[<>])")
DEEPEST = 60  # commands within commands
REDIRECTIONS = {"<", ">", ">>", "<<", "<<-", "<<<", ">&", "<&", "<>", ">|", "&>", "&>>"}
ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}
DECLARE = {"export", "declare", "local", "readonly", "typeset"}


class Parser(WordParser):
    """Recursive descent; `parse` gives the script. Raises ShellSyntaxError, and RecursionError when nested absurdly."""

    def parse(self) -> Block:
        block = self.block(set())
        if self.pos < len(self.text):
            raise self.error(f"{self.peek_operator() or self.rest_of_line()} has no beginning")
        return block

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
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error("nested too deeply to be read")
        node = self.whole_pipe()
        self.depth -= 1
        return node

    def whole_pipe(self):
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
        elif match := FUNCTION.match(self.text, start):
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
        match = DESCRIPTOR.match(self.text, self.pos)
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
