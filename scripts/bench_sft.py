#!/usr/bin/env python
"""Training throughput of one GPU (or CPU): our engine and what a user would pick instead, same shape and tokens, one process each.

    python scripts/bench_sft.py --shape 1.5b --tokens 16384 --seq 2048 --peers hf,hf-liger,trl
    python scripts/bench_sft.py --shape 1.5b --tokens 16384 --data fixed,gsm8k-lengths
    python scripts/bench_sft.py --shape 1.5b --time-to-first-step

Random weights; float32 master weights, gradients and Adam moments on all sides; full optimizer steps. Columns: tokens/s and share of
--tflops (6 x parameters x tokens), of the median step; peak memory that torch allocated; milliseconds of the median step and of the
slowest; loss. --data gsm8k-lengths packs conversations of GSM8K's lengths, another batch every step, packing included in the time.
Beyond the project's own packages: --peers hf-liger needs liger-kernel (0.8.5: one wheel of pure Python, no dependencies but torch and
triton), --peers trl needs trl, accelerate, datasets, dill, multiprocess, xxhash and pandas.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import bench_peers
from bench_common import (
    alone, choices_of, config_folder, gsm8k_lengths, machine, machine_words, one_rank, print_row, run_child, share_of_peak,
)
from shapes import SHAPES

PEERS = {"hf": bench_peers.hf, "hf-liger": bench_peers.hf_liger, "trl": bench_peers.trl}
DATA = ("fixed", "gsm8k-lengths")


def main() -> None:
    args = parser().parse_args()
    if args.part:
        return print_row(lambda: measure(args))
    found = {"machine": machine(), "command": " ".join(["bench_sft.py", *sys.argv[1:]]), "rows": []}
    if args.time_to_first_step:
        from bench_first_step import PHASES, first_step

        found["first_step"] = first_step(args)
        say(args, machine_words(found["machine"]))
        for name in PHASES:
            say(args, f"{name:46s}{found['first_step'][name]:8.1f} s")
    else:
        parts = [f"mfsdp:{data}" for data in args.data] + [f"{peer}:fixed" for peer in args.peers]
        say(args, machine_words(found["machine"]) + "\n" + HEADER)
        for number, part in enumerate(parts):
            environ = one_rank(29440 + number) if part.startswith("mfsdp") else alone()
            row = {"contender": part} | run_child("bench_sft.py", part, sys.argv[1:], args.timeout, args.log, **environ)
            found["rows"].append(row)
            say(args, line(row))
    if args.json:
        print(json.dumps(found, indent=1))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro batch")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10, help="timed")
    parser.add_argument("--warmup", type=int, default=4, help="steps before these")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--lean", action="store_true", help="mfsdp with bfloat16 gradients and moments (float32 main weights stay)")
    parser.add_argument("--impl", choices=("auto", "local", "transformer_engine"), default="auto", help="engine.transformer_impl")
    parser.add_argument("--data", type=choices_of(DATA), default=["fixed"], help="of mfsdp: " + ",".join(DATA))
    parser.add_argument("--peers", type=choices_of(PEERS), default=[], help="any of " + ",".join(PEERS))
    parser.add_argument("--profile", action="store_true", help="also print the operators of mfsdp's step, by time, to stderr or --log")
    parser.add_argument("--time-to-first-step", action="store_true", help="instead: what `mfsdp sft` does until its first steps")
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of the device (H100 and H200: 989 bfloat16)")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each contender")
    parser.add_argument("--log", type=Path, help="file for the contenders' stderr")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser


HEADER = f"{'contender':22s}{'tokens/s':>10s}{'% of peak':>11s}{'GiB':>8s}{'ms/step':>10s}{'slowest':>10s}{'loss':>8s}"


def line(row: dict) -> str:
    if "failed" in row:
        return f"{row['contender']:22s}  failed: {row['failed']}"
    memory = "     n/a" if row["peak_gib"] is None else f"{row['peak_gib']:8.1f}"
    predicted = f"  predicted {row['predicted_gib']:.1f} GiB" if row.get("predicted_gib") else ""
    return (f"{row['contender']:22s}{row['tokens_per_s']:10.0f}{100 * row['share_of_peak']:11.1f}{memory}{row['ms_per_step']:10.1f}"
            f"{row['slowest_ms']:10.1f}{row['loss']:8.3f}{predicted}")


def say(args, text: str) -> None:
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


# --- in a process of its own ----------------------------------------------------------------------------------------------


def measure(args) -> dict:
    name, _, data = args.part.partition(":")
    if name == "trl":
        seconds, loss, device = bench_peers.trl(args)
        steps = [(args.tokens // args.seq * args.seq, s) for s in seconds]
    else:
        mfsdp = name == "mfsdp"
        step, device = ours(args.shape, args.tokens, args.seq, args.recompute, data, args.impl, args.lean) if mfsdp else PEERS[name](args)
        steps, loss = timed(step, device, args.warmup, args.steps)
    row = summary(args, steps, device) | {"loss": loss}
    if name == "mfsdp":
        row["predicted_gib"] = predicted_gib(args.shape, args.tokens, args.recompute, args.lean) if device.type == "cuda" else None
        if args.profile:
            print_profile(step)
    return row


LEAN = {"main_grads_dtype": "bfloat16", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


def ours(shape: str, tokens: int, seq: int, recompute: str = "none", data: str = "fixed", impl: str = "auto", lean: bool = False):
    """(step, device); step() -> (tokens, loss). The process group must not exist, or be that of one rank."""
    import numpy as np
    import torch

    from mfsdp_cli.config.schema import EngineSettings, OptimSettings
    from mfsdp_cli.data.pack import pack
    from mfsdp_cli.engine.megatron import MegatronEngine, init_distributed, mpu
    from mfsdp_cli.types import Sample

    settings = EngineSettings(recompute=recompute, dtype="bfloat16", transformer_impl=impl)
    here = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = here if mpu.is_initialized() else init_distributed(settings, 600)
    with config_folder(shape) as folder:
        engine = MegatronEngine(folder, settings, OptimSettings(**(LEAN if lean else {})), device=device, load_weights=False)
    random = np.random.default_rng(0)

    def samples(lengths: list[int]) -> list[Sample]:
        return [Sample(ids := random.integers(0, SHAPES[shape]["vocab_size"], n), ids >= 0, row) for row, n in enumerate(lengths)]

    fixed = data == "fixed"
    batches = [samples([seq] * (tokens // seq))] if fixed else [samples(gsm8k_lengths(tokens, seed)) for seed in range(16)]
    packed, count = pack(batches[0]), 0

    def step():
        nonlocal count
        batch = packed if fixed else pack(batches[count % len(batches)])
        count += 1
        num_targets = float(batch.target_mask.sum())
        loss = engine.forward_backward([batch], lambda log_probs, b: -(log_probs * b.target_mask).sum() / num_targets)
        engine.optimizer_step(1e-5)
        return batch.num_real_tokens, loss.item()

    return step, device


def timed(step, device, warmup: int, steps: int) -> tuple[list[tuple[int, float]], float]:
    """([(tokens, seconds)], last loss)"""
    import torch

    found = []
    for number in range(warmup + steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        tokens, loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= warmup:
            found.append((tokens, time.perf_counter() - started))
    return found, loss


def summary(args, steps: list[tuple[int, float]], device) -> dict:
    import torch

    rate = statistics.median(tokens / seconds for tokens, seconds in steps)
    times = [1e3 * seconds for _, seconds in steps]
    return {"tokens_per_s": rate, "share_of_peak": share_of_peak(args.shape, rate, args.tflops),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
            "ms_per_step": statistics.median(times), "slowest_ms": max(times), "tokens": [tokens for tokens, _ in steps]}


def predicted_gib(shape: str, tokens: int, recompute: str, lean: bool = False) -> float:
    from mfsdp_cli.config.parameters import model_shape
    from mfsdp_cli.launch.memory import Layout, training_peak

    config = SHAPES[shape] | {"architectures": ["Qwen2ForCausalLM"]}
    layout = Layout(grad=2, moments=4) if lean else Layout()
    return training_peak(model_shape(config), layout, tokens, recompute).total / 2**30


def print_profile(step) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
    for key in ("cuda_time_total", "self_cpu_time_total"):
        print(prof.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70), file=sys.stderr)


if __name__ == "__main__":
    main()
