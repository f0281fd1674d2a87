"""What `mfsdp ckpt export-hf` does itself: cheap checks first, then a child whose end it passes on."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mfsdp_cli.checkpoint import export_target
from mfsdp_cli.checkpoint.export_progress import Progress
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


def an_export(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model.safetensors").touch()
    return folder


def test_a_target_in_use_is_refused_unless_told(monkeypatch, tmp_path):
    assert problems(monkeypatch, report(), tmp_path) == [] and problems(monkeypatch, report(), tmp_path / "new" / "folder") == []
    out = an_export(tmp_path / "out")
    problem, = problems(monkeypatch, report(), out)
    assert problem.code == BAD_INPUT and "--overwrite" in problem.fix
    assert problems(monkeypatch, report(), out, overwrite=True) == []
    assert problems(monkeypatch, report(), out / "config.json", overwrite=True)[0].why == "is a file"


@pytest.mark.parametrize("spoil, why", [
    (lambda out: (out / "config.json").unlink(), "no config.json of a model"),
    (lambda out: (out / "config.json").write_text("[1, 2]"), "its config.json is no model's"),
    (lambda out: (out / "config.json").write_text('{"name": "app"}'), "its config.json is no model's"),
    (lambda out: (out / "photos").mkdir(), "it has photos/ in it"),
    (lambda out: (out / ".git").mkdir(), "it has .git/ in it"),
    (lambda out: (out / "link").symlink_to("config.json"), "link is no plain file"),
])
def test_a_folder_of_another_kind_is_never_written_over(monkeypatch, tmp_path, spoil, why):
    out = an_export(tmp_path / "out")
    spoil(out)
    before = sorted(out.iterdir())
    for overwrite in (False, True):
        problem, = problems(monkeypatch, report(), out, overwrite=overwrite)
        assert why in problem.why and problem.fix == "name another folder"
    with pytest.raises(MfsdpError, match="no export is written over it"), export_target.claimed(out, tmp_path / "run"):
        pass
    assert sorted(out.iterdir()) == before and not (tmp_path / "out.tmp").exists()


def test_places_where_an_export_would_do_harm(monkeypatch, tmp_path):
    step = tmp_path / "checkpoints" / "step_000001"
    an_export(step / "huggingface")
    for out in (step, step / "huggingface", step / "new", tmp_path, tmp_path / "checkpoints"):
        problem, = problems(monkeypatch, report(path=str(step)), out, overwrite=True)
        assert "lie in each other" in problem.why
    (tmp_path / "out.tmp" / "mine").mkdir(parents=True)  # where the export would be written
    problem, = problems(monkeypatch, report(), tmp_path / "out")
    assert "not the remains of an export" in problem.why
    disk = an_export(tmp_path / "disk")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk)
    problem, = problems(monkeypatch, report(), disk, overwrite=True)
    assert "mount point" in problem.why and problem.fix == f"name a folder in it: {disk / 'model'}"
    an_export(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert export_target.place(tmp_path / "link") == export_target.place(tmp_path / "real")


def test_two_exports_into_one_folder(tmp_path):
    out, run = tmp_path / "out", tmp_path / "run"
    with export_target.claimed(out, run) as target:
        target.model.mkdir()
        with pytest.raises(MfsdpError, match="another export is writing there"), export_target.claimed(out, run):
            pass
        assert target.model.exists()
        target.publish()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with export_target.claimed(out, run):  # the lock went with the folder
        pass


@pytest.mark.parametrize("stop, there", [("lock", "old"), ("written", "old"), ("moved", None), ("renamed", "new")])
@pytest.mark.parametrize("replace", [True, False])
def test_a_killed_export_leaves_a_folder_that_is_whole_or_none(tmp_path, stop, there, replace):
    """Killed at each place of publishing; the next one clears up and goes through."""
    out = tmp_path / "out"
    if replace:
        (an_export(out) / "which").write_text("old")
    pid = os.fork()
    if pid == 0:
        with export_target.claimed(out, tmp_path / "run") as target:
            rename = Path.rename
            Path.rename = lambda path, to: (rename(path, to), path == out and stop == "moved" and os.kill(os.getpid(), 9))
            if stop != "lock":
                (an_export(target.model) / "which").write_text("new")
            if stop in ("moved", "renamed") and (replace or stop == "renamed"):
                target.publish()
            os.kill(os.getpid(), 9)
    assert os.waitpid(pid, 0)[1] == 9 and (tmp_path / "out.tmp").exists()
    there = there if replace or there == "new" else None
    assert ((out / "which").read_text() if out.exists() else None) == there
    with export_target.claimed(out, tmp_path / "run") as target:
        assert ((out / "which").read_text() if out.exists() else None) == (there or ("old" if replace else None))  # put back
        (an_export(target.model) / "which").write_text("newest")
        target.publish()
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (out / "which").read_text() == "newest"


def test_progress_is_lines_where_there_is_no_terminal_and_nothing_when_quiet():
    now, stream = [0.0], io.StringIO()
    progress = Progress(stream, clock=lambda: now[0])
    progress.say("reading …")
    for tensors, seconds in ((1, 1.0), (2, 6.0), (3, 7.0), (4, 8.0)):
        now[0] = seconds
        progress.advance(tensors, 4, tensors * 500_000_000, 2_000_000_000)
    assert stream.getvalue() == "reading …\n2/4 tensors, 1.00 of 2.00 GB, 6 s\n4/4 tensors, 2.00 of 2.00 GB, 8 s\n"
    quiet = Progress(stream := io.StringIO(), quiet=True)
    quiet.say("reading …")
    quiet.advance(4, 4, 1, 1)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("dtype, fits", [("auto", True), ("bfloat16", True), ("float32", False)])
def test_the_disk_must_hold_the_weights(monkeypatch, tmp_path, dtype, fits):
    """3 Gi elements are 6 GiB in bfloat16 and 12 GiB in float32; optimizer moments are not exported."""
    monkeypatch.setattr(export, "free_disk_gib", lambda path: 10.0)
    found = problems(monkeypatch, report(3 * GIB), tmp_path, dtype)
    assert [(p.code, p.why) for p in found] == ([] if fits else [(MACHINE_UNFIT, "the weights need 12.0 GiB, and 10.0 GiB are free there")])


def test_the_disk_is_asked_for_the_source_model_s_bytes(monkeypatch, tmp_path):
    """Trained in float32 and published in bfloat16, the output layer tied: 2 GiB are written, not the 4 GiB of the shards."""
    step = tmp_path / "step_000001"
    step.mkdir()
    (step / "source_index.json").write_text(json.dumps({"w": {"shape": [1024, 1024, 1024], "dtype": "bfloat16"}}))
    found = report(GIB, path=str(step), dtype="float32")
    monkeypatch.setattr(export, "free_disk_gib", lambda path: 3.0)
    assert problems(monkeypatch, found, tmp_path / "out") == []
    assert "need 4.0 GiB" in problems(monkeypatch, found, tmp_path / "out", "float32")[0].why


@pytest.mark.parametrize("text", ["", "[1]", '{"w": 3}', '{"w": {"shape": [2]}}', '{"w": {"shape": [-2], "dtype": "bfloat16"}}',
                                  '{"w": {"shape": 2, "dtype": "bfloat16"}}', '{"w": {"shape": [2], "dtype": ["x"]}}', "[" * 100_000])
def test_a_damaged_index_of_the_source_model_is_told(monkeypatch, tmp_path, text):
    step = tmp_path / "step_000001"
    step.mkdir()
    (step / "source_index.json").write_text(text)
    with pytest.raises(MfsdpError, match="source model's tensors is damaged") as caught:
        problems(monkeypatch, report(path=str(step)), tmp_path / "out")
    assert caught.value.exit_code == BAD_INPUT


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
p.add_argument("path"); p.add_argument("--no-forward-check", action="store_true"); p.add_argument("--quiet", action="store_true")
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
code, data = export.export("run", "out", dtype="auto", source="model", forward_check=False, overwrite=False, quiet=True, module="child_for_test")
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
        assert [data["args"][name] for name in ("out", "source", "no_forward_check", "quiet")] == ["out", "model", True, True]
    if ends == -9:
        assert "signal 9 (SIGKILL); most likely the host ran out of memory" in done.stderr
