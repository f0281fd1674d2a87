"""The engine: a Hugging Face model on Megatron-Core with Megatron-FSDP (ZeRO-3), and its optimizer.

The only door to Megatron for the trainers: `forward_backward`, `optimizer_step`, `log_probs`, `named_weights`;
`checkpoint.dtensor` saves and loads one. Megatron-LM's and Bridge's protective asserts sit in validators that a program
building through a provider never passes; those that settings decide are restated in `config.rules`, the rest here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from mfsdp_cli.config.schema import EngineSettings, OptimSettings
from mfsdp_cli.engine import bridge as bridging  # first: it decides how megatron is imported
from mfsdp_cli.engine import forward
from mfsdp_cli.engine.optimizer import DTYPES, build_optimizer, grad_norm
from mfsdp_cli.types import PackedBatch

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402


class NonFiniteGradient(ArithmeticError):
    """The global gradient norm is NaN or infinite; nothing was applied."""


def init_distributed(settings: EngineSettings, timeout_s: int, *, init_method: str = "env://", rank: int = -1, world_size: int = -1,
                     local_rank: int | None = None) -> torch.device:
    """Join the process group and lay out the ranks. Returns this rank's device.

    As torchrun wants it, everything comes from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; otherwise the
    arguments are those of torch.distributed.init_process_group, and local_rank the number of the GPU.
    """
    if settings.device == "cuda" and bridging.ON_CPU:
        raise ValueError("engine.device is cuda, but torch sees no GPU")
    if settings.context_parallel_size > 1:
        raise ValueError("engine.context_parallel_size above 1: packed batches are not split over context-parallel ranks")
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if local_rank is None else local_rank
    device = torch.device("cpu") if bridging.ON_CPU else torch.device("cuda", local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        context_parallel_size=settings.context_parallel_size,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
    )
    return device


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding: the model's own when TP divides them, else the next multiple of lcm(128, TP).

    128 so that the size, which the checkpoint fixes, suits any TP up to 128 that is a power of two.
    """
    return vocab_size if vocab_size % tp == 0 else math.ceil(vocab_size / math.lcm(128, tp)) * math.lcm(128, tp)


