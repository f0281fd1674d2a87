import random

import pytest
from facts_for_tests import LLAMA, QWEN2, QWEN3_MOE, VERSIONS, make_facts, make_settings, only, passes, problems
from grpo_for_tests import grpo_facts, grpo_settings

from mfsdp_cli.config.rules import check
from mfsdp_cli.config.rules_model import ARCHITECTURES, shape_of
from mfsdp_cli.config.rules_parallel import tp_problem, workable_tp
from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT


def test_pipeline():
    assert "no pipeline axis" in only(engine__pipeline_model_parallel_size=2).why


def test_world_divides():
    problem = only(engine__tensor_model_parallel_size=4, trainer__n_gpus_per_node=6)
    assert "6 mod (TP 4 x CP 1 = 4) = 2" in problem.why and problem.fix.endswith(": 1, 2")
    assert passes(trainer__n_gpus_per_node=4)
    assert "2 nodes x 3 = 6 ranks" in only(trainer__n_gpus_per_node=3, trainer__nnodes=2, trainer__rdzv_endpoint="a:1").why
    te = make_facts(versions=VERSIONS | {"transformer-engine": "2.8.0"})
    found = problems(te, engine__tensor_model_parallel_size=1, engine__context_parallel_size=3)
    assert {p.key for p in found} == {"engine.context_parallel_size"} and len(found) == 2  # it is not offered either
    assert any("8 mod (TP 1 x CP 3 = 3) = 2" in p.why for p in found)


def test_attention_heads_over_tp():
    # 28 heads, 4 groups: TP 8 leaves 28 mod 8 = 4.
    problem = only(engine__tensor_model_parallel_size=8)
    assert "28 mod 8 = 4" in problem.why and problem.fix == "TP values that work: 1, 2, 4"


def test_key_value_groups_may_be_fewer_than_tp():
    """megatron-core 0.19.2 wants a multiple or a divisor, so 2 groups go over TP 4, and 3 do not."""
    config = QWEN2 | {"num_attention_heads": 24, "hidden_size": 3072}
    assert passes(make_facts(model_config=config | {"num_key_value_heads": 2}))
    assert passes(make_facts(model_config=config | {"num_key_value_heads": 8}))
    three = make_facts(model_config=config | {"num_key_value_heads": 3})
    assert "3 key-value heads are neither a multiple nor a divisor of TP 4" in only(three).why


def test_other_sizes_over_tp():
    # 18946 = 2 x 9473.
    assert "18946 mod 4 = 2" in only(make_facts(model_config=QWEN2 | {"intermediate_size": 18946})).why
    # 4 heads and 1 group of 3 rows: (4 + 2) x 3 = 18 rows, which TP 4 cannot share.
    odd = QWEN2 | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 3}
    assert "(4 + 2 x 1) x 3 rows" in only(make_facts(model_config=odd)).why
    assert "padded" in only(make_facts(model_config=QWEN2 | {"vocab_size": 152065}), level="note", rule="vocab-divisible").why


def test_joint_qkv_rows():
    # 12 heads and 4 groups go over TP 12 by themselves, but Megatron's one QKV matrix of (12 + 8) x 64 = 1280 rows does not.
    config = shape_of(QWEN2 | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 144})
    assert tp_problem(config, 12)[0] == "head_dim" and tp_problem(config, 4) is None


def test_workable_tp_is_exactly_what_the_rule_accepts():
    rng = random.Random(3)
    for _ in range(200):
        heads = rng.choice([2, 4, 6, 8, 12, 14, 16, 28, 32])
        groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
        config = shape_of(QWEN2 | {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 64,
            "intermediate_size": rng.randint(1, 64) * 8})
        settings = make_settings(trainer__n_gpus_per_node=rng.choice([1, 2, 4, 6, 8, 12, 16]))
        world = settings.trainer.n_gpus_per_node
        expected = [
            tp for tp in range(1, world + 1)
            if world % tp == 0 and heads % tp == 0 and (groups % tp == 0 or tp % groups == 0) and config["intermediate_size"] % tp == 0
            and (heads + 2 * groups) * 64 % tp == 0
        ]
        assert workable_tp(settings, config) == expected
        assert all(tp_problem(config, tp) is None for tp in expected)


