"""What goes where: the product of a command on stdout, everything said to people on stderr.

Nothing here imports more than the standard library at module level, and of it only what every command needs; rich is imported when a
bar is drawn.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mfsdp_cli import __version__
from mfsdp_cli.errors import Problem

JSON_SCHEMA = 1
STEP_LINE = re.compile(r"step (\d+)/(\d+) (?=loss |reward )")  # a line with val_loss is a status line: rare, and no step done
STYLES = {"error": "\033[1;31m", "warning": "\033[1;33m", "note": "\033[1;36m", "hint": "\033[1;36m"}
DIM, RESET = "\033[2m", "\033[0m"
FIRST_STEPS = 10  # shown one by one where there is no bar, then every STEP_INTERVAL-th
STEP_INTERVAL = 10
LONGEST_SILENCE_S = 60.0


def use_color(stream: TextIO, no_color: bool = False, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour this stream: --no-color and NO_COLOR win over FORCE_COLOR, which wins over TERM=dumb and pipes."""
    if no_color or environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return environ.get("TERM") != "dumb" and stream.isatty()


class Console:
    """The two streams of one command, as its flags want them. `json` turns the product into one JSON object."""

    def __init__(self, *, json: bool = False, quiet: bool = False, verbose: bool = False, no_color: bool = False):
        self.json = json
        self.quiet = quiet
        self.verbose = verbose
        self.no_color = no_color

    def product(self, text: str | Iterable[str], data: dict) -> None:
        """Print the product: the text, or with --json the data."""
        if self.json:
            print_json(data)
        else:
            print_stdout(text if isinstance(text, str) else "\n".join(text))

    def say(self, text: str) -> None:
        """Progress and remarks; --quiet leaves them out."""
        if not self.quiet:
            print_stderr(text)

    def problems(self, problems: list[Problem], hint: str = "") -> None:
        """Everything that is wrong, at once; with --quiet only the errors."""
        shown = [p for p in problems if p.level == "error" or not self.quiet]
        if shown:
            print_stderr(format_problems(shown, hint, use_color(sys.stderr, self.no_color)))


def format_problems(problems: list[Problem], hint: str = "", color: bool = False) -> str:
    """Errors, then warnings, then notes: origin, key, value and rule on one line, the reason and the way out below."""
    parts = []
    for level in ("error", "warning", "note"):
        batch = [p for p in problems if p.level == level]
        if batch:
            count = "1 problem" if len(batch) == 1 else f"{len(batch)} problems"
            title = f"{_styled(level, color)} {count}{_common_file(batch)}" if level == "error" else _styled(level, color)
            parts.append("\n".join([title, "", *(_problem_lines(p, color) for p in batch)]))
    if hint:
        parts.append(f"{_styled('hint', color)} {hint}")
    return "\n\n".join(parts)


def _problem_lines(problem: Problem, color: bool) -> str:
    name = f"{problem.key} = {problem.found}" if problem.found else problem.key
    lines = [f"  {problem.where}  {name}" if problem.where else f"  {name}"]
    if problem.rule:
        lines[0] += f"  {DIM}[{problem.rule}]{RESET}" if color else f"  [{problem.rule}]"
    lines += [f"      {line}" for line in problem.why.splitlines()]
    if problem.fix:
        lines += [f"      {'fix: ' if i == 0 else '     '}{line}" for i, line in enumerate(problem.fix.splitlines())]
    return "\n".join(lines)


def _common_file(problems: list[Problem]) -> str:
    """ ' in FILE' when every problem comes from that one file."""
    files = {match[1] if (match := re.fullmatch(r"(.+):\d+", p.where)) else "" for p in problems}
    return f" in {files.pop()}" if len(files) == 1 and "" not in files else ""


def _styled(word: str, color: bool) -> str:
    return f"{STYLES[word]}{word}:\033[0m" if color else f"{word}:"


def print_stdout(text: str) -> None:
    """Write to stdout. A reader that has seen enough (`| head`) is no failure: the rest goes nowhere."""
    try:
        try:
            sys.stdout.write(text + "\n")
        except UnicodeEncodeError:  # a file name that is no valid text goes out as the bytes it is; what the terminal lacks, escaped
            encoding = sys.stdout.encoding or "utf-8"
            known = "".join(c if "\udc80" <= c <= "\udcff" else c.encode(encoding, "backslashreplace").decode(encoding) for c in text)
            sys.stdout.buffer.write((known + "\n").encode(encoding, "surrogateescape"))
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()


