"""Every setting of `mfsdp grpo`, as `schema` has those of `mfsdp sft`; the sections that both share are the same classes.

verl's paths `actor_rollout_ref.actor.*`, `actor_rollout_ref.rollout.*`, `actor_rollout_ref.ref.*` are aliases of `actor.*`,
`rollout.*` and `ref.*` here; actor and reference share `engine.*`, since they must have the same layout.
"""

from __future__ import annotations

from dataclasses import field

from mfsdp_cli.config.schema import CheckpointSettings, EngineSettings, ModelSettings, OptimSettings, TrainerSettings, opt
from mfsdp_cli.records import Section

ADV_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
REWARDS = ("auto", "gsm8k", "gsm8k_flexible", "math", "length")


class RlDataSettings(Section):
    train_files: list[str] = opt([], "parquet files of prompts: columns prompt, data_source, reward_model")
    val_files: list[str] = opt([], "parquet files of prompts to validate on; empty: no validation")
    prompt_key: str = opt("prompt", "column that holds the chat to answer: list of {role, content}")
    train_batch_size: int = opt(32, "prompts per rollout step", unit="prompts", low=1)
    max_prompt_length: int = opt(512, "longest prompt, rendered with the model's template", unit="tokens", low=1)
    max_response_length: int = opt(512, "longest response; a longer one is cut and counted as truncated", unit="tokens", low=1)
    filter_overlong_prompts: bool = opt(True, "leave out prompts above max_prompt_length and report how many; False: they are an error")
    truncation: str = opt("error", "what to do with an overlong prompt that is not filtered", choices=("error", "left", "right"))
    shuffle: bool = opt(True, "new order every epoch, a function of (trainer.seed, epoch)")
    train_max_samples: int = opt(-1, "use only the first N training rows; -1: all", unit="rows", low=-1)
    val_max_samples: int = opt(-1, "use only the first N validation rows; -1: all", unit="rows", low=-1)


class ActorSettings(Section):
    ppo_mini_batch_size: int = opt(16, "prompts per optimizer step, with all their responses", unit="prompts", low=1)
    ppo_epochs: int = opt(1, "passes over one rollout", low=1)
    use_dynamic_bsz: bool = opt(True, "form micro batches by token budget; False: by ppo_micro_batch_size_per_gpu responses")
    ppo_max_token_len_per_gpu: int = opt(8192, "largest micro batch of one rank", unit="tokens", low=2)
    ppo_micro_batch_size_per_gpu: int = opt(2, "responses of a micro batch when use_dynamic_bsz is False", unit="responses", low=1)
    clip_ratio_low: float = opt(0.2, "the probability ratio is clipped below at 1 - this", low=0.0, high=1.0)
    clip_ratio_high: float = opt(0.2, "the probability ratio is clipped above at 1 + this", low=0.0)
    clip_ratio_c: float = opt(3.0, "dual clip: with a negative advantage the loss is bounded at this ratio; 0: off", low=0.0)
    policy_loss: str = opt("ppo", "ppo: ratio of each token; gspo: one ratio a sequence", choices=("ppo", "gspo"))
    loss_agg_mode: str = opt("token-mean", "how token losses become one number", choices=LOSS_AGG_MODES)
    use_kl_loss: bool = opt(True, "add a KL term against the reference model to the loss")
    kl_loss_coef: float = opt(0.001, "weight of that term", low=0.0)
    kl_loss_type: str = opt("low_var_kl", "estimator of that term", choices=KL_TYPES)
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus", low=0.0)


class RolloutSettings(Section):
    name: str = opt("vllm", "sampler: vllm, or hf (transformers; slow, needs nothing else)", choices=("vllm", "hf"))
    n: int = opt(8, "responses per prompt; GRPO compares them, so at least 2", low=1)
    temperature: float = opt(1.0, "sampling temperature of training rollouts", low=0.0)
    top_p: float = opt(1.0, "nucleus of training rollouts; below 1 the sampler's distribution is not the model's", low=0.0, high=1.0)
    top_k: int = opt(-1, "candidates of training rollouts; -1: all", low=-1)
    val_n: int = opt(1, "responses per validation prompt", low=1)
    val_temperature: float = opt(0.0, "temperature of validation; 0: greedy", low=0.0)
    val_top_p: float = opt(1.0, "nucleus of validation", low=0.0, high=1.0)
    tensor_model_parallel_size: int = opt(1, "GPUs of one vLLM engine", unit="GPUs", low=1)
    num_engines: int | None = opt(None, "sampler processes; null: one for each tensor_model_parallel_size GPUs, one on CPU", low=1)
    colocate: bool = opt(True, "samplers share the trainer's GPUs; False: they have GPUs of their own")
    gpu_memory_utilization: float = opt(0.4, "vLLM's share of each GPU's memory", low=0.05, high=0.95)
    enforce_eager: bool = opt(False, "vLLM without CUDA graphs: starts faster, samples slower")
    weight_transfer: str = opt("auto", "way of the weights to the samplers. ipc: vLLM on the trainer's GPUs; nccl: on its own; file: any; auto: by these",
                               choices=("auto", "file", "ipc", "nccl"))
    enable_sleep_mode: bool = opt(False, "free vLLM's memory while training")
    max_num_seqs: int = opt(512, "responses that one vLLM engine samples at a time", low=1)
    one_step_ahead: bool = opt(False, "sample the next batch with the weights of one step ago while training on this one")
    timeout_s: int = opt(1800, "longest wait for one batch of responses", unit="s", low=1)


