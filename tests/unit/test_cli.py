"""The command line as its users meet it: a process with arguments, two streams and an exit code."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from cli_for_tests import CLEAN, commands, inputs, mfsdp, save  # noqa: F401  fixtures

from mfsdp_cli import __version__, errors
from mfsdp_cli.config.sources import preset_files
from mfsdp_cli.options import complete_key, complete_preset, complete_rule


# ---------------------------------------------------------------- help and usage

def test_help_and_bare_call_name_every_command_and_exit_code(mfsdp):
    bare, long, short = mfsdp(), mfsdp("--help"), mfsdp("-h")
    assert bare.returncode == long.returncode == short.returncode == 0 and bare.stdout == long.stdout == short.stdout
    for word in ("prep-data", "sft", "ckpt", "config", "Examples:", "128+n"):
        assert word in bare.stdout
    for code, meaning in errors.EXIT_CODES.items():
        assert f"{code:>5}  {meaning}\n" in bare.stdout
    assert bare.stdout.index("Examples:") < bare.stdout.index("Commands:")


def test_every_command_has_help_with_an_example_and_documented_options():
    found = dict(commands())
    assert set(found) == {("prep-data",), ("doctor",), ("sft",), ("grpo",), ("samples",), ("ckpt", "list"), ("ckpt", "inspect"),
                          ("ckpt", "diff"), ("ckpt", "export-hf"),
                          ("config", "show"), ("config", "diff"), ("config", "schema"), ("config", "presets"), ("config", "from-verl"),
                          ("rules",)}
    for name, command in found.items():
        assert command.help and not command.help.splitlines()[0].endswith("."), name
        assert "Example" in command.help or not command.no_args_is_help, name
        assert all(getattr(p, "help", None) for p in command.params), name
        assert "--json" in [option for p in command.params for option in p.opts], name


def test_version(mfsdp):
    assert mfsdp("--version").stdout == f"mfsdp {__version__}\n"


@pytest.mark.parametrize("args, text", [
    (["stf"], "Did you mean 'sft'?"), (["config", "form-verl"], "Did you mean 'from-verl'?"), (["sft", "--modle", "x"], "--model"),
    (["prep-data", "gsm9k", "-o", "x"], "'gsm8k'"),
    (["ckpt", "export-hf", "x", "-o", "y", "--dtype", "int8"], "bfloat16"), (["sft", "--tp", "two"], "not a valid int"),
])
def test_usage_errors_go_to_stderr_with_a_suggestion(mfsdp, args, text):
    done = mfsdp(*args)
    assert (done.returncode, done.stdout) == (2, "") and text in done.stderr
    data = json.loads(mfsdp(*args, "--json").stdout)
    assert data["ok"] is False and data["exit_code"] == 2 and text in data["problems"][0]["why"]


@pytest.mark.parametrize("group", [["sft"], ["grpo"], ["samples"], ["ckpt"], ["config"], ["ckpt", "inspect"], ["prep-data"]])
def test_a_bare_command_shows_its_help(mfsdp, group):
    done = mfsdp(*group)
    assert done.returncode == 2 and done.stdout == "" and f"Usage: mfsdp {' '.join(group)}" in done.stderr


def test_an_own_bug_leaves_a_file_to_attach(tmp_path):
    program = "import sys\nfrom mfsdp_cli.cli import guarded\nsys.exit(guarded(lambda: {}['secret'], sys.argv[1:]))"
    environ = {**CLEAN, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program, "--json"], capture_output=True, text=True, env=environ)
    file, = tmp_path.glob("mfsdp-crash-*.txt")
    assert done.returncode == 1 and "Traceback" not in done.stderr and str(file) in done.stderr and "KeyError" in done.stderr
    assert "Traceback" in file.read_text() and json.loads(done.stdout)["problems"][0]["found"] == "KeyError"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**environ, "MFSDP_DEBUG": "1"})
    assert "Traceback" in done.stderr and done.stdout == ""


def test_what_the_machine_refuses_is_no_bug(tmp_path):
    program = """
import sys
from mfsdp_cli.cli import guarded
def refused(): raise PermissionError(13, 'Permission denied', '/x')
sys.exit(guarded(refused, []))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 4 and "/x\n      Permission denied" in done.stderr


