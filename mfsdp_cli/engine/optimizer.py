"""AdamW over Megatron-FSDP's float32 main weights, whose gradients and moments may be kept in bfloat16 to save memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim.adamw import adamw

from mfsdp_cli.config.schema import OptimSettings
from mfsdp_cli.engine import bridge as bridging  # first: it decides how megatron is imported

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CHUNK = 2**27  # elements that are float32 for a moment: 1.5 GiB for gradient and moments


def is_lean(optim: OptimSettings) -> bool:
    """Whether anything that AdamW reads is narrower than float32."""
    return "bfloat16" in (optim.main_grads_dtype, optim.exp_avg_dtype, optim.exp_avg_sq_dtype)


def build_optimizer(model: list, optim: OptimSettings, dtype: torch.dtype):
    """Megatron's optimizer around an AdamW. Clipping and the finite check are the engine's (`optimizer_step`)."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=0.0,
        use_distributed_optimizer=True,
        bf16=dtype == torch.bfloat16,
        fp16=False,
        params_dtype=dtype,
    )
    optimizer = get_megatron_optimizer(config, model)
    for group in optimizer.param_groups:
        # Megatron leaves this to its parameter scheduler, which is not used here; the factor is 0 for biases and norms.
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
    if is_lean(optim):
        optimizer.optimizer = LeanAdamW(optimizer.param_groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)
        # Only says where gradients are: its own optimizer of that name is TransformerEngine's.
        optimizer.config.use_precision_aware_optimizer = optim.main_grads_dtype == "bfloat16"
    prepare_adam(optimizer, DTYPES[optim.exp_avg_dtype], DTYPES[optim.exp_avg_sq_dtype])
    return optimizer


def prepare_adam(optimizer, exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32) -> None:
    """Give every parameter its moments now, and on a GPU choose torch's fused kernel.

    Torch's AdamW makes the state of a parameter at its first gradient, which a parameter whose shard on this rank is
    empty never gets: ranks would hold different sets of names, and the collectives of a save or load would hang. A
    template made by Megatron's way, a step with zero gradients, would decay the weights.
    """
    adam = optimizer.optimizer
    fused = isinstance(adam, torch.optim.AdamW) and not bridging.ON_CPU
    for group in adam.param_groups:
        if fused:
            group.update(fused=True, foreach=False)
        for param in group["params"]:
            step = torch.zeros((), device=param.device if fused else "cpu")
            adam.state[param] = {"step": step, "exp_avg": torch.zeros_like(param.data, dtype=exp_avg_dtype),
                                 "exp_avg_sq": torch.zeros_like(param.data, dtype=exp_avg_sq_dtype)}


def gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part, in the dtype of the main gradients; None when the part is empty. A gradient narrower than its float32
    parameter lies in `decoupled_grad` (megatron_fsdp/param_and_grad_buffer.py, update_main_grads)."""
    decoupled = getattr(param, "decoupled_grad", None)
    found = param.grad if decoupled is None else decoupled
    return None if found is None else found._local_tensor


def grad_norm(optimizer) -> float:
    """Over all parameters and ranks, each element counted once; summed up in float32 whatever the gradients are in."""
    grads = optimizer.get_grads_for_grad_norm()
    norms = torch._foreach_norm(grads, 2, torch.float32) if grads else []
    return float(get_grad_norm_fp32(list(norms), grad_stats_parallel_group=optimizer.get_grad_stats_parallel_group()))


def scale_gradients(optimizer, factor: float) -> None:
    """As clipping does. Gradients in bfloat16 are scaled when AdamW has them in float32."""
    if isinstance(optimizer.optimizer, LeanAdamW):
        optimizer.optimizer.grad_factor = factor
        return
    for param in optimizer.get_parameters():
        if (grad := gradient(param)) is not None:
            grad.mul_(factor)


class LeanAdamW(torch.optim.AdamW):
    """torch's AdamW, given a part of the parameters at a time, whose gradients and moments become float32 for that moment.

    Moments go back to their dtype rounded to nearest. bfloat16 has 8 bits: a moment that should shrink by less than 2^-9 of itself
    stays as it is for ever. It shrinks by 1 - beta of itself; the rule narrow-moments keeps that apart from 2^-9.
    """

    grad_factor = 1.0

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None
        for group in self.param_groups:
            for params in _chunks(group["params"]):
                self._step(group, params)
        self.grad_factor = 1.0

    def _step(self, group: dict, params: list[torch.nn.Parameter]) -> None:
        states = [self.state[param] for param in params]
        grads = [gradient(param).to(torch.float32, copy=self.grad_factor != 1.0) for param in params]
        if self.grad_factor != 1.0:
            torch._foreach_mul_(grads, self.grad_factor)
        kept = [[state[name]._local_tensor for state in states] for name in ("exp_avg", "exp_avg_sq")]
        exp_avgs, exp_avg_sqs = ([moment.float() for moment in moments] for moments in kept)
        adamw(
            [param._local_tensor for param in params], grads, exp_avgs, exp_avg_sqs, [], [state["step"] for state in states],
            foreach=group["foreach"], fused=group["fused"], amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )
        for moments, updated in zip(kept, (exp_avgs, exp_avg_sqs)):
            for moment, value in zip(moments, updated):
                if moment is not value:
                    moment.copy_(value)


def _chunks(params: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Those that have a gradient, by CHUNK elements or a single larger one."""
    chunk: list[torch.nn.Parameter] = []
    size = 0
    for param in params:
        if (grad := gradient(param)) is None:
            continue
        if chunk and size + grad.numel() > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(param)
        size += grad.numel()
    if chunk:
        yield chunk
