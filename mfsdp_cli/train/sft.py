"""Supervised fine-tuning, top to bottom: the program that torchrun starts on every rank.

    parquet -> chat (mask) -> global batch in a seeded order -> micro batches by token budget -> packed THD
    -> forward_backward (loss / global number of targets) -> optimizer step -> metrics -> validate, save

Not here: the loss over several epochs of one batch, streaming data sets, sequence classification, LoRA.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mfsdp_cli.checkpoint.retention import recorded
from mfsdp_cli.config.load import read_resolved, to_dict
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.train.process import RankProcess, parse_arguments

# A step is queued before the one before it is settled, unless steps take longer: then Python's part is nothing beside the GPU's, and a
# request to stop is answered at the end of the step in which it comes, not two later.
AHEAD_BELOW_S = 5.0


def main() -> None:
    args = parse_arguments(__doc__)
    process = RankProcess(args.attempt_dir, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    with process.last_word():
        train(read_resolved(args.config), args.run_dir, process)


def train(settings: SftSettings, run_dir: Path, process: RankProcess) -> None:
    process.say("importing torch and megatron …")
    import torch.distributed as dist

    from mfsdp_cli.data.loader import BatchStream
    from mfsdp_cli.engine.megatron import NonFiniteGradient, init_distributed
    from mfsdp_cli.train import checkpoints
    from mfsdp_cli.train.metrics import EtaMeter, MetricsLog, step_line
    from mfsdp_cli.train.saver import Saver
    from mfsdp_cli.train.schedule import due

    data, trainer = settings.data, settings.trainer
    device = init_distributed(settings.engine, trainer.startup_timeout_s)
    source = checkpoints.find_source(settings.model.path, settings.model.trust_remote_code, process.local_rank)
    resume, warnings = checkpoints.find_resume(settings, run_dir)
    process.say(f"reading {settings.model.path}" + (f", weights from {resume.folder}" if resume else " …"))
    engine, loaded = checkpoints.build_engine(settings, source, resume, settings.optim, device)
    warnings += loaded
    train_rows, val_rows, chat, notes = open_data(settings, source.folder, process)
    for problem in warnings + notes:
        process.say(f"{problem.level}: {problem.key}: {problem.why}")

    position = resume.position if resume else checkpoints.Position()
    total_steps = trainer.total_training_steps or trainer.total_epochs * (len(train_rows) // data.train_batch_size)
    if resume and total_steps != resume.manifest.total_steps:
        process.say(f"warning: the run was planned for {resume.manifest.total_steps} steps and now has {total_steps}: its learning-rate curve changes")
    stream = BatchStream(train_rows, data.train_batch_size, trainer.seed, data.shuffle, position.samples_consumed)
    meter = EtaMeter(total_steps)
    record: dict = {}
    saver = Saver(engine, settings, run_dir, source, total_steps, chat.end_of_turn_id, resume.folder if resume else None, process.say)
    stopped, settled_at, slow = False, 0.0, True

    def validate():
        val_loss = evaluate(engine, settings, val_rows)
        log.log({"step": position.step, "total_steps": total_steps, "val_loss": val_loss})
        record["val_loss"] = val_loss
        process.say(step_line({"step": position.step, "total_steps": total_steps, "val_loss": val_loss}))

    def settle(queued: QueuedStep):
        """Wait for a step, and tell it."""
        nonlocal record, stopped, settled_at, slow
        loss, grad_norm, memory_gib, asked, slowest_s = queued.numbers.get()
        try:
            engine.finite(grad_norm)
        except NonFiniteGradient as error:
            report_bad_batch(queued.batch, loss, process)
            saver.wait()
            raise ArithmeticError(f"step {queued.record['step']}: {error}; nothing was applied, the last checkpoint is {saver.saved}; the batch "
                                  f"is in {process.attempt_dir / 'bad_batch.json'}") from error
        slow = slowest_s >= AHEAD_BELOW_S
        step_s, settled_at = time.monotonic() - max(queued.started, settled_at), time.monotonic()
        times = {"step_s": step_s, "memory_gib": memory_gib, **meter.add(queued.record["step"], queued.record["num_tokens"], step_s)}
        record, stopped = queued.record | {"loss": loss, "grad_norm": grad_norm} | times, stopped or bool(asked)
        log.log(record)
        process.say(step_line(record))

    with stream, saver, MetricsLog(run_dir, trainer.logger, trainer.project_name, trainer.experiment_name, to_dict(settings),
                                   process.rank == 0, position.step) as log:
        for note in log.notes:
            process.say(f"note: {note}")
        if val_rows is not None and position.step == 0:
            validate()
        behind = None  # the step before, which the GPU works on while the next one is queued
        for step in range(position.step + 1, total_steps + 1):
            queued = queue_step(engine, settings, process, stream, step, total_steps, record.get("step_s", AHEAD_BELOW_S))
            if behind:
                settle(behind)
            behind, position = queued, checkpoints.Position(step, stream.samples_consumed)
            validates = val_rows is not None and (step == total_steps or due(step, trainer.test_freq))
            saves = step == total_steps or due(step, trainer.save_freq)
            if validates or saves or stopped or slow:
                settle(behind)
                behind = None
                if validates and not stopped:
                    validate()
                if saves or stopped:
                    log.sync()
                    saver.save(replace(position, metrics=recorded(record)))
            saver.check()
            if stopped:
                break
    process.say("stopped on request" if stopped and position.step < total_steps else "done")
    status = "stopped" if position.step < total_steps else "done"
    saved = str(saver.saved) if saver.saved else None
    process.finish({"status": status, "step": position.step, "total_steps": total_steps, "checkpoint": saved, "metrics": record})
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class QueuedStep:
    """numbers: loss over all ranks, gradient norm; of any rank the most memory, whether it was asked to stop, and `last_s` (a `ToHost`)."""

    started: float
    batch: list
    record: dict
    numbers: object


def queue_step(engine, settings: SftSettings, process: RankProcess, stream, step: int, total_steps: int, last_s: float) -> QueuedStep:
    """Queue one optimizer step. Nothing in here waits for the GPU, so that it never waits for Python.

    last_s  seconds of the step before; from the largest of all ranks they decide alike whether to queue ahead"""
    import torch
    import torch.distributed as dist

    from mfsdp_cli.engine.host import ToHost, to_device
    from mfsdp_cli.train.losses import sft_loss
    from mfsdp_cli.train.schedule import learning_rate

    started = time.monotonic()
    epoch, batch = stream.epoch, next(stream)
    num_tokens, num_targets = sum(s.num_tokens for s in batch), sum(s.num_targets for s in batch)
    micro_batches = pack_mine(batch, settings, engine)
    data_s = time.monotonic() - started
    loss = engine.forward_backward(micro_batches, lambda log_probs, packed: sft_loss(log_probs, packed.target_mask, num_targets))
    lr = learning_rate(settings.optim, step, total_steps)
    grad_norm = engine.optimizer_step(lr)
    dist.all_reduce(loss, group=engine.dp_group)
    shared = to_device(torch.tensor([peak_memory_gib(engine.device), float(process.stop_asked()), last_s]), engine.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    record = {
        "step": step, "total_steps": total_steps, "epoch": epoch, "samples_consumed": stream.samples_consumed, "lr": lr,
        "num_tokens": num_tokens, "num_targets": num_targets, "num_micro_batches": len(micro_batches), "data_s": data_s,
    }
    return QueuedStep(started, batch, record, ToHost(torch.cat([torch.stack([loss, grad_norm]), shared])))


def open_data(settings: SftSettings, model_dir: Path, process: RankProcess):
    """Training rows, validation rows or None, the chat tokenizer, and notes. Every row is rendered once, shared among the
    ranks, so that all overlong rows and rows without a target are named before the first step. Raises MfsdpError with them."""
    import torch.distributed as dist
    from transformers import AutoTokenizer

    from mfsdp_cli.data.chat import ChatTokenizer
    from mfsdp_cli.data.loader import ChatDataset, merge_checks

    data = settings.data
    budget = settings.engine.usable_tokens(data.max_token_len_per_gpu)
    chat = ChatTokenizer(AutoTokenizer.from_pretrained(model_dir, trust_remote_code=settings.model.trust_remote_code))
    datasets, problems = [], []
    for name, files, limit in (("training", data.train_files, data.train_max_samples), ("validation", data.val_files, data.val_max_samples)):
        if not files:
            datasets.append(None)
            continue
        rows = ChatDataset(files, data.messages_key, chat, min(data.max_length or budget, budget), data.truncation, limit)
        checks: list = [None] * dist.get_world_size()
        dist.all_gather_object(checks, rows.check(dist.get_rank(), dist.get_world_size()))
        total = merge_checks(checks)
        problems += rows.problems(total)
        process.say(f"{name} data: {total.num_rows} rows, {total.num_tokens} tokens, {total.num_targets} of them targets, longest row "
                    f"{total.longest}, {total.num_truncated} rows truncated, {total.num_straddling} tokens astride a boundary not learned")
        datasets.append(rows)
    if problems:
        raise MfsdpError(problems)
    return *datasets, chat, list(chat.notes)


def pack_mine(batch: list, settings: SftSettings, engine) -> list:
    """This rank's micro batches of a global batch, packed. Every data-parallel rank gets the same number."""
    from mfsdp_cli.data.pack import pack
    from mfsdp_cli.train.batching import fixed_micro_batches, plan_micro_batches

    data = settings.data
    if data.use_dynamic_bsz:
        budget = settings.engine.usable_tokens(data.max_token_len_per_gpu)
        plan = plan_micro_batches([s.num_tokens for s in batch], dp_size=engine.dp_size, max_tokens=budget)
    else:
        plan = fixed_micro_batches(len(batch), engine.dp_size, data.micro_batch_size_per_gpu)
    return [pack([batch[i] for i in indices], multiple_of=engine.sequence_multiple) for indices in plan[engine.dp_rank]]


def evaluate(engine, settings: SftSettings, rows) -> float:
    """Mean negative log-probability of the validation targets, over all ranks. Collective."""
    import torch
    import torch.distributed as dist

    from mfsdp_cli.engine.host import to_device

    batch = [rows.sample(i) for i in range(len(rows))]
    micro_batches = pack_mine(batch, settings, engine)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for packed, log_probs in zip(micro_batches, engine.log_probs(micro_batches)):
        total -= (log_probs * to_device(packed.target_mask, engine.device)).sum()
    dist.all_reduce(total, group=engine.dp_group)
    return total.item() / sum(sample.num_targets for sample in batch)


def report_bad_batch(batch: list, loss: float, process: RankProcess) -> None:
    if process.rank == 0:
        rows = [{"row": s.row, "num_tokens": s.num_tokens, "num_targets": s.num_targets, "input_ids": s.input_ids.tolist()} for s in batch]
        (process.attempt_dir / "bad_batch.json").write_text(json.dumps({"loss": str(loss), "rows": rows}) + "\n")


def peak_memory_gib(device) -> float:
    """Most memory of this rank so far: of the GPU if there is one, else of the process."""
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
