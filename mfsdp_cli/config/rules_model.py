"""Rules on the model's architecture, read from config.json; see `rules`.

What is allowed is what megatron-core 0.19.2 and megatron-bridge 0.6.2 do with such a model: what Bridge would silently
leave out (sliding windows, most RoPE scalings, biases) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from mfsdp_cli.config.rulebook import OWN, rule
from mfsdp_cli.config.values import as_text, nearest
from mfsdp_cli.errors import BAD_INPUT, Problem

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")
# What RotaryEmbedding._apply_scaling of megatron-core assumes; Bridge hands over only the factor.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OWN_CONFIG = "use the config.json that came with the weights"
OTHER_MODEL = "start from another model"
BRIDGE = "megatron-bridge 0.6.2 models/"


def experts_of(config: dict) -> int:
    """Experts of each layer; 0 in a dense model. transformers 5 writes num_local_experts."""
    named = (config.get("num_experts"), config.get("num_local_experts"))
    return next((n for n in named if type(n) is int and n > 0), 0)


def is_moe(config: dict) -> bool:
    return experts_of(config) > 0


def shape_of(config: dict | None) -> dict | None:
    """config.json with what Hugging Face fills in; None when it is missing or too broken to split."""
    if config is None or any(p.level == "error" for p in _shape_problems(config)):
        return None
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return config | {"num_key_value_heads": groups, "head_dim": head_dim, "num_experts": experts_of(config)}


def _model_problem(name: str, found, why: str, fix: str, level: str = "error") -> Problem:
    return Problem("model.path", f"{name}: {as_text(found)}", why, fix, code=BAD_INPUT, level=level)


def _shape_problems(config: dict) -> Iterator[Problem]:
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    names.append("moe_intermediate_size" if is_moe(config) else "intermediate_size")
    names += ["head_dim"] if config.get("head_dim") is not None else []
    for name in names:
        if type(config.get(name)) is not int or not 1 <= config[name] < 2**31:
            yield _model_problem(
                name, config.get(name), "config.json must hold a positive integer below 2^31 here", OWN_CONFIG,
            )
            return
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    groups = heads if groups is None else groups
    if type(groups) is not int or groups < 1 or heads % groups:
        yield _model_problem(
            "num_key_value_heads", groups, f"it must be positive and divide the {heads} attention heads",
            OWN_CONFIG,
        )
    elif not config.get("head_dim") and config["hidden_size"] % heads:
        yield _model_problem(
            "hidden_size", config["hidden_size"], f"it is no multiple of the {heads} attention heads, and head_dim is not given",
            OWN_CONFIG,
        )


# --- the model ------------------------------------------------------------------------------------------------------


def architecture_of(config: dict):
    """The first of the architectures that config.json names; None when it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else None


def _known(f) -> dict | None:
    """config.json of an architecture that is supported."""
    return f.model_config if f.model_config is not None and architecture_of(f.model_config) in ARCHITECTURES else None


@rule("architecture", f"the model is one of {', '.join(ARCHITECTURES)}",
      "megatron-bridge 0.6.2 models/conversion/auto_bridge.py:1970 (no Mixtral); tried here with Megatron-FSDP", fix="another model")
def architecture(s, f) -> Iterator[Problem]:
    if f.model_config is not None and _known(f) is None:
        named = architecture_of(f.model_config)
        near = nearest(str(named), list(ARCHITECTURES))
        fix = f"supported: {', '.join(ARCHITECTURES)}" + (f"; nearest: {near}" if named and near else "")
        yield _model_problem("architectures", named, "this architecture has not been tried with Megatron-FSDP here", fix)


@rule("config-shape", "config.json has positive sizes that fit each other", "Megatron-LM issue 5755 (heads not divisible by groups)",
      fix=OWN_CONFIG)
def config_shape(s, f) -> Iterator[Problem]:
    if (c := _known(f)) is not None:
        yield from _shape_problems(c)


@rule("no-sliding-window", "every layer sees the whole sequence", BRIDGE + "qwen/qwen2_bridge.py (drops the window)",
      seen_in="megatron-bridge", fix=OTHER_MODEL)
def sliding_window(s, f) -> Iterator[Problem]:
    c = _known(f) or {}
    if c.get("use_sliding_window") or "sliding_attention" in as_text(c.get("layer_types")):
        name = "use_sliding_window" if c.get("use_sliding_window") else "layer_types"
        yield _model_problem(name, c[name], "Megatron-Bridge 0.6.2 drops sliding windows: all layers would see everything", OTHER_MODEL)


@rule("no-lost-biases", "attention and MLP have no biases that Bridge has no place for", BRIDGE + "llama/llama_bridge.py",
      seen_in="megatron-bridge", fix=OTHER_MODEL)
def biases(s, f) -> Iterator[Problem]:
    for name in ("attention_bias", "mlp_bias"):
        if (_known(f) or {}).get(name):
            yield _model_problem(name, True, "Megatron-Bridge 0.6.2 has no place for these biases, so they would be lost", OTHER_MODEL)


@rule("silu-gate", "the MLP's gate is SiLU", "megatron-core 0.19.2 transformer/fsdp_dtensor_checkpoint.py:194-388; "
      "megatron-bridge 0.6.2 training/checkpointing.py:2086-2090", fix=OTHER_MODEL)
