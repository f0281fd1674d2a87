"""The arithmetic of a run: how the ranks split, how many steps there are, how the learning rate moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.launch.facts import Facts


@dataclass(frozen=True)
class Plan:
    """world_size = dp x tp x pp x cp = expert_dp x ep x etp x pp, in ranks.

    num_train_rows, num_val_rows   rows used, after train_max_samples and val_max_samples
    steps_per_epoch      whole batches in an epoch; the dropped_rows_per_epoch left over are other rows in every epoch,
                         since the order changes, unless data.shuffle is False
    total_steps          optimizer steps of the whole run
    warmup_steps         steps in which the learning rate rises
    rows_per_dp_rank     conversations of one step that one data-parallel rank works on
    """

    world_size: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    expert_dp: int
    device: str
    num_train_rows: int
    num_val_rows: int
    steps_per_epoch: int
    dropped_rows_per_epoch: int
    total_steps: int
    warmup_steps: int
    rows_per_dp_rank: float


def make_plan(settings: SftSettings, facts: Facts) -> Plan:
    """Derive the plan. Never raises: a layout that does not divide is rounded down here and refused by `config.rules`."""
    engine, data, optim, trainer = settings.engine, settings.data, settings.optim, settings.trainer
    tp, pp, cp = engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size, engine.context_parallel_size
    ep, etp = engine.expert_model_parallel_size, engine.expert_tensor_parallel_size
    world = trainer.nnodes * trainer.n_gpus_per_node
    dp = max(1, world // (tp * pp * cp))
    rows = _num_rows(data.train_files, data.train_max_samples, facts)
    steps_per_epoch = rows // data.train_batch_size
    total = trainer.total_training_steps or trainer.total_epochs * steps_per_epoch
    return Plan(
        world_size=world, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp,
        expert_dp=max(1, world // (ep * etp * pp)),
        device=choose_device(engine.device, facts.num_gpus),
        num_train_rows=rows,
        num_val_rows=_num_rows(data.val_files, data.val_max_samples, facts),
        steps_per_epoch=steps_per_epoch,
        dropped_rows_per_epoch=rows - steps_per_epoch * data.train_batch_size,
        total_steps=total,
        warmup_steps=warmup_steps(optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, total),
        rows_per_dp_rank=data.train_batch_size / dp,
    )


def warmup_steps(steps: int, ratio: float, total_steps: int) -> int:
    """lr_warmup_steps when given (not -1), else the ratio of all steps, rounded down; never more than there are steps."""
    return min(steps if steps >= 0 else int(ratio * total_steps), total_steps)


def choose_device(setting: str, num_gpus: int) -> str:
    """engine.device with auto resolved: cuda when a GPU is visible, else cpu."""
    if setting != "auto":
        return setting
    return "cuda" if num_gpus > 0 else "cpu"


def _num_rows(files: list[str], limit: int, facts: Facts) -> int:
    rows = sum(facts.parquet[path].num_rows for path in files if path in facts.parquet)
    return rows if limit < 0 else min(rows, limit)
