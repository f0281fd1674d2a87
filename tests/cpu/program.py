"""The `mfsdp` command as a process, with real torchrun, ranks and imports below it: some 20 seconds a start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(*args) -> subprocess.Popen:
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # packages may have been unpacked there
    environ = {k: v for k, v in os.environ.items() if k not in ("NPROC", "TP", "PP", "EP")} | {"PYTHONPATH": python_path, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mfsdp_cli", *map(str, args)]
    return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, timeout_s: float = 300) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return process.returncode, out, err


def mfsdp(*args, timeout_s: float = 300) -> tuple[int, str, str]:
    return finish(start(*args), timeout_s)
