"""Readings of the host: GPUs, cores, memory, disk, installed packages. Without torch, and quick."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

MEMORY_EVENTS = "/sys/fs/cgroup/memory.events"


def list_gpus(environ: Mapping[str, str]) -> list[tuple[str, int, float]]:
    """(name, memory MiB, compute capability) of each visible GPU; none when there is no working nvidia-smi."""
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,compute_cap,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired):
        return []
    return visible_gpus(answer.stdout, environ.get("CUDA_VISIBLE_DEVICES")) if answer.returncode == 0 else []


def visible_gpus(table: str, visible: str | None) -> list[tuple[str, int, float]]:
    """Rows of nvidia-smi's table (index, uuid, MiB, capability, name) that CUDA would see, in CUDA's order.

    As in CUDA, an entry of CUDA_VISIBLE_DEVICES that names no GPU hides itself and all that follow.
    """
    rows = [[cell.strip() for cell in line.split(",", 4)] for line in table.splitlines() if line.count(",") >= 4]
    gpus = [(index, uuid, (name, int(_number(memory)), _number(capability))) for index, uuid, memory, capability, name in rows]
    if visible is None:
        return [gpu for _, _, gpu in gpus]
    chosen = []
    for entry in (e.strip() for e in visible.split(",")):
        match = [gpu for index, uuid, gpu in gpus if entry and (entry == index or (entry.startswith("GPU-") and uuid.startswith(entry)))]
        if not match and entry.startswith("MIG-"):
            match = [("MIG slice", 0, gpus[0][2][2] if gpus else 0.0)]
        if not match:
            break
        chosen.append(match[0])
    return chosen


def _number(text: str) -> float:
    """nvidia-smi writes [N/A] for what a device does not tell."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def num_cores() -> int:
    """Cores this process may use: affinity mask and cgroup quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = read_words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        allowed = min(allowed, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return allowed


def host_memory_gib() -> float:
    """Physical memory, or the cgroup's limit if lower."""
    words = read_words("/proc/meminfo")
    total = int(words[words.index("MemTotal:") + 1]) * 1024 if "MemTotal:" in words else 0
    limit = read_words("/sys/fs/cgroup/memory.max")
    if limit and limit[0] != "max":
        total = min(total, int(limit[0])) if total else int(limit[0])
    return total / 2**30


def oom_kills() -> int:
    """How many processes of our cgroup the kernel has killed so far because memory was used up; 0 where that is not told."""
    words = read_words(MEMORY_EVENTS)
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def read_words(path: str) -> list[str]:
    """Words of a small file of the kernel's; none when it is not there."""
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def free_disk_gib(path: str | Path) -> float:
    """Free space for this user at `path`, or at its nearest existing parent."""
    return shutil.disk_usage(nearest_parent(path)).free / 2**30


def nearest_parent(path: str | Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    folder = Path(os.path.expanduser(path)).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def installed_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Version of each package, None when it is not installed: from the names of the metadata folders on sys.path, where
    importlib.metadata looks too. Importing that costs as much time as all of ours."""
    wanted = {_metadata_name(name): name for name in names}
    found: dict[str, str | None] = dict.fromkeys(wanted.values())
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:  # a zip file, or a folder that is gone
            continue
        for entry in entries:
            stem, _, kind = entry.rpartition(".")
            name, _, version = stem.partition("-")
            package = wanted.get(_metadata_name(name)) if kind in ("dist-info", "egg-info") else None
            if package is not None and found[package] is None:
                found[package] = version.partition("-")[0]
    return found


def _metadata_name(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def ray_token(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process needs in its environment to join a Ray cluster by its address.

    Ray 2.60: `ray start` demands a token as soon as the home folder has one, which any local ray.init puts there; but a process
    that joins by an explicit address offers it only in token mode, and else fails with a message about a lost connection. A
    cluster without tokens takes processes in token mode too.
    """
    default = os.path.join(environ.get("HOME", ""), ".ray", "auth_token")
    has_token = environ.get("RAY_AUTH_TOKEN") or os.path.isfile(environ.get("RAY_AUTH_TOKEN_PATH") or default)
    return {"RAY_AUTH_MODE": "token"} if has_token and "RAY_AUTH_MODE" not in environ else {}
