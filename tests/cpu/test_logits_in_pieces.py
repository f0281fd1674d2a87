"""Logits are formed of targets alone. In pieces, kept or formed again in the backward pass: the same step, and when formed again never more than
one piece in memory."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from models import Layout, build, conversations, largest_difference, packed_log_probs, step, weights
from ranks import run_ranks

BATCH = conversations(0, (43, 60, 37, 52, 55))


def train(model, layout: Layout, most_logits: int | None, piece: int = 0):
    from mfsdp_cli.engine import forward

    alive: list[weakref.ref] = []
    most = rows = 0
    original = forward.label_log_probs

    def watched(logits, *args):
        nonlocal most, rows
        rows += len(logits)
        alive.append(weakref.ref(logits))
        most = max(most, sum(ref() is not None for ref in alive))
        return original(logits, *args)

    forward.label_log_probs = watched
    if most_logits:
        forward.MOST_LOGITS, forward.PIECE = most_logits, piece
    engine = build(model, layout)
    before = packed_log_probs(engine, BATCH)
    alive.clear()
    assert rows == sum(s.num_tokens - 1 for s in BATCH)  # there everything is learned
    most = rows = 0
    stepped = step(engine, BATCH, 1e-3)
    num_targets = sum(s.num_targets for s in BATCH[engine.dp_rank::engine.dp_size])
    return before, stepped, weights(engine), len(alive), most, rows / num_targets


@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=2), Layout(ranks=2, tp=2, sp=False), Layout(ranks=2, tp=2, sp=True)], ids=str)
def test_pieces_change_nothing_and_do_not_pile_up(tiny, layout):
    at_once = run_ranks(layout.ranks, train, tiny("qwen2"), layout, None)
    columns = 512 // layout.tp
    again, kept = (run_ranks(layout.ranks, train, tiny("qwen2"), layout, most * columns, 4 * columns) for most in (4, 1000))
    for (before, stepped, after, formed, most, times), *others in zip(at_once, again, kept, strict=True):
        assert (formed, most, times) == (1, 1, 1) and [other[5] for other in others] == [2, 1]
        assert others[0][3] == 2 * others[1][3] and others[0][4] == 1  # each is formed twice
        assert others[1][3] == others[1][4] >= 5
        for before_p, stepped_p, after_p, *_ in others:
            for mine, theirs in zip(before_p, before, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
            np.testing.assert_allclose(stepped_p, stepped, rtol=1e-6)
            assert largest_difference(after_p, after) < 5e-6  # of steps of 1e-3
