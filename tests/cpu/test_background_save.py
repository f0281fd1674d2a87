"""Saves that go on while training does: of the state as it was, one at a time, waited for at the end, and never failing in silence."""

from __future__ import annotations

import errno
import math
import os
import re
import time
from pathlib import Path

import pytest
from ranks import RanksFailed
from runs import changed, sft_settings, stored, train_ranks, training_records

from mfsdp_cli.checkpoint.finding import latest_complete
from mfsdp_cli.checkpoint.manifest import verify

STEPS = 5


@pytest.fixture(scope="module")
def settings(tiny, tmp_path_factory):
    plain = sft_settings(tiny, tmp_path_factory.mktemp("data"), ranks=2, steps=STEPS)
    plain.trainer.save_freq, plain.trainer.max_ckpt_to_keep, plain.data.val_files = 2, None, []
    return plain


@pytest.fixture(scope="module")
def in_the_loop(settings, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("in-the-loop")
    train_ranks(settings, run_dir)
    return run_dir


def slow_writes(seconds: float = 1.0) -> None:
    """Every write takes so long that steps pass meanwhile."""
    from mfsdp_cli.checkpoint import dtensor

    write = dtensor.write

    def slowly(*args):
        time.sleep(seconds)
        return write(*args)

    dtensor.write = slowly


def lines(run_dir: Path, attempt: str = "001") -> list[str]:
    """What rank 0 told, in order, shortened to "step 3" and "saved 2"."""
    text = (run_dir / "attempts" / attempt / "rank0.log").read_text()
    return [f"step {m[1]}" if m[1] else f"saved {int(m[2])}" for m in re.finditer(r"^(?:step (\d+)/|saved \S*step_(\d+) )", text, re.M)]


def test_what_is_saved_is_the_state_of_its_step_though_training_went_on(settings, in_the_loop, tmp_path):
    run_dir = tmp_path / "run"
    train_ranks(changed(settings, checkpoint={"background_save": True}), run_dir, before_train=slow_writes)
    told = lines(run_dir)
    assert told.index("saved 2") > told.index("step 3") and told[-1] == "saved 5" and told.index("saved 4") < told.index("saved 5")
    assert re.search(r"saved .*step_000002 \(\d+\.\d s, training waited \d+\.\d s\)", (run_dir / "attempts/001/rank0.log").read_text())
    assert lines(in_the_loop) == ["step 1", "step 2", "saved 2", "step 3", "step 4", "saved 4", "step 5", "saved 5"]
    assert training_records(run_dir) == training_records(in_the_loop)
    for step in (2, 4, 5):
        folders = [run / "checkpoints" / f"step_{step:06d}" for run in (run_dir, in_the_loop)]
        assert verify(folders[0]) == []
        mine, wanted = (stored(folder / "dist_ckpt") for folder in folders)
        assert mine.keys() == wanted.keys() and [name for name in wanted if not mine[name].equal(wanted[name])] == []


def test_a_stop_waits_for_its_save_and_the_run_goes_on_from_it(settings, in_the_loop, tmp_path):
    background = changed(settings, checkpoint={"background_save": True})
    train_ranks(background, tmp_path, stop_after=3, before_train=slow_writes)
    assert latest_complete(tmp_path / "checkpoints").name == "step_000003" and lines(tmp_path)[-1] == "saved 3"
    train_ranks(background, tmp_path, attempt="002")
    assert training_records(tmp_path) == training_records(in_the_loop)


def full_disk_at_step_four() -> None:
    """Rank 1 can write its first checkpoint only."""
    from mfsdp_cli.checkpoint import dtensor

    slow_writes(0.2)
    write, count = dtensor.write, [0]

    def fails(state, folder, group):
        count[0] += 1
        if count[0] == 2 and os.environ["RANK"] == "1":
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / "__1_0.distcp").symlink_to("/dev/full")
        return write(state, folder, group)

    dtensor.write = fails


def test_a_save_that_fails_ends_the_run_and_costs_no_earlier_one(settings, tmp_path):
    with pytest.raises(RanksFailed) as caught:
        train_ranks(changed(settings, checkpoint={"background_save": True}, trainer={"max_ckpt_to_keep": 1}), tmp_path,
                    before_train=full_disk_at_step_four)
    assert f"{os.strerror(errno.ENOSPC)} on rank 1" in str(caught.value) and "step 4 could not be saved" in str(caught.value)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_000002"]
    assert verify(tmp_path / "checkpoints" / "step_000002") == []


def nan_at_step_three() -> None:
    from mfsdp_cli.engine import megatron

    slow_writes()
    grad_norm, count = megatron.grad_norm, [0]

    def fails(optimizer):
        count[0] += 1
        return grad_norm(optimizer) * (math.nan if count[0] == 3 else 1.0)

    megatron.grad_norm = fails


def test_a_run_that_fails_meanwhile_still_has_its_checkpoint(settings, tmp_path):
    with pytest.raises(RanksFailed, match=r"the last checkpoint is \S*step_000002;"):
        train_ranks(changed(settings, checkpoint={"background_save": True}), tmp_path, before_train=nan_at_step_three)
    assert latest_complete(tmp_path / "checkpoints").name == "step_000002"
