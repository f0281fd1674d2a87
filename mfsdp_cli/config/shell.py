"""What a bash script would run, read without running it: its commands with their words, as far as the script alone decides them.

Variables, defaults, arrays, arithmetic, loops over known words, functions and decidable conditions are followed. A word that
depends on something else (the output of a command, a variable from outside, a condition that cannot be decided) says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from mfsdp_cli.config.shell_math import arithmetic, test
from mfsdp_cli.config.shell_syntax import (
    Arithmetic, Assign, Block, Case, Chain, For, Function, If, Not, Parser, Piece, ShellSyntaxError, Simple, While, Word,
)

MOST_STEPS = 20_000  # commands read; a script that loops more is no launch script
LONGEST_TEXT = 100_000
MOST_WORDS = 10_000
DEFAULTS = (":-", "-", ":=", "=", ":?", "?", ":+", "+")
SUCCEED = {"cd", "mkdir", "echo", "set", "export", "declare", "local", "readonly", "typeset", "unset", "shift", "sleep", "rm", "true", ":"}
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


@dataclass(frozen=True)
class Command:
    """A command that the script would run. doubt: the condition that it hangs on, when that cannot be decided."""

    words: tuple[Text, ...]
    environ: dict[str, Text]
    line: int
    doubt: str = ""


@dataclass
class Script:
    """commands in their order; exports: what is exported at the end; notes: (line, what was not followed)."""

    commands: list[Command] = field(default_factory=list)
    exports: dict[str, Text] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)


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
    pass


def read_script(text: str, variables: dict[str, str], arguments: list[str] | None = None) -> Script:
    """Read a script that would be started with these environment variables and arguments (None: not known, "$@" is empty).

    Never raises for what the text may be: faults hold what is no shell, with the line from which nothing was read.
    """
    script = Script()
    state = State({name: Text(value) for name, value in variables.items()}, None if arguments is None else tuple(map(Text, arguments)))
    reader = Reader(script)
    try:
        reader.run(Parser(text.replace("\r\n", "\n")).parse(), state)
    except ShellSyntaxError as e:
        script.faults.append((e.line, e.why))
    except TooLong:
        script.faults.append((reader.line, "the script goes on for too long: reading stopped here"))
    except RecursionError:
        script.faults.append((reader.line or 1, "nested too deeply to be read"))
    script.exports = reader.exports(state)
    script.notes = list(dict.fromkeys(script.notes))
    return script


class Reader:
    """Walks over the tree. Every run_ method returns the exit status: True, False, or None when it cannot be known."""

    def __init__(self, script: Script):
        self.script, self.steps, self.line, self.doubts, self.depth = script, 0, 0, [], 0

    def run(self, node, state: State) -> bool | None:
        self.steps += 1
        self.line = node.line
        if self.steps > MOST_STEPS:
            raise TooLong
        return getattr(self, f"run_{type(node).__name__.lower()}")(node, state)

    def exports(self, state: State) -> dict[str, Text]:
        known = {name: state.variables[name] for name in sorted(state.exported) if name in state.variables}
        return {name: value for name, value in known.items() if isinstance(value, Text)}

    # --- compound commands ------------------------------------------------------------------------------------------

    def run_block(self, block: Block, state: State) -> bool | None:
        inner, status = state.copy() if block.subshell else state, True
        for node in block.nodes:
            if inner.stopped:
                break
            status = self.run(node, inner)
        return status

    def run_not(self, node: Not, state: State) -> bool | None:
        status = self.run(node.node, state)
        return None if status is None else not status

    def run_chain(self, chain: Chain, state: State) -> bool | None:
        if chain.rest[0][0] == "|":  # every part of a pipe has a shell of its own
            for node in (chain.first, *(node for _, node in chain.rest)):
                self.run(node, state.copy())
            return None
        status = self.run(chain.first, state)
        for operator, node in chain.rest:
            if state.stopped:
                break
            if status is None:
                after = self.maybe(node, state, chain.line)
                status = after if after is (operator == "||") else None
            elif status is (operator == "&&"):
                status = self.run(node, state)
        return status

    def run_if(self, node: If, state: State) -> bool | None:
        for i, (condition, body) in enumerate(node.branches):
            status = self.run(condition, state)
            if state.stopped:
                return None
            if status:
                return self.run(body, state)
            if status is None:
                rest = If(node.branches[i + 1:], node.otherwise, node.line)
                self.either([body, rest if rest.branches else node.otherwise], state, node.line)
                return None
        return self.run(node.otherwise, state) if node.otherwise else True

    def run_for(self, node: For, state: State) -> bool | None:
        words = self.arguments(state) if node.words is None else [t for word in node.words for t in self.expand(word, state)]
        if not node.name or any(t.why for t in words):
            state.variables[node.name] = _unknown(f"${node.name}", f"${node.name} changes in the loop of line {node.line}", node.line)
            self.maybe(node.body, state, node.line)
            return None
        for word in words:
            state.variables[node.name] = word
            self.run(node.body, state)
            if state.stopped in ("break", "continue"):
                ended, state.stopped = state.stopped == "break", ""
                if ended:
                    break
            if state.stopped:
                break
        return True

    def run_while(self, node: While, state: State) -> bool | None:
        """How often cannot be known, nor so what the variables are that change in it."""
        before = dict(state.variables)
        self.maybe(Block((node.condition, node.body), node.line), state, node.line)
        for name, value in state.variables.items():
            if before.get(name) != value:
                state.variables[name] = _unknown(f"${name}", f"${name} changes in the loop of line {node.line}", node.line)
        return None

    def run_case(self, node: Case, state: State) -> bool | None:
        word = _one(self.expand(node.word, state), node.word)
        patterns = [[_one(self.expand(p, state), p) for p in arm[0]] for arm in node.arms]
        if word.why or any(p.why for arm in patterns for p in arm):
            self.either([*(body for _, body in node.arms), None], state, node.line)
            return None
        for arm, (_, body) in zip(patterns, node.arms, strict=True):
            if any(fnmatchcase(word.text, p.text) for p in arm):
                return self.run(body, state)
        return True

    def run_function(self, node: Function, state: State) -> bool:
        state.functions[node.name] = node
        return True

    def run_arithmetic(self, node: Arithmetic, state: State) -> bool | None:
        for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)", node.text):
            changed = name[0] or name[1]
            state.variables[changed] = _unknown(f"${changed}", f"${changed} is changed by (( )) in line {node.line}", node.line)
        value = arithmetic(node.text, lambda name: self.number(name, state))
        return None if value is None else value != 0

    def maybe(self, node, state: State, line: int) -> bool | None:
        """A command that may run or not."""
        return self.either([node, None], state, line)

    def either(self, nodes: list, state: State, line: int) -> bool | None:
        """One of these is run, which cannot be known: what they set differently is unknown behind them. A way that exits ends there."""
        self.doubts.append(f"the condition in line {line} cannot be decided")
        ends, status = [], None
        for node in nodes:
            end = state.copy()
            status = self.run(node, end) if node is not None else status
            if end.stopped in ("break", "continue"):
                self.script.notes.append((line, "a loop that may leave out rounds is read as if it did not"))
                end.stopped = ""
            ends.append(end)
        self.doubts.pop()
        going = [end for end in ends if not end.stopped]
        if not going:
            state.stopped = ends[0].stopped
            return status
        first = going[0]
        for name in {name for end in going for name in end.variables}:
            values = [end.variables.get(name) for end in going]
            if any(value != values[0] for value in values):
                first.variables[name] = _unknown(f"${name}", f"${name} depends on the condition in line {line}", line)
        state.variables, state.functions = first.variables, first.functions
        state.exported = set().union(*(end.exported for end in going))
        alike = all((end.shifted, end.positional) == (first.shifted, first.positional) for end in going)
        state.shifted, state.positional = first.shifted, first.positional if alike else None
        return status

    # --- simple commands --------------------------------------------------------------------------------------------

    def run_simple(self, node: Simple, state: State) -> bool | None:
        words = [text for word in node.words for text in self.expand(word, state)]
        name = words[0].text if words and not words[0].why else ""
        if not words or name in ("export", "declare", "local", "readonly", "typeset"):
            return self.declare(name, node, words, state)
        own = state.copy()  # NAME=value before a command is for that command alone
        for assign in node.assignments:
            self.assign(assign, own)
            own.exported.add(assign.name)
        if (function := state.functions.get(name)) is not None:
            return self.call(function, words[1:], state)
        if name in ("[", "[[", "test"):
            return test(name, words, lambda variable: self.is_set(variable, state))
        builtin = getattr(self, "do_source" if name == "." else f"do_{name}", None)
        if builtin is not None:
            return builtin(words, node, state)
        doubt = self.doubts[-1] if self.doubts else ""
        self.script.commands.append(Command(tuple(words), self.exports(own), node.line, doubt))
        return True if name in SUCCEED else False if name == "false" else None

    def declare(self, name: str, node: Simple, words: list[Text], state: State) -> bool:
        for assign in node.assignments:
            self.assign(assign, state)
        named = [assign.name for assign in node.assignments]
        options = [t.text for t in words[1:] if t.text.startswith("-")]
        for text in words[1:]:
            if not text.text.startswith("-") and not text.why:
                variable, equals, value = text.text.partition("=")
                named.append(variable)
                if equals:
                    state.variables[variable] = replace(text, text=value)
        if name == "export" or any("x" in option for option in options):
            state.exported |= set(named)
        return True

    def assign(self, assign: Assign, state: State) -> None:
        old = state.variables.get(assign.name, ())
        if isinstance(assign.value, tuple):
            if any(re.match(r"\[.*\]=", word.source) for word in assign.value):
                why = f"arrays with keys, as in line {assign.line}, are not read"
                state.variables[assign.name] = _unknown(f"${assign.name}", why, assign.line)
                return
            items = tuple(text for word in assign.value for text in self.expand(word, state))
            kept = (old if isinstance(old, tuple) else (old,)) if assign.append else ()
            state.variables[assign.name] = _bounded(kept + items)
            return
        value = replace(_one(self.expand(assign.value, state, split=False), assign.value), line=assign.line, whole=False)
        if assign.index:
            index = assign.index[1:-1]
            items = old if isinstance(old, tuple) else (old,)
            if index.isascii() and index.isdigit() and int(index) <= len(items) and not any(t.why for t in items):
                at = int(index)
                state.variables[assign.name] = items[:at] + (value,) + items[at + 1:]
            else:
                state.variables[assign.name] = _unknown(f"${assign.name}", f"the array is set by a key in line {assign.line}", assign.line)
        elif assign.append and isinstance(old, tuple) and old:
            state.variables[assign.name] = (_joined([old[0], value]), *old[1:])
        else:
            state.variables[assign.name] = _joined([old, value]) if assign.append and isinstance(old, Text) else value

    def call(self, function: Function, arguments: list[Text], state: State) -> bool | None:
        if self.depth >= 20:
            raise TooLong
        outer = state.positional, state.shifted
        state.positional, state.shifted, self.depth = tuple(arguments), 0, self.depth + 1
        status = self.run(function.body, state)
        state.positional, state.shifted = outer
        state.stopped = "" if state.stopped == "return" else state.stopped
        self.depth -= 1
        return status

    def do_unset(self, words, node, state) -> bool:
        for text in words[1:]:
            state.variables.pop(text.text, None)
        return True

    def do_shift(self, words, node, state) -> bool:
        state.shifted += int(words[1].text) if len(words) > 1 and re.fullmatch(r"\d{1,4}", words[1].text) else 1
        return True

    def do_set(self, words, node, state) -> bool:
        texts = [t.text for t in words]
        if "--" in texts:
            state.positional, state.shifted = tuple(words[texts.index("--") + 1:]), 0
        return True

    def do_exit(self, words, node, state) -> bool:
        state.stopped = words[0].text
        return True

    do_return = do_break = do_continue = do_exit

    def do_exec(self, words, node, state) -> bool | None:
        return self.run(Simple(node.assignments, node.words[1:], node.line), state) if len(node.words) > 1 else True

    def do_source(self, words, node, state) -> bool:
        named = words[1].text if len(words) > 1 else ""
        self.script.notes.append((node.line, f"{named} is another file, which is not read: what it sets is not known"))
        return True

    def do_eval(self, words, node, state) -> None:
        self.script.notes.append((node.line, "eval is not followed"))

    def do_read(self, words, node, state) -> None:
        """Builtins that set variables: read, mapfile, printf -v."""
        for text in words[1:] if words[0].text != "printf" or "-v" in [t.text for t in words] else []:
            if re.fullmatch(r"[A-Za-z_]\w*", text.text):
                state.variables[text.text] = _unknown(f"${text.text}", f"${text.text} is read from elsewhere in line {node.line}",
                                                        node.line)

    do_mapfile = do_readarray = do_printf = do_getopts = do_read

    # --- expansion --------------------------------------------------------------------------------------------------

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
            return [_unknown(word.source, f"braces, as in line {word.line}, are not expanded", word.line)]
        alone = len(word.pieces) == 1 and word.pieces[0].kind == "parameter"
        return list(_bounded(tuple(t if alone and t.line else replace(t, line=word.line) for t in map(_joined, fields))))

    def piece(self, piece: Piece, state: State, split: bool, line: int) -> list[list[Text] | None]:
        """Parts of fields; between two of them a new field begins. None in a part: nothing there."""
        if piece.kind == "text":
            return [[Text(piece.text, (), line)]]
        if piece.kind == "command":
            return [[_unknown(f"$({piece.text.strip()})", f"the output of a command, $({_short(piece.text)}), in line {line}", line)]]
        if piece.kind == "arithmetic":
            value = arithmetic(piece.text, lambda name: self.number(name, state))
            return [[_unknown(f"$(({piece.text}))", f"$(({_short(piece.text)})) in line {line} cannot be worked out", line)
                     if value is None else Text(str(value), (), line)]]
        values, inner = self.parameter(piece, state, line), _list_within(piece)
        if not split:
            return [[_joined(values, " ")]] if values else [None]
        if piece.quoted or (inner is not None and inner.quoted):
            every = inner is not None or "@" in (piece.text, piece.index)
            parts = [[value] for value in values] if every else [[_joined(values, " ")]]
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
                    _unknown("$#", f"the number of the script's arguments, in line {line}, is not known", line)]
        if name in OUTSIDE and name not in state.variables:
            return [_unknown(f"${name}", f"${name} in line {line} is {OUTSIDE[name]}", line)]
        value = state.variables.get(name)
        if value is None or isinstance(value, Text):
            return None if value is None or piece.index not in ("", "0", "@", "*") else [value]
        if piece.index in ("@", "*"):
            return list(value)
        index = piece.index or "0"
        if not (index.isascii() and index.lstrip("-").isdigit()):
            return [_unknown(f"${{{name}[{index}]}}", f"an element of {name} in line {line} that cannot be told", line)]
        return [value[int(index)]] if -len(value) <= int(index) < len(value) else None

    def parameter(self, piece: Piece, state: State, line: int) -> list[Text]:
        """The values of ${…}: one, or many for [@] and $@."""
        name, operator = piece.text, piece.operator
        source = f"${name}" + (f"[{piece.index}]" if piece.index else "")
        if piece.prefix == "!":
            return [_unknown(f"${{!{name}}}", f"the variable that ${name} names, in line {line}, is not followed", line)]
        values = self.values(piece, state, line)
        if piece.prefix == "#":
            many = piece.index in ("@", "*") or name in ("@", "*")
            if values is None or any(v.why for v in values):
                return [_unknown(f"${{#{name}}}", f"the length of ${name} in line {line} is not known", line)]
            return [Text(str(len(values) if many else len(values[0].text)), (), line)]
        if operator in DEFAULTS:
            return self.default(piece, values, state, line)
        if values is None:
            what = f"the script's argument {source}" if name.isdigit() else source
            if piece.index in ("@", "*"):
                return []
            return [_unknown(source, f"{what} is not set in the script (line {line})", line)]
        return [_edited(value, operator, self.operand(piece, state), line) for value in values] if operator else values

    def default(self, piece: Piece, values: list[Text] | None, state: State, line: int) -> list[Text]:
        """${NAME:-word}, ${NAME:+word} and their kin."""
        operator, inner = piece.operator, _list_within(piece)
        empty = not values or (operator[0] == ":" and not any(v.why or v.text for v in values))
        if operator[-1] == "?" and empty:
            return [_unknown(f"${piece.text}", f"${piece.text} must be given to the script (line {line})", line)]
        if empty is (operator[-1] == "+"):
            return [Text("", (), line)] if empty and inner is None else [] if empty else values
        found = self.parameter(inner, state, line) if inner is not None else [self.operand(piece, state)]
        if operator[-1] == "=" and len(found) == 1:
            state.variables[piece.text] = replace(found[0], whole=False)
        return found

    def operand(self, piece: Piece, state: State) -> Text:
        whole = bool(piece.argument.pieces) and all(part.quoted for part in piece.argument.pieces)
        return replace(_one(self.expand(piece.argument, state, split=False), piece.argument), whole=whole)


def _unknown(source: str, why: str, line: int) -> Text:
    return Text(source, (why,), line)


def _one(texts: list[Text], word: Word) -> Text:
    return texts[0] if len(texts) == 1 else _joined(texts, " ") if texts else Text("", (), word.line)


def _joined(texts: list[Text], between: str = "") -> Text:
    text = between.join(t.text for t in texts)
    if len(text) > LONGEST_TEXT:
        raise TooLong
    whys = tuple(dict.fromkeys(why for t in texts for why in t.why))
    return Text(text, whys, texts[0].line if texts else 0)


def _bounded(texts: tuple[Text, ...]) -> tuple[Text, ...]:
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
    return _unknown(f"${{…{operator}{operand.text}}}", f"${{…{operator}{operand.text}}} in line {line} is not followed", line)


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
