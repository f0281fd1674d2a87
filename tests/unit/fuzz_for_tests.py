"""Random inputs for the command line, and the command line run on them in this process, with a deadline.

Everything is drawn through hypothesis, so that what fails shrinks. The strategies are made from the schema: a new setting is
fuzzed without a line here.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import traceback
from collections import Counter
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st
from typer.main import get_command

from mfsdp_cli import cli
from mfsdp_cli.config.aliases import TABLES
from mfsdp_cli.config.values import leaves
from mfsdp_cli.errors import EXIT_CODES

KINDS = ("sft", "grpo")
MOST_CPU_S = 10.0  # of one command in this process; most take milliseconds
MOST_WAIT_S = 120.0  # by the clock, which runs on while other programs have the machine
LONGEST_OUTPUT = 20_000_000

COMMAND = get_command(cli.app)  # calling the app makes it anew each time, which takes longer than most commands

# ---------------------------------------------------------------- running the command line


class Hang(BaseException):
    """No Exception: nothing may take it for a mistake of the user's."""


@dataclass
class Outcome:
    args: list[str]
    code: object
    out: bytes
    err: bytes
    fault: str = ""  # what is wrong with it, in one line that is the same for the same cause

    @property
    def data(self) -> dict:
        return json.loads(self.out)


@contextmanager
def _deadline():
    def stop(*_):
        raise Hang

    limits = ((signal.SIGPROF, signal.ITIMER_PROF, MOST_CPU_S), (signal.SIGALRM, signal.ITIMER_REAL, MOST_WAIT_S))
    before = [signal.signal(number, stop) for number, _, _ in limits]
    for _, timer, seconds in limits:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(limits, before):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def call(args: list[str], environ: dict[str, str] | None = None) -> Outcome:
    """`mfsdp ARGS` as the console script runs it, and what is wrong with how it ended."""
    before = sys.argv, sys.stdout, sys.stderr, cli.app, dict(os.environ)
    out, err = io.BytesIO(), io.BytesIO()
    stdout = io.TextIOWrapper(out, encoding="utf-8", write_through=True)
    stderr = io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace", write_through=True)
    code, cause = None, ""
    sys.argv, sys.stdout, sys.stderr, cli.app = ["mfsdp", *args], stdout, stderr, COMMAND
    os.environ.update(environ or {})
    os.environ["MFSDP_DEBUG"] = "1"
    try:
        with _deadline():
            cli.main()
    except SystemExit as end:
        code = end.code
    except Hang:
        cause = "hang in " + _place(traceback.format_exc())
    except BaseException:
        cause = "escaped " + _place(traceback.format_exc())
    finally:
        sys.argv, sys.stdout, sys.stderr, cli.app, variables = before
        os.environ.clear()
        os.environ.update(variables)
    outcome = Outcome(args, code, out.getvalue(), err.getvalue())
    outcome.fault = cause or _fault(outcome)
    return outcome


def _place(story: str) -> str:
    """The last line of a traceback, and the innermost line of ours that it passes."""
    ours = [line.strip() for line in story.splitlines() if 'File "' in line and "mfsdp_cli" in line]
    last = story.strip().splitlines()[-1]
    return f"{ours[-1].split('mfsdp_cli', 1)[1] if ours else '?'}: {last.split(':', 1)[0]}"


def _fault(outcome: Outcome) -> str:
    err = outcome.err.decode("utf-8", "replace")
    if "internal error" in err or "Traceback (most recent call last)" in err:
        return "internal error in " + _place(err)
    if outcome.code not in EXIT_CODES:
        return f"exit code {outcome.code!r}"
    if len(outcome.out) + len(outcome.err) > LONGEST_OUTPUT:
        return "endless output"
    if "--json" in outcome.args and "--help" not in outcome.args:
        return _json_fault(outcome)
    return ""


