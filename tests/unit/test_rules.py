import random
import time

import pytest
from facts_for_tests import CHAT, make_facts, make_settings, only, passes, problems

from mfsdp_cli.config.load import load
from mfsdp_cli.config.rules import check
from mfsdp_cli.config.rules_sft import batch_problem
from mfsdp_cli.errors import CONFIG_INVALID
from mfsdp_cli.launch.facts import ParquetFacts


def test_the_reference_run_is_in_order():
    assert passes() and [p.rule for p in problems(level="note")] == ["max-connections-tp-cp"]


def test_the_origin_is_told():
    loaded = load("sft", assignments=["checkpoint.async_save=True", "checkpoint.mbridge_config.x=1"], environ={"PP": "2"},
        flags={"model": "m"})
    where = {p.key: p.where for p in check(loaded.settings, loaded.origins, make_facts())}
    assert where["checkpoint.async_save"] == "command line"
    assert where["checkpoint.mbridge_config.x"] == "command line"
    assert where["engine.pipeline_model_parallel_size"] == "$PP"
    assert where["data.train_files"] == "default"


def test_required():
    facts = make_facts(model_path=None, model_config=None, model_weight_files=(), has_tokenizer=False)
    found = problems(facts, model__path=None, data__train_files=[])
    assert [p.key for p in found] == ["model.path", "data.train_files"]
    assert "--model" in found[0].fix and "--train-files" in found[1].fix


# --- hard case A8: the three flags and the hidden environment -------------------------------------------------------


@pytest.mark.parametrize("flags, at_fault", [
    ((True, True, True), ["vanilla_mbridge"]),
    ((False, False, True), ["use_mbridge"]),
    ((True, False, False), ["use_megatron_fsdp"]),
    ((False, True, False), ["use_mbridge", "vanilla_mbridge", "use_megatron_fsdp"]),
    ((True, False, True), []),
])
def test_a8_three_flags(flags, at_fault):
    names = ("use_mbridge", "vanilla_mbridge", "use_megatron_fsdp")
    found = problems(**{f"engine__{n}": v for n, v in zip(names, flags, strict=True)})
    assert [p.key for p in found] == [f"engine.{n}" for n in at_fault]
    assert all(p.code == CONFIG_INVALID for p in found)


@pytest.mark.parametrize("value", ["8", "2", "32", None])
def test_a8_max_connections_accepted(value):
    assert passes(make_facts(environ={} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}))


@pytest.mark.parametrize("value, why", [
    ("1", "parallel hardware queues"), ("0", "not an integer above 1"), ("many", "not an integer above 1"),
    ("-8", "not an integer above 1"),
    ("8.0", "not an integer above 1"), ("", "not an integer above 1"),
])
def test_a8_max_connections_refused(value, why):
    problem = only(make_facts(environ={"CUDA_DEVICE_MAX_CONNECTIONS": value}))
    assert problem.key == "CUDA_DEVICE_MAX_CONNECTIONS" and why in problem.why and "8" in problem.fix and "unset" in problem.fix
    assert problem.where == "environment" and problem.found == value


def test_a_mistyped_variable_is_a_warning():
    problem = only(make_facts(environ={"CUDA_MAX_CONNECTIONS": "8"}), level="warning")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in problem.fix


# --- hard case A9: what to save -------------------------------------------------------------------------------------


def test_a9_optimizer_needs_model():
    problem = only(checkpoint__save_contents=["optimizer", "extra"])
    assert problem.key == "checkpoint.save_contents" and "optimizer needs model" in problem.why
    assert "[model, optimizer, extra]" in problem.fix


@pytest.mark.parametrize("contents", [["model"], ["model", "optimizer", "extra"], ["model", "optimizer"]])
def test_a9_accepted_unless_async(contents):
    assert passes(checkpoint__save_contents=contents)
    assert only(checkpoint__save_contents=contents, checkpoint__async_save=True).key == "checkpoint.async_save"


@pytest.mark.parametrize("settings, key", [
    ({"engine__use_distributed_optimizer": False}, "engine.use_distributed_optimizer"),
    ({"model__lora_rank": 8}, "model.lora_rank"),
    ({"engine__override_transformer_config": {"gradient_accumulation_fusion": True}},
        "engine.override_transformer_config.gradient_accumulation_fusion"),
])
def test_a9_refused(settings, key):
    assert only(**settings).key == key


