#!/usr/bin/env python
"""Saving and loading a training state (float32 weights and two moments), against plain copies of as many bytes to the same disk.

    python scripts/bench_checkpoint.py --shape 0.5b --folder /scratch
    torchrun --nproc-per-node 2 scripts/bench_checkpoint.py --shape 1.5b --folder /scratch

Prints where the time goes, the rate, and the rate as a share of the disk's own: every rank writes its share of the bytes into
one file and flushes it; every rank reads it. Reads come from the page cache where memory suffices, ours as the plain ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from shapes import SHAPES, write_config

BLOCK = 64 << 20
CONTENTS = ["model", "optimizer", "extra"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be measured; needs twice the checkpoint's size")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2, help="saves and loads; the first includes what is done once a run")
    args = parser.parse_args()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29432"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    measure(args)


def measure(args) -> None:
    import torch
    import torch.distributed as dist

    from mfsdp_cli.checkpoint import dtensor
    from mfsdp_cli.checkpoint.storage import num_threads

    engine = build(args)
    folder = shared_folder(args.folder)
    say(f"{args.shape}, {dist.get_world_size()} ranks x {num_threads()} threads, torch {torch.__version__}, {engine.device}")
    try:
        for number in range(args.repeats):
            target = folder / f"save-{number}"
            with phase(f"save {number + 1}") as save:
                with parts({"tensors and their places": (dtensor, "collect"), "write and flush": (dtensor.dcp, "save")}):
                    _, files = dtensor.write(dtensor.collect(engine, CONTENTS), target)
            num_bytes = sum(entry["bytes"] for entry in files.values())
            with phase(f"load {number + 1}") as load:
                dtensor.load(engine, target, CONTENTS)
            mine = num_bytes // dist.get_world_size()
            with phase("plain write and flush") as plain_write:
                write_plain(folder / f"plain-{dist.get_rank()}", mine)
            with phase("plain read") as plain_read:
                read_plain(folder / f"plain-{dist.get_rank()}")
            for name, ours, plain in (("save", save, plain_write), ("load", load, plain_read)):
                say(f"{name} {number + 1}: {num_bytes / 1e9:.2f} GB at {num_bytes / ours['s'] / 1e9:.2f} GB/s, plain {num_bytes / plain['s'] / 1e9:.2f} GB/s: "
                    f"{100 * plain['s'] / ours['s']:.0f} % of the disk's own speed")
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(target)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    dist.destroy_process_group()


def build(args):
    """An engine with random weights and moments: Adam has them after its first step."""
    import torch

    from mfsdp_cli.config.schema import EngineSettings, OptimSettings
    from mfsdp_cli.data.pack import pack
    from mfsdp_cli.engine.megatron import MegatronEngine, init_distributed
    from mfsdp_cli.types import Sample

    settings = EngineSettings(tensor_model_parallel_size=args.tp)
    device = init_distributed(settings, 600)
    with tempfile.TemporaryDirectory() as folder:
        engine = MegatronEngine(str(write_config(folder, args.shape)), settings, OptimSettings(), device=device, load_weights=False)
    ids = torch.arange(64).numpy()
    batch = pack([Sample(ids, ids >= 0, 0)])
    engine.forward_backward([batch], lambda log_probs, packed: -(log_probs * packed.target_mask).sum() / 64)
    engine.optimizer_step(1e-5)
    return engine


def shared_folder(parent: Path) -> Path:
    """A new folder below `parent`, the same on every rank."""
    import torch.distributed as dist

    made = [tempfile.mkdtemp(prefix="bench-checkpoint-", dir=parent) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


@contextmanager
def phase(name: str):
    """Seconds between two barriers, under "s"."""
    import torch.distributed as dist

    dist.barrier()
    started, seconds = time.perf_counter(), {}
    yield seconds
    dist.barrier()
    seconds["s"] = time.perf_counter() - started
    say(f"  {name:36s}{seconds['s']:8.2f} s")


@contextmanager
def parts(functions: dict):
    """Tell the time of functions, name -> (module, attribute), that are called within the block."""
    originals = {name: getattr(module, attribute) for name, (module, attribute) in functions.items()}

    def timed(name):
        def call(*args, **kwargs):
            started = time.perf_counter()
            result = originals[name](*args, **kwargs)
            say(f"    {name:34s}{time.perf_counter() - started:8.2f} s")
            return result

        return call

    for name, (module, attribute) in functions.items():
        setattr(module, attribute, timed(name))
    try:
        yield
    finally:
        for name, (module, attribute) in functions.items():
            setattr(module, attribute, originals[name])


def write_plain(path: Path, num_bytes: int) -> None:
    block = os.urandom(1 << 20) * (BLOCK >> 20)
    with open(path, "wb") as file:
        for _ in range(num_bytes // BLOCK):
            file.write(block)
        file.write(block[: num_bytes % BLOCK])
        file.flush()
        os.fsync(file.fileno())


def read_plain(path: Path) -> None:
    block = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def say(text: str) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


if __name__ == "__main__":
    main()
