"""Layers for machines without TransformerEngine: attention over packed sequences, RMSNorm, and the layer spec with both.

Megatron-Core's own local layers do not do: its attention refuses packed sequences and builds the s x s matrix
(transformer/dot_product_attention.py), its norm refuses sequence parallelism (transformer/torch_norm.py), and its rotary
embedding goes through a packed batch sequence by sequence, with a wait for the GPU in each layer (models/common/
embeddings/rope_utils.py, _apply_rotary_pos_emb_thd).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mfsdp_cli.engine import formulas

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


@dataclass
class PackedPositions(PackedSeqParams):
    """Megatron's description of a packed batch, and where its tokens stand.

    position_ids  int64 [T], from 0 in each sequence
    frequencies   float32 [max_seqlen, 1, 1, d], of the model's rotary embedding; set by the first layer
    """

    position_ids: torch.Tensor | None = None
    frequencies: torch.Tensor | None = None

    def cos_sin(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, d] each, computed by the first layer that asks."""
        if not hasattr(self, "_cos_sin"):
            angles = self.frequencies[self.position_ids].squeeze(1)
            self._cos_sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._cos_sin


class PackedSelfAttention(SelfAttention):
    """Megatron's attention with the rotary embedding left to the core, which applies it to all sequences at once."""

    def forward(self, hidden_states, attention_mask, *args, rotary_pos_emb=None, packed_seq_params=None, **kwargs):
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", "only packed sequences reach this layer"
        packed_seq_params.frequencies = rotary_pos_emb
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **kwargs)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return formulas.on(x.device).rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return formulas.on(grad.device).rotate(grad, *ctx.saved_tensors, backward=True), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, d] by cos and sin [T, 1, d], halves convention (transformers' apply_rotary_pos_emb)."""
    return _Rotate.apply(x, cos, sin)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return formulas.on(x.device).swiglu(x)

    @staticmethod
    def backward(ctx, grad):
        return formulas.on(grad.device).swiglu_backward(*ctx.saved_tensors, grad)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up of [..., 2 F] = [gate, up]; Megatron builds it where TransformerEngine's activation would be (transformer/mlp.py)."""

    def __init__(self, config):
        super().__init__()
        assert config.gated_linear_unit and config.activation_func is F.silu, "only SwiGLU is implemented"
        assert config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0, "a clamp or an offset is not implemented"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = _SwiGLU.apply(x)
        product.gate_and_up = x.detach()
        return product


class ForgetfulLinear(RowParallelLinear):
    """Keeps of its input, which is SwiGLU's product, nothing for the backward pass, and makes it again there from gate and up, which SwiGLU
    keeps anyway (engine.recompute=selective)."""

    def forward(self, product: torch.Tensor):
        gate_and_up, place = product.gate_and_up, product.data_ptr()

        def pack(tensor):
            return None if tensor.data_ptr() == place and tensor.numel() == product_numel else tensor

        def unpack(kept):
            return formulas.on(gate_and_up.device).swiglu(gate_and_up) if kept is None else kept

        product_numel = product.numel()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return super().forward(product)


AutoMapping.register_module_type(ForgetfulLinear.__name__, "row")  # Bridge goes by the names of classes


def residual_add(training: bool, fused: bool):
    """What Megatron's get_bias_dropout_add chooses, without dropout: (x, bias or None), residual, probability -> residual + x + bias."""

    def add(x_with_bias, residual, prob):
        x, bias = x_with_bias
        assert prob == 0.0, "dropout is not implemented"
        return residual + (x if bias is None else x + bias)

    return add


class _FlashAttention(torch.autograd.Function):
    """Causal, as torch.nn.attention.varlen.varlen_attn, whose two custom operators take the CPU longer than a small layer takes the GPU."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, longest, scale):
        out, lse, rng, _, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, rng, cu_seqlens)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, rng, cu_seqlens = ctx.saved_tensors
        unused = torch.empty(0, device=grad.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, cu_seqlens, cu_seqlens, ctx.longest, ctx.longest, 0.0, True, rng, unused, scale=ctx.scale)
        return *grads, None, None, None


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a packed batch.

    q [T, heads, d], k and v [T, kv_heads, d] (this tensor-parallel rank's heads) -> [T, heads * d].
    On CUDA torch's variable-length flash attention, which has no float32; then, and on CPU, scaled_dot_product_attention a sequence.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **kwargs):
        super().__init__()
        assert config.context_parallel_size == 1, "context parallelism needs TransformerEngine"
        assert config.attention_dropout == 0.0 and config.window_size is None, "dropout and sliding windows are not implemented"
        assert not config.rotary_interleaved, "interleaved rotary embeddings are not implemented"
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        cos, sin = packed_seq_params.cos_sin(query.dtype)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attend = self._varlen if query.is_cuda and query.dtype != torch.float32 else self._one_by_one
        return attend(query, key, value, packed_seq_params).flatten(1)

    def _varlen(self, q, k, v, packed):
        return _FlashAttention.apply(q, k, v, packed.cu_seqlens_q, packed.max_seqlen_q, self.scale)

    def _one_by_one(self, q, k, v, packed):
        outputs = []
        bounds = packed.cu_seqlens_q.tolist()
        for start, end in zip(bounds, bounds[1:]):
            one = [t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
            out = F.scaled_dot_product_attention(*one, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


def packed_layer_spec(config, forgetful: bool = False) -> TransformerBlockSubmodules:
    """Megatron-Core's local layer spec with our attention core, norms and activation. `config` is Bridge's GPTModelProvider; `forgetful`
    as ForgetfulLinear."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    for name in _NORMS_OF_A_LAYER:
        setattr(spec.submodules, name, RMSNorm)
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = residual_add
    if not config.num_moe_experts:
        mlp = spec.submodules.mlp.keywords["submodules"]
        mlp.activation_func = SwiGLU
        mlp.linear_fc2 = ForgetfulLinear if forgetful else mlp.linear_fc2
    spec.submodules.self_attention.module = PackedSelfAttention
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        for name in _NORMS_OF_ATTENTION:
            setattr(attention, name, RMSNorm)
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=RMSNorm)
