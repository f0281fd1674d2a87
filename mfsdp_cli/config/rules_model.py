"""Rules on the model's architecture and on how it is split. Read from config.json; see `rules`.

What is allowed is what megatron-core 0.19.2 and megatron-bridge 0.6.2 do with such a model: what Bridge would silently
leave out (sliding windows, most RoPE scalings, biases) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from mfsdp_cli.config.values import as_text, nearest
from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, Problem

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")
# What RotaryEmbedding._apply_scaling of megatron-core assumes; Bridge hands over only the factor.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OWN_CONFIG = "use the config.json that came with the weights"
OTHER_MODEL = "start from another model"


def world_size(s) -> int:
    return s.trainer.nnodes * s.trainer.n_gpus_per_node


def data_parallel(s) -> int | None:
    """Data-parallel ranks, or None when the ranks do not divide."""
    split = s.engine.tensor_model_parallel_size * s.engine.context_parallel_size
    return world_size(s) // split if world_size(s) % split == 0 else None


def uses_cuda(s, f) -> bool:
    return s.engine.device == "cuda" or (s.engine.device == "auto" and f.num_gpus > 0)


def is_moe(config: dict) -> bool:
    return bool(config.get("num_experts"))


def tp_problem(config: dict, tp: int) -> tuple[str, str] | None:
    """(what, why) when megatron-core 0.19.2 cannot split this model over `tp` ranks.

    transformer_config.py:1323-1346: heads must be a multiple of TP, KV groups a multiple or a divisor of it.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % tp:
        return "num_attention_heads", f"{heads} attention heads cannot be split over TP {tp}: {heads} mod {tp} = {heads % tp}"
    if groups % tp and tp % groups:
        return "num_key_value_heads", f"{groups} key-value heads are neither a multiple nor a divisor of TP {tp}"
    if (heads + 2 * groups) * config["head_dim"] % tp:
        return "head_dim", f"the joint QKV projection of ({heads} + 2 x {groups}) x {config['head_dim']} rows cannot be split over TP {tp}"
    if not is_moe(config) and config["intermediate_size"] % tp:
        size = config["intermediate_size"]
        return "intermediate_size", f"an MLP of {size} columns cannot be split over TP {tp}: {size} mod {tp} = {size % tp}"
    return None


def workable_tp(s, config: dict | None) -> list[int]:
    """TP sizes that fit the ranks and, when it is known, the model."""
    whole = world_size(s) // s.engine.context_parallel_size if world_size(s) % s.engine.context_parallel_size == 0 else 0
    return [tp for tp in range(1, whole + 1) if whole % tp == 0 and (config is None or tp_problem(config, tp) is None)]


