"""verl's own defaults, by our keys, where they differ from ours and shape what a run learns, how long it is, or what it keeps.

A script relies on those that it does not set, so `from_verl` writes them down. From verl's sft_trainer_engine.yaml and
ppo_megatron_trainer.yaml with their parts (main, mid 2026).
"""

from __future__ import annotations

SHARED = {
    "optim.weight_decay": 0.01,
    "optim.betas": [0.9, 0.999],
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": None,
}
DEFAULTS = {
    "sft": SHARED | {
        "data.train_batch_size": 256,
        "data.micro_batch_size_per_gpu": 4,
        "data.max_token_len_per_gpu": 8192,
        "data.max_length": 1024,
        "optim.lr": 1e-3,
        "optim.min_lr": 0.0,
        "optim.lr_warmup_steps_ratio": 0.0,
        "optim.lr_decay_style": "constant",
    },
    "grpo": SHARED | {
        "data.train_batch_size": 1024,
        "data.filter_overlong_prompts": False,
        "actor.ppo_mini_batch_size": 256,
        "actor.use_dynamic_bsz": False,
        "actor.ppo_max_token_len_per_gpu": 16384,
        "actor.use_kl_loss": False,
        "rollout.n": 1,
        "rollout.tensor_model_parallel_size": 2,
        "rollout.gpu_memory_utilization": 0.5,
        "rollout.max_num_seqs": 1024,
        "algorithm.adv_estimator": "gae",
        "algorithm.rollout_correction": "none",
        "trainer.n_gpus_per_node": 8,
        "trainer.total_epochs": 30,
    },
}
