"""What `mfsdp sft` does until its first steps, and how long each part takes, by the lines that it prints. Used by bench_sft.py."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import ROOT, kill_tree, write_model

# The beginning of a line -> what has ended when it is printed.
MARKS = {
    "importing torch": "launcher: check, torchrun, start of the rank",
    "reading ": "imports of torch and megatron, process group",
    "training data: ": "model, weights, optimizer, rendering the data",
    "step 1/": "first step, with compilation",
    "step 2/": "second step",
    "step 3/": "third step",
}
TOTAL = "from the command to the end of the first step"
PHASES = [*MARKS.values(), TOTAL]


def first_step(args) -> dict[str, float]:
    """Seconds by the names in PHASES. The run is killed after its third step."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", args.shape)
        mfsdp = [sys.executable, "-m", "mfsdp_cli"]
        subprocess.run([*mfsdp, "prep-data", "arithmetic", "-o", folder, "--rows", "2000", "--test-rows", "1", "-q"], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL)
        command = [
            *mfsdp, "sft", "--model", folder / "model", "--train-files", folder / "train.parquet", "--output", folder / "run",
            "--nproc", "1", f"data.max_token_len_per_gpu={args.tokens}", f"data.train_batch_size={args.tokens // 40}",
            "trainer.total_training_steps=100", "trainer.save_freq=-1",
        ]
        started, told, seen = time.perf_counter(), [], {}
        process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            for text in process.stderr:
                told.append(text)
                for mark, name in MARKS.items():
                    if text.startswith(mark):
                        seen[name] = time.perf_counter() - started
                if len(seen) == len(MARKS):
                    break
        finally:
            kill_tree(process.pid)
            process.wait()
    if len(seen) < len(MARKS):
        raise SystemExit("the run ended before its third step:\n" + "".join(told[-20:]))
    times = [0.0, *seen.values()]
    return dict(zip(seen, (b - a for a, b in zip(times, times[1:])))) | {TOTAL: seen[MARKS["step 1/"]]}
