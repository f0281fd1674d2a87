"""verl's launch scripts as settings: what is taken over, what is named, and that the YAML comes back."""

import json
import random
from pathlib import Path

import pytest

from mfsdp_cli.cli import main
from mfsdp_cli.config import aliases
from mfsdp_cli.config.conversion import report, write
from mfsdp_cli.config.from_verl import convert
from mfsdp_cli.config.load import load
from mfsdp_cli.config.values import coerce, leaves
from mfsdp_cli.config.verl_defaults import DEFAULTS
from mfsdp_cli.errors import BAD_INPUT, OK, USAGE, MfsdpError, exit_code_of

HOME = {"HOME": "/home/me"}

# In the manner of verl's examples: the settings of its SFT script for Megatron-FSDP ...
SFT = r"""#!/usr/bin/env bash
set -x
export CUDA_DEVICE_MAX_CONNECTIONS=1   # as verl's example does
export HYDRA_FULL_ERROR=1
unset ROCR_VISIBLE_DEVICES

MODEL=${MODEL:-Qwen/Qwen2.5-Math-7B}
NPROC=8
TP=$((NPROC / 2))

torchrun --standalone --nnodes=1 --nproc_per_node=$NPROC \
    -m verl.trainer.sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.messages_key=messages \
    data.train_batch_size=8 data.use_dynamic_bsz=True data.max_token_len_per_gpu=1024 \
    data.pad_mode=no_padding data.truncation=error \
    model=hf_model engine=megatron optim=megatron \
    model.path=$MODEL model.use_remove_padding=true \
    optim.lr=1e-5 optim.lr_warmup_steps_ratio=0.2 optim.weight_decay=0.1 \
    optim.betas="[0.9,0.95]" \
    optim.clip_grad=1.0 optim.lr_warmup_init=0 optim.lr_decay_style=cosine optim.min_lr=1e-6 \
    engine.tensor_model_parallel_size=$TP \
    engine.use_mbridge=True engine.vanilla_mbridge=False engine.use_megatron_fsdp=True \
    trainer.default_local_dir=checkpoints/sft \
    trainer.project_name=gsm8k-sft trainer.experiment_name="SFT-tp${TP}" \
    trainer.logger='["console","file"]' \
    trainer.total_epochs=4 "$@" 2>&1 | tee log.txt
"""

# ... and of its GRPO script, with arrays.
GRPO = r"""set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export VLLM_USE_V1=1

INFER=${INFER:-vllm}
train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
n_resp=${N_RESP:-8}
tp=4

DATA=(
    algorithm.adv_estimator=grpo          # a comment
    data.train_files="$train_files"
    data.val_files="['$HOME/data/gsm8k/test.parquet']"
    data.return_raw_chat=True
    data.train_batch_size=32 data.max_prompt_length=512
    data.max_response_length=$((512 * 2))
    data.filter_overlong_prompts=True
)
ACTOR=(
    actor_rollout_ref.model.path=Qwen/Qwen2.5-Math-7B
    actor_rollout_ref.model.use_fused_kernels=False
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp}
    actor_rollout_ref.actor.megatron.use_mbridge=True
    actor_rollout_ref.actor.megatron.vanilla_mbridge=False
    actor_rollout_ref.actor.megatron.use_megatron_fsdp=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion=False
    actor_rollout_ref.actor.use_kl_loss=True
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=${INFER}
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.n=${n_resp}
    actor_rollout_ref.rollout.tensor_model_parallel_size=${tp}
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=${REF_TP:-$tp}
)
EXTRA=()
if [ "${INFER}" = trtllm ]; then
    EXTRA+=(+actor_rollout_ref.rollout.quantization=fp8)
fi

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" \
    trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \
    trainer.project_name='verl_grpo' trainer.experiment_name='qwen' \
    trainer.default_local_dir='ckpt/${trainer.project_name}/${trainer.experiment_name}' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 \
    "${EXTRA[@]}" "$@"
"""


def converted(tmp_path, text, *arguments, variables=()):
    path = tmp_path / "run.sh"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return convert(str(path), list(arguments) or None, variables, HOME)


def line_of(text, part):
    return next(number for number, line in enumerate(text.splitlines(), start=1) if part in line)