def printable(text: str) -> str:
    """Text from a model or from another's file may hold anything; what would move the cursor or colour the terminal becomes the
    replacement character."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)


def silence_stdout() -> None:
    """Point fd 1 at the null device, so that neither we nor the interpreter's last flush meet the broken pipe again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def print_stderr(text: str) -> None:
    """Write to stderr. When the terminal has hung up there is nobody left to tell, and the run must still be saved."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)


@contextmanager
def crash_folder(folder: Path):
    """An exception of ours that leaves the block takes this folder along, for `save_traceback`."""
    try:
        yield
    except Exception as bug:
        bug.crash_folder = folder
        raise


def save_traceback(bug: Exception) -> Path:
    """Write the traceback into the run folder's attempt if it got that far, else into the temporary folder."""
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(bug))
    folder = getattr(bug, "crash_folder", Path(tempfile.gettempdir()))
    handle, name = tempfile.mkstemp(prefix="mfsdp-crash-", suffix=".txt", dir=folder)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(f"mfsdp {__version__}: {' '.join(sys.argv)}\n{text}")
    return Path(name)


def print_json(data: dict) -> None:
    """One object on stdout. JSON has no NaN: such numbers become null and "non_finite" names them."""
    import json

    non_finite: list[str] = []
    clean = {"schema": JSON_SCHEMA, **_finite(data, "", non_finite)}
    if non_finite:
        clean["non_finite"] = non_finite
    text = json.dumps(clean, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(clean, allow_nan=False)
    print_stdout(text)
    print_json.count += 1


print_json.count = 0  # how many objects this process has printed: a command prints one, however it ends


def _finite(value, path: str, non_finite: list[str]):
    if isinstance(value, dict):
        return {str(k): _finite(v, f"{path}.{k}" if path else str(k), non_finite) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v, f"{path}.{i}" if path else str(i), non_finite) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        non_finite.append(path)
        return None
    return str(value) if isinstance(value, Path) else value


class StepLines:
    """Shows the trainer's console lines on stderr, and remembers the last step.

    Status lines always. Step lines at a falling rate: every one to FIRST_STEPS, then every STEP_INTERVAL-th, the last,
    and at least one every LONGEST_SILENCE_S, so that a silent log means trouble; all of them with --verbose. On a
    terminal a bar with the newest numbers stands below.
    """

    def __init__(self, console: Console, stream: TextIO | None = None, clock=time.monotonic):
        self.console = console
        self.stream = stream or sys.stderr
        self.clock = clock
        self.last_step: int | None = None
        self.steps_seen = 0
        self.last_shown_s = -math.inf
        self.bar = None

    def __enter__(self) -> StepLines:
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def feed(self, line: str) -> None:
        match = STEP_LINE.match(line)
        if match is None:
            self._show(line)
            return
        step, total = int(match[1]), int(match[2])
        self.last_step = step
        self.steps_seen += 1
        silent_s = self.clock() - self.last_shown_s
        due = self.steps_seen <= FIRST_STEPS or step % STEP_INTERVAL == 0 or step == total or silent_s >= LONGEST_SILENCE_S
        if due or self.console.verbose:
            self._show(line)
            self.last_shown_s = self.clock()
        if self.stream.isatty() and not self.console.quiet and os.environ.get("TERM") != "dumb":
            self._move_bar(step, total, line[match.end():])

    def _show(self, line: str) -> None:
        if self.bar is None:
            self.console.say(line)
        else:
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _move_bar(self, step: int, total: int, numbers: str) -> None:
        if self.bar is None:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, Progress, TextColumn

            screen = RichConsole(file=self.stream, no_color=not use_color(self.stream, self.console.no_color))
            self.bar = Progress(BarColumn(24), TextColumn("{task.completed}/{task.total}"),
                                TextColumn("{task.fields[numbers]}", markup=False), console=screen, transient=True)
            self.bar.add_task("", total=total, numbers="")
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=step, total=total, numbers=numbers)
