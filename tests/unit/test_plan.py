import json
import random

import pytest
from facts_for_tests import make_facts, make_settings
from grpo_for_tests import CPU, cpu_facts, grpo_facts, grpo_settings, prompt_file
from inputs_for_tests import write_chats, write_model

from mfsdp_cli.launch.facts import ParquetFacts, find_model, gather, read_footer
from mfsdp_cli.launch.host import visible_gpus
from mfsdp_cli.launch.plan import make_plan, warmup_steps


def test_plan_of_the_gsm8k_preset():
    """7473 rows // 8 = 934, 7473 - 934 * 8 = 1 left over, 4 epochs = 3736 steps, a fifth of them 747."""
    facts = make_facts(parquet={"train.parquet": ParquetFacts("train.parquet", 7473, {})})
    plan = make_plan(make_settings(), facts)
    assert (plan.world_size, plan.tp, plan.dp, plan.pp, plan.cp) == (8, 4, 2, 1, 1)
    assert (plan.steps_per_epoch, plan.dropped_rows_per_epoch, plan.total_steps, plan.warmup_steps) == (934, 1, 3736, 747)
    assert (plan.num_train_rows, plan.num_val_rows, plan.rows_per_dp_rank, plan.device) == (7473, 0, 4, "cuda")


def test_steps_given_and_rows_limited():
    plan = make_plan(make_settings(trainer__total_training_steps=10, data__train_max_samples=100, data__val_max_samples=500,
                                   optim__lr_warmup_steps=3), make_facts())
    assert (plan.num_train_rows, plan.num_val_rows) == (100, 100)
    assert (plan.total_steps, plan.warmup_steps, plan.steps_per_epoch, plan.dropped_rows_per_epoch) == (10, 3, 12, 4)


def test_experts_have_a_data_parallel_size_of_their_own():
    settings = make_settings(engine__tensor_model_parallel_size=2, engine__expert_model_parallel_size=4, trainer__nnodes=2)
    plan = make_plan(settings, make_facts())
    assert (plan.world_size, plan.dp, plan.ep, plan.expert_dp) == (16, 8, 4, 4)


def test_device_follows_the_gpus_only_when_automatic():
    assert make_plan(make_settings(), make_facts(num_gpus=0)).device == "cpu"
    assert make_plan(make_settings(engine__device="cuda"), make_facts(num_gpus=0)).device == "cuda"
    assert make_plan(make_settings(engine__device="cpu"), make_facts()).device == "cpu"


def test_warmup_never_exceeds_the_run():
    assert warmup_steps(-1, 0.2, 50) == 10 and warmup_steps(-1, 0.2, 4) == 0 and warmup_steps(0, 0.2, 50) == 0
    assert warmup_steps(100, 0.2, 50) == 50


def test_micro_batches():
    """8 rows over DP 2: by tokens one micro batch if they are short, at worst 4; by rows ceil(4 / 3) = 2 of at most 3 x 1,024 tokens."""
    def of(settings):
        plan = make_plan(settings, make_facts())
        return plan.micro_batch_tokens, plan.min_micro_batches, plan.max_micro_batches

    assert of(make_settings()) == (1024, 1, 4) and of(make_settings(data__max_token_len_per_gpu=10**6, data__max_length=512)) == (4096, 1, 4)
    assert of(make_settings(data__use_dynamic_bsz=False, data__micro_batch_size_per_gpu=3)) == (3072, 2, 2)
    assert of(make_settings(data__use_dynamic_bsz=False, data__micro_batch_size_per_gpu=9)) == (4096, 1, 1)
    assert of(grpo_settings()) == (8192, 1, 64) and of(grpo_settings(actor__use_dynamic_bsz=False)) == (2048, 32, 32)


def test_ranks_and_rows_add_up_in_any_layout():
    draw = random.Random(0)
    for _ in range(200):
        tp, cp, dp, nnodes = (draw.choice([1, 2, 4]) for _ in range(4))
        rows, batch, epochs = draw.randint(1, 500), draw.randint(1, 60), draw.randint(1, 5)
        settings = make_settings(
            engine__tensor_model_parallel_size=tp, engine__context_parallel_size=cp, trainer__nnodes=nnodes,
            trainer__n_gpus_per_node=tp * cp * dp, data__train_batch_size=batch, trainer__total_epochs=epochs)
        plan = make_plan(settings, make_facts(parquet={"train.parquet": ParquetFacts("train.parquet", rows, {})}))
        assert plan.tp * plan.pp * plan.cp * plan.dp == plan.world_size == tp * cp * dp * nnodes
        assert plan.steps_per_epoch * batch + plan.dropped_rows_per_epoch == rows and 0 <= plan.dropped_rows_per_epoch < batch
        assert plan.total_steps == epochs * plan.steps_per_epoch and 0 <= plan.warmup_steps <= plan.total_steps


# ---------------------------------------------------------------- reinforcement learning

def test_plan_of_the_grpo_preset():
    """14973 prompts // 32 = 467, 29 left over, x 15 = 7005 steps; 32 x 8 = 256 samples, 16 x 8 = 128 an update, 64 a rank."""
    facts = grpo_facts(parquet={"train.parquet": prompt_file("train.parquet", 14973)})
    plan = make_plan(grpo_settings(), facts)
    assert (plan.world_size, plan.tp, plan.dp, plan.device) == (8, 4, 2, "cuda")
    assert (plan.steps_per_epoch, plan.dropped_rows_per_epoch, plan.total_steps, plan.warmup_steps) == (467, 29, 7005, 0)
    assert (plan.samples_per_step, plan.samples_per_update, plan.updates_per_step, plan.rows_per_dp_rank) == (256, 128, 2, 64)
    assert (plan.num_engines, plan.gpus_per_engine, plan.num_gpus, plan.uses_reference) == (2, 4, 8, True)


