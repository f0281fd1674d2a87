"""Ctrl-C twice on `mfsdp grpo` ends Ray and all its children: the launcher with a driver that is small, and a Ray that is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import os, sys, time
from pathlib import Path
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

@ray.remote
class Worker:
    def pids(self):  # its own, and its raylet's
        return os.getpid(), os.getppid()
    def work(self):
        time.sleep(999)

worker = Worker.remote()
pids = [os.getpid(), *ray.get(worker.pids.remote())]
(Path(sys.argv[1]) / "pids").write_text(" ".join(map(str, pids)))
os.write(2, b"\\x1emfsdp step 1/9 reward 0.5\\n")
ray.get(worker.work.remote())
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_second_ctrl_c_leaves_no_ray_process(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
    command = [sys.executable, str(ROOT / "tests/unit/launcher_for_tests.py"), str(tmp_path / "run"), str(tmp_path / "driver.py")]
    launcher = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = launcher.stderr.readline()
    assert line == "step 1/9 reward 0.5\n", line + launcher.communicate()[1]
    pids = [int(pid) for pid in (tmp_path / "run/attempts/001/pids").read_text().split()]
    assert len(set(pids)) == 3 and all(map(alive, pids))
    launcher.send_signal(signal.SIGINT)
    assert "saving" in launcher.stderr.readline()
    time.sleep(0.7)  # two at once are one request
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=90)
    assert (launcher.returncode, out) == (130, "")
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.1)