def errors(result):
    return [p for p in result.problems if p.level == "error"]


def loads(tmp_path, result):
    (tmp_path / "out.yaml").write_text(result.text, encoding="utf-8")
    return load(result.kind, config=str(tmp_path / "out.yaml"), environ={})


@pytest.mark.parametrize("text", [SFT, GRPO])
def test_a_clean_script_comes_back_from_its_yaml(tmp_path, text, monkeypatch):
    monkeypatch.setenv("HOME", HOME["HOME"])
    result = converted(tmp_path, text)
    assert errors(result) == [] and result.exit_code == OK
    again = loads(tmp_path, result)
    assert again.problems == [] and again.settings == result.loaded.settings


def test_sft_script(tmp_path):
    result = converted(tmp_path, SFT)
    s = result.loaded.settings
    assert result.kind == "sft" and result.launch.endswith(f"run.sh:{line_of(SFT, 'torchrun')}")
    assert (s.model.path, s.trainer.n_gpus_per_node, s.engine.tensor_model_parallel_size) == ("Qwen/Qwen2.5-Math-7B", 8, 4)
    assert (s.trainer.output_dir, s.trainer.experiment_name) == ("checkpoints/sft", "SFT-tp4")
    assert s.data.train_files == ["/home/me/data/gsm8k/train.parquet"]
    taken = {row["verl"]: row for row in result.taken}
    assert taken["trainer.default_local_dir"]["key"] == "trainer.output_dir"
    assert taken["optim.lr"]["where"].endswith(f":{line_of(SFT, 'optim.lr')}")
    assert taken["optim.betas"]["default"] is True and taken["trainer.n_gpus_per_node"]["default"] is False
    assert {row["verl"] for row in result.no_meaning} == {"model", "engine", "optim"}
    assert [(row["key"], row["value"]) for row in result.added] == [
        ("trainer.save_freq", -1), ("trainer.test_freq", -1), ("trainer.max_ckpt_to_keep", None), ("data.micro_batch_size_per_gpu", 4),
        ("data.max_length", 1024)]
    assert [row["command"] for row in result.others] == ["tee log.txt"]
    assert result.environment == {"HYDRA_FULL_ERROR": "1"}


def test_the_yaml_has_lines_and_portable_paths(tmp_path):
    lines = converted(tmp_path, SFT).text.splitlines()
    assert lines[0] == "# From run.sh, by mfsdp config from-verl; for mfsdp sft"
    assert f"  train_files: [~/data/gsm8k/train.parquet]  # line {line_of(SFT, 'train_files')}" in lines
    assert f"  tensor_model_parallel_size: 4  # line {line_of(SFT, 'engine.tensor')}" in lines
    literal = converted(tmp_path, SFT.replace("=checkpoints/sft", "=/home/me/out")).text
    assert "  output_dir: /home/me/out" in literal, "only what the script says by $HOME follows the home folder"
    assert "  max_ckpt_to_keep: null  # verl's default" in lines
    assert not any(line.startswith("  betas") for line in lines), "what is our default is left out"


def test_grpo_script(tmp_path):
    result = converted(tmp_path, GRPO)
    s = result.loaded.settings
    assert result.kind == "grpo"
    assert s.data.train_files == ["/home/me/data/gsm8k/train.parquet", "/home/me/data/math/train.parquet"]
    assert (s.data.max_response_length, s.rollout.n) == (1024, 8)
    assert (s.rollout.tensor_model_parallel_size, s.engine.tensor_model_parallel_size) == (4, 4)
    assert s.engine.override_transformer_config == {"gradient_accumulation_fusion": False}
    assert s.trainer.output_dir == "ckpt/verl_grpo/qwen", "OmegaConf's references to keys of the script are followed"
    assert s.actor.use_dynamic_bsz is False, "verl's default, which makes its micro batch size mean what it says"
    why = {row["verl"]: row["why"] for row in result.no_meaning}
    assert why["actor_rollout_ref.model.use_fused_kernels"] == "it is for Hugging Face model code"
    assert {"data.return_raw_chat", "actor_rollout_ref.rollout.mode", "trainer.critic_warmup"} <= set(why)
    where = {row["verl"]: row["where"].rpartition(":")[2] for row in result.taken}
    assert where["actor_rollout_ref.rollout.n"] == str(line_of(GRPO, "rollout.n=")), "the line in the array, not that of the launch"
    assert where["trainer.nnodes"] == str(line_of(GRPO, "trainer.nnodes"))


