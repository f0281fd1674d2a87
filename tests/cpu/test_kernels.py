"""The Triton kernels against the same formulas in torch, and these against torch's own gradients.

Triton's interpreter runs a kernel on CPU tensors; whether it does is settled when triton is imported, hence a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from mfsdp_cli.engine import formulas


def draw(*shape, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_swiglu_and_its_gradient_are_torchs():
    x, grad = draw(5, 1, 12).requires_grad_(), draw(5, 1, 6, seed=1)
    expected = F.silu(x[..., :6]) * x[..., 6:]
    assert formulas.swiglu(x.detach()).equal(expected)
    [wanted] = torch.autograd.grad(expected, x, grad)
    found, product = formulas.swiglu_backward(x.detach(), grad)
    torch.testing.assert_close(found, wanted)
    assert product.equal(expected)


def test_the_gradient_of_the_norm_and_of_the_residual_beside_it_is_torchs():
    x, weight, grad, of_residual = draw(5, 1, 12).requires_grad_(), draw(12, seed=1).requires_grad_(), draw(5, 1, 12, seed=2), draw(5, 1, 12, seed=3)
    wanted = torch.autograd.grad((F.rms_norm(x, (12,), weight, 1e-5) * grad).sum() + (x * of_residual).sum(), (x, weight))
    rstd = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-5)
    found = formulas.rms_norm_backward(x.detach(), weight.detach(), rstd, grad, of_residual)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_backward_of_rotation_is_its_transpose():
    """<R x, y> = <x, R' y>, whatever the angles of the two halves."""
    x, y, cos, sin = draw(7, 3, 8), draw(7, 3, 8, seed=1), draw(7, 1, 8, seed=2), draw(7, 1, 8, seed=3)
    forward, backward = formulas.rotate(x, cos, sin), formulas.rotate(y, cos, sin, backward=True)
    assert (forward * y).sum().item() == pytest.approx((x * backward).sum().item(), rel=1e-5)


def test_the_split_projection_is_megatrons_order_and_its_backward_the_transpose():
    groups, queries, d = 2, 3, 8
    qkv, cos, sin = draw(5, groups, (queries + 2) * d), draw(5, 1, d, seed=2), draw(5, 1, d, seed=3)
    q, k, v = formulas.split_rotate(qkv, cos, sin, groups, queries)
    assert q[:, 4].equal(formulas.rotate(qkv[:, 1:2, d : 2 * d], cos, sin)[:, 0])  # the second query of the second group
    assert k[:, 1].equal(formulas.rotate(qkv[:, 1:2, queries * d : -d], cos, sin)[:, 0]) and v.equal(qkv[:, :, -d:])
    grads = draw(5, 6, d, seed=4), draw(5, 2, d, seed=5), draw(5, 2, d, seed=6)
    back = formulas.split_rotate_backward(cos, sin, *grads)
    assert sum((a * b).sum().item() for a, b in zip((q, k, v), grads)) == pytest.approx((qkv * back).sum().item(), rel=1e-4)


def test_the_gradient_of_log_probability_and_entropy_is_torchs():
    logits, labels = draw(6, 9, scale=3.0), torch.tensor([0, 3, -1, 6, 2, 5])
    of_label, of_entropy, real = draw(6, seed=1), draw(6, seed=2), 7
    largest, total, weighted = formulas.row_sums(logits[:, :real])
    found = formulas.gradient_(logits.clone(), labels, largest + total.log(), largest + weighted / total, of_label, of_entropy, real)
    leaf = logits[:, :real].double().requires_grad_()
    log_p = leaf.log_softmax(-1)
    picked = torch.where(labels >= 0, log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0], -leaf.logsumexp(-1))  # a label of another rank
    ((picked * of_label).sum() - ((log_p.exp() * log_p).sum(-1) * of_entropy).sum()).backward()
    torch.testing.assert_close(found[:, :real].double(), leaf.grad, rtol=1e-4, atol=1e-5)
    assert found[:, real:].equal(torch.zeros(6, 2))


COMPARE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from mfsdp_cli.engine import formulas, kernels

