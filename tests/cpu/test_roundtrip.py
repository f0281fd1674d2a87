"""Hugging Face -> Megatron -> Hugging Face without a step in between returns every byte, and a partial load is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from models import FAMILIES, Layout, build, conversations, step, weights
from ranks import run_ranks

from mfsdp_cli.errors import BAD_INPUT, MfsdpError

PADDED = {"vocab_size": 509}


def tensors_of(folder) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def not_returned(models: list, layout: Layout) -> list[str]:
    """Names of tensors that come back otherwise than they lie in the folders, compared on every rank."""
    import torch

    wrong = []
    for model, dtype in models:
        engine = build(model, replace(layout, dtype=dtype))
        source, returned = tensors_of(model), dict(engine.named_weights())
        wrong += [f"{model.name} {name}" for name in source.keys() ^ returned.keys()]
        for name in source.keys() & returned.keys():
            a, b = source[name], returned[name]
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            wrong += [] if same else [f"{model.name} {name} {a.dtype} {tuple(a.shape)} -> {b.dtype} {tuple(b.shape)}"]
    return wrong


@pytest.mark.parametrize("layout", [Layout(ranks=2), Layout(ranks=2, tp=2), Layout(ranks=2, ep=2)], ids=str)
def test_every_byte_returns(tiny, layout):
    names = list(FAMILIES) if layout.ep == 1 else ["qwen3_moe"]
    models = [(tiny(name), "float32") for name in names]
    models += [(tiny(name, dtype="bfloat16", **PADDED), "bfloat16") for name in names if layout.tp > 1 or name == names[-1]]
    for wrong in run_ranks(layout.ranks, not_returned, models, layout):
        assert wrong == []


def exported_again(model, layout: Layout) -> tuple[list[str], int, int]:
    """Names whose tensor in an export after a step is not what Bridge's own export gathers; how many are not what they were before that
    step; how often ranks told each other pickled objects for that second export."""
    import torch
    import torch.distributed as dist

    engine = build(model, layout)
    before = weights(engine)
    step(engine, conversations(), lr=1e-2)
    told, tell = [], dist.all_gather_object
    dist.all_gather_object = lambda *args, **kwargs: told.append(args) or tell(*args, **kwargs)
    try:
        after = weights(engine)
    finally:
        dist.all_gather_object = tell
    theirs = dict(engine.bridge.export_hf_weights(engine.model, cpu=True, show_progress=False))
    wrong = [name for name, tensor in after.items() if not torch.equal(tensor, theirs[name][: tensor.shape[0]].float())]
    return wrong, sum(not torch.equal(after[name], before[name]) for name in after), len(told)


@pytest.mark.parametrize("family, layout", [("qwen2", Layout()), ("qwen2", Layout(ranks=2)), ("qwen3", Layout(ranks=4, tp=2)),
                                            ("qwen3_moe", Layout(ranks=2, ep=2))], ids=str)
def test_an_export_after_a_step_has_its_weights_and_asks_nobody_for_the_layout(tiny, family, layout):
    model = tiny(family)
    for wrong, changed, told in run_ranks(layout.ranks, exported_again, model, layout):
        assert wrong == [] and told == 0
        assert changed == len(tensors_of(model))


def change(model, folder, edit):
    """A copy of a model folder with its dict of tensors edited in place."""
    from safetensors.torch import save_file

    copy = shutil.copytree(model, folder)
    tensors = tensors_of(copy)
    edit(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def refusals(models: list, layout: Layout) -> list[tuple[int, str]]:
    found = []
    for model in models:
        with pytest.raises(MfsdpError) as caught:
            build(model, layout)
        found.append((caught.value.exit_code, str(caught.value)))
    return found


def test_a_partial_load_is_refused_on_every_rank(tiny, tmp_path):
    embedding, gone, more = "model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight", "model.layers.2.self_attn.o_proj.weight"
    models = [
        change(tiny("qwen3"), tmp_path / "lacking", lambda t: t.pop(gone)),
        change(tiny("qwen3"), tmp_path / "more", lambda t: t.update({more: t[gone].clone()})),
        change(tiny("qwen3"), tmp_path / "both", lambda t: t.update({"model.norm.wight": t.pop("model.norm.weight")})),
        change(tiny("qwen3"), tmp_path / "rows", lambda t: t.update({embedding: t[embedding][:500].clone()})),
        change(tiny("qwen3"), tmp_path / "half", lambda t: t.update({gone: t[gone][:, :32].clone()})),
        change(tiny("qwen3"), tmp_path / "shape", lambda t: t.update({gone: t[gone].view(32, 128)})),
    ]
    for found in run_ranks(2, refusals, models, Layout(ranks=2)):
        assert [code for code, _ in found] == [BAD_INPUT] * len(models)
        texts = [text for _, text in found]
        assert f"{gone} is missing" in texts[0]
        assert f"{more} is superfluous" in texts[1]
        assert "model.norm.weight is missing" in texts[2] and "model.norm.wight is superfluous" in texts[2]
        assert f"{embedding} is [500, 64]" in texts[3] and "[512, 64]" in texts[3]
        assert f"{gone} is [64, 32]" in texts[4]
        assert f"{gone} is [32, 128]" in texts[5]