def _json_fault(outcome: Outcome) -> str:
    def no_constant(name):
        raise ValueError(f"{name} is no JSON")

    try:
        data = json.loads(outcome.out.decode("utf-8"), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        return f"stdout is not one JSON object: {type(error).__name__}"
    if not isinstance(data, dict) or data.get("exit_code") != outcome.code or data.get("ok") != (outcome.code == 0):
        return "the JSON object does not tell the exit code"
    return ""


@dataclass
class Harvest:
    """What a fuzzing run has seen: how often each exit code, and the shortest example of each fault."""

    codes: Counter = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    def add(self, outcome: Outcome, story: str) -> None:
        self.codes[outcome.code if not outcome.fault else "FAULT"] += 1
        if outcome.fault and len(story) < len(self.faults.get(outcome.fault, story + " ")):
            self.faults[outcome.fault] = story + "\n" + outcome.err.decode("utf-8", "replace")[-2500:]


# ---------------------------------------------------------------- values and keys

ODD_TEXT = st.sampled_from([
    "", " ", "null", "~", "None", "true", "False", "nan", "inf", "-inf", "1e308", "1e999", "-1", "0", "1_000", "0x10", "९", "١٢", "ß", "İ",
    "\ufeff",
    "a\tb", "a\nb", "\u2028", "\udcff", "é" * 300, "x" * 5000, "9" * 5000, "-" + "9" * 30, "1e-400", "${x.y}", "[1, 2", "{a: [b", "[]",
    "{}", "'", '"',
    "!!python/object/apply:os.system [ls]", "&a [*a]", "*a", "- - -", "? x", "a: b: c", "%", "%s", "../..", "/", "/dev/null",
    "/dev/zero/x", "~", "~x",
    "a:b", "x" * 300 + "/y", "1h30m", "99999999999d", "80GiB", "[[[[[[1]]]]]]", "[null]", "[true, 1, x]", "0.1", "1.", ".5", "+1", "1e5",
    "NaN",
])
TEXT = st.one_of(ODD_TEXT, st.text(max_size=20))
INTEGERS = st.one_of(st.sampled_from([0, 1, 2, 3, 7, 8, 64, 1000, 2**31 - 1, 2**31, 2**63, 10**9, 10**20, 10**400, -1, -2, -10**9]),
                     st.integers(-3, 70))
FLOATS = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0.0, 0.5, 1.0, 1e308, 5e-324, -1.0, 1e16]))


def legal(leaf) -> st.SearchStrategy[str]:
    """A legal value, as text."""
    if leaf.choices:
        one = st.sampled_from([str(c) for c in leaf.choices])
    elif "int" in leaf.type:
        low = 0 if leaf.low is None else int(leaf.low)
        high = low + 64 if leaf.high is None else int(leaf.high)
        one = st.one_of(st.integers(low, min(high, low + 16)), st.just(high),
                        st.integers(low, low + 10**7).filter(lambda n: n <= high)).map(str)
    elif "float" in leaf.type:
        low, high = 0.0 if leaf.low is None else leaf.low, 1e6 if leaf.high is None else leaf.high
        one = st.one_of(st.just(low), st.just(high), st.floats(low, high)).map(repr)
    elif leaf.kind == "bool":
        one = st.sampled_from(["True", "False", "true"])
    elif leaf.kind == "dict":
        return st.one_of(st.just("{}"), st.tuples(st.sampled_from(["a", "fp8", "num_layers", "moe_aux_loss_coeff", "attention_backend"]),
                                                  TEXT)
                         .map(lambda pair: json.dumps(dict([pair]))))
    else:
        one = TEXT
    if leaf.kind.startswith("list"):
        return st.lists(one, max_size=4).map(lambda items: "[" + ", ".join(items) + "]")
    return st.one_of(one, st.just("null")) if leaf.optional else one


def edge(leaf) -> st.SearchStrategy[str]:
    """Just outside, far outside, of another type."""
    bounds = [str(type(b)(b + step)) for b in (leaf.low, leaf.high) if b is not None for step in (-1, 1)] + [str(b) for b in (leaf.low,
                                                                                                                              leaf.high)]
    return st.one_of(st.sampled_from(bounds), INTEGERS.map(str), FLOATS.map(repr), TEXT)


