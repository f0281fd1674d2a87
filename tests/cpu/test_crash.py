"""kill -9 of any rank, or of all, at any moment of a run that saves at every step: nothing that was complete is lost, no attempt
begins anew in silence, and the run that comes of it is the undisturbed one.

MFSDP_KILLS=200 repeats it so many times, MFSDP_SEED chooses the moments.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import RanksFailed
from runs import changed, sft_settings, stored, train_ranks, training_records

from mfsdp_cli.checkpoint.finding import latest_complete
from mfsdp_cli.checkpoint.manifest import require_complete, verify

STEPS = 10
KILLS = int(os.environ.get("MFSDP_KILLS", 6))
SEED = int(os.environ.get("MFSDP_SEED", 0))
RANKS = 2
# What a rank does with files, as sys.audit names it; reading modules is left out by looking at the path
FILE_EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate", "os.link", "shutil.rmtree")


@dataclass(frozen=True)
class Death:
    """SIGKILL of the victim (a rank, or None: all of them at once) before its `event`th file operation, or after `seconds`."""

    victim: int | None
    run_dir: Path
    attempt: str
    event: int = 0
    seconds: float = 0.0

    def __call__(self) -> None:
        rank = int(os.environ["RANK"])
        (self.pids / str(rank)).write_text(str(os.getpid()))
        if rank != (self.victim or 0):
            return
        if self.event:
            sys.addaudithook(self._counter())
        else:
            timer = threading.Timer(self.seconds, self._kill)
            timer.daemon = True
            timer.start()

    @property
    def pids(self) -> Path:
        folder = self.run_dir.parent / "pids" / self.attempt
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _counter(self):
        count, root = 0, str(self.run_dir)

        def hook(event, args):
            nonlocal count
            if event in FILE_EVENTS or event == "open" and str(args[0]).startswith(root):
                count += 1
                if count == self.event:
                    self._kill()

        return hook

    def _kill(self) -> None:
        if self.victim is None:
            for file in self.pids.iterdir():
                if file.name != "0":
                    os.kill(int(file.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Count:
    """Counts a rank's file operations instead, for the range to choose from: one line an operation."""

    run_dir: Path

    def __call__(self) -> None:
        root, file = str(self.run_dir), open(self.run_dir.parent / f"events-{os.environ['RANK']}", "a", buffering=1)

        def hook(event, args):
            if event in FILE_EVENTS or event == "open" and str(args[0]).startswith(root):
                file.write(f"{event}\n")

        sys.addaudithook(hook)


@pytest.fixture(scope="module")
def settings(tiny, tmp_path_factory):
    return changed(sft_settings(tiny, tmp_path_factory.mktemp("data"), ranks=RANKS, steps=STEPS), trainer={"save_freq": 1, "test_freq": 4})


@pytest.fixture(scope="module")
def straight(settings, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    run_dir.mkdir()
    train_ranks(settings, run_dir, before_train=Count(run_dir))
    return run_dir


def num_events(straight: Path, rank: int) -> int:
    return len((straight.parent / f"events-{rank}").read_text().splitlines())


def choose(rng: random.Random, straight: Path, run_dir: Path, attempt: str) -> Death:
    """A victim and a moment somewhere in the first third of a whole run: some die before they have saved anything, or while loading."""
    victim = rng.choice([0, 0, 0, 1, None])
    if rng.random() < 0.75:
        return Death(victim, run_dir, attempt, event=rng.randint(1, max(2, num_events(straight, victim or 0) // 3)))
    return Death(victim, run_dir, attempt, seconds=rng.uniform(0.2, 2.5))


def started_from(run_dir: Path, attempt: str) -> str | None:
    """Name of the checkpoint that this attempt read, "" for none, None when it died before it could say."""
    log = run_dir / "attempts" / attempt / "rank0.log"
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.startswith("reading "):
            return line.rpartition("/")[2] if "weights from" in line else ""
    return None


def test_killed_at_any_moment(settings, straight, tmp_path):
    rng, kills, num_runs, stuck, gains = random.Random(SEED), 0, 0, 0, []
    while kills < KILLS:
        run_dir, keep, number, step = tmp_path / str(num_runs) / "run", rng.choice([1, 2]), 0, 0
        run_dir.mkdir(parents=True)
        often = changed(settings, trainer={"max_ckpt_to_keep": keep}, checkpoint={"background_save": rng.choice([None, True])})
        checkpoints, ended = run_dir / "checkpoints", False
        while not ended:
            number += 1
            attempt, last = f"{number:03d}", kills >= KILLS
            death = None if last else choose(rng, straight, run_dir, attempt)
            before = latest_complete(checkpoints) if checkpoints.is_dir() else None
            try:
                train_ranks(often, run_dir, attempt=attempt, before_train=death, timeout_s=120)
                ended = True
            except RanksFailed as error:  # by nothing but the kill; the other ranks notice that they are alone
                assert death is not None and error.statuses[death.victim or 0] == signal.SIGKILL, error
                kills, stuck = kills + 1, stuck + len(error.stopped)
            assert started_from(run_dir, attempt) in (None, before.name if before else ""), (attempt, death)
            found = latest_complete(checkpoints) if checkpoints.is_dir() else None
            if found is None:
                assert before is None, (death, "nothing complete is left")
                continue
            now = require_complete(found).step
            assert verify(found) == [] and now >= step, (death, step, now)
            gains.append(now - step)
            step = now
        assert training_records(run_dir) == training_records(straight), num_runs
        ends = [stored(run / "checkpoints" / f"step_{STEPS:06d}" / "dist_ckpt") for run in (straight, run_dir)]
        assert ends[0].keys() == ends[1].keys() and [n for n in ends[0] if not ends[0][n].equal(ends[1][n])] == []
        if before is None or before.name != f"step_{STEPS:06d}":  # else the last attempt had nothing to save, and tidied nothing
            left = sorted(p.name for p in checkpoints.iterdir())
            assert left == ["latest", *(f"step_{s:06d}" for s in range(STEPS - keep + 1, STEPS + 1))], left
        num_runs += 1
    print(f"{kills} kills, {num_runs} whole runs, {sum(g > 0 for g in gains)} attempts saved something, {stuck} ranks ended by force")
