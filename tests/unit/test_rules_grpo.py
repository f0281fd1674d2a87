import random

import pytest
from facts_for_tests import CHAT, LLAMA, QWEN2
from grpo_for_tests import CPU, cpu_facts, grpo_facts, grpo_settings, only, passes, problems, prompt_file

from mfsdp_cli.config.load import load
from mfsdp_cli.config.rules import check
from mfsdp_cli.config.rules_grpo import update_problem
from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID


def test_the_reference_run_is_in_order():
    assert passes() and [p.rule for p in problems(level="note")] == ["max-connections-tp-cp"]
    assert check(grpo_settings(**CPU), {}, cpu_facts()) == []


def test_the_shared_rules_hold_here_too():
    found = problems(engine__use_megatron_fsdp=False, checkpoint__async_save=True, checkpoint__save_contents=["optimizer"],
                     engine__pipeline_model_parallel_size=2, engine__override_transformer_config={"gradient_accumulation_fusion": True})
    assert {p.key for p in found} >= {"engine.use_megatron_fsdp", "checkpoint.async_save", "checkpoint.save_contents",
                                      "engine.pipeline_model_parallel_size",
                                      "engine.override_transformer_config.gradient_accumulation_fusion"}
    assert only(grpo_facts(environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})).key == "CUDA_DEVICE_MAX_CONNECTIONS"
    assert "--for rl" in only(data__train_files=[]).fix
    assert only(optim__lr_warmup_steps=10, trainer__total_training_steps=10).key == "optim.lr_warmup_steps"
    # 1000 prompts in batches of 32 are 31 steps an epoch, 465 in 15 epochs.
    assert passes(optim__lr_warmup_steps=464) and "465 steps" in only(optim__lr_warmup_steps=465).why


# --- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator, name", [("grpo", "GRPO"), ("rloo", "RLOO"), ("dr_grpo", "Dr. GRPO")])
def test_a_group_has_two(estimator, name):
    assert passes(rollout__n=2, algorithm__adv_estimator=estimator)
    problem = only(rollout__n=1, algorithm__adv_estimator=estimator)
    assert (problem.key, problem.found, problem.code) == ("rollout.n", "1", CONFIG_INVALID)
    assert problem.why == f"{name} compares responses of one prompt, so it needs at least 2."
    assert problem.fix == "set rollout.n to 2 or more (presets use 8)"
    assert passes(rollout__n=1, trainer__val_only=True), "nothing is compared"


def test_the_batch_is_split_into_whole_mini_batches():
    for mini in (1, 16, 32):
        assert passes(data__train_batch_size=32, actor__ppo_mini_batch_size=mini)
    problem = only(data__train_batch_size=32, actor__ppo_mini_batch_size=12)
    assert "32 mod 12 = 8" in problem.why
    assert problem.fix == "actor.ppo_mini_batch_size 4, 8 or 16, or data.train_batch_size 36"
    assert "larger than the batch of 32" in only(data__train_batch_size=32, actor__ppo_mini_batch_size=33).why


# --- hard case A7: accumulation of zero -----------------------------------------------------------------------------

A7 = {"trainer__n_gpus_per_node": 4, "engine__tensor_model_parallel_size": 1, "data__train_batch_size": 8, "actor__ppo_mini_batch_size": 8,
      "rollout__n": 2, "actor__use_dynamic_bsz": False}


def test_a7_accumulation_of_zero():
    problem = only(actor__ppo_micro_batch_size_per_gpu=16, **A7)
    assert problem.key == "actor.ppo_micro_batch_size_per_gpu" and problem.code == CONFIG_INVALID
    assert "8 x 2 / 4 = 4 samples per rank per update, below micro batch 16" in problem.why
    assert problem.fix == "actor.ppo_micro_batch_size_per_gpu 1, 2 or 4, or actor.use_dynamic_bsz=True"
    assert passes(actor__ppo_micro_batch_size_per_gpu=4, **A7)
    assert only(actor__ppo_micro_batch_size_per_gpu=5, **A7) and only(actor__ppo_micro_batch_size_per_gpu=3, **A7)
    assert passes(actor__ppo_micro_batch_size_per_gpu=16, **(A7 | {"actor__use_dynamic_bsz": True})), "by tokens there is no such number"


def test_an_update_must_be_shared_out_evenly():
    six = A7 | {"trainer__n_gpus_per_node": 6, "rollout__tensor_model_parallel_size": 2}  # 8 x 2 = 16 samples over 6 ranks
    problem = only(actor__ppo_micro_batch_size_per_gpu=1, **six)
    assert problem.key == "actor.ppo_mini_batch_size" and "16 mod 6 = 4" in problem.why
    assert problem.fix == "actor.ppo_mini_batch_size 6 or 9"


