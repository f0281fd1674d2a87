"""Memory and disk predictions: every term by hand on a small model, measured peaks, and what must hold for any model."""

import ast
import json
import math
import random
import re
import sys
from pathlib import Path

import pytest
from cli_for_tests import mfsdp  # noqa: F401  the command line as a fixture
from facts_for_tests import LLAMA, QWEN2, QWEN3_MOE, make_facts, make_settings
from grpo_for_tests import CPU, cpu_facts, grpo_facts, grpo_settings
from inputs_for_tests import TINY_QWEN2, write_chats, write_model

from mfsdp_cli.config.parameters import (
    Shape, dense_layer, expert_parameters, expert_weights, model_shape, num_parameters, outer_weights, padded_vocab, split_weights,
    whole_weights,
)
from mfsdp_cli.launch import memory
from mfsdp_cli.launch.fit import CERTAIN, GIB, disk_problems, memory_problems, predict_disk, predict_memory
from mfsdp_cli.launch.memory import Layout, training_peak
from mfsdp_cli.launch.plan import make_plan

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
from bench_sft import SHAPES, predicted_gib  # noqa: E402

TINY = model_shape(TINY_QWEN2)
TINY_MOE = Shape(layers=2, hidden=64, heads=4, groups=2, head_dim=16, ffn=32, vocab=512, tied=True, qk_norm=True, experts=4, chosen=2)
TINY_QWEN3 = Shape(layers=2, hidden=64, heads=4, groups=2, head_dim=16, ffn=128, vocab=509, tied=False, qk_norm=True)


def benchmark(name: str) -> Shape:
    return model_shape(SHAPES[name] | {"architectures": ["Qwen2ForCausalLM"]})


# ---------------------------------------------------------------- parameters

def test_parameters_of_a_small_model_by_hand():
    """QKV 64 x (64 + 2 x 32) + 128 biases, projection 64 x 64, MLP 3 x 64 x 128; two norms; 512 x 64 and a norm."""
    assert split_weights(TINY) == 8192 + 128 + 4096 + 24576 == 36992
    assert whole_weights(TINY) == 128 and dense_layer(TINY) == 37120 and outer_weights(TINY) == 32768 + 64
    assert num_parameters(TINY) == 2 * 37120 + 32832 == 107072
    assert split_weights(TINY, 2) == 18496 and dense_layer(TINY, 2) == 18496 + 128 and outer_weights(TINY, 2) == 16384 + 64


def test_experts_and_norms_of_heads_by_hand():
    """Experts 4 x 3 x 64 x 32, router 64 x 4, norms of 16 for queries and keys; no biases."""
    assert split_weights(TINY_MOE) == 8192 + 4096 and whole_weights(TINY_MOE) == 128 + 32 + 256
    assert expert_weights(TINY_MOE) == 24576 and expert_weights(TINY_MOE, 2) == 12288 and expert_parameters(TINY_MOE, 4) == 2 * 6144
    assert num_parameters(TINY_MOE) == 2 * (12288 + 416 + 24576) + 32832 == 107392
    assert num_parameters(TINY_QWEN3) == 2 * (12288 + 24576 + 128 + 32) + 2 * 509 * 64 + 64


@pytest.mark.parametrize("shape, total", [("0.5b", 494_032_768), ("1.5b", 1_543_714_304), ("3b", 3_085_938_688), ("7b", 7_615_616_512)])
def test_published_totals(shape, total):
    assert num_parameters(benchmark(shape)) == total


def test_published_totals_of_other_families():
    """Llama-3.1-8B and Qwen3-30B-A3B, from their model cards' safetensors."""
    assert num_parameters(model_shape(LLAMA)) == 8_030_261_248
    assert num_parameters(model_shape(QWEN3_MOE)) == 30_532_122_624


