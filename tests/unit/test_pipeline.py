"""The pipeline contract: stdout is the product whatever the children print, a closed reader is no failure, JSON on failure too, no
control characters where they do not belong, words for every way to die, and what the shell completes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from inputs_for_tests import write_chats, write_model
from typer.main import get_command

from mfsdp_cli import cli
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.launch import host, run
from mfsdp_cli.launch.folder import open_attempt
from mfsdp_cli.launch.outcome import signal_words
from mfsdp_cli.launch.start import tell
from mfsdp_cli.options import complete_key
from mfsdp_cli.output import Console

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM", "CUDA_DEVICE_MAX_CONNECTIONS")}
CLEAN |= {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
ESCAPE = re.compile(r"\x1b|\r(?!\n)|\x08")

# `mfsdp` with two programs replaced: torchrun, and the child that exports
MFSDP = """
import sys
from mfsdp_cli import cli
from mfsdp_cli.launch import command, export
command.torchrun_command = lambda settings, run_dir, attempt_dir, node_rank: [sys.executable, {trainer!r}, str(attempt_dir)]
export.export.__kwdefaults__["module"] = "exporter_for_test"
export.check_export = lambda path, out, dtype, overwrite: (path, [])
cli.main()
"""
# Prints half a MiB on each stream, through a grandchild and with half lines and bytes that are no text, and then does its work
FLOOD = """
import json, os, subprocess, sys
from pathlib import Path
noise = "import os\\nfor _ in range(8):\\n    os.write(1, b'\\\\xff chatter\\\\x1b[31m' * 4096); os.write(2, b'more\\\\n' * 8192)"
"""
TRAINER = FLOOD + """
attempt = Path(sys.argv[1]); run_dir = attempt.parents[1]
subprocess.run([sys.executable, "-c", noise], check=True)
os.write(2, b"\\x1emfsdp step 1/1 loss 0.5\\n")
from mfsdp_cli.checkpoint.manifest import Manifest
from mfsdp_cli.checkpoint.saving import begin, commit
tmp = begin(run_dir / "checkpoints", 1); (tmp / "trainer.json").write_text("{}")
path = commit(tmp, Manifest(1, 1, 8, ["model"], {"world": 1}, "float32", 8, "Qwen2ForCausalLM", "tiny", 1))
(attempt / "result.json").write_text(json.dumps({"status": "done", "step": 1, "total_steps": 1, "checkpoint": str(path), "metrics": {}}))
subprocess.run([sys.executable, "-c", noise], check=True)
"""
EXPORTER = FLOOD + """
subprocess.run([sys.executable, "-c", noise], check=True)
Path(sys.argv[sys.argv.index("--json-report") + 1]).write_text("{}")
"""


@pytest.fixture
def shell(tmp_path):
    """Run a line of bash in a folder with inputs, where `mfsdp` is the command with the two replaced programs."""
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.parquet", 20)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "exporter_for_test.py").write_text(EXPORTER)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mfsdp"
    program.write_text(f"#!{sys.executable}\n{MFSDP.format(trainer=str(tmp_path / 'trainer.py'))}")
    program.chmod(0o755)

    def call(line, **environ):
        environ = CLEAN | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": f"{tmp_path}/bin:{CLEAN['PATH']}"} | environ
        return subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], cwd=tmp_path, env=environ, capture_output=True, timeout=60)

    return call


SFT = "mfsdp sft --model model --train-files train.parquet --output run engine.device=cpu engine.dtype=float32"


# ---------------------------------------------------------------- streams

def test_sft_into_export_with_all_children_chattering(shell, tmp_path):
    done = shell(f'CKPT=$({SFT}) && mfsdp ckpt export-hf "$CKPT" -o out')
    assert (done.returncode, done.stdout) == (0, b"out\n"), done.stderr[-2000:]
    log = (tmp_path / "run/attempts/001/launcher.log").read_bytes()
    assert log.count(b"chatter") == 2 * 8 * 4096 and log.count(b"more\n") == 2 * 8 * 8192
    assert b"step 1/1 loss 0.5" in done.stderr.partition(b"chatter")[0], "the trainer's chatter is in the log, not on the console"


def test_sft_as_json_with_all_children_chattering(shell):
    done = shell(f"{SFT} --json 2>/dev/null")
    data = json.loads(done.stdout)
    assert data["ok"] is True and data["checkpoint"] == "run/checkpoints/step_000001" and done.stdout.count(b"\n") == 1


def test_a_failed_run_gives_no_path_and_stops_the_pipeline(shell, tmp_path):
    (tmp_path / "trainer.py").write_text("import sys; print('no luck'); sys.exit(3)")
    done = shell(f'CKPT=$({SFT}) && mfsdp ckpt export-hf "$CKPT" -o out')
    assert (done.returncode, done.stdout) == (1, b"") and b"no luck" in done.stderr


@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_a_reader_that_has_seen_enough_is_no_failure(shell, reader):
    quick = ["--help", "sft --help", "config show --preset sft-tiny-cpu", "config schema --json", "doctor", "--version"]
    line = "; ".join(f"(mfsdp {args} | {reader} >/dev/null) || echo '{args}: '$?" for args in quick)
    done = shell(line)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("args, code", [(["sft", "--nonsense"], 2), (["sft"], 2), (["ckpt", "inspect", "none"], 5)])
def test_a_closed_stderr_keeps_the_exit_code_and_the_json(args, code):
    writer = closed_pipe()
    json_too = [*args, "--json"] if len(args) > 1 else args
    done = subprocess.run([sys.executable, "-m", "mfsdp_cli", *json_too], stdout=subprocess.PIPE, stderr=writer, env=CLEAN, timeout=60)
    os.close(writer)
    assert done.returncode == code and (len(args) == 1 or json.loads(done.stdout)["exit_code"] == code)


def test_names_that_are_no_text_and_terminals_that_know_few_letters(shell, tmp_path):
    os.mkdir(os.fsencode(tmp_path) + b"/r\xff")
    done = shell("mfsdp ckpt inspect $'r\\xff' --json")
    assert done.returncode == 5 and json.loads(done.stdout)["problems"][0]["key"] == "r\udcff"
    done = shell("mfsdp config show --only-changed model.path=$'m\\xff'")
    assert (done.returncode, done.stdout) == (0, b'model.path: "m\xff"\n')
    done = shell(SFT.replace("--output run", "--output $'r\\xff'"))
    assert (done.returncode, done.stdout) == (2, b"") and b"not valid text" in done.stderr and b"internal" not in done.stderr
    done = shell("mfsdp config show --only-changed model.path=\u00e4", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, b'model.path: "\\xe4"\n')


# ---------------------------------------------------------------- JSON on failure

def commands(group=None, path=()):
    for name, command in (group or get_command(cli.app)).commands.items():
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else [(*path, name)]


def call(capsys, *args):
    code = cli.guarded(lambda: cli.app(list(args), prog_name="mfsdp", standalone_mode=False), list(args))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("path", [(), ("ckpt",), ("config",), ("nonsense",), *commands()], ids=" ".join)
def test_a_usage_error_of_every_command_is_one_json_object(capsys, path):
    code, out, err = call(capsys, *path, "--json", "--nonsense")
    data = json.loads(out)
    assert code == 2 and data["ok"] is False and data["exit_code"] == 2 and data["problems"][0]["why"] and "Error: " in err


@pytest.mark.parametrize("args, code", [
    (["sft", "--model", "none/such/model", "--train-files", "none.parquet"], 5), (["sft", "optim.lr=x"], 3), (["grpo", "a.b=1"], 3),
    (["ckpt", "inspect", "none"], 5), (["ckpt", "export-hf", "none", "-o", "x"], 5), (["samples", "none"], 5),
    (["prep-data", "gsm8k", "-i", "none", "-o", "x"], 5), (["prep-data", "arithmetic", "-o", "file/x", "--rows", "2"], 5),
    (["config", "show", "--preset", "none"], 3), (["config", "diff", "a.yaml", "b.yaml"], 3),
    (["sft", "--preset", "grpo-tiny-cpu", "-n"], 2),
])
def test_every_failure_is_one_json_object(capsys, tmp_path, monkeypatch, args, code):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    ended, out, err = call(capsys, *args, "--json")
    data = json.loads(out)
    assert ended == data["exit_code"] == code and data["ok"] is False and data["problems"], out
    assert all({"key", "why", "fix", "level"} <= p.keys() for p in data["problems"])


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (KeyError("bug"), 1), (OSError(28, "No space left on device"), 4),
                                         (FileExistsError(17, "File exists", "x"), 5)])
def test_ends_that_nobody_planned_are_one_json_object_too(capsys, monkeypatch, tmp_path, error, code):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("mfsdp_cli.data.prepare.prepare", fail)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    ended, out, err = call(capsys, "prep-data", "arithmetic", "-o", str(tmp_path), "--json")
    assert ended == code and json.loads(out)["exit_code"] == code and "Traceback" not in err


# ---------------------------------------------------------------- colours and terminals

def on_terminal(command, **environ):
    """Exit code, and what a terminal gets as stderr and a pipe as stdout."""
    screen, stderr = pty.openpty()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, stdin=subprocess.DEVNULL, env=CLEAN | environ)
    os.close(stderr)
    shown = b""
    while True:
        try:
            if not select.select([screen], [], [], 30)[0]:
                process.kill()
                break
            data = os.read(screen, 1 << 16)
        except OSError:  # Linux ends a terminal that nobody holds any more in this way
            break
        if not data:
            break
        shown += data
    os.close(screen)
    out = process.stdout.read()
    return process.wait(), shown.decode(errors="replace"), out.decode()


RUN = """
import json, os, sys, time
from pathlib import Path
attempt = Path(sys.argv[1])
for step in (1, 2, 3):
    os.write(2, f"\\x1emfsdp step {step}/3 loss 0.5\\n".encode()); time.sleep(0.05)
