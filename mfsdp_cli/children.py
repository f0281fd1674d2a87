"""Child processes that are asked something: with a deadline, and ended with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress


def run_child(command: list[str], environ: Mapping[str, str], limit_s: float, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a child on this text to its end or its deadline, and end what it leaves behind: a process that keeps a pipe open would
    make us wait for ever. Bytes that are no text are replaced. Raises OSError, subprocess.TimeoutExpired."""
    child = subprocess.Popen(command, env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             encoding="utf-8", errors="replace", start_new_session=True)
    try:
        out, err = child.communicate(text, timeout=limit_s)
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            with suppress(OSError):  # a child that ended before it had read its text
                pipe.close()
    return subprocess.CompletedProcess(command, child.returncode, out, err)
