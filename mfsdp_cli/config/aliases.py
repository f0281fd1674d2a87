"""verl's key paths that differ from ours: renamed, without meaning here, or refused with the reason.

Keys were taken from verl's sft_trainer_engine.yaml, engine/megatron.yaml, optim/megatron.yaml and model/hf_model.yaml
(main, mid 2026). A line copied from a verl script works, or says exactly why not. Patterns are fnmatch patterns.
`aliases_grpo` has those of reinforcement learning.
"""

from __future__ import annotations

from dataclasses import field
from fnmatch import fnmatchcase

from mfsdp_cli.config import aliases_grpo
from mfsdp_cli.config.values import as_text, free_value, leaf_of
from mfsdp_cli.records import Record

REWARD_FUNCTION = aliases_grpo.REWARD_FUNCTION

# A prefix of verl's nested RL configuration and the section of ours that it means.
SFT_PREFIXES = {
    "actor_rollout_ref.actor.megatron.": "engine.",
    "actor_rollout_ref.actor.optim.": "optim.",
    "actor_rollout_ref.actor.checkpoint.": "checkpoint.",
    "actor_rollout_ref.model.": "model.",
}

# --- both kinds of run ----------------------------------------------------------------------------------------------

RENAMED = {
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.device": "engine.device",
    "engine.seed": "trainer.seed",
    "engine.use_remove_padding": "model.use_remove_padding",
    "use_remove_padding": "model.use_remove_padding",
    "model.partial_pretrain": "model.path",
    "model.lora.rank": "model.lora_rank",
    "optim.lr_scheduler_type": "optim.lr_decay_style",
    "optim.warmup_style": "optim.lr_decay_style",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "engine.override_ddp_config.data_parallel_sharding_strategy": "engine.data_parallel_sharding_strategy",
    "engine.override_ddp_config.use_distributed_optimizer": "engine.use_distributed_optimizer",
}

_UNSET = (None, False, {}, [], "")
_NOT_HERE = "is not offered here"
_MADE_WITH = "the model's configuration is what its weights were made with"