def test_a9_two_faults_are_told_in_one_run():
    found = problems(checkpoint__save_contents=["optimizer"], model__lora_rank=8, checkpoint__async_save=True)
    assert [p.key for p in found] == ["model.lora_rank", "checkpoint.save_contents", "checkpoint.async_save"]


def test_fusion_off_is_accepted():
    assert passes(engine__override_transformer_config={"gradient_accumulation_fusion": False})


def test_load_contents():
    assert passes(checkpoint__load_contents=["model"])
    assert passes(checkpoint__load_contents=["model", "optimizer", "extra"])
    problem = only(checkpoint__save_contents=["model"], checkpoint__load_contents=["model", "extra"])
    assert problem.key == "checkpoint.load_contents" and "extra cannot be loaded" in problem.why
    assert only(checkpoint__load_contents=["optimizer"]).key == "checkpoint.load_contents"
    assert only(checkpoint__save_contents=[]).key == "checkpoint.save_contents"
    assert only(checkpoint__save_contents=["extra"], level="warning").key == "checkpoint.save_contents"


def test_mbridge_config():
    assert passes(checkpoint__mbridge_config={"distributed_filesystem": True, "memory_efficient": False})
    assert "did you mean memory_efficient?" in only(checkpoint__mbridge_config={"memory_eficient": True}).fix
    assert "True or False" in only(checkpoint__mbridge_config={"memory_efficient": "yes"}).why


def test_switches_that_do_nothing_here():
    assert only(model__use_remove_padding=False).key == "model.use_remove_padding"
    assert only(engine__param_offload=True).key == "engine.param_offload"
    assert only(engine__optimizer_offload=True).key == "engine.optimizer_offload"


def test_resume():
    assert passes(trainer__resume_mode="resume_path", trainer__resume_from_path="x")
    assert only(trainer__resume_mode="resume_path").key == "trainer.resume_from_path"
    assert "ignored" in only(trainer__resume_from_path="x").why


# --- hard case A6: the batch does not divide ------------------------------------------------------------------------


def test_a6_batch_does_not_divide():
    a6 = {"engine__tensor_model_parallel_size": 2, "data__use_dynamic_bsz": False, "data__train_batch_size": 8}
    problem = only(data__micro_batch_size_per_gpu=3, **a6)
    assert "4 data-parallel ranks x 3 rows a micro batch = 12" in problem.why
    assert problem.fix == "data.micro_batch_size_per_gpu 1 or 2, or data.train_batch_size 12"
    assert problem.code == CONFIG_INVALID
    assert passes(data__micro_batch_size_per_gpu=2, **a6)


def test_a6_alone():
    assert batch_problem(8, 4, 3) is not None
    assert batch_problem(8, 4, 2) is None
    assert batch_problem(30, 4, 4)[1] == "data.train_batch_size 16 or 32", "30 rows over 4 ranks: no micro batch helps"


def test_batch_problem_agrees_with_dealing_out_rows():
    rng = random.Random(0)
    for _ in range(500):
        size, dp, micro = rng.randint(1, 64), rng.randint(1, 9), rng.randint(1, 9)
        per_rank = [len(range(r, size, dp)) for r in range(dp)]
        fits = len(set(per_rank)) == 1 and per_rank[0] > 0 and per_rank[0] % micro == 0
        wrong = batch_problem(size, dp, micro)
        assert (wrong is None) == fits
        if wrong:
            for better in wrong[1].rpartition("train_batch_size ")[2].split(" or "):
                assert batch_problem(int(better), dp, micro) is None


def test_dynamic_batches_need_a_row_for_each_rank():
    one = {"engine__tensor_model_parallel_size": 1}
    assert passes(data__train_batch_size=8, **one)
    assert "7 rows cannot feed 8 data-parallel ranks" in only(data__train_batch_size=7, **one).why


def test_there_must_be_one_full_batch():
    assert passes(data__train_batch_size=1000)
    assert "there are 1000 training rows" in only(data__train_batch_size=1001).why
    assert "there are 9 training rows" in only(data__train_batch_size=10, data__train_max_samples=9).why
    two = {n: ParquetFacts(n, 600, {"messages": CHAT}) for n in ("a", "b")}
    assert passes(make_facts(parquet=two), data__train_files=["a", "b"], data__val_files=[], data__train_batch_size=1200)


def test_zero_is_refused_where_minus_one_is_meant():
    for key in ("data__train_max_samples", "data__val_max_samples", "trainer__save_freq", "trainer__test_freq"):
        found = [p for p in problems(**{key: 0}) if p.key == key.replace("__", ".")]
        assert len(found) == 1 and "-1" in found[0].fix
        assert passes(**{key: -1})


