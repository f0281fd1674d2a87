"""Triton's kernels on the GPU, in bfloat16, against the formulas in float32; AdamW against torch's. tests/cpu/test_kernels.py compares them under
Triton's interpreter; products with a wider result (`add_product_`) exist on CUDA alone."""

from __future__ import annotations

import pytest
from gpu_processes import ON_CPU

pytestmark = pytest.mark.skipif(ON_CPU, reason="these run on a GPU; under Triton's interpreter tests/cpu/test_kernels.py has them")
ROUNDED = 2**-8  # of a result that is rounded to bfloat16 once, twice over
SUMMED = 1e-5


def errors_of_kernels() -> dict[str, tuple[float, float]]:
    """‖found - wanted‖ / ‖wanted‖, and its bound, by name."""
    import torch

    from mfsdp_cli.engine import formulas, kernels

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    def wide(*tensors):
        return [t.float() for t in tensors]

    found: dict[str, tuple[float, float]] = {}

    def compare(name, bound, mine, exact):
        pairs = list(zip(mine, exact, strict=True))
        found[name] = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs), bound

    x, grad = draw(333, 1, 2 * 1408), draw(333, 1, 1408)
    compare("swiglu", ROUNDED, [kernels.swiglu(x)], [formulas.swiglu(*wide(x))])
    compare("swiglu_backward", ROUNDED, kernels.swiglu_backward(x, grad), formulas.swiglu_backward(*wide(x, grad)))
    rows = draw(3, 2777, 1, 1536).unbind(0)  # more than programs
    norm = draw(1536), torch.rand(2777, 1, 1, device="cuda", generator=generator) + 0.5
    compare("rms_norm_backward", ROUNDED, kernels.rms_norm_backward(rows[0], *norm, *rows[1:]),
            formulas.rms_norm_backward(*wide(rows[0], *norm, *rows[1:])))
    angles = torch.rand(333, 1, 64, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    qkv = draw(333, 2, 9 * 64)
    parts = kernels.split_rotate(qkv, cos, sin, 2, 7)
    compare("split_rotate", ROUNDED, parts, formulas.split_rotate(*wide(qkv, cos, sin), 2, 7))
    grads = [draw(*part.shape) for part in parts]
    compare("split_rotate_backward", ROUNDED, [kernels.split_rotate_backward(cos, sin, *grads)],
            [formulas.split_rotate_backward(*wide(cos, sin, *grads))])
    grad, x = draw(777, 96), draw(777, 160)
    product = grad.float().t() @ x.float()
    for dtype, bound in ((torch.float32, SUMMED), (torch.bfloat16, ROUNDED)):
        before = draw(96, 160).to(dtype)
        into = before.clone()
        assert kernels.add_product_(into, grad, x, 1).data_ptr() == into.data_ptr()
        compare(f"added to {dtype}", bound, [into], [before.float() + product])
        into = torch.full_like(before, torch.nan)
        kernels.add_product_(into, grad, x, 0)
        compare(f"put into {dtype}", bound, [into], [product])
    return found


def test_kernels_are_the_formulas(one_rank):
    [found] = one_rank.run(errors_of_kernels)
    print({name: f"{error:.1e}" for name, (error, _) in found.items()})
    assert {name: error for name, (error, bound) in found.items() if not error < bound} == {}


def steps_of_adamw() -> dict[str, float]:
    """Largest difference between ours and torch's fused AdamW after three steps on clipped gradients, the second of them not applied."""
    import torch

    import mfsdp_cli.engine.megatron  # noqa: F401  (decides how megatron is imported)
    from mfsdp_cli.config.schema import OptimSettings
    from mfsdp_cli.engine.optimizer import AdamW

    optim = OptimSettings(lr=1e-2, betas=[0.9, 0.95], eps=1e-6)
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = ((700, 513), (9,), (4, 4, 2))
    mine = [torch.nn.Parameter(torch.randn(shape, device="cuda", generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]

    def groups(params):
        return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]

    ours, peer = AdamW(groups(mine), optim), torch.optim.AdamW(groups(theirs), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, fused=True)
    for number in range(3):
        for a, b in zip(mine, theirs):
            a.grad = torch.randn(a.shape, device="cuda", generator=generator)
            b.grad = a.grad / 2.5
        if number == 1:
            ours.step(torch.tensor(2.5, device="cuda"), torch.tensor(1.0, device="cuda"))
            continue
        ours.step(torch.tensor(2.5, device="cuda"), torch.tensor(0.0, device="cuda"))
        peer.step()
    assert {ours.state[p]["step"].item() for p in mine} == {2}
    pairs = {"weights": zip(mine, theirs)} | {k: ((ours.state[a][k], peer.state[b][k]) for a, b in zip(mine, theirs)) for k in ("exp_avg", "exp_avg_sq")}
    return {name: max((a - b).abs().max().item() for a, b in both) for name, both in pairs.items()}


def test_adamw_is_torchs(one_rank):
    [found] = one_rank.run(steps_of_adamw)
    print({name: f"{difference:.1e}" for name, difference in found.items()})
    assert max(found.values()) < 1e-6  # weights of about 1
