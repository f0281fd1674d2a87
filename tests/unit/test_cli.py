"""The command line as its users meet it: a process with arguments, two streams and an exit code."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from inputs_for_tests import snapshot, write_chats, write_model, write_prompts
from typer.main import get_command

from mfsdp_cli import __version__, cli, errors
from mfsdp_cli.checkpoint.manifest import Manifest
from mfsdp_cli.checkpoint.saving import begin, commit
from mfsdp_cli.config.sources import preset_files
from mfsdp_cli.launch.folder import open_attempt
from mfsdp_cli.launch.outcome import Outcome
from mfsdp_cli.launch.start import check, tell
from mfsdp_cli.options import complete_key, complete_preset, complete_rule
from mfsdp_cli.output import Console

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("NPROC", "TP", "PP", "EP", "GEN_TP", "CUDA_DEVICE_MAX_CONNECTIONS", "NO_COLOR", "FORCE_COLOR")
CLEAN = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {"PYTHONPATH": str(ROOT)}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def mfsdp(capsys, monkeypatch):
    """Call the command line in this process, as main() does: mfsdp("sft", "-n", cwd=folder, NPROC="2")."""
    def call(*args, cwd=None, **environ):
        args = [str(arg) for arg in args]
        with monkeypatch.context() as patch:
            for name in VARIABLES:
                patch.delenv(name, raising=False)
            for name, value in {"COLUMNS": "120", **environ}.items():
                patch.setenv(name, value)
            if cwd is not None:
                patch.chdir(cwd)
            code = cli.guarded(lambda: cli.app(args, prog_name="mfsdp", standalone_mode=False), args)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def inputs(tmp_path):
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.parquet", 20)
    return tmp_path


SFT = ("sft", "--model", "model", "--train-files", "train.parquet", "engine.device=cpu", "engine.dtype=float32", "data.train_batch_size=6")


def commands(group=None, path=()):
    group = group or get_command(cli.app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


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


# ---------------------------------------------------------------- sft

def test_dry_run_writes_nothing_and_shows_the_plan(mfsdp, inputs):
    before = snapshot(inputs)
    done = mfsdp(*SFT, "--nproc", 2, "--output", "out dir", "-n", cwd=inputs)
    assert done.returncode == 0 and snapshot(inputs) == before
    for text in (
        "verdict     would start", "2 ranks (1 node x 2, cpu) = TP 1 x PP 1 x CP 1 x DP 2", "6 conversations a step = 3 x DP 2",
        "20 rows // 6 = 3 an epoch, x 4 epochs = 12; 2 rows an epoch fill no batch",
        "0 to 1e-05 in 2 steps, then cosine to 1e-06 at step 12",
        "  model/model.safetensors\n", "  train.parquet (20 rows)\n", "  out dir/attempts/001/\n", "  CUDA_DEVICE_MAX_CONNECTIONS=8\n",
        "--nproc-per-node 2 --standalone", "--run-dir 'out dir' --attempt-dir 'out dir/attempts/001'",
    ):
        assert text in done.stdout, text


def test_dry_run_as_data(mfsdp, inputs):
    done = mfsdp(*SFT, "--nnodes", 2, "--rdzv-endpoint", "n0:29500", "-n", "--json", cwd=inputs)
    data = json.loads(done.stdout)
    assert done.returncode == 0 and data["schema"] == 1 and data["ok"] is True and data["exit_code"] == 0 and data["resume_from"] is None
    assert data["plan"]["world_size"] == 2 and data["plan"]["total_steps"] == 12 and data["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert [node["argv"][node["argv"].index("--node-rank") + 1] for node in data["nodes"]] == ["0", "1"]


def test_all_problems_at_once_with_origin_and_way_out(mfsdp, inputs):
    (inputs / "run.yaml").write_text("optim:\n  lr: fast\ndata:\n  train_batch_szie: 4\n")
    args = (*SFT, "--config", "run.yaml", "--val-files", "none.parquet", "checkpoint.async_save=True")
    for more in ((), ("-n",)):
        done = mfsdp(*args, *more, cwd=inputs)
        assert done.returncode == 3
        for text in ("run.yaml:2  optim.lr = fast", "run.yaml:4  data.train_batch_szie = 4", "did you mean data.train_batch_size?",
                     "--val-files  data.val_files = none.parquet", "command line  checkpoint.async_save = True", "fix: "):
            assert text in done.stderr, text
    assert "error: 4 problems\n" in done.stderr and "would not start: 4 problems, exit code 3" in done.stdout
    data = json.loads(mfsdp(*args, "--json", cwd=inputs).stdout)
    assert data["ok"] is False and data["exit_code"] == 3 and len([p for p in data["problems"] if p["level"] == "error"]) == 4
    assert not (inputs / "runs").exists()


def test_exit_codes_by_kind_of_problem(mfsdp, inputs):
    assert mfsdp("sft", "--model", "model", "--train-files", "none.parquet", "engine.device=cpu", cwd=inputs).returncode == 5
    assert mfsdp(*SFT, "engine.device=cuda", "-n", cwd=inputs, PATH="").returncode == 4
    assert mfsdp(*SFT, "-n", cwd=inputs, CUDA_DEVICE_MAX_CONNECTIONS="1").returncode in (3, 4)
    assert mfsdp(*SFT, "optim.lr", "-n", cwd=inputs).returncode == 2


# ---------------------------------------------------------------- grpo

@pytest.fixture
def prompts(inputs):
    write_prompts(inputs / "prompts.parquet", 140)
    return inputs


GRPO = ("grpo", "--preset", "grpo-tiny-cpu", "--model", "model", "--train-files", "prompts.parquet")


def test_grpo_dry_run_writes_nothing_and_shows_the_plan(mfsdp, prompts):
    before = snapshot(prompts)
    done = mfsdp(*GRPO, "--output", "out dir", "-n", cwd=prompts)
    assert done.returncode == 0 and snapshot(prompts) == before, done.stderr
    for text in (
        "verdict     would start", "2 ranks (1 node x 2, cpu) = TP 1 x PP 1 x CP 1 x DP 2", "samplers    1 hf engine on CPU",
        "128 prompts x 8 responses = 1024 samples a step, of at most 64 + 24 tokens; longer prompts are left out",
        "128 prompts x 8 = 1024 samples an update = 512 x DP 2; micro batches of up to 4096 tokens a rank", "128 // 128 mini batches = 1 a step",
        "reference   none (no KL)", "0 to 0.0005 in 6 steps, then constant",
        "60 (trainer.total_training_steps); an epoch has 140 prompts // 128 = 1; 12 prompts an epoch fill no batch",
        "  prompts.parquet (140 rows)\n", "  out dir/samples/\n", "  VLLM_ALLREDUCE_USE_SYMM_MEM=0\n", "  CUDA_DEVICE_MAX_CONNECTIONS=8\n",
        "command on node 0 (mfsdp grpo runs it", "-m mfsdp_cli.train.grpo --config 'out dir/attempts/001/config.yaml'",
    ):
        assert text in done.stdout, text
    data = json.loads(mfsdp(*GRPO, "-n", "--json", cwd=prompts).stdout)
    assert data["plan"]["samples_per_step"] == 1024 and len(data["nodes"]) == 1 and data["nodes"][0]["argv"][2] == "mfsdp_cli.train.grpo"


def test_grpo_flags(mfsdp, prompts):
    flags = ("--rollout", "vllm", "--gen-tp", 2, "--nnodes", 2, "--ray-address", "nowhere", "--val-only")
    done = mfsdp(*GRPO, *flags, "-n", "--json", cwd=prompts, PATH="", GEN_TP="7")
    found = {p["key"]: (p["found"], p["where"]) for p in json.loads(done.stdout)["problems"]}
    assert found["trainer.ray_address"] == ("nowhere", "--ray-address") and found["trainer.val_only"] == ("True", "--val-only")
    assert found["rollout.tensor_model_parallel_size"] == ("2", "--gen-tp")
    assert done.returncode == 3 and mfsdp(*GRPO, "--rollout", "sglang", cwd=prompts).returncode == 2
    done = mfsdp("sft", "--preset", "grpo-tiny-cpu", "-n", cwd=prompts)
    assert done.returncode != 0 and "this preset is for mfsdp grpo" in done.stderr


def test_grpo_needs_ray_and_prompts(mfsdp, inputs):
    done = mfsdp("grpo", "--preset", "grpo-tiny-cpu", "--model", "model", "--train-files", "train.parquet", "-n",
                 "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", cwd=inputs)
    assert done.returncode == 5 and "there is no column prompt" in done.stderr and "--for rl" in done.stderr


def test_a_reward_function_is_tried_before_the_launch(mfsdp, prompts):
    head = "(data_source, solution_str, ground_truth, extra_info=None):"
    (prompts / "score.py").write_text(f"def good{head}\n    return solution_str.endswith(ground_truth)\n\n\n"
                                      f"def bad{head}\n    return extra_info['nothing']\n")
    assert mfsdp(*GRPO, "--reward-fn", "score.py:good", "-n", cwd=prompts).returncode == 0
    done = mfsdp(*GRPO, "--reward-fn", "score.py:bad", "-n", cwd=prompts)
    assert done.returncode == 3 and "score.py" in done.stderr and "KeyError" in done.stderr
    done = mfsdp(*GRPO, "custom_reward_function.path=score.py", "-n", cwd=prompts)
    assert done.returncode == 5 and "has no function compute_score" in done.stderr
    assert not (prompts / "runs").exists()


def test_a_run_folder_belongs_to_one_kind(prompts):
    start_once(checked(prompts))
    save(prompts / "run", 3)
    flags = {"model": str(prompts / "model"), "train-files": [str(prompts / "prompts.parquet")], "output": str(prompts / "run")}
    result = check("grpo", preset="grpo-tiny-cpu", config=None, assignments=[], flags=flags, resume=None, environ={"PATH": ""})
    problem, = folder_errors(result).values()
    assert problem.key == "trainer.output_dir" and problem.why == "it holds checkpoints up to step 3 of mfsdp sft, and this is mfsdp grpo"
    flags["output"] = str(prompts / "other")
    attempt = start_once(check("grpo", preset="grpo-tiny-cpu", config=None, assignments=[], flags=flags, resume=None, environ={"PATH": ""}))
    assert attempt.program == "the driver"
    save(prompts / "other", 3)
    again = [check("grpo", preset="grpo-tiny-cpu", config=None, assignments=[text], flags=flags, resume=None, environ={"PATH": ""})
             for text in ("rollout.n=4", "data.max_prompt_length=32")]
    assert not folder_errors(again[0]) and list(folder_errors(again[1])) == ["data.max_prompt_length"]


VALIDATION = ("grpo", "--preset", "grpo-tiny-cpu", "--model", "model", "--val-files", "prompts.parquet", "--val-only")


def test_a_validation_only_run_needs_no_training_data(mfsdp, prompts):
    done = mfsdp(*VALIDATION, "-n", cwd=prompts)
    assert done.returncode == 0 and "140 prompts x 1, and nothing else (trainer.val_only)" in done.stdout, done.stderr
    assert "updates" not in done.stdout and "prompts.parquet (140 rows)" in done.stdout
    plan = json.loads(mfsdp(*VALIDATION, "--train-files", "none.parquet", "-n", "--json", cwd=prompts).stdout)["plan"]
    assert plan["total_steps"] == 0 and plan["num_val_rows"] == 140
    without = mfsdp("grpo", "--preset", "grpo-tiny-cpu", "--model", "model", "--val-only", "-n", cwd=prompts)
    assert without.returncode == 3 and "nothing to validate on" in without.stderr and "data.train_files" not in without.stderr


def test_the_product_of_validation_is_what_was_measured(capsys, tmp_path):
    metrics = {"val_pass_rate": 0.25, "val_response_length": 12.0, "loss": 1.0}
    assert tell(Outcome(0, "done", tmp_path, tmp_path, checkpoint=tmp_path / "step_000003", metrics=metrics), Console(), val_only=True) == 0
    assert capsys.readouterr().out == "val_pass_rate 0.25\nval_response_length 12\n"
    tell(Outcome(0, "done", tmp_path, tmp_path, metrics=metrics), Console(json=True), val_only=True)
    assert json.loads(capsys.readouterr().out)["metrics"] == metrics


def test_validation_leaves_the_settings_of_training_alone(prompts):
    def judged(*assignments, **flags):
        flags = {"model": str(prompts / "model"), "output": str(prompts / "run")} | flags
        return check("grpo", preset="grpo-tiny-cpu", config=None, assignments=list(assignments), flags=flags, resume=None, environ={"PATH": ""})

    trained, validated = {"train-files": [str(prompts / "prompts.parquet")]}, {"val-files": [str(prompts / "prompts.parquet")], "val-only": True}
    start_once(judged(**trained))
    save(prompts / "run", 3)
    result = judged("data.max_prompt_length=32", **validated)
    assert not folder_errors(result)
    attempt = start_once(result)
    assert "val_only: true" in (attempt.path / "config.yaml").read_text()
    assert "val_only: false" in (prompts / "run/config.yaml").read_text()
    assert not folder_errors(judged(**trained)) and "model.path" in folder_errors(judged(**validated | {"model": "other"}))


def test_variables_and_flags_in_their_order(mfsdp, inputs):
    def nproc(*args, **environ):
        return json.loads(mfsdp(*SFT, *args, "-n", "--json", cwd=inputs, **environ).stdout)["plan"]["world_size"]

    assert nproc(NPROC="2") == 2
    assert nproc("trainer.n_gpus_per_node=3", NPROC="2") == 3
    assert nproc("trainer.n_gpus_per_node=3", "--nproc", 6, NPROC="2") == 6


def test_train_files_repeated_or_with_commas(mfsdp, inputs):
    write_chats(inputs / "b.parquet", 5)
    write_chats(inputs / "c.parquet", 5)
    files = ("--train-files", "train.parquet,b.parquet", "--train-files", "c.parquet")
    done = mfsdp("sft", "--model", "model", *files, "engine.device=cpu", "-n", "--json", cwd=inputs)
    assert json.loads(done.stdout)["plan"]["num_train_rows"] == 30


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


# ---------------------------------------------------------------- the run folder

def checked(folder, *assignments, resume=None):
    flags = {"model": str(folder / "model"), "train-files": [str(folder / "train.parquet")], "output": str(folder / "run")}
    assignments = ["engine.device=cpu", *assignments]
    return check("sft", preset=None, config=None, assignments=assignments, flags=flags, resume=resume, environ={"PATH": ""})


def save(run_dir, step):
    folder = begin(run_dir / "checkpoints", step)
    (folder / "trainer.json").write_text("{}")
    return commit(folder, Manifest(step, 9, 8 * step, ["model", "optimizer", "extra"], {"world": 1}, "float32", 8, "Qwen2ForCausalLM", "model", 1))


def folder_errors(result):
    return {p.key: p for p in result.problems if p.level == "error"}


def start_once(result):
    """As `launch.start.start` does before it starts anything."""
    attempt = open_attempt(result.run_dir, result.settings, result.origins)
    attempt.lock.close()
    return attempt


def test_the_run_folder_holds_what_was_asked_for(inputs):
    result = checked(inputs, "optim.lr=3e-4")
    attempt = start_once(result)
    again = check("sft", preset=None, config=str(inputs / "run/config.yaml"), assignments=[], flags={}, resume=None, environ={"PATH": ""})
    assert again.settings == result.settings and attempt.path == inputs / "run/attempts/001"
    assert (attempt.path / "config.yaml").read_text() == (inputs / "run/config.yaml").read_text()
    origins = json.loads((inputs / "run/origin.json").read_text())
    assert origins["optim.lr"] == "command line" and origins["model.path"] == "--model"
    assert start_once(result).path.name == "002"


def test_what_an_unreadable_file_may_have_given_is_not_missing(tmp_path):
    (tmp_path / "run.yaml").write_text("model: [1,\n")
    common = {"assignments": [], "flags": {"output": str(tmp_path / "run")}, "resume": None, "environ": {"PATH": ""}}
    for preset, config in ((None, str(tmp_path / "run.yaml")), (None, "none.yaml"), ("sft-gsm8k", None)):
        found = [p for p in check("sft", preset=preset, config=config, **common).problems if p.level == "error"]
        assert len(found) == 1 and found[0].key in ("--preset", "--config", config)
    missing = {p.rule for p in check("sft", preset=None, config=None, **common).problems if p.level == "error"}
    assert missing == {"model-given", "train-files-given"}


def test_a_used_folder_is_continued_or_refused_but_never_mixed(inputs):
    start_once(checked(inputs))
    assert not folder_errors(checked(inputs, resume="never"))
    save(inputs / "run", 3)
    assert not folder_errors(checked(inputs)) and not folder_errors(checked(inputs, "optim.lr=1", "trainer.total_epochs=9"))
    refused = folder_errors(checked(inputs, resume="never"))["trainer.resume_mode"]
    assert refused.where == "--resume" and "holds checkpoints up to step 3" in refused.why
    with pytest.raises(errors.MfsdpError):
        start_once(checked(inputs, resume="never"))
    changed = folder_errors(checked(inputs, "trainer.seed=7", "data.train_batch_size=16", "data.max_length=512"))
    assert set(changed) == {"trainer.seed", "data.train_batch_size", "data.max_length"}
    assert changed["trainer.seed"].found == "7" and "made with 42" in changed["trainer.seed"].why
    assert changed["data.max_length"].fix.startswith("set data.max_length back to null")


def test_damaged_checkpoints_are_not_overwritten_from_step_0(inputs):
    start_once(checked(inputs))
    (save(inputs / "run", 3) / "trainer.json").unlink()
    problem, = folder_errors(checked(inputs)).values()
    assert problem.code == errors.BAD_INPUT and problem.found == "step_000003" and "ckpt inspect" in problem.fix


def test_resume_from_a_path_is_checked_before_the_start(inputs):
    saved = save(inputs / "other", 3)
    assert not folder_errors(checked(inputs, resume=str(saved)))
    (saved / "trainer.json").unlink()
    problem, = folder_errors(checked(inputs, resume=str(saved))).values()
    assert problem.code == errors.BAD_INPUT and problem.where == "--resume" and "trainer.json" in problem.key
    problem, = folder_errors(checked(inputs, resume="yes")).values()
    assert problem.found == "yes" and problem.fix == "auto, never, or the folder of a run or checkpoint"


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
    """CPU time, and of the fastest of three, since the machine is shared; the budget is 150 ms on an idle one."""
    def cpu_s():
        before = os.times()
        subprocess.run([sys.executable, "-m", "mfsdp_cli", "sft", "--help"], env=CLEAN, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_s() for _ in range(3)) < 0.4