def test_what_config_json_leaves_out():
    assert model_shape(None) is None and model_shape({}) is None and model_shape(TINY_QWEN2 | {"hidden_size": "64"}) is None
    assert model_shape(QWEN3_MOE | {"num_experts_per_tok": None}) is None and model_shape(TINY_QWEN2 | {"head_dim": "16"}) is None
    for odd in (None, [], 3, "Qwen2ForCausalLM", [None]):
        assert model_shape(TINY_QWEN2 | {"architectures": odd}).qkv_bias is False
    moe = dict(QWEN3_MOE)
    moe["num_local_experts"] = moe.pop("num_experts")  # as transformers 5 writes it
    assert model_shape(moe | {"intermediate_size": 6144}) == model_shape(QWEN3_MOE)
    assert model_shape({k: v for k, v in TINY_QWEN2.items() if k != "num_key_value_heads"}).groups == 4


def function_of_the_engine(name: str, file: str):
    """A function, or a constant, of a module that imports torch."""
    tree = ast.parse((ROOT / "mfsdp_cli" / "engine" / file).read_text())
    wanted = [n for n in tree.body if getattr(n, "name", None) == name or (isinstance(n, ast.Assign) and n.targets[0].id == name)]
    scope = {"math": math}
    exec(compile(ast.Module(wanted, []), file, "exec"), scope)
    return scope[name]


def test_the_engine_s_own_rules_are_the_same():
    pad = function_of_the_engine("padded_vocab_size", "megatron.py")
    assert all(padded_vocab(vocab, tp) == pad(vocab, tp) for vocab in (509, 512, 32001, 151936) for tp in (1, 2, 3, 4, 8))
    assert padded_vocab(509, 2) == 512 and all(getattr(memory, name) == function_of_the_engine(name, "forward.py") for name in ("MOST_LOGITS", "PIECE"))


# ---------------------------------------------------------------- terms

ONE, TWO = Layout(), Layout(dp=2, expert_dp=2)
SPLIT, NOT_SPLIT = Layout(tp=2, split=2), Layout(tp=2, split=1)


def test_what_stays_by_hand():
    sizes = [f(TINY, ONE) for f in (memory.weights, memory.master_weights, memory.gradients, memory.moments)]
    assert sizes == [214144, 428288, 428288, 856576] and sum(sizes) == 18 * 107072
    assert memory.shard(TINY, TWO) == 53536 and memory.shard(TINY, Layout(tp=2)) == 2 * (18496 + 128) + 16448
    assert memory.weights(TINY, Layout(width=4)) == memory.master_weights(TINY, Layout(width=4))
    narrow = Layout(dp=2, expert_dp=2, grad=2, moments=4)
    assert (memory.gradients(TINY, narrow), memory.moments(TINY, narrow)) == (107072, 214144)
    assert memory.waiting_gradients(TINY, narrow, 1) == memory.waiting_gradients(TINY, TWO, 1) // 2 > 0
    assert memory.shard(TINY_MOE, Layout(dp=4, ep=2, expert_dp=2)) == (2 * 12704 + 32832) // 4 + 2 * 12288 // 2
    assert memory.reference_model(TINY, ONE) == 214144 and memory.reference_model(TINY, TWO) == 107072 + 2 * 32832


def test_what_is_gathered_and_waits_by_hand():
    assert memory.gathered_weights(TINY, ONE) == 0 and memory.waiting_gradients(TINY, ONE, 2) == 0
    assert memory.gathered_weights(TINY, TWO) == 2 * (32832 + 2 * 37120)
    assert [memory.waiting_gradients(TINY, TWO, done) for done in (1, 2)] == [4 * (37120 + 32832), 4 * (74240 + 32832)]
    # experts of one rank each are neither gathered nor reduced
    assert memory.gathered_weights(TINY_MOE, Layout(dp=2, ep=2)) == 2 * (32832 + 2 * 12704)
    assert memory.waiting_gradients(TINY_MOE, Layout(dp=2, ep=2, expert_dp=2), 1) == 4 * (12704 + 12288 + 32832)


