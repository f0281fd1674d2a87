"""What is computed again in the backward pass changes no number, and what is said not to be kept is not."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
from models import Layout, build, conversations, largest_difference, micro_batches, step, weights
from ranks import run_ranks

BATCH = conversations(5)
LAYERS = 2


def train(model, layout: Layout):
    """(losses and norms of two steps, weights, products of SwiGLU alive when the loss goes backward, products made in all)."""
    from mfsdp_cli.engine import formulas

    made, alive, original = [], [], formulas.swiglu

    def watched(x):
        product = original(x)
        made.append(weakref.ref(product))
        return product

    formulas.swiglu = watched
    engine = build(model, layout)
    steps = [step(engine, BATCH, 1e-3) for _ in range(2)]
    after = weights(engine)
    made.clear()

    def loss(log_probs, packed):
        alive.append(sum(ref() is not None for ref in made))
        return -(log_probs * packed.target_mask).sum()

    engine.forward_backward(micro_batches(engine, BATCH, 1), loss)
    return steps, after, alive[0], len(made)


@pytest.mark.parametrize("layout", [Layout(), Layout(dtype="bfloat16"), Layout(ranks=2, tp=2)], ids=str)
def test_the_same_step_whatever_is_computed_again(tiny, layout):
    none, full = (run_ranks(layout.ranks, train, tiny("qwen2"), replace(layout, recompute=way)) for way in ("none", "full"))
    for (steps, after, *products), (steps_again, after_again, *products_again) in zip(none, full, strict=True):
        assert steps_again == steps and largest_difference(after_again, after) == 0.0
        assert products == [0, 2 * LAYERS] and products_again == [0, 3 * LAYERS]