(attempt / "result.json").write_text(json.dumps({"status": "done", "step": 3, "total_steps": 3, "checkpoint": None, "metrics": {}}))
"""


def launcher(tmp_path):
    (tmp_path / "fake.py").write_text(RUN)
    return [sys.executable, str(ROOT / "tests/unit/launcher_for_tests.py"), str(tmp_path / "run"), str(tmp_path / "fake.py")]


def test_a_bar_only_on_a_terminal_that_can_draw_one(tmp_path):
    code, shown, _ = on_terminal(launcher(tmp_path), TERM="xterm")
    assert code == 0 and ESCAPE.search(shown) and "step 3/3 loss 0.5" in shown and "3/3" in shown
    code, shown, _ = on_terminal(launcher(tmp_path), TERM="dumb")
    assert code == 0 and not ESCAPE.search(shown) and shown.replace("\r", "") == "step 1/3 loss 0.5\nstep 2/3 loss 0.5\nstep 3/3 loss 0.5\n"


def test_no_color_on_a_terminal_means_none(tmp_path):
    _, shown, _ = on_terminal(launcher(tmp_path), TERM="xterm", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-7]|9[0-7]|38|48|4[0-7])\b[0-9;]*m", shown), shown


@pytest.mark.parametrize("environ, colored", [
    ({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
])
def test_colour_of_problems_on_a_terminal(environ, colored):
    code, shown, out = on_terminal([sys.executable, "-m", "mfsdp_cli", "ckpt", "inspect", "none"], **environ)
    assert code == 5 and shown.startswith("\x1b[1;31merror:\x1b[0m" if colored else "error: ") and "\x1b" not in out


@pytest.mark.parametrize("environ, colored", [
    ({"TERM": "xterm"}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
])
def test_no_control_characters_in_pipes(tmp_path, environ, colored):
    done = subprocess.run(launcher(tmp_path), capture_output=True, text=True, env=CLEAN | environ)
    assert done.returncode == 0 and not ESCAPE.search(done.stdout + done.stderr), "a bar is never drawn into a pipe"
    wrong = [sys.executable, "-m", "mfsdp_cli", "ckpt", "inspect", "none"]
    done = subprocess.run(wrong, capture_output=True, text=True, env=CLEAN | environ)
    assert done.stderr.startswith("\x1b[1;31merror:" if colored else "error: ") and not ESCAPE.search(done.stdout)


# ---------------------------------------------------------------- out of memory

def run_here(tmp_path, program):
    """Through the launcher in this process, with a small program in torchrun's place."""
    settings = SftSettings()
    settings.trainer.output_dir = str(tmp_path / "run")
    attempt = open_attempt(tmp_path / "run", settings, {})
    with attempt.lock:
        return run.run([sys.executable, "-c", program, str(attempt.path)], dict(os.environ), attempt, Console())