def test_how_far_ahead_layers_are_gathered():
    """A layer of 1.5B has 46.8 M parameters: 11 are the first that are 500 M, and one is at work. One of 7B has 233 M: 3 + 1. Layers
    above 500 M, of 34B and more: one ahead."""
    layer = dense_layer(benchmark("1.5b"))
    assert 10 * layer < memory.PREFETCH <= 11 * layer and memory.gathered_layers(benchmark("1.5b"), TWO) == 12
    assert memory.gathered_layers(benchmark("7b"), TWO) == 4 and memory.gathered_layers(TINY, TWO) == 2
    large = Shape(layers=80, hidden=8192, heads=64, groups=8, head_dim=128, ffn=28672, vocab=128256, tied=False)
    assert memory.gathered_layers(large, TWO) == 2
    # 7B: gradients wait up to 10^9 elements and one layer more, beside embedding and output layer
    unit, outer = dense_layer(benchmark("7b")), outer_weights(benchmark("7b"))
    assert memory.waiting_gradients(benchmark("7b"), TWO, 28) == 4 * (10**9 + unit + outer)
    assert memory.waiting_gradients(benchmark("7b"), TWO, 3) == 4 * (3 * unit + outer)


def test_activations_of_a_token_by_hand():
    """Norms 4 x 64, attention 2 x (64 + 32), MLP 2 x 128 numbers of 2 bytes; log-sum-exp of 4 heads and 2 norms in float32."""
    assert memory.saved_by_layer(TINY, ONE) == 2 * (256 + 192 + 256) + 4 * (4 + 2) == 1432
    assert memory.saved_by_layer(TINY, SPLIT) == 2 * (128 + 96 + 128) + 4 * (2 + 1) == 716
    assert memory.saved_by_layer(TINY, NOT_SPLIT) == 2 * (256 + 96 + 128) + 4 * (2 + 2) == 976
    assert memory.saved_by_layer(TINY_MOE, ONE) == 2 * (256 + 288 + 96 + 2 * (64 + 96)) + 4 * (4 + 4 + 2 + 2) + 4 * 3 * 4
    assert memory.saved_by_recomputation(TINY, ONE) == 128 and memory.saved_by_recomputation(TINY, SPLIT) == 64
    assert memory.layer_at_work(TINY, ONE) == 2 * (512 + 128) and memory.layer_at_work(TINY, SPLIT) == 2 * (256 + 64 + 64)
    assert memory.layer_at_work(TINY_MOE, ONE) == 2 * (2 * (96 + 128) + 128)
    assert memory.after_the_layers(TINY, ONE) == 384 and memory.after_the_layers(TINY, SPLIT) == 2 * (96 + 64)


def test_logits_by_hand():
    assert memory.logits(TINY, ONE, 100) == 102400 and memory.logits(TINY, SPLIT, 100) == 51200
    assert memory.piece_of_logits(TINY, ONE, 100) == 0 and memory.logits(TINY, ONE, 100, temperature=0.7) == 204800
    assert memory.logits(TINY_QWEN3, Layout(tp=2), 10) == 10 * 256 * 2
    large = benchmark("1.5b")  # 2^31 numbers are 14,134 tokens of 151,936; a piece has 2^29 // 151,936 = 3,533
    assert memory.piece_of_logits(large, ONE, 28268) == 0
    assert memory.piece_of_logits(large, ONE, 28269) == 3533 * 151936 * 2 and memory.logits(large, ONE, 28269) == 0
    assert memory.piece_of_logits(large, ONE, 28269, temperature=0.7) == 2 * 3533 * 151936 * 2


def test_peak_of_a_small_model_by_hand():
    peak = training_peak(TINY, ONE, 100)
    assert peak.moment == "backward of the loss"
    assert peak.parts == {"parameters": 214144, "master weights": 428288, "gradients": 428288, "moments": 856576, "gathered weights": 0,
                          "waiting gradients": 0, "activations": 286400, "logits": 102400, "working": 38400 + 65536}
    assert peak.total == 2_420_032
    full = training_peak(TINY, ONE, 100, "full")
    assert full.moment == "backward of layer 2" and full.total == 18 * 107072 + 25600 + 258400 + 65536
    two = training_peak(TINY, TWO, 100)
    assert two.moment == "backward of layer 1" and two.total == 9 * 107072 + 214144 + 428288 + 143200 + 128000 + 65536
    assert training_peak(TINY, TWO, 1).moment == "backward of the embedding"  # gradients queue up faster than activations go


