"""However the ranks split the work, training is that of a plain transformers loop: losses, gradient norms and weights."""

from __future__ import annotations

import numpy as np
import pytest
from models import OPTIM, HfLoop, Layout, build, conversations, largest_difference, packed_log_probs, step, weights
from ranks import run_ranks

LEARNING_RATES = (1e-3, 5e-4, 2e-4)
BATCHES = [conversations(seed) for seed in range(len(LEARNING_RATES))]

DENSE = [
    Layout(),
    Layout(num_micro=3, recompute="full"),
    Layout(ranks=2),
    Layout(ranks=2, num_micro=4),  # five conversations over two ranks with four micro batches each: three are empty
    Layout(ranks=2, tp=2, sp=False, num_micro=2),
    Layout(ranks=2, tp=2, sp=True, num_micro=2),
    Layout(ranks=4, tp=2, num_micro=2),
    Layout(ranks=4, tp=4),  # more ranks than the two key-value heads
]
MIXTURE = [
    Layout(num_micro=2),
    Layout(ranks=2, num_micro=2),
    Layout(ranks=2, ep=2),
    Layout(ranks=2, ep=2, num_micro=3),  # each expert on one rank only, and accumulation: Megatron-FSDP's live fault
    Layout(ranks=2, tp=2),
    Layout(ranks=4, tp=2, ep=2, num_micro=2),
]


def train(model, layout: Layout):
    engine = build(model, layout)
    before = packed_log_probs(engine, BATCHES[0])
    steps = [step(engine, batch, lr, layout.num_micro) for batch, lr in zip(BATCHES, LEARNING_RATES)]
    return before, steps, weights(engine)


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """family -> (log-probs before, steps, weights after) of the plain loop."""
    made: dict = {}

    def get(name: str):
        if name not in made:
            loop = HfLoop(tiny(name))
            before = [loop.log_probs(sample).detach().numpy() for sample in BATCHES[0]]
            steps = [loop.step(batch, lr) for batch, lr in zip(BATCHES, LEARNING_RATES)]
            made[name] = before, steps, loop.weights(tmp_path_factory.mktemp("hf"))
        return made[name]

    return get


@pytest.mark.parametrize("name, layout", [("qwen2", lay) for lay in DENSE] + [("qwen3_moe", lay) for lay in MIXTURE], ids=str)
def test_a_layout_trains_as_a_plain_loop(tiny, reference, name, layout):
    log_probs, steps, after = reference(name)
    ranks = run_ranks(layout.ranks, train, tiny(name), layout)
    for mine_before, mine_steps, mine_after in ranks:
        for mine, theirs in zip(mine_before, log_probs, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(mine_steps, steps, rtol=1e-5)
    assert steps[0][1] > OPTIM.clip_grad  # else clipping is not tried
    assert largest_difference(ranks[0][2], after) < 1e-5
