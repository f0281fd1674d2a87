"""The child process as data: the argument list of torchrun or of the driver, and the variables that we add to its environment. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.config.values import kind_of

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.launch.facts import Facts
    from mfsdp_cli.launch.plan import Plan

MODULES = {"sft": "mfsdp_cli.train.sft", "grpo": "mfsdp_cli.train.grpo"}
DEFAULT_MAX_CONNECTIONS = 8  # CUDA's own default; Megatron-FSDP overlaps gathers with compute only above 1
# vLLM: symmetric memory in all-reduce fails on some hosts (verl's scripts turn it off too), its FlashInfer sampler compiles at the
# first request, and neither it nor Ray needs to tell anyone that they are used. With its engine in the sampler's own process nothing
# is serialized on the way to it, which handles of GPU memory cannot be.
SAMPLING_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",  # 30 s by default, too short for its imports on a busy machine
}
# Its second model runner draws with seeds and takes log-probabilities in kernels of its own; the first needs a launch for every seeded
# request in every step. vLLM 0.24 takes it by itself for Llama, Qwen3 and Mistral, not for Qwen2 (config/vllm.py).
SAMPLING_VARIABLES_OF_GPUS = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def child_command(settings: SftSettings | GrpoSettings, run_dir: str | Path, attempt_dir: str | Path, node_rank: int) -> list[str]:
    """Argument list of the one process that this node starts."""
    if kind_of(settings) == "sft":
        return torchrun_command(settings, run_dir, attempt_dir, node_rank)
    return driver_command(run_dir, attempt_dir)


def driver_command(run_dir: str | Path, attempt_dir: str | Path) -> list[str]:
    """Argument list of GRPO's driver, which starts Ray, or joins the cluster of trainer.ray_address, and all workers through it."""
    return [sys.executable, "-m", MODULES["grpo"], *_folders(run_dir, attempt_dir)]


def _folders(run_dir: str | Path, attempt_dir: str | Path) -> list[str]:
    """The attempt's own copy of the settings is passed: RUN/config.yaml may be written anew by the node that starts next."""
    return ["--config", str(Path(attempt_dir) / "config.yaml"), "--run-dir", str(run_dir), "--attempt-dir", str(attempt_dir)]


def torchrun_command(settings: SftSettings, run_dir: str | Path, attempt_dir: str | Path, node_rank: int) -> list[str]:
    """Argument list that starts the ranks of one node.

    Several nodes meet through torchrun's static rendezvous: it alone lets --node-rank decide which ranks a node gets,
    so that rank 0, which writes metrics and results, runs on node 0.
    """
    trainer = settings.trainer
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(trainer.nnodes), "--nproc-per-node", str(trainer.n_gpus_per_node)]
    if trainer.nnodes == 1:
        command += ["--standalone"]
    else:
        host, _, port = (trainer.rdzv_endpoint or "").rpartition(":")
        command += ["--node-rank", str(node_rank), "--master-addr", host.strip("[]"), "--master-port", port,
                    "--rdzv-conf", f"timeout={trainer.startup_timeout_s}"]
    return command + ["--max-restarts", "0", "-m", MODULES["sft"], *_folders(run_dir, attempt_dir)]


def child_environment(settings: SftSettings | GrpoSettings, plan: Plan, facts: Facts) -> dict[str, str]:
    """Variables set for the ranks, or for the driver and all its workers, on top of the inherited environment; the user's own
    choice is kept where it is legal."""
    added = {
        "CUDA_DEVICE_MAX_CONNECTIONS": str(_max_connections(facts.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""))),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    unless_chosen = {}
    if kind_of(settings) == "grpo":
        unless_chosen |= SAMPLING_VARIABLES if plan.device == "cpu" else SAMPLING_VARIABLES | SAMPLING_VARIABLES_OF_GPUS
    if plan.device != "cpu" and (folder := _cache_folder(facts.environ)) and facts.versions.get("flash-attn-4"):
        # FlashAttention 4 compiles its kernels at the first step, 10 to 20 s; kept, they are read at the next start.
        unless_chosen |= {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{folder}/flash-attn-4"}
    added |= {name: facts.environ.get(name) or value for name, value in unless_chosen.items()}
    if plan.device == "cpu":
        threads = max(1, facts.num_cpus // settings.trainer.n_gpus_per_node)
        added |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": facts.environ.get("OMP_NUM_THREADS") or str(threads),
            "TORCHDYNAMO_DISABLE": "1",
        }
    return added


def _cache_folder(environ: Mapping[str, str]) -> str | None:
    """Of this user's, by the XDG base directory specification; None where there is no home."""
    base = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else None)
    return base and f"{base}/mfsdp"


def shell_line(command: list[str], environment: dict[str, str]) -> str:
    """The command as one line for a shell, with the added variables in front."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


def _max_connections(inherited: str) -> int:
    return int(inherited) if inherited.isdecimal() and int(inherited) > 1 else DEFAULT_MAX_CONNECTIONS
