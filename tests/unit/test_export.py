"""What `mfsdp ckpt export-hf` does itself: cheap checks first, then a child whose end it passes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, MfsdpError
from mfsdp_cli.launch import export

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def report(num_elements=1000, **changes):
    """The parts of `checkpoint.inspect`'s report that the checks read (its own tests make it from what torch wrote)."""
    groups = [{"name": "model parameters", "num_elements": num_elements}, {"name": "optimizer moments", "num_elements": 2 * num_elements}]
    return {"path": "run/checkpoints/step_000001", "title": "mfsdp checkpoint", "dtype": "bfloat16", "groups": groups, "problems": [],
            "export": {"possible": True, "why": ""}} | changes


def problems(monkeypatch, found, out, dtype="auto", overwrite=False):
    monkeypatch.setattr(export, "inspect", lambda path: found)
    return export.check_export("run", str(out), dtype, overwrite)[1]


def test_a_target_in_use_is_refused_unless_told(monkeypatch, tmp_path):
    assert problems(monkeypatch, report(), tmp_path) == [] and problems(monkeypatch, report(), tmp_path / "new" / "folder") == []
    (tmp_path / "config.json").write_text("{}")
    problem, = problems(monkeypatch, report(), tmp_path)
    assert problem.code == BAD_INPUT and "--overwrite" in problem.fix
    assert problems(monkeypatch, report(), tmp_path, overwrite=True) == []
    assert problems(monkeypatch, report(), tmp_path / "config.json", overwrite=True)[0].why == "is a file"


@pytest.mark.parametrize("dtype, fits", [("auto", True), ("bfloat16", True), ("float32", False)])
def test_the_disk_must_hold_the_weights(monkeypatch, tmp_path, dtype, fits):
    """3 Gi elements are 6 GiB in bfloat16 and 12 GiB in float32; optimizer moments are not exported."""
    monkeypatch.setattr(export, "free_disk_gib", lambda path: 10.0)
    found = problems(monkeypatch, report(3 * GIB), tmp_path, dtype)
    assert [(p.code, p.why) for p in found] == ([] if fits else [(MACHINE_UNFIT, "the weights need 12.0 GiB, and 10.0 GiB are free there")])


def test_checkpoints_that_cannot_be_exported_are_refused(monkeypatch, tmp_path):
    assert [p.found for p in problems(monkeypatch, report(0), tmp_path)] == ["no tensors"]
    with pytest.raises(MfsdpError, match="it holds no model"):
        problems(monkeypatch, report(export={"possible": False, "why": "it holds no model"}), tmp_path)
    missing = {"key": "a.distcp", "found": "missing", "why": "gone", "fix": "copy it", "where": "", "code": BAD_INPUT, "level": "error"}
    with pytest.raises(MfsdpError, match="a.distcp"):
        problems(monkeypatch, report(problems=[missing]), tmp_path)


# A child that reports its arguments, or ends as its first argument says.
CHILD = """
import argparse, json, os, pathlib, sys
p = argparse.ArgumentParser()
for name in ("--out", "--dtype", "--source", "--json-report"): p.add_argument(name)
p.add_argument("path"); p.add_argument("--no-forward-check", action="store_true")
args = p.parse_args()
print("chatter")
code = int(os.environ.get("CODE", "0"))
if code < 0: os.kill(os.getpid(), -code)
pathlib.Path(args.json_report).write_text(json.dumps({"num_tensors": 7, "args": vars(args)}))
sys.exit(code)
"""
PROGRAM = """
import json, sys
from mfsdp_cli.launch import export
export.inspect = lambda path: json.loads(sys.argv[1])
code, data = export.export("run", "out", dtype="auto", source="model", forward_check=False, overwrite=False, module="child_for_test")
print(json.dumps(data))
sys.exit(code)
"""


@pytest.mark.parametrize("ends, code", [(0, 0), (1, 1), (5, 5), (6, 6), (-9, 137), (-15, 143)])
def test_the_child_ends_as_the_command(tmp_path, ends, code):
    (tmp_path / "child_for_test.py").write_text(CHILD)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "CODE": str(ends)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(report())], cwd=tmp_path, env=environ, capture_output=True, text=True)
    data = json.loads(done.stdout)  # the chatter went to stderr
    assert done.returncode == code and data["exit_code"] == code and data["ok"] is (code == 0)
    if ends >= 0:
        assert "chatter" in done.stderr and data["num_tensors"] == 7 and data["args"]["path"] == "run/checkpoints/step_000001"
        assert (data["args"]["out"], data["args"]["source"], data["args"]["no_forward_check"]) == ("out", "model", True)
    if ends == -9:
        assert "signal 9 (SIGKILL); most likely the host ran out of memory" in done.stderr
