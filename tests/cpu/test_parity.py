"""Every family computes what transformers computes, packed or not, padded vocabulary or not, in float32 and near enough in bfloat16."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
from models import FAMILIES, HfLoop, Layout, build, conversations, packed_log_probs, step, weights
from ranks import run_ranks

BATCH = conversations(seed=7)
PADDED = {"vocab_size": 509}  # a prime number of rows: two tensor-parallel ranks need padding


def one_step(model, layout: Layout):
    engine = build(model, layout)
    log_probs = packed_log_probs(engine, BATCH)
    return log_probs, step(engine, BATCH, 1e-3, layout.num_micro), engine.vocab_rows


@pytest.mark.parametrize("options", [{}, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_log_probs_loss_and_gradient_norm_are_those_of_transformers(tiny, name, options):
    layout = Layout(ranks=2, tp=2, num_micro=2) if options else Layout(num_micro=2)
    loop = HfLoop(tiny(name, **options))
    theirs = [loop.log_probs(sample).detach().numpy() for sample in BATCH]
    wanted = loop.step(BATCH, 1e-3)
    for log_probs, found, vocab_rows in run_ranks(layout.ranks, one_step, tiny(name, **options), layout):
        for a, b in zip(log_probs, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert vocab_rows == 512 and len(log_probs) == 5


def test_padding_columns_have_no_probability(tiny, tmp_path):
    """With an output layer of zeros every token has the same probability: one in 509, not one in the 512 rows that there are."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny("llama", **PADDED), tmp_path / "m")
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    [(log_probs, (loss, _), vocab_rows), _] = run_ranks(2, one_step, model, Layout(ranks=2, tp=2))
    assert vocab_rows == 512
    np.testing.assert_allclose(np.concatenate(log_probs), -math.log(509), rtol=1e-6)
    assert loss == pytest.approx(math.log(509), rel=1e-6)


def bfloat16_steps(model, layout: Layout):
    engine = build(model, layout)
    steps = [step(engine, BATCH, 1e-3, layout.num_micro) for _ in range(2)]
    return steps, weights(engine)


@pytest.mark.parametrize("name, layout", [("qwen2", Layout(ranks=2, tp=2, num_micro=2, dtype="bfloat16")),
                                          ("qwen3_moe", Layout(ranks=2, ep=2, num_micro=2, dtype="bfloat16"))], ids=str)
def test_bfloat16_is_close(tiny, tmp_path, name, layout):
    loop = HfLoop(tiny(name))
    wanted = [loop.step(BATCH, 1e-3) for _ in range(2)]
    [(steps, after), _] = run_ranks(2, bfloat16_steps, tiny(name), layout)
    np.testing.assert_allclose([loss for loss, _ in steps], [loss for loss, _ in wanted], rtol=5e-3)
    np.testing.assert_allclose([norm for _, norm in steps], [norm for _, norm in wanted], rtol=5e-2)
    # float32 main weights: a step of 1e-3 is below bfloat16's resolution at 1, and would be lost on the norms
    norm = after["model.norm.weight"]
    assert not norm.equal(norm.bfloat16().float())
    np.testing.assert_allclose(norm, loop.weights(tmp_path)["model.norm.weight"], atol=5e-4)
