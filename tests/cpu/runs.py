"""The trainer's own program on forked ranks, without torchrun, and what its run folders and checkpoints hold."""

from __future__ import annotations

import os
from pathlib import Path

from ranks import run_ranks

from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.launch.run import STOP_FILE
from mfsdp_cli.train.process import RankProcess

TIMING = ("attempt", "time", "step_s", "data_s", "memory_gib", "tokens_per_s", "eta_s")


class StopsItself(RankProcess):
    """Puts the launcher's request into the attempt folder when the step before `stop_after` is told: the ranks see it one step on."""

    stop_after: int | None = None

    def say(self, text: str) -> None:
        if self.stop_after and text.startswith(f"step {self.stop_after - 1}/"):
            (self.attempt_dir / STOP_FILE).touch()


def _one_rank(settings: SftSettings, run_dir: Path, attempt: str, stop_after: int | None, before_train) -> None:
    from mfsdp_cli.train.sft import train

    process = StopsItself(run_dir / "attempts" / attempt, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    process.stop_after = stop_after
    if before_train is not None:
        before_train()
    train(settings, run_dir, process)


def train_ranks(settings: SftSettings, run_dir: Path, *, attempt: str = "001", stop_after: int | None = None, before_train=None) -> None:
    """One attempt, as `mfsdp sft` makes it. Raises RuntimeError with the first failure's traceback.

    before_train  called on every rank, to break something there
    """
    run_ranks(settings.trainer.n_gpus_per_node, _one_rank, settings, run_dir, attempt, stop_after, before_train)


def training_records(run_dir: Path) -> list[dict]:
    """metrics.jsonl as the reader gives it, without validation records and without what depends on the clock."""
    from mfsdp_cli.train.metrics import read_metrics

    return [{k: v for k, v in r.items() if k not in TIMING} for r in read_metrics(run_dir) if "loss" in r]


def validation_losses(run_dir: Path) -> dict[int, float]:
    from mfsdp_cli.train.metrics import read_metrics

    return {r["step"]: r["val_loss"] for r in read_metrics(run_dir) if "loss" not in r}


def stored(folder: Path) -> dict:
    """Every tensor of a DCP folder, whole, by name."""
    import torch
    import torch.distributed.checkpoint as dcp

    from mfsdp_cli.checkpoint.dcp_metadata import read_dcp

    found = read_dcp(folder)
    assert not found.problems and not found.objects
    state = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in found.tensors}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state
