"""Rules on engine.override_transformer_config: what may be set there, and what has a setting of its own. See `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mfsdp_cli.config.values import as_text, nearest
from mfsdp_cli.errors import Problem

SECTION = "engine.override_transformer_config"
ATTENTION_BACKENDS = ("flash", "fused", "unfused", "local", "auto")  # names of megatron-core's enum AttnBackend

# Fields that follow a setting of ours.
OWN_SETTING = {
    "tensor_model_parallel_size": "engine.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "engine.pipeline_model_parallel_size",
    "context_parallel_size": "engine.context_parallel_size",
    "expert_model_parallel_size": "engine.expert_model_parallel_size",
    "expert_tensor_parallel_size": "engine.expert_tensor_parallel_size",
    "sequence_parallel": "engine.sequence_parallel",
    "params_dtype": "engine.dtype",
    "pipeline_dtype": "engine.dtype",
    "autocast_dtype": "engine.dtype",
    "bf16": "engine.dtype",
    "fp16": "engine.dtype",
    "use_cpu_initialization": "engine.device",
    "transformer_impl": "engine.transformer_impl",
    "recompute_granularity": "engine.recompute",
    "recompute_method": "engine.recompute",
    "recompute_num_layers": "engine.recompute",
    "recompute_modules": "engine.recompute",
}

# Fields that the program must set itself, by reason.
OURS = {
    "gradients are summed over ranks and divided by the global number of target tokens": ("calculate_per_token_loss",),
    "batches are packed, of varying length": ("variable_seq_lengths",),
    "training runs without dropout": ("attention_dropout", "hidden_dropout"),
    "the model's shape and functions are those of its config.json": (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization",
        "layernorm_epsilon", "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
        "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_router_pre_softmax", "window_size",
        "multi_latent_attention", "mtp_num_layers",
    ),
    "it is a function, which the program installs": (
        "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func",
        "init_method", "output_layer_init_method", "embedding_init_method", "moe_grad_scale_func", "mtp_grad_scale_func",
    ),
}

# Fields that fail, or lose something in silence, with Megatron-FSDP. The values are those that leave the feature off.
REFUSED = {
    "gradient_accumulation_fusion": ((False,), "with Megatron-FSDP it needs TransformerEngine 2.10, and may overwrite gradients"),
    "fp8": ((None,), "with fp8 weights load without a check of names, and its state is left out of DTensor checkpoints"),
    "fp8_param": ((False,), "it goes with fp8, which is not supported with Megatron-FSDP here"),
    "fp4": ((None,), "Megatron-FSDP has no code for it"),
    "fp4_param": ((False,), "Megatron-FSDP has no code for it"),
    "cuda_graph_impl": (("none",), "Megatron-FSDP needs further settings with CUDA graphs, which nothing here makes"),
    "enable_cuda_graph": ((False,), "Megatron-FSDP needs further settings with CUDA graphs, which nothing here makes"),
    "external_cuda_graph": ((False,), "Megatron-FSDP needs further settings with CUDA graphs, which nothing here makes"),
    "overlap_moe_expert_parallel_comm": ((False,), "it forbids what Megatron-FSDP does with its buffers"),
    "moe_single_grouped_weight": ((False,), "Megatron-LM refuses it with Megatron-FSDP"),
    "moe_single_grouped_bias": ((False,), "Megatron-LM refuses it with Megatron-FSDP"),
    "hybrid_context_parallel": ((False,), "Megatron-LM refuses it with Megatron-FSDP"),
    "virtual_pipeline_model_parallel_size": ((None,), "it needs pipeline stages, which Megatron-FSDP has not"),
    "delay_wgrad_compute": ((False,), "Megatron-FSDP never reads it"),
    "cpu_offloading": ((False,), "it has not been tried with Megatron-FSDP"),
}


def override_transformer_config(s, f) -> Iterator[Problem]:
    legal = transformer_config_fields(f.versions.get("megatron-core"))
    for name, value in s.engine.override_transformer_config.items():
        # verl's own default file writes recompute_granularity: null and the like, which says the same as recompute: none.
        no_recompute = name.startswith("recompute_") and value in (None, ["core_attn"]) and s.engine.recompute == "none"
        if not no_recompute:
            yield from _one(name, value, legal)


def _one(name: str, value, legal: dict[str, str]) -> Iterator[Problem]:
    key, found = f"{SECTION}.{name}", as_text(value)
    reason = next((why for why, names in OURS.items() if name in names), None)
    off = REFUSED.get(name, ((), ""))[0]
    if name in OWN_SETTING:
        yield Problem(key, found, f"this follows {OWN_SETTING[name]}", f"set {OWN_SETTING[name]} instead")
    elif reason is not None:
        yield Problem(key, found, f"the program sets this: {reason}", "leave it out")
    elif name in REFUSED:
        if not any(value == v and type(value) is type(v) for v in off):
            yield Problem(key, found, REFUSED[name][1], f"{key}={as_text(off[0])}, or leave it out")
    elif legal and name not in legal:
        near = nearest(name, list(legal))
        yield Problem(key, found, "Megatron's TransformerConfig has no such field", f"did you mean {near}?" if near else "leave it out")
    elif name == "attention_backend" and value not in ATTENTION_BACKENDS:
        yield Problem(key, found, "no such attention backend", f"write one of: {', '.join(ATTENTION_BACKENDS)}")
    elif legal and not _fits(value, legal[name]):
        yield Problem(key, found, f"it does not fit TransformerConfig.{name}: {legal[name]}", f"write {legal[name]}")


def _fits(value, annotation: str) -> bool:
    """Judges plain annotations only: bool, int, float and Literal, optional or not."""
    types = {"bool": bool, "int": int, "float": (int, float)}
    optional = annotation.startswith("Optional[")
    plain = annotation.removeprefix("Optional[").removesuffix("]") if optional else annotation
    if value is None and optional:
        return True
    if literal := re.fullmatch(r"Literal\[([^\[\]]*)\]", plain):
        return as_text(value) in [word.strip().strip("'\"") for word in literal[1].split(",")]
    return plain not in types or (isinstance(value, types[plain]) and (plain == "bool" or not isinstance(value, bool)))


@cache
def transformer_config_fields(version: str | None) -> dict[str, str]:
    """Field -> annotation of the installed TransformerConfig, parsed without importing it; empty when not installed."""
    import ast
    from importlib.metadata import PackageNotFoundError, distribution

    if version is None:
        return {}
    try:
        package = Path(str(distribution("megatron-core").locate_file("megatron/core")))
    except PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for file, name in (("model_parallel_config.py", "ModelParallelConfig"), ("transformer/transformer_config.py", "TransformerConfig")):
        if not (package / file).is_file():
            return {}
        tree = ast.parse((package / file).read_text(encoding="utf-8"))
        body = next((n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), [])
        found |= {n.target.id: ast.unparse(n.annotation) for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return found


RULES = (override_transformer_config,)
