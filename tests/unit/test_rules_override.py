import pytest
from facts_for_tests import VERSIONS, make_facts, only, passes, problems

from mfsdp_cli.config.rules_override import OURS, OWN_SETTING, REFUSED, transformer_config_fields

FIELDS = transformer_config_fields(VERSIONS["megatron-core"])
needs_megatron = pytest.mark.skipif(not FIELDS, reason="megatron-core is not installed, so its field names are unknown")


@pytest.mark.parametrize("name, value, fix", [
    ("tensor_model_parallel_size", 2, "engine.tensor_model_parallel_size"), ("params_dtype", "bf16", "engine.dtype"),
    ("bf16", True, "engine.dtype"),
    ("sequence_parallel", True, "engine.sequence_parallel"), ("recompute_granularity", "full", "engine.recompute"),
    ("recompute_num_layers", 1, "engine.recompute"), ("calculate_per_token_loss", True, "leave it out"), ("num_layers", 2, "leave it out"),
    ("attention_dropout", 0.1, "leave it out"), ("no_sync_func", "x", "leave it out"), ("fp8", "e4m3", "null"),
    ("cuda_graph_impl", "local", "cuda_graph_impl=none"), ("overlap_moe_expert_parallel_comm", True, "False"),
    ("moe_single_grouped_weight", True, "False"), ("gradient_accumulation_fusion", None, "False"),
])
def test_overrides_refused(name, value, fix):
    problem = only(engine__override_transformer_config={name: value})
    assert problem.key == f"engine.override_transformer_config.{name}" and fix in problem.fix


@pytest.mark.parametrize("override", [
    {"attention_backend": "flash"}, {"recompute_granularity": None, "recompute_modules": ["core_attn"], "recompute_method": None},
    {"fp8": None, "cuda_graph_impl": "none", "overlap_moe_expert_parallel_comm": False}, {"moe_aux_loss_coeff": 1},
    {"qk_layernorm_x": 1} if not FIELDS else {},
])
def test_overrides_accepted(override):
    assert passes(engine__override_transformer_config=override)


@needs_megatron
def test_override_names_are_megatrons():
    assert FIELDS["num_layers"] == "int" and FIELDS["sequence_parallel"] == "bool" and len(FIELDS) > 200
    problem = only(engine__override_transformer_config={"attention_softmax_in_fp23": True})
    assert problem.fix == "did you mean attention_softmax_in_fp32?"
    assert "attention_softmax_in_fp32: bool" in only(engine__override_transformer_config={"attention_softmax_in_fp32": 1}).why
    assert "Literal" in only(engine__override_transformer_config={"kitchen_attention_backend": "sdpaa"}).why
    assert passes(engine__override_transformer_config={"kitchen_attention_backend": "fa"})
    assert passes(engine__override_transformer_config={"attention_softmax_in_fp32": True})


@needs_megatron
def test_the_names_that_we_refuse_exist():
    named = set(OWN_SETTING) | {n for names in OURS.values() for n in names} | set(REFUSED)
    assert named <= set(FIELDS), named - set(FIELDS)


def test_verls_null_recompute_would_switch_ours_off():
    override = {"recompute_granularity": None, "recompute_modules": ["core_attn"]}
    assert passes(engine__override_transformer_config=override)
    assert len(problems(engine__override_transformer_config=override, engine__recompute="full")) == 2


def test_attention_backend():
    assert "flash, fused" in only(engine__override_transformer_config={"attention_backend": "fast"}).fix


def test_without_megatron_names_are_not_judged():
    facts = make_facts(versions=VERSIONS | {"megatron-core": None})
    assert [p.key for p in problems(facts, engine__override_transformer_config={"nonsense": 1})] == ["megatron-core"]
