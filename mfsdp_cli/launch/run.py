"""Starts torchrun, watches over it and ends it. Knows processes, pipes and signals; `outcome` knows what the end means.

The argument list is data, so a test puts any program in torchrun's place.

Signals. The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 asks the ranks to save and stop; a second SIGINT or SIGTERM ends the
whole tree. torchrun puts every rank into a session of its own, so neither the terminal nor a process group reaches them:
each process that descends from us is known by a mark in its environment.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mfsdp_cli.launch.folder import Attempt
from mfsdp_cli.launch.host import oom_kills
from mfsdp_cli.launch.locks import ALIVE, wait_until_free
from mfsdp_cli.launch.outcome import Outcome, conclude
from mfsdp_cli.output import Console, StepLines, print_stderr

CONSOLE_MARK = b"\x1emfsdp "  # rank 0 puts it before a line that is meant for people; the rest of the pipe is chatter
PROCESS_MARK = "MFSDP_LAUNCH_ID"
STOP_FILE = "stop"
ASK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
FORCE_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# coreutils' timeout, and some schedulers, send the same signal twice at once: that is one request, not two
DOUBLE_SIGNAL_S = 0.5
GRACE_S = 5.0
KILL_LIMIT_S = 30.0
POLL_S = 0.2
PR_SET_PDEATHSIG = 1


def run(command: list[str], environment: dict[str, str], attempt: Attempt, console: Console) -> Outcome:
    """Run the command to its end and say how it ended. Returns only when no process that it started is left.

    command, environment  argument list and complete environment of the child
    """
    mark, killed_before = uuid.uuid4().hex, oom_kills()
    with _signals_recorded() as received, open(attempt.log, "ab", buffering=0) as log, StepLines(console) as steps:
        parent = os.getpid()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 env={**environment, PROCESS_MARK: mark}, start_new_session=True, preexec_fn=lambda: die_with(parent))
        lines = _Lines(child.stdout.fileno(), log, steps)
        try:
            forced = _watch(child, attempt, received, lines)
        finally:
            survivors = end_processes(mark)
        lines.drain()
        if survivors:
            print_stderr(f"warning: these processes do not end, not even by SIGKILL (is a driver stuck?): {survivors}")
        else:  # one that is being taken down loses its environment, by which it is known, before its locks, for which the next start would be refused
            wait_until_free(attempt.path / ALIVE, KILL_LIMIT_S)
        child.wait()
        child.stdout.close()
    return conclude(attempt, child.returncode, received[0][0] if received else None, forced, oom_kills() - killed_before)


def _watch(child: subprocess.Popen, attempt: Attempt, received: list[tuple[int, float]], lines: _Lines) -> bool:
    """Copy the child's lines until it ends, or until it has to be ended by force: then True."""
    asked = False
    while child.poll() is None:
        lines.read(POLL_S)
        if not asked and received:
            asked = True
            if lines.steps.last_step is None and attempt.node_rank == 0:  # the other nodes do not see step lines
                print_stderr("stopping; no step is done yet, so there is nothing to save")
                return True
            try:
                (attempt.path / STOP_FILE).touch()
            except OSError as error:  # where no empty file can be made, nothing can be saved
                print_stderr(f"stopping at once; the ranks cannot be asked to save: {error}")
                return True
            print_stderr("saving, press Ctrl-C again to stop at once")
        elif asked and _insists(received):
            print_stderr("stopping at once")
            return True
    return False


def _insists(received: list[tuple[int, float]]) -> bool:
    first = received[0][1]
    return any(number in FORCE_SIGNALS and when - first >= DOUBLE_SIGNAL_S for number, when in received[1:])


class _Lines:
    """Cuts the pipe's bytes into lines: all of them go to the log, the marked ones to `steps` as well."""

    def __init__(self, descriptor: int, log: BinaryIO, steps: StepLines):
        self.descriptor = descriptor
        self.log = log
        self.steps = steps
        self.rest = b""
        self.ended = self.log_lost = False

    def read(self, timeout_s: float) -> bool:
        """Take what is there, waiting at most timeout_s. False when there was nothing."""
        if self.ended:
            time.sleep(timeout_s)
            return False
        if not select.select([self.descriptor], [], [], timeout_s)[0]:
            return False
        data = os.read(self.descriptor, 1 << 16)
        self.ended = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._take(line + b"\n")
        return bool(data)

    def drain(self) -> None:
        """Take what the ended processes left in the pipe."""
        while self.read(0):
            pass
        if self.rest:
            self._take(self.rest)

    def _take(self, line: bytes) -> None:
        chatter, mark, text = line.partition(CONSOLE_MARK)
        if not self.log_lost:
            try:
                self.log.write(chatter + text)
            except OSError as error:  # a full disk must not take away the one that looks after the ranks
                self.log_lost = True
                print_stderr(f"warning: {error.strerror}: the log ends here: {self.log.name}")
        if mark:
            self.steps.feed(text.decode(errors="replace").rstrip())


@contextmanager
def _signals_recorded():
    """Within the block, signals that ask for an end are noted as (number, monotonic seconds) instead of killing us."""
    received: list[tuple[int, float]] = []
    before = {}
    for number in ASK_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, a background job SIGINT: leave that so
            before[number] = signal.signal(number, lambda n, _: received.append((n, time.monotonic())))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with(parent: int) -> None:
    """In the child, before exec: SIGTERM when the launcher dies, however it dies, so that no rank outlives it."""
    import ctypes  # costs every check some milliseconds, and only a start needs it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def end_processes(mark: str, grace_s: float = GRACE_S) -> list[int]:
    """SIGTERM to every process with this mark, SIGKILL after grace_s to those still there. Returns those that stay anyhow."""
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_LIMIT_S)):
        deadline = time.monotonic() + limit_s
        _send(marked_processes(mark), number)
        while (left := marked_processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not left:
            break
    return left


def marked_processes(mark: str) -> list[int]:
    """Ids of the living processes whose environment was started with our mark. A zombie has no environment any more."""
    wanted = f"{PROCESS_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # another user's process, or one that has just ended
                continue
    return found


def _send(processes: list[int], number: int) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue
