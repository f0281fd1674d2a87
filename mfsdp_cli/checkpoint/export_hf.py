"""A checkpoint's weights as a Hugging Face folder, checked: the program behind `mfsdp ckpt export-hf`.

    dist_ckpt (any layout) -> one parameter at a time -> Megatron-Bridge's conversions -> its place in the safetensors files
    -> names, shapes, dtypes and bytes against the source model's index -> a forward pass against the Megatron model

The model itself is never built: at its peak an export holds a few times the largest tensor, and the forward pass one layer of
the model. Everything is written beside the target (`export_target`), which changes only when all checks have passed.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mfsdp_cli.checkpoint import export_target
from mfsdp_cli.checkpoint.export_progress import Progress
from mfsdp_cli.checkpoint.export_source import ExportSource, find_export_source
from mfsdp_cli.checkpoint.hf_folder import INDEX, read_hf
from mfsdp_cli.checkpoint.shard_files import SHARD_BYTES, ShardFiles, total_bytes
from mfsdp_cli.errors import INTERRUPTED, MACHINE_UNFIT, MISMATCH, RUN_FAILED, TERMINATED, MfsdpError, Problem
from mfsdp_cli.output import format_problems

_FINITE_PIECE = 1 << 24
_WEIGHTS = ("*.safetensors", INDEX, "*.bin", "*.bin.index.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: each tensor's dtype in the source model")
    parser.add_argument("--source", type=Path, help="model folder to check against, instead of the index kept in the checkpoint")
    parser.add_argument("--no-forward-check", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    parser.add_argument("--json-report", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that what is half written is deleted
    progress = Progress(os.fdopen(os.dup(2), "w"), args.quiet, args.no_color)
    try:
        with export_target.claimed(args.out, args.checkpoint) as target:
            report = _logged(target, lambda: export(args.checkpoint, target, args.dtype, args.source, not args.no_forward_check, progress))
    except MfsdpError as error:
        progress.stop()
        print(format_problems(error.problems), file=progress.stream)
        report = {"problems": [p.to_dict() for p in error.problems]}
        code = error.exit_code
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    else:
        code = 0 if report else RUN_FAILED
    finally:
        progress.stop()
    if args.json_report and report:
        args.json_report.write_text(json.dumps(report))
    sys.exit(code)


def _logged(target: export_target.Target, work) -> dict:
    """Run `work` with what libraries print in a log; the report, or nothing after a failure of ours, which keeps the log."""
    terminal = os.dup(2)
    log = os.open(target.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        return work()
    except MfsdpError:
        raise
    except Exception as error:
        text = f"{traceback.format_exc()}\nerror: the export failed: {error}; what the libraries said is in {target.keep_log()}\n"
        os.write(terminal, text.encode())
        return {}
    finally:
        for descriptor in (1, 2):
            os.dup2(terminal, descriptor)
        os.close(log)
        os.close(terminal)


def export(checkpoint: Path, target: export_target.Target, dtype: str = "auto", source: Path | None = None, forward_check: bool = True,
           progress: Progress | None = None, shard_bytes: int = SHARD_BYTES) -> dict:
    """Write the claimed target and return a report. Raises MfsdpError: BAD_INPUT for a checkpoint that cannot be read,
    MISMATCH when a check fails, MACHINE_UNFIT when the disk is full; then the target's folder is as it was before."""
    started, progress = time.monotonic(), progress or Progress(quiet=True)
    found = find_export_source(checkpoint, source)
    entries = {name: entry if dtype == "auto" else entry | {"dtype": dtype} for name, entry in found.index.items()}
    progress.say("importing torch and megatron …")
    bridge, model, stored = _open(found, {entry["dtype"] for entry in entries.values()})
    progress.say(f"reading {found.dcp} …")
    try:
        shutil.copytree(found.huggingface, target.model, ignore=shutil.ignore_patterns(*_WEIGHTS))
        if dtype != "auto":
            _set_config_dtype(target.model / "config.json", dtype)
        files = _convert(found, bridge, model, stored, entries, target.model, progress, shard_bytes)
        _flush(target.model)
    except OSError as error:
        if not any(os.strerror(full) in str(error) for full in (errno.ENOSPC, errno.EDQUOT)):
            raise
        raise MfsdpError(Problem("--out", str(target.out), f"the disk is full: the weights need {total_bytes(entries):,} bytes",
                                 "free some space or name a folder on another disk", "command line", MACHINE_UNFIT)) from None
    difference = None
    if forward_check:
        progress.say("running both models, one layer at a time …")
        difference = _prove(model[0], stored, target.model)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    target.publish()
    num_bytes = sum(t.num_bytes for t in read_hf(target.out).tensors)
    progress.say(f"{len(entries)} tensors, {num_bytes:,} bytes in {len(files)} files; names, shapes, dtypes and bytes equal the source model's index"
                 + ("" if difference is None else f"; log-probabilities differ by {difference:.1e} on average from the Megatron model's")
                 + f" ({time.monotonic() - started:.0f} s, at most {peak / 2**30:.1f} GiB of memory)")
    return {"files": files, "num_tensors": len(entries), "num_bytes": num_bytes, "step": found.step, "forward_check_difference": difference,
            "peak_rss_bytes": peak}