def test_the_kernels_out_of_memory_killer_is_named(tmp_path, monkeypatch):
    counts = iter([3, 5])
    monkeypatch.setattr(run, "oom_kills", lambda: next(counts))
    outcome = run_here(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert outcome.exit_code == 137 and "the host ran out of memory: its kernel killed 2 of the processes here" in outcome.message
    assert "fewer ranks or samplers a node" in outcome.message
    assert "most likely the host ran out of memory: dmesg tells" in signal_words(9) and "memory" not in signal_words(15, 2)


def test_the_kernels_count_of_kills(tmp_path, monkeypatch):
    assert host.oom_kills() >= 0
    monkeypatch.setattr(host, "MEMORY_EVENTS", str(tmp_path / "events"))
    assert host.oom_kills() == 0
    (tmp_path / "events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 7\noom_group_kill 0\n")
    assert host.oom_kills() == 7


@pytest.mark.parametrize("kind, message, whose, fix", [
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …", "GPU memory", "max_token_len_per_gpu"),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", "host memory", "fewer ranks"),
    ("MemoryError", "", "host memory", "fewer ranks"),
    ("OutOfMemoryError", "Task was killed due to the node running low on memory.", "host memory", "fewer ranks"),
])
def test_out_of_memory_comes_with_the_way_out(tmp_path, capsys, kind, message, whose, fix):
    failure = {"rank": 1, "time": 1.0, "type": kind, "message": message, "traceback": "…", "exit_code": 1, "problems": []}
    write = f"pathlib.Path(sys.argv[1], 'failure-rank1.json').write_text({json.dumps(failure)!r})"
    outcome = run_here(tmp_path, f"import pathlib, sys\n{write}\nsys.exit(1)")
    problem, = outcome.problems
    assert (outcome.exit_code, problem.key, problem.found) == (1, whose, "used up") and fix in problem.fix
    assert tell(outcome, Console()) == 1 and f"{whose} = used up" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_child_killed_by_any_signal_gives_128_and_its_number(tmp_path, number):
    outcome = run_here(tmp_path, f"import os; os.kill(os.getpid(), {int(number)})")
    assert outcome.exit_code == 128 + number and f"signal {int(number)} ({number.name})" in outcome.message


