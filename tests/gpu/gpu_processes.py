"""Processes with a GPU each: a group of ranks that runs functions, and the `mfsdp` command, told line by line with its seconds."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import pytest
from bench_common import kill_tree
from program import start
from ranks import free_port

from mfsdp_cli.errors import OK

ON_CPU = os.environ.get("MFSDP_GPU_TESTS_ON_CPU") == "1"
SMALL = ON_CPU  # sizes
LIMIT_S = 1200.0 if ON_CPU else 240.0
DTYPE = "bfloat16"
HAVE_TRANSFORMER_ENGINE = not ON_CPU and importlib.util.find_spec("transformer_engine") is not None
IMPLEMENTATIONS = [
    pytest.param("local"),
    pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAVE_TRANSFORMER_ENGINE, reason="TransformerEngine is not installed")),
]


@cache
def gpus() -> int:
    from mfsdp_cli.launch.host import list_gpus

    return len(list_gpus(os.environ)[0])


def need_packages(*names: str) -> None:
    if absent := [name for name in names if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(absent)} cannot be imported here")


def need_gpus(count: int) -> None:
    """Skips; on the CPU there are as many as one likes."""
    if not ON_CPU and gpus() < count:
        pytest.skip(f"needs {count} GPUs, and {gpus()} are visible")


def watched(*args, timeout_s: float = LIMIT_S) -> str:
    """Standard output of `mfsdp ARGS`, which must succeed. Every line for people is printed as it comes, with the seconds since the start:
    `pytest -s` tells where the time of a run went that was killed."""
    began, told = time.monotonic(), []

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line.rstrip()}", flush=True)

    process = start(*args)
    limit = threading.Timer(timeout_s, kill_tree, [process.pid])
    limit.start()
    tell(f"mfsdp {' '.join(map(str, args[:3]))} …")
    for line in process.stderr:
        told.append(line)
        tell(line)
    out = process.stdout.read()
    code = process.wait()
    limit.cancel()
    tell(f"exit code {code}")
    assert code == OK, "".join(told[-40:])
    return out.strip()


class Ranks:
    """Fresh processes, one a rank; `run` calls a function of a module on all of them at once. They keep what the functions leave in
    their modules. Use as a context manager; a process that dies fails its test and ends the group."""

    def __init__(self, count: int):
        port, self.pools = free_port(), []
        for rank in range(count):
            place = {"RANK": rank, "LOCAL_RANK": 0 if ON_CPU else rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with pytest.MonkeyPatch.context() as patch:
                for name, value in place.items():
                    patch.setenv(name, str(value))
                pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
                pool.submit(os.getpid)  # starts it, with this environment
            self.pools.append(pool)

    def run(self, function, *args, timeout_s: float = LIMIT_S, **kwargs) -> list:
        """The ranks' results in order."""
        waiting = [pool.submit(function, *args, **kwargs) for pool in self.pools]
        try:
            return [future.result(timeout=timeout_s) for future in waiting]
        except BaseException:
            if len(self.pools) > 1:  # the others may wait for a collective that never comes
                self.kill()
            raise

    def kill(self) -> None:
        for pool in self.pools:
            for process in list((pool._processes or {}).values()):
                process.kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.kill()  # nothing is to be kept, and a process group that nobody dismantles can make an exit long
        for pool in self.pools:
            pool.shutdown(cancel_futures=True)
