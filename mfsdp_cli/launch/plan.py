"""The arithmetic of a run: how the ranks split, how many steps there are, how the learning rate moves. Pure."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from mfsdp_cli.config.rules_grpo import uses_reference
from mfsdp_cli.config.rules_rollout import num_engines, sampler_gpus
from mfsdp_cli.config.values import kind_of, validates_only
from mfsdp_cli.records import Record

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.launch.facts import Facts


class Plan(Record):
    """world_size = dp x tp x pp x cp = expert_dp x ep x etp x pp, in ranks.

    num_train_rows, num_val_rows   rows used, after train_max_samples and val_max_samples
    steps_per_epoch      whole batches in an epoch; the dropped_rows_per_epoch left over are other rows in every epoch,
                         since the order changes, unless data.shuffle is False
    total_steps          steps of the whole run: in SFT one update each, in GRPO one rollout each and the updates on it; 0 when
                         it only validates
    warmup_steps         steps in which the learning rate rises
    rows_per_dp_rank     conversations, or responses, of one update that one data-parallel rank works on
    micro_batch_tokens   most tokens of a micro batch of one rank
    min_micro_batches, max_micro_batches  of one rank and update; they differ when micro batches are formed by tokens, since
                         the lengths are not known here
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
    micro_batch_tokens: int
    min_micro_batches: int
    max_micro_batches: int


class GrpoPlan(Plan):
    """What reinforcement learning adds.

    num_engines, gpus_per_engine  sampler processes and the GPUs of each (0 on CPU)
    num_gpus             of the trainer and of samplers that are apart, over all nodes (0 on CPU)
    samples_per_step     responses of one rollout, train_batch_size x rollout.n
    samples_per_update   responses of one optimizer step, ppo_mini_batch_size x rollout.n
    updates_per_step     optimizer steps on one rollout
    uses_reference       whether a reference model is loaded
    """

    num_engines: int
    gpus_per_engine: int
    num_gpus: int
    samples_per_step: int
    samples_per_update: int
    updates_per_step: int
    uses_reference: bool


def make_plan(settings: SftSettings | GrpoSettings, facts: Facts) -> Plan:
    """Derive the plan. Never raises: a layout that does not divide is rounded down here and refused by `config.rules`."""
    engine, data, optim, trainer = settings.engine, settings.data, settings.optim, settings.trainer
    tp, pp, cp = engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size, engine.context_parallel_size
    ep, etp = engine.expert_model_parallel_size, engine.expert_tensor_parallel_size
    world = trainer.nnodes * trainer.n_gpus_per_node
    dp = max(1, world // (tp * pp * cp))
    rows = _num_rows(data.train_files, data.train_max_samples, facts)
    steps_per_epoch = rows // data.train_batch_size
    total = 0 if validates_only(settings) else trainer.total_training_steps or trainer.total_epochs * steps_per_epoch
    device = choose_device(engine.device, facts.num_gpus)
    make, per_update = Plan, rows_of_update(settings)
    if kind_of(settings) == "grpo":
        make = _grpo_plan(settings, device)
    tokens, least, most = micro_batches(settings, dp)
    return make(
        world_size=world, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp,
        expert_dp=max(1, world // (ep * etp * pp)),
        device=device,
        num_train_rows=rows,
        num_val_rows=_num_rows(data.val_files, data.val_max_samples, facts),
        steps_per_epoch=steps_per_epoch,
        dropped_rows_per_epoch=rows - steps_per_epoch * data.train_batch_size,
        total_steps=total,
        warmup_steps=warmup_steps(optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, total),
        rows_per_dp_rank=per_update / dp,
        micro_batch_tokens=tokens,
        min_micro_batches=least,
        max_micro_batches=most,
    )


def rows_of_update(settings: SftSettings | GrpoSettings) -> int:
    """Conversations, or responses, of one optimizer step over all ranks."""
    if kind_of(settings) == "sft":
        return settings.data.train_batch_size
    return settings.actor.ppo_mini_batch_size * settings.rollout.n


def longest_sequence(settings: SftSettings | GrpoSettings) -> int:
    """Tokens of the longest sequence that is accepted."""
    data = settings.data
    if kind_of(settings) == "sft":
        return data.max_length or data.max_token_len_per_gpu
    return data.max_prompt_length + data.max_response_length


def micro_batch_key(settings: SftSettings | GrpoSettings) -> str:
    """The setting that sizes micro batches: a number of tokens, or with use_dynamic_bsz False of rows."""
    if kind_of(settings) == "sft":
        return "data.max_token_len_per_gpu" if settings.data.use_dynamic_bsz else "data.micro_batch_size_per_gpu"
    return "actor.ppo_max_token_len_per_gpu" if settings.actor.use_dynamic_bsz else "actor.ppo_micro_batch_size_per_gpu"


def by_tokens(settings: SftSettings | GrpoSettings) -> bool:
    return (settings.data if kind_of(settings) == "sft" else settings.actor).use_dynamic_bsz


def micro_batches(settings: SftSettings | GrpoSettings, dp: int) -> tuple[int, int, int]:
    """Most tokens of a micro batch, and the fewest and most micro batches of a rank and update (`train.batching`). By tokens a
    rank has one if all its rows fit, and at worst one for each row."""
    section, _, name = micro_batch_key(settings).partition(".")
    size = getattr(getattr(settings, section), name)
    rows, longest = rows_of_update(settings), longest_sequence(settings)
    share = max(1, math.ceil(rows / dp))
    if by_tokens(settings):
        return min(size, rows * longest), 1, share
    number = max(1, math.ceil(share / size))
    return min(size, share) * longest, number, number


def _grpo_plan(settings: GrpoSettings, device: str) -> partial[GrpoPlan]:
    actor, rollout, cuda = settings.actor, settings.rollout, device == "cuda"
    batch = settings.data.train_batch_size
    ranks = settings.trainer.nnodes * settings.trainer.n_gpus_per_node
    return partial(
        GrpoPlan,
        num_engines=num_engines(settings, cuda),
        gpus_per_engine=rollout.tensor_model_parallel_size if cuda else 0,
        num_gpus=ranks + sampler_gpus(settings) if cuda else 0,
        samples_per_step=batch * rollout.n,
        samples_per_update=actor.ppo_mini_batch_size * rollout.n,
        updates_per_step=batch // actor.ppo_mini_batch_size * actor.ppo_epochs,
        uses_reference=uses_reference(settings),
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
