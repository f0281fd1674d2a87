"""Whatever the checks accept starts and takes two steps: random settings over tiny models, on one to four ranks.

A few, always the same. MFSDP_ACCEPTED=60 takes so many of each kind, MFSDP_ACCEPTED_SEED=1000 others.
"""

from __future__ import annotations

import math
import os
import random

import pytest
from direct import by_letters, run_loop
from models import FAMILIES
from runs import train_ranks

from mfsdp_cli.checkpoint.finding import complete_steps
from mfsdp_cli.checkpoint.manifest import require_complete
from mfsdp_cli.launch.start import check
from mfsdp_cli.train.metrics import read_metrics

FIRST = int(os.environ.get("MFSDP_ACCEPTED_SEED", 0))
NUMBER = int(os.environ.get("MFSDP_ACCEPTED", 0))
STEPS = 2
MOST_DRAWS = 200

SHARED = {
    "engine.dtype": ["float32", "bfloat16"],
    "engine.recompute": ["full"],
    "engine.transformer_impl": ["local"],
    "engine.override_transformer_config": ["{attention_softmax_in_fp32: true}", "{masked_softmax_fusion: false}",
                                           "{moe_aux_loss_coeff: 0.01}",
                                           "{moe_token_dispatcher_type: allgather}", "{bias_activation_fusion: false}",
                                           "{apply_rope_fusion: false}",
                                           "{moe_router_dtype: fp32}", "{deterministic_mode: true}", "{cross_entropy_loss_fusion: true}"],
    "data.shuffle": ["False"],
    "data.train_max_samples": ["12", "5", "1"],
    "data.val_max_samples": ["1", "3"],
    "optim.lr": ["0", "1e-3", "1e-2"],
    "optim.min_lr": ["0", "1e-3"],
    "optim.lr_warmup_init": ["1e-6"],
    "optim.lr_warmup_steps_ratio": ["0", "0.9"],
    "optim.lr_warmup_steps": ["0", "1"],
    "optim.lr_decay_style": ["cosine", "linear", "constant"],
    "optim.weight_decay": ["0", "1"],
    "optim.betas": ["[0, 0]", "[0.5, 0.999]"],
    "optim.eps": ["1e-3", "0"],
    "optim.clip_grad": ["0", "0.01"],
    "checkpoint.save_contents": ["[model]", "[model, optimizer]", "[model, extra]", "[extra]"],
    "checkpoint.load_contents": ["[model]"],
    "checkpoint.mbridge_config": ["{memory_efficient: true}"],
    "trainer.save_freq": ["1", "2", "-1"],
    "trainer.test_freq": ["1", "-1"],
    "trainer.max_ckpt_to_keep": ["1", "null"],
    "trainer.seed": ["0", "7", "4294967296", "9223372036854775807"],
    "trainer.logger": ["[console]", "[tensorboard]", "[]"],
}
SFT = SHARED | {
    "trainer.n_gpus_per_node": ["1", "2", "3", "4", "4"],
    "engine.tensor_model_parallel_size": ["1", "2", "4"],
    "engine.expert_model_parallel_size": ["1", "2", "4"],
    "engine.sequence_parallel": ["True", "False"],
    "data.train_batch_size": ["1", "3", "4", "12"],
    "data.use_dynamic_bsz": ["False", "False"],
    "data.max_token_len_per_gpu": ["64", "100", "4096"],
    "data.micro_batch_size_per_gpu": ["1", "2", "3"],
    "data.max_length": ["40", "48", "64"],
    "data.truncation": ["left", "right"],
}
GRPO = SHARED | {
    "data.train_batch_size": ["1", "2", "4", "6"],
    "data.max_prompt_length": ["48", "64"],
    "data.max_response_length": ["1", "6", "12"],
    "data.filter_overlong_prompts": ["False"],
    "data.truncation": ["left", "right"],
    "actor.ppo_mini_batch_size": ["1", "2", "3"],
    "actor.ppo_epochs": ["2"],
    "actor.use_dynamic_bsz": ["False"],
    "actor.ppo_max_token_len_per_gpu": ["76", "200"],
    "actor.ppo_micro_batch_size_per_gpu": ["1", "4"],
    "actor.clip_ratio_low": ["0", "1"],
    "actor.clip_ratio_high": ["0", "0.28"],
    "actor.clip_ratio_c": ["0", "10"],
    "actor.policy_loss": ["gspo"],
    "actor.loss_agg_mode": ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
    "actor.use_kl_loss": ["True", "False"],
    "actor.kl_loss_coef": ["0", "1"],
    "actor.kl_loss_type": ["kl", "k1", "abs", "mse", "k2", "k3"],
    "actor.entropy_coeff": ["0.01"],
    "rollout.n": ["2", "3"],
    "rollout.temperature": ["0.7", "1.5", "0"],
    "rollout.top_p": ["0.9", "0"],
    "rollout.top_k": ["20", "1", "0"],
    "rollout.val_n": ["2"],
    "rollout.val_temperature": ["0.7"],
    "rollout.val_top_p": ["0.5"],
    "rollout.num_engines": ["1"],
    "rollout.weight_transfer": ["file"],
    "rollout.max_num_seqs": ["1", "5"],
    "rollout.one_step_ahead": ["True"],
    "ref.log_prob_max_token_len_per_gpu": ["80", "300"],
    "algorithm.adv_estimator": ["dr_grpo", "rloo"],
    "algorithm.norm_adv_by_std_in_grpo": ["False"],
    "algorithm.use_kl_in_reward": ["True"],
    "algorithm.kl_penalty": ["kl", "abs", "low_var_kl"],
    "algorithm.kl_coef": ["0", "0.1"],
    "algorithm.rollout_correction": ["none", "mask"],
    "algorithm.rollout_correction_threshold": ["1", "5"],
    "algorithm.mismatch_alarm": ["0"],
    "algorithm.filter_groups": ["True"],
    "algorithm.filter_groups_max_batches": ["0", "1"],
    "algorithm.overlong_filter": ["True"],
    "algorithm.overlong_buffer_length": ["1", "4"],
    "algorithm.overlong_penalty_factor": ["0", "2"],
    "reward.name": ["length"],
    "trainer.val_before_train": ["False"],
    "trainer.samples_per_step": ["0", "-1", "3"],
}
USUAL = {"sft": {"engine.device": "cpu", "data.train_batch_size": "4", "trainer.total_training_steps": str(STEPS)},
         "grpo": {"engine.device": "cpu", "data.train_batch_size": "4", "actor.ppo_mini_batch_size": "2", "data.max_prompt_length": "64",
                  "data.max_response_length": "8",
                  "rollout.name": "hf", "rollout.n": "4", "reward.name": "gsm8k", "trainer.total_training_steps": str(STEPS)}}