def test_head_is_no_failure(inputs):
    pipeline = f"set -o pipefail; {sys.executable} -m mfsdp_cli config schema | head -1"
    done = subprocess.run(["bash", "-c", pipeline], capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 0 and done.stdout.startswith("model.path") and done.stderr == ""


# ---------------------------------------------------------------- other commands

@pytest.mark.parametrize("command, key, preset", [
    ("grpo", ["rollout.n="], ["grpo-gsm8k-math-qwen2.5-math-7b", "grpo-tiny-cpu"]), ("sft", [], ["sft-gsm8k-qwen2.5-math-7b", "sft-tiny-cpu"]),
    ("show", ["rollout.n="], list(preset_files())),
])
def test_completion_offers_what_the_command_takes(command, key, preset):
    context = SimpleNamespace(info_name=command)
    assert [k for k in complete_key(context, "rollout.n") if k == "rollout.n="] == key and "optim.lr=" in complete_key(context, "optim.")
    assert complete_preset(context, "") == preset


def test_prep_data_prints_paths(mfsdp, tmp_path):
    done = mfsdp("prep-data", "arithmetic", "-o", "d", "--rows", 12, "--test-rows", 3, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "d/train.parquet\nd/test.parquet\n"
    data = json.loads(mfsdp("prep-data", "arithmetic", "-o", "d", "--rows", 12, "--test-rows", 3, "--json", cwd=tmp_path).stdout)
    assert data["ok"] is True and data["rows"] == {"d/train.parquet": 12, "d/test.parquet": 3}


def test_prep_data_names_the_bad_row(mfsdp, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "1+2?", "answer": "3"}\n')
    done = mfsdp("prep-data", "gsm8k", "-i", "x.jsonl", "-o", "d", cwd=tmp_path)
    assert done.returncode == 5 and done.stdout == "" and "####" in done.stderr and not (tmp_path / "d").exists()
    done = mfsdp("prep-data", "gsm8k", "-i", "x.jsonl", "-o", "d", "--skip-bad", "--json", cwd=tmp_path)
    assert done.returncode == 0 and sum(json.loads(done.stdout)["dropped"].values()) == 1


def test_config_show_comes_back_as_config(mfsdp, inputs):
    done = mfsdp("config", "show", "--preset", "sft-tiny-cpu", "optim.lr=2e-3", "model.path=a: b", "--origin")
    assert done.returncode == 0
    assert "optim.lr: 0.002" in done.stdout and "# command line" in done.stdout and "# preset sft-tiny-cpu" in done.stdout
    (inputs / "c.yaml").write_text(done.stdout)
    again = mfsdp("config", "show", "--config", "c.yaml", cwd=inputs).stdout
    assert [line.partition("  #")[0].rstrip() for line in done.stdout.splitlines()] == again.splitlines()
    changed = json.loads(mfsdp("config", "show", "--only-changed", "optim.lr=2e-3", "--json").stdout)
    assert [(row["key"], row["value"], row["origin"]) for row in changed["settings"]] == [("optim.lr", 0.002, "command line")]


def test_config_show_tells_problems(mfsdp):
    done = mfsdp("config", "show", "optim.lrr=1", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 3 and data["ok"] is False and data["problems"][0]["fix"].startswith("did you mean optim.lr")


def test_config_diff_and_presets(mfsdp, tmp_path):
    (tmp_path / "a.yaml").write_text("optim: {lr: 1.0e-3}\n")
    (tmp_path / "b.yaml").write_text("optim: {lr: 2.0e-3}\n")
    assert mfsdp("config", "diff", "a.yaml", "b.yaml", cwd=tmp_path).stdout == "optim.lr: 0.001 -> 0.002  # a.yaml:1 -> b.yaml:1\n"
    assert mfsdp("config", "diff", "a.yaml", "c.yaml", cwd=tmp_path).returncode == 3
    names = [row["name"] for row in json.loads(mfsdp("config", "presets", "--json").stdout)["presets"]]
    assert "sft-tiny-cpu" in names and "sft-gsm8k-qwen2.5-math-7b" in names


def test_config_schema_documents_every_key(mfsdp):
    for kind, args in (("sft", ()), ("sft", ("--kind", "sft")), ("grpo", ("--kind", "grpo"))):
        data = json.loads(mfsdp("config", "schema", *args, "--json").stdout)
        assert data["kind"] == kind and len(data["keys"]) > 60 and all(row["doc"] and row["type"] for row in data["keys"])
        assert ("rollout.n" in [row["key"] for row in data["keys"]]) == (kind == "grpo")


def test_config_knows_both_kinds(mfsdp, inputs):
    for args in (("--preset", "grpo-tiny-cpu"), ("actor_rollout_ref.rollout.n=4",), ("--kind", "grpo", "optim.lr=1")):
        assert json.loads(mfsdp("config", "show", *args, "--json").stdout)["kind"] == "grpo"
    done = mfsdp("config", "show", "--preset", "grpo-tiny-cpu")
    (inputs / "c.yaml").write_text(done.stdout)
    assert mfsdp("config", "show", "--config", "c.yaml", cwd=inputs).stdout == done.stdout and "rollout.n: 8" in done.stdout
    (inputs / "d.yaml").write_text(done.stdout.replace("rollout.n: 8", "rollout.n: 4"))
    assert mfsdp("config", "diff", "c.yaml", "d.yaml", cwd=inputs).stdout.startswith("rollout.n: 8 -> 4  # c.yaml:")
    done = mfsdp("config", "diff", "grpo-tiny-cpu", "sft-tiny-cpu")
    assert done.returncode == 2 and "two kinds of run" in done.stderr
    kinds = {row["name"]: row["kind"] for row in json.loads(mfsdp("config", "presets", "--json").stdout)["presets"]}
    assert kinds["grpo-tiny-cpu"] == "grpo" and kinds["sft-tiny-cpu"] == "sft"


def test_rules(mfsdp):
    lines = mfsdp("rules").stdout.splitlines()
    rows = json.loads(mfsdp("rules", "--json").stdout)["rules"]
    assert len(lines) == 2 * len(rows) > 200 and all(row["id"] in line for row, line in zip(rows, lines[::2], strict=True))
    assert {row["id"] for row in json.loads(mfsdp("rules", "--kind", "sft", "--json").stdout)["rules"]} < {row["id"] for row in rows}
    one = mfsdp("rules", "max-connections-1").stdout
    assert "unset it, or set it to 8" in one and "verl PR 6976" in one and "one hardware queue" in one
    done = mfsdp("rules", "max-connection-1")
    assert done.returncode == 2 and "did you mean max-connections-1?" in done.stderr
    assert complete_rule("tp-") == ["tp-divides-model", "tp-within-node"]


def test_export_checks_the_cheap_things_first(mfsdp, inputs):
    done = mfsdp("ckpt", "export-hf", "run", "-o", "out", cwd=inputs)
    assert (done.returncode, done.stdout) == (5, "") and "missing" in done.stderr
    save(inputs / "run", 3)  # a manifest, but no dist_ckpt
    data = json.loads(mfsdp("ckpt", "export-hf", "run", "-o", "out", "--json", cwd=inputs).stdout)
    assert data["ok"] is False and data["exit_code"] == 5 and not (inputs / "out").exists()


def test_help_is_quick():
    """CPU time, and of the fastest of five, since the machine is shared; scripts/bench_start.py prints the figure, whose budget is 150 ms."""
    def cpu_s():
        before = os.times()
        subprocess.run([sys.executable, "-m", "mfsdp_cli", "sft", "--help"], env=CLEAN, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_s() for _ in range(5)) < 0.3


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("args, code", [("--version", 0), ("stf", 2), ("sft --model x", 3)])
def test_closed_streams_are_no_failure(closed, args, code):
    """The shell closes them with >&-; what would have been written there is lost, and nothing else."""
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m mfsdp_cli {args} {closed}"], capture_output=True, text=True, env=CLEAN)
    assert done.returncode == code and "internal error" not in done.stderr and "Traceback" not in done.stderr


def test_the_short_end_runs_what_was_asked_for_at_exit(tmp_path):
    """Python's own dismantling is left out, not what programs register, nor what is in the buffers."""
    program = ("import atexit, sys\nsys.argv = ['mfsdp', '--version']\nprint('buffered', end=' ')\n"
               "atexit.register(lambda: print('registered'))\nfrom mfsdp_cli.__main__ import main\nmain()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 0 and done.stdout.split() == ["buffered", "mfsdp", "0.1.0", "registered"]
