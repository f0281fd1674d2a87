"""Rules on the machine: GPUs, environment, packages. See `rules`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mfsdp_cli.config.rulebook import KNOWN_GOOD, OWN, numbers_of, rule
from mfsdp_cli.config.rules_parallel import uses_cuda
from mfsdp_cli.config.rules_rollout import joins_cluster, sampler_gpus
from mfsdp_cli.config.values import kind_of
from mfsdp_cli.errors import MACHINE_UNFIT, Problem

TRANSFORMERS = ((5, 8, 0), (5, 12, 1))  # range that Bridge 0.6.2 declares
KNOWN_GOOD_RAY = {"ray": "2.60.0"}
FLASH_4_VERSIONS = {"flash-attn-4": "4.0.0b18", "nvidia-cutlass-dsl": "4.5.2"}
FLASH_4 = "flash-attn-4=={flash-attn-4} 'nvidia-cutlass-dsl[cu13]=={nvidia-cutlass-dsl}' quack-kernels==0.5.0 apache-tvm-ffi==0.1.9".format(**FLASH_4_VERSIONS)
NVIDIA_SMI_FIX = "run nvidia-smi by hand until it lists the GPUs (a new driver needs a reboot; in a container: --gpus all, and \
NVIDIA_DRIVER_CAPABILITIES=compute,utility), or engine.device=cpu"
AMPERE = 8.0  # compute capability from which GPUs multiply bfloat16


# --- GPUs and environment -------------------------------------------------------------------------------------------


@rule("gpus-enough", "there is a GPU for every rank, and for samplers that are apart", "nvidia-smi, CUDA_VISIBLE_DEVICES",
      fix="fewer ranks (--nproc), rollout.colocate=True, or engine.device=cpu")
def gpus(s, f) -> Iterator[Problem]:
    ranks, more = s.trainer.n_gpus_per_node, sampler_gpus(s)
    if s.engine.device == "cuda" and f.num_gpus == 0:
        yield Problem(
            "engine.device", "cuda", f.gpu_error or "nvidia-smi shows no GPU, or CUDA_VISIBLE_DEVICES hides them all",
            NVIDIA_SMI_FIX if f.gpu_error else "engine.device=cpu, or run where there are GPUs", code=MACHINE_UNFIT,
        )
    elif uses_cuda(s, f) and not joins_cluster(s) and ranks + more > f.num_gpus:
        hidden = f" (CUDA_VISIBLE_DEVICES={f.environ['CUDA_VISIBLE_DEVICES']})" if f.environ.get("CUDA_VISIBLE_DEVICES") else ""
        samplers = f", the samplers {more} more" if more else ""
        why = f"{ranks} ranks need a GPU each{samplers}, and there are {f.num_gpus}{hidden}"
        fix = "rollout.colocate=True, or fewer ranks" if more else f"--nproc {f.num_gpus}, with a TP that divides it"
        yield Problem("trainer.n_gpus_per_node", str(ranks), why, fix, code=MACHINE_UNFIT)


@rule("gpus-seen", "where there is a GPU, nvidia-smi shows it", OWN, level="warning", fix="nvidia-smi that works, or engine.device=cpu")
def gpus_seen(s, f) -> Iterator[Problem]:
    """engine.device=auto takes a machine whose GPUs cannot be seen for one without, and trains a hundred times slower than was meant."""
    if s.engine.device == "auto" and f.num_gpus == 0 and f.gpu_error:
        why = f"{f.gpu_error}. This is taken for a machine without GPUs, and the run would use the CPU"
        yield Problem("engine.device", "auto", why, NVIDIA_SMI_FIX, level="warning")


@rule("bf16-gpus", "GPUs that train in bfloat16 have compute capability 8.0", "NVIDIA, CUDA programming guide, compute capabilities",
      fix="engine.dtype=float32, or GPUs from Ampere on")
def bfloat16_gpus(s, f) -> Iterator[Problem]:
    least = min((c for c in f.gpu_compute_capability if c > 0), default=AMPERE)
    if uses_cuda(s, f) and s.engine.dtype == "bfloat16" and least < AMPERE:
        name = f.gpu_names[f.gpu_compute_capability.index(least)]
        why = f"{name} has compute capability {least:g}, and bfloat16 needs {AMPERE:g}"
        yield Problem("engine.dtype", "bfloat16", why, "engine.dtype=float32, or other GPUs", code=MACHINE_UNFIT)


@rule("gpus-alike", "the GPUs that ranks use are of one kind", OWN, level="warning",
      fix="CUDA_VISIBLE_DEVICES with GPUs of one kind")
def gpus_alike(s, f) -> Iterator[Problem]:
    kinds = dict.fromkeys(zip(f.gpu_names, f.gpu_memory_mib, strict=True))
    if uses_cuda(s, f) and not joins_cluster(s) and len(kinds) > 1 and s.trainer.n_gpus_per_node > 1:
        found = ", ".join(f"{name} ({mib} MiB)" for name, mib in kinds)
        why = "every rank waits for the slowest, and has no more memory than the smallest"
        yield Problem("trainer.n_gpus_per_node", found, why, "choose GPUs of one kind with CUDA_VISIBLE_DEVICES", level="warning")


@rule("no-mig-ranks", "several ranks do not run on slices of a GPU", "NVIDIA MIG user guide: no communication between slices",
      fix="--nproc 1, or whole GPUs")
def mig(s, f) -> Iterator[Problem]:
    ranks = s.trainer.n_gpus_per_node
    if uses_cuda(s, f) and ranks > 1 and any(name.startswith("MIG") for name in f.gpu_names[:ranks]):
        why = "ranks on MIG slices cannot talk to each other: NCCL has no way between slices"
        yield Problem("trainer.n_gpus_per_node", str(ranks), why, "--nproc 1, or whole GPUs", code=MACHINE_UNFIT)


@rule("cpu-cores", "processes on CPU have cores", OWN, level="warning", fix="--nproc of at most the number of cores")
def cpu_cores(s, f) -> Iterator[Problem]:
    ranks = s.trainer.n_gpus_per_node
    if not uses_cuda(s, f) and ranks > 4 * f.num_cpus:
        yield Problem(
            "trainer.n_gpus_per_node", str(ranks), f"{ranks} processes on {f.num_cpus} cores will be very slow",
            f"--nproc {max(1, f.num_cpus)}", level="warning",
        )


@rule("cpu-dtype", "on CPU the numbers are float32", OWN, level="note", fix="engine.dtype=float32")
def cpu_dtype(s, f) -> Iterator[Problem]:
    if not uses_cuda(s, f) and s.engine.dtype == "bfloat16":
        yield Problem("engine.dtype", "bfloat16", "bfloat16 is slow on CPU", "engine.dtype=float32", level="note")


@rule("max-connections-1", "CUDA_DEVICE_MAX_CONNECTIONS is unset, or an integer above 1",
      "megatron-bridge 0.6.2 training/config.py:1102; Megatron-LM training/arguments.py:1143; verl PR 6976", fix="unset it, or set it to 8")
def max_connections(s, f) -> Iterator[Problem]:
    """With one hardware queue the gathers and reductions of Megatron-FSDP run in the order of their launch, between the kernels
    that they should run beside: the results are the same, the overlap is lost. verl's two Megatron-FSDP scripts set 1."""
    value = f.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value is not None and value.strip() == "1":
        why = "Megatron-FSDP needs parallel hardware queues; with 1 its gathers and reductions wait for the compute"
        yield Problem("CUDA_DEVICE_MAX_CONNECTIONS", "1", why, "set it to 8, or unset it", "environment")
    elif value is not None and not (value.strip().isdecimal() and int(value) > 1):
        yield Problem("CUDA_DEVICE_MAX_CONNECTIONS", value, "not an integer above 1", "set it to 8, or unset it", "environment")