@pytest.mark.parametrize("change, name", [
    ({"num_key_value_heads": 0}, "num_key_value_heads"), ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ({"num_attention_heads": None}, "num_attention_heads"),
    ({"hidden_size": "3584"}, "hidden_size"), ({"hidden_size": 3585}, "hidden_size"), ({"intermediate_size": 0}, "intermediate_size"),
])
def test_insane_shapes(change, name):
    problem = only(make_facts(model_config=QWEN2 | change))
    assert problem.found.startswith(name) and problem.code == BAD_INPUT


def test_groups_default_to_heads():
    config = {k: v for k, v in QWEN2.items() if k != "num_key_value_heads"}
    assert shape_of(config)["num_key_value_heads"] == 28 and shape_of(config)["head_dim"] == 128
    assert passes(make_facts(model_config=config))


def test_architectures():
    problem = only(make_facts(model_config=QWEN2 | {"architectures": ["MixtralForCausalLM"]}))
    assert problem.found == "architectures: MixtralForCausalLM" and all(name in problem.fix for name in ARCHITECTURES)
    assert only(make_facts(model_config={})).code == BAD_INPUT
    assert passes(make_facts(model_config=dict(LLAMA)))
    assert passes(make_facts(model_config=QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}))
    assert passes(make_facts(model_config=dict(QWEN3_MOE)))


