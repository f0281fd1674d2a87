"""The formulas of `kernels` in torch, for the CPU, under the same names; and who computes what is on a device."""

from __future__ import annotations

import sys

import torch


def on(device: torch.device):
    """The module whose functions compute there: `kernels` on a GPU, this one elsewhere."""
    if device.type != "cuda":
        return sys.modules[__name__]
    from mfsdp_cli.engine import kernels

    return kernels


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    return torch.cat((grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid), -1), swiglu(x)


def add_product_(into: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    product = grad.t().matmul(x)
    return into.add_(product) if beta else into.copy_(product)


def rms_norm_backward(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, grad: torch.Tensor,
                      of_residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normed, grad = x.float() * rstd, grad.float()
    of_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
    grad = grad * weight
    out = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * rstd + of_residual
    return out.to(x.dtype), of_weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool = False) -> torch.Tensor:
    """Halves convention, as transformers' apply_rotary_pos_emb."""
    if backward:
        first, second = (x * sin).chunk(2, -1)
        return x * cos + torch.cat((second, -first), -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def split_rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int, queries: int):
    d = cos.shape[-1]
    q, k, v = qkv.view(len(qkv), groups, queries + 2, d).split([queries, 1, 1], 2)
    return rotate(q.flatten(1, 2), cos, sin), rotate(k.flatten(1, 2), cos, sin), v.flatten(1, 2)


def split_rotate_backward(cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    tokens, groups, d = k.shape
    parts = rotate(q, cos, sin, backward=True).view(tokens, groups, -1, d), rotate(k, cos, sin, backward=True)[:, :, None], v[:, :, None]
    return torch.cat(parts, 2).view(tokens, groups, -1)


def row_sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    largest = logits.amax(-1).float()
    shifted = logits.float() - largest[:, None]
    weights = shifted.exp()
    return largest, weights.sum(-1), (weights * shifted).sum(-1)


def gradient_(logits: torch.Tensor, labels: torch.Tensor, log_total: torch.Tensor, mean: torch.Tensor, grad: torch.Tensor,
              grad_entropy: torch.Tensor, real: int) -> torch.Tensor:
    z = logits[:, :real].float()
    p = (z - log_total[:, None]).exp()
    is_label = torch.arange(real, device=logits.device)[None, :] == labels[:, None]
    logits[:, :real] = grad[:, None] * (is_label.float() - p) - grad_entropy[:, None] * p * (z - mean[:, None])
    logits[:, real:] = 0
    return logits
