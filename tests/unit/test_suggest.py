"""--suggest: it finds what fits, best first, and never proposes what the rules refuse."""

import json
import random

import pytest
from cli_for_tests import mfsdp  # noqa: F401  the command line as a fixture
from facts_for_tests import LLAMA, QWEN2, QWEN3_MOE, make_facts, make_settings
from grpo_for_tests import grpo_facts, grpo_settings
from inputs_for_tests import snapshot, write_chats, write_model

from mfsdp_cli.config.rules import check
from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.launch.fit import GIB, predict_memory, with_values
from mfsdp_cli.launch.plan import make_plan
from mfsdp_cli.launch.suggest import micro_batch_sizes, other_machine, relative_speed, search, size_bytes, suggestion_text, trainer_gpus

H100 = {"gpu_memory_mib": (81559,) * 8, "gpu_names": ("NVIDIA H100",) * 8}
LONG = {"data__train_batch_size": 256, "data__max_length": 1024}


def errors(settings, facts):
    return [p for p in check(settings, {}, facts) if p.level == "error"]


def test_sizes_of_gpus():
    assert size_bytes("80GiB") == size_bytes("80") == size_bytes("80 g") == 80 * 2**30 and size_bytes("81559MiB") == 81559 * 2**20
    assert size_bytes("80GB") == 80 * 10**9 and size_bytes("1.5gib") == 3 * 2**29
    for text in ("", "80TiB", "-3", "0", "80GiBs", "1e99"):
        with pytest.raises(MfsdpError) as caught:
            size_bytes(text)
        assert caught.value.exit_code == 2


def test_another_machine():
    none_here = make_facts(num_gpus=0, gpu_names=(), gpu_memory_mib=(), gpu_compute_capability=())
    planned = other_machine(none_here, 4, "80GiB")
    assert (planned.num_gpus, planned.gpu_memory_mib, planned.gpu_names) == (4, (81920,) * 4, ("planned GPU",) * 4)
    assert other_machine(make_facts(), None, None).gpu_memory_mib == (143771,) * 8
    assert other_machine(make_facts(), 2, None).num_gpus == 2 and other_machine(make_facts(), None, "40GiB").gpu_memory_mib == (40960,) * 8
    for gpus, size in ((None, None), (8, None), (0, "80GiB")):
        with pytest.raises(MfsdpError, match="--gpus 8 --gpu-memory 80GiB|nvidia-smi"):
            other_machine(none_here, gpus, size)


def test_expected_speed():
    """The measured speeds (docs/performance.md, earlier code): 42,574 and 49,072 tokens/s of 1.5B; shares of the peak of 0.5B, 1.5B and 3B."""
    size = {"0.5b": 494e6, "1.5b": 1.544e9, "3b": 3.086e9}
    middle = relative_speed(16384, size["1.5b"], "none")
    assert middle / relative_speed(32768, size["1.5b"], "none") == pytest.approx(42574 / 49072, rel=0.01)
    for name, share in (("0.5b", 23.4), ("3b", 46.3)):
        assert relative_speed(16384, size[name], "none") / middle == pytest.approx(share / 39.9, rel=0.1)
    assert relative_speed(16384, 7e9, "none") / relative_speed(16384, 7e9, "full") == pytest.approx(4 / 3)


def test_micro_batches_that_are_tried():
    """Doubled from the longest conversation; 8 rows over DP 2 make no more than 4 x 1,024 tokens."""
    assert micro_batch_sizes(make_settings(), 2) == [1024, 2048, 4096] and micro_batch_sizes(make_settings(), 8) == [1024]
    assert micro_batch_sizes(make_settings(**LONG), 2) == [1024 * 2**k for k in range(7)]  # up to 65,536
    assert micro_batch_sizes(make_settings(data__use_dynamic_bsz=False), 2) == [1, 2, 4]
    assert micro_batch_sizes(grpo_settings(), 8) == [1024, 2048, 4096, 8192, 16384] and micro_batch_sizes(make_settings(), 100) == [1024]


def test_ranks_beside_samplers_of_their_own():
    assert trainer_gpus(make_settings(), 8) == 8 and trainer_gpus(grpo_settings(), 8) == 8
    apart = grpo_settings(rollout__colocate=False, rollout__tensor_model_parallel_size=2, rollout__num_engines=1)
    assert trainer_gpus(apart, 8) == 6


def test_7b_on_eight_h100():
    """TP 1 fits without recomputation: 18 bytes x 7.6 / 8 billion = 16 GiB stay, 16,384 tokens would take 71 GiB of activations."""
    settings, facts = make_settings(**LONG), make_facts(**H100)
    found = search(settings, {}, facts)
    best = found.layouts[0]
    assert found.exit_code == 0 and (found.gpus, found.num_parameters) == (8, 7_615_616_512)
    assert best.arguments == ["--nproc", "8", "--tp", "1", "--ep", "1", "engine.recompute=none", "data.max_token_len_per_gpu=8192"]
    assert (best.plan.dp, best.plan.tp, best.memory.tokens) == (8, 1, 8192) and best.memory.total_bytes < 79.7 * GIB
    assert [layout.plan.tp for layout in found.layouts] == [1, 1, 2, 2, 4, 4]
    larger = with_values(settings, best.values | {"data.max_token_len_per_gpu": 16384})
    assert predict_memory(larger, make_plan(larger, facts), facts).fits is False
    text = suggestion_text(found)
    assert found.now.plan.tp == 4 and found.now.memory.tokens == 1024 and "4   1   2       none   1,024" in text
    assert "7.62 billion parameters on 8 GPUs of 79.6 GiB" in text and "--nproc 8 --tp 1 --ep 1 engine.recompute=none" in text


