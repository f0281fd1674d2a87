"""What a rank says to people."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from pathlib import Path
from mfsdp_cli.train.process import RankProcess
process = RankProcess(Path("runs/a/attempts/001"), rank=0, local_rank=0)
process.say(f"saved {Path('runs/a').resolve()}/checkpoints/step_000001")
process.show(Path("runs/a").resolve(), Path("runs/a"))
process.say(f"saved {Path('runs/a').resolve()}/checkpoints/step_000002, beside {Path('runs/ab').resolve()}/x")
"""


def test_the_run_folder_is_told_as_it_was_given(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True,
                          text=True, timeout=120)
    first, second = done.stderr.strip("\n").split("\n")
    assert done.returncode == 0 and first.endswith(f"saved {tmp_path}/runs/a/checkpoints/step_000001")
    assert second.endswith(f"saved runs/a/checkpoints/step_000002, beside {tmp_path}/runs/ab/x")
    assert "saved runs/a/checkpoints/step_000002" in (tmp_path / "runs/a/attempts/001/rank0.log").read_text()


LAST_WORD = """
import os
from pathlib import Path
from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError, Problem
from mfsdp_cli.train.process import RankProcess
attempt = Path("attempts/001")
attempt.mkdir(parents=True)
(attempt / "failure-rank0.json.part").symlink_to("/dev/full")
process = RankProcess(attempt, rank=0, local_rank=0)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
process.say("step 1/2")
with process.last_word():
    raise MfsdpError(Problem("runs/a", "No space left on device", "step 2 could not be saved", "make room", code=MACHINE_UNFIT))
"""


def test_on_a_full_disk_the_reason_still_reaches_the_console(tmp_path):
    done = subprocess.run([sys.executable, "-c", LAST_WORD], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 4 and "mfsdp step 1/2" in done.stderr
    assert "error: rank0: runs/a = No space left on device: step 2 could not be saved" in done.stderr
    assert "nor can this be written" in done.stderr