ALWAYS = ("trainer.n_gpus_per_node", "engine.tensor_model_parallel_size", "engine.expert_model_parallel_size")
SPACES, SHARE = {"sft": SFT, "grpo": GRPO}, {"sft": 0.35, "grpo": 0.2}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Folder with train.parquet and test.parquet, of conversations of 20 to 40 tokens or so."""
    from program import mfsdp

    folder = tmp_path_factory.mktemp("chats")
    code, _, err = mfsdp("prep-data", "arithmetic", "-o", folder, "--rows", 40, "--test-rows", 5)
    assert code == 0, err
    return folder


def accepted(kind: str, seed: int, tiny, data, run_dir):
    """(what was drawn, settings) of the first draw that has no error."""
    chance = random.Random(f"{kind} {seed}")
    for _ in range(MOST_DRAWS):
        family = chance.choice([*FAMILIES] + ["qwen3_moe"] * (kind == "sft"))
        drawn = {key: chance.choice(values) for key, values in SPACES[kind].items() if key in ALWAYS or chance.random() < SHARE[kind]}
        if drawn.keys() & {"rollout.one_step_ahead", "rollout.top_p", "rollout.top_k"}:
            drawn["algorithm.mismatch_alarm"] = "0"  # sampler and trainer differ by more here than it allows, of which the checks warn
        if chance.random() < 0.4:
            drawn["data.val_files"] = f"[{data / 'test.parquet'}]"
        fixed = {"model.path": tiny(family), "data.train_files": f"[{data / 'train.parquet'}]", "trainer.output_dir": run_dir}
        words = [f"{key}={value}" for key, value in (USUAL[kind] | drawn | fixed).items()]
        checked = check(kind, preset=None, config=None, assignments=words, flags={}, resume=None, environ={"CUDA_VISIBLE_DEVICES": ""})
        if checked.exit_code == 0:
            return f"{family} " + " ".join(f"{k}={v}" for k, v in drawn.items()), checked.settings
    raise AssertionError(f"none of {MOST_DRAWS} draws was accepted")


def judge(settings, run_dir) -> None:
    """Two steps with finite numbers, and a whole checkpoint of what was asked for at the end."""
    records = list(read_metrics(run_dir))
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2], records
    assert all(math.isfinite(r[name]) for r in steps for name in ("loss", "grad_norm", "lr")), steps
    validated = {r["step"] for r in records if any(name.startswith("val") for name in r)}
    assert (STEPS in validated) == bool(settings.data.val_files)
    found = complete_steps(run_dir / "checkpoints")
    assert max(found) == STEPS and require_complete(found[STEPS]).contents == settings.checkpoint.save_contents
    keep = settings.trainer.max_ckpt_to_keep
    assert len(found) == (min(STEPS, keep or STEPS) if settings.trainer.save_freq == 1 else 1)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + (NUMBER or 4)))
def test_sft_that_is_accepted_takes_two_steps(tiny, chats, tmp_path, seed):
    drawn, settings = accepted("sft", seed, tiny, chats, tmp_path / "run")
    print(drawn)
    train_ranks(settings, tmp_path / "run")
    judge(settings, tmp_path / "run")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + (NUMBER or 4)))
def test_grpo_that_is_accepted_takes_two_steps(tiny, prompts, tmp_path, seed):
    drawn, settings = accepted("grpo", seed, tiny, prompts, tmp_path / "run")
    print(drawn)
    run_loop(settings, tmp_path / "run", by_letters)
    judge(settings, tmp_path / "run")