class RefSettings(Section):
    path: str | None = opt(None, "reference model, given as model.path is; null: model.path")
    log_prob_max_token_len_per_gpu: int | None = opt(None, "largest micro batch of log-probabilities; null: ppo_max_token_len_per_gpu",
                                                     unit="tokens", low=2)


class AlgorithmSettings(Section):
    adv_estimator: str = opt("grpo", "advantage of a response within its group", choices=ADV_ESTIMATORS)
    norm_adv_by_std_in_grpo: bool = opt(True, "grpo: divide by the group's standard deviation")
    use_kl_in_reward: bool = opt(False, "subtract the KL against the reference from the reward, instead of adding it to the loss")
    kl_penalty: str = opt("k1", "estimator of the KL in the reward", choices=KL_TYPES)
    kl_coef: float = opt(0.001, "weight of the KL in the reward", low=0.0)
    rollout_correction: str = opt("truncate", "weight of a token for the mismatch of sampler and trainer: truncate it, or mask the token",
                                  choices=("none", "truncate", "mask"))
    rollout_correction_threshold: float = opt(2.0, "truncate at this weight; mask outside [1 / this, this]", low=1.0)
    mismatch_alarm: float = opt(0.1, "mean |log-probability of sampler - of trainer| per token that stops the run; 0: only logged",
                                unit="nats", low=0.0)
    filter_groups: bool = opt(False, "dynamic sampling: replace groups whose rewards are all equal by groups of further prompts")
    filter_groups_max_batches: int = opt(3, "most extra batches of prompts sampled for that in one step", low=0)
    overlong_filter: bool = opt(False, "truncated responses take no part in the loss")
    overlong_buffer_length: int = opt(0, "soft penalty: responses that end within this many tokens of the limit lose reward; 0: off",
                                      unit="tokens", low=0)
    overlong_penalty_factor: float = opt(1.0, "reward lost at the limit itself", low=0.0)


class RewardSettings(Section):
    name: str = opt("auto", "scorer; auto: by each row's data_source", choices=REWARDS)
    function: str | None = opt(None, "custom scorer, FILE.py:FUNCTION(data_source, solution_str, ground_truth, extra_info) -> number")
    num_workers: int = opt(4, "scoring processes", low=1)
    timeout_s: float = opt(10.0, "longest time for one response; then it counts as timed out and scores 0", unit="s", low=0.1)


class GrpoTrainerSettings(TrainerSettings):
    project_name: str = opt("mfsdp-grpo", "group of runs, for wandb")
    experiment_name: str = opt("grpo", "name of this run, and of its folder under runs/")
    total_epochs: int = opt(15, "passes over the training data", low=1)
    total_training_steps: int | None = opt(None, "stop after this many steps, each a rollout with its updates; null: by total_epochs",
                                           unit="steps", low=1)
    save_freq: int = opt(20, "save every N steps and at the end; -1: only at the end", unit="steps", low=-1)
    test_freq: int = opt(5, "validate every N steps and at the end; -1: only at the end", unit="steps", low=-1)
    best_metric: str = opt("val_reward", "metric of the validation by which a checkpoint is judged; the higher the better",
                           choices=("val_reward", "val_pass_rate"))
    val_before_train: bool = opt(True, "validate before the first step")
    val_only: bool = opt(False, "validate and stop")
    ray_address: str | None = opt(None, "existing Ray cluster; null: a local one for this run")
    samples_per_step: int = opt(64, "responses kept in samples/step_N.parquet; -1: all", low=-1)


class GrpoSettings(Section):
    model: ModelSettings = field(default_factory=ModelSettings)
    data: RlDataSettings = field(default_factory=RlDataSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    optim: OptimSettings = field(default_factory=lambda: OptimSettings(lr=1e-6, min_lr=0.0, lr_warmup_steps_ratio=0.0,
                                                                       lr_decay_style="constant"))
    actor: ActorSettings = field(default_factory=ActorSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    ref: RefSettings = field(default_factory=RefSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    trainer: GrpoTrainerSettings = field(default_factory=GrpoTrainerSettings)
