"""The launcher against a small program in torchrun's place: ends, signals, orphans, streams. Real processes throughout."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mfsdp_cli.checkpoint.manifest import Manifest
from mfsdp_cli.checkpoint.saving import begin, commit
from mfsdp_cli.launch.run import ASK_SIGNALS

LAUNCHER = Path(__file__).with_name("launcher_for_tests.py")
ROOT = LAUNCHER.parents[2]
# What every fake needs: sys.argv[1] is the attempt folder, say() is rank 0's console, save() makes a complete checkpoint.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
attempt = Path(sys.argv[1]); run_dir = attempt.parents[1]
def say(text): os.write(2, b"\\x1emfsdp " + text.encode() + b"\\n")
def save(step):
    from mfsdp_cli.checkpoint.manifest import Manifest
    from mfsdp_cli.checkpoint.saving import begin, commit
    tmp = begin(run_dir / "checkpoints", step); (tmp / "trainer.json").write_text("{}")
    return str(commit(tmp, Manifest(step, 9, 8 * step, ["model", "optimizer", "extra"], {"world": 1}, "float32", 8, "Qwen2ForCausalLM", "tiny", 1)))
def result(**fields): (attempt / "result.json").write_text(json.dumps(fields))
def wait_for_stop():
    while not (attempt / "stop").exists(): time.sleep(0.02)
"""
TABLE = """
============================================================
mfsdp_cli.train.sft FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:01
  host      : host
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 12)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : host
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 11)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 11
============================================================
"""


def launch(tmp_path, fake, *options):
    file = tmp_path / "fake.py"
    file.write_text(PRELUDE + fake)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.Popen([sys.executable, str(LAUNCHER), str(tmp_path / "run"), str(file), *options], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals)


