"""A scoring process: `python -m mfsdp_cli.rewards.worker FD`, where FD is its end of a connection to the pool.

Started afresh, not forked, so that it holds nothing of the trainer's: no torch, no CUDA, no Ray. It reads one item at a
time and answers with one result; when its pool is gone, the connection closes and it ends. Should it hang in C code at
that moment, a timer that needs no Python ends it.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import resource
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from mfsdp_cli.rewards import custom
from mfsdp_cli.rewards.base import RewardResult, Scorer, scorer_for

GRACE_S = 5.0  # the pool kills at the deadline; this is for a pool that no longer exists
MEMORY_BYTES = 4 << 30  # for our own scorers: 10^(10^10) is one short line
PRELOADED = {"auto": ("openai/gsm8k", "math500")}


def scorer_of(name: str, function: str | None) -> Scorer:
    """One scorer for all data sources; what it needs is imported here, not within the deadline of the first item."""
    if function is not None:
        return custom.load(function)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard), hard))
    for data_source in PRELOADED.get(name, ("",)):
        scorer_for(name, data_source)
    return lambda data_source, *rest: scorer_for(name, data_source)(data_source, *rest)


def grade(scorer: Scorer, item: tuple) -> RewardResult:
    try:
        result = scorer(*item)
    except Exception as error:  # a scorer may raise anything: it costs one item, told as an error
        return RewardResult(0.0, None, "error", f"{type(error).__name__}: {error}"[:300])
    if not math.isfinite(result.score):
        return RewardResult(0.0, result.parsed, "error", f"score {result.score} is not finite")
    return result


def serve(connection: Connection):
    name, function, timeout_s = pickle.loads(connection.recv_bytes())
    try:
        scorer = scorer_of(name, function)
    except BaseException as error:  # also SystemExit of a user's file: the pool tells it
        connection.send_bytes(json.dumps(f"{type(error).__name__}: {error}"[:600]).encode())
        raise
    connection.send_bytes(b'""')  # ready
    while True:
        item = pickle.loads(connection.recv_bytes())
        faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True)
        result = grade(scorer, item)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(json.dumps([result.score, result.parsed, result.status, result.detail]).encode())


if __name__ == "__main__":
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the pool is closed
        serve(Connection(int(sys.argv[1])))
    os._exit(0)  # not through the exit handlers and threads of a user's imports
