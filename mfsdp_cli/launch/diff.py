"""`mfsdp ckpt diff`: compares what the front end can read, and has a child process with torch compare the values."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from mfsdp_cli.checkpoint.diff import diff, differences
from mfsdp_cli.config.values import SETTINGS
from mfsdp_cli.errors import MISMATCH, OK, MfsdpError
from mfsdp_cli.launch.export import run_child
from mfsdp_cli.launch.folder import CONFIG

VALUES_MODULE = "mfsdp_cli.checkpoint.diff_values"


def compare(a: str, b: str, pattern: str, values: bool, *, quiet: bool = False, no_color: bool = False) -> tuple[int, dict]:
    """(exit code, report): `diff` of the checkpoints at two paths with the runs' settings, and "values" of the tensors if wanted.

    The code is MISMATCH when tensors differ, or that of the child when it fails. Raises MfsdpError as `diff` does."""
    data = diff(a, b, pattern)
    left, right = _settings(data["a"]), _settings(data["b"])
    if left and right:
        data["facts"] += differences(left, right)
    code, pairs = OK, data.pop("pairs")
    data["values"] = None
    if values and pairs:
        code, told = _compare_values(data["a"], data["b"], pairs, quiet, no_color)
        data |= told
    if data["values"] is not None:
        data["equal"] &= all(row["num_equal"] == row["num_elements"] for row in data["values"])
    code = code or (OK if data["equal"] else MISMATCH)
    return code, {"ok": code == OK, "exit_code": code, **data}


def _compare_values(a: str, b: str, pairs: dict[str, list[str]], quiet: bool, no_color: bool) -> tuple[int, dict]:
    with tempfile.TemporaryDirectory(prefix="mfsdp-diff-") as folder:
        wanted, report = Path(folder) / "pairs.json", Path(folder) / "report.json"
        wanted.write_text(json.dumps(pairs))
        command = [sys.executable, "-W", "ignore", "-m", VALUES_MODULE, a, b, "--pairs", str(wanted), "--report", str(report)]
        code = run_child(command + ["--quiet"] * quiet + ["--no-color"] * no_color, "the comparison")
        return code, json.loads(report.read_text()) if report.is_file() else {}


def _settings(checkpoint: str) -> dict:
    """Settings of the run that a checkpoint lies in, as "settings.SECTION.NAME"; empty when there are none that can be read."""
    from mfsdp_cli.config.load import read_resolved, to_dict

    file = Path(checkpoint).absolute().parent.parent / CONFIG
    for kind in SETTINGS if file.is_file() else ():
        try:
            return {f"settings.{section}.{name}": value for section, entries in to_dict(read_resolved(file, kind)).items()
                    for name, value in entries.items()}
        except MfsdpError:
            continue
    return {}