@pytest.mark.parametrize("text, line", [(SFT, 3), (GRPO, 2)])
def test_one_connection_is_told_with_its_line(tmp_path, text, line):
    problem = next(p for p in converted(tmp_path, text).problems if p.key == "CUDA_DEVICE_MAX_CONNECTIONS")
    assert (problem.found, problem.level, problem.where) == ("1", "warning", f"{tmp_path}/run.sh:{line}")
    assert "Megatron-FSDP" in problem.why and "do not export it" in problem.why
    clean = text.replace("CUDA_DEVICE_MAX_CONNECTIONS=1", "CUDA_DEVICE_MAX_CONNECTIONS=8")
    assert not any(p.key == "CUDA_DEVICE_MAX_CONNECTIONS" for p in converted(tmp_path, clean).problems)
    inline = text.replace("export CUDA_DEVICE", "X=").replace("torchrun --", "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --")
    assert any(p.key == "CUDA_DEVICE_MAX_CONNECTIONS" for p in converted(tmp_path, inline).problems) == (text is SFT)


@pytest.mark.parametrize("words, key, why", [
    ("engine.vanilla_mbridge=True", "engine.vanilla_mbridge", "legacy mbridge"),
    ("engine.use_distributed_optimizer=False", "engine.use_distributed_optimizer", "shards the optimizer state"),
    ("checkpoint.async_save=True", "checkpoint.async_save", "does not exist for Megatron-FSDP"),
    ("model.lora_rank=16", "model.lora_rank", "LoRA is not supported"),
    ("engine.param_offload=True", "engine.param_offload", "off-loading cannot free"),
    ("engine.tensor_model_parallel_size=3", "engine.tensor_model_parallel_size", ""),
    ("engine=fsdp", "engine", "Megatron is the only engine"),
    ("optim.lrr=1", "optim.lrr", "no such key"),
    ("optim.lr=fast", "optim.lr", "expected a number"),
    ("trainer.total_epochs", "trainer.total_epochs", "must have the form key=value"),
    ("optim.lr=$(python lr.py)", "optim.lr", "the output of a command, $(python lr.py), in line 28"),
    ("optim.lr=$LR", "optim.lr", "$LR is not set in the script (line 28)"),
    ("$MORE", "$MORE", "$MORE is not set in the script (line 28)"),
])
def test_faults_and_what_cannot_be_known_are_errors_with_their_line(tmp_path, words, key, why):
    result = converted(tmp_path, SFT.replace("trainer.total_epochs=4", words))
    found = [p for p in errors(result) if p.key == key and why in p.why]
    assert found and found[0].where == f"{tmp_path}/run.sh:28", errors(result)
    assert result.exit_code == 3 and "model:" in result.text, "the rest is written all the same"


def test_an_unknown_value_is_neither_guessed_nor_verls_default(tmp_path):
    result = converted(tmp_path, SFT.replace("optim.lr=1e-5", "optim.lr=$LR"))
    assert "  lr:" not in result.text and not any(row["key"] == "optim.lr" for row in result.added)
    given = converted(tmp_path, SFT.replace("optim.lr=1e-5", "optim.lr=$LR"), variables=["LR=3e-4"])
    assert given.exit_code == OK and given.loaded.settings.optim.lr == 3e-4
    ignored = converted(tmp_path, SFT.replace("optim.lr=1e-5", "data.num_workers=$N"))
    assert not errors(ignored), "an unknown value of a key without meaning changes nothing"


def test_what_is_missing_is_told_once(tmp_path):
    found = errors(converted(tmp_path, GRPO.replace("=Qwen/Qwen2.5-Math-7B", "=$MODEL_PATH")))
    assert [p.key for p in found] == ["actor_rollout_ref.model.path"]


