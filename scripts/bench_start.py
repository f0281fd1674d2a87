#!/usr/bin/env python3
"""CPU time of mfsdp's three quick ends: --help, a usage error, a failing check; and the imports that cost most in each.

    .venv/bin/python scripts/bench_start.py [--runs 20] [--imports 12] [--json]

CPU time is user + system of the whole process, interpreter included; the best of N runs is what the program needs, the median
what a busy machine made of it. The budget is BUDGET_MS each. `python -c pass`, which nobody can get below,
is shown to judge the machine by. Bytecode is compiled before the first measured start, as installing does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MFSDP = ["-m", "mfsdp_cli"]
BUDGET_MS = 150  # of each, on an ordinary core
IMPORT = re.compile(r"^import time:\s*(\d+) \|\s*(\d+) \| *(\S+)$", re.M)


def cases(folder: Path) -> dict[str, list[str]]:
    """Name -> arguments of the interpreter. The failing check reads a real parquet file and a model's config.json."""
    inputs = ["--model", str(folder / "model"), "--train-files", str(folder / "train.parquet")]
    check = ["sft", "--dry-run", *inputs, "--tp", "3", "optim.lr=fast"]
    return {
        "python -c pass": ["-c", "pass"],
        "--help": [*MFSDP, "--help"],
        "usage error": [*MFSDP, "sft", "--modle", "x"],
        "failing check": [*MFSDP, *check],
    }


def write_inputs(folder: Path) -> None:
    """A model folder without weights, and a few chats: enough to be looked at, wrong enough to be refused."""
    import pyarrow as pa
    import pyarrow.parquet

    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512, "tie_word_embeddings": True}))
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    pa.parquet.write_table(pa.table({"messages": pa.array([chat] * 20, kind)}), folder / "train.parquet")


def cpu_ms(arguments: list[str], environment: dict[str, str]) -> float:
    """User + system time of one run, in milliseconds."""
    child = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return 1000 * (usage.ru_utime + usage.ru_stime)


def costly_imports(arguments: list[str], environment: dict[str, str], runs: int, count: int) -> list[tuple[str, float]]:
    """The modules whose own code takes longest to import, milliseconds, the least of several runs."""
    least: dict[str, float] = {}
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-X", "importtime", *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True)
        for own_us, _, module in IMPORT.findall(done.stderr):
            least[module] = min(least.get(module, float("inf")), int(own_us) / 1000)
    return sorted(least.items(), key=lambda item: -item[1])[:count]


def measure(runs: int, imports: int) -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="mfsdp-bench-") as folder:
        write_inputs(Path(folder))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        rows = []
        for name, arguments in cases(Path(folder)).items():
            cpu_ms(arguments, environment)  # compiles
            times = sorted(cpu_ms(arguments, environment) for _ in range(runs))
            top = costly_imports(arguments, environment, min(runs, 5), imports) if arguments[0] == "-m" else []
            rows.append({"case": name, "best_ms": times[0], "median_ms": statistics.median(times), "imports_ms": dict(top)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="starts of each (default 20)")
    parser.add_argument("--imports", type=int, default=12, help="how many imports to list (default 12)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    rows = measure(chosen.runs, chosen.imports)
    if chosen.json:
        print(json.dumps({"runs": chosen.runs, "cases": rows}))
        return
    print(f"CPU time of {chosen.runs} starts each (user + system, ms); the budget is {BUDGET_MS}")
    for row in rows:
        print(f"  {row['case']:<15} best {row['best_ms']:6.1f}   median {row['median_ms']:6.1f}")
    for row in rows:
        if row["imports_ms"]:
            print(f"\nimports of {row['case']!r} by their own time (ms): "
                  + ", ".join(f"{module} {time_ms:.1f}" for module, time_ms in row["imports_ms"].items()))


if __name__ == "__main__":
    main()
