"""The trainer's own program on forked ranks, without torchrun, and what its run folders and checkpoints hold."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from ranks import run_ranks

from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.launch.run import STOP_FILE
from mfsdp_cli.train.process import RankProcess

TIMING = ("attempt", "time", "step_s", "data_s", "memory_gib", "tokens_per_s", "eta_s")


def sft_settings(tiny, folder: Path, ranks: int = 2, steps: int = 20, rows: int = 50, model: str = "qwen2") -> SftSettings:
    """A run on CPU over sums, in float32, 4 rows a step, validated every 5 steps, saved at the end; data is made in `folder`."""
    from mfsdp_cli.data.prepare import prepare

    prepare("arithmetic", input=None, out_dir=str(folder), purpose="sft", train_rows=rows, test_rows=6)
    s = SftSettings()
    s.model.path = str(tiny(model))
    s.data.train_files, s.data.val_files = [str(folder / "train.parquet")], [str(folder / "test.parquet")]
    s.data.train_batch_size, s.data.max_token_len_per_gpu = 4, 128
    s.engine.dtype, s.engine.device = "float32", "cpu"
    s.optim.lr, s.optim.min_lr, s.optim.eps = 1e-3, 1e-4, 1e-6
    s.trainer.n_gpus_per_node, s.trainer.total_training_steps = ranks, steps
    s.trainer.save_freq, s.trainer.test_freq = -1, 5
    return s


def changed(settings: SftSettings, **sections: dict) -> SftSettings:
    """A copy with fields of its sections replaced: changed(s, optim={"lr": 1.0})."""
    parts = {name: dataclasses.replace(getattr(settings, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(settings, **parts)


class StopsItself(RankProcess):
    """Puts the launcher's request into the attempt folder when the step before `stop_after` is told: the ranks see it one step on."""

    stop_after: int | None = None

    def say(self, text: str) -> None:
        if self.stop_after and text.startswith(f"step {self.stop_after - 1}/"):
            (self.attempt_dir / STOP_FILE).touch()
        super().say(text)


def _one_rank(settings: SftSettings, run_dir: Path, attempt: str, stop_after: int | None, before_train) -> None:
    from mfsdp_cli.train import sft

    if stop_after:
        sft.AHEAD_BELOW_S = 0.0  # no step ahead, so that the step at which it stops is known
    process = StopsItself(run_dir / "attempts" / attempt, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    process.stop_after = stop_after
    if before_train is not None:
        before_train()
    sft.train(settings, run_dir, process)


def train_ranks(settings: SftSettings, run_dir: Path, *, attempt: str = "001", stop_after: int | None = None, before_train=None,
                timeout_s: float = 180) -> None:
    """One attempt, as `mfsdp sft` makes it. Raises RanksFailed with the first failure's traceback.

    before_train  called on every rank, to break something there
    """
    run_ranks(settings.trainer.n_gpus_per_node, _one_rank, settings, run_dir, attempt, stop_after, before_train, timeout_s=timeout_s)


END_OF_TURN = 432  # <|im_end|> of the tiny models


def save_checkpoint(engine, model: Path, layout, run_dir: Path, contents: tuple[str, ...] = ("model", "optimizer", "extra")) -> Path:
    """A checkpoint of step 1 as the trainer writes it. Collective."""
    from mfsdp_cli.checkpoint.reuse import ModelSource
    from mfsdp_cli.train.checkpoints import Position
    from mfsdp_cli.train.saver import Saver

    settings = SftSettings()
    settings.model.path, settings.engine, settings.checkpoint.save_contents = str(model), layout.settings, list(contents)
    with Saver(engine, settings, run_dir, ModelSource(model), 10, END_OF_TURN, None, print) as saver:
        saver.save(Position(1, 5))
    return saver.saved


def training_records(run_dir: Path) -> list[dict]:
    """metrics.jsonl as the reader gives it, without validation records and without what depends on the clock."""
    from mfsdp_cli.train.metrics import read_metrics

    return [{k: v for k, v in r.items() if k not in TIMING} for r in read_metrics(run_dir) if "loss" in r]


def validation_losses(run_dir: Path) -> dict[int, float]:
    from mfsdp_cli.train.metrics import read_metrics

    return {r["step"]: r["val_loss"] for r in read_metrics(run_dir) if "loss" not in r}


def stored(folder: Path, beside_objects: bool = False) -> dict:
    """Every tensor of a DCP folder, whole, by name. beside_objects: pickled objects may be there, and are passed over."""
    import torch
    import torch.distributed.checkpoint as dcp

    from mfsdp_cli.checkpoint.dcp_metadata import read_dcp

    found = read_dcp(folder)
    assert not found.problems and (beside_objects or not found.objects)
    state = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in found.tensors}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state
