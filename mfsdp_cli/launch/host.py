"""Readings of the host: GPUs, cores, memory, disk, installed packages. Without torch, and quick."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

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


def run_child(command: list[str], environ: Mapping[str, str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a child to its end or its deadline, and end whatever it has started: a process that keeps a pipe open would make us wait for
    ever. Raises OSError, subprocess.TimeoutExpired."""
    child = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, errors="replace", start_new_session=True)
    try:
        out, err = child.communicate(timeout=limit_s)
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        child.stderr.close()
    return subprocess.CompletedProcess(command, child.returncode, out, err)


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
    """nvidia-smi writes [N/A] for what a device does not tell."""
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", text) else 0.0


def _first_line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "")


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


def memory_free_gib() -> float:
    """Memory that can be had without swapping: of the host, or what the cgroup has left if that is less."""
    words = read_words("/proc/meminfo")
    free = int(words[words.index("MemAvailable:") + 1]) * 1024 if "MemAvailable:" in words else 0
    limit, used = read_words("/sys/fs/cgroup/memory.max"), read_words("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        cached = read_words("/sys/fs/cgroup/memory.stat")
        inactive = int(cached[cached.index("inactive_file") + 1]) if "inactive_file" in cached else 0
        free = min(free, int(limit[0]) - int(used[0]) + inactive)
    return free / 2**30


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
