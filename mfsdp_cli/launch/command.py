"""The child process as data: torchrun's argument list and the variables that we add to its environment. Pure."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.launch.facts import Facts
    from mfsdp_cli.launch.plan import Plan

TRAINER_MODULE = "mfsdp_cli.train.sft"
DEFAULT_MAX_CONNECTIONS = 8  # CUDA's own default; Megatron-FSDP overlaps gathers with compute only above 1


def torchrun_command(settings: SftSettings, run_dir: str | Path, attempt_dir: str | Path, node_rank: int) -> list[str]:
    """Argument list that starts the ranks of one node.

    Several nodes meet through torchrun's static rendezvous: it alone lets --node-rank decide which ranks a node gets,
    so that rank 0, which writes metrics and results, runs on node 0. The attempt's own copy of the settings is passed:
    RUN/config.yaml may be written anew by the node that starts next.
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
    command += ["--max-restarts", "0", "-m", TRAINER_MODULE, "--config", str(Path(attempt_dir) / "config.yaml")]
    return command + ["--run-dir", str(run_dir), "--attempt-dir", str(attempt_dir)]


def child_environment(settings: SftSettings, plan: Plan, facts: Facts) -> dict[str, str]:
    """Variables set for the ranks on top of the inherited environment; the user's own choice is kept where it is legal."""
    added = {
        "CUDA_DEVICE_MAX_CONNECTIONS": str(_max_connections(facts.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""))),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if plan.device == "cpu":
        threads = max(1, facts.num_cpus // settings.trainer.n_gpus_per_node)
        added |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": facts.environ.get("OMP_NUM_THREADS") or str(threads),
            "TORCHDYNAMO_DISABLE": "1",
        }
    return added


def shell_line(command: list[str], environment: dict[str, str]) -> str:
    """The command as one line for a shell, with the added variables in front."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


def _max_connections(inherited: str) -> int:
    return int(inherited) if inherited.isdecimal() and int(inherited) > 1 else DEFAULT_MAX_CONNECTIONS