def test_experts_are_spread_too():
    facts = make_facts(model_config=dict(QWEN3_MOE), **H100)
    found = search(make_settings(**LONG), {}, facts)
    assert {layout.plan.ep for layout in found.layouts} == {1, 2, 4, 8}


def test_what_fits_nowhere_says_what_would_be_needed():
    found = search(make_settings(), {}, make_facts(gpu_memory_mib=(16384,) * 8))
    assert found.layouts == () and found.exit_code == 4 and "GiB a GPU: --nproc 8 --tp 4" in found.problems[0].why
    assert suggestion_text(found).endswith("16.0 GiB: none")


def test_without_a_model_or_on_cpu_nothing_is_suggested():
    with pytest.raises(MfsdpError, match="config.json"):
        search(make_settings(), {}, make_facts(model_config=None))
    with pytest.raises(MfsdpError, match="engine.device"):
        search(make_settings(engine__device="cpu"), {}, make_facts())


def test_errors_of_every_layout_are_told_beside_them():
    found = search(make_settings(checkpoint__async_save=True), {}, make_facts())
    assert found.layouts and [(p.key, p.level) for p in found.problems] == [("checkpoint.async_save", "warning")] and found.exit_code == 0


def test_layouts_that_are_refused_for_their_size_are_left_out():
    """4 rows cannot feed 8 data-parallel ranks: TP 1 is out."""
    found = search(make_settings(data__train_batch_size=4), {}, make_facts())
    assert found.exit_code == 0 and found.layouts[0].plan.tp == 2


def test_values_that_no_layout_may_have_are_set_right():
    found = search(make_settings(engine__pipeline_model_parallel_size=2, engine__context_parallel_size=2), {}, make_facts())
    assert found.exit_code == 0 and "engine.pipeline_model_parallel_size=1" in found.layouts[0].arguments
    assert "engine.context_parallel_size=1" in found.layouts[0].arguments


def test_no_proposal_is_refused_by_the_rules_or_too_large():
    draw = random.Random(0)
    num_layouts = 0
    for _ in range(60):
        gpus, mib = draw.choice([1, 2, 3, 4, 6, 8]), draw.choice([24576, 40960, 81559, 143771])
        machine = {"num_gpus": gpus, "gpu_memory_mib": (mib,) * gpus, "gpu_names": ("x",) * gpus, "gpu_compute_capability": (9.0,) * gpus,
                   "model_config": dict(draw.choice([QWEN2, LLAMA, QWEN3_MOE]))}
        if draw.random() < 0.5:
            facts = make_facts(**machine)
            settings = make_settings(
                data__train_batch_size=draw.choice([1, 6, 8, 64]), data__use_dynamic_bsz=draw.random() < 0.7, data__max_length=512,
                trainer__nnodes=draw.choice([1, 2]), trainer__rdzv_endpoint="n0:1", engine__sequence_parallel=draw.choice([None, False]))
        else:
            facts = grpo_facts(**machine)
            settings = grpo_settings(
                actor__ppo_mini_batch_size=draw.choice([2, 16]), actor__use_dynamic_bsz=draw.random() < 0.7, rollout__n=draw.choice([2, 8]),
                rollout__tensor_model_parallel_size=draw.choice([1, 2]), rollout__colocate=draw.random() < 0.8)
        found = search(settings, {}, facts)
        shared = {(p.key, p.found, p.why) for p in found.problems}
        for layout in found.layouts:
            chosen = with_values(settings, layout.values)
            assert {(p.key, p.found, p.why) for p in errors(chosen, facts)} <= shared
            assert layout.memory.total_bytes <= 0.95 * mib * 2**20
            assert layout.plan.tp * layout.plan.dp == layout.plan.world_size
        assert [layout.order for layout in found.layouts] == sorted(layout.order for layout in found.layouts)
        num_layouts += len(found.layouts)
    assert num_layouts > 50


# ---------------------------------------------------------------- the command

def test_the_command_suggests_and_writes_nothing(mfsdp, tmp_path):  # noqa: F811
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.parquet", 40)
    before = snapshot(tmp_path)
    args = ("sft", "--model", "model", "--train-files", "train.parquet", "--suggest", "--gpus", 4, "--gpu-memory", "24GiB")
    done = mfsdp(*args, cwd=tmp_path, PATH="")
    assert snapshot(tmp_path) == before and done.returncode == 0, done.stderr
    assert "layouts of 0.00 billion parameters on 4 GPUs of 24.0 GiB" in done.stdout and "--nproc 4 --tp 1 --ep 1" in done.stdout
    data = json.loads(mfsdp(*args, "--json", cwd=tmp_path, PATH="").stdout)
    assert data["ok"] and data["gpus_per_node"] == 4 and data["layouts"][0]["tp"] == 1 and data["layouts"][0]["memory"]["fits"] is True
    done = mfsdp(*args[:3], *args[5:], cwd=tmp_path, PATH="")
    assert done.returncode == 0 and "--nproc 4" in done.stdout and "there is nothing to train on" in done.stderr
    done = mfsdp(*args, "optim.lr=fast", cwd=tmp_path, PATH="")
    assert done.returncode == 3 and "--nproc 4" in done.stdout and "optim.lr = fast" in done.stderr
    done = mfsdp("sft", "--model", "model", "--suggest", cwd=tmp_path, PATH="")
    assert done.returncode == 4 and "--gpus 8 --gpu-memory 80GiB" in done.stderr
    assert mfsdp("sft", "--model", "model", "--gpus", 4, cwd=tmp_path).returncode == 2
