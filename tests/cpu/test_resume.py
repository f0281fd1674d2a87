"""A stopped run goes on as if it had never stopped; on other ranks within rounding; and after a kill from the last whole checkpoint."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import pytest
from runs import changed, sft_settings, stored, train_ranks, training_records, validation_losses

from mfsdp_cli.checkpoint.finding import latest_complete
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.train.schedule import learning_rate

STEPS = 20


@pytest.fixture(scope="module")
def settings(tiny, tmp_path_factory) -> SftSettings:
    """Two data-parallel ranks, 20 steps of 4 rows out of 50: the second epoch begins after step 12."""
    return sft_settings(tiny, tmp_path_factory.mktemp("data"), steps=STEPS)


def final(run_dir: Path, step: int = STEPS) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}" / "dist_ckpt"


@pytest.fixture(scope="module")
def straight(settings, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight")
    train_ranks(settings, run_dir)
    return run_dir


@pytest.fixture(scope="module")
def halted(settings, tmp_path_factory) -> Path:
    """A run that was asked to stop and has saved step 10."""
    run_dir = tmp_path_factory.mktemp("halted")
    train_ranks(settings, run_dir, stop_after=10)
    return run_dir


def resumed(settings: SftSettings, halted: Path, tmp_path: Path) -> Path:
    run_dir = shutil.copytree(halted, tmp_path / "run")
    train_ranks(settings, run_dir, attempt="002")
    return run_dir


def test_ten_steps_and_ten_more_are_twenty_bit_for_bit(settings, straight, halted, tmp_path):
    assert [r["step"] for r in training_records(halted)] == list(range(1, 11))
    assert latest_complete(halted / "checkpoints").name == "step_000010"
    run_dir = resumed(settings, halted, tmp_path)
    whole, parts = training_records(straight), training_records(run_dir)
    assert parts == whole and len(whole) == STEPS  # loss, lr, grad_norm, rows and tokens of every step, to the last digit
    assert [r["lr"] for r in whole] == [learning_rate(settings.optim, n, STEPS) for n in range(1, STEPS + 1)]
    assert [r["epoch"] for r in whole] == [0] * 12 + [1] * 8
    assert whole[-1]["loss"] < 0.9 * whole[0]["loss"]
    losses, again = validation_losses(straight), validation_losses(run_dir)
    assert list(losses) == [0, 5, 10, 15, 20] and all(again[step] == losses[step] for step in (0, 5, 15, 20))
    tensors, others = stored(final(straight)), stored(final(run_dir))
    assert tensors.keys() == others.keys() and {name.split(".")[0] for name in tensors} == {"model", "optimizer", "rng"}
    assert [name for name in tensors if not tensors[name].equal(others[name])] == []
    assert any(not tensors[name].equal(value) for name, value in stored(final(halted, 10)).items())  # or equal would mean nothing


@pytest.mark.parametrize("ranks, tp, dynamic", [(1, 1, True), (2, 2, False)])
def test_a_resume_on_other_ranks_continues_within_rounding(settings, straight, halted, tmp_path, ranks, tp, dynamic):
    """Fixed micro batches and no validation make no difference either."""
    other = changed(settings, trainer={"n_gpus_per_node": ranks, "total_training_steps": STEPS}, engine={"tensor_model_parallel_size": tp},
                    data={"use_dynamic_bsz": dynamic, "val_files": settings.data.val_files if dynamic else []})
    run_dir = resumed(other, halted, tmp_path)
    for mine, wanted in zip(training_records(run_dir), training_records(straight), strict=True):
        same = ("step", "lr", "epoch", "samples_consumed", "num_tokens", "num_targets")
        assert {k: mine[k] for k in same} == {k: wanted[k] for k in same}
        assert (mine["loss"], mine["grad_norm"]) == pytest.approx((wanted["loss"], wanted["grad_norm"]), rel=1e-5)
    tensors, others = stored(final(straight)), stored(final(run_dir))
    names = {name for name in tensors if not name.startswith("rng.")}
    assert names == {name for name in others if not name.startswith("rng.")} and len(names) > 50
    assert max((tensors[name] - others[name]).abs().max().item() for name in names) < 1e-5


def die_while_writing() -> None:
    """Rank 1 is killed with the file of its tensors half written."""
    import torch.distributed.checkpoint as dcp

    write = dcp.FileSystemWriter.write_data

    def write_half(self, plan, planner):
        if os.environ["RANK"] == "1":
            plan = dataclasses.replace(plan, items=plan.items[: len(plan.items) // 2])
            write(self, plan, planner).wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, plan, planner)

    dcp.FileSystemWriter.write_data = write_half


def test_killed_in_the_middle_of_a_file(settings, straight, halted, tmp_path):
    """Step 10 is on the disk; the save of step 15 is cut short by SIGKILL; the next attempt starts from step 10 and ends as ever."""
    run_dir = shutil.copytree(halted, tmp_path / "run")
    often = changed(settings, trainer={"save_freq": 5})
    with pytest.raises(RuntimeError, match="ranks failed"):
        train_ranks(often, run_dir, attempt="002", before_train=die_while_writing)
    checkpoints = run_dir / "checkpoints"
    assert (checkpoints / "step_000015.tmp").is_dir() and latest_complete(checkpoints).name == "step_000010"
    train_ranks(settings, run_dir, attempt="003")
    assert training_records(run_dir) == training_records(straight)
    tensors, others = stored(final(straight)), stored(final(run_dir))
    assert [name for name in tensors if not tensors[name].equal(others[name])] == []
    assert not (checkpoints / "step_000015.tmp").exists() and (checkpoints / "latest").read_text() == "step_000020\n"
