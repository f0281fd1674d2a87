import pytest
from load_for_tests import load, only_error

from mfsdp_cli.config import aliases
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.schema_grpo import GrpoSettings
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


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_every_alias_leads_to_a_setting_and_hides_none(kind):
    tables = aliases.TABLES[kind]
    for theirs, ours in tables.renamed.items():
        assert leaf_of(ours, kind) is not None and theirs not in leaves(kind)
    assert all(leaf_of(ours, kind) is not None for ours in tables.foreign.values())
    for key in leaves(kind):
        assert aliases.resolve(key, "x", kind) == (key, "x"), "a key of ours must not be taken for verl's"
    # A key in two tables would be decided by the order of looking, and one that is ours would never be reached.
    exact = [k for table in (tables.renamed, tables.only, tables.ignored) for k in table if "*" not in k]
    assert len(exact) == len(set(exact)) and not set(exact) & set(leaves(kind))
    assert set(tables.values) <= set(tables.renamed)


# --- reinforcement learning -----------------------------------------------------------------------------------------

# verl's examples/grpo_trainer/run_qwen2-7b_math_megatron_fsdp.sh, its arguments
VERL_GRPO = """
algorithm.adv_estimator=grpo data.train_files=['gsm8k/train.parquet','math/train.parquet'] data.val_files=['gsm8k/test.parquet']
data.return_raw_chat=True data.train_batch_size=32 data.max_prompt_length=512 data.max_response_length=512
data.filter_overlong_prompts=True data.truncation=error actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.model.use_fused_kernels=False actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 actor_rollout_ref.actor.megatron.use_mbridge=True
actor_rollout_ref.actor.megatron.vanilla_mbridge=False actor_rollout_ref.actor.megatron.use_megatron_fsdp=True
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.rollout.n=2 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1 actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"]
trainer.project_name=verl_grpo_example_gsm8k_math
trainer.experiment_name=qwen2_7b_megatron_fsdp trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15
"""


def grpo(*texts, **kwargs):
    return load(*texts, kind="grpo", **kwargs)


def test_verls_megatron_fsdp_grpo_script_is_taken_whole():
    loaded = grpo(*VERL_GRPO.split(), "VLLM_USE_V1=1")
    assert [(p.level, p.key) for p in loaded.problems] == [("note", key) for key in (
        "data.return_raw_chat", "actor_rollout_ref.model.use_fused_kernels", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.mode", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "trainer.critic_warmup",
        "VLLM_USE_V1")]
    expected = GrpoSettings()
    expected.model.path, expected.data.val_files = "Qwen/Qwen2-7B-Instruct", ["gsm8k/test.parquet"]
    expected.data.train_files = ["gsm8k/train.parquet", "math/train.parquet"]
    expected.engine.tensor_model_parallel_size = expected.rollout.tensor_model_parallel_size = 4
    expected.rollout.n, expected.trainer.n_gpus_per_node, expected.trainer.logger = 2, 8, ["console", "wandb"]
    expected.trainer.project_name, expected.trainer.experiment_name = "verl_grpo_example_gsm8k_math", "qwen2_7b_megatron_fsdp"
    assert loaded.settings == expected


@pytest.mark.parametrize("text, key, value", [
    ("actor_rollout_ref.actor.optim.lr=1e-6", "optim.lr", 1e-6), ("actor_rollout_ref.actor.checkpoint.save_contents=[model]",
     "checkpoint.save_contents", ["model"]), ("actor_rollout_ref.actor.grad_clip=0.5", "optim.clip_grad", 0.5),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "actor.policy_loss", "ppo"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor.policy_loss", "gspo"),
    ("actor_rollout_ref.rollout.val_kwargs.n=4", "rollout.val_n", 4),
    ("actor_rollout_ref.rollout.val_kwargs.top_p=0.7", "rollout.val_top_p", 0.7),
    ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=99", "ref.log_prob_max_token_len_per_gpu", 99),
    ("actor_rollout_ref.ref.model.path=m", "ref.path", "m"), ("algorithm.kl_ctrl.kl_coef=0.2", "algorithm.kl_coef", 0.2),
    ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction", "truncate"),
    ("algorithm.rollout_correction.rollout_is=null", "algorithm.rollout_correction", "none"),
    ("algorithm.rollout_correction.rollout_is_threshold=3.0", "algorithm.rollout_correction_threshold", 3.0),
    ("algorithm.filter_groups.enable=True", "algorithm.filter_groups", True),
    ("reward_model.overlong_buffer.len=64", "algorithm.overlong_buffer_length", 64),
    ("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5", "algorithm.overlong_penalty_factor", 0.5),
    ("trainer.max_actor_ckpt_to_keep=2", "trainer.max_ckpt_to_keep", 2),
    ("trainer.val_before_train=False", "trainer.val_before_train", False),
])
def test_verls_grpo_names(text, key, value):
    loaded = grpo(text)
    section, name = key.split(".")
    assert loaded.problems == [] and getattr(getattr(loaded.settings, section), name) == value
    assert list(loaded.origins) == [key]