def test_arguments_of_the_script_and_the_last_of_a_key(tmp_path):
    result = converted(tmp_path, SFT, "trainer.total_epochs=2", "optim.lr=1e-4")
    assert (result.loaded.settings.trainer.total_epochs, result.loaded.settings.optim.lr) == (2, 1e-4) and not errors(result)
    numbered = SFT.replace("NPROC=8", 'if [ "$#" -lt 1 ]; then echo usage; exit 1; fi\nNPROC=$1\nshift')
    assert converted(tmp_path, numbered, "4", "optim.lr=1e-4").loaded.settings.trainer.n_gpus_per_node == 4
    problem = next(p for p in errors(converted(tmp_path, numbered)) if p.key == "trainer.n_gpus_per_node")
    assert problem.why == "the script's argument $1 is not set in the script (line 9)"


def test_quotes_within_a_text_of_options(tmp_path):
    text = SFT.replace("torchrun", "MORE=\"\\\n  optim.betas='[0.9,0.99]' \\\n  optim.eps=1e-9\"\ntorchrun").replace('"$@"', "$MORE")
    s = converted(tmp_path, text).loaded.settings
    assert (s.optim.betas, s.optim.eps) == ([0.9, 0.99], 1e-9)


def test_several_launches_and_other_commands(tmp_path):
    second = "\npython3 -m verl.model_merger merge --local_dir x\npython -m verl.trainer.main_ppo data.train_batch_size=3\n"
    result = converted(tmp_path, SFT + second)
    assert result.kind == "sft"
    told = next(p for p in result.problems if p.key == "launch")
    assert told.level == "warning" and told.where.endswith("run.sh:31") and "the one in line 11 was taken" in told.why
    assert any("model_merger" in row["command"] for row in result.others)


def test_multi_node_and_other_launchers(tmp_path):
    options = "--nnodes 2 --nproc-per-node 8 --node_rank=$NODE_RANK --master_addr=$M"
    text = SFT.replace("--standalone --nnodes=1 --nproc_per_node=$NPROC", options)
    result = converted(tmp_path, text)
    s = result.loaded.settings
    assert (s.trainer.nnodes, s.trainer.n_gpus_per_node, s.trainer.node_rank, s.trainer.rdzv_endpoint) == (2, 8, 0, None)
    assert not errors(result) and any(p.key == "trainer.nnodes" and "--node-rank" in p.fix for p in result.problems)
    ray = GRPO.replace("python3 -m", 'LAUNCH=(ray job submit --working-dir . -- python3)\n"${LAUNCH[@]}" -m')
    assert converted(tmp_path, ray).loaded.settings == converted(tmp_path, GRPO).loaded.settings
    path = SFT.replace("-m verl.trainer.sft_trainer", "verl/trainer/fsdp_sft_trainer.py")
    assert converted(tmp_path, path).kind == "sft"


def test_an_own_hydra_configuration_is_told(tmp_path):
    result = converted(tmp_path, GRPO.replace("--config-name='ppo_megatron_trainer.yaml'", "--config-name mine"))
    assert [(p.key, p.found) for p in result.problems if "not read" in p.why] == [("--config-name", "mine")]
    assert not any(p.key == "--config-name" for p in converted(tmp_path, GRPO).problems)


def test_a_script_without_the_flag_is_told_that_sharding_is_on(tmp_path):
    result = converted(tmp_path, SFT.replace("engine.use_megatron_fsdp=True", ""))
    assert any(p.key == "engine.use_megatron_fsdp" and p.level == "note" for p in result.problems) and result.exit_code == OK


def test_ppo_with_a_critic_is_refused(tmp_path):
    problem = next(p for p in errors(converted(tmp_path, GRPO.replace("algorithm.adv_estimator=grpo", ""))) if "adv" in p.key)
    assert problem.found == "gae" and problem.where == "verl's default"


@pytest.mark.parametrize("kind", list(DEFAULTS))
def test_verls_defaults_are_legal_and_differ_from_ours(kind):
    for key, value in DEFAULTS[kind].items():
        leaf = leaves(kind)[key]
        assert value != leaf.default, key
        assert aliases.resolve(key, value, kind) == (key, value)
        assert key == "algorithm.adv_estimator" or coerce(value, leaf) == value, key