def test_plan_of_samplers_apart_and_on_cpu():
    settings = grpo_settings(rollout__colocate=False, rollout__num_engines=3, actor__ppo_epochs=2, actor__use_kl_loss=False)
    apart = make_plan(settings, grpo_facts())
    assert (apart.num_engines, apart.gpus_per_engine, apart.num_gpus, apart.updates_per_step, apart.uses_reference) == (3, 4, 20, 4, False)
    cpu = make_plan(grpo_settings(**CPU), cpu_facts())
    assert (cpu.device, cpu.num_engines, cpu.gpus_per_engine, cpu.num_gpus, cpu.dp) == ("cpu", 1, 0, 0, 2)


# ---------------------------------------------------------------- facts

TABLE = """0, GPU-aaaa1111, 143771, 9.0, NVIDIA H200
1, GPU-bbbb2222, 81559, 9.0, NVIDIA H100, 80GB
2, GPU-cccc3333, [N/A], [N/A], Strange
"""


@pytest.mark.parametrize("visible, names", [
    (None, ["NVIDIA H200", "NVIDIA H100, 80GB", "Strange"]),
    ("", []),
    ("1,0", ["NVIDIA H100, 80GB", "NVIDIA H200"]),
    ("GPU-bbbb", ["NVIDIA H100, 80GB"]),
    ("0,7,1", ["NVIDIA H200"]),  # an entry that is no GPU hides what follows it, as in CUDA
    ("-1", []),
    ("MIG-1234", ["MIG slice"]),
])
def test_visible_gpus(visible, names):
    assert [gpu[0] for gpu in visible_gpus(TABLE, visible)] == names


def test_gpu_numbers():
    assert visible_gpus(TABLE, None) == [("NVIDIA H200", 143771, 9.0), ("NVIDIA H100, 80GB", 81559, 9.0), ("Strange", 0, 0.0)]


def test_gather_reads_model_and_data(tmp_path):
    model, data = write_model(tmp_path / "model"), write_chats(tmp_path / "train.parquet", 7)
    settings = make_settings(model__path=str(model), data__train_files=[str(data), "none.parquet"], data__val_files=[str(model)])
    facts = gather(settings, {"PATH": ""}, tmp_path / "no" / "such" / "run")
    assert (facts.model_path, facts.model_error, facts.has_tokenizer) == (str(model), "", True)
    assert facts.model_config["hidden_size"] == 64 and facts.model_weight_files == ("model.safetensors",)
    assert facts.parquet[str(data)].num_rows == 7 and list(facts.parquet[str(data)].columns) == ["messages"]
    assert facts.parquet["none.parquet"].error == "no such file" and "folder" in facts.parquet[str(model)].error
    assert facts.num_gpus == 0 and facts.num_cpus >= 1 and facts.host_memory_gib > 0.1 and facts.free_disk_gib > 0
    assert facts.versions["pyarrow"] and set(facts.versions) >= {"torch", "megatron-core", "transformer-engine", "wandb"}


def test_gather_reads_the_reference(tmp_path):
    settings = grpo_settings(model__path=str(write_model(tmp_path / "model")), data__train_files=[], data__val_files=[], ref__path="./none")
    facts = gather(settings, {"PATH": ""}, tmp_path)
    assert (facts.model_error, facts.reference_config, facts.reference_error) == ("", None, "there is no folder ./none")
    settings.ref.path = settings.model.path
    assert gather(settings, {"PATH": ""}, tmp_path).reference_config["hidden_size"] == 64


def test_a_damaged_parquet_file_is_said(tmp_path):
    file = tmp_path / "x.parquet"
    file.write_text("question,answer\n")
    assert read_footer(str(file)).error.startswith("not readable as parquet: ")


def weight_error(folder):
    return gather(make_settings(model__path=str(folder), data__train_files=[], data__val_files=[]), {"PATH": ""}, folder).model_error


def test_weights_cut_short_and_missing_are_found(tmp_path):
    model = write_model(tmp_path / "model")
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    assert f"has {len(whole) - 3} bytes where its header needs {len(whole)}" in weight_error(model)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS pointer" in weight_error(model)
    file.write_bytes(whole)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names 2 files, of which 1 are missing: model-2.safetensors" in weight_error(model)


def test_a_damaged_config_is_said(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "config.json").write_text("{")
    assert "not readable as JSON" in weight_error(model)
    (model / "config.json").unlink()
    assert "has no config.json" in weight_error(model)


def test_a_model_is_a_folder_or_a_hub_id(tmp_path):
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_model(None, environ) == (None, "")
    assert find_model("Qwen/Qwen2.5-Math-7B", environ) == (None, "")
    assert "HF_HUB_OFFLINE" in find_model("Qwen/Qwen2.5-Math-7B", environ | {"HF_HUB_OFFLINE": "1"})[1]
    for path in ("./none", "/none/at/all", "a/b/c"):
        assert find_model(path, environ) == (None, f"there is no folder {path}")
    snapshot = write_model(tmp_path / "models--Qwen--Qwen2.5-Math-7B" / "snapshots" / "abc")
    assert find_model("Qwen/Qwen2.5-Math-7B", environ) == (None, "")  # no reference yet: the download is not finished
    (tmp_path / "models--Qwen--Qwen2.5-Math-7B" / "refs").mkdir()
    (tmp_path / "models--Qwen--Qwen2.5-Math-7B" / "refs" / "main").write_text("abc\n")
    assert find_model("Qwen/Qwen2.5-Math-7B", environ) == (snapshot, "")