def value_for(leaf) -> st.SearchStrategy[str]:
    return st.one_of(legal(leaf), legal(leaf), edge(leaf))


def misspelt(key: str) -> st.SearchStrategy[str]:
    return st.tuples(st.integers(0, len(key)), st.sampled_from(["", ".", "x", "..", "_", "\u0301", "=", "\n"])).map(
        lambda change: key[:change[0]] + change[1] + key[change[0] + 1:])


def pairs(kind: str) -> st.SearchStrategy[tuple[str, str]]:
    """(key, value as text): known keys, verl's names of them, keys of the other kind, misspelt ones, any text."""
    known, table = leaves(kind), TABLES[kind]
    of_leaf = st.sampled_from(list(known)).flatmap(lambda key: st.tuples(st.just(key), value_for(known[key])))
    numbers = st.sampled_from([k for k, leaf in known.items() if leaf.kind == "int"]).flatmap(
        lambda key: st.tuples(st.just(key), st.one_of(legal(known[key]), INTEGERS.map(str))))
    renamed = st.sampled_from(list(table.renamed)).flatmap(
        lambda alias: st.tuples(st.just(alias), value_for(known[table.renamed[alias]]) if table.renamed[alias] in known else TEXT))
    inside = st.tuples(st.sampled_from(["engine.override_transformer_config", "checkpoint.mbridge_config"]),
                       st.sampled_from(["fp8", "a", "", "a.b", "attention_dropout", "moe_router_dtype", "distributed_filesystem", "0"]),
                       TEXT).map(
        lambda t: (f"{t[0]}.{t[1]}", t[2]))
    wrong = st.tuples(st.one_of(st.sampled_from(list(known)).flatmap(misspelt), st.sampled_from(["model", "data", "", ".", "optim."]), TEXT,
                                st.sampled_from(list(leaves("grpo" if kind == "sft" else "sft")))), TEXT)
    return st.one_of(of_leaf, of_leaf, of_leaf, numbers, numbers, renamed, inside, wrong)


def as_argument(text: str) -> str:
    """No argument and no variable of a process can hold a NUL."""
    return text.replace("\0", "")


def assignments(kind: str, most: int = 6) -> st.SearchStrategy[list[str]]:
    return st.lists(pairs(kind).map(lambda pair: as_argument(f"{pair[0]}={pair[1]}")), max_size=most)


# ---------------------------------------------------------------- bytes and trees