@pytest.mark.parametrize("text, why", [
    ("", "no command that starts verl's SFT or GRPO trainer; commands found: none"),
    ("echo hi\nls\n", "commands found: ls"),
    ("# python -m verl.trainer.main_ppo", "commands found: none"),
    ("python -m verl.trainer.main_generation", "commands found: python"),
    ("python -m verl.trainer.main_ppo 'x", "no command that starts"),
    (bytes(range(256)), "no command that starts"),
])
def test_files_that_launch_nothing(tmp_path, text, why):
    with pytest.raises(MfsdpError) as caught:
        converted(tmp_path, text)
    assert caught.value.exit_code == BAD_INPUT and why in caught.value.problems[0].why


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.sh", tmp_path):
        with pytest.raises(MfsdpError) as caught:
            convert(str(path))
        assert caught.value.exit_code == BAD_INPUT and "cannot be read" in caught.value.problems[0].why
    (tmp_path / "big").write_bytes(b"#" * 200_001)
    with pytest.raises(MfsdpError, match="more than 200 kB"):
        convert(str(tmp_path / "big"))
    if Path("/dev/zero").exists():
        with pytest.raises(MfsdpError, match="more than 200 kB"):
            convert("/dev/zero")
    with pytest.raises(MfsdpError, match="expected NAME=VALUE"):
        convert(str(tmp_path / "big"), None, ["A-B=3"])


def test_write_asks_before_it_overwrites(tmp_path):
    result, out = converted(tmp_path, SFT), tmp_path / "run.yaml"
    write(result, str(out), False)
    with pytest.raises(MfsdpError) as caught:
        write(result, str(out), False)
    assert caught.value.exit_code == USAGE and "already" in caught.value.problems[0].why
    write(result, str(out), True)
    with pytest.raises(MfsdpError, match="cannot be written"):
        write(result, str(tmp_path / "no" / "run.yaml"), False)
    assert out.read_text(encoding="utf-8") == result.text


def test_the_command(tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "run.sh", tmp_path / "run.yaml"
    path.write_text(SFT)
    monkeypatch.setenv("HOME", HOME["HOME"])

    def call(*args):
        monkeypatch.setattr("sys.argv", ["mfsdp", "config", "from-verl", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()
    code, stdout, stderr = call(str(path), "-o", str(out))
    assert (code, stdout) == (OK, f"{out}\n") and "taken over" in stderr and "CUDA_DEVICE_MAX_CONNECTIONS = 1" in stderr
    code, stdout, stderr = call(str(path), "-q")
    assert (code, stdout, stderr) == (OK, out.read_text(), "")
    code, stdout, _ = call(str(path), "--json", "--var", "MODEL=m", "--", "optim.lr=$X")
    data = json.loads(stdout)
    assert code == data["exit_code"] == 3 and data["ok"] is False and data["kind"] == "sft" and data["yaml"].startswith("# From run.sh")
    assert [p["key"] for p in data["problems"] if p["level"] == "error"] == ["optim.lr"]
    assert {"taken", "added", "no_meaning", "environment", "others", "launch", "written"} <= set(data)
    assert call(str(tmp_path / "none.sh"))[0] == BAD_INPUT


def test_any_change_of_a_script_ends_in_settings_or_in_named_faults(tmp_path):
    """Never a traceback; and what is taken without an error comes back from its YAML."""
    rng = random.Random(3)
    bits = [*"$\"'(){}=\\\n #\0é[],n", "${X", "$(", ": ", "- ", "null", "1e400", "<<E"]
    for i in range(50):
        data = list((SFT, GRPO)[i % 2])
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            data[at:at + rng.randrange(3)] = rng.choice([[], [rng.choice(bits)], data[at:at + 20], [rng.choice(bits)] * 2])
        raw = "".join(data).encode()
        if i % 10 == 0:
            raw = raw.replace(b"o", bytes([rng.randrange(128, 256)]), 3)
        try:
            result = converted(tmp_path, raw, *(["a$b"] if i % 7 == 0 else []))
        except MfsdpError as error:
            assert error.exit_code == BAD_INPUT
            continue
        assert result.exit_code == exit_code_of(result.problems) and report(result)
        again = loads(tmp_path, result)
        assert [p for p in again.problems if p.level == "error" and p.key not in {q.key for q in result.problems}] == [], raw
