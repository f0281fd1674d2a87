"""Attention over packed sequences: rotary embedding of all at once, and flash attention inside each.

Megatron-Core's own does not do: it refuses packed sequences and builds the s x s matrix (transformer/dot_product_attention.py), and its
rotary embedding goes through a packed batch sequence by sequence, with a wait for the GPU in each layer (models/common/embeddings/
rope_utils.py, _apply_rotary_pos_emb_thd).
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention

from mfsdp_cli.engine import formulas

FLASH_4_HEADS = (64, 128)  # dimensions of a head that tests/gpu covers
FLASH_4_PAYS = 2**33  # elements of the queries times the longest sequence: below, its 0.5 ms of Python a layer are more than it gains


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


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, groups, queries):
        ctx.save_for_backward(cos, sin)
        return formulas.on(qkv.device).split_rotate(qkv, cos, sin, groups, queries)

    @staticmethod
    def backward(ctx, *grads):
        return formulas.on(grads[0].device).split_rotate_backward(*ctx.saved_tensors, *grads), None, None, None, None


class PackedSelfAttention(SelfAttention):
    """Megatron's attention with the rotary embedding of all sequences at once: where queries and keys have no norm of their own, in the
    same pass that splits the projection into queries, keys and values, else in the core."""

    def forward(self, hidden_states, attention_mask, *args, rotary_pos_emb=None, packed_seq_params=None, **kwargs):
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", "only packed sequences reach this layer"
        packed_seq_params.frequencies = rotary_pos_emb
        self.core_attention.rotates, self._packed = not self._splits, packed_seq_params
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **kwargs)

    @property
    def _splits(self) -> bool:
        return self.q_layernorm is None and self.k_layernorm is None and self.config.num_query_groups >= self.world_size

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, output_gate=False, split_qkv=True):
        if not self._splits:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        assert split_qkv and not output_gate, "neither is used with this layer"
        mixed, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        queries = self.num_attention_heads_per_partition // groups
        cos, sin = self._packed.cos_sin(mixed.dtype)
        q, k, v = _SplitRotate.apply(mixed.view(len(mixed), groups, -1), cos, sin, groups, queries)
        return q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)


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


@cache
def flash_attention_4(device: torch.device):
    """`flash_attn_varlen_func` of the package flash-attn-4, where that is installed, on the GPUs it is written for; else None, with a warning
    where it is there and cannot be imported."""
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return None
    try:
        # an installed flash-attn 2 is another package of the same name
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            return None
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:  # a package that it requires is missing, or of another version
        warnings.warn(f"flash-attn-4 is installed and cannot be imported ({error}): attention takes torch's, which is slower", stacklevel=2)
        return None
    return flash_attn_varlen_func


class PackedAttention(torch.nn.Module):
    """Causal attention inside each sequence of a packed batch.

    q [T, heads, d], k and v [T, kv_heads, d] (this tensor-parallel rank's heads) -> [T, heads * d].
    On CUDA FlashAttention 4 where it is installed and pays, else torch's variable-length flash attention; neither has float32. Then, and
    on CPU, scaled_dot_product_attention a sequence.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **kwargs):
        super().__init__()
        assert config.context_parallel_size == 1, "context parallelism needs TransformerEngine"
        assert config.attention_dropout == 0.0 and config.window_size is None, "dropout and sliding windows are not implemented"
        assert not config.rotary_interleaved, "interleaved rotary embeddings are not implemented"
        self.scale = softmax_scale
        self.rotates = True  # PackedSelfAttention says otherwise where it has done so

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        cos, sin = packed_seq_params.cos_sin(query.dtype)
        if self.rotates:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attend = self._varlen if query.is_cuda and query.dtype != torch.float32 else self._one_by_one
        return attend(query, key, value, packed_seq_params).flatten(1)

    def _varlen(self, q, k, v, packed):
        cu_seqlens, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        pays = q.shape[-1] in FLASH_4_HEADS and q.numel() * longest >= FLASH_4_PAYS
        if not pays or (attend := flash_attention_4(q.device)) is None:
            return _FlashAttention.apply(q, k, v, cu_seqlens, longest, self.scale)
        found = attend(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest, causal=True,
                       softmax_scale=self.scale, deterministic=torch.are_deterministic_algorithms_enabled())
        return found[0] if isinstance(found, tuple) else found

    def _one_by_one(self, q, k, v, packed):
        outputs = []
        bounds = packed.cu_seqlens_q.tolist()
        for start, end in zip(bounds, bounds[1:]):
            one = [t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
            out = F.scaled_dot_product_attention(*one, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)