@pytest.mark.parametrize("shape, tokens, recompute, lean, measured_gib", [
    ("1.5b", 16384, "none", False, 54.9), ("1.5b", 8192, "full", True, 20.8), ("7b", 16384, "full", True, 94.7),
])
def test_the_measured_peaks(shape, tokens, recompute, lean, measured_gib):
    """torch.cuda.max_memory_allocated on one H200 (docs/performance.md)."""
    assert predicted_gib(shape, tokens, recompute, lean) == pytest.approx(measured_gib, rel=0.03)


def test_a_measured_peak_with_logits_formed_again(monkeypatch):
    """Measured when logits were kept up to 2^31 numbers; 16,384 tokens have 2.5e9."""
    monkeypatch.setattr(memory, "MOST_LOGITS", 2**31)
    assert predicted_gib("0.5b", 16384, "full") == pytest.approx(10.6, rel=0.03)


# ---------------------------------------------------------------- what holds for any model

def random_shape(draw: random.Random) -> Shape:
    groups, experts = draw.choice([8, 16]), draw.choice([0, 0, 8, 64])
    return Shape(
        layers=draw.randint(2, 40), hidden=128 * draw.randint(1, 40), heads=groups * draw.choice([1, 2, 4]), groups=groups,
        head_dim=draw.choice([64, 128]), ffn=256 * draw.randint(1, 60), vocab=1024 * draw.randint(1, 150), tied=draw.random() < 0.5,
        qkv_bias=draw.random() < 0.5, qk_norm=draw.random() < 0.5, experts=experts, chosen=min(experts, 4))


def test_more_of_anything_moves_memory_the_right_way():
    draw = random.Random(0)
    for _ in range(300):
        shape, tp, dp, ep = random_shape(draw), draw.choice([1, 2, 4]), draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
        tokens, recompute = draw.randint(1, 40000), draw.choice(["none", "full"])
        here = Layout(dp=dp, tp=tp, ep=ep, expert_dp=dp, split=tp)
        more_tp = Layout(dp=dp, tp=2 * tp, ep=ep, expert_dp=dp, split=2 * tp)
        more_dp = Layout(dp=2 * dp, tp=tp, ep=ep, expert_dp=2 * dp, split=tp)
        more_ep = Layout(dp=dp, tp=tp, ep=2 * ep, expert_dp=dp, split=tp)
        for more in (more_tp, more_dp, more_ep):
            assert memory.shard(shape, more) <= memory.shard(shape, here)
        for term in (memory.saved_by_layer, memory.saved_by_recomputation):
            assert term(shape, more_tp) <= term(shape, here)
        peak = training_peak(shape, here, tokens, recompute)
        # logits that are formed in pieces take less than those just few enough to be formed at once
        if bool(memory.piece_of_logits(shape, here, tokens)) == bool(memory.piece_of_logits(shape, more_tp, tokens)):
            assert memory.logits(shape, more_tp, tokens) <= memory.logits(shape, here, tokens)
        if bool(memory.piece_of_logits(shape, here, tokens)) == bool(memory.piece_of_logits(shape, here, tokens + 1000)):
            assert training_peak(shape, here, tokens + 1000, recompute).total >= peak.total
        assert training_peak(shape, here, tokens, "full").total <= training_peak(shape, here, tokens, "none").total
        assert all(size >= 0 for size in peak.parts.values()) and peak.total >= 18 * memory.shard(shape, here)


def test_the_peak_is_at_a_turning_point():
    """Against a search through all layers."""
    draw = random.Random(2)
    for _ in range(200):
        shape, dp = random_shape(draw), draw.choice([1, 2, 8])
        layout, saved = Layout(dp=dp, expert_dp=dp), draw.randint(1, 10**9)

        def size(done):
            return memory.waiting_gradients(shape, layout, done) + (shape.layers - done + 1) * saved

        assert max(map(size, memory.turning_points(shape, layout))) == max(map(size, range(1, shape.layers + 1)))


