"""What a bash script would run, read without running it: its commands with their words, as far as the script alone decides them.

Variables, defaults, arrays, arithmetic, loops over known words, functions and decidable conditions are followed. A word that
depends on something else (the output of a command, a variable from outside, a condition that cannot be decided) says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from mfsdp_cli.config.shell_expand import Expander, State, Text, TooLong, as_one, bounded, joined, unknown
from mfsdp_cli.config.shell_math import arithmetic, test
from mfsdp_cli.config.shell_syntax import DECLARE, Parser
from mfsdp_cli.config.shell_tree import Arithmetic, Assign, Block, Case, Chain, For, Function, If, Not, ShellSyntaxError, Simple, While

MOST_STEPS = 5_000  # commands read; a script that loops more is no launch script
SUCCEED = {"cd", "mkdir", "echo", "sleep", "rm", "true", ":"}


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


class Reader(Expander):
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
            state.variables[node.name] = unknown(f"${node.name}", f"${node.name} changes in the loop of line {node.line}", node.line)
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
                state.variables[name] = unknown(f"${name}", f"${name} changes in the loop of line {node.line}", node.line)
        return None

    def run_case(self, node: Case, state: State) -> bool | None:
        word = as_one(self.expand(node.word, state), node.word)
        patterns = [[as_one(self.expand(p, state), p) for p in arm[0]] for arm in node.arms]
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
            state.variables[changed] = unknown(f"${changed}", f"${changed} is changed by (( )) in line {node.line}", node.line)
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
                first.variables[name] = unknown(f"${name}", f"${name} depends on the condition in line {line}", line)
        state.variables, state.functions = first.variables, first.functions
        state.exported = set().union(*(end.exported for end in going))
        alike = all((end.shifted, end.positional) == (first.shifted, first.positional) for end in going)
        state.shifted, state.positional = first.shifted, first.positional if alike else None
        return status

    # --- simple commands --------------------------------------------------------------------------------------------

    def run_simple(self, node: Simple, state: State) -> bool | None:
        words = [text for word in node.words for text in self.expand(word, state)]
        name = words[0].text if words and not words[0].why else ""
        if not words or name in DECLARE:
            return self.declare(name, node, words, state)
        own = state.copy()  # NAME=value before a command is for that command alone
        for assign in node.assignments:
            self.assign(assign, own)
            own.exported.add(assign.name)
        while name == "env" and len(words) > 1 and re.match(r"[A-Za-z_]\w*=", words[1].text):
            variable, _, value = words.pop(1).text.partition("=")
            own.variables[variable] = replace(words[0], text=value)
            own.exported.add(variable)
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
                state.variables[assign.name] = unknown(f"${assign.name}", why, assign.line)
                return
            items = tuple(text for word in assign.value for text in self.expand(word, state))
            kept = (old if isinstance(old, tuple) else (old,)) if assign.append else ()
            state.variables[assign.name] = bounded(kept + items)
            return
        value = replace(as_one(self.expand(assign.value, state, split=False), assign.value), line=assign.line, whole=False)
        if assign.index:
            index = assign.index[1:-1]
            items = old if isinstance(old, tuple) else (old,)
            if index.isascii() and index.isdigit() and int(index) <= len(items) and not any(t.why for t in items):
                at = int(index)
                state.variables[assign.name] = items[:at] + (value,) + items[at + 1:]
            else:
                state.variables[assign.name] = unknown(f"${assign.name}", f"the array is set by a key in line {assign.line}", assign.line)
        elif assign.append and isinstance(old, tuple) and old:
            state.variables[assign.name] = (joined([old[0], value]), *old[1:])
        else:
            state.variables[assign.name] = joined([old, value]) if assign.append and isinstance(old, Text) else value

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
        named = next((t.text for t in words[1:] if not t.text.startswith("-")), words[0].text)
        self.script.notes.append((node.line, f"{named} is another file, which is not read: what it sets is not known"))
        return True

    def do_eval(self, words, node, state) -> bool | None:
        return self.run_text(joined(words[1:], " "), node.line, state)

    def do_bash(self, words, node, state) -> bool | None:
        """bash -c 'commands'; bash FILE starts another file."""
        options = [t.text for t in words[1:2] if t.text.startswith("-") and t.text.endswith("c")]
        if options and len(words) > 2:
            return self.run_text(words[2], node.line, state.copy())
        return self.do_source(words, node, state)

    do_sh = do_bash

    def run_text(self, text: Text, line: int, state: State) -> bool | None:
        if text.why:
            self.script.notes.append((line, f"what is run here is not known: {'; '.join(text.why)}"))
            return None
        if self.depth >= 20:
            raise TooLong
        self.depth += 1
        try:
            return self.run(Parser(text.text, line - 1).parse(), state)
        finally:
            self.depth -= 1

    def do_read(self, words, node, state) -> None:
        """Builtins that set variables: read, mapfile, printf -v."""
        for text in words[1:] if words[0].text != "printf" or "-v" in [t.text for t in words] else []:
            if re.fullmatch(r"[A-Za-z_]\w*", text.text):
                state.variables[text.text] = unknown(f"${text.text}", f"${text.text} is read from elsewhere in line {node.line}",
                                                        node.line)

    do_mapfile = do_readarray = do_printf = do_getopts = do_read