class MegatronEngine:
    """One rank's part of the model. Every method that runs the model or touches weights is collective.

    model_path        Hugging Face folder or hub id: configuration, and weights when `load_weights`; otherwise a checkpoint's
                      are to be loaded, and the folder needs none
    optim             None: a frozen model, for evaluation
    vocab_rows        rows of the embedding fixed by a checkpoint; None: `padded_vocab_size`
    """

    def __init__(
        self,
        model_path: str,
        settings: EngineSettings,
        optim: OptimSettings | None,
        *,
        device: torch.device,
        seed: int = 0,
        load_weights: bool = True,
        vocab_rows: int | None = None,
        trust_remote_code: bool = False,
    ):
        self.settings, self.device = settings, device
        self.dtype = DTYPES[settings.dtype]
        self.bridge = bridging.open_model(model_path, trust_remote_code, load_weights)
        self.hf_config = bridging.config_of(self.bridge)
        self.vocab_size = self.hf_config.vocab_size
        self.vocab_rows = vocab_rows or padded_vocab_size(self.vocab_size, settings.tensor_model_parallel_size)
        torch.manual_seed(seed)  # the CPU's generator too: a process starts with a random one, and checkpoints hold it
        model_parallel_cuda_manual_seed(seed)
        provider = build_provider(self.bridge, settings, self.vocab_rows, on_cpu=device.type == "cpu")
        if optim is None:
            # Before the wrapper sees it: then only the shard in the model's dtype exists, no float32 weights, no gradients.
            provider.register_pre_wrap_hook(freeze)
        self.model = provider.provide_distributed_model(
            ddp_config=fsdp_config(DTYPES[optim.main_grads_dtype] if optim else torch.float32),
            use_megatron_fsdp=True,
            bf16=provider.bf16,
            fp16=False,
            use_cpu_initialization=provider.use_cpu_initialization,
            data_parallel_random_init=False,
        )
        self.module = self.model[0]
        if load_weights:
            bridging.load_hf_weights(self.bridge, self.model)
        self.optim = optim
        self.optimizer = build_optimizer(self.model, optim, self.dtype) if optim else None
        self._broken = torch.zeros((), device=device)  # 1 from the first non-finite gradient norm on
        self.num_updates = 0
        self._tasks: list = []  # `_conversion_tasks`

    # --- layout -------------------------------------------------------------------------------------------------

    @property
    def dp_rank(self) -> int:
        return mpu.get_data_parallel_rank()

    @property
    def dp_size(self) -> int:
        return mpu.get_data_parallel_world_size()

    @property
    def tp_rank(self) -> int:
        return mpu.get_tensor_model_parallel_rank()

    @property
    def dp_group(self):
        return mpu.get_data_parallel_group()

    @property
    def sequence_multiple(self) -> int:
        """The length of a packed batch must be a multiple of this."""
        return self.settings.sequence_multiple

    # --- training -----------------------------------------------------------------------------------------------

    def forward_backward(self, micro_batches: list[PackedBatch], loss_fn: Callable[..., torch.Tensor], temperature: float = 1.0,
                         with_entropy: bool = False) -> torch.Tensor:
        """Run the micro batches and leave in the gradient buffers the sum over them and over all data-parallel ranks.

        loss_fn(log_probs [T], batch) -> scalar, and loss_fn(log_probs, batch, entropy [T]) with `with_entropy`; already
        divided by the *global* number of targets: gradients are summed over ranks, never averaged
        (`calculate_per_token_loss`), so that an uneven token count changes nothing.
        Returns this rank's summed loss, detached.
        """
        def one(batch):
            log_probs, entropy = forward.log_probs(self.module, batch, self.vocab_size, temperature)
            loss = loss_fn(log_probs, batch, entropy) if with_entropy else loss_fn(log_probs, batch)
            loss.backward()
            return loss.detach()

        assert self.optimizer is not None
        self.optimizer.zero_grad()  # Megatron-FSDP's buffer
        if not self.module.training:
            self.module.train()
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, batch in enumerate(micro_batches, start=1):
            batch = forward.to_device(batch, self.device)
            if number < len(micro_batches):
                with self.module.no_sync():
                    total += one(batch)
            else:
                total += one(batch)
        finalize_model_grads(self.model)
        return total

    @torch.no_grad()
    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Clip by global norm and apply AdamW at `lr`. Returns the norm before clipping, float32 [] on the device; nothing waits for it.

        Where the norm is NaN or infinite nothing is applied, then and in all later steps, until the caller has learned of it by
        `finite`. Megatron-FSDP's own check does not exist with ZeRO-3, and its step reports success after writing NaN everywhere.
        """
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.prepare_grads()
        norm = grad_norm(optimizer)
        self._broken = torch.maximum(self._broken, (~norm.isfinite()).float())
        clip = self.optim.clip_grad
        # As torch.nn.utils.clip_grad_norm_: times clip / (norm + 1e-6) where that is below 1.
        optimizer.optimizer.step((norm + 1e-6).div(clip).clamp(min=1.0) if clip > 0 else None, self._broken)
        self.module.start_param_sync()  # distrib_optimizer.py, step_with_ready_grads: the module's own parameters are back in it
        self.num_updates += 1
        return norm

    def finite(self, norm: float) -> float:
        """The norm of an earlier `optimizer_step`, now that it is on the host. Raises NonFiniteGradient."""
        if not math.isfinite(norm):
            self._broken.zero_()
            raise NonFiniteGradient(f"global gradient norm is {norm}")
        return norm

    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Parameter name -> Adam's exp_avg and exp_avg_sq (DTensors that the optimizer uses)."""
        optimizer = self.optimizer
        return {optimizer._param_name(p): optimizer.optimizer.state[p] for g in optimizer.param_groups for p in g["params"]}

    def set_num_updates(self, count: int) -> None:
        """Continue after `count` optimizer steps: Adam corrects its moments by that number."""
        self.num_updates = count
        for entry in self.optimizer.optimizer.state.values():
            entry["step"].fill_(count)

    # --- evaluation ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(self, micro_batches: list[PackedBatch], temperature: float = 1.0) -> Iterator[torch.Tensor]:
        """Log-probability of each label, float32 [T] a micro batch. Collective: iterate to the end on every rank."""
        self.module.eval()
        for batch in micro_batches:
            yield forward.log_probs(self.module, forward.to_device(batch, self.device), self.vocab_size, temperature)[0]

    # --- weights ------------------------------------------------------------------------------------------------

    def named_weights(self, dtype: torch.dtype | None = None, on_cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor, on CPU or on the device), a stream; every rank must iterate to the end. A tied output layer,
        which is the embedding, is not in it.

        A step ends with the raw, freed parameters in the module (distrib_optimizer.py, step_with_ready_grads), from
        which an export would read garbage: synchronize_param_gather puts the sharded ones back first.
        """
        self.module.synchronize_param_gather()
        tied = bool(getattr(self.hf_config, "tie_word_embeddings", False))
        tasks = bridging.whole_tasks(self._conversion_tasks(), dtype or self.dtype)
        for name, tensor in bridging.export_weights(self.bridge, self.model, self.vocab_size, tasks, on_cpu):
            if not (tied and name == "lm_head.weight"):
                yield name, tensor

    def _conversion_tasks(self) -> list:
        """Made at the first export, and again should the modules have got other parameters since."""
        def current(task) -> bool:
            return getattr(task.megatron_module, task.param_name.rpartition(".")[2], None) is task.param_weight

        if not self._tasks or not all(map(current, self._tasks)):
            self._tasks = bridging.conversion_tasks(self.bridge, self.model)
        return self._tasks


def freeze(model: list) -> list:
    for chunk in model:
        chunk.requires_grad_(False)
    return model


def _sequence_parallel(settings: EngineSettings) -> bool:
    tp = settings.tensor_model_parallel_size
    return tp > 1 if settings.sequence_parallel is None else settings.sequence_parallel


def use_transformer_engine(settings: EngineSettings, has_experts: bool, on_cpu: bool) -> bool:
    """auto: for experts, which Megatron's local layers compute one by one. In a dense model ours are faster (docs/performance.md)."""
    if settings.transformer_impl == "transformer_engine" and not bridging.HAVE_TRANSFORMER_ENGINE:
        raise ValueError("engine.transformer_impl is transformer_engine, but TransformerEngine cannot be imported")
    wanted = settings.transformer_impl == "transformer_engine" or settings.transformer_impl == "auto" and has_experts
    return bridging.HAVE_TRANSFORMER_ENGINE and wanted and not on_cpu


