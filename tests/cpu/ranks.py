"""Run a function on several gloo ranks, each a fork of the test process, so that Megatron is imported once for the suite.

The parent never opens a process group, and conftest.py keeps it on one OpenMP thread: neither would survive a fork.
(torch.set_num_threads would not do: a new thread of a child repeats it, on a pool that torch gives up at the fork.)
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path


class RanksFailed(RuntimeError):
    """statuses: rank -> wait status of those that ended wrong; stopped: ranks that were still there 5 s later."""

    def __init__(self, text: str, statuses: dict[int, int], stopped: list[int]):
        super().__init__(text)
        self.statuses, self.stopped = statuses, stopped


def free_port() -> int:
    """Between the ports of Ray's workers, up to 19999, and those that the kernel gives to outgoing connections: one of these could be
    taken before it is listened on."""
    while True:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", random.SystemRandom().randrange(20000, 32000)))
                return s.getsockname()[1]
            except OSError:
                continue


def run_ranks(world_size: int, function, *args, timeout_s: float = 180, **kwargs) -> list:
    """`function(*args, **kwargs)` on each rank; returns the ranks' results in order, or raises RanksFailed with the first failure's traceback."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, world_size, port, Path(folder), function, args, kwargs) for rank in range(world_size)]
        _wait(pids, Path(folder), timeout_s)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _fork(rank, world_size, port, folder, function, args, kwargs) -> int:
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(*args, **kwargs)))
        code = 0
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"{time.time()}\n{traceback.format_exc()}")
    finally:
        os._exit(code)


def _wait(pids: list[int], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    left = dict(enumerate(pids))
    failed: dict[int, int] = {}
    while left and time.monotonic() < deadline:
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[rank]
                if status:
                    failed[rank] = status
                    deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.01)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not failed and not left:
        return
    stories = sorted((p.read_text() for p in folder.glob("*.failed")), key=lambda t: float(t.split("\n", 1)[0]))
    logs = "\n".join(f"--- rank {p.stem}\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("*.log")))
    first = stories[0].split("\n", 1)[1] if stories else f"no traceback; wait statuses {failed}, still running: {sorted(left)}"
    headline = first.strip().rsplit("\n", 1)[-1]
    text = f"{headline}\nranks failed: {sorted(failed)}, stopped: {sorted(left)}\n{first}\n{logs}"
    raise RanksFailed(text, failed, sorted(left))
