"""Rules on engine.override_transformer_config: what may be set there, and what has a setting of its own. See `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mfsdp_cli.config.rulebook import OWN, rule
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

# Fields that fail, or lose something in silence, with Megatron-FSDP: rule -> (what it demands, source, why, {field: values that leave
# the feature off}).
FSDP = "megatron-core 0.19.2 distributed/fsdp/"
REFUSED_BY_RULE = {
    "grad-accum-fusion": (
        "gradient accumulation is not fused", FSDP + "mcore_fsdp_adapter.py:146-150, src/megatron_fsdp/megatron_fsdp.py:508-511; "
        "Megatron-Bridge PR 1386; Megatron-LM PR 3729",
        "with Megatron-FSDP it needs TransformerEngine 2.10, and may overwrite gradients", {"gradient_accumulation_fusion": (False,)}),
    "fp8": (
        "weights are not kept in fp8", FSDP + "mcore_fsdp_adapter.py:245-258; transformer/fsdp_dtensor_checkpoint.py:567-575",
        "with fp8 weights load without a check of names, and its state is left out of DTensor checkpoints",
        {"fp8": (None,), "fp8_param": (False,)}),
    "fp4": (
        "weights are not kept in fp4", FSDP + "src/megatron_fsdp (no code for it)", "Megatron-FSDP has no code for it",
        {"fp4": (None,), "fp4_param": (False,)}),
    "cuda-graphs": (
        "CUDA graphs are off", FSDP + "mcore_fsdp_adapter.py:173-178; Megatron-LM training/training.py:2003-2012",
        "Megatron-FSDP needs further settings with CUDA graphs, which nothing here makes",
        {"cuda_graph_impl": ("none",), "enable_cuda_graph": (False,), "external_cuda_graph": (False,)}),
    "ep-overlap": (
        "traffic of experts is not overlapped by Megatron's schedule", FSDP + "mcore_fsdp_adapter.py:168-196",
        "it forbids what Megatron-FSDP does with its buffers",
        {"overlap_moe_expert_parallel_comm": (False,), "overlap_dispatch_backward_with_experts_wgrad": (False,)}),
    "moe-grouped-single": (
        "experts have weights of their own", "Megatron-LM training/arguments.py:1115-1125", "Megatron-LM refuses it with Megatron-FSDP",
        {"moe_single_grouped_weight": (False,), "moe_single_grouped_bias": (False,)}),
    "dynamic-cp": (
        "context parallelism does not change with the batch", "Megatron-LM training/arguments.py:1407",
        "Megatron-LM refuses it with Megatron-FSDP", {"hybrid_context_parallel": (False,)}),
    "vpp-needs-pp": (
        "there are no virtual pipeline stages",
        "megatron-core 0.19.2 parallel_state.py:829; megatron-bridge 0.6.2 training/checkpointing.py:2083",
        "it needs pipeline stages, which Megatron-FSDP has not", {"virtual_pipeline_model_parallel_size": (None,)}),
    "ignored-ddp-fields": (
        "no field is set that Megatron-FSDP never reads", FSDP + "mcore_fsdp_adapter.py and src/megatron_fsdp (no use of it)",
        "Megatron-FSDP never reads it", {"delay_wgrad_compute": (False,)}),
    "activation-offload": (
        "activations stay on the GPU", OWN, "it has not been tried with Megatron-FSDP",
        {"cpu_offloading": (False,), "fine_grained_activation_offloading": (False,)}),
    "honest-routing": (
        "experts are chosen by the router, and no token is dropped", "megatron-core 0.19.2 transformer/moe/moe_utils.py",
        "it is for benchmarks, or drops tokens: the model would be another one",
        {"moe_router_force_load_balancing": (False,), "moe_router_force_biased": (None,), "moe_token_dropping": (False,),
         "moe_expert_capacity_factor": (None,)}),
}
REFUSED = {name: off for _, _, _, fields in REFUSED_BY_RULE.values() for name, off in fields.items()}


def _given(s) -> Iterator[tuple[str, object, str]]:
    """(field, value, dotted key). verl's own default file writes recompute_granularity: null and the like, which says the same as
    recompute: none and is passed over."""
    for name, value in s.engine.override_transformer_config.items():
        if not (name.startswith("recompute_") and value in (None, ["core_attn"]) and s.engine.recompute == "none"):
            yield name, value, f"{SECTION}.{name}"


def _legal(s, f) -> dict[str, str]:
    """Megatron's source is parsed only when there is something to look up: that takes a tenth of a second."""
    return transformer_config_fields(f.versions.get("megatron-core")) if s.engine.override_transformer_config else {}


def _reason(name: str) -> str | None:
    return next((why for why, names in OURS.items() if name in names), None)


@rule("override-own-setting", "what has a setting of its own is set there", OWN, fix="the setting that the message names")
def override_of_a_setting(s, f) -> Iterator[Problem]:
    for name, value, key in _given(s):
        if name in OWN_SETTING:
            yield Problem(key, as_text(value), f"this follows {OWN_SETTING[name]}", f"set {OWN_SETTING[name]} instead")


@rule("override-ours", "what the program must decide itself is left to it",
      "mfsdp; megatron-core 0.19.2 distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py:370-373 "
      "(per-token loss)", fix="leave the field out")
def override_of_ours(s, f) -> Iterator[Problem]:
    for name, value, key in _given(s):
        if reason := _reason(name):
            yield Problem(key, as_text(value), f"the program sets this: {reason}", "leave it out")


def _refuse(why: str, fields: dict[str, tuple]):
    def refused(s, f) -> Iterator[Problem]:
        for name, value, key in _given(s):
            off = fields.get(name)
            if off is not None and not any(value == v and type(value) is type(v) for v in off):
                yield Problem(key, as_text(value), why, f"{key}={as_text(off[0])}, or leave it out")
    return refused


for _id, (_demand, _source, _why, _fields) in REFUSED_BY_RULE.items():
    rule(_id, _demand, _source, fix=f"leave {', '.join(_fields)} out")(_refuse(_why, _fields))


@rule("override-known-field", "every field exists in the installed TransformerConfig",
      "megatron-core, transformer/transformer_config.py as installed", fix="the name that the message suggests")
def override_known(s, f) -> Iterator[Problem]:
    legal = _legal(s, f)
    for name, value, key in _given(s):
        if legal and name not in legal and not (name in OWN_SETTING or _reason(name) or name in REFUSED):
            near = nearest(name, list(legal))
            fix = f"did you mean {near}?" if near else "leave it out"
            yield Problem(key, as_text(value), "Megatron's TransformerConfig has no such field", fix)


@rule("override-fits", "every value fits its field", "megatron-core, transformer/transformer_config.py as installed",
      fix="a value of the field's type")
def override_fits(s, f) -> Iterator[Problem]:
    legal = _legal(s, f)
    for name, value, key in _given(s):
        if name in OWN_SETTING or _reason(name) or name in REFUSED:
            continue
        if name == "attention_backend" and value not in ATTENTION_BACKENDS:
            yield Problem(key, as_text(value), "no such attention backend", f"write one of: {', '.join(ATTENTION_BACKENDS)}")
        elif name != "attention_backend" and name in legal and not _fits(value, legal[name]):
            yield Problem(key, as_text(value), f"it does not fit TransformerConfig.{name}: {legal[name]}", f"write {legal[name]}")


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