def test_shards_of_all_ranks_make_the_model():
    draw = random.Random(1)
    for _ in range(100):
        shape, tp, dp = random_shape(draw), draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
        whole = num_parameters(shape)
        twice = (tp - 1) * (shape.layers * whole_weights(shape) + shape.hidden)  # what each TP rank has for itself
        assert 0 <= dp * tp * memory.shard(shape, Layout(dp=dp, tp=tp, expert_dp=dp * tp)) - whole - twice <= dp * tp * 2


# ---------------------------------------------------------------- a run

def predicted(settings, facts):
    return predict_memory(settings, make_plan(settings, facts), facts)


def test_memory_of_a_run():
    """7B on TP 4 x DP 2 with 1,024 tokens: little beside the shard but gathered weights and gradients on their way."""
    found = predicted(make_settings(), make_facts())
    assert found.tokens == 1024 and found.fits and found.gpu_bytes == 143771 * 2**20
    assert found.allocated["moments"] == 2 * found.allocated["gradients"] == 4 * found.allocated["parameters"]
    assert found.outside["samplers"] == 0 and found.outside["NCCL"] == 2**30
    assert found.total_bytes == sum(found.allocated.values()) + sum(found.outside.values())
    data = found.to_dict()
    assert data["total_bytes"] == found.total_bytes and data["allocated_bytes"] == found.allocated_bytes and len(data["assumptions"]) == 4


def test_memory_of_a_grpo_run():
    facts = grpo_facts()
    found = predicted(grpo_settings(), facts)
    assert found.outside["samplers"] == int(0.4 * 143771 * 2**20) and found.tokens == 8192
    assert found.allocated["reference model"] == memory.reference_model(model_shape(QWEN2), Layout(dp=2, tp=4, expert_dp=8, split=4))
    assert "reference model" not in predicted(grpo_settings(actor__use_kl_loss=False), facts).allocated
    assert predicted(grpo_settings(rollout__colocate=False), facts).outside["samplers"] == 0
    assert predicted(grpo_settings(rollout__name="hf"), facts).outside["samplers"] == 2 * num_parameters(model_shape(QWEN2))
    other = predicted(grpo_settings(ref__path="ref"), grpo_facts(reference_config=TINY_QWEN2))
    assert other.allocated["reference model"] == memory.reference_model(TINY, Layout(dp=2, tp=4, expert_dp=8, split=4))


def test_nothing_is_predicted_where_nothing_is_known():
    assert predicted(make_settings(), make_facts(num_gpus=0)) is None and predicted(grpo_settings(**CPU), cpu_facts()) is None
    assert predicted(make_settings(), make_facts(model_config=None)) is None
    unknown = predicted(make_settings(), make_facts(gpu_memory_mib=(0,) * 8))
    assert unknown.gpu_bytes is None and unknown.fits is None
    assert told(grpo_settings(trainer__val_only=True), grpo_facts(gpu_memory_mib=(1024,) * 8)) == []
    assert memory_problems(make_settings(), make_plan(make_settings(), make_facts()), make_facts(gpu_memory_mib=(0,) * 8)) == []


def told(settings, facts):
    return memory_problems(settings, make_plan(settings, facts), facts)


