"""Processes with a GPU each: a group of ranks that runs functions, and the `mfsdp` command with what this machine needs."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import pytest
from ranks import free_port

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
