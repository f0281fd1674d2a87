"""`mfsdp sft` on the GPU: saved in the background or not, killed and continued, exported. Kernels add in a fixed order here
(`deterministic/`), since flash attention's backward pass otherwise does not, and two runs would differ by that alone."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from bench_common import kill_tree
from gpu_processes import ON_CPU, SMALL
from program import finish, mfsdp, start
from runs import stored, training_records

from mfsdp_cli.checkpoint.manifest import verify
from mfsdp_cli.errors import OK

STEPS, SAVED, KILLED_AT = 12, 6, 8


@pytest.fixture(scope="module")
def command(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = "64" if SMALL else "400"
    code, _, err = mfsdp("prep-data", "arithmetic", "-o", folder, "--rows", rows, "--test-rows", "8", "-q")
    assert code == OK, err

    def make(run_dir, *more):
        rows, tokens = (4, 256) if SMALL else (32, 2048)
        trainer = {"total_training_steps": STEPS, "save_freq": SAVED, "max_ckpt_to_keep": "null"}
        return ["sft", "--model", model, "--train-files", folder / "train.parquet", "--output", run_dir, "--nproc", 1, "optim.lr=1e-3",
                f"data.train_batch_size={rows}", f"data.max_token_len_per_gpu={tokens}",
                *(f"trainer.{key}={value}" for key, value in trainer.items()), *more]

    return make


@pytest.fixture(scope="module")
def runs(command, tmp_path_factory):
    """name -> run folder. straight: saves as a GPU does by itself; in the loop: training waits for saves; broken: killed after its
    first checkpoint, and continued. The three run at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's part of a fixed order
        fixed_order = str(Path(__file__).parent / "deterministic")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [fixed_order, os.environ.get("PYTHONPATH")])))
        by_itself = "True" if ON_CPU else "null"
        saves = {"straight": by_itself, "in the loop": "False", "broken": by_itself}
        commands = {name: command(folder / name, f"checkpoint.background_save={value}") for name, value in saves.items()}
        processes = {name: start(*arguments) for name, arguments in commands.items()}
        kill_after_step(processes["broken"], folder / "broken")
        ends = {name: finish(process) for name, process in processes.items() if name != "broken"}
        ends["broken"] = mfsdp(*commands["broken"])
    for name, (code, _, err) in ends.items():
        assert code == OK, (name, err)
    return {name: folder / name for name in ends}


def kill_after_step(process, run_dir: Path) -> None:
    """kill -9 of launcher and ranks, once a checkpoint is complete and a later step has been made."""
    last, saved = 0, f"step_{SAVED:06d}"
    told = []
    for line in process.stderr:
        told.append(line)
        last = max(last, int(m[1]) if (m := re.match(r"step (\d+)/", line)) else 0)
        if last >= KILLED_AT and (run_dir / "checkpoints" / saved).is_dir():
            break
    else:
        raise AssertionError("the run ended before it could be killed:\n" + "".join(told))
    kill_tree(process.pid)
    process.communicate()


def attempts(run_dir: Path) -> dict[int, dict[int, dict]]:
    """Attempt -> step -> record, as they were written."""
    found: dict = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["attempt"], {})[record["step"]] = record
    return found


def test_a_killed_run_goes_on_from_its_checkpoint_and_repeats_its_steps(runs):
    """The next step's loss depends on the loaded weights alone, and must be the same number; the second's on the moments too."""
    made = attempts(runs["broken"])
    assert sorted(made[2]) == list(range(SAVED + 1, STEPS + 1)) and max(made[1]) >= KILLED_AT
    for step in (SAVED + 1, SAVED + 2):
        before, after = made[1][step], made[2][step]
        assert (before["loss"], before["grad_norm"]) == (after["loss"], after["grad_norm"]), step


@pytest.mark.parametrize("other", ["in the loop", "broken"])
def test_every_run_ends_with_the_same_bits(runs, other):
    """Neither saving in the background nor dying and going on changes a weight or a moment."""
    assert training_records(runs[other]) == training_records(runs["straight"])
    for step in (SAVED, STEPS):
        folders = [run / "checkpoints" / f"step_{step:06d}" for run in (runs["straight"], runs[other])]
        assert all(verify(folder) == [] for folder in folders)
        wanted, found = (stored(folder / "dist_ckpt") for folder in folders)
        assert wanted.keys() == found.keys() and [name for name in wanted if not wanted[name].equal(found[name])] == []


def test_which_runs_saved_in_the_background(runs):
    told = {name: (run / "attempts/001/rank0.log").read_text() for name, run in runs.items()}
    waited = {name: bool(re.search(r"^saved .*training waited", text, re.M)) for name, text in told.items()}
    assert waited == {"straight": True, "in the loop": False, "broken": True}


def test_an_export_holds_the_trained_weights(runs, tmp_path):
    """`export-hf` compares names, shapes, bytes and log-probabilities by itself; here its tensors with the checkpoint's main weights."""
    started = time.monotonic()
    code, out, err = mfsdp("ckpt", "export-hf", runs["straight"], "-o", tmp_path / "hf")
    assert code == OK and out == f"{tmp_path / 'hf'}\n", err
    print(f"exported in {time.monotonic() - started:.0f} s: {err.splitlines()[-1]}")
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "hf" / "model.safetensors")
    main = stored(runs["straight"] / "checkpoints" / f"step_{STEPS:06d}" / "dist_ckpt")
    [norm] = [t for name, t in main.items() if name.endswith("final_layernorm.weight") and "optimizer" not in name]
    assert exported["model.norm.weight"].equal(norm.to(exported["model.norm.weight"].dtype))
