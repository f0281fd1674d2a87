"""Every setting of `mfsdp sft`: type, default, unit, range and one line of documentation. No torch, no pydantic.

Key paths follow verl's where verl has the key, so that a line copied from a verl script means the same here
(`aliases.py` has the paths that differ).
"""

from __future__ import annotations

from dataclasses import field

from mfsdp_cli.records import Section

DTYPES = ("bfloat16", "float32")
SAVE_CONTENTS = ("model", "optimizer", "extra")
LOGGERS = ("console", "file", "tensorboard", "wandb")


def opt(default, doc: str, *, unit: str = "", choices: tuple = (), low=None, high=None):
    """A documented dataclass field. `low` and `high` are inclusive bounds of a number, `choices` the legal values
    (of the elements, for a list)."""
    meta = {"doc": doc, "unit": unit, "choices": choices, "low": low, "high": high}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


class ModelSettings(Section):
    path: str | None = opt(None, "model to start from: Hugging Face folder, hub id, or a checkpoint of mfsdp's, of which only the weights are taken")
    trust_remote_code: bool = opt(False, "run Python code that the model folder ships; off, since it is someone else's code")
    use_remove_padding: bool = opt(True, "sequences are packed without padding (THD); the only layout there is")
    lora_rank: int = opt(0, "LoRA is not supported with Megatron-FSDP checkpoints: must stay 0", low=0)


class DataSettings(Section):
    train_files: list[str] = opt([], "parquet files to train on, each with a column of chat messages")
    val_files: list[str] = opt([], "parquet files to validate on; empty: no validation")
    messages_key: str = opt("messages", "column that holds the chat: list of {role, content}")
    train_batch_size: int = opt(8, "conversations per optimizer step, over all ranks", unit="rows", low=1)
    use_dynamic_bsz: bool = opt(True, "form micro batches by token budget; False: by micro_batch_size_per_gpu rows")
    max_token_len_per_gpu: int = opt(1024, "largest micro batch of one rank", unit="tokens", low=2)
    micro_batch_size_per_gpu: int = opt(1, "rows of a micro batch when use_dynamic_bsz is False", unit="rows", low=1)
    max_length: int | None = opt(None, "longest conversation; null: max_token_len_per_gpu", unit="tokens", low=2)
    truncation: str = opt("error", "what to do with a conversation above max_length: error names it, left and right cut that end",
                          choices=("error", "left", "right"))
    pad_mode: str = opt("no_padding", "packed sequences; the only mode there is", choices=("no_padding",))
    shuffle: bool = opt(True, "new order every epoch, a function of (trainer.seed, epoch)")
    train_max_samples: int = opt(-1, "use only the first N training rows; -1: all", unit="rows", low=-1)
    val_max_samples: int = opt(-1, "use only the first N validation rows; -1: all", unit="rows", low=-1)


class EngineSettings(Section):
    use_mbridge: bool = opt(True, "weights and configuration go through Megatron-Bridge; must be True")
    vanilla_mbridge: bool = opt(False, "True would select the deprecated legacy mbridge; must be False")
    use_megatron_fsdp: bool = opt(True, "ZeRO-3 sharding by Megatron-FSDP; must be True")
    use_distributed_optimizer: bool = opt(True, "shard the optimizer; Megatron-FSDP requires True")
    data_parallel_sharding_strategy: str = opt("optim_grads_params", "what Megatron-FSDP shards; only full sharding is supported",
                                               choices=("optim_grads_params",))
    tensor_model_parallel_size: int = opt(1, "ranks that split each matrix", unit="ranks", low=1)
    pipeline_model_parallel_size: int = opt(1, "pipeline stages; must be 1 with Megatron-FSDP", unit="ranks", low=1)
    context_parallel_size: int = opt(1, "ranks that split each sequence; above 1 needs TransformerEngine, and is not offered yet", unit="ranks", low=1)
    expert_model_parallel_size: int = opt(1, "ranks that split the experts of a mixture-of-experts model", unit="ranks", low=1)
    expert_tensor_parallel_size: int = opt(1, "ranks that split each expert's matrices", unit="ranks", low=1)
    sequence_parallel: bool | None = opt(None, "split activations between the matrices along the sequence; null: when TP > 1")
    dtype: str = opt("bfloat16", "parameters and activations; master weights, gradients and Adam moments are float32", choices=DTYPES)
    device: str = opt("auto", "auto: cuda when nvidia-smi lists a GPU, else cpu", choices=("auto", "cuda", "cpu"))
    transformer_impl: str = opt("auto", "layers: ours (local), or TransformerEngine's; auto: the latter for experts, if installed",
                                choices=("auto", "local", "transformer_engine"))
    recompute: str = opt("none", "what is computed again in the backward pass to save memory: nothing but SwiGLU's output, or each layer (full)",
                         choices=("none", "full"))
    param_offload: bool = opt(False, "not supported with Megatron-FSDP: must stay False")
    optimizer_offload: bool = opt(False, "not supported with Megatron-FSDP: must stay False")
    override_transformer_config: dict = opt({}, "fields of Megatron's TransformerConfig to set as given")

    @property
    def sequence_multiple(self) -> int:
        """The tokens of a packed micro batch are a multiple of this: of TP, when sequence parallelism splits them."""
        return 1 if self.sequence_parallel is False else self.tensor_model_parallel_size

    def usable_tokens(self, budget: int) -> int:
        """What a micro batch can use of its token budget, since its padding to that multiple must not outgrow it."""
        return budget // self.sequence_multiple * self.sequence_multiple


