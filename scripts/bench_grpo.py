#!/usr/bin/env python
"""GRPO on one GPU: where a step's time goes, against vLLM's own throughput, SFT's, and TRL's GRPOTrainer with colocated vLLM.

    python scripts/bench_grpo.py --shape 0.5b --prompts 64 --n 8 --response 512
    python scripts/bench_grpo.py --shape 0.5b --parts update --profile --log update.log
    python scripts/bench_grpo.py --parts mfsdp --nproc 2 --set rollout.tensor_model_parallel_size=2
    python scripts/bench_grpo.py --parts mfsdp --set rollout.colocate=False --set rollout.weight_transfer=nccl

All on the same random weights, prompts, lengths and batch, one after the other, each in processes of its own; one update a step, no
reference model, float32 master weights. Responses have full length: random weights hardly ever end one.

  mfsdp    `mfsdp grpo`: the medians of metrics.jsonl after --warmup steps
  vllm     vllm.LLM.generate of the same requests: plain, with log-probabilities, and as our sampler asks (a request and seed a response)
  sft      SFT steps of the same engine on as many tokens a micro batch
  trl      GRPOTrainer(use_vllm=True, vllm_mode="colocate"), from one end of a step to the next
  update   the trainer rank alone, without Ray and vLLM: seconds, tokens and newly compiled functions of 8 updates whose lengths differ

--profile lets torch name every recompilation (TORCH_LOGS=recompiles) in mfsdp's trainer log and in --log, and prints there the operators
of one update more. On a machine without vLLM: --sampler hf --parts mfsdp,update. TRL needs the packages that bench_sft.py names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import bench_grpo_parts as parts
from bench_common import alone, choices_of, machine, machine_words, one_rank, print_row, run_child, share_of_peak
from shapes import SHAPES

PARTS = ("mfsdp", "vllm", "sft", "trl", "update")
VLLM_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def main() -> None:
    args = parser().parse_args()
    if args.part:
        return print_row(lambda: CHILDREN[args.part](args))
    found = {"machine": machine(), "command": " ".join(["bench_grpo.py", *sys.argv[1:]])}
    with tempfile.TemporaryDirectory() as scratch:
        args.folder = args.folder or Path(scratch)
        say(args, machine_words(found["machine"]))
        batch = f"{args.prompts} prompts x {args.n} responses of {args.response} tokens"
        say(args, f"{args.shape}, {batch}, {args.steps} steps after {args.warmup}")
        made = child(args, "model", 0)
        for number, part in enumerate(args.parts if "failed" not in made else [], start=1):
            found[part] = parts.run_mfsdp(args) if part == "mfsdp" else child(args, part, number)
            say(args, "\n".join(lines(args, part, found)))
    if "failed" in made:
        raise SystemExit(f"no model: {made['failed']}")
    if args.json:
        print(json.dumps(found, indent=1))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--prompts", type=int, default=64, help="a step")
    parser.add_argument("--n", type=int, default=8, help="responses a prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=6, help="measured")
    parser.add_argument("--warmup", type=int, default=3, help="steps before these")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="tokens of a micro batch of mfsdp")
    parser.add_argument("--trl-micro", type=int, default=16, help="responses of a micro batch of TRL")
    parser.add_argument("--gpu-share", type=float, default=0.4, help="of the GPU's memory, for vLLM")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="responses that vLLM samples at a time, by mfsdp and alone")
    parser.add_argument("--sampler", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--nproc", type=int, default=1, help="trainer ranks of mfsdp")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of mfsdp's configuration; may be given again")
    parser.add_argument("--parts", type=choices_of(PARTS), default=["mfsdp", "vllm", "sft", "trl"], help=",".join(PARTS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of the device (H100 and H200: 989 bfloat16)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each part")
    parser.add_argument("--folder", type=Path, help="keep model, prompts and run there")
    parser.add_argument("--log", type=Path, help="file for the parts' stderr")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser


def child(args, part: str, number: int) -> dict:
    given = ["--folder", str(args.folder), *sys.argv[1:]]
    environ = (one_rank(29460 + number) if part in ("sft", "update") else alone()) | VLLM_ENVIRONMENT
    if args.profile and part == "update":
        environ["TORCH_LOGS"] = "recompiles"
    return run_child("bench_grpo.py", part, given, args.timeout, args.log, **environ)


CHILDREN = {"model": parts.prepare, "vllm": parts.vllm_offline, "sft": parts.sft, "trl": parts.trl, "update": parts.updates}


# --- words ----------------------------------------------------------------------------------------------------------------


def lines(args, part: str, found: dict) -> list[str]:
    row = found[part]
    if "failed" in row:
        return [f"{part}: failed: {row['failed']}"]
    return WORDS[part](args, row, found)


def of_mfsdp(args, row: dict, found: dict) -> list[str]:
    step = " + ".join(f"{name} {row[key]:.2f}" for name, key in STEP_PARTS.items())
    again = f"; {row['recompilations']} recompilations in the trainer's log" if args.profile else ""
    return [
        f"mfsdp: {row['steps_per_hour']:.0f} steps/h; a step of {row['wall_s']:.2f} s = {step} s; "
        f"{100 * row['idle_share']:.1f} % is neither sampling, update nor weights",
        f"  rollout {row['rollout_tokens_per_s']:.0f} tokens/s; training, a GPU, {rate(args, row['train_tokens_per_s'])}; "
        f"weights {row['weights_gb']:.2f} GB, {row['sync_s'] / row['weights_gb']:.3f} s/GB; "
        f"mismatch {row['mismatch']:.1e}; peak {row['memory_gib']:.1f} GiB",
        "  update_s of every step: " + " ".join(f"{s:.2f}" for s in row["each_update_s"]) + again,
    ]


STEP_PARTS = {"sampling": "sampling_s", "rewards": "reward_s", "update": "update_s", "weights": "sync_s", "the rest": "rest_s"}


def rate(args, tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f} tokens/s = {100 * share_of_peak(args.shape, tokens_per_s, args.tflops):.1f} % of peak"


def of_vllm(args, row: dict, found: dict) -> list[str]:
    ours = found.get("mfsdp", {}).get("rollout_tokens_per_s")
    share = f"; our rollout is {100 * ours / row['plain']:.0f} % of plain, {100 * ours / row['as ours']:.0f} % of as ours" if ours else ""
    return ["vllm offline, tokens/s: " + ", ".join(f"{name} {value:.0f}" for name, value in row.items()) + share]


def of_sft(args, row: dict, found: dict) -> list[str]:
    ours = found.get("mfsdp", {}).get("train_tokens_per_s")
    share = f"; GRPO's training phase is at {100 * ours / row['tokens_per_s']:.0f} % of it" if ours else ""
    return [f"sft on the same engine: {rate(args, row['tokens_per_s'])}{share}"]


def of_trl(args, row: dict, found: dict) -> list[str]:
    ours = found.get("mfsdp", {}).get("steps_per_hour")
    share = f"; mfsdp makes {ours / row['steps_per_hour']:.2f} times as many" if ours else ""
    memory = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.1f} GiB"
    return [f"trl: {row['steps_per_hour']:.0f} steps/h, {row['wall_s']:.2f} s a step{memory}{share}"]


def of_updates(args, row: dict, found: dict) -> list[str]:
    told = []
    for number, (seconds, tokens, micro, compiled) in enumerate(zip(*row.values(), strict=True), start=1):
        told.append(f"  update {number}: {seconds:.2f} s for {tokens} tokens in {micro} micro batches = {tokens / seconds:.0f} tokens/s, "
                    f"{compiled} functions compiled")
    steady = statistics.median(tokens / seconds for seconds, tokens in list(zip(row["seconds"], row["tokens"]))[3:])
    again = f"; {args.log.read_text().count('Recompiling function')} recompilations in {args.log}" if args.profile and args.log else ""
    return [f"update alone: {rate(args, steady)} from the fourth on{again}", *told]


WORDS = {"mfsdp": of_mfsdp, "vllm": of_vllm, "sft": of_sft, "trl": of_trl, "update": of_updates}


def say(args, text: str) -> None:
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