def build_provider(bridge, settings: EngineSettings, vocab_rows: int, on_cpu: bool):
    """Bridge's provider (a TransformerConfig that builds the model) with our layout, precision and layers in it."""
    provider = bridge.to_megatron_provider(load_weights=False)
    transformer_engine = use_transformer_engine(settings, bool(provider.num_moe_experts), on_cpu)
    overrides = {
        "tensor_model_parallel_size": settings.tensor_model_parallel_size,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": settings.context_parallel_size,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        # Megatron's default is TP, Bridge's is 1: say it.
        "expert_tensor_parallel_size": settings.expert_tensor_parallel_size,
        "sequence_parallel": _sequence_parallel(settings),
        "vocab_size": vocab_rows,
        "should_pad_vocab": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Gradients are summed over ranks and never scaled: with the 1/DP scaling, Megatron-FSDP scales an accumulating
        # buffer again at every micro batch when a shard group has one rank (expert-DP 1).
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": on_cpu,
        "pipeline_dtype": DTYPES[settings.dtype],
        "autocast_dtype": DTYPES[settings.dtype],
    }
    if provider.num_moe_experts:
        # Hugging Face adds the balancing loss only when asked to (output_router_logits), so its loss here is the LM loss.
        overrides |= {"moe_aux_loss_coeff": 0.0, "moe_token_dispatcher_type": "alltoall"}
    if settings.recompute == "full":
        overrides |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if not transformer_engine:
        from mfsdp_cli.engine.layers import packed_layer_spec

        overrides |= {"transformer_layer_spec": packed_layer_spec, "persist_layer_norm": False, "apply_rope_fusion": False, "masked_softmax_fusion": False}
        if provider.num_moe_experts:
            overrides |= {"moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_router_fusion": False}
        else:
            overrides |= {"use_te_activation_func": True}  # the name of the place that layers.GateAndUp takes
    fused = transformer_engine or bool(provider.num_moe_experts) and not on_cpu
    overrides |= {"bias_dropout_fusion": fused, "bias_activation_fusion": fused}
    overrides |= settings.override_transformer_config
    provider.apply_overrides_and_finalize(dtype=DTYPES[settings.dtype], overrides=overrides)
    return provider


def hollow_model(hf_folder: str, vocab_rows: int, dtype: torch.dtype):
    """(bridge, [GPTModel]) on one rank, without any wrapper, its parameters on the meta device: names, shapes and layers for an
    export, which gives each layer its weights in turn."""
    bridge = bridging.open_model(hf_folder, with_weights=False)
    settings = EngineSettings(dtype=str(dtype).removeprefix("torch."), override_transformer_config={"perform_initialization": False})
    provider = build_provider(bridge, settings, vocab_rows, on_cpu=True)
    model = provider.provide_distributed_model(wrap_with_ddp=False, mixed_precision_wrapper=None, use_cpu_initialization=True,
                                               init_model_with_meta_device=True)
    return bridge, model


def fsdp_config(grads: torch.dtype = torch.float32) -> DistributedDataParallelConfig:
    """ZeRO-3 with float32 main weights, and gradients summed over micro batches and ranks in `grads`, all written out: the defaults
    are `no_shard` and bfloat16 main gradients, and `grad_reduce_in_fp32` is never read by Megatron-FSDP."""
    return DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        outer_dp_sharding_strategy="no_shard",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        average_in_collective=False,
        gradient_reduce_div_fusion=False,
        megatron_fsdp_main_params_dtype=torch.float32,
        megatron_fsdp_main_grads_dtype=grads,
        megatron_fsdp_grad_comm_dtype=grads,
        megatron_fsdp_use_decoupled_grad=grads != torch.float32,
    )
