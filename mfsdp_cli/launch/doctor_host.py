"""The part of `doctor` that looks at GPUs, network, disk, limits, variables and a Ray cluster. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

from mfsdp_cli.config.rules_machine import NVIDIA_SMI_FIX, max_connections, max_connections_name
from mfsdp_cli.launch.machine import Check, Machine

# Oldest driver of each CUDA major version, its minor versions being compatible: docs.nvidia.com/deploy/cuda-compatibility
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
OLDEST_CAPABILITY = {11: 3.5, 12: 5.0, 13: 7.5}  # what the toolkit can still compile for: its release notes
BF16_CAPABILITY = 8.0
CHECKPOINT_GIB = 100  # of a 7B model with optimizer: 14 bytes a parameter
SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before it",
    "NCCL_P2P_DISABLE": "GPUs talk through the host's memory",
    "NCCL_IB_DISABLE": "nodes talk over TCP in place of InfiniBand",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked against each other, which is slow",
}
LOW_DISK_GIB, LOW_SHM_GIB, LOW_MEMORY_GIB, LOW_OPEN_FILES = 20.0, 1.0, 8.0, 4096


# --- GPUs -----------------------------------------------------------------------------------------------------------


def gpus(m: Machine, nnodes: int) -> Iterator[Check]:
    hidden = m.environ.get("CUDA_VISIBLE_DEVICES")
    if m.gpu_error:
        yield Check("gpus", "none that can be seen", "warning", f"{m.gpu_error}; runs go to the CPU", NVIDIA_SMI_FIX)
        return
    if not m.gpus:
        if hidden is not None and (m.gpu_used_mib or m.num_devices):
            yield Check("gpus", "none", "warning", f"CUDA_VISIBLE_DEVICES={hidden} hides them all", "unset CUDA_VISIBLE_DEVICES")
        else:
            yield Check("gpus", "none", "note", "runs go to the CPU: right for trying it out, slow for work")
        return
    kinds = dict.fromkeys(m.gpus)
    text = "; ".join(f"{m.gpus.count(g)} x {g[0]}, {g[1] / 1024:.0f} GiB, compute capability {g[2]:g}" for g in kinds)
    if len(kinds) > 1:
        yield Check("gpus", text, "warning", "all ranks go at the pace of the slowest", "choose equal ones with CUDA_VISIBLE_DEVICES")
    elif any(0 < g[2] < BF16_CAPABILITY for g in kinds):
        yield Check("gpus", text, "warning", "bfloat16 is emulated below compute capability 8.0", "engine.dtype=float32")
    else:
        yield Check("gpus", text)
    busy = [f"GPU {i}: {used / 1024:.1f} GiB" for i, used in enumerate(m.gpu_used_mib) if used > 2048]
    if busy:
        yield Check("gpu memory", ", ".join(busy) + " in use", "warning", "another process has it",
                    "nvidia-smi shows which; end it, or choose other GPUs")


def driver(m: Machine, nnodes: int) -> Iterator[Check]:
    if not m.gpus and m.driver is None:
        return
    if m.torch_cuda is None:
        yield Check("driver", m.driver or "unknown", "note", "torch's CUDA version cannot be read, so it is not compared")
        return
    if not m.torch_cuda:
        yield Check("driver", m.driver or "unknown", "wrong", "torch is a build without CUDA, and there are GPUs",
                    "scripts/install.sh, or engine.device=cpu")
        return
    major = int(m.torch_cuda.split(".")[0])
    oldest, found = OLDEST_DRIVER.get(major), f"{m.driver or 'unknown'}, torch is built for CUDA {m.torch_cuda}"
    if m.driver is None or oldest is None:
        yield Check("driver", found, "note", "not compared")
    elif tuple(int(n) for n in re.findall(r"\d+", m.driver)[:2]) < oldest:
        why = f"CUDA {major} needs {oldest[0]}.{oldest[1]} or newer"
        status, more = ("warning", ", unless the libraries in /usr/local/cuda*/compat are used") if m.cuda_compat else ("wrong", "")
        yield Check("driver", found, status, why + more, f"update the driver, or install a torch built for CUDA {major - 1}")
    else:
        yield Check("driver", found)
    old = {g[0]: g[2] for g in m.gpus if 0 < g[2] < OLDEST_CAPABILITY.get(major, 0.0)}
    for name, capability in old.items():
        yield Check("driver", f"{name}: compute capability {capability:g}", "wrong", f"CUDA {major} builds nothing below "
                    f"{OLDEST_CAPABILITY[major]:g}", f"install a torch built for CUDA {major - 1}, or engine.device=cpu")


# --- network, disk, limits ------------------------------------------------------------------------------------------


def network(m: Machine, nnodes: int) -> Iterator[Check]:
    real = [name for name in m.interfaces if name != "lo"]
    found = ", ".join(real + [f"{name} (InfiniBand)" for name in m.infiniband]) or "loopback only"
    if real:
        yield Check("network", found)
    elif nnodes > 1:
        yield Check("network", found, "wrong", f"{nnodes} nodes cannot meet over the loopback",
                    "bring an interface up (ip link); in a container: --network host")
    else:
        yield Check("network", found, "note", "enough for one node")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if not (wanted := m.environ.get(variable)):
            continue
        fix = f"unset it, or {variable}={(real or m.interfaces or ['eth0'])[0]}"
        chosen = chosen_interfaces(wanted, m.interfaces, exact=variable.startswith("GLOO"))
        if not chosen:
            yield Check(variable, wanted, "wrong", f"no interface that is up matches; there are {', '.join(m.interfaces) or 'none'}", fix)
        elif nnodes > 1 and set(chosen) == {"lo"}:
            yield Check(variable, wanted, "wrong", f"{nnodes} nodes cannot meet over the loopback", fix)
        else:
            yield Check(variable, f"{wanted} ({', '.join(chosen)})")


def chosen_interfaces(wanted: str, interfaces: list[str], exact: bool = False) -> list[str]:
    """Interfaces that NCCL_SOCKET_IFNAME selects: names begin with one of the list; = before it: equal one; ^: neither.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; gloo takes one name (exact=True).
    """
    sign = wanted[0] if wanted[0] in "^=" and not exact else ""
    negative, rest = sign == "^", wanted[len(sign):]
    if negative and rest.startswith("="):
        sign, rest = "=", rest[1:]
    names = [name.partition(":")[0] for name in rest.split(",") if name]
    
    def matches(interface: str) -> bool:
        return any(interface == n if sign == "=" or exact else interface.startswith(n) for n in names)

    return [i for i in interfaces if matches(i) != negative]


def disk(m: Machine, nnodes: int) -> Iterator[Check]:
    found = f"{m.free_disk_gib:.0f} GiB free at {m.folder}"
    if not m.folder_writable:
        yield Check("disk", found, "wrong", "nothing can be written there", "--output FOLDER, or change its permissions")
    elif m.free_disk_gib < 0.1:
        yield Check("disk", found, "wrong", "no checkpoint fits", "free some space, or --output on another disk")
    elif m.free_disk_gib < LOW_DISK_GIB:
        yield Check("disk", found, "warning", f"one checkpoint of a 7B model takes about {CHECKPOINT_GIB} GiB, a tiny one a few MiB",
                    "free some space, --output on another disk, or checkpoint.save_contents=[model]")
    else:
        yield Check("disk", found)


def shared_memory(m: Machine, nnodes: int) -> Iterator[Check]:
    if m.shm_gib is None:
        yield Check("shared memory", "no /dev/shm", "warning", "NCCL, Ray and vLLM's weight transfer use it", "mount a tmpfs there")
        return
    found = f"{m.shm_free_gib:.1f} of {m.shm_gib:.1f} GiB free at /dev/shm"
    if m.shm_free_gib < LOW_SHM_GIB:
        yield Check("shared memory", found, "warning", "NCCL between GPUs without peer access and Ray's objects need more",
                    "in a container: --shm-size=16g (or --ipc=host); else remove what fills /dev/shm")
    else:
        yield Check("shared memory", found)


def limits(m: Machine, nnodes: int) -> Iterator[Check]:
    soft, hard = m.open_files
    found = f"{'unlimited' if soft < 0 else soft} (at most {'unlimited' if hard < 0 else hard})"
    if 0 <= soft < LOW_OPEN_FILES:
        most = 65536 if hard < 0 else min(65536, hard)
        yield Check("open files", found, "warning", "Ray and many ranks open thousands", f"ulimit -n {most}")
    else:
        yield Check("open files", found)
    found = f"{m.num_cores} core{'s' if m.num_cores > 1 else ''}, {m.memory_free_gib:.0f} of {m.memory_gib:.0f} GiB memory free"
    if m.memory_free_gib < LOW_MEMORY_GIB:
        yield Check("host", found, "warning", "each rank needs 2 to 3 GiB beside the weights, which pass through it while loading",
                    "end other processes, or give the job more memory")
    elif m.gpus and m.num_cores < len(m.gpus):
        yield Check("host", found, "warning", f"{len(m.gpus)} ranks share them", "give the job at least one core a GPU, better eight")
    else:
        yield Check("host", found)


def environment(m: Machine, nnodes: int) -> Iterator[Check]:
    facts = SimpleNamespace(environ=m.environ)
    told = [Check.of(p) for rule in (max_connections, max_connections_name) for p in rule(None, facts)]
    for variable, folder, hidden in m.shadows:
        told.append(Check(variable, folder, "warning", f"it holds {hidden}, in place of what is installed", f"unset {variable}"))
    for variable, why in SLOW_VARIABLES.items():
        if m.environ.get(variable, "0") not in ("", "0", "OFF"):
            told.append(Check(variable, m.environ[variable], "warning", why, "unset it"))
    if m.environ.get("RAY_ADDRESS"):
        told.append(Check("RAY_ADDRESS", m.environ["RAY_ADDRESS"], "note", "mfsdp grpo joins a cluster only when it is told to",
                          "--ray-address auto"))
    yield from told or [Check("environment", "no variable that is known to break runs")]


def ray_cluster(m: Machine, nnodes: int) -> Iterator[Check]:
    if m.ray is None:
        return
    if not m.ray.ok:
        yield Check("ray cluster", m.ray_address, "wrong", f"it does not answer: {m.ray.text}",
                    "ray start --head on its first node, or leave --ray-address and RAY_ADDRESS out for a local one")
        return
    data = json.loads(m.ray.text)
    nodes = "; ".join(f"{n['address']} {n.get('CPU', 0):g} CPUs, {n.get('GPU', 0):g} GPUs" for n in data["nodes"])
    free = f"free: {data['free'].get('CPU', 0):g} CPUs, {data['free'].get('GPU', 0):g} GPUs"
    found = f"{m.ray_address}: {nodes}; {free}"
    if len(data["nodes"]) < nnodes:
        yield Check("ray cluster", found, "wrong", f"{nnodes} nodes are wanted, and {len(data['nodes'])} are there",
                    "ray start --address HEAD:6379 on the others")
    else:
        yield Check("ray cluster", found)


PARTS = (gpus, driver, network, disk, shared_memory, limits, environment, ray_cluster)
