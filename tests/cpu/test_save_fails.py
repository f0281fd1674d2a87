"""A save that cannot be written: on a full disk, into a folder that is read-only, on one rank alone. Every rank ends at once with the
reason, earlier checkpoints are whole, nothing is left of the failed one, and with room the same run goes on as if nothing had been."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from program import mfsdp
from ranks import RanksFailed
from runs import changed, sft_settings, stored, train_ranks, training_records

from mfsdp_cli.checkpoint.finding import latest_complete
from mfsdp_cli.checkpoint.manifest import verify
from mfsdp_cli.checkpoint.words import size_words
from mfsdp_cli.errors import MACHINE_UNFIT

STEPS = 4


@pytest.fixture(scope="module")
def settings(tiny, tmp_path_factory):
    plain = sft_settings(tiny, tmp_path_factory.mktemp("data"), ranks=2, steps=STEPS, model="qwen2")
    return changed(plain, trainer={"save_freq": 1, "max_ckpt_to_keep": 1}, data={"val_files": []})


@pytest.fixture(scope="module")
def straight(settings, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight")
    train_ranks(settings, run_dir)
    return run_dir


@contextmanager
def mounted(folder: Path, options: str):
    """A file system in memory at `folder`; the test is skipped where that may not be done."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"this user may not mount a file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def bytes_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def fails(settings, run_dir: Path, before_train=None) -> str:
    """The attempt's error, which every rank raised by itself and soon."""
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        train_ranks(settings, run_dir, before_train=before_train)
    assert sorted(caught.value.statuses) == [0, 1] and caught.value.stopped == []
    assert str(caught.value).startswith("mfsdp_cli.errors.MfsdpError: ")
    assert time.monotonic() - started < 60
    return str(caught.value).split("\n", 1)[0]


def goes_on(settings, straight: Path, run_dir: Path) -> None:
    train_ranks(settings, run_dir, attempt="002")
    assert training_records(run_dir) == training_records(straight)
    tensors, others = (stored(run / "checkpoints" / f"step_{STEPS:06d}" / "dist_ckpt") for run in (straight, run_dir))
    assert [name for name in tensors if not tensors[name].equal(others[name])] == []
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["latest", f"step_{STEPS:06d}"]


def slow_to_look(rank: str):
    """Rank `rank` takes its time over each file when it looks how much was written."""
    getsize = os.path.getsize

    def before_train() -> None:
        if os.environ["RANK"] == rank:
            os.path.getsize = lambda path: (time.sleep(0.3), getsize(path))[1]

    return before_train


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_full_disk(settings, straight, tmp_path, late):
    run_dir = tmp_path / "run"
    one = bytes_of(straight / "checkpoints" / f"step_{STEPS:06d}")
    with mounted(run_dir, f"size={int(1.6 * one)}"):
        text = fails(settings, run_dir, slow_to_look(late))
        assert f"{run_dir}/checkpoints" in text and "No space left on device on rank" in text and "step 2 could not be saved" in text
        assert f"the last one took {size_words(one)}, and there was room for " in text and "step_000001 is whole" in text
        assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["latest", "step_000001"]
        assert verify(latest_complete(run_dir / "checkpoints")) == []
        remount(run_dir, f"size={4 * one}")
        goes_on(settings, straight, run_dir)


def test_a_folder_that_became_read_only(settings, straight, tmp_path):
    run_dir = tmp_path / "run"
    with mounted(run_dir / "checkpoints", "ro"):
        text = fails(settings, run_dir)
        assert "Read-only file system on rank 0" in text and "step 1 could not be saved" in text and "there is no earlier one" in text


def small_files_only() -> None:
    """On rank 1 no file may grow beyond 8 KB, as under a quota."""
    import signal

    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))


def test_one_rank_that_cannot_write(settings, straight, tmp_path):
    text = fails(settings, tmp_path, small_files_only)
    assert "File too large on rank 1:" in text and "there is no earlier one" in text
    assert list((tmp_path / "checkpoints").iterdir()) == []
    goes_on(settings, straight, tmp_path)


def test_the_whole_program_on_a_full_disk(settings, tiny, tmp_path):
    """Logs, metrics and failure files lie on that disk too: the reason reaches the console all the same."""
    run_dir = tmp_path / "run"
    command = ["sft", "--preset", "sft-tiny-cpu", "--model", tiny("qwen2"), "--train-files", settings.data.train_files[0], "--output", run_dir,
               "--nproc", 2, "data.train_batch_size=4", "trainer.total_training_steps=6", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1",
               "checkpoint.save_contents=[model,optimizer,extra]"]
    with mounted(run_dir, "size=2600k"):
        code, out, err = mfsdp(*command)
        assert code == MACHINE_UNFIT and out == "" and "Traceback" not in err, err
        assert "No space left on device" in err and "could not be saved" in err and "is whole" in err and "make room there" in err
        assert verify(latest_complete(run_dir / "checkpoints")) == []