# Accepted with the listed values only, which change nothing; anything else would be silently lost, so it is refused.
ONLY = {
    "engine": (("megatron",), "Megatron is the only engine", "write engine=megatron, or leave it out"),
    "engine.name": (("megatron",), "Megatron is the only engine", "leave it out"),
    "engine.strategy": (("megatron",), "Megatron is the only engine", "leave it out"),
    "model_engine": (("megatron",), "Megatron is the only engine", "leave it out"),
    "optim": (("megatron",), "Megatron's optimizer is the only one", "write optim=megatron, or leave it out"),
    "model": (("hf_model",), "models are Hugging Face models", "write model=hf_model, or set model.path"),
    "engine.grad_offload": (_UNSET, "gradients cannot be moved to the host under Megatron-FSDP", "leave it out"),
    "engine.offload.*.target": ((None, "none"), "off-loading does not work with Megatron-FSDP's buffers", "leave it out"),
    "engine.virtual_pipeline_model_parallel_size": (_UNSET, "it needs pipeline stages, which Megatron-FSDP has not", "leave it out"),
    "engine.use_dist_checkpointing": ((True, *_UNSET), "checkpoints are always DTensor checkpoints", "leave it out"),
    "engine.dist_checkpointing_path": (_UNSET, "training starts from a Hugging Face model", "set model.path, or trainer.resume_from_path"),
    "engine.dynamic_context_parallel": (_UNSET, "Megatron-FSDP refuses it", "use engine.context_parallel_size"),
    "engine.pad_to_length": (_UNSET, "batches are packed, never padded to a length", "leave it out"),
    "engine.router_replay.mode": (("disabled",), f"router replay {_NOT_HERE}", "leave it out"),
    "engine.qat.enable": (_UNSET, f"quantization-aware training {_NOT_HERE}", "leave it out"),
    "engine.override_mcore_model_config": (_UNSET, f"it {_NOT_HERE}", "use engine.override_transformer_config"),
    "engine.override_mcore_model_config.*": ((), f"it {_NOT_HERE}", "use engine.override_transformer_config"),
    "engine.override_ddp_config": (_UNSET, "Megatron-FSDP's options are set by the engine", "leave it out"),
    "engine.override_ddp_config.overlap_grad_reduce": ((True,), "full sharding always overlaps", "leave it out"),
    "engine.override_ddp_config.overlap_param_gather": ((True,), "full sharding always overlaps", "leave it out"),
    "engine.override_ddp_config.*": ((), "Megatron-FSDP's options are set by the engine: full sharding, float32 gradients", "leave it out"),
    "optim.override_optimizer_config": (_UNSET, f"it {_NOT_HERE}", "use the keys of optim"),
    "optim.override_optimizer_config.*": ((), f"it {_NOT_HERE}", "use the keys of optim"),
    "optim.weight_decay_incr_style": (("constant", None), f"a changing weight decay {_NOT_HERE}", "leave it out"),
    "optim.lr_decay_steps": (_UNSET, "the decay always ends with the run", "leave it out, or set trainer.total_training_steps"),
    "optim.min_lr_ratio": (_UNSET, "the end of the decay is a learning rate here, not a share", "set optim.min_lr"),
    "optim.use_checkpoint_opt_param_scheduler": (_UNSET, "the configured schedule always holds", "leave it out"),
    "optim.use_layer_wise_distributed_optimizer": (_UNSET, "it does not work with Megatron-FSDP", "leave it out"),
    "model.lora_adapter_path": (_UNSET, "LoRA is not supported with Megatron-FSDP checkpoints", "merge the adapter into the model first"),
    "model.hf_config_path": (_UNSET, "the configuration is read from the model folder", "set model.path"),
    "model.tokenizer_path": (_UNSET, "the tokenizer is read from the model folder", "put the tokenizer files into the model folder"),
    "model.custom_chat_template": (_UNSET, "the chat template is the tokenizer's", "write it into the model folder's chat_template.jinja"),
    "model.external_lib": (_UNSET, f"loading other libraries {_NOT_HERE}", "leave it out"),
    "model.override_config": (_UNSET, _MADE_WITH, "edit the model folder's config.json"),
    "model.override_config.*": ((), _MADE_WITH, "edit the model folder's config.json"),
    "model.enable_activation_offload": (_UNSET, f"it {_NOT_HERE}", "use engine.recompute=full"),
    "model.use_liger": (_UNSET, "its kernels are for Hugging Face model code, which does not run here", "leave it out"),
    "model.truncate_padding": (_UNSET, "batches have no padding", "leave it out"),
    "model.tiled_mlp.enabled": (_UNSET, f"it {_NOT_HERE}", "leave it out"),
    "model.mtp.enable": (_UNSET, f"multi-token prediction {_NOT_HERE}", "leave it out"),
    "ulysses_sequence_parallel_size": ((1,), "it belongs to verl's FSDP engine", "use engine.context_parallel_size"),
    "data.custom_cls": (_UNSET, f"a data set class of one's own {_NOT_HERE}", "write parquet files as mfsdp prep-data does"),
    "data.custom_cls.*": (_UNSET, f"a data set class of one's own {_NOT_HERE}", "write parquet files as mfsdp prep-data does"),
    "data.tokenizer": (_UNSET, "the tokenizer is read from the model folder", "set model.path"),
    "data.apply_chat_template_kwargs": (_UNSET, f"it {_NOT_HERE}", "leave it out"),
    "data.apply_chat_template_kwargs.*": ((), f"it {_NOT_HERE}", "leave it out"),
    "data.enable_thinking_default": ((None, "none"), f"it {_NOT_HERE}", "leave it out"),
    "trainer.default_hdfs_dir": (_UNSET, f"copying to HDFS {_NOT_HERE}", "copy trainer.output_dir after the run"),
    "trainer.wandb_proxy": (_UNSET, f"it {_NOT_HERE}", "set HTTPS_PROXY in the environment"),
}

