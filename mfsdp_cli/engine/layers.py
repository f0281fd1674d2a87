"""Layers for machines without TransformerEngine: RMSNorm, SwiGLU, residuals, and the layer spec with these, `attention` and `linear`.

Megatron-Core's own norm refuses sequence parallelism (transformer/torch_norm.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mfsdp_cli.engine import attention, formulas, linear

_NORMS_OF_A_LAYER = ("input_layernorm", "pre_mlp_layernorm")
_NORMS_OF_ATTENTION = ("q_layernorm", "k_layernorm")


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **kwargs):
        super().__init__()
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma, config.normalization
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # finalize_model_grads sums the gradients of parameters so marked over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    def reset_parameters(self):
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _NormOfResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        normed, rstd = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return normed, x

    @staticmethod
    def backward(ctx, grad, of_residual):
        return *formulas.on(grad.device).rms_norm_backward(*ctx.saved_tensors, grad, of_residual), None


class NormOfResidual(RMSNorm):
    """(norm of x, x): Megatron's layers take the second for their residual connection, so that the gradients of both meet in one kernel."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _NormOfResidual.apply(x, self.weight, self.eps)


AutoMapping.register_module_type(NormOfResidual.__name__, "replicated")  # Bridge goes by the names of classes


class GateAndUp(torch.nn.Module):
    """Leaves [gate, up] as they are, since the down projection takes both (`linear`); Megatron builds it where TransformerEngine's activation
    would be (transformer/mlp.py)."""

    def __init__(self, config):
        super().__init__()
        assert config.gated_linear_unit and config.activation_func is F.silu, "only SwiGLU is implemented"
        assert config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0, "a clamp or an offset is not implemented"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def residual_add(training: bool, fused: bool):
    """What Megatron's get_bias_dropout_add chooses, without dropout: (x, bias or None), residual, probability -> residual + x + bias."""

    def add(x_with_bias, residual, prob):
        x, bias = x_with_bias
        assert prob == 0.0, "dropout is not implemented"
        return residual + (x if bias is None else x + bias)

    return add


def packed_layer_spec(config) -> TransformerBlockSubmodules:
    """Megatron-Core's local layer spec with our attention core, norms and linear layers, but for experts. `config` is Bridge's
    GPTModelProvider."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    for name in _NORMS_OF_A_LAYER:
        setattr(spec.submodules, name, NormOfResidual)
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = residual_add
    if not config.num_moe_experts:
        mlp = spec.submodules.mlp.keywords["submodules"]
        mlp.linear_fc1, mlp.activation_func, mlp.linear_fc2 = linear.ColumnLinear, GateAndUp, linear.DownProjection
    spec.submodules.self_attention.module = attention.PackedSelfAttention
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = attention.PackedAttention
    parts.linear_qkv, parts.linear_proj = linear.ColumnLinear, linear.RowLinear
    if config.qk_layernorm:
        for name in _NORMS_OF_ATTENTION:
            setattr(parts, name, RMSNorm)
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=RMSNorm)