def gate(s, f) -> Iterator[Problem]:
    """The first matrix of a gated MLP is stored in two halves, so that a checkpoint can be read back on another number of ranks;
    the code does so for SiLU only."""
    act = (_known(f) or {}).get("hidden_act", "silu")
    if act != "silu":
        yield _model_problem("hidden_act", act, "only SiLU gates are split rightly in a DTensor checkpoint", OTHER_MODEL)


@rule("not-quantized", "the weights are not quantized", OWN, fix="the bfloat16 weights of the model")
def quantized(s, f) -> Iterator[Problem]:
    if quantization := (_known(f) or {}).get("quantization_config"):
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        yield _model_problem(
            "quantization_config", method, "quantized weights cannot be trained here", "start from the bfloat16 weights of the model",
        )


@rule("dropout-off", "the model has no dropout",
      "megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py:471-482 (masks would repeat over TP)", level="note",
      fix="nothing to do: training runs without")
def dropout(s, f) -> Iterator[Problem]:
    rate = (_known(f) or {}).get("attention_dropout")
    if rate:
        yield _model_problem("attention_dropout", rate, "training runs without dropout", "nothing to do", level="note")


def _rope(c: dict) -> dict:
    """transformers 4 writes rope_scaling, transformers 5 rope_parameters."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    return rope if isinstance(rope, dict) else {}


def _rope_kind(c: dict):
    """None where each layer type has a rope of its own."""
    rope = _rope(c)
    return None if any(isinstance(v, dict) for v in rope.values()) else rope.get("rope_type") or rope.get("type") or "default"


@rule("rope-whole-head", "the rotary embedding turns the whole head", BRIDGE + "conversion/model_bridge.py", seen_in="megatron-bridge",
      fix=OTHER_MODEL)
def rope_partial(s, f) -> Iterator[Problem]:
    c = _known(f) or {}
    partial = _rope(c).get("partial_rotary_factor", c.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        yield _model_problem(
            "partial_rotary_factor", partial, "Megatron-Bridge 0.6.2 would rotate the whole head", OTHER_MODEL,
        )


@rule("rope-one", "all layers have one rotary embedding", BRIDGE + "conversion/model_bridge.py", seen_in="megatron-bridge", fix=OTHER_MODEL)
def rope_per_layer(s, f) -> Iterator[Problem]:
    if _known(f) is not None and _rope_kind(f.model_config) is None:
        yield _model_problem(
            "rope_parameters", "one for each layer type", "Megatron-Bridge 0.6.2 knows one for all layers", OTHER_MODEL,
        )


@rule("rope-scaling", "the scaling of the rotary embedding is one that Bridge hands over",
      BRIDGE + "llama/llama_bridge.py, models/qwen/qwen2_bridge.py",
      seen_in="megatron-bridge", fix="take the scaling out of config.json when conversations fit the original length")
def rope_scaling(s, f) -> Iterator[Problem]:
    """Of Qwen none (YaRN is dropped), of Llama linear and llama3."""
    c = _known(f)
    kind = None if c is None else _rope_kind(c)
    allowed = ("default", "linear", "llama3") if c is not None and c["architectures"][0] == "LlamaForCausalLM" else ("default",)
    if kind is not None and kind not in allowed:
        why = "Megatron-Bridge 0.6.2 drops this RoPE scaling for this architecture, or nobody has checked it here"
        fix = f"supported: {', '.join(allowed)}. Take the scaling out of config.json when conversations fit the original length"
        yield _model_problem("rope_scaling.rope_type", kind, why, fix)


@rule("rope-llama3-numbers", "llama3 scaling has the numbers that megatron-core assumes",
      "megatron-core 0.19.2 models/common/embeddings/rotary_pos_embedding.py _apply_scaling", seen_in="megatron-core", fix=OTHER_MODEL)
def rope_llama3(s, f) -> Iterator[Problem]:
    c = _known(f)
    if c is None or c["architectures"][0] != "LlamaForCausalLM" or _rope_kind(c) != "llama3":
        return
    for name, assumed in LLAMA3_ROPE.items():
        if _rope(c).get(name, assumed) != assumed:
            why = f"megatron-core 0.19.2 assumes {as_text(assumed)}, and Megatron-Bridge hands over only the factor"
            yield _model_problem(f"rope_scaling.{name}", _rope(c)[name], why, OTHER_MODEL)


def _moe(f) -> dict | None:
    c = _known(f)
    return c if c is not None and c["architectures"][0] == "Qwen3MoeForCausalLM" else None


@rule("moe-every-layer", "every layer of a mixture of experts is one", BRIDGE + "qwen/qwen3_moe_bridge.py", seen_in="megatron-bridge",
      fix=OTHER_MODEL)
def moe_every_layer(s, f) -> Iterator[Problem]:
    c = _moe(f) or {}
    if c.get("decoder_sparse_step", 1) != 1 or c.get("mlp_only_layers"):
        name = "mlp_only_layers" if c.get("mlp_only_layers") else "decoder_sparse_step"
        yield _model_problem(name, c[name], "Megatron-Bridge 0.6.2 makes every layer a mixture of experts", OTHER_MODEL)


@rule("moe-chosen-experts", "there are at least as many experts as a token goes to", "the model's config.json", fix=OWN_CONFIG)
def moe_chosen(s, f) -> Iterator[Problem]:
    c = _moe(f)
    if c is None:
        return
    experts, chosen = experts_of(c), c.get("num_experts_per_tok")
    if not experts or type(chosen) is not int or not 0 < chosen <= experts:
        yield _model_problem(
            "num_experts", experts, f"there must be at least num_experts_per_tok = {as_text(chosen)} experts",
            OWN_CONFIG,
        )
