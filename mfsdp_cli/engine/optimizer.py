"""AdamW over Megatron-FSDP's float32 main weights, whose gradients and moments may be kept in bfloat16 to save memory.

Nothing here waits for the GPU: the gradient norm, the factor of clipping and the decision to apply nothing stay on the device, so that
the next forward pass can be queued while this step still runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from mfsdp_cli.config.schema import OptimSettings
from mfsdp_cli.engine import bridge as bridging  # first: it decides how megatron is imported

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CHUNK = 2**27  # elements that are float32 for a moment: 1.5 GiB for gradient and moments


def build_optimizer(model: list, optim: OptimSettings, dtype: torch.dtype):
    """Megatron's optimizer around our AdamW. Clipping and the finite check are the engine's (`optimizer_step`)."""
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
    optimizer.optimizer = AdamW(optimizer.param_groups, optim, model[0].module.param_and_grad_buffer)
    # Only says where gradients are: its own optimizer of that name is TransformerEngine's.
    optimizer.config.use_precision_aware_optimizer = optim.main_grads_dtype == "bfloat16"
    return optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part, in the dtype of the main gradients; None when the part is empty. A gradient narrower than its float32
    parameter lies in `decoupled_grad` (megatron_fsdp/param_and_grad_buffer.py, update_main_grads)."""
    decoupled = getattr(param, "decoupled_grad", None)
    found = param.grad if decoupled is None else decoupled
    return None if found is None else local(found)


def grad_norm(optimizer) -> torch.Tensor:
    """Over all parameters and ranks, each element counted once; summed up in float32 whatever the gradients are in. float32 [], on the
    device. Collective."""
    grads = optimizer.get_grads_for_grad_norm()  # this rank's parts, without what another tensor-parallel rank has too
    squares = torch.zeros((), device=optimizer.param_groups[0]["params"][0].device)
    if grads:
        squares = torch.stack(torch._foreach_norm(grads, 2, torch.float32)).square().sum()
    dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
    return squares.sqrt()


def install_weights(buffer) -> None:
    """Model weights from main weights, as the buffer's copy_main_weights_to_model_weights does parameter by parameter and without
    float8: model and main buffer of a group have one layout (megatron_fsdp/param_and_grad_buffer.py, DataParallelBuffer)."""
    pairs = [(g.model_weight_buffer.data, g.main_weight_buffer.data) for g in buffer.parameter_groups if g.main_weight_buffer]
    assert all(model.shape == main.shape for model, main in pairs)
    torch._foreach_copy_([model for model, _ in pairs], [main for _, main in pairs])


def model_weights(buffer) -> dict[int, torch.Tensor]:
    """Address of this rank's part of a main weight -> that part of the model's weight, for parameters that have one here."""
    found = {}
    for group in buffer.parameter_groups:
        if (main := group.main_weight_buffer) is not None:
            parts = [(main.get_item(i, only_shard=True), group.model_weight_buffer.get_item(i, only_shard=True)) for i in range(len(group.params))]
            found |= {ours.data_ptr(): model for ours, model in parts if ours.numel()}
    return found


class AdamW(torch.optim.AdamW):
    """AdamW on this rank's parts. Afterwards the model's weights are the new main weights, rounded.

    On CUDA one kernel a parameter, from gradient to rounded weight; elsewhere torch's fused AdamW, some parameters at a time, for which gradients
    and moments narrower than float32 become float32 for that moment.

    Every parameter has its moments from the start. Torch makes the state of a parameter at its first gradient, which a parameter
    whose shard on this rank is empty never gets: ranks would hold different sets of names, and the collectives of a save or load
    would hang. A template made by Megatron's way, a step with zero gradients, would decay the weights.

    Moments go back to their dtype rounded to nearest. bfloat16 has 8 bits: a moment that should shrink by less than 2^-9 of itself
    stays as it is for ever. It shrinks by 1 - beta of itself; the rule narrow-moments keeps that apart from 2^-9.

    buffer  Megatron-FSDP's, with the model's weights; None: there are none besides the parameters
    """

    def __init__(self, groups: list[dict], optim: OptimSettings, buffer=None):
        super().__init__(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps, fused=True, foreach=False)
        self.buffer = buffer
        for group in self.param_groups:
            group.update(fused=True, foreach=False)  # of Megatron's optimizer it has what that one chose
            for param in group["params"]:
                self.state[param] = {
                    "step": torch.zeros((), device=param.device),
                    "exp_avg": torch.zeros_like(param.data, dtype=DTYPES[optim.exp_avg_dtype]),
                    "exp_avg_sq": torch.zeros_like(param.data, dtype=DTYPES[optim.exp_avg_sq_dtype]),
                }

    @torch.no_grad()
    def step(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """grad_scale [] divides the gradients first; where found_inf [] is 1, nothing changes (both float32, on the device)."""
        if found_inf.is_cuda:
            weights = model_weights(self.buffer) if self.buffer else {}
            for group in self.param_groups:
                self._step_on_gpu(group, weights, grad_scale, found_inf)
            return
        for group in self.param_groups:
            for params in _chunks(group["params"]):
                self._step(group, params, grad_scale, found_inf)
        if self.buffer:
            install_weights(self.buffer)

    def _step_on_gpu(self, group: dict, weights: dict[int, torch.Tensor], grad_scale, found_inf) -> None:
        from mfsdp_cli.engine import kernels

        params = [param for param in group["params"] if gradient(param) is not None]
        if not params:
            return
        steps = [self.state[param]["step"] for param in params]
        torch._foreach_add_(steps, [1 - found_inf] * len(steps))  # a single tensor would be taken for a number, with a wait for it
        first, second = (1 - beta ** steps[0].double() for beta in group["betas"])
        scale = torch.ones_like(found_inf) if grad_scale is None else grad_scale
        factors = torch.stack([scale, (group["lr"] / first).float(), second.sqrt().float(), found_inf])
        for param in params:
            main, state = local(param.data), self.state[param]
            kernels.adamw_(main, gradient(param), local(state["exp_avg"]), local(state["exp_avg_sq"]), weights.get(main.data_ptr()), factors,
                           group["lr"], group["weight_decay"], group["betas"], group["eps"])

    def _step(self, group: dict, params: list[torch.nn.Parameter], grad_scale, found_inf) -> None:
        states = [self.state[param] for param in params]
        kept = [[local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")]
        exp_avgs, exp_avg_sqs = ([moment.float() for moment in moments] for moments in kept)
        adamw(
            [local(param.data) for param in params], [gradient(param).float() for param in params], exp_avgs, exp_avg_sqs, [],
            [state["step"] for state in states], fused=True, grad_scale=grad_scale, found_inf=found_inf, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )
        for moments, updated in zip(kept, (exp_avgs, exp_avg_sqs)):
            if moments[0] is not updated[0]:
                torch._foreach_copy_(moments, updated)


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