def test_a_run_that_does_not_fit_is_warned_of_and_one_far_above_refused():
    settings = make_settings(engine__tensor_model_parallel_size=1, data__max_token_len_per_gpu=16384, data__max_length=1024,
                             data__train_batch_size=256)
    total = predicted(settings, make_facts()).total_bytes
    just = make_facts(gpu_memory_mib=(total // 2**20 + 1,) * 8)
    assert told(settings, just) == []
    [warning] = told(settings, make_facts(gpu_memory_mib=(total // 2**20 - 1,) * 8))
    assert warning.level == "warning" and f"{total / GIB:.1f} GiB of each GPU" in warning.why and "activations" in warning.why
    for text in ("engine.recompute=full: ", "data.max_token_len_per_gpu=8192: ", "--tp 2: ", "mfsdp sft … --suggest"):
        assert text in warning.fix
    [error] = told(settings, make_facts(gpu_memory_mib=(int(total / CERTAIN) // 2**20 - 1,) * 8))
    assert (error.level, error.code) == ("error", 4)


def test_remedies_never_make_it_worse_nor_cut_the_longest_sequence():
    settings = make_settings(engine__tensor_model_parallel_size=8, engine__recompute="full", data__max_token_len_per_gpu=16384)
    [problem] = told(settings, make_facts(gpu_memory_mib=(8000,) * 8))
    assert "max_token_len_per_gpu" not in problem.fix and "recompute" not in problem.fix and "--tp" not in problem.fix


@pytest.mark.parametrize("settings, names", [
    ({}, ["full"]), ({"engine__recompute": "full"}, []),
])
def test_what_to_compute_again_is_only_advised_where_it_may_be_set(settings, names):
    made = make_settings(engine__tensor_model_parallel_size=8, data__max_token_len_per_gpu=16384, **settings)
    [problem] = told(made, make_facts(gpu_memory_mib=(8000,) * 8))
    assert re.findall(r"recompute=(\w+)", problem.fix) == names


def test_vllm_s_share_is_a_remedy_where_it_leaves_room_for_the_weights():
    settings = grpo_settings()
    others = predicted(settings, grpo_facts()).total_bytes - predicted(settings, grpo_facts()).outside["samplers"]
    size = int(others / 0.72) // 2**20  # 0.28 of it are left; 0.25 of its 43.1 GiB hold the 3.5 GiB of weights a GPU
    [problem] = told(settings, grpo_facts(gpu_memory_mib=(size,) * 8))
    assert f"rollout.gpu_memory_utilization=0.25: {(others + 0.25 * size * 2**20) / GIB:.1f} GiB" in problem.fix
    [problem] = told(settings, grpo_facts(gpu_memory_mib=(int(others / 0.94) // 2**20,) * 8))
    assert "gpu_memory_utilization" not in problem.fix


# ---------------------------------------------------------------- what a dry run says of it

def test_a_dry_run_tells_memory_and_disk(mfsdp, tmp_path):  # noqa: F811
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.parquet", 40)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nfor i in 0 1; do echo \"$i, GPU-$i, 81559, 9.0, NVIDIA H100\"; done\n")
    smi.chmod(0o755)
    args = ("sft", "--model", "model", "--train-files", "train.parquet", "--nproc", 2, "--dry-run")
    done = mfsdp(*args, cwd=tmp_path, PATH=str(smi.parent))
    assert done.returncode == 0, done.stderr
    for text in (
        "2 ranks (1 node x 2, cuda) = TP 1 x PP 1 x CP 1 x DP 2", "shards      parameters, gradients and optimizer over DP 2",
        "micro batches of up to 1024 tokens a rank, 1 to 4 an update, by their lengths", "memory of each GPU, in the backward of ",
        "  CUDA context           0.60 GiB  beside torch\n", " GiB of 79.6 GiB; ", "  assumed: micro batches as large as data.max_token_len_per_gpu",
        "disk        0.00 GiB a checkpoint, at most 1 at a time: 0.0 GiB more, ",
    ):
        assert text in done.stdout, text
    narrow = ("optim.main_grads_dtype=bfloat16", "optim.exp_avg_dtype=bfloat16", "optim.exp_avg_sq_dtype=bfloat16")
    data = json.loads(mfsdp(*args, *narrow, "--json", cwd=tmp_path, PATH=str(smi.parent)).stdout)
    assert data["memory"]["allocated"]["moments"] == 4 * 107072 // 2 and data["disk"]["checkpoint_bytes"] == 8 * 107072
    assert "float32 master weights; bfloat16 gradients; bfloat16 and bfloat16 moments" in " ".join(data["memory"]["assumptions"])
    data = json.loads(mfsdp(*args, "--json", cwd=tmp_path, PATH=str(smi.parent)).stdout)
    assert data["memory"]["fits"] is True and data["memory"]["allocated"]["moments"] == 8 * 107072 // 2
    assert data["disk"]["checkpoint_bytes"] == 12 * 107072 and data["plan"]["micro_batch_tokens"] == 1024
    done = mfsdp(*args, "engine.device=cpu", cwd=tmp_path)
    assert "memory: not predicted on CPU" in done.stdout


# ---------------------------------------------------------------- disk

def disk(facts=None, there=0, **overrides):
    settings, facts = make_settings(**overrides), facts or make_facts()
    return predict_disk(settings, make_plan(settings, facts), facts, there)


def test_disk_by_hand():
    """12 bytes a parameter: float32 weights and two moments. 500 steps, one save in 100: 5, of which 3 stay and one is being written."""
    found = disk()
    assert found.checkpoint_bytes == 12 * 7_615_616_512 and (found.at_once, found.there) == (4, 0)
    assert found.needed_bytes == 4 * found.checkpoint_bytes and found.free_bytes == 5000 * GIB
    assert disk(checkpoint__save_contents=["model", "extra"]).checkpoint_bytes == 4 * 7_615_616_512
    assert disk(trainer__max_ckpt_to_keep=None).at_once == 5 and disk(trainer__save_freq=-1).at_once == 1
    assert disk(trainer__save_freq=400).at_once == 2 and disk(trainer__max_ckpt_to_keep=1).at_once == 2
    # every second save stays too: those of 200 and 400; and the best two; all five at once, but no more than there are
    assert disk(trainer__keep_every=200, trainer__max_ckpt_to_keep=1).at_once == 1 + 1 + 2
    assert disk(trainer__keep_best=2, trainer__max_ckpt_to_keep=1).at_once == 1 + 1 + 2
    assert disk(trainer__keep_every=200, trainer__keep_best=2).at_once == 5
    resumed = disk(there=3)
    assert (resumed.at_once, resumed.there, resumed.needed_bytes) == (4, 3, resumed.checkpoint_bytes)
    padded = disk(make_facts(model_config=QWEN2 | {"vocab_size": 152063}))
    assert padded.checkpoint_bytes == 12 * 7_615_616_512  # TP 4: the row that is missing is added again
    assert disk(make_facts(model_config=None)) is None


def disk_told(free_gib, there=0, **overrides):
    settings, facts = make_settings(**overrides), make_facts(free_disk_gib=free_gib)
    return disk_problems(settings, make_plan(settings, facts), facts, "runs/a", there)


def test_disk_that_is_too_small():
    """A checkpoint is 85.1 GiB, and four of them 340.4."""
    assert disk_told(340.5) == []
    [few] = disk_told(340.4)
    assert (few.level, few.key) == ("warning", "trainer.max_ckpt_to_keep")
    assert "4 more checkpoints of 85.1 GiB (model + optimizer)" in few.why
    assert few.fix.startswith("trainer.max_ckpt_to_keep=2,") and disk_told(340.4, trainer__max_ckpt_to_keep=2) == []
    [none] = disk_told(80)
    assert (none.level, none.code, none.key) == ("error", 4, "trainer.output_dir") and "is 85.1 GiB, and 80.0 GiB are free" in none.why
    [best] = disk_told(300, trainer__max_ckpt_to_keep=2, trainer__keep_best=1)
    assert best.fix.startswith("trainer.max_ckpt_to_keep=1,") and disk_told(300, trainer__max_ckpt_to_keep=1, trainer__keep_best=1) == []
    [most] = disk_told(300, trainer__max_ckpt_to_keep=1, trainer__keep_best=3)
    assert "fewer by trainer.keep_every and trainer.keep_best, which keep up to 3 more" in most.fix
    assert disk_told(90, there=3) == [] and "two lie there" in disk_told(90)[0].fix