# Accepted whatever the value, with a note.
IGNORED = {
    "optim.total_training_steps": "the schedule follows trainer.total_training_steps or trainer.total_epochs",
    "optim.lr_wsd_decay_*": "it belongs to the wsd schedule",
    "optim.num_cycles": "the cosine has half a cycle",
    "optim.muon_*": "it belongs to the Muon optimizer",
    "engine.dist_checkpointing_prefix": "checkpoint keys follow the model",
    "engine.dist_ckpt_optim_fully_reshardable": "checkpoints can always be resharded",
    "engine.distrib_optim_fully_reshardable_mem_efficient": "checkpoints can always be resharded",
    "engine.max_seqlen_per_dp_cp_rank": "it belongs to dynamic context parallelism",
    "engine.entropy_from_logits_*": "the logits are worked on in pieces anyhow",
    "engine.pad_bshd_to_minibatch_max": "batches are packed",
    "engine.pad_to_length_bucket": "batches are packed",
    "engine.offload.disk.*": "there is no off-loading",
    "engine.router_replay.*": "there is no router replay",
    "engine.qat.*": "there is no quantization-aware training",
    "engine.override_ddp_config.grad_reduce_in_fp32": "Megatron-FSDP never reads it; gradients are float32 here",
    "model.lora_alpha": "there is no LoRA",
    "model.lora.*": "there is no LoRA",
    "model.target_modules": "there is no LoRA",
    "model.exclude_modules": "there is no LoRA",
    "model.use_shm": "weights are read from the folder",
    "model.enable_gradient_checkpointing": "it is for Hugging Face model code; engine.recompute is the switch here",
    "model.use_fused_kernels": "it is for Hugging Face model code",
    "model.fused_kernel_options": "it is for Hugging Face model code",
    "model.fused_kernel_options.*": "it is for Hugging Face model code",
    "model.tiled_mlp.*": "there is no tiled MLP",
    "model.mtp.*": "there is no multi-token prediction",
    "data.tools_key": "tool schemas are not rendered; a warning tells when the files have such a column",
    "data.enable_thinking_key": "the chat template's own default holds",
    "data.ignore_input_ids_mismatch": "a conversation is rendered as a whole, so there is nothing to mismatch",
    "data.balance_dp_token": "verl does not read it either",
    "data.use_shm": "files are read where they are",
    "data.num_workers": "tokenizing needs no worker setting",
    "data.return_raw_chat": "chats are always kept",
    "trainer.balance_batch": "the loader shares out the rows by its own rule",
    "trainer.profile_interval": "there is no profiler",
    "trainer.use_legacy_worker_impl": "it selects among verl's own workers",
    "profiler.*": "there is no profiler",
    "global_profiler.*": "there is no profiler",
    "hydra.*": "Hydra is not used",
    "*._target_": "it names verl's own classes",
}

# Names from TRL and Megatron-LM: suggested, never taken silently.
FOREIGN = {
    "learning_rate": "optim.lr",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "train_iters": "trainer.total_training_steps",
    "global_batch_size": "data.train_batch_size",
    "warmup_ratio": "optim.lr_warmup_steps_ratio",
    "lr_warmup_fraction": "optim.lr_warmup_steps_ratio",
    "warmup_steps": "optim.lr_warmup_steps",
    "max_grad_norm": "optim.clip_grad",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "model_name_or_path": "model.path",
    "gradient_checkpointing": "engine.recompute",
    "recompute_granularity": "engine.recompute",
    "save_steps": "trainer.save_freq",
    "save_interval": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "save_total_limit": "trainer.max_ckpt_to_keep",
    "save_retain_interval": "trainer.keep_every",
    "save_top_k": "trainer.keep_best",
    "keep_top_k": "trainer.keep_best",
    "load_best_model_at_end": "trainer.keep_best",
    "metric_for_best_model": "trainer.best_metric",
    "report_to": "trainer.logger",
    "run_name": "trainer.experiment_name",
    "bf16": "engine.dtype",
    "tp": "engine.tensor_model_parallel_size",
    "cp": "engine.context_parallel_size",
    "ep": "engine.expert_model_parallel_size",
    "nproc": "trainer.n_gpus_per_node",
    "nproc_per_node": "trainer.n_gpus_per_node",
}


# --- supervised fine-tuning alone -----------------------------------------------------------------------------------