def test_update_problem_agrees_with_dealing_out_samples():
    rng = random.Random(0)
    for _ in range(500):
        mini, n, dp, micro = (rng.randint(1, 12) for _ in range(4))
        per_rank = [len(range(r, mini * n, dp)) for r in range(dp)]
        fits = len(set(per_rank)) == 1 and per_rank[0] > 0 and per_rank[0] % micro == 0
        wrong = update_problem(mini, n, dp, micro)
        assert (wrong is None) == fits, (mini, n, dp, micro)
        if wrong and "micro_batch" in wrong[1]:
            better = wrong[1].split("per_gpu ")[1].split(", or actor")[0].replace(" or ", ", ").split(", ")
            assert better and all(update_problem(mini, n, dp, int(m)) is None for m in better)
        elif wrong:
            better = wrong[1].removeprefix("actor.ppo_mini_batch_size ").split(" or ")
            assert better and all(int(m) * n % dp == 0 for m in better)


def test_dynamic_updates_need_a_response_for_each_rank():
    one = {"engine__tensor_model_parallel_size": 1, "actor__ppo_mini_batch_size": 2}
    assert passes(rollout__n=4, **one)
    problem = only(rollout__n=3, **one)
    assert "6 samples cannot feed 8 data-parallel ranks" in problem.why and problem.fix == "actor.ppo_mini_batch_size=3 or more"


def test_there_must_be_one_full_batch():
    facts = grpo_facts(parquet={"train.parquet": prompt_file("train.parquet", 32), "val.parquet": prompt_file("val.parquet", 1)})
    assert passes(facts, algorithm__filter_groups=False)
    assert "there are 32 training prompts" in only(facts, data__train_batch_size=48).why


# --- validation -----------------------------------------------------------------------------------------------------


def test_validation():
    assert passes(trainer__val_only=True)
    assert only(trainer__val_only=True, data__val_files=[]).key == "trainer.val_only"
    assert passes(rollout__val_n=2, rollout__val_temperature=0.1) and passes(rollout__val_n=1, rollout__val_temperature=0.0)
    assert only(level="warning", rollout__val_n=2, rollout__val_temperature=0.0).key == "rollout.val_n"


# --- lengths --------------------------------------------------------------------------------------------------------


def test_prompt_and_response_fit_the_model():
    """Qwen2.5-Math has 4096 positions."""
    assert passes(data__max_prompt_length=1024, data__max_response_length=3072)
    problem = only(data__max_prompt_length=1024, data__max_response_length=3073)
    assert problem.key == "data.max_response_length" and "1024 tokens of prompt + 3073 of response = 4097" in problem.why
    assert "4096 positions" in problem.why and problem.fix == "data.max_response_length=3072"


def test_the_longest_sequence_fits_a_micro_batch():
    lengths = {"data__max_prompt_length": 500, "data__max_response_length": 500}
    assert passes(actor__ppo_max_token_len_per_gpu=1000, **lengths)
    problem = only(actor__ppo_max_token_len_per_gpu=999, **lengths)
    assert problem.key == "actor.ppo_max_token_len_per_gpu" and problem.fix == "actor.ppo_max_token_len_per_gpu=1000 or more"
    # With TP 4 and sequence parallelism a micro batch is a multiple of 4: of 1003 tokens 1000 can be used.
    longer = {"data__max_prompt_length": 501, "data__max_response_length": 500}
    assert "of which 1000 are a multiple of TP 4" in only(actor__ppo_max_token_len_per_gpu=1003, **longer).why
    assert passes(actor__ppo_max_token_len_per_gpu=1004, **longer)
    assert passes(actor__ppo_max_token_len_per_gpu=1003, engine__sequence_parallel=False, **longer)
    assert only(ref__log_prob_max_token_len_per_gpu=999, **lengths).key == "ref.log_prob_max_token_len_per_gpu"
    assert passes(ref__log_prob_max_token_len_per_gpu=999, actor__use_kl_loss=False, **lengths), "without a reference nobody asks it"


def test_overlong_buffer():
    assert passes(algorithm__overlong_buffer_length=512)
    assert only(algorithm__overlong_buffer_length=513).key == "algorithm.overlong_buffer_length"


# --- sampling -------------------------------------------------------------------------------------------------------


