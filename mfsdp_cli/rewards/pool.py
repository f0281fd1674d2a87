"""Scoring that cannot hang, die or lose its place: child processes of our own, a deadline for every response.

Built on subprocess and pipes, because an executor of concurrent.futures can neither kill one worker nor say which
item it was at. A worker has one item at a time, so that whatever happens to a worker happens to that item alone.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing import Pipe, connection

from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError, Problem
from mfsdp_cli.rewards.base import RewardResult, fresh_environment

START_TIMEOUT_S = 120.0
MAX_TRIES = 2  # of an item whose worker died
Item = tuple[str, str, str, dict]  # (data_source, solution_str, ground_truth, extra_info)

# (data_source, response, gold, score) that must come out so; the spellings are ones that graders are known to get wrong.
KNOWN = {
    "gsm8k": [("openai/gsm8k", "so 1,250\n#### $1,250.00\nChecked again.", "1250", 1.0), ("openai/gsm8k", "#### 41", "42", 0.0)],
    "gsm8k_flexible": [("openai/gsm8k", "it is 42.", "42", 1.0), ("openai/gsm8k", "it is 41.", "42", 0.0)],
    "math": [("math500", r"so \boxed{\frac{3}{6}}", r"\frac{1}{2}", 1.0), ("math500", r"so \boxed{\sqrt{3}}", r"\sqrt{2}", 0.0),
             ("math500", r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0)],
    "length": [("length", "word " * 50, "", 1.0), ("length", "", "", 0.0)],
}


class Worker:
    """One child process and the item that it is at."""

    def __init__(self, setup: tuple):
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mfsdp_cli.rewards.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=2, env=fresh_environment(),
            start_new_session=True)  # so that killing it takes the processes that a user's scorer started with it
        theirs.close()
        self.is_ready = False
        self.index: int | None = None
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.send(setup)

    def send(self, message: object):
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead: reading from it says so, and is where that is handled
            self.connection.send_bytes(pickle.dumps(message))

    def end(self, patience_s: float = 0.0) -> int:
        """Its exit status, after at most this long to end by itself. Takes everything with it that it has started."""
        self.connection.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class RewardPool:
    """Scores responses in `num_workers` processes, each response within `timeout_s` seconds, by the scorer `name` or the user's
    function "FILE.py:FUNCTION". Use it as a context manager, or call close(); a worker whose pool is gone ends by itself.
    """

    def __init__(self, num_workers: int, timeout_s: float, name: str = "auto", function: str | None = None):
        assert num_workers > 0 and timeout_s > 0
        self.name, self.function, self.timeout_s = name, function, timeout_s
        self.workers = [self.new_worker() for _ in range(num_workers)]
        self.lock = threading.Lock()

    def new_worker(self) -> Worker:
        return Worker((self.name, self.function, self.timeout_s))

    def score(self, items: list[Item]) -> list[RewardResult]:
        """One result for each item, in the order of the items. A response that fails, hangs or kills its worker costs itself only.

        Raises MfsdpError when workers cannot start; the pool is then closed, as it is when the wait is interrupted.
        """
        assert self.workers, "the pool is closed"
        with self.lock:
            try:
                results = Batch(self, items).run()
            except BaseException:
                self.close()
                raise
        assert len(results) == len(items)
        return results

    def self_test(self):
        """Grade known answers in a worker, by every scorer of ours in use. Raises MfsdpError if one is graded wrongly."""
        names = [] if self.function else ["gsm8k", "math"] if self.name == "auto" else [self.name]
        cases = [case for name in names for case in KNOWN[name]]
        results = self.score([(source, response, gold, {}) for source, response, gold, _ in cases])
        wrong = [f"{response[:60]!r} against {gold!r} scores {result.score:g}, not {expected:g} ({result.status} {result.detail})"
                 for (_, response, gold, expected), result in zip(cases, results, strict=True) if result.score != expected]
        if wrong:
            self.close()
            raise MfsdpError([Problem("reward.name", self.name, f"grading is broken on this machine: {why}",
                                      "install the pinned packages again: scripts/install.sh", code=MACHINE_UNFIT) for why in wrong])

    def close(self):
        """End all workers; none is left when this returns."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.end(patience_s=1.0 if worker.is_ready and worker.index is None else 0.0)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_):
        self.close()


class Batch:
    """One call of `score`: what waits, what has been tried, what is done."""

    def __init__(self, pool: RewardPool, items: list[Item]):
        self.pool, self.items = pool, items
        self.waiting = deque(range(len(items)))
        self.tries = [0] * len(items)
        self.results: dict[int, RewardResult] = {}

    def run(self) -> list[RewardResult]:
        while len(self.results) < len(self.items):
            self.hand_out()
            busy = [worker for worker in self.pool.workers if worker.index is not None or not worker.is_ready]
            soonest = min(worker.deadline for worker in busy)
            heard = connection.wait([worker.connection for worker in busy], max(0.0, soonest - time.monotonic()))
            for worker in busy:
                if worker.connection in heard:
                    self.hear(worker)
                elif time.monotonic() > worker.deadline:
                    self.give_up(worker)
        return [self.results[index] for index in range(len(self.items))]

    def hand_out(self):
        for worker in self.pool.workers:
            if worker.is_ready and worker.index is None and self.waiting:
                worker.index = self.waiting.popleft()
                worker.deadline = time.monotonic() + self.pool.timeout_s
                self.tries[worker.index] += 1
                worker.send(self.items[worker.index])

    def hear(self, worker: Worker):
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return self.mourn(worker)
        if worker.is_ready:
            self.results[worker.index] = RewardResult(*message)
            worker.index = None
        elif message:
            raise self.cannot_start(message)
        else:
            worker.is_ready = True

    def mourn(self, worker: Worker):
        """A worker has died. Its item is tried once more: whatever killed the worker may have had nothing to do with it."""
        status = worker.end(patience_s=1.0)
        how = f"signal {-status}" if status < 0 else f"status {status}"
        if not worker.is_ready:
            raise self.cannot_start(f"ended while starting, by {how}")
        self.replace(worker)
        if self.tries[worker.index] < MAX_TRIES:
            self.waiting.appendleft(worker.index)
        else:
            self.results[worker.index] = RewardResult(0.0, None, "error", f"the scoring process died {MAX_TRIES} times, last by {how}")

    def give_up(self, worker: Worker):
        worker.end()
        if not worker.is_ready:
            raise self.cannot_start(f"not ready after {START_TIMEOUT_S:g} s")
        self.replace(worker)
        self.results[worker.index] = RewardResult(0.0, None, "timed_out", f"no grade within {self.pool.timeout_s:g} s")

    def replace(self, worker: Worker):
        self.pool.workers[self.pool.workers.index(worker)] = self.pool.new_worker()

    def cannot_start(self, why: str) -> MfsdpError:
        key, found = ("reward.function", self.pool.function) if self.pool.function else ("reward.name", self.pool.name)
        return MfsdpError(Problem(key, found, f"a scoring process cannot start: {why}", "correct the function" if self.pool.function else
                                  "install the pinned packages: scripts/install.sh", code=MACHINE_UNFIT))
