from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from plot_metrics import resumed_at, series

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_metrics.py"
RECORDS = [
    {"attempt": 1, "step": 0, "val_loss": 6.0},
    {"attempt": 1, "step": 1, "loss": 5.5, "lr": 1e-3},
    {"attempt": 1, "step": 2, "loss": None, "nonfinite": ["loss"]},
    {"attempt": 2, "step": 3, "loss": 4.5},
    {"attempt": 2, "step": 3, "val_loss": 4.75},
]


def call(run: Path, *options: str, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, run, *options], env={**os.environ, **environ}, capture_output=True, text=True)


def write(folder: Path) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return folder


def test_series_and_resumes():
    assert series(RECORDS, "loss") == ([1, 3], [5.5, 4.5])
    assert series(RECORDS, "val_loss") == ([0, 3], [6.0, 4.75])
    assert series(RECORDS, "lr") == ([1], [1e-3])
    assert resumed_at(RECORDS) == [2]


def test_without_matplotlib_it_says_so(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')\n")
    done = call(write(tmp_path), "--out", str(tmp_path / "x.svg"), PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (4, "") and "matplotlib is not installed" in done.stderr and "fix: pip install" in done.stderr


def test_what_cannot_be_drawn_is_told(tmp_path):
    done = call(write(tmp_path), "--keys", "los", "--out", "x.svg")
    assert done.returncode == 2 and "no run has recorded it" in done.stderr and "loss, lr" in done.stderr
    assert "ends in .svg or .png" in call(tmp_path, "--out", "x.pdf").stderr
    done = call(tmp_path / "absent", "--out", "x.svg")
    assert done.returncode == 2 and "no such file" in done.stderr
