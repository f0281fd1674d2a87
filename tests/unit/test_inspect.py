"""Reading checkpoints without torch, against folders that torch.distributed.checkpoint really wrote."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from dcp_for_tests import written_by_torch

from mfsdp_cli.checkpoint import manifest, saving
from mfsdp_cli.checkpoint.hf_folder import read_hf
from mfsdp_cli.checkpoint.inspect import inspect, render
from mfsdp_cli.errors import BAD_INPUT, MISMATCH, OK, MfsdpError

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return written_by_torch(tmp_path_factory) / "dcp"


@pytest.fixture
def dcp(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "bare"))


def hf_folder(folder: Path, *, weights: bool = False, tokenizer: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    if weights:
        safetensors(folder / "model.safetensors", {"embed": ("BF16", [6, 4]), "norm": ("F32", [4])})
    return folder


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4}[dtype]
        for axis in shape:
            size *= axis
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


def mfsdp_step(run: Path, written: Path, step: int, contents=("model", "optimizer", "extra")) -> Path:
    tmp = saving.begin(run / "checkpoints", step)
    shutil.copytree(written, tmp / "dist_ckpt")
    hf_folder(tmp / "huggingface")
    return saving.commit(tmp, manifest.Manifest(
        step=step, total_steps=400, samples_consumed=8 * step, contents=list(contents), dtype="bfloat16", padded_vocab_size=512,
        topology={"world": 2, "dp": 2, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1}, architecture="Qwen2ForCausalLM",
        source_model="Qwen/Qwen2.5-Math-7B", num_tensors=11, versions={"torch": "2.11.0"}))


# ---------------------------------------------------------------- inspect

def test_report_of_an_mfsdp_checkpoint(written, tmp_path):
    folder = mfsdp_step(tmp_path / "run", written, 100)
    report = inspect(tmp_path / "run", tensors="", verify=True)
    assert report["exit_code"] == OK and report["complete"] and report["verified"] and report["problems"] == []
    assert (report["layout"], report["step"], report["total_steps"], report["samples_consumed"]) == ("mfsdp", 100, 400, 800)
    assert report["topology"]["dp"] == 2 and report["contents"] == ["model", "optimizer", "extra"]
    # by hand: embedding 6x4, halves 3x4 each (bf16) and norm 4 (fp32); two fp32 moments of embedding and halves
    assert report["groups"] == [
        {"name": "model parameters", "num_tensors": 4, "num_logical_tensors": 3, "num_elements": 52, "bytes": 112},
        {"name": "optimizer moments", "num_tensors": 6, "num_logical_tensors": 4, "num_elements": 96, "bytes": 384},
        {"name": "optimizer, other", "num_tensors": 1, "num_logical_tensors": 1, "num_elements": 1, "bytes": 4},
    ]
    assert {row["name"]: (row["num_tensors"], row["num_elements"], row["bytes"]) for row in report["dtypes"]} == {
        "bfloat16": (3, 48, 96), "float32": (8, 101, 404)}
    assert (report["num_tensors"], report["num_logical_tensors"], report["num_objects"]) == (11, 8, 3)
    assert len(report["tensors"]) == 11 and report["tensors"][0]["num_chunks"] == 2
    assert report["huggingface"] == {"path": str(folder / "huggingface"), "config": True, "tokenizer": True, "num_weights": 0,
                                     "weight_bytes": 0}
    assert report["export"] == {"possible": True, "why": f"mfsdp ckpt export-hf {folder} -o DIR"}
    assert report["steps"] == [{"step": 100, "path": str(folder), "latest": True}]
    json.dumps(report, allow_nan=False)


def test_every_way_to_name_a_checkpoint_gives_the_same_report(written, tmp_path):
    mfsdp_step(tmp_path / "run", written, 50)
    folder = mfsdp_step(tmp_path / "run", written, 100)
    run = tmp_path / "run"
    reports = [inspect(p) for p in (run, run / "checkpoints", folder, folder / "dist_ckpt", folder / "huggingface")]
    assert all(report == reports[0] for report in reports)
    assert [(s["step"], s["latest"]) for s in reports[0]["steps"]] == [(50, False), (100, True)]


def test_faults_of_an_mfsdp_checkpoint_are_told_once_each(written, tmp_path):
    folder = mfsdp_step(tmp_path, written, 3)
    (folder / "dist_ckpt" / "__1_0.distcp").unlink()
    os.truncate(folder / "dist_ckpt" / "__0_0.distcp", 10)
    report = inspect(folder, verify=True)
    assert report["exit_code"] == BAD_INPUT and not report["complete"]
    assert sorted(Path(p["key"]).name for p in report["problems"]) == ["__0_0.distcp", "__1_0.distcp"]
    assert report["export"] == {"possible": False, "why": "the checkpoint is not whole"}
    assert report["num_tensors"] == 11, "what .metadata says is still shown"
    assert "NOT USABLE, problems: 2" in render(report)


def test_verify_finds_what_sizes_hide(written, tmp_path):
    folder = mfsdp_step(tmp_path, written, 3)
    shard = folder / "dist_ckpt" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x10
    shard.write_bytes(data)
    assert inspect(folder)["exit_code"] == OK
    report = inspect(folder, verify=True)
    assert report["exit_code"] == MISMATCH and not report["verified"] and [p["key"] for p in report["problems"]] == [str(shard)]


def test_an_interrupted_save_is_described_and_refused(written, tmp_path):
    tmp = saving.begin(tmp_path, 9)
    shutil.copytree(written, tmp / "dist_ckpt")
    report = inspect(tmp)
    assert (report["exit_code"], report["step"], report["num_tensors"]) == (BAD_INPUT, 9, 11)
    assert "interrupted" in report["problems"][0]["why"]
    with pytest.raises(MfsdpError, match="none of these is a complete checkpoint"):
        inspect(tmp_path)


def test_a_checkpoint_without_model_cannot_be_exported(written, tmp_path):
    report = inspect(mfsdp_step(tmp_path, written, 1, contents=("extra",)))
    assert report["export"] == {"possible": False, "why": "it holds no model, only extra"}


def test_verl_current_layout(written, tmp_path):
    actor = tmp_path / "global_step_40" / "actor"
    hf_folder(actor / "model" / "huggingface", weights=True)
    shutil.copytree(written, actor / "model" / "dist_ckpt")
    places = {"model": {"path": "model/dist_ckpt"}, "hf_config": {"path": "model/huggingface"}}
    contents = {"schema_version": 2, "arch": "Qwen2ForCausalLM", "global_step": 40, "world_size": 8, "save_contents": ["model"],
                "contents": places}
    (actor / "ckpt_contents.json").write_text(json.dumps(contents))
    for path in (actor, actor / "model", actor / "model" / "dist_ckpt", actor / "model" / "huggingface", tmp_path / "global_step_40"):
        report = inspect(path)
        assert (report["layout"], report["step"], report["topology"], report["num_tensors"]) == ("verl", 40, {"world": 8}, 11), path
        assert Path(report["path"]) == actor and report["exit_code"] == OK
    assert report["huggingface"]["num_weights"] == 2 and report["huggingface"]["weight_bytes"] == 64
    assert report["export"] == {"possible": True, "why": f"mfsdp ckpt export-hf {actor} -o DIR"}
    contents["contents"]["optimizer"] = {"path": "optimizer/dist_ckpt"}
    (actor / "ckpt_contents.json").write_text(json.dumps(contents))
    (problem,) = inspect(actor)["problems"]
    assert problem["key"].endswith("optimizer/dist_ckpt") and "places optimizer there" in problem["why"]
    (actor / "ckpt_contents.json").unlink()
    report = inspect(actor)
    assert report["layout"] == "verl" and report["exit_code"] == BAD_INPUT
    assert "last, so this save was interrupted" in report["problems"][0]["why"]


@pytest.mark.parametrize("key, value", [("global_step", "40"), ("world_size", [8]), ("arch", {"a": 1}), ("save_contents", "model"),
                                        ("save_contents", [1]), ("contents", {"model": "model"}), ("contents", None)])
def test_verl_contents_of_other_types_are_an_error(written, tmp_path, key, value):
    actor = tmp_path / "actor"
    shutil.copytree(written, actor / "model" / "dist_ckpt")
    good = {"arch": "A", "global_step": 40, "world_size": 8, "save_contents": ["model"], "contents": {"model": {"path": "model/dist_ckpt"}}}
    for contents, code in ((good, OK), (good | {key: value}, BAD_INPUT)):
        (actor / "ckpt_contents.json").write_text(json.dumps(contents))
        report = inspect(actor)
        assert report["exit_code"] == code and render(report)


def test_tensors_are_chosen_by_a_part_of_the_name_or_a_pattern(written):
    def chosen(pattern):
        report = inspect(written, tensors=pattern)
        return len(report["tensors"]), [p["level"] for p in report["problems"]]

    assert [chosen(p) for p in ("", "*", "exp_avg", "*.exp_avg", "word_embeddings", "exp*")] == [
        (11, []), (11, []), (6, []), (3, []), (3, []), (0, ["warning"])]
    report = inspect(written, tensors="exp*")
    assert report["exit_code"] == OK and report["num_tensors"] == 11, "the sums are of all"


def test_the_validation_at_the_save_is_told_and_no_text_moves_the_cursor(written, tmp_path):
    folder = mfsdp_step(tmp_path, written, 1)
    record = json.loads((folder / "manifest.json").read_text())
    more = {"metrics": {"val_reward": 0.51239, "val_pass_rate": None}, "architecture": "\x1b[2JA"}
    (folder / "manifest.json").write_text(json.dumps(record | more))
    text = render(inspect(folder))
    assert "  validation   val_reward 0.5124, val_pass_rate not finite" in text.splitlines() and "\x1b" not in text and "\ufffd[2JA" in text


def test_verl_old_layout_and_the_choice_among_steps_and_roles(written, tmp_path):
    for step in (10, 20):
        for role in ("actor", "critic"):
            shutil.copytree(written, tmp_path / f"global_step_{step}" / role / "dist_ckpt")
            hf_folder(tmp_path / f"global_step_{step}" / role / "huggingface")
    report = inspect(tmp_path / "global_step_20" / "critic")
    assert (report["layout"], report["step"], report["exit_code"], report["huggingface"]["num_weights"]) == ("verl-old", 20, OK, 0)
    assert report["export"] == {"possible": True, "why": f"mfsdp ckpt export-hf {report['path']} -o DIR --source MODEL"}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    report = inspect(tmp_path)
    assert (report["step"], Path(report["path"])) == (10, tmp_path / "global_step_10" / "actor")
    assert [p["level"] for p in report["problems"]] == ["note", "note"] and report["exit_code"] == OK


def test_megatron_bare_and_hugging_face_folders(written, dcp, tmp_path):
    iteration = tmp_path / "mlm" / "iter_0000100"
    shutil.copytree(written, iteration)
    report = inspect(tmp_path / "mlm")
    assert (report["layout"], report["title"], report["step"]) == ("megatron", "Megatron checkpoint (fsdp_dtensor)", 100)
    (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    assert inspect(iteration)["title"] == "Megatron checkpoint (torch_dist)"
    report = inspect(dcp, verify=True)
    assert (report["layout"], report["exit_code"], report["verified"]) == ("dcp", OK, False)
    assert "no checksums" in report["problems"][0]["why"]
    report = inspect(hf_folder(tmp_path / "hf", weights=True))
    assert (report["layout"], report["groups"][0]["num_elements"], report["exit_code"]) == ("huggingface", 28, OK)


def test_hugging_face_weights_that_are_missing_cut_short_or_elsewhere(tmp_path):
    folder = hf_folder(tmp_path / "hf")
    safetensors(folder / "a.safetensors", {"x": ("F32", [2, 3])})
    safetensors(folder / "b.safetensors", {"y": ("BF16", [5])})
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_hf(folder).problems == () and [t.num_bytes for t in read_hf(folder).tensors] == [24, 10]
    os.truncate(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 1)
    weight_map |= {"z": "a.safetensors", "w": "c.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    told = [(Path(p.key).name, p.why.split(":")[0]) for p in read_hf(folder).problems]
    assert told == [("b.safetensors", "cut short"), ("c.safetensors", "model.safetensors.index.json places tensors in it"),
                    ("a.safetensors", "model.safetensors.index.json places z in it, but it is not there")]
    (folder / "b.safetensors").write_bytes(b"\xff" * 20)
    assert "header does not fit" in read_hf(folder).problems[0].why


def test_what_is_no_checkpoint_is_said_with_what_was_found(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(MfsdpError, match="notes.txt: no checkpoint layout is recognised"):
        inspect(tmp_path)
    for absent, why in ((tmp_path / "nowhere", "there is no such folder"), (tmp_path / "notes.txt", "a checkpoint is a folder")):
        with pytest.raises(MfsdpError, match=why):
            inspect(absent)


def test_text_shows_the_sums_in_columns(written, tmp_path):
    text = render(inspect(mfsdp_step(tmp_path, written, 100), tensors=""))
    lines = text.splitlines()
    assert "  step         100 of 400" in lines
    assert "  topology     world 2 dp 2 tp 1 pp 1 cp 1 ep 1 etp 1" in lines
    assert any(line.split() == ["model", "parameters", "4", "3", "52", "112", "B"] for line in lines)
    assert any(line.split() == ["model.module.embedding.word_embeddings.weight", "6×4", "bfloat16", "2", "2", "48", "B"] for line in lines)


def test_inspecting_imports_nothing_heavy_and_changes_nothing(written, tmp_path):
    mfsdp_step(tmp_path, written, 100)

    def state():
        return sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))

    before = state()
    code = ("import sys; from mfsdp_cli.checkpoint.inspect import inspect, render; "
            "render(inspect(sys.argv[1], tensors='', verify=True)); "
            "print([m for m in ('torch', 'numpy', 'rich', 'yaml', 'pyarrow', 'pydantic', 'transformers', 'megatron') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
    assert state() == before