# --- hard case A10, the half that settings decide -------------------------------------------------------------------


def test_a10_no_conversation_may_be_longer_than_a_micro_batch():
    assert passes(data__max_length=8, data__max_token_len_per_gpu=8)
    problem = only(data__max_length=9, data__max_token_len_per_gpu=8)
    assert problem.key == "data.max_length" and "9 tokens does not fit into a micro batch of max_token_len_per_gpu = 8" in problem.why
    # with TP 4 and sequence parallelism a micro batch is a multiple of 4: of 11 tokens 8 can be used
    problem = only(data__max_length=9, data__max_token_len_per_gpu=11)
    assert "= 11, of which 8 are a multiple of TP 4" in problem.why
    assert problem.fix == "data.max_length=8, or data.max_token_len_per_gpu=12"
    assert passes(data__max_length=9, data__max_token_len_per_gpu=12)
    assert passes(data__max_length=9, data__max_token_len_per_gpu=11, engine__sequence_parallel=False)
    problem = only(data__max_token_len_per_gpu=3)
    assert (problem.key, problem.fix) == ("data.max_token_len_per_gpu", "at least 4") and passes(data__max_token_len_per_gpu=4)


def test_lengths_and_positions():
    assert passes(data__max_length=4096, data__max_token_len_per_gpu=8192)
    assert "4096 positions" in only(data__max_length=4097, data__max_token_len_per_gpu=8192).why
    assert passes(data__max_token_len_per_gpu=4096)
    assert only(level="warning", data__max_token_len_per_gpu=4097).fix == "data.max_length=4096"


# --- optimizer ------------------------------------------------------------------------------------------------------


def test_learning_rates():
    assert passes(optim__lr=1e-5, optim__min_lr=1e-5, optim__lr_warmup_init=1e-5)
    assert only(optim__min_lr=2e-5).key == "optim.min_lr"
    assert only(optim__lr_warmup_init=2e-5).key == "optim.lr_warmup_init"


@pytest.mark.parametrize("betas, right",
    [([0.0, 0.0], True), ([0.9, 0.95], True), ([0.9, 1.0], False), ([0.9], False), ([0.9, 0.9, 0.9], False)])
def test_betas(betas, right):
    assert passes(optim__betas=betas) if right else only(optim__betas=betas).key == "optim.betas"


def test_warmup_ends_before_the_run():
    assert passes(trainer__total_training_steps=10, optim__lr_warmup_steps=9)
    assert "the run has 10 steps" in only(trainer__total_training_steps=10, optim__lr_warmup_steps=10).why
    # 1000 rows in batches of 8 are 125 steps an epoch, 500 in 4 epochs.
    assert passes(optim__lr_warmup_steps=499)
    assert "the run has 500 steps" in only(optim__lr_warmup_steps=500).why
    assert passes(optim__lr_warmup_steps_ratio=0.999)
    assert only(optim__lr_warmup_steps_ratio=1.0).key == "optim.lr_warmup_steps_ratio"


def test_nodes():
    two = {"trainer__nnodes": 2, "trainer__rdzv_endpoint": "node0:29500"}
    assert passes(trainer__node_rank=1, **two)
    assert only(trainer__node_rank=2, **two).key == "trainer.node_rank"
    assert only(trainer__nnodes=2).key == "trainer.rdzv_endpoint"
    for wrong in ("node0", "node0:", ":29500", "node0:x"):
        assert "HOST:PORT" in only(trainer__nnodes=2, trainer__rdzv_endpoint=wrong).why


def test_the_search_for_values_that_work_looks_at_few():
    """Divisors by trial up to the number itself took 8 s with ten digits."""
    from mfsdp_cli.config.values import divisors

    assert [divisors(n) for n in (1, 12, 49, 97)] == [[1], [1, 2, 3, 4, 6, 12], [1, 7, 49], [1, 97]]
    assert divisors(10**9)[-2:] == [5 * 10**8, 10**9] and len(divisors(10**9)) == 100
    start = time.process_time()
    problem = only(data__train_batch_size=10**9, data__use_dynamic_bsz=False, data__micro_batch_size_per_gpu=3, rule="batch-divides")
    assert "data.train_batch_size 999999996 or 1000000002" in problem.fix
    assert time.process_time() - start < 1
