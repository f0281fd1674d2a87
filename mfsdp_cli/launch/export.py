"""`mfsdp ckpt export-hf`: everything cheap is checked here, then a child process with torch does the work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from mfsdp_cli.checkpoint.dcp_metadata import DTYPE_BYTES
from mfsdp_cli.checkpoint.export_source import noted_index
from mfsdp_cli.checkpoint.export_target import refusals
from mfsdp_cli.checkpoint.inspect import inspect
from mfsdp_cli.checkpoint.shard_files import total_bytes
from mfsdp_cli.errors import BAD_INPUT, INTERRUPTED, MACHINE_UNFIT, OK, SIGNAL_BASE, TERMINATED, MfsdpError, Problem
from mfsdp_cli.launch.host import free_disk_gib, oom_kills
from mfsdp_cli.launch.outcome import signal_words
from mfsdp_cli.launch.run import die_with
from mfsdp_cli.output import print_stderr

EXPORT_MODULE = "mfsdp_cli.checkpoint.export_hf"


def export(path: str, out: str, *, dtype: str, source: str | None, forward_check: bool, overwrite: bool, quiet: bool = False,
           no_color: bool = False, module: str = EXPORT_MODULE) -> tuple[int, dict]:
    """Export the checkpoint at `path` into the folder `out`; the exit code and the child's report.

    Raises MfsdpError, before anything is started, when the checkpoint is incomplete, the target is in use or the disk is too small.
    """
    checkpoint, problems = check_export(path, out, dtype, overwrite)
    if problems:
        raise MfsdpError(problems)
    with tempfile.TemporaryDirectory(prefix="mfsdp-export-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", module, str(checkpoint), "--out", out, "--dtype", dtype, "--json-report", str(report)]
        command += ["--source", source] if source else []
        command += [] if forward_check else ["--no-forward-check"]
        command += ["--quiet"] if quiet else []
        command += ["--no-color"] if no_color else []
        code = run_child(command)
        data = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    return code, {**data, "ok": code == OK, "exit_code": code, "checkpoint": str(checkpoint), "out": out}


def check_export(path: str, out: str, dtype: str, overwrite: bool) -> tuple[Path, list[Problem]]:
    """The checkpoint's step folder, and what would keep it from being written to `out`. Reads only."""
    report = inspect(path)
    errors = [p for p in (Problem(**p) for p in report["problems"]) if p.level == "error"]
    if errors:
        raise MfsdpError(errors, hint=f"mfsdp ckpt inspect {path} tells more")
    if not report["export"]["possible"]:
        raise MfsdpError(Problem(report["path"], report["title"], report["export"]["why"], "give another checkpoint", code=BAD_INPUT))
    problems = refusals(out, Path(report["path"]), overwrite)
    num_weights = sum(g["num_elements"] for g in report["groups"] if g["name"] == "model parameters")
    if num_weights == 0:
        problems.append(Problem(report["path"], "no tensors", "there are no weights in it", "give another checkpoint", code=BAD_INPUT))
    needed_bytes, free_gib = _needed_bytes(report, dtype, num_weights), free_disk_gib(out)
    if free_gib < needed_bytes / 2**30:
        problems.append(Problem("--out", out, f"the weights need {needed_bytes / 2**30:.1f} GiB, and {free_gib:.1f} GiB are free there",
                                "free some space or name a folder on another disk", "command line", MACHINE_UNFIT))
    return Path(report["path"]), problems


def _needed_bytes(report: dict, dtype: str, num_weights: int) -> int:
    """Exactly, where the trainer has noted the source model's tensors."""
    if index := noted_index(Path(report["path"])):
        return total_bytes(index if dtype == "auto" else {name: entry | {"dtype": dtype} for name, entry in index.items()})
    return num_weights * DTYPE_BYTES[report["dtype"] or "float32" if dtype == "auto" else dtype]


def run_child(command: list[str], what: str = "the export") -> int:
    """Run the child, on the CPU, with its chatter on our stderr; SIGTERM reaches it too, and Ctrl-C does by itself."""
    parent, killed_before = os.getpid(), oom_kills()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, env=environment, preexec_fn=lambda: die_with(parent))
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        code = child.wait()
    except KeyboardInterrupt:
        child.wait()
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == -signal.SIGTERM:
        return TERMINATED
    if code < 0:
        print_stderr(f"error: {what} was killed by {signal_words(-code, oom_kills() - killed_before)}")
        return SIGNAL_BASE - code
    return code