@rule("max-connections-name", "CUDA_MAX_CONNECTIONS is not set: CUDA does not know it", "Megatron-LM issue 1724", level="warning",
      fix="its name is CUDA_DEVICE_MAX_CONNECTIONS")
def max_connections_name(s, f) -> Iterator[Problem]:
    if "CUDA_MAX_CONNECTIONS" in f.environ:
        yield Problem(
            "CUDA_MAX_CONNECTIONS", f.environ["CUDA_MAX_CONNECTIONS"], "CUDA does not know this variable",
            "its name is CUDA_DEVICE_MAX_CONNECTIONS", "environment", level="warning",
        )


@rule("cuda-launch-blocking", "CUDA_LAUNCH_BLOCKING is off", "NVIDIA, CUDA programming guide, environment variables", level="warning",
      fix="unset it")
def launch_blocking(s, f) -> Iterator[Problem]:
    if uses_cuda(s, f) and f.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        why = "every kernel is waited for: nothing overlaps, and steps take several times as long"
        fix = "unset it, unless you look for a fault"
        yield Problem("CUDA_LAUNCH_BLOCKING", f.environ["CUDA_LAUNCH_BLOCKING"], why, fix, "environment", level="warning")


# --- packages -------------------------------------------------------------------------------------------------------


def _needed(s) -> dict[str, str]:
    return KNOWN_GOOD | (KNOWN_GOOD_RAY if kind_of(s) == "grpo" else {})


@rule("packages-installed", "the packages that training needs are installed", "mfsdp's pyproject.toml", fix="scripts/install.sh")
def packages(s, f) -> Iterator[Problem]:
    for name, good in _needed(s).items():
        if f.versions.get(name) is None:
            yield Problem(
                name, "not installed", "training needs it", f"pip install {name}=={good}, or scripts/install.sh", "environment",
                MACHINE_UNFIT,
            )


