"""What goes wrong, in one shape, and the exit code of each kind of failure.

A `Problem` is one mistake of the user's, or one thing their machine lacks. Checks return problems instead of
raising, so that every one of them is told in a single run; `MfsdpError` carries a batch of them to the command
line, which prints them and exits with the code of the gravest.
"""

from __future__ import annotations

from dataclasses import asdict

from mfsdp_cli.records import Record

OK = 0
RUN_FAILED = 1
USAGE = 2
CONFIG_INVALID = 3
MACHINE_UNFIT = 4
BAD_INPUT = 5
MISMATCH = 6
STOPPED = 75
INTERRUPTED = 130
TERMINATED = 143
SIGNAL_BASE = 128

EXIT_CODES = {
    OK: "done",
    RUN_FAILED: "the run itself failed; failure.json in the run folder names the cause",
    USAGE: "wrong usage of the command line",
    CONFIG_INVALID: "configuration invalid; every problem is listed",
    MACHINE_UNFIT: "the machine does not fit: GPUs, memory, package, port, disk",
    BAD_INPUT: "input data or checkpoint missing, incomplete or wrong",
    MISMATCH: "export or verification mismatch",
    STOPPED: "stopped by a signal, state saved; run again to continue",
    INTERRUPTED: "interrupted before anything worth saving",
    TERMINATED: "terminated before anything worth saving",
}


class Problem(Record):
    """One thing that is wrong, where, and what would be right.

    key    dotted settings key, or a path or name when there is no key
    found  the offending value as the user would write it
    why    one or two sentences; shows the arithmetic where there is some
    fix    what to write or do instead, with values that would work
    where  "file:line", "command line", "preset NAME", "default", "$TP"; empty when there is no origin
    code   exit code of this kind of problem
    level  "error" stops the run; "warning" and "note" are printed and the run goes on
    rule   its name in the rule book (`mfsdp rules`), when it comes from there
    """

    key: str
    found: str
    why: str
    fix: str
    where: str = ""
    code: int = CONFIG_INVALID
    level: str = "error"
    rule: str = ""

    def __post_init__(self):
        assert self.level in ("error", "warning", "note"), self.level

    def to_dict(self) -> dict:
        return asdict(self)


class MfsdpError(Exception):
    """Mistakes of the user's or of the machine; never a bug of ours. Printed without a traceback, the hint last."""

    def __init__(self, problems: Problem | list[Problem], hint: str = ""):
        self.hint = hint
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        assert self.problems, "an MfsdpError needs at least one problem"
        super().__init__("; ".join(f"{p.key} = {p.found}: {p.why}" if p.found else f"{p.key}: {p.why}" for p in self.problems))

    def __reduce__(self):
        """Whole across processes: an exception is otherwise rebuilt from its message."""
        return type(self), (self.problems, self.hint)

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.problems)


def exit_code_of(problems: list[Problem]) -> int:
    """OK when none is an error. Configuration mistakes come first: they are cheapest to fix, and hide the others."""
    codes = [p.code for p in problems if p.level == "error"]
    return CONFIG_INVALID if CONFIG_INVALID in codes else codes[0] if codes else OK