def heed_signals() -> None:
    """Tests that run under nohup, or as a background job, would hand on what those ignore, and the launcher leaves it so."""
    for number in ASK_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def finish(tmp_path, fake, *options):
    process = launch(tmp_path, fake, *options)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def wait_until(condition, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_pids(folder):
    wait_until(lambda: (folder / "pids").is_file() and (folder / "pids").read_text().endswith("\n"))
    return [int(word) for word in (folder / "pids").read_text().split()]


def failure(rank, when, code, message="boom", problems=()):
    fields = {"rank": rank, "time": when, "type": "ValueError", "message": message, "traceback": "Traceback …", "exit_code": code}
    return f"(attempt / 'failure-rank{rank}.json').write_text({json.dumps(json.dumps({**fields, 'problems': list(problems)}))})\n"


def test_a_finished_run_prints_only_the_checkpoint(tmp_path):
    code, out, err = finish(tmp_path, """
print("chatter on stdout"); os.write(2, b"chatter on stderr\\n")
say("loading model tiny"); say("step 1/2 loss 0.5"); say("step 2/2 loss 0.4")
result(status="done", step=2, total_steps=2, checkpoint=save(2), metrics={"loss": 0.4})
""")
    assert (code, out) == (0, f"{tmp_path}/run/checkpoints/step_000002\n")
    assert err.splitlines() == ["loading model tiny", "step 1/2 loss 0.5", "step 2/2 loss 0.4"]
    log = (tmp_path / "run/attempts/001/launcher.log").read_text()
    assert "chatter on stdout\n" in log and "chatter on stderr\n" in log and "\nstep 2/2 loss 0.4\n" in log and "\x1e" not in log


def test_json_is_one_object_without_nan(tmp_path):
    code, out, _ = finish(tmp_path, """
say("step 2/2 loss nan")
result(status="done", step=2, total_steps=2, checkpoint=save(2), metrics={"loss": float("nan"), "lr": 0.1})
""", "--json")
    data = json.loads(out, parse_constant=lambda text: pytest.fail(text))
    assert code == 0 and data["schema"] == 1 and data["ok"] is True and data["status"] == "done" and data["step"] == 2
    assert data["metrics"] == {"loss": None, "lr": 0.1} and data["non_finite"] == ["metrics.loss"]
    assert data["checkpoint"] == f"{tmp_path}/run/checkpoints/step_000002"


def test_the_earliest_failure_is_told_with_its_exit_code(tmp_path):
    problem = {"key": "data.train_files", "found": "row 7", "why": "too long", "fix": "raise it", "where": "", "code": 5, "level": "error"}
    code, out, err = finish(tmp_path, failure(0, 20.0, 1, "lost connection") + failure(3, 10.0, 5, "bad row", [problem]) + """
(attempt / "rank3.log").write_text("".join(f"line {i}\\n" for i in range(30)))
sys.exit(1)
""")
    assert (code, out) == (5, "")
    assert "error: rank 3 failed (1 more ranks failed after it): ValueError: bad row" in err
    assert "data.train_files = row 7" in err and "fix: raise it" in err
    assert "    line 15\n" in err and "    line 29\n" in err and "line 14\n" not in err
    assert f"logs: {tmp_path}/run/attempts/001" in err
    saved = json.loads((tmp_path / "run/attempts/001/failure.json").read_text())
    assert saved["rank"] == 3 and saved["exit_code"] == 5 and saved["failed_ranks"] == [3, 0]


def test_json_on_failure(tmp_path):
    code, out, _ = finish(tmp_path, failure(0, 1.0, 1) + "sys.exit(1)", "--json")
    data = json.loads(out)
    assert code == 1 and data["ok"] is False and data["exit_code"] == 1 and data["status"] == "failed" and data["checkpoint"] is None


def test_killed_torchrun_gives_137(tmp_path):
    code, out, err = finish(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (code, out) == (137, "")
    assert "torchrun was killed by signal 9 (SIGKILL); most likely the host ran out of memory" in err


def test_a_killed_rank_is_the_cause_and_not_those_that_lost_it(tmp_path):
    code, _, err = finish(tmp_path, failure(3, 1.0, 1, "connection closed by peer") + f"print({TABLE!r}, flush=True)\nsys.exit(1)")
    assert code == 137 and "rank 2 was killed by signal 9" in err and "connection closed" not in err


def test_the_first_killed_rank_is_told_and_not_one_that_torchrun_killed_after_it(tmp_path):
    """torchrun SIGKILLs the ranks that do not end by themselves; its table's last entry is the failure it saw first."""
    table = TABLE.replace("exitcode  : 1 (pid: 12)", "exitcode  : -9 (pid: 12)")
    assert table.count("exitcode  : -9") == 2
    code, _, err = finish(tmp_path, f"print({table!r}, flush=True)\nsys.exit(1)")
    assert code == 137 and "rank 2 was killed by signal 9" in err


def test_mistakes_of_the_users_are_told_once(tmp_path):
    problem = {"key": "a.parquet row 7", "found": "", "why": "too long by 40 tokens", "fix": "raise it", "where": "", "code": 5, "level": "error"}
    script = failure(0, 10.0, 5, "a.parquet row 7: too long by 40 tokens", [problem]).replace("ValueError", "MfsdpError")
    code, out, err = finish(tmp_path, script + """
(attempt / "rank0.log").write_text("Traceback of MfsdpError: too long by 40 tokens\\n")
sys.exit(1)
""")
    assert (code, out) == (5, "") and err.count("too long by 40 tokens") == 1
    assert "error: rank 0 failed, for the reasons above" in err and f"logs: {tmp_path}/run/attempts/001" in err


def test_an_end_without_any_trace_is_a_failure(tmp_path):
    assert finish(tmp_path, "print('out of luck'); sys.exit(3)")[0] == 1
    code, _, err = finish(tmp_path, f"""
print("No module named tranformers")
print("E1130 09:36:58.395000 4552 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1) local_rank: 2")
print({TABLE.replace("-9", "1")!r}, flush=True)
sys.exit(1)""")
    assert code == 1 and "rank 2 ended with exit code 1 and left no failure file" in err
    assert "    No module named tranformers\n\nlogs: " in err
    code, out, err = finish(tmp_path, "print('nothing done')")
    assert (code, out) == (1, "") and "without a result" in err and "nothing done" in err


def test_on_a_full_disk_the_exit_code_of_a_rank_says_so(tmp_path):
    code, _, err = finish(tmp_path, f"""
(attempt / "failure.json").symlink_to("/dev/full")
print({TABLE.replace("-9", "4")!r}, flush=True)
sys.exit(1)""")
    assert code == 4 and "rank 2 ended with exit code 4" in err and "No space left" in err


def test_a_crash_after_the_result_is_said_and_no_failure(tmp_path):
    code, out, err = finish(tmp_path, 'result(status="done", step=1, total_steps=1, checkpoint=save(1), metrics={})\nsys.exit(9)')
    assert code == 0 and out.endswith("step_000001\n") and "exit code 9 after" in err


GRACEFUL = """
say("step 1/9 loss 0.5")
wait_for_stop()
result(status="stopped", step=1, total_steps=9, checkpoint=save(1), metrics={})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_first_signal_saves_and_gives_75(tmp_path, number):
    process = launch(tmp_path, GRACEFUL)
    assert process.stderr.readline() == "step 1/9 loss 0.5\n"
    process.send_signal(number)
    process.send_signal(number)  # the same signal at once, as `timeout` sends it, is one request
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75 and out == f"{tmp_path}/run/checkpoints/step_000001\n"
    assert "saving, press Ctrl-C again to stop at once" in err and "the same command again goes on" in err
    assert (tmp_path / "run/attempts/001/stop").is_file()


# A fake torchrun with a rank in a session of its own, as torchrun's are, which ignores SIGTERM
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(99)"],
                        start_new_session=True, stdout=subprocess.PIPE)
rank.stdout.readline()
(attempt / "pids").write_text(f"{os.getpid()} {rank.pid}\\n")
say("step 1/9 loss 0.5")
time.sleep(99)
"""


def test_second_signal_ends_the_whole_tree(tmp_path):
    process = launch(tmp_path, STUBBORN)
    process.stderr.readline()
    pids = read_pids(tmp_path / "run/attempts/001")
    assert all(map(alive, pids))
    process.send_signal(signal.SIGINT)
    assert "saving" in process.stderr.readline()
    time.sleep(0.6)
    assert all(map(alive, pids))
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and out == ""
    assert not any(map(alive, pids)) and 4 < time.monotonic() - began < 15


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_at_once(tmp_path, number):
    process = launch(tmp_path, 'say("loading model tiny")\ntime.sleep(99)')
    process.stderr.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and out == "" and "nothing to save" in err


def test_a_signal_before_the_first_step_of_a_resumed_run_gives_75(tmp_path):
    folder = begin(tmp_path / "run/checkpoints", 4)
    saved = commit(folder, Manifest(4, 9, 32, ["model", "optimizer", "extra"], {"world": 1}, "float32", 8, "Qwen2ForCausalLM", "tiny", 1))
    process = launch(tmp_path, 'say("loading model tiny")\ntime.sleep(99)')
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and out == f"{saved}\n"


def test_no_process_outlives_a_killed_launcher(tmp_path):
    process = launch(tmp_path, """
rank = subprocess.Popen(["sleep", "99"])
signal.signal(signal.SIGTERM, lambda *_: (rank.kill(), sys.exit(1)))
(attempt / "pids").write_text(f"{os.getpid()} {rank.pid}\\n")
time.sleep(99)
""")
    pids = read_pids(tmp_path / "run/attempts/001")
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not any(map(alive, pids)))


def test_ranks_that_outlive_torchrun_are_ended(tmp_path):
    code, _, _ = finish(tmp_path, """
rank = subprocess.Popen(["sleep", "99"], start_new_session=True)
(attempt / "pids").write_text(f"{rank.pid}\\n")
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert code == 137 and not alive(read_pids(tmp_path / "run/attempts/001")[0])


def test_a_second_launcher_is_refused_and_disturbs_nothing(tmp_path):
    first = launch(tmp_path, GRACEFUL)
    first.stderr.readline()
    code, out, err = finish(tmp_path, GRACEFUL)
    assert (code, out) == (4, "") and f"pid {first.pid} on " in err and "another mfsdp works in this run folder" in err
    assert [p.name for p in (tmp_path / "run/attempts").iterdir()] == ["001"]
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    assert first.returncode == 75
    assert finish(tmp_path, "sys.exit(1)")[0] == 1  # the lock went with its holder
    assert sorted(p.name for p in (tmp_path / "run/attempts").iterdir()) == ["001", "002"]


# A rank that goes on saving for a while when its launcher and torchrun are gone
SAVING = """
import fcntl
rank = subprocess.Popen([sys.executable, "-c", "import fcntl, signal, sys; [signal.signal(n, signal.SIG_IGN) for n in (15, 1)]; f = open(sys.argv[1], 'a');"
                         "fcntl.flock(f, fcntl.LOCK_SH); print(flush=True); sys.stdin.read()", attempt / "alive"],
                        start_new_session=True, stdout=subprocess.PIPE, stdin=os.open(run_dir / "saving", os.O_RDONLY))
rank.stdout.readline()
say("step 1/9 loss 0.5")
time.sleep(99)
"""


def test_after_a_killed_launcher_the_next_waits_for_its_ranks(tmp_path):
    """They may be writing a checkpoint; nobody else may read, prune or write there before they end."""
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "saving")
    launcher = launch(tmp_path, SAVING)
    with open(tmp_path / "run" / "saving", "w"):
        assert launcher.stderr.readline() == "step 1/9 loss 0.5\n"
        launcher.kill()
        launcher.communicate(timeout=30)
        code, out, err = finish(tmp_path, "sys.exit(1)")
        assert (code, out) == (4, "") and "attempts/001 = still at work" in err and "wait for them" in err
    wait_until(lambda: finish(tmp_path, 'result(status="done", step=2, total_steps=2, checkpoint=save(2), metrics={})')[0] == 0)
    assert sorted(p.name for p in (tmp_path / "run/attempts").iterdir()) == ["001", "002"]


def test_a_launcher_outlives_the_locks_of_its_ranks(tmp_path):
    """A process that is being taken down has no environment any more, by which it would be found, and still holds its lock; here one that never
    had it. Whoever starts at once after the launcher's end must not be refused."""
    code, _, err = finish(tmp_path, """
held = subprocess.Popen([sys.executable, "-c", "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_SH); print(flush=True);"
                         "time.sleep(1.5); open(sys.argv[1] + '.ended', 'w')", attempt / "alive"], start_new_session=True, stdout=subprocess.PIPE, env={})
held.stdout.readline()
sys.exit(1)
""")
    assert code == 1 and (tmp_path / "run/attempts/001/alive.ended").is_file(), err
    assert finish(tmp_path, 'result(status="done", step=2, total_steps=2, checkpoint=save(2), metrics={})')[0] == 0


def test_a_log_that_cannot_be_written_does_not_stop_the_run(tmp_path):
    """A full disk: what the ranks say still reaches the console, and how they ended."""
    (tmp_path / "run/attempts/001").mkdir(parents=True)
    code, out, err = finish(tmp_path, """
os.truncate(attempt / "launcher.log", 0)
import resource, signal
resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
say("step 1/2 loss 0.5"); say("step 2/2 loss 0.4"); time.sleep(0.5)
result(status="done", step=2, total_steps=2, checkpoint=save(2), metrics={})
""")
    assert code == 0 and out.endswith("step_000002\n")
    assert "step 2/2 loss 0.4" in err and err.count("the log ends here") == 1 and "002/launcher.log" in err


def test_a_closed_stdout_is_no_failure(tmp_path):
    process = launch(tmp_path, 'result(status="done", step=1, total_steps=1, checkpoint=save(1), metrics={})')
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 0


def test_a_closed_stderr_does_not_stop_the_run(tmp_path):
    process = launch(tmp_path, """
say("step 1/1 loss 1"); say("hello")
result(status="done", step=1, total_steps=1, checkpoint=save(1), metrics={})
""")
    process.stderr.close()
    assert process.stdout.read() == f"{tmp_path}/run/checkpoints/step_000001\n"
    assert process.wait(timeout=30) == 0
