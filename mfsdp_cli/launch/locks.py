"""Locks on files, which the kernel takes back when their holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from mfsdp_cli.output import print_stderr

ALIVE = "alive"  # in an attempt's folder: each of its processes holds a shared lock on it, whatever became of the launcher


def try_lock(file: TextIO, kind: int) -> bool:
    """False when another launcher holds it. A file system without locks (some Lustre mounts) cannot tell: that is said."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        print_stderr(f"warning: {file.name} cannot be locked ({e.strerror}); make sure that no other mfsdp uses this run folder")
    return True


def is_free(path: Path) -> bool:
    """Whether nobody holds a lock on the file. One that is not there, or may not be written, passes for free."""
    if not path.is_file() or not os.access(path, os.W_OK):
        return True
    with open(path, "r+", encoding="utf-8") as file:  # some network file systems want it writable for this kind of lock
        return try_lock(file, fcntl.LOCK_EX)


def wait_until_free(path: Path, limit_s: float) -> None:
    """Until nobody holds a lock on the file, or for limit_s."""
    deadline = time.monotonic() + limit_s
    while not is_free(path) and time.monotonic() < deadline:
        time.sleep(0.02)
