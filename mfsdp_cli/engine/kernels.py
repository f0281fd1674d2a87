"""Triton kernels for what a training step does besides matrix products: SwiGLU, rotary embedding, log-probabilities of labels.

Each reads its operands once, computes in float32 and writes once. Measured on an H200 in the 1.5b shape against the same formulas under
torch.compile: SwiGLU's backward pass 0.36 ms for 0.60, and no function is compiled anew for every number of tokens. `formulas` has the
same in torch, for the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # of a row that one program takes
LOGITS = 4096


@triton.jit
def _swiglu(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(x_ptr, grad_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + column, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out_ptr + row * 2 * width + column, of_gate.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + row * 2 * width + width + column, (grad * gate * sigmoid).to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [..., 2 F] = [gate, up]; [..., F]."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    _swiglu[(x.numel() // (2 * width), triton.cdiv(width, COLUMNS))](x, out, width, BLOCK=COLUMNS)
    return out


def swiglu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient of x [..., 2 F] from that of `swiglu` [..., F]."""
    grad, out = grad.contiguous(), torch.empty_like(x)
    width = grad.shape[-1]
    _swiglu_backward[(grad.numel() // width, triton.cdiv(width, COLUMNS))](x, grad, out, width, BLOCK=COLUMNS)
    return out


@triton.jit
def _rotate(x_ptr, cos_ptr, sin_ptr, out_ptr, heads, half, stride_token, stride_head, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside, there = (head < heads) & (column < half), column < half
    first = tl.load(x_ptr + token * stride_token + head * stride_head + column, mask=inside).to(tl.float32)
    second = tl.load(x_ptr + token * stride_token + head * stride_head + half + column, mask=inside).to(tl.float32)
    cos_1 = tl.load(cos_ptr + token * 2 * half + column, mask=there).to(tl.float32)
    cos_2 = tl.load(cos_ptr + token * 2 * half + half + column, mask=there).to(tl.float32)
    sin_1 = tl.load(sin_ptr + token * 2 * half + column, mask=there).to(tl.float32)
    sin_2 = tl.load(sin_ptr + token * 2 * half + half + column, mask=there).to(tl.float32)
    if BACKWARD:
        out_1, out_2 = first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
    else:
        out_1, out_2 = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    place = out_ptr + (token * heads + head) * 2 * half + column
    tl.store(place, out_1.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(place + half, out_2.to(out_ptr.dtype.element_ty), mask=inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool = False) -> torch.Tensor:
    """Rotary embedding of x [T, heads, d], whose last dimension is contiguous, by cos and sin [T, 1, d]; or its transpose, for the
    gradient. Contiguous [T, heads, d]."""
    tokens, heads, d = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotate[(tokens,)](x, cos, sin, out, heads, d // 2, x.stride(0), x.stride(1), BACKWARD=backward, HEADS=triton.next_power_of_2(heads),
                       HALF=triton.next_power_of_2(d // 2))
    return out


@triton.jit
def _row_sums(logits_ptr, largest_ptr, total_ptr, weighted_ptr, stride, columns: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.max(tl.load(logits_ptr + row * stride + lane, mask=lane < columns, other=-float("inf")).to(tl.float32), 0)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + lane < columns
        z = tl.load(logits_ptr + row * stride + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(z, 0))
        shift = largest - higher
        weight = tl.exp(z - higher)
        weighted = tl.exp(shift) * (weighted + shift * total) + tl.where(inside, weight * (z - higher), 0.0)
        total = tl.exp(shift) * total + weight
        largest = higher
    tl.store(largest_ptr + row, largest)
    tl.store(total_ptr + row, tl.sum(total, 0))
    tl.store(weighted_ptr + row, tl.sum(weighted, 0))


def row_sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row of logits [T, V], V > 0: m = the largest, the sum of exp(z - m), and of exp(z - m) * (z - m); float32 [T] each."""
    rows, columns = logits.shape
    largest, total, weighted = torch.empty((3, rows), dtype=torch.float32, device=logits.device)
    _row_sums[(rows,)](logits, largest, total, weighted, logits.stride(0), columns, BLOCK=LOGITS, num_warps=8)
    return largest, total, weighted


@triton.jit
def _gradient(logits_ptr, label_ptr, log_total_ptr, mean_ptr, grad_ptr, grad_entropy_ptr, stride, columns, real, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits_ptr + row * stride + column
    z = tl.load(place, mask=column < real, other=-float("inf")).to(tl.float32)
    grad, grad_entropy = tl.load(grad_ptr + row), tl.load(grad_entropy_ptr + row)
    p = tl.exp(z - tl.load(log_total_ptr + row))
    out = grad * ((column == tl.load(label_ptr + row)).to(tl.float32) - p) - grad_entropy * p * (z - tl.load(mean_ptr + row))
    tl.store(place, tl.where(column < real, out, 0.0).to(logits_ptr.dtype.element_ty), mask=column < columns)


def gradient_(logits: torch.Tensor, labels: torch.Tensor, log_total: torch.Tensor, mean: torch.Tensor, grad: torch.Tensor,
              grad_entropy: torch.Tensor, real: int) -> torch.Tensor:
    """In place on logits [T, V]: grad * (one_hot(label) - p) - grad_entropy * p * (z - mean), p = exp(z - log_total); 0 from column `real`
    on. The others are [T]; a label is -1 where it is no column here."""
    rows, columns = logits.shape
    _gradient[(rows, triton.cdiv(columns, LOGITS))](
        logits, labels, log_total, mean, grad.contiguous(), grad_entropy.contiguous(), logits.stride(0), columns, real, BLOCK=LOGITS, num_warps=8)
    return logits