def test_training_rollouts_are_sampled_from_the_whole_distribution():
    assert passes(rollout__temperature=0.01, rollout__top_p=1.0, rollout__top_k=-1)
    assert only(rollout__temperature=0.0).key == "rollout.temperature"
    assert only(rollout__top_k=0).fix == "rollout.top_k=-1 takes all"
    assert only(rollout__top_p=0.0).key == "rollout.top_p" and only(rollout__val_top_p=0.0).key == "rollout.val_top_p"
    assert "mismatch" in only(level="warning", rollout__top_p=0.99).why
    # -ln(0.99) = 0.010 is below the alarm of 0.1, -ln(0.9) = 0.105 is not: a flat distribution would set it off in step 1
    assert only(level="warning", rollout__top_p=0.99).fix == "rollout.top_p=1"
    flat = only(level="warning", rollout__top_p=0.9)
    assert "-ln(0.9) = 0.105 nats a token" in flat.why and flat.fix == "rollout.top_p=1, or algorithm.mismatch_alarm=0.21"
    assert only(level="warning", rollout__top_p=0.9, algorithm__mismatch_alarm=0.0).fix == "rollout.top_p=1"
    assert only(level="warning", rollout__top_k=1).key == "rollout.top_k"
    assert passes(rollout__temperature=0.0, rollout__top_p=0.5, rollout__top_k=5, trainer__val_only=True)


def test_one_step_ahead():
    assert passes(rollout__one_step_ahead=True, algorithm__rollout_correction="mask")
    assert only(level="warning", rollout__one_step_ahead=True, algorithm__rollout_correction="none").key == "rollout.one_step_ahead"
    assert passes(algorithm__rollout_correction="none")
    assert "colocate=False" in only(level="note", rule="one-step-ahead-apart", rollout__one_step_ahead=True).fix


# --- the algorithm --------------------------------------------------------------------------------------------------


def test_kl_counts_once():
    assert passes(actor__use_kl_loss=False, algorithm__use_kl_in_reward=True) and passes(actor__use_kl_loss=False)
    assert "counts twice" in only(level="warning", algorithm__use_kl_in_reward=True).why


def test_kl_in_the_loss_has_a_gradient():
    for kind in ("low_var_kl", "k3", "k2", "mse", "abs"):
        assert passes(actor__kl_loss_type=kind)
    for kind in ("kl", "k1"):
        problem = only(level="warning", actor__kl_loss_type=kind)
        assert (problem.key, problem.found) == ("actor.kl_loss_type", kind) and "low_var_kl or k2" in problem.fix
        assert passes(actor__kl_loss_type=kind, actor__use_kl_loss=False)
    assert passes(actor__use_kl_loss=False, algorithm__use_kl_in_reward=True, algorithm__kl_penalty="k1"), "in the reward it is right"


def test_gspo_weighs_sequences_alike():
    assert passes(actor__policy_loss="gspo", actor__loss_agg_mode="seq-mean-token-mean")
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        assert only(level="warning", actor__policy_loss="gspo", actor__loss_agg_mode=mode).key == "actor.loss_agg_mode"
        assert passes(actor__policy_loss="ppo", actor__loss_agg_mode=mode)


def test_dual_clip_is_above_one():
    assert passes(actor__clip_ratio_c=0.0) and passes(actor__clip_ratio_c=1.01)
    assert only(actor__clip_ratio_c=1.0).key == only(actor__clip_ratio_c=0.5).key == "actor.clip_ratio_c"


def test_filter_groups():
    on = {"algorithm__filter_groups": True}
    assert passes(**on) and passes(algorithm__filter_groups_max_batches=0)
    assert only(level="warning", algorithm__filter_groups_max_batches=0, **on).found == "0"
    # 1 + 30 batches of 32 prompts are 992, one more is above the 1000 there are.
    assert passes(algorithm__filter_groups_max_batches=30, **on)
    problem = only(level="warning", algorithm__filter_groups_max_batches=31, **on)
    assert "32 x 32 = 1024 prompts, and there are 1000" in problem.why and problem.fix == "at most 30"


def test_reference():
    same, other = grpo_facts(reference_config=dict(QWEN2)), grpo_facts(reference_config=dict(LLAMA))
    assert passes(same, ref__path="x") and passes(other), "without ref.path it is the model itself"
    found = problems(other, ref__path="x")
    assert [(p.key, p.code) for p in found] == [("ref.path", BAD_INPUT)] * 2 and "architectures is [LlamaForCausalLM]" in found[0].why
    assert "vocab_size is 128256 in the reference and 152064 in the model" in found[1].why
    assert passes(grpo_facts(reference_config=QWEN2 | {"hidden_size": 1536}), ref__path="x"), "a smaller one of the family"
    problem = only(grpo_facts(reference_error="there is no folder x"), ref__path="x")
    assert problem.why == "there is no folder x" and problem.code == BAD_INPUT
    assert only(same, level="warning", ref__path="x", actor__use_kl_loss=False).key == "ref.path"
    assert passes(same, ref__path="x", actor__use_kl_loss=False, algorithm__use_kl_in_reward=True)