def _open(found: ExportSource, dtypes: set[str]):
    """Bridge, a model without storage, and the reader of its parameters, which fits it."""
    import torch
    import torch.distributed as dist

    from mfsdp_cli.checkpoint.stored_weights import StoredWeights
    from mfsdp_cli.config.schema import EngineSettings
    from mfsdp_cli.engine import bridge as bridging
    from mfsdp_cli.engine.megatron import hollow_model, init_distributed

    if not bridging.ON_CPU:
        raise MfsdpError(Problem("CUDA_VISIBLE_DEVICES", "a GPU", "the export runs on the CPU", 'set CUDA_VISIBLE_DEVICES=""'))
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_distributed(EngineSettings(), timeout_s=1800)
    dtype = torch.bfloat16 if dtypes == {"bfloat16"} else torch.float32
    bridge, model = hollow_model(str(found.huggingface), found.vocab_rows, dtype)
    stored = StoredWeights(found.dcp, found.tensors)
    stored.check(model[0])
    return bridge, model, stored


def _convert(found: ExportSource, bridge, model, stored, entries: dict[str, dict], folder: Path, progress: Progress, shard_bytes: int) -> list[str]:
    """Write all tensors into `folder` and return the files' names. Raises MfsdpError (MISMATCH) with everything that is other
    than in `entries`: names, shapes, and values that are not finite."""
    from mfsdp_cli.engine import bridge as bridging

    config, problems, missing, done_bytes = bridging.config_of(bridge), [], set(entries), 0
    tied_copy = "lm_head.weight" if config.tie_word_embeddings else ""
    beside = {t.name: found.weights / t.files[0] for t in read_hf(found.weights).tensors} if found.weights else {}
    with ShardFiles(folder, entries, shard_bytes) as files:
        for name, tensor in bridging.export_weights(bridge, model, config.vocab_size, _tasks(bridge, model, stored)):
            if name not in entries and name == tied_copy:
                continue
            tensor, fault = _as_wanted(name, tensor, entries, beside.get(name))
            missing.discard(name)
            if fault is None:
                files.write(name, tensor)
                done_bytes += tensor.nbytes
            else:
                problems.append(fault)
            progress.advance(len(entries) - len(missing), len(entries), done_bytes, files.num_bytes)
            del tensor
        problems += [_mismatch(name, "missing", "the source model has this tensor") for name in sorted(missing)]
        if problems:
            raise MfsdpError(problems)
    return files.files


def _tasks(bridge, model, stored) -> Iterator:
    """Bridge's conversions, each with its parameter read when its turn comes."""
    from mfsdp_cli.engine import bridge as bridging

    for task in bridging.conversion_tasks(bridge, model):
        yield replace(task, param_weight=stored.read(task.param_name, task.param_weight))


def _as_wanted(name: str, tensor, entries: dict[str, dict], beside: Path | None):
    """The tensor in the dtype to be written, and what is wrong with it. beside: a file in which it should be, too."""
    import torch

    if name not in entries:
        return tensor, _mismatch(name, "superfluous", "the source model has no such tensor")
    wanted = entries[name]
    if list(tensor.shape) != wanted["shape"]:
        return tensor, _mismatch(name, f"shape {list(tensor.shape)}", f"the source model has {wanted['shape']}")
    if not all(piece.isfinite().all() for piece in tensor.reshape(-1).split(_FINITE_PIECE)):
        return tensor, _mismatch(name, "NaN or infinity", "training has diverged before this checkpoint")
    if beside is not None and not _is_in(beside, name, tensor):
        return tensor, _mismatch(name, f"other than in {beside}", "the Hugging Face weights saved with the shards are not the same model's")
    return tensor.to(getattr(torch, wanted["dtype"])), None


def _is_in(file: Path, name: str, tensor) -> bool:
    from safetensors import safe_open

    with safe_open(file, "pt") as reader:
        theirs = reader.get_tensor(name)
        # in the narrower dtype: the shards are float32, the file's what its trainer chose, ours what is to be written
        narrow = theirs.dtype if theirs.element_size() <= tensor.element_size() else tensor.dtype
        return theirs.to(narrow).equal(tensor.to(narrow))


def _prove(model, stored, folder: Path) -> float:
    """Mean difference of log-probabilities between the two models. Raises MfsdpError (MISMATCH) when it is no rounding."""
    from mfsdp_cli.checkpoint import export_proof

    vocab_size = read_hf(folder).config["vocab_size"]
    dtype = next(model.parameters()).dtype
    mine = export_proof.megatron_log_probs(model, stored, vocab_size)
    difference, limit = (mine - export_proof.transformers_log_probs(folder)).abs().mean().item(), export_proof.limit(folder, dtype)
    if not difference <= limit:
        raise MfsdpError(_mismatch("forward pass", f"mean difference {difference:.2e}", f"log-probabilities should agree to {limit:.0e}"))
    return difference


def _set_config_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def _flush(folder: Path) -> None:
    """The small files, too, before the folder gets its name."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mismatch(name: str, found: str, why: str) -> Problem:
    return Problem(name, found, why, "do not use this export; report it with the checkpoint's manifest.json", code=MISMATCH)


if __name__ == "__main__":
    main()