kernels.COLUMNS = 32
torch.manual_seed(0)
def same(name, found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        error = (a.double() - b.double()).abs().max().item()
        assert a.shape == b.shape and a.dtype == b.dtype and error < tolerance * max(1.0, b.double().abs().max().item()), (name, error)

for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
    for rows, width in ((3, 40), (5, 32), (1, 7)):
        x, grad = torch.randn(rows, 1, 2 * width).to(dtype), torch.randn(rows, 1, width).to(dtype)
        same("swiglu", [kernels.swiglu(x)], [formulas.swiglu(x)], tolerance)
        same("swiglu_backward", kernels.swiglu_backward(x, grad), formulas.swiglu_backward(x, grad), tolerance)
    for rows, width in ((7, 40), (3, 64), (1, 7)):
        kernels.NORM_PROGRAMS = 3  # fewer than rows: each sums over several
        x, grad, of_residual = torch.randn(3, rows, 1, width).to(dtype)
        args = x, torch.randn(width).to(dtype), torch.rand(rows, 1, 1) + 0.5, grad, of_residual
        same("rms_norm_backward", kernels.rms_norm_backward(*args), formulas.rms_norm_backward(*args), 2 * tolerance)
    for heads, d in ((14, 64), (2, 16), (1, 80)):
        qkv, angles = torch.randn(6, heads + 3, d).to(dtype), torch.rand(6, 1, d)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        for x in (qkv[:, 3:], qkv[:, 3:].transpose(0, 1).contiguous().transpose(0, 1)):  # a view of the fused projection, as in the model
            for backward in (False, True):
                same("rotate", [kernels.rotate(x, cos, sin, backward)], [formulas.rotate(x, cos, sin, backward)], tolerance)
    for groups, queries, d in ((2, 7, 64), (1, 3, 16), (3, 1, 80)):
        qkv, angles = torch.randn(4, groups, (queries + 2) * d).to(dtype), torch.rand(4, 1, d)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        wanted = formulas.split_rotate(qkv, cos, sin, groups, queries)
        same("split_rotate", kernels.split_rotate(qkv, cos, sin, groups, queries), wanted, tolerance)
        grads = [torch.randn_like(part) for part in wanted]
        same("backward", [kernels.split_rotate_backward(cos, sin, *grads)], [formulas.split_rotate_backward(cos, sin, *grads)], tolerance)
    for size in (1, 33, 100):
        main, weight = torch.randn(size), torch.empty(size, dtype=dtype)
        theirs = torch.nn.Parameter(main.clone())
        peer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, fused=True)
        exp_avg, exp_avg_sq = torch.zeros(2, size)
        for step in (1, 2, 3):
            grad = torch.randn(size).to(dtype)
            theirs.grad = grad.float() / 2.5
            peer.step()
            factors = torch.tensor([2.5, 1e-2 / (1 - 0.9**step), (1 - 0.95**step) ** 0.5, 0.0])
            kernels.adamw_(main, grad, exp_avg, exp_avg_sq, weight, factors, 1e-2, 0.1, (0.9, 0.95), 1e-6)
        state = peer.state[theirs]
        same("adamw", [main, exp_avg, exp_avg_sq], [theirs.detach(), state["exp_avg"], state["exp_avg_sq"]], 1e-6)
        assert weight.equal(main.to(dtype))
        before = main.clone(), exp_avg.clone(), exp_avg_sq.clone(), weight.clone()
        factors[3] = 1.0
        kernels.adamw_(main, torch.full((size,), torch.nan), exp_avg, exp_avg_sq, weight, factors, 1e-2, 0.1, (0.9, 0.95), 1e-6)
        assert all(a.equal(b) for a, b in zip((main, exp_avg, exp_avg_sq, weight), before)), "nothing changes"
    for rows, columns, real in ((4, 50, 50), (3, 130, 97), (2, 64, 64)):
        for block in (32, 256):
            kernels.LOGITS = block
            logits = (5 * torch.randn(rows, columns)).to(dtype)
            sums = formulas.row_sums(logits[:, :real])
            same("row_sums", kernels.row_sums(logits[:, :real]), sums, 1e-5)
            labels = torch.randint(-1, real, (rows,))
            largest, total, weighted = sums
            rest = (labels, largest + total.log(), largest + weighted / total, torch.randn(rows), torch.randn(rows), real)
            same("gradient_", [kernels.gradient_(logits.clone(), *rest)], [formulas.gradient_(logits.clone(), *rest)], tolerance)
"""


def test_the_kernels_are_the_formulas():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run([sys.executable, "-c", COMPARE, root], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