@st.composite
def damaged(draw, data: bytes) -> bytes:
    """A few cuts, changed bytes, insertions and repetitions, more of them near the end, where parquet has its footer."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        size = max(1, len(data))
        at = draw(st.one_of(st.integers(0, size - 1), st.integers(1, min(size, 1200)).map(lambda back: size - back),
                            st.integers(0, min(size - 1, 40))))
        kind = draw(st.sampled_from(["flip", "flip", "flip", "cut", "insert", "repeat", "delete", "ones"]))
        if kind == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif kind == "ones":
            data[at:at + draw(st.integers(1, 8))] = b"\xff" * 8
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=12))
        elif kind == "repeat":
            data[at:at] = data[at:at + draw(st.integers(1, 200))]
        else:
            del data[at:at + draw(st.integers(1, 60))]
    return bytes(data)


JSON_VALUES = st.one_of(
    st.sampled_from(["null", "true", "false", "0", "1", "-1", "2", "3", "1e308", "-1e308", "1e999", "NaN", "Infinity", "-Infinity",
                     "9" * 400, "9" * 5000, "0.5", "2.0", '""', '"8"',
                     "[]", "{}", "[null]", '["x"]', "[[]]", "[" * 200 + "]" * 200, '{"a":' * 150 + "1" + "}" * 150, "[" * 100_000,
                     '"\\ud800"', '"\\u0000"', "4294967296"]),
    st.integers(-5, 10**7).map(str), st.text(max_size=8).map(json.dumps), st.floats(allow_nan=False, allow_infinity=False).map(repr),
)


@st.composite
def json_text(draw, tree, most: int = 3) -> bytes:
    """The JSON of a tree in which up to `most` values, at any depth, are other values, gone, or have new names."""
    marks: dict[str, str] = {}
    tree = deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(tree))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(["replace", "replace", "replace", "delete", "rename"]))
        if action == "delete":
            del holder[key]
        elif action == "rename" and isinstance(holder, dict):
            holder[draw(TEXT)] = holder.pop(key)
        else:
            mark = f"@{len(marks)}@"
            marks[f'"{mark}"'] = draw(JSON_VALUES)
            holder[key] = mark
    text = json.dumps(tree)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text.encode()


def _places(tree):
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key])


def json_bytes(tree) -> st.SearchStrategy[bytes]:
    plain = json.dumps(tree).encode()
    return st.one_of(json_text(tree), json_text(tree), damaged(plain),
                     st.sampled_from([b"", b"null", b"[]", b"\xef\xbb\xbf{}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 6000]))


# ---------------------------------------------------------------- YAML

YAML_PIECES = st.sampled_from([
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "\n".join(["l0: &l0 [x, x, x, x, x, x, x, x, x]",
               *(f"l{i}: &l{i} [" + ", ".join([f"*l{i - 1}"] * 9) + "]" for i in range(1, 10))]) + "\ndata:\n  train_files: *l9\n",
    "engine:\n  override_transformer_config: &m {a: 1, b: *m}\n", "data: &d\n  train_files: *d\n", "model: *nothing\n",
    "<<: {optim: {lr: 1}}\n",
    "engine:\n  override_transformer_config:\n" + "\n".join("    " + "  " * i + f"k{i}:" for i in range(100)) + " 1\n",
    "model: !!python/object/apply:os.system [ls]\n", "optim:\n  lr: !!float 1\n", "data:\n\ttrain_files: x\n", "optim: {lr: 1, lr: 2}\n",
    "optim:\n  lr: 1\noptim:\n  lr: 2\n",
    "--- \n...\n---\nmodel: {}\n", "? [a, b]\n: c\n", "? {a: 1}\n", "- 1\n- 2\n", "just text\n",
    "model: {path: " + "[" * 400 + "]" * 400 + "}\n", "[" * 20_000, "{a: " * 3000, "- " * 5000 + "x\n",
    "\ufeffmodel: {}\n", "%YAML 9.9\n---\n", "%TAG ! tag:x,2000:\n---\nmodel: !y {}\n", "model:\n  path: |\n    a\n     b\n   c\n",
    "model: >-\n", "optim.lr: 1e-5\noptim: {lr: 2e-5}\n", "'': 1\n", "? \n: 1\n",
    "data: null\nmodel:\n", "optim:\n  betas: [0.9, [0.95]]\n", "optim:\n  betas: {a: 1}\n",
    "trainer: {logger: [console, null, {a: b}]}\n", "null: 1\ntrue: 2\n", "1: 2\n", "x\u2028y: 1\n", "x: \x00\n", "a: \"\\uD800\"\n",
    "checkpoint: {mbridge_config: {? [a] : b}}\n", "checkpoint: {mbridge_config: {a: {? {x: y} : b}}}\n",
    "engine: {override_transformer_config: {a: [{? [q] : 1}]}}\n",
])


@st.composite
def yaml_bytes(draw, kind: str, base: str = "") -> bytes:
    lines = [base]
    for key, value in draw(st.lists(pairs(kind), max_size=5)):
        section, _, name = key.partition(".")
        style = draw(st.sampled_from(["nested", "flat", "flow", "quoted"]))
        quoted = json.dumps(value) if style == "quoted" else value
        lines.append({"nested": f"{section}:\n  {name}: {quoted}",
                      "flow": f"{section}: {{{name}: {quoted}}}"}.get(style, f"{key}: {quoted}"))
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, len(lines))), draw(YAML_PIECES))
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return draw(st.one_of(st.just(text), damaged(text)))


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
