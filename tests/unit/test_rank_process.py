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
