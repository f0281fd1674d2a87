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

from mfsdp_cli.children import run_child

MEMORY_EVENTS = "/sys/fs/cgroup/memory.events"
NVIDIA_SMI_LIMIT_S = 30.0  # the first call after a boot loads the driver


def list_gpus(environ: Mapping[str, str], limit_s: float = NVIDIA_SMI_LIMIT_S) -> tuple[list[tuple[str, int, float]], str]:
    """(name, memory MiB, compute capability) of each visible GPU, and why there may be some that cannot be seen."""
    table, error = nvidia_smi("index,uuid,memory.total,compute_cap,name", environ, limit_s)
    if table and not _rows(table):
        error = f"nvidia-smi prints no table of GPUs: {_first_line(table)}"
    return visible_gpus(table, environ.get("CUDA_VISIBLE_DEVICES")), error


def nvidia_smi(columns: str, environ: Mapping[str, str], limit_s: float = NVIDIA_SMI_LIMIT_S) -> tuple[str, str]:
    """What it prints of each GPU, a line each; or nothing, and the reason, which is empty where nothing looks like a GPU."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return "", f"there are {devices} devices /dev/nvidia*, and no nvidia-smi on the PATH" if devices else ""
    try:
        ended = run_child(["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"], environ, limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer within {limit_s:g} s"
        return "", f"nvidia-smi is there but failed: {reason}"
    if ended.returncode != 0:
        said = _first_line(ended.stdout) or _first_line(ended.stderr) or "it says nothing"
        return "", f"nvidia-smi is there but failed with exit code {ended.returncode}: {said}"
    return (ended.stdout, "") if ended.stdout.strip() else ("", "nvidia-smi is there but prints nothing")


def visible_gpus(table: str, visible: str | None) -> list[tuple[str, int, float]]:
    """Rows of nvidia-smi's table (index, uuid, MiB, capability, name) that CUDA would see, in CUDA's order.

    As in CUDA, an entry of CUDA_VISIBLE_DEVICES that names no GPU hides itself and all that follow.
    """
    gpus = [(index, uuid, (name, int(_number(memory)), _number(capability))) for index, uuid, memory, capability, name in _rows(table)]
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


def _rows(table: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",", 4)] for line in table.splitlines() if line.count(",") >= 4]
    return [row for row in rows if row[0].isdecimal() and row[1].startswith("GPU-")]


def _number(text: str) -> float:
    """0 for what is no number, as nvidia-smi's [N/A] of what a device does not tell."""
    return float(text) if re.fullmatch(r"[0-9]{1,20}(\.[0-9]{1,12})?", text) else 0.0


def _first_line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "")


def num_cores() -> int:
    """Cores this process may use: affinity mask and cgroup quota."""
    allowed = len(os.sched_getaffinity(0))
    quota, period = (_number(word) for word in (*read_words("/sys/fs/cgroup/cpu.max"), "", "")[:2])
    return min(allowed, max(1, math.ceil(quota / period))) if quota and period else allowed  # "max" is no quota


def host_memory_gib() -> float:
    """Physical memory, or the cgroup's limit if lower."""
    total, limit = 1024 * _number_after("MemTotal:", "/proc/meminfo"), _first_number("/sys/fs/cgroup/memory.max")
    return (min(total, limit) if total and limit else total or limit) / 2**30


def memory_free_gib() -> float:
    """Memory that can be had without swapping: of the host, or what the cgroup has left if that is less."""
    free = 1024 * _number_after("MemAvailable:", "/proc/meminfo")
    limit, used = _first_number("/sys/fs/cgroup/memory.max"), _first_number("/sys/fs/cgroup/memory.current")
    if limit and used:
        free = min(free, limit - used + _number_after("inactive_file", "/sys/fs/cgroup/memory.stat"))
    return free / 2**30


def oom_kills() -> int:
    """How many processes of our cgroup the kernel has killed so far because memory was used up; 0 where that is not told."""
    return _number_after("oom_kill", MEMORY_EVENTS)


def read_words(path: str) -> list[str]:
    """Words of a small file of the kernel's; none when it is not there."""
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def _number_after(name: str, path: str) -> int:
    """The number behind a word in a file of the kernel's; 0 where it tells none."""
    words = read_words(path)
    return int(_number(dict(zip(words, words[1:], strict=False)).get(name, "")))


def _first_number(path: str) -> int:
    """Likewise its first word: 0 for "max"."""
    return int(_number((*read_words(path), "")[0]))


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
