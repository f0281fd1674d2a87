"""Linear layers that keep less and move less than Megatron's (tensor_parallel/layers.py).

A weight's gradient is added to where Megatron-FSDP sums it, in float32, by the product that makes it; Megatron's layers write it in bfloat16,
read it again and add it. The down projection makes SwiGLU's product itself, and again in its backward pass, instead of keeping it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from mfsdp_cli.engine import formulas


class ColumnLinear(ColumnParallelLinear):
    """Where tensor parallelism exchanges something in the backward pass, Megatron's own, which does so while it computes."""

    def _forward_impl(self, input, weight, bias, **options):
        if options["sequence_parallel"] or options["allreduce_dgrad"]:
            return super()._forward_impl(input=input, weight=weight, bias=bias, **options)
        return _Linear.apply(input, weight, bias)


class RowLinear(RowParallelLinear):
    def _forward_impl(self, input, weight, **options):
        return _Linear.apply(input, weight, None)


class DownProjection(RowParallelLinear):
    """Takes [..., 2 F] = [gate, up], and multiplies silu(gate) * up."""

    def _forward_impl(self, input, weight, **options):
        return _DownProjection.apply(input, weight)


for _class, _split in ((ColumnLinear, "column"), (RowLinear, "row"), (DownProjection, "row")):
    AutoMapping.register_module_type(_class.__name__, _split)  # Bridge goes by the names of classes


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_weight = weight_gradient(weight, grad, x) if ctx.needs_input_grad[1] else None
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad.matmul(weight), of_weight, of_bias


class _DownProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_and_up, weight):
        ctx.save_for_backward(gate_and_up, weight)
        return F.linear(formulas.on(weight.device).swiglu(gate_and_up), weight)

    @staticmethod
    def backward(ctx, grad):
        gate_and_up, weight = ctx.saved_tensors
        of_gate_and_up, product = formulas.on(weight.device).swiglu_backward(gate_and_up, grad.matmul(weight))
        return of_gate_and_up, weight_gradient(weight, grad, product) if ctx.needs_input_grad[1] else None


def weight_gradient(weight: torch.nn.Parameter, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of a weight [O, I] from that of the output [..., O] and from the input [..., I], for autograd. Under Megatron-FSDP it goes
    where `_grad_acc` (megatron_fsdp.py) would put it, which a flag tells it, and what is returned has the shape and no content."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    if not hasattr(weight, "get_main_grad"):
        return grad.t().matmul(x)
    weight.main_grad = weight.get_main_grad()
    # A sharded gradient is reduced after every micro batch, and starts in a buffer that holds anything; else it is summed up here.
    formulas.on(weight.device).add_product_(weight.main_grad, grad, x, 0 if weight._gbuf.is_data_distributed else 1)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
