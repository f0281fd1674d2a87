"""Every family comes back from checkpoint and export as it went in, to the last bit; an export may be killed at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from exports import export_here, exported, read
from models import FAMILIES, Layout, build
from ranks import run_ranks
from runs import save_checkpoint

from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError

KILLS = int(os.environ.get("MFSDP_KILLS", "2"))
KEPT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")


def save_all(models: list, layout: Layout, folder: Path) -> list[Path]:
    """Untrained, so that what comes out must be what went in."""
    engines = ((model, build(model, replace(layout, dtype=dtype), optim=None)) for model, dtype in models)
    return [save_checkpoint(engine, model, layout, folder / model.parent.name, ("model",)) for model, engine in engines]


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """(model, dtype, checkpoint) of each family, on two tensor-parallel ranks, with a vocabulary that is padded for them."""
    dtypes = dict(zip(FAMILIES, ["bfloat16", "float32", "bfloat16", "float32", "bfloat16"], strict=True))
    models = [(tiny(name, dtype=dtype, vocab_size=509), dtype) for name, dtype in dtypes.items()]
    checkpoints = run_ranks(2, save_all, models, Layout(ranks=2, tp=2), tmp_path_factory.mktemp("families"))[0]
    return {name: (*entry, checkpoint) for name, entry, checkpoint in zip(FAMILIES, models, checkpoints, strict=True)}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_bit_returns(saved, tmp_path, name):
    import torch

    model, dtype, checkpoint = saved[name]
    report = exported(checkpoint, tmp_path / "out")
    source, returned = read(model), read(tmp_path / "out")
    assert source.keys() == returned.keys() and report["num_tensors"] == len(source)
    for key in source:
        a, b = source[key], returned[key]
        assert a.dtype == b.dtype == getattr(torch, dtype) and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), key
    for file in KEPT:
        assert (tmp_path / "out" / file).read_bytes() == (model / file).read_bytes(), file
    assert report["forward_check_difference"] < (1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("name, dtype", [("qwen2", "float32"), ("qwen2-untied", "bfloat16")])
def test_another_dtype_is_a_cast_and_the_config_says_so(saved, tmp_path, name, dtype):
    import torch

    model, _, checkpoint = saved[name]
    exported(checkpoint, tmp_path / "out", dtype=dtype)
    source, returned = read(model), read(tmp_path / "out")
    assert all(returned[key].equal(source[key].to(getattr(torch, dtype))) and returned[key].dtype == getattr(torch, dtype) for key in source)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_tensors_come_in_any_order_and_lie_where_the_header_says(tmp_path):
    """Shards of 100 bytes: 40 + 60, then 400 alone, then 2 + 0 + 96; in each the widest elements first, as their alignment wants."""
    import torch
    from safetensors import safe_open

    from mfsdp_cli.checkpoint.shard_files import ShardFiles

    tensors = {"a": torch.randn(20).bfloat16(), "b": torch.randn(3, 5), "large": torch.randn(10, 10), "scalar": torch.tensor(1.5).half(),
               "empty": torch.zeros(0, 4), "c": torch.arange(12)}
    entries = {name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for name, t in tensors.items()}
    with ShardFiles(tmp_path, entries, shard_bytes=100) as files:
        for name in ("c", "large", "a", "scalar", "b", "empty"):
            files.write(name, tensors[name])
    assert files.num_bytes == 598 and files.files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    found = read(tmp_path)
    assert found.keys() == tensors.keys() and all(found[name].equal(t) and found[name].dtype == t.dtype for name, t in tensors.items())
    with safe_open(tmp_path / files.files[0], "pt") as reader:
        assert reader.metadata() == {"format": "pt"} and reader.offset_keys() == ["b", "a"]


def test_no_model_is_whole_in_memory_while_it_is_checked():
    """A layer's weights are there while it runs, and at no other time."""
    import torch

    from mfsdp_cli.checkpoint.export_proof import by_layer, layers

    with torch.device("meta"):
        stack = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)) for _ in range(4)])
        model = torch.nn.ModuleDict({"stack": stack, "norm": torch.nn.LayerNorm(3)})
    filled = []

    def fill(prefix, module):
        assert all(param.is_meta for param in model.parameters())  # the layer before has let go
        filled.append(prefix)
        for part in module.modules():
            part._parameters = {name: torch.nn.Parameter(torch.ones(param.shape)) for name, param in part._parameters.items()}

    by_layer(model, fill)
    x = torch.ones(1, 3)
    for module in (*model["stack"], model["norm"]):
        x = module(x)
    assert filled == [name for name, _ in layers(model)] == ["stack.0", "stack.1", "stack.2", "stack.3", "norm"]
    assert x.tolist() == [[1.0, 1.0, 1.0]] and all(param.is_meta for param in model.parameters())


def test_a_full_disk_is_told_with_the_bytes_that_are_needed_and_leaves_nothing(saved, tmp_path):
    _, _, checkpoint = saved["qwen3"]
    num_bytes = sum(t.nbytes for t in read(saved["qwen3"][0]).values())
    with pytest.raises(MfsdpError, match=f"the disk is full: the weights need {num_bytes:,} bytes") as caught:
        exported(checkpoint, tmp_path / "out", full_after=5)
    assert caught.value.exit_code == MACHINE_UNFIT and list(tmp_path.iterdir()) == []


def test_killed_at_any_moment(saved, tmp_path):
    """The target is what it was, absent, or the whole export; the next export clears up and goes through."""
    model, _, checkpoint = saved["llama"]
    out, moments = tmp_path / "out", random.Random(0)
    started = time.monotonic()
    assert wait(start(checkpoint, out)) == 0
    longest = time.monotonic() - started
    before, new = False, read(model).keys()
    for _ in range(KILLS):
        if before:
            (out / "config.json").write_text('{"model_type": "old"}')
        else:
            shutil.rmtree(out)
        pid = start(checkpoint, out)
        time.sleep(moments.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        wait(pid)
        state = "none" if not out.exists() else "old" if "old" in (out / "config.json").read_text() else "new"
        assert state in (("old", "new", "none") if before else ("none", "new"))
        if state == "new":
            assert read(out).keys() == new
        assert wait(start(checkpoint, out)) == 0
        assert read(out).keys() == new and sorted(p.name for p in tmp_path.iterdir()) == ["out"]
        before = not before


def start(checkpoint: Path, out: Path) -> int:
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        try:
            os._exit(0 if isinstance(export_here(checkpoint, out), dict) else 1)
        finally:
            os._exit(2)
    return pid


def wait(pid: int) -> int:
    return os.waitpid(pid, 0)[1]
