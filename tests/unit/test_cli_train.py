"""`mfsdp sft` and `mfsdp grpo` up to the start: plans, problems, flags."""

import json

import pytest
from cli_for_tests import SFT, checked, folder_errors, inputs, mfsdp, save, start_once  # noqa: F401  fixtures
from inputs_for_tests import snapshot, write_chats, write_prompts

from mfsdp_cli.launch.outcome import Outcome
from mfsdp_cli.launch.start import check, tell
from mfsdp_cli.output import Console


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