# ---------------------------------------------------------------- completion

def words(*settings, command="sft"):
    return SimpleNamespace(info_name=command, params={"settings": list(settings)})


def test_values_are_completed_once_the_key_is_clear():
    assert complete_key(words(), "engine.dty") == ["engine.dtype=bfloat16", "engine.dtype=float32"]
    assert complete_key(words(), "engine.dtype=b") == ["engine.dtype=bfloat16"]
    assert complete_key(words(), "engine.use_mb") == ["engine.use_mbridge=True", "engine.use_mbridge=False"]
    assert complete_key(words(), "optim.lr=") == ["optim.lr=1e-05"] and complete_key(words(), "model.path") == ["model.path="]
    assert complete_key(words(), "checkpoint.save_con") == ["checkpoint.save_contents="], "a list is left to the user"
    assert complete_key(words(), "rollout.name=") == [] and complete_key(words(command="grpo"), "rollout.name=h") == ["rollout.name=hf"]
    assert complete_key(words(), "nothing") == [] == complete_key(words(), "nothing=1")
    assert set(complete_key(words(), "optim.lr")) > {"optim.lr=", "optim.lr_warmup_steps="}


def test_bash_cuts_words_at_the_equals_sign():
    """COMP_WORDBREAKS holds =, so KEY=VALUE arrives as three words, and only what stands behind the sign is replaced."""
    assert complete_key(words("optim.lr=1", "engine.dtype"), "") == ["bfloat16", "float32"]
    assert complete_key(words("engine.dtype", "="), "f") == ["float32"]


@pytest.mark.parametrize("line, word, offered", [
    ("mfsdp sft --preset ", 3, ["sft-gsm8k-qwen2.5-math-7b", "sft-tiny-cpu"]), ("mfsdp sft engine.dtype = fl", 4, ["float32"]),
    ("mfsdp grpo reward.name", 2, ["reward.name=auto"]),
])
def test_completion_as_bash_asks_for_it(line, word, offered):
    environ = CLEAN | {"COMP_WORDS": line, "COMP_CWORD": str(word), "_MFSDP_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", "import sys; sys.argv[0] = 'mfsdp'; from mfsdp_cli.cli import main; main()"], env=environ,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.split()[: len(offered)] == offered