def test_one_scorer():
    assert passes(reward__function="a.py:f") and passes(reward__name="length")
    assert "two scorers" in only(reward__function="a.py:f", reward__name="length").why


# --- data files -----------------------------------------------------------------------------------------------------


def with_train(file):
    return grpo_facts(parquet={"train.parquet": file, "val.parquet": prompt_file("val.parquet")})


@pytest.mark.parametrize("columns, why", [
    ({}, ""),
    ({"extra_info": None, "ability": None}, ""),
    ({"extra_info": "null"}, ""),
    ({"reward_model": "struct<ground_truth: int64, style: large_string>"}, ""),
    ({"reward_model": "struct<ground_truth: double>"}, ""),
    ({"extra_info": "string"}, "column extra_info is string: not a struct"),
    ({"prompt": None}, "there is no column prompt"),
    ({"prompt": "string"}, "JSON as text?"),
    ({"data_source": None}, "there is no column data_source"),
    ({"data_source": "int64"}, "not text"),
    ({"reward_model": None}, "there is no column reward_model"),
    ({"reward_model": "string"}, "not a struct"),
    ({"reward_model": "struct<style: string>"}, "no field ground_truth"),
    ({"reward_model": "struct<ground_truth: list<element: string>>"}, "its field ground_truth is list<element: string>, not text"),
])
def test_columns_of_prompts(columns, why):
    facts = with_train(prompt_file("train.parquet", **columns))
    if not why:
        assert passes(facts)
        return
    problem = only(facts)
    assert (problem.key, problem.found, problem.code) == ("data.train_files", "train.parquet", BAD_INPUT)
    assert why in problem.why and "--for rl" in problem.fix


def test_gold_answers_are_never_null():
    assert passes(with_train(prompt_file("train.parquet", nulls={"reward_model.ground_truth": 0, "reward_model.style": 9})))
    problem = only(with_train(prompt_file("train.parquet", nulls={"reward_model.ground_truth": 3})))
    assert problem.why == "reward_model.ground_truth is null in 3 of 1000 rows"
    assert only(with_train(prompt_file("train.parquet", nulls={"data_source": 1}))).why.startswith("data_source is null in 1")
    further_down = with_train(prompt_file("train.parquet", nulls={"data_source": 1}))
    assert passes(further_down, data__train_max_samples=500), "the nulls may be in rows that are not read"


def test_footers_tell_nulls(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mfsdp_cli.launch.facts import read_footer

    kind = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
    rows = [{"style": "rule", "ground_truth": "1"}, {"style": None, "ground_truth": None}, None, {"style": "rule", "ground_truth": ""}]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"reward_model": pa.array(rows * 3, kind), "data_source": ["a", None, "b", "c"] * 3}), path, row_group_size=5)
    facts = read_footer(str(path))
    assert facts.nulls == {"reward_model.style": 6, "reward_model.ground_truth": 6, "data_source": 3}


def test_unused_columns_are_told():
    assert "read text" in only(with_train(prompt_file("train.parquet", images="list<element: binary>")), level="warning").why


def test_files_of_one_data_set_have_one_type_of_prompt():
    other = "list<element: struct<role: string, content: string, name: string>>"
    parquet = {"a": prompt_file("a"), "b": prompt_file("b", extra_info="struct<x: int64>"), "c": prompt_file("c", prompt=other)}
    assert passes(grpo_facts(parquet=parquet), data__train_files=["a", "b"], data__val_files=[])
    assert only(grpo_facts(parquet=parquet), data__train_files=["a", "c"], data__val_files=[]).found == "c"
    renamed = grpo_facts(parquet={"a": prompt_file("a", prompt=None, chat=CHAT)})
    assert passes(renamed, data__train_files=["a"], data__val_files=[], data__prompt_key="chat")


def test_the_origin_is_told():
    loaded = load("grpo", assignments=["actor_rollout_ref.rollout.n=1"], environ={"GEN_TP": "3"}, flags={"model": "m"})
    where = {p.key: p.where for p in check(loaded.settings, loaded.origins, grpo_facts())}
    assert where["rollout.n"] == "command line" and where["data.train_files"] == "default"
    assert where["rollout.tensor_model_parallel_size"] == "$GEN_TP"
