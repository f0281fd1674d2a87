"""A checkpoint of any layout becomes a Hugging Face folder that holds the engine's weights, or nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from exports import UP, exported, read
from models import Layout, build, conversations, largest_difference, step
from ranks import run_ranks
from runs import END_OF_TURN, save_checkpoint, stored

from mfsdp_cli.checkpoint import manifest
from mfsdp_cli.errors import BAD_INPUT, MISMATCH, MfsdpError

BATCH = conversations(seed=30)
CASES = {
    # a padded vocabulary, tied, on two tensor-parallel ranks
    "dense": ("qwen2", {"vocab_size": 509, "dtype": "bfloat16"}, Layout(ranks=2, tp=2, dtype="bfloat16")),
    # experts on two ranks
    "mixture": ("qwen3_moe", {}, Layout(ranks=2, ep=2)),
}


def train_and_save(model, layout: Layout, run_dir: Path):
    """A step, a checkpoint as the trainer writes it; the weights as the engine gives them."""
    engine = build(model, layout)
    step(engine, BATCH, 1e-3)
    return save_checkpoint(engine, model, layout, run_dir), dict(engine.named_weights())


@pytest.fixture(scope="module", params=CASES)
def saved(request, tiny, tmp_path_factory):
    """(model folder, checkpoint, the engine's weights)"""
    name, options, layout = CASES[request.param]
    model = tiny(name, **options)
    return model, *run_ranks(layout.ranks, train_and_save, model, layout, tmp_path_factory.mktemp("run"))[0]


def an_export(folder: Path) -> Path:
    """What looks like an earlier one, and may be replaced."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "old").touch()
    return folder


def test_the_exported_folder_holds_the_engine_s_weights(saved, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, checkpoint, weights = saved
    report = exported(checkpoint, tmp_path / "out")
    tensors = read(tmp_path / "out")
    assert tensors.keys() == read(model).keys() and report["num_tensors"] == len(tensors)
    assert {name: t.dtype for name, t in tensors.items()} == {name: t.dtype for name, t in read(model).items()}
    assert largest_difference(tensors, weights) == 0.0 and largest_difference(tensors, read(model)) > 1e-4  # trained
    assert 0 <= report["forward_check_difference"] < 5e-2 and report["step"] == 1
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.config.vocab_size == tensors["model.embed_tokens.weight"].shape[0]
    assert loaded.generation_config.eos_token_id == [END_OF_TURN, 434]  # the source model names 434 alone
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(AutoTokenizer.from_pretrained(model))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_shards_float32_and_a_target_that_is_replaced(saved, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    _, checkpoint, _ = saved
    an_export(tmp_path / "out")
    report = exported(checkpoint, tmp_path / "out", dtype="float32", shard_bytes=100_000)
    tensors, index = read(tmp_path / "out"), json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert report["files"] == files and len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["weight_map"].keys() == tensors.keys() and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in tensors.values()) == report["num_bytes"]
    assert not (tmp_path / "out" / "old").exists()
    # the float32 main weights as they were trained, not what is left of them in bfloat16
    norm = stored(checkpoint / "dist_ckpt")["model.decoder.final_layernorm.weight"]
    assert tensors["model.norm.weight"].equal(norm) and norm.dtype == torch.float32
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.float32


def tamper(checkpoint: Path, folder: Path, edit) -> Path:
    """A copy with a manifest that fits it; `edit` gets the copy."""
    copy = shutil.copytree(checkpoint, folder / checkpoint.name)
    edit(copy)
    manifest.write_manifest(copy, manifest.require_complete(checkpoint))
    return copy


def edit_index(name: str, **entry):
    def edit(copy: Path) -> None:
        path = copy / "source_index.json"
        index = json.loads(path.read_text())
        index[name] = index.get(name, {}) | entry
        path.write_text(json.dumps(index))
    return edit


def edit_weight(copy: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = stored(copy / "dist_ckpt")
    state["model.decoder.final_layernorm.weight"][3] = float("nan")
    shutil.rmtree(copy / "dist_ckpt")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(copy / "dist_ckpt"), no_dist=True)


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory) -> Path:
    """A checkpoint of a tied float32 model on one rank."""
    return run_ranks(1, train_and_save, tiny("qwen2"), Layout(), tmp_path_factory.mktemp("plain"))[0][0]


@pytest.mark.parametrize("edit, found", [
    (edit_index("model.norm.bias", shape=[64], dtype="float32"), "model.norm.bias = missing"),
    (edit_index("model.norm.weight", shape=[65]), "model.norm.weight = shape [64]"),
    (edit_weight, "model.norm.weight = NaN"),
], ids=["more-tensors", "other-shape", "nan"])
def test_a_mismatch_writes_nothing(plain, tmp_path, edit, found):
    out = an_export(tmp_path / "out")
    with pytest.raises(MfsdpError) as caught:
        exported(tamper(plain, tmp_path, edit), out)
    assert caught.value.exit_code == MISMATCH and found in str(caught.value)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "old"] and not (tmp_path / "out.tmp").exists()


def test_weights_in_each_other_s_place_are_found_by_the_forward_pass(plain, tmp_path):
    with pytest.raises(MfsdpError) as caught:
        exported(plain, tmp_path / "out", swap=True)
    assert caught.value.exit_code == MISMATCH and "forward pass" in str(caught.value) and not (tmp_path / "out").exists()
    exported(plain, tmp_path / "out", swap=True, forward_check=False)  # names, shapes, dtypes and bytes are all right
    assert (tmp_path / "out").exists()


def test_the_source_s_dtypes_and_its_copy_of_a_tied_layer_are_kept(plain, tmp_path):
    """Some tied models are published with the output layer as well."""
    import torch

    def edit(copy: Path) -> None:
        edit_index("lm_head.weight", shape=[512, 64], dtype="float32")(copy)
        edit_index("model.norm.weight", dtype="bfloat16")(copy)
        edit_index(UP, dtype="float16")(copy)

    exported(tamper(plain, tmp_path, edit), tmp_path / "out")
    tensors = read(tmp_path / "out")
    assert tensors["lm_head.weight"].equal(tensors["model.embed_tokens.weight"])
    assert tensors["model.norm.weight"].dtype == torch.bfloat16 and tensors[UP].dtype == torch.float16


def test_what_cannot_be_read_is_bad_input(plain, tmp_path):
    lost = tamper(plain, tmp_path, lambda copy: (copy / "source_index.json").unlink())
    with pytest.raises(MfsdpError) as caught:
        exported(lost, tmp_path / "out")
    assert caught.value.exit_code == BAD_INPUT and "--source" in caught.value.problems[0].fix
    source = Path(manifest.require_complete(plain).source_model)
    assert exported(lost, tmp_path / "out", source=source)["num_tensors"] == 26
