"""`mfsdp ckpt diff`, on checkpoints that torch.distributed.checkpoint wrote from two ranks and from one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from dcp_for_tests import EMBEDDING, FC1, NORM, written_by_torch
from inputs_for_tests import write_checkpoint, write_model
from test_inspect import mfsdp_step, safetensors

from mfsdp_cli.checkpoint.diff import MOST_SHOWN, diff, render
from mfsdp_cli.config.load import dump_yaml, load
from mfsdp_cli.errors import BAD_INPUT, MISMATCH, OK, MfsdpError
from mfsdp_cli.launch.diff import compare

STEP = "optimizer.param_groups.0.step"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return written_by_torch(tmp_path_factory)


def test_other_shards_of_the_same_tensors_are_equal(root):
    data = diff(root / "dcp", root / "same")
    assert data["equal"] and (data["only_a"], data["only_b"], data["shapes"], data["dtypes"], data["facts"]) == ([], [], [], [], [])
    assert data["num_tensors"] == {"a": 11, "b": 11, "both": 11} and len(data["pairs"]) == 11
    assert render(data).splitlines()[-1] == "equal: names, shapes and dtypes (values were not compared: --values does)"


def test_names_shapes_and_dtypes_that_differ(root):
    data = diff(root / "dcp", root / "other")
    assert not data["equal"]
    assert (data["only_a"], data["only_b"]) == ([f"model.{FC1}_v"], ["model.module.decoder.new.weight"])
    assert data["shapes"] == [{"name": f"model.{NORM}", "a": [4], "b": [5]}]
    assert data["dtypes"] == [{"name": f"model.{FC1}_w", "a": "bfloat16", "b": "float32"}]
    assert f"model.{NORM}" not in data["pairs"] and f"model.{FC1}_w" in data["pairs"]
    lines = render(data).splitlines()
    assert lines[-1] == "different: 2 in one only, 1 of another shape, 1 of another dtype"
    assert [line for line in lines if line.split() == [f"model.{NORM}", "4", "5"]]


def test_values_are_compared_by_a_child(root):
    code, data = compare(str(root / "dcp"), str(root / "other"), "", True, quiet=True)
    rows = {row["name"]: row for row in data["values"]}
    assert code == data["exit_code"] == MISMATCH and len(rows) == 9
    assert rows[f"model.{EMBEDDING}"] == {"name": f"model.{EMBEDDING}", "num_elements": 24, "num_equal": 23, "max_abs_difference": 0.5}
    assert (rows[f"model.{FC1}_w"]["num_equal"], rows[f"model.{FC1}_w"]["max_abs_difference"]) == (12, 0.0), "the same in either dtype"
    assert rows[STEP]["num_equal"] == 0 and rows[STEP]["max_abs_difference"] != rows[STEP]["max_abs_difference"], "7 and NaN"
    lines = render(data).splitlines()
    where = lines.index("of other values: 2")
    assert lines[where + 1].split()[0] == STEP and lines[where + 2].split()[-4:] == ["at", "most", "0.5", "apart"]
    assert lines[-1].endswith("1 of another dtype, 2 of other values")


def test_equal_values_from_other_shards(root):
    code, data = compare(str(root / "dcp"), str(root / "same"), "", True, quiet=True)
    assert code == OK and data["equal"] and all(row["num_equal"] == row["num_elements"] for row in data["values"])
    assert render(data).splitlines()[-1] == "equal: names, shapes and dtypes; all values of 11 tensors"


def test_a_shard_that_cannot_be_read_is_named(root, tmp_path, capfd):
    shutil.copytree(root / "dcp", tmp_path / "damaged")
    shard = tmp_path / "damaged" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    code, data = compare(str(tmp_path / "damaged"), str(root / "dcp"), "exp_avg", True, quiet=True)
    assert code == data["exit_code"] == BAD_INPUT and "its values cannot be read" in capfd.readouterr().err
    assert data["values"] is None and str(tmp_path / "damaged") in data["problems"][0]["key"]


def test_only_the_tensors_asked_for(root):
    data = diff(root / "dcp", root / "other", "*.exp_avg")
    assert data["equal"] and data["num_tensors"] == {"a": 3, "b": 3, "both": 3}
    for pattern in ("nothing", "*nothing*"):
        with pytest.raises(MfsdpError, match="none of the 11 names matches") as caught:
            diff(root / "dcp", root / "other", pattern)
        assert caught.value.exit_code == BAD_INPUT


def test_records_and_settings_are_told_and_do_not_count(root, tmp_path):
    for name, step, lr in (("a", 100, "1e-5"), ("b", 200, "2e-5")):
        mfsdp_step(tmp_path / name, root / "dcp", step)
        settings = load("sft", assignments=[f"optim.lr={lr}", "model.path=m"], environ={}).settings
        (tmp_path / name / "config.yaml").write_text(dump_yaml(settings))
    code, data = compare(str(tmp_path / "a"), str(tmp_path / "b"), "", False)
    assert code == OK and {row["name"]: (row["a"], row["b"]) for row in data["facts"]} == {
        "step": (100, 200), "samples_consumed": (800, 1600), "settings.optim.lr": (1e-5, 2e-5)}
    json.dumps(data, allow_nan=False)
    assert any(line.split() == ["step", "100", "200"] for line in render(data).splitlines())


def test_wrappers_names_between_layouts_and_hugging_face_folders(root, tmp_path):
    mfsdp_step(tmp_path, root / "dcp", 1)
    data = diff(tmp_path, root / "same")
    assert data["equal"] and data["pairs"][f"model.{EMBEDDING.removeprefix('module.')}"] == [f"model.{EMBEDDING}"] * 2
    for name, shape in (("x", [6, 4]), ("y", [5, 4])):
        write_model(tmp_path / name)
        safetensors(tmp_path / name / "model.safetensors", {"embed": ("F32", shape), "norm": ("BF16", [4])})
    code, data = compare(str(tmp_path / "x"), str(tmp_path / "y"), "", True, quiet=True)
    assert code == MISMATCH and data["shapes"] == [{"name": "embed", "a": [6, 4], "b": [5, 4]}]
    assert data["values"] == [{"name": "norm", "num_elements": 4, "num_equal": 4, "max_abs_difference": 0.0}]


def test_a_checkpoint_that_is_not_whole_is_not_compared(root, tmp_path):
    folder = mfsdp_step(tmp_path, root / "dcp", 1)
    (folder / "dist_ckpt" / "__0_0.distcp").unlink()
    with pytest.raises(MfsdpError, match="missing") as caught:
        diff(folder, root / "dcp")
    assert caught.value.exit_code == BAD_INPUT
    with pytest.raises(MfsdpError, match="damaged"):
        diff(write_checkpoint(tmp_path / "other", 1), root / "dcp")


def test_a_long_list_is_cut_and_counted(root, tmp_path):
    data = diff(root / "dcp", root / "same") | {"only_a": [f"t{i}" for i in range(MOST_SHOWN + 5)], "equal": False}
    lines = render(data).splitlines()
    assert f"only in A: {MOST_SHOWN + 5}" in lines and "  … and 5 more (--json has all)" in lines
