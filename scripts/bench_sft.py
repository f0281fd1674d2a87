#!/usr/bin/env python
"""Training throughput of one GPU (or CPU): our engine, and plain transformers on the same shape in the same run.

    python scripts/bench_sft.py --shape 1.5b --tokens 16384 --seq 1024 --peer

Random weights, packed sequences of equal length, float32 master weights, gradients and Adam moments on both sides.
Prints one line a contender: tokens/s, model FLOP utilisation (6 x parameters x tokens, against --tflops), peak memory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

from shapes import SHAPES, write_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8, help="timed after three to warm up")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--peer", action="store_true", help="time transformers too: float32 weights, bfloat16 autocast, SDPA, fused AdamW")
    parser.add_argument("--profile", action="store_true", help="print the operators that take most time")
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of the device (H100 and H200: 989 bfloat16)")
    args = parser.parse_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29431"))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    contenders = {"mfsdp": ours} | ({"transformers": transformers_peer} if args.peer else {})
    for name, build in contenders.items():
        report(name, args, *build(args))


def ours(args):
    import torch

    from mfsdp_cli.config.schema import EngineSettings, OptimSettings
    from mfsdp_cli.data.pack import pack
    from mfsdp_cli.engine.megatron import MegatronEngine, init_distributed
    from mfsdp_cli.types import Sample

    settings = EngineSettings(recompute=args.recompute, dtype="bfloat16")
    device = init_distributed(settings, 600)
    with tempfile.TemporaryDirectory() as folder:
        engine = MegatronEngine(str(write_config(folder, args.shape)), settings, OptimSettings(), device=device, load_weights=False)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for row in range(args.tokens // args.seq):
        ids = torch.randint(0, SHAPES[args.shape]["vocab_size"], (args.seq,), generator=generator).numpy()
        samples.append(Sample(ids, ids >= 0, row))
    batch = pack(samples)
    num_targets = sum(s.num_targets for s in samples)

    def step():
        loss = engine.forward_backward([batch], lambda log_probs, packed: -(log_probs * packed.target_mask).sum() / num_targets)
        engine.optimizer_step(1e-5)
        return loss.item()

    return step, device


def transformers_peer(args):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPES[args.shape]), dtype=torch.float32, attn_implementation="sdpa").train()
    if args.recompute == "full":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, SHAPES[args.shape]["vocab_size"], (args.tokens // args.seq, args.seq), device=device)

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, device


def report(name: str, args, step, device) -> None:
    import torch

    def sync():
        if device.type == "cuda":
            torch.cuda.synchronize()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        loss = step()
    seconds = []
    for _ in range(args.steps):
        sync()
        started = time.perf_counter()
        loss = step()
        sync()
        seconds.append(time.perf_counter() - started)
    median = sorted(seconds)[len(seconds) // 2]
    tokens = args.tokens // args.seq * args.seq
    parameters = num_parameters(SHAPES[args.shape])
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    predicted = f" (predicted {predicted_gib(args, tokens):.1f})" if name == "mfsdp" and device.type == "cuda" else ""
    print(f"{name:14s} {args.shape:5s} {tokens / median:10.0f} tok/s  {600 * parameters * tokens / median / args.tflops / 1e12:5.1f} % of peak  "
          f"{memory:6.1f} GiB{predicted}  {median * 1e3:8.1f} ms/step  loss {loss:.3f}", flush=True)
    if args.profile:
        print_profile(step)
    del step
    if device.type == "cuda":
        import gc

        gc.collect()
        torch.cuda.empty_cache()


def predicted_gib(args, tokens: int) -> float:
    from mfsdp_cli.launch.memory import Layout, training_peak
    from mfsdp_cli.config.parameters import model_shape

    shape = model_shape(SHAPES[args.shape] | {"architectures": ["Qwen2ForCausalLM"]})
    return training_peak(shape, Layout(), tokens, args.recompute).total / 2**30


def print_profile(step) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
    print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=35, max_name_column_width=70))


def num_parameters(shape: dict) -> int:
    """Weights that take part in matrix products: the layers and one vocabulary matrix."""
    h, kv = shape["hidden_size"], shape["num_key_value_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * shape["intermediate_size"]
    return shape["num_hidden_layers"] * layer + shape["vocab_size"] * h


if __name__ == "__main__":
    main()
