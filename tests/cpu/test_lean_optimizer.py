"""Gradients and Adam's moments in bfloat16: what is kept is the float32 value rounded, and training goes on as in float32."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from models import OPTIM, Layout, build, conversations, largest_difference, step, weights
from ranks import run_ranks

BATCHES = [conversations(seed) for seed in range(30, 34)]
NARROW = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


def train(model, layout: Layout, optim, num_steps: int):
    """(losses and norms, weights, moments of this rank by name)."""
    engine = build(model, layout, optim)
    state = engine.optimizer_state()  # now: after a step the module holds other parameters, which have no names
    steps = [step(engine, batch, OPTIM.lr, layout.num_micro) for batch in BATCHES[:num_steps]]
    return steps, weights(engine), {(name, key): moment._local_tensor for name, entry in state.items() for key, moment in entry.items() if key != "step"}


@pytest.fixture(scope="module")
def plain(tiny):
    """One and four steps in float32 throughout, on one rank."""
    return {n: run_ranks(1, train, tiny("qwen2"), Layout(), OPTIM, n)[0] for n in (1, 4)}


@pytest.mark.parametrize("norm", [0.5, 3.0, math.inf, math.nan])
def test_a_step_is_torchs_fused_adamw_on_clipped_gradients_or_nothing(norm):
    """Bit for bit, over steps whose rates differ; a norm that is no number leaves weights, moments and the count of steps."""
    import torch

    from mfsdp_cli.engine.optimizer import AdamW

    def parameters():
        generator = torch.Generator().manual_seed(3)
        return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (9,), (4, 4, 2))]

    mine, theirs = parameters(), parameters()
    groups = lambda params: [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]  # noqa: E731
    ours = AdamW(groups(mine), replace(OPTIM, clip_grad=1.0))
    peer = torch.optim.AdamW(groups(theirs), lr=OPTIM.lr, betas=tuple(OPTIM.betas), eps=OPTIM.eps, fused=True)
    broken = torch.tensor(0.0 if math.isfinite(norm) else 1.0)
    for number in range(3):
        factor = max((torch.tensor(norm) + 1e-6).item(), 1.0)
        for a, b in zip(mine, theirs):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(number))
            b.grad = a.grad / factor
        for optimizer in (ours, peer):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (number + 1)
        ours.step(torch.tensor(factor), broken)
        if math.isfinite(norm):
            peer.step()
    assert all(a.equal(b) for a, b in zip(mine, theirs))
    for a, b in zip(mine, theirs):
        assert ours.state[a]["step"] == (3 if math.isfinite(norm) else 0)
        assert all(ours.state[a][key].equal(peer.state[b][key] if peer.state[b] else torch.zeros_like(a)) for key in ("exp_avg", "exp_avg_sq"))


def test_in_parts_it_is_the_same_bit_for_bit(tiny, plain, monkeypatch):
    """A part is a single parameter here, and several."""
    from mfsdp_cli.engine import optimizer

    for chunk in (1, 30_000):
        monkeypatch.setattr(optimizer, "CHUNK", chunk)
        [(steps, after, moments)] = run_ranks(1, train, tiny("qwen2"), Layout(), OPTIM, 4)
        assert steps == plain[4][0] and largest_difference(after, plain[4][1]) == 0.0
        assert all(moments[key].equal(value) for key, value in plain[4][2].items())
    assert plain[4][0][0][1] > OPTIM.clip_grad  # else the factor of clipping is not tried


def test_the_first_step_is_exact_and_keeps_moments_rounded(tiny, plain):
    """Both moments begin as 0, so that nothing rounded has been read yet."""
    [(steps, after, moments)] = run_ranks(1, train, tiny("qwen2"), Layout(), replace(OPTIM, **NARROW), 1)
    assert steps == plain[1][0] and largest_difference(after, plain[1][1]) == 0.0
    assert {str(value.dtype) for value in moments.values()} == {"torch.bfloat16"}
    assert all(moments[key].equal(value.bfloat16()) for key, value in plain[1][2].items())
    assert any(value.abs().max() > 0 for value in moments.values())


def distance(weights: dict, others: dict) -> float:
    return sum((weights[name] - others[name]).abs().sum().item() for name in weights)


@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=2, num_micro=2), Layout(ranks=2, tp=2)], ids=str)
def test_narrow_gradients_and_moments_train_as_wide_ones(tiny, plain, layout):
    """Gradients are rounded to 2^-9 of themselves: so are norms. Where Adam's ratio of moments is near 0 / 0 a weight may go the other way,
    so the way of all of them counts."""
    narrow = replace(OPTIM, main_grads_dtype="bfloat16", **NARROW)
    for steps, after, _ in run_ranks(layout.ranks, train, tiny("qwen2"), layout, narrow, 4):
        for (loss, norm), (wanted_loss, wanted_norm) in zip(steps, plain[4][0], strict=True):
            assert loss == pytest.approx(wanted_loss, rel=2e-3) and norm == pytest.approx(wanted_norm, rel=1e-2)
    assert 0 < distance(after, plain[4][1]) < 0.1 * distance(plain[1][1], plain[4][1])


def save_and_go_on(model, layout: Layout, optim, folder):
    """Two steps, a save, two more; and the two more again from what was saved."""
    from mfsdp_cli.checkpoint import dtensor

    contents = ["model", "optimizer", "extra"]
    engine = build(model, layout, optim)
    for batch in BATCHES[:2]:
        step(engine, batch, OPTIM.lr)
    dtensor.save(engine, folder, contents)
    runs = []
    for _ in range(2):
        runs.append(([step(engine, batch, OPTIM.lr) for batch in BATCHES[2:]], weights(engine)))
        dtensor.load(engine, folder, contents)
    return runs


def test_a_checkpoint_with_narrow_moments_continues_exactly(tiny, tmp_path):
    narrow = replace(OPTIM, main_grads_dtype="bfloat16", **NARROW)
    for (steps, after), (again, after_again) in run_ranks(2, save_and_go_on, tiny("qwen2"), Layout(ranks=2), narrow, tmp_path / "dcp"):
        assert steps == again and largest_difference(after, after_again) == 0.0
