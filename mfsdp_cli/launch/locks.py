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


def wait_until_free(path: Path, limit_s: float) -> None:
    """Until nobody holds a lock on the file, or for limit_s."""
    if not path.is_file() or not os.access(path, os.W_OK):
        return
    deadline = time.monotonic() + limit_s
    with open(path, "r+", encoding="utf-8") as file:
        while not try_lock(file, fcntl.LOCK_EX) and time.monotonic() < deadline:
            time.sleep(0.02)
