"""What the benchmarks work out of what they measure; no torch."""

from __future__ import annotations

import argparse
import gzip
import json
import time
from types import SimpleNamespace

import bench_common
import gpu_trace
import pytest

CPU = SimpleNamespace(type="cpu")


def test_steps_are_timed_together_and_each():
    """Warm-up is not timed; the rate is all tokens over all seconds, not that of a median step."""
    waits, seen = iter([0.0, 0.01, 0.01, 0.05]), []

    def step():
        time.sleep(next(waits))
        seen.append(len(seen) + 1)
        return 100 * len(seen), 1.0 / len(seen)

    found = bench_common.timed(step, CPU, warmup=1, steps=3)
    assert seen == [1, 2, 3, 4] and found.tokens == [200, 300, 400] and found.loss == 0.25
    assert found.seconds == pytest.approx(sum(found.each), abs=2e-3) and found.seconds >= 0.07
    assert found.each[2] > max(found.each[:2]) and found.tokens_per_s == 900 / found.seconds


def test_all_contenders_get_the_same_tokens():
    rows = bench_common.token_rows("tiny", 70, 32)
    assert rows.shape == (2, 32) and (rows == bench_common.token_rows("tiny", 64, 32)).all() and 0 <= rows.min() <= rows.max() < 4096


def event(category: str, name: str, start: float, length: float) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}


def test_busy_and_idle_are_of_the_union_of_kernels(tmp_path):
    """Two streams overlap from 1000 to 3000 and to 2500 µs, one kernel lies inside; then nothing until 4000, and from 4500 until 4700."""
    events = [
        event("cpu_op", "aten::mm", 0, 700), event("cuda_runtime", "cudaLaunchKernel", 600, 100), event("cpu_op", "aten::add", 3200, 600),
        event("cuda_runtime", "cudaLaunchKernel", 3700, 100), event("cuda_runtime", "cudaDeviceSynchronize", 3800, 1200),
        event("kernel", "gemm", 1000, 2000), event("gpu_memcpy", "copy", 1500, 1000), event("kernel", "inside", 1600, 10),
        event("kernel", "add", 4000, 500), event("gpu_memset", "set", 4700, 100),
    ]
    file = tmp_path / "trace.json.gz"
    with gzip.open(file, "wt") as opened:
        json.dump({"traceEvents": [*events, {"ph": "i", "name": "no length", "ts": 5}]}, opened)
    found = gpu_trace.gpu_time(gpu_trace.read_events(file))
    assert (found["busy_ms"], found["idle_ms"], found["num_gaps"], found["issued_ms"]) == (2.6, 1.2, 2, 3.8)
    assert [gap[:3] for gap in found["gaps"]] == [(1.0, 2.0, "add"), (0.2, 3.5, "set")]
    assert "1 aten::add" in found["gaps"][0][3]
    assert gpu_trace.trace_line(found) == ("one step under the profiler: GPU busy 2.6 ms, idle 1.2 ms in 2 gaps; the CPU issued it in 3.8 ms")
    assert len(gpu_trace.gap_lines(found)) == 2


def test_a_trace_without_a_gpu_says_nothing():
    assert gpu_trace.gpu_time([event("cpu_op", "aten::mm", 0, 1)]) is None


def test_a_list_on_the_command_line_names_what_is_wrong():
    parse = bench_common.choices_of(("hf", "trl"))
    assert parse("trl,hf") == ["trl", "hf"]
    with pytest.raises(argparse.ArgumentTypeError, match="trll: choose from hf, trl"):
        parse("hf,trll")