SFT_RENAMED = {
    "data.multiturn.messages_key": "data.messages_key",
    "actor_rollout_ref.actor.grad_clip": "optim.clip_grad",
}
SFT_ONLY = {
    "engine.forward_only": (_UNSET, "sft trains", "leave it out"),
    "data.multiturn.enable": ((True, None), "data is always chat messages", "make the messages column with: mfsdp prep-data"),
    "trainer.val_before_train": (_UNSET, f"it {_NOT_HERE}", "leave it out"),
}
SFT_IGNORED = {
    "ray_kwargs.*": "sft runs under torchrun",
    "ray_init.*": "sft runs under torchrun",
}
SFT_FOREIGN = {
    "per_device_train_batch_size": "data.micro_batch_size_per_gpu",
    "micro_batch_size": "data.micro_batch_size_per_gpu",
    "micro_batch_size_per_gpu": "data.micro_batch_size_per_gpu",
    "max_seq_length": "data.max_length",
}
# Sections of verl's reinforcement learning trainer.
RL_SECTIONS = ("actor_rollout_ref", "algorithm", "critic", "reward", "reward_model", "custom_reward_function", "distillation")


class Tables(Record):
    """What a kind of run makes of verl's keys. `values` translates values: key -> {theirs: ours}; see above for the others."""

    prefixes: dict[str, str]
    renamed: dict[str, str]
    only: dict[str, tuple]
    ignored: dict[str, str]
    foreign: dict[str, str]
    values: dict[str, dict] = field(default_factory=dict)


TABLES = {
    "sft": Tables(SFT_PREFIXES, RENAMED | SFT_RENAMED, ONLY | SFT_ONLY, IGNORED | SFT_IGNORED, FOREIGN | SFT_FOREIGN),
    "grpo": Tables(
        aliases_grpo.PREFIXES, RENAMED | aliases_grpo.RENAMED, ONLY | aliases_grpo.ONLY, IGNORED | aliases_grpo.IGNORED,
        FOREIGN | aliases_grpo.FOREIGN, aliases_grpo.VALUES,
    ),
}


class Told(Record):
    """A key that sets nothing: level "note" (accepted) or "error" (refused), why, and the way out."""

    level: str
    why: str
    fix: str = ""


def resolve(key: str, raw, kind: str) -> tuple[str, object] | Told:
    """Our dotted key and value for those that the user wrote (the key may still be unknown), or why they set nothing."""
    if leaf_of(key, kind) is not None:
        return key, raw
    tables, of_reference = TABLES[kind], is_of_reference(key, kind)
    prefix = max((p for p in tables.prefixes if key.startswith(p)), key=len, default=None)
    if prefix is not None:
        key = tables.prefixes[prefix] + key.removeprefix(prefix)
    if key in tables.values:
        return _translate(tables, key, raw)
    key = tables.renamed.get(key, key)
    if leaf_of(key, kind) is not None:
        return key, raw
    if of_reference and key == "engine.forward_only":
        return Told("note", "accepted and without effect: the reference model is never trained")
    ignored = _ignored(key, kind)
    rule = tables.only.get(key)
    if rule is None and ignored is None:
        rule = next((tables.only[p] for p in tables.only if "*" in p and fnmatchcase(key, p)), None)
    if rule is not None:
        values, why, fix = rule
        value = free_value(raw)
        # 0 == False and 1 == True in Python, so compare types too.
        if any(value == v and type(value) is type(v) for v in values):
            return Told("note", f"accepted and without effect: {why}")
        return Told("error", why, fix)
    if ignored is not None:
        return Told("note", f"accepted and without effect: {ignored}")
    if kind == "sft" and key.split(".")[0] in RL_SECTIONS:
        return Told("error", "this is a setting of reinforcement learning, not of sft", "leave it out")
    return key, raw


def is_of_reference(key: str, kind: str) -> bool:
    """Whether a key of verl's is about the engine of the reference model, which shares engine.* with the actor."""
    return kind == "grpo" and key.removeprefix("actor_rollout_ref.").startswith("ref.megatron.")


def _translate(tables: Tables, key: str, raw) -> tuple[str, object] | Told:
    """A key of which the values have other names here."""
    value, known = free_value(raw), tables.values[key]
    if (value is None or isinstance(value, str)) and value in known:
        return tables.renamed[key], known[value]
    legal = ", ".join(map(as_text, known))
    return Told("error", f"this value is not offered here; {tables.renamed[key]} stands for it", f"write one of: {legal}")


def _ignored(key: str, kind: str) -> str | None:
    ignored = TABLES[kind].ignored
    exact = ignored.get(key)
    return exact if exact is not None else next((why for p, why in ignored.items() if "*" in p and fnmatchcase(key, p)), None)