@rule("packages-known-good", "packages have the versions that were tried",
      "tried here; megatron-bridge 0.6.2's metadata for transformers 5.8 to 5.12.1", level="warning", fix="scripts/install.sh")
def package_versions(s, f) -> Iterator[Problem]:
    """Rules that name a package hold for these versions. With a newer one what would be an error is told as a warning."""
    for name, good in _needed(s).items():
        version = f.versions.get(name)
        if version is None:
            continue
        right = TRANSFORMERS[0] <= numbers_of(version) <= TRANSFORMERS[1] if name == "transformers" else version.partition("+")[0] == good
        if not right:
            tried = "5.8 to 5.12.1" if name == "transformers" else good
            yield Problem(name, version, f"tried with {tried} only", f"pip install {name}=={good}", "environment", level="warning")


@rule("te-whole", "an installed TransformerEngine has its part for torch", "PyPI: transformer-engine alone raises on import",
      level="warning", fix="pip install 'transformer-engine[pytorch]'")
def transformer_engine_is_whole(s, f) -> Iterator[Problem]:
    """The package of that name on PyPI is a frame; `transformer-engine-torch` has the layers. A build from source (version with a +)
    has both in one."""
    version = f.versions.get("transformer-engine")
    if version is not None and "+" not in version and f.versions.get("transformer-engine-torch") is None:
        why = "without transformer-engine-torch importing it fails, and with it the start"
        fix = "pip install 'transformer-engine[pytorch]', or pip uninstall transformer-engine"
        yield Problem("transformer-engine", version, why, fix, "environment", level="warning")


def flash_4_problem(versions: Mapping[str, str | None], capabilities: Iterable[float]) -> Problem | None:
    """What is to be said of the installed flash-attn-4, on GPUs of these compute capabilities (0: unknown). It is written for 9 and 10. The
    versions are those that vLLM 0.24's own pins allow; a newer flash-attn-4 and a newer nvidia-cutlass-dsl need each other."""
    known = [c for c in capabilities if c > 0]
    if not known or not all(9 <= c < 11 for c in known):
        return None
    found = {name: versions.get(name) for name in FLASH_4_VERSIONS}
    if found["flash-attn-4"] is None:
        why = f"compute capability {min(known):g}: attention over sequences of 2,048 tokens would take 0.6 of the time with it"
        return Problem("flash-attn-4", "not installed", why, f"pip install {FLASH_4}", "environment", level="note")
    if found != FLASH_4_VERSIONS:
        words = " and ".join(f"{name} {version}" for name, version in FLASH_4_VERSIONS.items())
        told = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items() if version != FLASH_4_VERSIONS[name])
        return Problem("flash-attn-4", told, f"tried with {words} only", f"pip install {FLASH_4}", "environment", level="warning")
    return None


@rule("flash-4", "Hopper and Blackwell GPUs have FlashAttention 4, in the version that was tried", "measured here: docs/performance.md; "
      "flash-attn-4's and vLLM 0.24's metadata", level="note", fix=f"pip install {FLASH_4}")
def flash_attention_4(s, f) -> Iterator[Problem]:
    problem = flash_4_problem(f.versions, f.gpu_compute_capability)
    if problem and uses_cuda(s, f) and s.engine.dtype == "bfloat16":
        yield problem


@rule("loggers-installed", "the packages of the loggers are installed", OWN, fix="pip install the package, or leave the logger out")
def loggers(s, f) -> Iterator[Problem]:
    for name in ("wandb", "tensorboard"):
        if name in s.trainer.logger and f.versions.get(name) is None:
            yield Problem(
                "trainer.logger", name, f"the package {name} is not installed",
                f"pip install {name}, or leave it out: metrics.jsonl is always written", code=MACHINE_UNFIT,
            )


@rule("wandb-login", "wandb can start without asking", "wandb: WANDB_API_KEY, WANDB_MODE, ~/.netrc",
      fix="wandb login, or WANDB_MODE=offline")
def wandb_login(s, f) -> Iterator[Problem]:
    if "wandb" in s.trainer.logger and f.versions.get("wandb") is not None and not _wandb_ready(f.environ):
        why = "there is no WANDB_API_KEY, no login in ~/.netrc, and WANDB_MODE is not offline"
        yield Problem("trainer.logger", "wandb", why, "wandb login, or WANDB_MODE=offline, or leave it out", code=MACHINE_UNFIT)


def _wandb_ready(environ) -> bool:
    """Whether wandb can start without asking. Besides the environment this reads netrc, as `wandb login` writes it."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun"):
        return True
    host = environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0].partition(":")[0]
    file = Path(environ.get("NETRC") or os.path.join(environ.get("HOME", ""), ".netrc"))
    try:
        return re.search(rf"\bmachine\s+{re.escape(host)}\b", file.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False
