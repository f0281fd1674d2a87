"""A checkpoint's weights as a Hugging Face folder, checked: the program behind `mfsdp ckpt export-hf`.

    dist_ckpt (any layout) -> an unsharded model on the CPU -> Megatron-Bridge, tensor by tensor -> safetensors shards
    -> names, shapes, dtypes and bytes against the source model's index -> a forward pass against the Megatron model

Everything is written into OUT.tmp, which gets its name only when all checks have passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from mfsdp_cli.checkpoint import manifest
from mfsdp_cli.checkpoint.hf_folder import INDEX, read_hf
from mfsdp_cli.checkpoint.reuse import SOURCE_INDEX
from mfsdp_cli.errors import BAD_INPUT, MISMATCH, RUN_FAILED, MfsdpError, Problem
from mfsdp_cli.output import format_problems

SHARD_BYTES = 5_000_000_000
CHECK_TOKENS = 48
# Mean difference of log-probabilities between Megatron's model and transformers' on the same weights; a weight in the
# wrong place moves it by tenths and more.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
_console = sys.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: each tensor's dtype in the source model")
    parser.add_argument("--source", type=Path, help="model folder to check against, instead of the index kept in the checkpoint")
    parser.add_argument("--no-forward-check", action="store_true")
    parser.add_argument("--json-report", type=Path)
    args = parser.parse_args()
    log = _hide_chatter(args.out.with_name(args.out.name + ".export.log"))
    try:
        report = export(args.checkpoint, args.out, args.dtype, args.source, not args.no_forward_check)
    except MfsdpError as error:
        _say(format_problems(error.problems))
        if args.json_report:
            args.json_report.write_text(json.dumps({"problems": [p.to_dict() for p in error.problems]}))
        sys.exit(error.exit_code)
    except Exception as error:
        _say(f"{traceback.format_exc()}\nerror: the export failed: {error}; what the libraries said is in {log}")
        sys.exit(RUN_FAILED)
    if args.json_report:
        args.json_report.write_text(json.dumps(report))
    log.unlink()


def _hide_chatter(log: Path) -> Path:
    """Send what libraries print to a log beside the target; `_say` still reaches the terminal."""
    global _console
    _console = os.fdopen(os.dup(2), "w")
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    return log


def export(checkpoint: Path, out: Path, dtype: str = "auto", source: Path | None = None, forward_check: bool = True) -> dict:
    """Write `out` and return a report. Raises MfsdpError: BAD_INPUT for a checkpoint that cannot be read, MISMATCH when a
    check fails; then `out` is as it was before."""
    started = time.monotonic()
    found = manifest.require_complete(checkpoint)
    index = source_index(checkpoint, source)
    _say("importing torch and megatron …")
    import torch
    import torch.distributed as dist

    from mfsdp_cli.config.schema import EngineSettings
    from mfsdp_cli.engine import bridge as bridging
    from mfsdp_cli.engine.megatron import init_distributed, plain_model

    if not bridging.ON_CPU:
        raise MfsdpError(Problem("CUDA_VISIBLE_DEVICES", "a GPU", "the export runs on the CPU", 'set CUDA_VISIBLE_DEVICES=""'))
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_distributed(EngineSettings(), timeout_s=1800)
    wanted = {t["dtype"] for t in index.values()} if dtype == "auto" else {dtype}
    work_dtype = torch.bfloat16 if wanted == {"bfloat16"} else torch.float32
    hf_folder = checkpoint / manifest.HUGGINGFACE
    bridge, model = plain_model(str(hf_folder), found.padded_vocab_size, work_dtype)
    _say(f"reading {checkpoint / manifest.DIST_CKPT} …")
    load_plain(model[0], checkpoint / manifest.DIST_CKPT)

    tmp = out.with_name(out.name + ".tmp")
    if tmp.exists():
        shutil.rmtree(tmp)
    shutil.copytree(hf_folder, tmp)
    vocab_size = bridge.hf_pretrained.vocab_size
    tensors = bridging.export_weights(bridge, model, vocab_size, None)
    tensors = ((name, t) for name, t in tensors if name in index or not (name == "lm_head.weight" and bridge.hf_pretrained.tie_word_embeddings))
    files = write_shards(tmp, (_as_wanted(name, t, dtype, index) for name, t in tensors))
    if dtype != "auto":
        _set_config_dtype(tmp / "config.json", dtype)
    problems = compare(tmp, index, dtype)
    difference = None
    if forward_check and not problems:
        mine = reference_log_probs(model[0], vocab_size)
        del model, bridge
        difference, problems = forward_problems(tmp, mine)
    if problems:
        shutil.rmtree(tmp)
        raise MfsdpError(problems)
    if out.exists():
        shutil.rmtree(out)
    tmp.rename(out)
    num_bytes = sum(t.num_bytes for t in read_hf(out).tensors)
    _say(f"{len(index)} tensors, {num_bytes:,} bytes in {len(files)} files; names, shapes, dtypes and bytes equal the source model's index"
         + ("" if difference is None else f"; log-probabilities differ by {difference:.1e} on average from the Megatron model's")
         + f" ({time.monotonic() - started:.0f} s)")
    return {"files": files, "num_tensors": len(index), "num_bytes": num_bytes, "step": found.step, "forward_check_difference": difference}


def _say(text: str) -> None:
    print(text, file=_console, flush=True)


def source_index(checkpoint: Path, source: Path | None) -> dict[str, dict]:
    """Tensor name -> {shape, dtype} of the source model: of the folder given, else as the trainer noted it."""
    if source is not None:
        found = read_hf(source)
        if found.problems or not found.tensors:
            raise MfsdpError(list(found.problems) or Problem("--source", str(source), "no safetensors in it", "give a model folder", code=BAD_INPUT))
        return {t.name: {"shape": list(t.shape), "dtype": t.dtype} for t in found.tensors}
    path = checkpoint / SOURCE_INDEX
    if not path.is_file():
        raise MfsdpError(Problem(str(path), "missing", "there is nothing to check the export against", "give the model folder by --source", code=BAD_INPUT))
    return json.loads(path.read_text())


def load_plain(model, folder: Path) -> None:
    """Fill an unsharded model from a DTensor checkpoint of any layout, strictly; a gated linear_fc1 by its two halves."""
    from mfsdp_cli.checkpoint import dtensor

    state = {}
    for name, param in model.named_parameters():
        key = f"model.{dtensor.canonical(name)}"
        if key.endswith("linear_fc1.weight") and model.config.gated_linear_unit:
            state[f"{key}_w"], state[f"{key}_v"] = param.data.chunk(2)
        else:
            state[key] = param.data
    dtensor.read_into(state, folder, dtensor.stored_tensors(folder), ["model"])


def _as_wanted(name: str, tensor, dtype: str, index: dict[str, dict]):
    import torch

    wanted = index[name]["dtype"] if dtype == "auto" and name in index else dtype
    return name, tensor if wanted == "auto" else tensor.to(getattr(torch, wanted))


def write_shards(folder: Path, tensors: Iterable, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Stream tensors into safetensors files of at most `shard_bytes` (a larger tensor gets a file of its own), and the
    index when there are several. Holds one shard in memory. Returns the files' names."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending, size, total = {}, 0, 0

    def flush():
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and size + num_bytes > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor
        size, total = size + num_bytes, total + num_bytes
    flush()
    count = len(shards)
    names = ["model.safetensors"] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for number, name in enumerate(names):
        (folder / f"shard-{number}").rename(folder / name)
    if count > 1:
        places = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")
    return names


def _set_config_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def compare(folder: Path, index: dict[str, dict], dtype: str) -> list[Problem]:
    """What the written folder has otherwise than the source model: names, shapes, dtypes (when kept), bytes; and values
    that are not finite."""
    found = read_hf(folder)
    written = {t.name: t for t in found.tensors}
    problems = list(found.problems)
    for name in sorted(index.keys() - written.keys()):
        problems.append(_mismatch(name, "missing", "the source model has this tensor"))
    for name in sorted(written.keys() - index.keys()):
        problems.append(_mismatch(name, "superfluous", "the source model has no such tensor"))
    for name in sorted(index.keys() & written.keys()):
        wanted = index[name] | ({} if dtype == "auto" else {"dtype": dtype})
        is_there = {"shape": list(written[name].shape), "dtype": written[name].dtype}
        if is_there != wanted:
            problems.append(_mismatch(name, str(is_there), f"the source model has {wanted}"))
    return problems + _non_finite(folder, written)


def _non_finite(folder: Path, written: dict) -> list[Problem]:
    from safetensors import safe_open

    problems = []
    for file in sorted({f for t in written.values() for f in t.files}):
        with safe_open(folder / file, "pt") as reader:
            for name in reader.keys():
                if not reader.get_tensor(name).isfinite().all():
                    problems.append(_mismatch(name, "NaN or infinity", "training has diverged before this checkpoint"))
    return problems


def _mismatch(name: str, found: str, why: str) -> Problem:
    return Problem(name, found, why, "do not use this export; report it with the checkpoint's manifest.json", code=MISMATCH)


def _check_ids(vocab_size: int):
    import torch

    return (torch.arange(CHECK_TOKENS) * 7919 + 11) % vocab_size


def reference_log_probs(model, vocab_size: int):
    """Megatron's log-probabilities of a fixed sequence, float32 [CHECK_TOKENS - 1]."""
    import torch

    from mfsdp_cli.engine import forward
    from mfsdp_cli.types import PackedBatch

    ids = _check_ids(vocab_size)
    batch = PackedBatch(
        input_ids=ids, labels=ids.roll(-1), target_mask=torch.ones(len(ids)), position_ids=torch.arange(len(ids)),
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32), max_seqlen=len(ids), num_real_tokens=len(ids),
    )
    with torch.no_grad():
        return forward.log_probs(model.eval(), batch, vocab_size)[0][:-1].float()


def forward_problems(folder: Path, mine) -> tuple[float, list[Problem]]:
    """(mean difference, problems): the exported folder, loaded by transformers, against `reference_log_probs`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = _check_ids(model.config.vocab_size)
    with torch.no_grad():
        theirs = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1).gather(-1, ids[1:, None])[:, 0]
    difference = (mine - theirs).abs().mean().item()
    dtypes = {t.dtype for t in read_hf(folder).tensors} | {str(model.dtype).removeprefix("torch.")}
    limit = TOLERANCE["float32" if dtypes == {"float32"} else "bfloat16"]
    if difference <= limit:
        return difference, []
    return difference, [_mismatch("forward pass", f"mean difference {difference:.2e}", f"log-probabilities should agree to {limit:.0e}")]


if __name__ == "__main__":
    main()