def shape_of(config: dict | None) -> dict | None:
    """config.json with what Hugging Face fills in; None when it is missing or too broken to split."""
    if config is None or any(p.level == "error" for p in _shape_problems(config)):
        return None
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return config | {"num_key_value_heads": groups, "head_dim": config.get("head_dim") or config["hidden_size"] // heads}


def _model_problem(name: str, found, why: str, fix: str, level: str = "error") -> Problem:
    return Problem("model.path", f"{name}: {as_text(found)}", why, fix, code=BAD_INPUT, level=level)


def _shape_problems(config: dict) -> Iterator[Problem]:
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    names.append("moe_intermediate_size" if is_moe(config) else "intermediate_size")
    for name in names:
        if type(config.get(name)) is not int or config[name] < 1:
            yield _model_problem(
                name, config.get(name), "config.json must hold a positive integer here", OWN_CONFIG,
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


def architecture(s, f) -> Iterator[Problem]:
    if f.model_config is None:
        return
    named = (f.model_config.get("architectures") or [None])[0]
    if named not in ARCHITECTURES:
        near = nearest(str(named), list(ARCHITECTURES))
        fix = f"supported: {', '.join(ARCHITECTURES)}" + (f"; nearest: {near}" if named and near else "")
        yield _model_problem("architectures", named, "this architecture has not been tried with Megatron-FSDP here", fix)
        return
    yield from _shape_problems(f.model_config)


def features(s, f) -> Iterator[Problem]:
    """Parts of a configuration that Bridge's qwen and llama bridges drop without a word."""
    c = f.model_config
    if c is None or (c.get("architectures") or [None])[0] not in ARCHITECTURES:
        return
    if c.get("use_sliding_window") or "sliding_attention" in (c.get("layer_types") or []):
        name = "use_sliding_window" if c.get("use_sliding_window") else "layer_types"
        yield _model_problem(name, c[name], "Megatron-Bridge 0.6.2 drops sliding windows: all layers would see everything", OTHER_MODEL)
    for name in ("attention_bias", "mlp_bias"):
        if c.get(name):
            yield _model_problem(name, True, "Megatron-Bridge 0.6.2 has no place for these biases, so they would be lost", OTHER_MODEL)
    if c.get("hidden_act", "silu") != "silu":
        yield _model_problem("hidden_act", c["hidden_act"], "only SiLU gates are split rightly in a DTensor checkpoint", OTHER_MODEL)
    if c.get("quantization_config"):
        method = (c["quantization_config"] or {}).get("quant_method", "?")
        yield _model_problem(
            "quantization_config", method, "quantized weights cannot be trained here", "start from the bfloat16 weights of the model",
        )
    if c.get("attention_dropout"):
        yield _model_problem("attention_dropout", c["attention_dropout"], "training runs without dropout", "nothing to do", level="note")
    yield from _rope(c)
    yield from _experts(c)


def _rope(c: dict) -> Iterator[Problem]:
    """transformers 4 writes rope_scaling, transformers 5 rope_parameters."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    llama = c["architectures"][0] == "LlamaForCausalLM"
    partial = rope.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        yield _model_problem(
            "partial_rotary_factor", partial, "Megatron-Bridge 0.6.2 would rotate the whole head", OTHER_MODEL,
        )
    if any(isinstance(v, dict) for v in rope.values()):
        yield _model_problem(
            "rope_parameters", "one for each layer type", "Megatron-Bridge 0.6.2 knows one for all layers", OTHER_MODEL,
        )
    elif kind not in (("default", "linear", "llama3") if llama else ("default",)):
        why = "Megatron-Bridge 0.6.2 drops this RoPE scaling for this architecture, or nobody has checked it here"
        known = "default, linear, llama3" if llama else "default"
        fix = f"supported: {known}. Take the scaling out of config.json when conversations fit the original length"
        yield _model_problem("rope_scaling.rope_type", kind, why, fix)
    elif kind == "llama3":
        for name, assumed in LLAMA3_ROPE.items():
            if rope.get(name, assumed) != assumed:
                why = f"megatron-core 0.19.2 assumes {as_text(assumed)}, and Megatron-Bridge hands over only the factor"
                yield _model_problem(f"rope_scaling.{name}", rope[name], why, OTHER_MODEL)


def _experts(c: dict) -> Iterator[Problem]:
    if c["architectures"][0] != "Qwen3MoeForCausalLM":
        return
    if c.get("decoder_sparse_step", 1) != 1 or c.get("mlp_only_layers"):
        name = "mlp_only_layers" if c.get("mlp_only_layers") else "decoder_sparse_step"
        yield _model_problem(name, c[name], "Megatron-Bridge 0.6.2 makes every layer a mixture of experts", OTHER_MODEL)
    experts, chosen = c.get("num_experts"), c.get("num_experts_per_tok")
    if not experts or not chosen or chosen > experts:
        yield _model_problem(
            "num_experts", experts, f"there must be at least num_experts_per_tok = {as_text(chosen)} experts",
            OWN_CONFIG,
        )


# --- how it is split ------------------------------------------------------------------------------------------------


def pipeline(s, f) -> Iterator[Problem]:
    size = s.engine.pipeline_model_parallel_size
    if size > 1:
        why = "the device mesh of Megatron-FSDP in megatron-core 0.19.2 has no pipeline axis: world = DP x CP x TP"
        yield Problem(
            "engine.pipeline_model_parallel_size", str(size), why,
            "engine.pipeline_model_parallel_size=1, with more TP or more data-parallel ranks",
        )


def world_divides(s, f) -> Iterator[Problem]:
    e, world = s.engine, world_size(s)
    ranks = f"{s.trainer.nnodes} nodes x {s.trainer.n_gpus_per_node} = {world} ranks" if s.trainer.nnodes > 1 else f"{world} ranks"
    tp, cp = e.tensor_model_parallel_size, e.context_parallel_size
    if world % (tp * cp):
        works = workable_tp(s, shape_of(f.model_config))
        fix = f"TP values that work with {ranks}" + (f" and CP {cp}" if cp > 1 else "") + f": {', '.join(map(str, works)) or 'none'}"
        key = "engine.context_parallel_size" if tp == 1 else "engine.tensor_model_parallel_size"
        yield Problem(
            key, str(cp if tp == 1 else tp), f"{ranks} cannot be split: {world} mod (TP {tp} x CP {cp} = {tp * cp}) = {world % (tp * cp)}",
            fix,
        )
    ep = e.expert_model_parallel_size * e.expert_tensor_parallel_size
    if world % ep:
        split = f"EP {e.expert_model_parallel_size} x ETP {e.expert_tensor_parallel_size} = {ep}"
        why = f"{ranks} cannot be split: {world} mod ({split}) = {world % ep}"
        fits = [str(n) for n in range(1, world + 1) if world % n == 0]
        yield Problem(
            "engine.expert_model_parallel_size", str(e.expert_model_parallel_size), why, f"EP values that divide: {', '.join(fits)}",
        )


def tensor_parallel(s, f) -> Iterator[Problem]:
    config, tp = shape_of(f.model_config), s.engine.tensor_model_parallel_size
    if config is None:
        return
    wrong = tp_problem(config, tp)
    if wrong:
        works = ", ".join(map(str, workable_tp(s, config))) or "none with this number of ranks"
        yield Problem(
            "engine.tensor_model_parallel_size", str(tp), f"{wrong[1]} ({wrong[0]} in config.json)", f"TP values that work: {works}",
        )
    elif config["vocab_size"] % tp:
        why = f"the vocabulary of {config['vocab_size']} is padded to be split over TP {tp}; exports are trimmed again"
        yield Problem("engine.tensor_model_parallel_size", str(tp), why, "nothing to do", level="note")


def sequence_parallel(s, f) -> Iterator[Problem]:
    e = s.engine
    if e.sequence_parallel and e.tensor_model_parallel_size == 1:
        yield Problem(
            "engine.sequence_parallel", "True", "it splits activations over the tensor-parallel ranks, and TP is 1",
            "leave it out (null: on when TP > 1), or set a TP above 1",
        )
    if e.sequence_parallel is False and e.tensor_model_parallel_size > 1 and f.model_config and is_moe(f.model_config):
        yield Problem(
            "engine.sequence_parallel", "False", "megatron-core trains experts with TP > 1 only with sequence parallelism",
            "leave it out (null: on when TP > 1)",
        )


def expert_parallel(s, f) -> Iterator[Problem]:
    ep, etp = s.engine.expert_model_parallel_size, s.engine.expert_tensor_parallel_size
    if etp > 1:
        why = "split experts have not been tried with Megatron-FSDP, which may leave them out of the gradient norm on some ranks"
        yield Problem("engine.expert_tensor_parallel_size", str(etp), why, "engine.expert_tensor_parallel_size=1")
    if ep == 1 or f.model_config is None:
        return
    experts = f.model_config.get("num_experts")
    if not experts:
        yield Problem(
            "engine.expert_model_parallel_size", str(ep), "the model has no experts to split", "engine.expert_model_parallel_size=1",
        )
    elif experts % ep:
        fits = [str(n) for n in range(1, world_size(s) + 1) if world_size(s) % n == 0 and experts % n == 0]
        yield Problem(
            "engine.expert_model_parallel_size", str(ep),
            f"{experts} experts cannot be split over EP {ep}: {experts} mod {ep} = {experts % ep}",
            f"EP values that work: {', '.join(fits)}",
        )


def transformer_engine(s, f) -> Iterator[Problem]:
    e, installed = s.engine, f.versions.get("transformer-engine") is not None
    wants = [("transformer_impl", "transformer_engine")] if e.transformer_impl == "transformer_engine" else []
    if e.context_parallel_size > 1:
        wants.append(("context_parallel_size", str(e.context_parallel_size)))
        if e.transformer_impl == "local":
            why = "attention across context-parallel ranks exists only in TransformerEngine's layers"
            yield Problem("engine.transformer_impl", "local", why, "engine.transformer_impl=auto, or engine.context_parallel_size=1")
    for name, value in wants:
        key = f"engine.{name}"
        fix = f"{key}=1, with more TP" if name == "context_parallel_size" else f"{key}=auto"
        if not uses_cuda(s, f):
            yield Problem(key, value, "TransformerEngine runs on GPUs only, and this run is on CPU", fix, code=MACHINE_UNFIT)
        elif not installed:
            yield Problem(
                key, value, "TransformerEngine is not installed", f"pip install 'transformer-engine[pytorch]', or {fix}",
                code=MACHINE_UNFIT,
            )
        elif name == "context_parallel_size" and e.transformer_impl != "local":
            why = "packed sequences are not split over context-parallel ranks yet: each of them would compute the whole batch"
            yield Problem(key, value, why, fix)


RULES = (
    architecture, features, pipeline, world_divides, tensor_parallel, sequence_parallel, expert_parallel, transformer_engine,
)
