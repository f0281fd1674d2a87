#!/usr/bin/env python
"""Training throughput of one GPU (or CPU): our engine and what a user would pick instead, same shape and tokens, one process each.

    python scripts/bench_sft.py --shape 1.5b --tokens 16384 --seq 2048 --peers hf,hf-liger,trl
    python scripts/bench_sft.py --shape 1.5b --tokens 16384 --data fixed,gsm8k-lengths
    python scripts/bench_sft.py --shape 1.5b --time-to-first-step
    python scripts/bench_sft.py --shape 7b --gpus 2            FSDP over two; --tp 2 splits the matrices over them instead

Float32 master weights, gradients and Adam moments on all sides; full optimizer steps, issued one after the other as a training loop does:
nobody waits for the GPU but before the first timed step and after the last. With --peers all start from the same random weights, written
once, and train on the same tokens in every step, so that losses can be compared; without, mfsdp starts from Megatron's own. Columns:
tokens/s and share of --tflops (6 x parameters x tokens) of all timed steps together, both for each GPU; peak memory that torch allocated on
the first; milliseconds of the median step and of the slowest; loss of the last. --data gsm8k-lengths packs conversations of GSM8K's lengths,
another batch every step, packing included in the time; everything in them is learned, as in the fixed rows and by the peers. gsm8k-answers:
only the last 55 %.
Beyond the project's own packages: --peers hf-liger needs liger-kernel (0.8.5: one wheel of pure Python, no dependencies but torch and
triton), --peers trl needs trl, accelerate, datasets, dill, multiprocess, xxhash and pandas.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import nullcontext
from itertools import cycle, repeat
from pathlib import Path

import bench_peers
from bench_common import (
    LEARNING_RATE, Timed, alone, choices_of, config_folder, gsm8k_lengths, machine, machine_words, one_rank, print_row, run_child,
    several_ranks, share_of_peak, timed, token_rows, write_model,
)
from gpu_trace import gap_lines, gpu_time, read_events, trace_line
from shapes import SHAPES

PEERS = {"hf": bench_peers.hf, "hf-bf16": bench_peers.hf_bf16, "hf-liger": bench_peers.hf_liger, "trl": bench_peers.trl}
DATA = ("fixed", "gsm8k-lengths", "gsm8k-answers")
ANSWERS = 0.55  # of GSM8K's text, by characters


def main() -> None:
    args = parser().parse_args()
    if args.gpus % args.tp:
        parser().error(f"--gpus {args.gpus} is no multiple of --tp {args.tp}")
    if args.trace and not args.profile:
        parser().error("--trace is a trace of the step that --profile profiles")
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
        say(args, machine_words(found["machine"]) + "\n" + HEADER)
        with tempfile.TemporaryDirectory() as folder:
            compare(args, [*sys.argv[1:], *(["--folder", folder] if args.peers else [])], found["rows"])
    if args.json:
        print(json.dumps(found, indent=1))


def compare(args, given: list[str], rows: list[dict]) -> None:
    """Run all contenders with the options `given`, print their lines and add them to `rows`."""
    if args.peers and "failed" in (made := run_child("bench_sft.py", "model", given, args.timeout, args.log, **alone())):
        return say(args, f"the weights: failed: {made['failed']}")
    parts = [f"mfsdp:{data}" for data in args.data] + [f"{peer}:fixed" for peer in args.peers]
    for number, part in enumerate(parts):
        ranks = args.gpus if part.startswith("mfsdp") else 1
        environ = several_ranks(ranks) if ranks > 1 else one_rank(29440 + number) if part.startswith("mfsdp") else alone()
        row = {"contender": part} | run_child("bench_sft.py", part, given, args.timeout, args.log, ranks, **environ)
        rows.append(row)
        say(args, line(row))
        if row.get("gpu"):
            say(args, f"{part}: {trace_line(row['gpu'])}")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro batch")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10, help="timed")
    parser.add_argument("--warmup", type=int, default=4, help="steps before these")
    parser.add_argument("--gpus", type=int, default=1, help="of mfsdp; FSDP over those that --tp leaves")
    parser.add_argument("--tp", type=int, default=1, help="of mfsdp: GPUs that split each matrix, and share a micro batch")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--lean", action="store_true", help="mfsdp with bfloat16 gradients and moments (float32 main weights stay)")
    parser.add_argument("--impl", choices=("auto", "local", "transformer_engine"), default="auto", help="engine.transformer_impl")
    parser.add_argument("--data", type=choices_of(DATA), default=["fixed"], help="of mfsdp: " + ",".join(DATA))
    parser.add_argument("--peers", type=choices_of(PEERS), default=[], help="any of " + ",".join(PEERS))
    parser.add_argument("--profile", action="store_true", help="also print the operators of mfsdp's step, by time, to stderr or --log")
    parser.add_argument("--trace", type=Path, metavar="FILE.json.gz", help="with --profile: a Chrome trace, and how busy the GPU was")
    parser.add_argument("--time-to-first-step", action="store_true", help="instead: what `mfsdp sft` does until its first steps")
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of the device (H100 and H200: 989 bfloat16)")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each contender")
    parser.add_argument("--log", type=Path, help="file for the contenders' stderr")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
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
    if name == "model":
        return {"folder": str(write_model(args.folder, args.shape))}
    if name == "trl":
        return summary(args, bench_peers.trl(args))
    if name != "mfsdp":
        return summary(args, timed(*PEERS[name](args), args.warmup, args.steps))
    step, device = ours(args.shape, args.tokens, args.seq, args.recompute, data, args.impl, args.lean, args.folder, args.tp)
    row = summary(args, timed(step, device, args.warmup, args.steps), args.tp)
    on_gpu = device.type == "cuda"
    row["predicted_gib"] = predicted_gib(args.shape, args.tokens, args.recompute, args.lean, args.gpus, args.tp) if on_gpu else None
    if args.profile:
        trace = args.trace if data == args.data[0] and not int(os.environ["RANK"]) else None
        row["gpu"] = profile_step(step, trace)
    return row


LEAN = {"main_grads_dtype": "bfloat16", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


def ours(shape: str, tokens: int, seq: int, recompute: str = "none", data: str = "fixed", impl: str = "auto", lean: bool = False,
         folder: Path | None = None, tp: int = 1):
    """(step, device); step() -> (tokens of this rank's micro batch, its loss). The process group must not exist, or be one of `tp`. Weights
    are those in `folder`, or without one Megatron's own initial ones."""
    import numpy as np
    import torch

    from mfsdp_cli.config.schema import EngineSettings, OptimSettings
    from mfsdp_cli.data.pack import pack
    from mfsdp_cli.engine.megatron import MegatronEngine, init_distributed, mpu
    from mfsdp_cli.types import Sample

    settings = EngineSettings(recompute=recompute, dtype="bfloat16", transformer_impl=impl, tensor_model_parallel_size=tp)
    if mpu.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    else:
        device = init_distributed(settings, 600)
    with nullcontext(folder) if folder else config_folder(shape) as source:
        engine = MegatronEngine(str(source), settings, OptimSettings(**(LEAN if lean else {})), device=device, load_weights=bool(folder))

    def samples(rows) -> list[Sample]:
        learned = ANSWERS if data == "gsm8k-answers" else 1.0
        return [Sample(ids, np.arange(len(ids)) >= (1 - learned) * len(ids), number) for number, ids in enumerate(rows)]

    if data == "fixed":
        batches = repeat(pack(samples(token_rows(shape, tokens, seq)), multiple_of=engine.sequence_multiple))
    else:
        random = np.random.default_rng(0)
        drawn = [[random.integers(0, SHAPES[shape]["vocab_size"], n) for n in gsm8k_lengths(tokens, seed)] for seed in range(16)]
        batches = (pack(samples(rows), multiple_of=engine.sequence_multiple) for rows in cycle(drawn))

    def step():
        batch = next(batches)
        num_targets = float(batch.target_mask.sum()) * engine.dp_size
        loss = engine.forward_backward([batch], lambda log_probs, b: -(log_probs * b.target_mask).sum() / num_targets)
        engine.optimizer_step(LEARNING_RATE)
        return batch.num_real_tokens, loss * engine.dp_size

    return step, device


def summary(args, found: Timed, gpus_a_batch: int = 1) -> dict:
    import torch

    rate = found.tokens_per_s / gpus_a_batch
    return {"tokens_per_s": rate, "share_of_peak": share_of_peak(args.shape, rate, args.tflops),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
            "ms_per_step": 1e3 * statistics.median(found.each), "slowest_ms": 1e3 * max(found.each), "loss": found.loss,
            "seconds": found.seconds, "tokens": found.tokens}


def predicted_gib(shape: str, tokens: int, recompute: str, lean: bool = False, gpus: int = 1, tp: int = 1) -> float:
    from mfsdp_cli.config.parameters import model_shape
    from mfsdp_cli.launch.memory import Layout, training_peak

    config = SHAPES[shape] | {"architectures": ["Qwen2ForCausalLM"]}
    layout = Layout(dp=gpus // tp, tp=tp, split=tp, expert_dp=gpus // tp, **(dict(grad=2, moments=4) if lean else {}))
    return training_peak(model_shape(config), layout, tokens, recompute).total / 2**30


def profile_step(step, trace: Path | None) -> dict | None:
    """Profile one step; print its operators by time, and with `trace` write one and print the GPU's longest waits: all to stderr.
    Returns `gpu_trace.gpu_time`, None without `trace` or GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    for key in ("cuda_time_total", "self_cpu_time_total"):
        print(prof.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70), file=sys.stderr)
    if trace is None:
        return None
    prof.export_chrome_trace(str(trace))
    if found := gpu_time(read_events(trace)):
        print("\n".join(gap_lines(found)), file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
