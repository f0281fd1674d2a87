"""What a rank is to the outside: its log, its lines on the console, requests to stop, and its last word.

The launcher (`launch.run`, `launch.outcome`) reads what is written here; a rank started by torchrun without a launcher
behaves the same.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

from mfsdp_cli.errors import RUN_FAILED, MfsdpError
from mfsdp_cli.launch.locks import ALIVE, try_lock
from mfsdp_cli.launch.run import ASK_SIGNALS, CONSOLE_MARK, STOP_FILE


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line of a trainer program, as `launch.command` writes it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="resolved settings, as the launcher writes them")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt-dir", type=Path, required=True, help="logs and results of this attempt")
    return parser.parse_args()


class RankProcess:
    """One process of an attempt. stdout and stderr go to attempt_dir/NAME.log from here on; `say` reaches the console.

    name  rankN unless given; a process with a name of its own (an actor of Ray's) leaves signals to its parent
    """

    def __init__(self, attempt_dir: Path, rank: int, local_rank: int, name: str | None = None):
        self.attempt_dir, self.rank, self.local_rank, self.name = attempt_dir, rank, local_rank, name or f"rank{rank}"
        attempt_dir.mkdir(parents=True, exist_ok=True)
        self._console = os.dup(2)
        log = os.open(attempt_dir / f"{self.name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        self._alive = open(attempt_dir / ALIVE, "a")  # held until this process ends, however it ends
        while not try_lock(self._alive, fcntl.LOCK_SH):  # a launcher is just looking whether anyone holds it
            time.sleep(0.01)
        self._asked = False
        self._shown: dict[str, str] = {}
        for number in ASK_SIGNALS if name is None else ():
            signal.signal(number, self._ask)

    def _ask(self, number, frame) -> None:
        self._asked = True

    def show(self, folder: Path, given: Path) -> None:
        """Tell of what is in this folder by the name that the user gave it."""
        self._shown[f"{folder}/"] = f"{given}/"

    def say(self, text: str) -> None:
        """A line for people, from rank 0 only; in the log too."""
        for path, given in self._shown.items():
            text = text.replace(path, given)
        _log(text)
        if self.rank == 0:
            try:
                os.write(self._console, CONSOLE_MARK + text.encode() + b"\n")
            except BrokenPipeError:  # the launcher is gone: there is nobody to tell, but there may be much to save
                self._asked = True

    def stop_asked(self) -> bool:
        """Whether this rank was asked to stop; the ranks must agree on the answer before they act on it. One rank a node
        looks for the launcher's request, since each node has a launcher and an attempt folder of its own."""
        return self._asked or (self.local_rank == 0 and (self.attempt_dir / STOP_FILE).exists())

    def finish(self, result: dict) -> None:
        """The product of the run, for the launcher."""
        if self.rank == 0:
            _write(self.attempt_dir / "result.json", result)

    @contextmanager
    def last_word(self):
        """Within the block, an exception is written to failure-NAME.json before the process ends with its exit code."""
        try:
            yield
        except BaseException as error:  # torch's CheckpointException, for one, is no Exception
            problems = [p.to_dict() for p in error.problems] if isinstance(error, MfsdpError) else []
            code = error.exit_code if isinstance(error, MfsdpError) else RUN_FAILED
            failure = {"rank": self.rank, "name": self.name, "time": time.time(), "type": type(error).__name__, "message": str(error),
                       "traceback": traceback.format_exc(), "exit_code": code, "problems": problems}
            try:
                _write(self.attempt_dir / f"failure-{self.name}.json", failure)
            except OSError as second:  # most likely the disk is full, and that is the failure
                os.write(self._console, CONSOLE_MARK + f"error: {self.name}: {error} (nor can this be written: {second})".encode() + b"\n")
            _log(failure["traceback"])
            # Interpreter shutdown would wait for other ranks in the process group's destructor.
            os._exit(code)


def _log(text: str) -> None:
    """A line into this process's log. A full disk costs the line, not the run: what counts is written elsewhere, and checked."""
    try:
        os.write(1, text.encode() + b"\n")
    except OSError:
        pass


def _write(path: Path, data: dict) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    os.replace(part, path)