class OptimSettings(Section):
    optimizer: str = opt("adam", "AdamW, the only optimizer Megatron-FSDP supports", choices=("adam",))
    lr: float = opt(1e-5, "peak learning rate", low=0.0)
    min_lr: float = opt(1e-6, "learning rate at the end of the decay", low=0.0)
    lr_warmup_init: float = opt(0.0, "learning rate at the start of the warm-up", low=0.0)
    lr_warmup_steps_ratio: float = opt(0.2, "share of all steps spent warming up", low=0.0, high=1.0)
    lr_warmup_steps: int = opt(-1, "steps spent warming up; -1: by lr_warmup_steps_ratio", unit="steps", low=-1)
    lr_decay_style: str = opt("cosine", "shape of the decay from lr to min_lr", choices=("cosine", "linear", "constant"))
    weight_decay: float = opt(0.1, "decoupled weight decay; biases and norms are exempt", low=0.0)
    betas: list[float] = opt([0.9, 0.95], "Adam's two moment decays", low=0.0, high=1.0)
    eps: float = opt(1e-8, "Adam's epsilon", low=0.0)
    clip_grad: float = opt(1.0, "global gradient norm above which gradients are scaled down; 0: no clipping", low=0.0)
    main_grads_dtype: str = opt("float32", "gradients, while summed over micro batches and ranks; bfloat16 saves 2 bytes a parameter",
                                choices=("float32", "bfloat16"))
    exp_avg_dtype: str = opt("float32", "Adam's first moment; bfloat16 saves 2 bytes a parameter", choices=("float32", "bfloat16"))
    exp_avg_sq_dtype: str = opt("float32", "Adam's second moment, likewise", choices=("float32", "bfloat16"))


class CheckpointSettings(Section):
    save_contents: list[str] = opt(["model", "optimizer", "extra"], "what a checkpoint holds; optimizer requires model", choices=SAVE_CONTENTS)
    load_contents: list[str] | None = opt(None, "what a resume restores; null: save_contents", choices=SAVE_CONTENTS)
    async_save: bool = opt(False, "not supported with Megatron-FSDP: must stay False; background_save is ours")
    background_save: bool | None = opt(None, "write while training goes on, from a copy of the state in host memory; null: on GPUs where it fits")
    mbridge_config: dict = opt({}, "options of Bridge's weight saving: distributed_filesystem, memory_efficient")


class TrainerSettings(Section):
    project_name: str = opt("mfsdp-sft", "group of runs, for wandb")
    experiment_name: str = opt("sft", "name of this run, and of its folder under runs/")
    output_dir: str | None = opt(None, "run folder; null: runs/<experiment_name>")
    logger: list[str] = opt(["console", "file"], "where metrics go; console and metrics.jsonl always run", choices=LOGGERS)
    n_gpus_per_node: int = opt(1, "ranks per node (processes, when on CPU)", unit="ranks", low=1, high=1024)
    nnodes: int = opt(1, "machines that take part", unit="nodes", low=1, high=4096)
    node_rank: int = opt(0, "this node's number, when nnodes > 1", low=0)
    rdzv_endpoint: str | None = opt(None, "host:port of node 0, when nnodes > 1")
    total_epochs: int = opt(4, "passes over the training data", low=1)
    total_training_steps: int | None = opt(None, "stop after this many optimizer steps; null: by total_epochs", unit="steps", low=1)
    save_freq: int = opt(100, "save every N steps and at the end; -1: only at the end", unit="steps", low=-1)
    test_freq: int = opt(100, "validate every N steps and at the end; -1: only at the end", unit="steps", low=-1)
    max_ckpt_to_keep: int | None = opt(3, "newest complete checkpoints to keep; null: all", low=1)
    keep_every: int | None = opt(None, "also keep the checkpoints of steps divisible by this, for good", unit="steps", low=1)
    keep_best: int = opt(0, "also keep so many with the best best_metric; each save must be validated", low=0)
    best_metric: str = opt("val_loss", "metric of the validation by which a checkpoint is judged; the lower the better", choices=("val_loss",))
    resume_mode: str = opt("auto", "auto: from the run folder's latest checkpoint; disable: refuse a used folder; resume_path: from resume_from_path",
                           choices=("auto", "disable", "resume_path"))
    resume_from_path: str | None = opt(None, "checkpoint folder to continue from, when resume_mode is resume_path")
    seed: int = opt(42, "seed of the data order and of dropout", low=0)
    startup_timeout_s: int = opt(1800, "longest wait for all ranks to join and for any one collective", unit="s", low=10)


class SftSettings(Section):
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
