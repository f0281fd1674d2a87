"""Saved at one TP x DP x EP, loaded at another: what is loaded is what was saved, bit for bit, or the pair is refused before a launch.

Weights are compared as Hugging Face tensors, and moments by a step at a gradient of zero: it moves each weight by a function of it and
of its own two moments alone, on every layout alike, and knows nothing of how checkpoints name and cut tensors. The files that the
loading layout writes again are compared as well.

MFSDP_LAYOUTS=all takes every ordered pair of layouts up to four ranks, in float32 and bfloat16.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import OPTIM, Layout, build, conversations, micro_batches, packed_log_probs, step, weights
from ranks import run_ranks
from runs import stored

ALL = ["model", "optimizer", "extra"]
BATCHES = [conversations(seed) for seed in range(40, 43)]
DENSE = [Layout(ranks, tp) for ranks, tp in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))]
MIXTURE = [Layout(ranks, tp, ep) for ranks, tp, ep in (
    (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 1, 2), (4, 1, 4), (4, 2, 2), (4, 2, 4), (4, 4, 2), (4, 4, 4))]
EVERY = os.environ.get("MFSDP_LAYOUTS") == "all"
PADDED = {"vocab_size": 509}
# name, options of the model, dtype, layouts: every ordered pair of them
FAMILIES = [
    ("qwen2", {}, "float32", DENSE if EVERY else DENSE[:3]),  # tied, SwiGLU
    ("qwen2", PADDED, "bfloat16", DENSE if EVERY else []),
    ("llama", {}, "bfloat16", DENSE if EVERY else []),
    ("qwen3_moe", {}, "float32", MIXTURE if EVERY else []),
    ("qwen3_moe", {}, "bfloat16", MIXTURE if EVERY else [MIXTURE[0], MIXTURE[2], MIXTURE[3]]),
]
FAMILIES = [family for family in FAMILIES if family[-1]]


def digests(tensors: dict) -> dict[str, str]:
    return {name: hashlib.sha1(t.contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def coast(engine) -> dict[str, str]:
    """Weights after a step at a gradient of zero."""
    engine.forward_backward(micro_batches(engine, BATCHES[0], 1), lambda lp, b: (lp * 0.0).sum())
    engine.optimizer_step(0.01)
    return digests(weights(engine))


def save_one(model, layout: Layout, folder: Path):
    """(weights, log-probabilities, weights after coasting) of what is saved."""
    from mfsdp_cli.checkpoint import dtensor

    engine = build(model, layout)
    for batch in BATCHES[:2]:
        step(engine, batch, OPTIM.lr)
    dtensor.save(engine, folder, ALL)
    return digests(weights(engine)), packed_log_probs(engine, BATCHES[2]), coast(engine)


def load_all(model, layout: Layout, folders: list[Path], again: Path, vocab_rows: int | None):
    """The same of each folder, one after the other into one engine, which is used and changed in between."""
    from mfsdp_cli.checkpoint import dtensor

    engine = build(model, layout, load_weights=False, vocab_rows=vocab_rows)
    found = []
    for folder in folders:
        packed_log_probs(engine, BATCHES[0])
        dtensor.load(engine, folder, ALL)
        dtensor.save(engine, again / folder.name, ALL)
        evaluated = packed_log_probs(engine, BATCHES[2])
        found.append((digests(weights(engine)), evaluated, coast(engine)))
    return found


@pytest.mark.parametrize("name, options, dtype, layouts", FAMILIES, ids=lambda v: v if isinstance(v, str) else "")
def test_every_pair_is_exact(tiny, tmp_path, name, options, dtype, layouts):
    model, layouts = tiny(name, **options), [replace(layout, dtype=dtype) for layout in layouts]
    savers = [layout for layout in layouts if not options or layout.tp > 1]  # of the others, which need no padding, see below
    rows = 512 if options else None
    folders = [tmp_path / f"saved-{layout}" for layout in savers]
    saved = [run_ranks(layout.ranks, save_one, model, layout, folder)[0] for layout, folder in zip(savers, folders)]
    files = [{n: t for n, t in stored(folder).items() if not n.startswith("rng.")} for folder in folders]
    assert all(w != after for w, _, after in saved)
    num_pairs = 0
    for layout in layouts:
        again = tmp_path / f"again-{layout}"
        found = run_ranks(layout.ranks, load_all, model, layout, folders, again, rows, timeout_s=60 + 60 * len(folders))[0]
        for saver, folder, tensors, wanted, mine in zip(savers, folders, files, saved, found, strict=True):
            pair = f"{saver} -> {layout}"
            assert mine[0] == wanted[0], f"{pair}: weights"
            assert mine[2] == wanted[2], f"{pair}: moments"
            others = stored(again / folder.name)
            assert {n for n in others if not n.startswith("rng.")} == tensors.keys()
            assert [n for n, t in tensors.items() if not t.equal(others[n])] == [], pair
            worst = max(np.abs(a - b).max() for a, b in zip(mine[1], wanted[1], strict=True))
            assert worst == 0 if saver == layout else worst < (1e-5 if dtype == "float32" else 0.1), f"{pair}: {worst}"
            num_pairs += 1
    assert num_pairs == len(layouts) * len(savers)
    print(f"{name} {dtype}: {num_pairs} ordered pairs, {len(files[0])} tensors each")


def test_a_vocabulary_or_stages_of_another_size_are_refused_before_a_launch():
    """509 rows, as one tensor-parallel rank stores them, over 2 and 4; 512, as those pad it, over any. And no other PP at all."""
    from mfsdp_cli.checkpoint.manifest import Manifest
    from mfsdp_cli.checkpoint.reuse import resume_problems
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.engine.megatron import padded_vocab_size

    settings = SftSettings()
    assert settings.engine.pipeline_model_parallel_size == 1
    for saver in (1, 2, 4):
        rows = padded_vocab_size(509, saver)
        made = Manifest(step=1, total_steps=1, samples_consumed=1, contents=ALL, topology={"world": 4, "tp": saver, "pp": 1}, dtype="float32",
                        padded_vocab_size=rows, architecture="Qwen2ForCausalLM", source_model="m", num_tensors=1)
        for loader in (1, 2, 4):
            settings.engine.tensor_model_parallel_size = loader
            keys = [p.key for p in resume_problems(settings, made)]
            assert keys == (["engine.tensor_model_parallel_size"] if saver == 1 and loader > 1 else []), (saver, loader)
    settings.engine.pipeline_model_parallel_size = 2
    assert [p.key for p in resume_problems(settings, made)] == ["engine.pipeline_model_parallel_size"]
    settings.engine.pipeline_model_parallel_size = 1
    assert [p.found for p in resume_problems(settings, replace(made, topology={"pp": 2}))] == ["1"]
