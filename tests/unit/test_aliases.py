import pytest
from load_for_tests import load, only_error

from mfsdp_cli.config import aliases
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.values import leaf_of, leaves


def test_verls_megatron_fsdp_sft_settings_are_all_taken():
    loaded = load(
        "data.train_files=/d/train.parquet", "data.val_files=/d/test.parquet", "data.messages_key=messages", "data.train_batch_size=8",
        "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=1024", "data.pad_mode=no_padding", "data.truncation=error",
        "model=hf_model",
        "model.trust_remote_code=True", "engine=megatron", "optim=megatron", "optim.lr=1e-5", "optim.lr_warmup_steps_ratio=0.2",
        "optim.weight_decay=0.1", "optim.betas=[0.9,0.95]", "optim.clip_grad=1.0", "optim.lr_warmup_init=0", "optim.lr_decay_style=cosine",
        "optim.min_lr=1e-6", "engine.tensor_model_parallel_size=4", "engine.pipeline_model_parallel_size=1", "engine.use_mbridge=True",
        "engine.vanilla_mbridge=False", "engine.use_megatron_fsdp=True", "model.path=/m", "model.use_remove_padding=true",
        "trainer.default_local_dir=/out", "trainer.project_name=gsm8k-sft", 'trainer.logger=["console","wandb","file"]',
        "trainer.total_epochs=4",
    )
    s = loaded.settings
    assert [(p.key, p.level) for p in loaded.problems] == [("model", "note"), ("engine", "note"), ("optim", "note")]
    assert (s.trainer.output_dir, s.trainer.logger, s.engine.tensor_model_parallel_size) == ("/out", ["console", "wandb", "file"], 4)
    assert (s.optim.lr, s.optim.betas, s.optim.lr_warmup_init) == (1e-5, [0.9, 0.95], 0.0)


def test_nested_rl_prefixes():
    loaded = load("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "actor_rollout_ref.actor.optim.lr=1e-6",
                  "actor_rollout_ref.actor.checkpoint.save_contents=[model]", "actor_rollout_ref.model.path=m",
                  "+actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=flash")
    s = loaded.settings
    assert loaded.problems == []
    assert (s.engine.tensor_model_parallel_size, s.optim.lr, s.checkpoint.save_contents, s.model.path) == (2, 1e-6, ["model"], "m")
    assert s.engine.override_transformer_config == {"attention_backend": "flash"}


@pytest.mark.parametrize("text", [
    "engine=fsdp", "engine.strategy=fsdp2", "engine.grad_offload=True", "engine.offload.param.target=cpu", "engine.qat.enable=true",
    "engine.virtual_pipeline_model_parallel_size=2", "engine.override_ddp_config.bucket_size=1",
    "engine.override_ddp_config.overlap_grad_reduce=False",
    "optim.override_optimizer_config.use_precision_aware_optimizer=True", "optim.min_lr_ratio=0.1", "model.lora_adapter_path=x",
    "model.override_config.num_hidden_layers=2", "data.custom_cls.path=x.py", "trainer.default_hdfs_dir=hdfs://x",
    "ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo",
])
def test_verl_settings_that_would_be_lost_are_refused_with_a_reason(text):
    problem = only_error(load(text))
    assert problem.key == text.partition("=")[0] and problem.why and problem.fix and "no such key" not in problem.why


@pytest.mark.parametrize("text", [
    "engine.grad_offload=False", "engine.offload.param.target=null", "engine.offload.disk.path=/x", "engine.qat.enable=false",
    "engine.qat.mode=w4a4",
    "engine.override_ddp_config={}", "engine.override_ddp_config.grad_reduce_in_fp32=True",
    "engine.override_ddp_config.overlap_grad_reduce=True",
    "data.return_raw_chat=True", "model.use_fused_kernels=True", "model.target_modules=all-linear", "hydra.run.dir=x", "profiler.tool=nsys",
    "optim.muon_momentum=0.9", "engine._target_=verl.workers.config.McoreEngineConfig", "data.num_workers=8",
    "ulysses_sequence_parallel_size=1",
])
def test_verl_settings_without_meaning_here_are_noted(text):
    loaded = load(text)
    assert [(p.level, p.key) for p in loaded.problems] == [("note", text.partition("=")[0])]
    assert loaded.settings == SftSettings() and loaded.origins == {}


def test_two_names_for_one_setting():
    problem = only_error(load("engine.seed=1", "trainer.seed=2"))
    assert problem.key == "trainer.seed" and "engine.seed = 1" in problem.why
    same = load("engine.seed=1", "trainer.seed=1")
    assert same.problems == [] and same.settings.trainer.seed == 1


def test_a_wrong_value_under_verls_name_names_both():
    assert only_error(load("trainer.device=gpu")).key == "trainer.device (engine.device)"


def test_every_alias_leads_to_a_setting_and_hides_none():
    for theirs, ours in aliases.RENAMED.items():
        assert leaf_of(ours) is not None and theirs not in leaves()
    assert all(leaf_of(ours) is not None for ours in aliases.FOREIGN.values())
    for key in leaves():
        assert aliases.resolve(key, "x") == key, "a key of ours must not be taken for verl's"
