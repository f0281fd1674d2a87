"""How busy a GPU was during one step, from a Chrome trace that torch.profiler wrote. Imports nothing but the standard library."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op", "user_annotation", "cuda_runtime")
MOST_NAMED = 20  # gaps


def read_events(file: Path) -> list[dict]:
    """The events of a trace with a beginning ("ts") and a length ("dur"), both in microseconds."""
    with (gzip.open if file.suffix == ".gz" else open)(file) as opened:
        return [event for event in json.load(opened)["traceEvents"] if event.get("ph") == "X"]


def gpu_time(events: list[dict]) -> dict | None:
    """From the beginning of the first kernel to the end of the last: milliseconds in which some kernel or copy ran ("busy_ms"), in
    which none did ("idle_ms", in "num_gaps" gaps), and what the CPU took to issue them all ("issued_ms", from its first operator to the
    end of its last launch). "gaps": the longest as (ms, ms since the first kernel, kernel that ended it, what the CPU did). None without
    kernels."""
    kernels = sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda e: e["ts"])
    if not kernels:
        return None
    cpu = [e for e in events if e.get("cat") in ON_CPU]
    began = end = kernels[0]["ts"]
    busy, gaps = 0.0, []
    for kernel in kernels:
        start, stop = kernel["ts"], kernel["ts"] + kernel["dur"]
        if start > end:
            gaps.append((start - end, end, kernel["name"]))
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    launches = [e["ts"] + e["dur"] for e in cpu if "Launch" in e["name"]]
    longest = sorted(gaps, reverse=True)[:MOST_NAMED]
    named = [(length / 1e3, (at - began) / 1e3, name, during(cpu, at, at + length)) for length, at, name in longest]
    return {"busy_ms": busy / 1e3, "idle_ms": sum(length for length, *_ in gaps) / 1e3, "num_gaps": len(gaps),
            "issued_ms": (max(launches) - min(e["ts"] for e in cpu)) / 1e3 if launches else None, "gaps": named}


def during(cpu: list[dict], start: float, stop: float) -> str:
    """The operators that ran on the CPU at that time, most frequent first; not those around the whole step."""
    names = Counter(e["name"] for e in cpu if e["ts"] < stop and e["ts"] + e["dur"] > start and e["dur"] < 10 * (stop - start) + 1e3)
    return ", ".join(f"{count} {name[:50]}" for name, count in names.most_common(4))


def trace_line(found: dict) -> str:
    issued = "" if found["issued_ms"] is None else f"; the CPU issued it in {found['issued_ms']:.1f} ms"
    waits = f"{found['idle_ms']:.1f} ms in {found['num_gaps']} gaps"
    return f"one step under the profiler: GPU busy {found['busy_ms']:.1f} ms, idle {waits}{issued}"


def gap_lines(found: dict) -> list[str]:
    return [f"idle {ms:8.3f} ms at {at:8.1f} ms before {kernel[:60]}; CPU: {doing}" for ms, at, kernel, doing in found["gaps"]]