@pytest.mark.parametrize("config, change", [
    (QWEN2, {"use_sliding_window": True}),
    (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}),
    (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    (QWEN2, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    (QWEN2, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    (QWEN2, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    (QWEN2, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    (QWEN2, {"hidden_act": "gelu"}),
    (QWEN2, {"quantization_config": {"quant_method": "awq"}}),
    (LLAMA, {"attention_bias": True}),
    (LLAMA, {"mlp_bias": True}),
    (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"original_max_position_embeddings": 4096}}),
    (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": 2.0}}),
    (QWEN3_MOE, {"decoder_sparse_step": 2}),
    (QWEN3_MOE, {"mlp_only_layers": [0]}),
    (QWEN3_MOE, {"num_experts_per_tok": 129}),
])
def test_features_that_bridge_would_drop_are_refused(config, change):
    problem = only(make_facts(model_config=config | change))
    assert problem.key == "model.path" and problem.code == BAD_INPUT


@pytest.mark.parametrize("config, change", [
    (QWEN2, {"rope_scaling": None}),
    (QWEN2, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    (QWEN2, {"layer_types": ["full_attention"] * 28}),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"factor": 32.0}}),
    (LLAMA, {"rope_scaling": None, "rope_parameters": LLAMA["rope_scaling"] | {"rope_theta": 5e5}}),
    (LLAMA, {"attention_bias": False, "mlp_bias": False}),
])
def test_features_that_bridge_carries(config, change):
    assert passes(make_facts(model_config=config | change))


def test_dropout_is_noted():
    facts = make_facts(model_config=QWEN2 | {"attention_dropout": 0.1})
    assert only(facts, level="note", rule="dropout-off").found == "attention_dropout: 0.1"


def test_sequence_parallel():
    assert passes(engine__sequence_parallel=True)
    assert only(engine__sequence_parallel=True, engine__tensor_model_parallel_size=1).key == "engine.sequence_parallel"
    assert passes(engine__sequence_parallel=False)
    moe = make_facts(model_config=dict(QWEN3_MOE))
    assert only(moe, engine__sequence_parallel=False).key == "engine.sequence_parallel"
    assert passes(moe, engine__sequence_parallel=False, engine__tensor_model_parallel_size=1)


def test_expert_parallel():
    moe = make_facts(model_config=dict(QWEN3_MOE))
    assert passes(moe, engine__expert_model_parallel_size=8)
    assert "no experts" in only(engine__expert_model_parallel_size=2).why
    assert "8 mod (EP 3 x ETP 1 = 3) = 2" in problems(moe, engine__expert_model_parallel_size=3)[0].why
    six = make_facts(model_config=QWEN3_MOE | {"num_experts": 12})
    problem = only(six, engine__expert_model_parallel_size=8)
    assert "12 mod 8 = 4" in problem.why and problem.fix.endswith(": 1, 2, 4")
    assert only(moe, engine__expert_tensor_parallel_size=2).key == "engine.expert_tensor_parallel_size"
    # A dense MLP of a mixture of experts does not exist, so its size need not divide.
    assert passes(make_facts(model_config=QWEN3_MOE | {"intermediate_size": 6145}))


def test_context_parallel_is_refused_with_or_without_transformer_engine():
    """Nobody is told to install something that would not help."""
    te, cp = VERSIONS | {"transformer-engine": "2.8.0"}, {"engine__context_parallel_size": 2}
    assert passes(make_facts(versions=te), engine__context_parallel_size=1)
    for facts in (make_facts(), make_facts(versions=te)):
        problem = only(facts, **cp)
        assert "not split over context-parallel ranks yet" in problem.why and "install" not in problem.fix
    found = problems(make_facts(versions=te), engine__transformer_impl="local", **cp)
    assert {p.key for p in found} == {"engine.context_parallel_size", "engine.transformer_impl"}


def test_transformer_impl():
    assert passes(engine__transformer_impl="local")
    assert only(engine__transformer_impl="transformer_engine").code == MACHINE_UNFIT
    assert passes(make_facts(versions=VERSIONS | {"transformer-engine": "2.8.0"}), engine__transformer_impl="transformer_engine")


def test_without_a_config_nothing_is_said_about_shapes():
    facts = make_facts(model_path=None, model_config=None, model_weight_files=(), has_tokenizer=False)
    found = [p for p in check(make_settings(engine__tensor_model_parallel_size=8), {}, facts) if p.rule != "max-connections-tp-cp"]
    assert [(p.key, p.level) for p in found] == [("model.path", "note")] and "downloaded" in found[0].why


JUNK = (None, 0, -1, 1, 3, 2.5, "x", "", True, [], [1], ["a"], {}, {"a": 1}, {"rope_type": 3}, {"rope_type": "yarn"}, 10**9, float("nan"))
MORE_NAMES = ("rope_parameters", "layer_types", "quantization_config", "attention_bias", "num_local_experts", "partial_rotary_factor")


def test_no_config_json_makes_a_rule_fail():
    """Whatever stands in it: problems, never a traceback."""
    rng = random.Random(1)
    names = [*QWEN2, *QWEN3_MOE, *LLAMA, *MORE_NAMES]
    told = 0
    for _ in range(500):
        config = dict(rng.choice([QWEN2, QWEN3_MOE, LLAMA])) | {rng.choice(names): rng.choice(JUNK) for _ in range(rng.randint(1, 4))}
        sizes = {f"engine__{name}": rng.choice([1, 2, 4]) for name in ("tensor_model_parallel_size", "expert_model_parallel_size")}
        told += any(p.level == "error" for p in check(make_settings(**sizes), {}, make_facts(model_config=config)))
        check(grpo_settings(ref__path="x"), {}, grpo_facts(model_config=config, reference_config=config))
    assert 250 < told < 500


def test_experts_by_either_name():
    local = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 128}
    assert passes(make_facts(model_config=local), engine__expert_model_parallel_size=8)
    assert shape_of(local)["num_experts"] == 128 and shape_of(QWEN2)["num_experts"] == 0