def test_a_custom_reward_of_verls_is_one_setting():
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        loaded = grpo(f"{prefix}.name=my_score", f"{prefix}.path=/r.py")
        assert loaded.problems == [] and loaded.settings.reward.function == "/r.py:my_score"
        assert loaded.origins == {"reward.function": "command line"}
    assert grpo("custom_reward_function.path=/r.py").settings.reward.function == "/r.py:compute_score"
    assert grpo("custom_reward_function.path=null", "custom_reward_function.name=x").settings.reward.function is None
    assert only_error(grpo("custom_reward_function.name=x")).fix == "reward.function=FILE.py:FUNCTION"


@pytest.mark.parametrize("text", [
    "actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.ppo_micro_batch_size=8",
    "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "actor_rollout_ref.actor.megatron.forward_only=True",
    "actor_rollout_ref.rollout.do_sample=False", "actor_rollout_ref.rollout.response_length=9",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.x=1",
    "actor_rollout_ref.rollout.multi_turn.enable=True", "actor_rollout_ref.rollout.val_kwargs.top_k=50",
    "algorithm.rollout_correction.rollout_is=sequence", "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.filter_groups.max_num_gen_batches=10", "data.reward_fn_key=source", "reward_model.enable=True",
    "reward_model.reward_manager=remote",
    "reward.sandbox_fusion.url=http://x", "trainer.critic_warmup=3", "actor_rollout_ref.hybrid_engine=False",
    "data.seed=1", "critic.enable=True",
])
def test_grpo_settings_that_would_be_lost_are_refused_with_a_reason(text):
    problem = only_error(grpo(text))
    assert problem.key == text.partition("=")[0] and problem.why and problem.fix and "no such key" not in problem.why


@pytest.mark.parametrize("text", [
    "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.rollout.free_cache_engine=True", "actor_rollout_ref.rollout.max_num_batched_tokens=9", "critic.optim.lr=1e-5",
    "actor_rollout_ref.rollout.multi_turn.format=hermes", "actor_rollout_ref.rollout.engine_kwargs.vllm={}", "algorithm.gamma=1.0",
    "algorithm.filter_groups.metric=acc", "reward_model.enable=False", "reward_model.model.path=x", "trainer.log_val_generations=10",
    "ray_kwargs.ray_init.num_cpus=8", "actor_rollout_ref.ref.megatron.forward_only=True", "actor_rollout_ref.nccl_timeout=600",
    "reward.reward_manager.name=naive", "actor_rollout_ref.rollout.val_kwargs.do_sample=True", "VLLM_ALLREDUCE_USE_SYMM_MEM=0",
])
def test_grpo_settings_without_meaning_here_are_noted(text):
    loaded = grpo(text)
    assert [(p.level, p.key) for p in loaded.problems] == [("note", text.partition("=")[0])]
    assert loaded.settings == GrpoSettings() and loaded.origins == {}


# --- actor and reference share their engine -------------------------------------------------------------------------

REF, ACTOR = "actor_rollout_ref.ref.megatron.", "actor_rollout_ref.actor.megatron."


def test_the_reference_says_what_the_actor_has_or_is_wrong(tmp_path):
    name = "tensor_model_parallel_size"
    assert grpo(f"{REF}{name}=4", f"{ACTOR}{name}=4").problems == [], "whatever the order"
    assert grpo(f"{REF}{name}=1").problems == [], "the actor's default"
    config = tmp_path / "c.yaml"
    config.write_text("engine: {tensor_model_parallel_size: 4}\n")
    assert grpo(f"{REF}{name}=4", config=str(config)).problems == []
    for loaded, actor in (
        (grpo(f"{REF}{name}=2", f"{ACTOR}{name}=4"), "= 4 (command line)"), (grpo(f"{REF}{name}=2"), "= 1 (default)"),
        (grpo(f"{REF}{name}=2", environ={"TP": "8"}), "= 8 ($TP)"),
        (grpo(f"{REF}{name}=2", config=str(config)), f"= 4 ({config}:1)"),
    ):
        problem = only_error(loaded)
        assert problem.key == REF + name and problem.found == "2" and f"engine.{name} {actor}" in problem.why
        assert "same flags and the same parallel layout" in problem.why
        assert loaded.settings.engine.tensor_model_parallel_size != 2, "the reference never sets"


def test_flags_and_overrides_of_the_reference_are_compared_too():
    assert "use_megatron_fsdp = True" in only_error(grpo(f"{REF}use_megatron_fsdp=False")).why
    fusion = "override_transformer_config.gradient_accumulation_fusion=False"
    assert grpo(f"+{ACTOR}{fusion}", f"+{REF}{fusion}").problems == []
    assert "gradient_accumulation_fusion = null (default)" in only_error(grpo(f"+{REF}{fusion}")).why
    assert only_error(grpo(f"{REF}tensor_model_parallel_size=two")).why.startswith("expected an integer")
    assert "grad_offload" in only_error(grpo(f"{REF}grad_offload=True")).key
