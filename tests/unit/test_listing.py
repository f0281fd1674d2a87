"""`mfsdp ckpt list`, on folders in every state that a save, a deletion or a crash leaves them in."""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from inputs_for_tests import write_checkpoint

from mfsdp_cli.checkpoint import saving
from mfsdp_cli.checkpoint.listing import listing, one, render
from mfsdp_cli.checkpoint.words import age_words, columns, size_words
from mfsdp_cli.errors import BAD_INPUT, MfsdpError


def write(run: Path, step: int, **metrics) -> Path:
    return write_checkpoint(run, step, metrics=metrics, best_metric="val_loss")


def test_a_run_in_every_state(tmp_path):
    """2 is best, 3 has no validation, 4 lost a file, 5 was interrupted, 6 is complete but NaN, 1 was being replaced."""
    for step, loss in ((1, 0.9), (2, 0.25), (3, None), (4, 0.1), (6, 0.3)):
        write(tmp_path, step, **({} if loss is None else {"val_loss": loss if step != 6 else None}))
    folder = tmp_path / "checkpoints"
    (folder / "step_000004" / "trainer.json").unlink()
    shutil.copytree(folder / "step_000001", folder / "step_000001.old")
    (folder / "step_000005.tmp").mkdir()
    (folder / "step_000005.tmp" / "x").write_bytes(bytes(7))
    for given in (tmp_path, folder):
        data = listing(given)
        found = {row["name"]: row for row in data["checkpoints"]}
        assert {name.removeprefix("step_00000"): row["state"] for name, row in found.items()} == {
            "1": "complete", "1.old": "remains", "2": "complete", "3": "complete", "4": "incomplete", "5.tmp": "remains", "6": "complete"}
        assert (data["latest"], data["best"]) == (str(folder / "step_000006"), str(folder / "step_000002"))
        assert [name for name, row in found.items() if row["latest"]] == ["step_000006"]
        assert [name for name, row in found.items() if row["best"]] == ["step_000002"]
    assert found["step_000004"]["why"] == "trainer.json missing: manifest.json lists it with 2 bytes"
    assert found["step_000005.tmp"]["why"] == "a save or a deletion that was interrupted, or is still going on"
    assert (found["step_000005.tmp"]["bytes"], found["step_000005.tmp"]["metrics"]) == (7, {})
    assert found["step_000002"]["bytes"] == sum(p.stat().st_size for p in (folder / "step_000002").rglob("*") if p.is_file())
    json.dumps(data, allow_nan=False)
    lines = render(data).splitlines()
    assert lines[0].split() == ["checkpoint", "state", "size", "age", "contents", "topology", "val_loss"] and len(lines) == 8
    assert lines[3].split()[-2:] == ["0.25", "best"] and lines[7].split()[-3:] == ["not", "finite", "latest"]
    assert lines[4].split()[-2:] == ["tp1", "-"], "step 3 was not validated"


def test_what_stands_in_during_a_replacement_counts_as_the_step(tmp_path):
    final = write(tmp_path, 3, val_loss=1.0)
    os.rename(final, final.with_suffix(".old"))
    data = listing(tmp_path)
    assert [(row["name"], row["state"], row["latest"]) for row in data["checkpoints"]] == [("step_000003.old", "complete", True)]


def test_the_best_by_another_metric_and_of_equals_the_earliest(tmp_path):
    for step, rate in ((1, 0.5), (2, 0.75), (3, 0.75)):
        write(tmp_path, step, val_loss=float(step), val_pass_rate=rate)
    assert one(listing(tmp_path), "best").endswith("step_000001")
    assert one(listing(tmp_path, "val_pass_rate"), "best").endswith("step_000002")
    assert one(listing(tmp_path), "latest").endswith("step_000003")
    with pytest.raises(MfsdpError, match="no complete checkpoint has a value of val_reward"):
        one(listing(tmp_path, "val_reward"), "best")


def test_checkpoints_from_before_metrics_were_recorded_are_listed(tmp_path):
    folder = write(tmp_path, 1, val_loss=1.0)
    record = json.loads((folder / "manifest.json").read_text())
    del record["metrics"], record["best_metric"]
    (folder / "manifest.json").write_text(json.dumps(record))
    data = listing(tmp_path)
    assert (data["best"], data["best_metric"], data["checkpoints"][0]["state"]) == (None, None, "complete")
    assert "val_loss" not in render(data)


def test_verl_steps_by_role(tmp_path):
    for step, whole in ((10, True), (20, False)):
        for role in ("actor", "critic"):
            dcp = tmp_path / f"global_step_{step}" / role / "model" / "dist_ckpt"
            dcp.mkdir(parents=True)
            (dcp / ".metadata").write_bytes(b"x")
            record = {"world_size": 8, "save_contents": ["model"], "contents": {"model": {"path": "model/dist_ckpt"}}}
            if whole or role == "critic":
                (dcp.parents[1] / "ckpt_contents.json").write_text(json.dumps(record))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    data = listing(tmp_path)
    assert [(row["name"], row["step"], row["state"]) for row in data["checkpoints"]] == [
        ("global_step_10/actor", 10, "complete"), ("global_step_10/critic", 10, "complete"),
        ("global_step_20/actor", 20, "incomplete"), ("global_step_20/critic", 20, "complete")]
    assert data["latest"] == str(tmp_path / "global_step_10" / "actor") and "written last" not in data["checkpoints"][0]["why"]
    assert "last, so this save was interrupted" in data["checkpoints"][2]["why"]
    assert (data["checkpoints"][0]["contents"], data["checkpoints"][0]["topology"]) == (["model"], {"world": 8})


def test_where_there_is_nothing_to_list(tmp_path):
    saving.begin(tmp_path / "run" / "checkpoints", 1).rmdir()
    for path, why in ((tmp_path / "run", "no step folders here"), (tmp_path / "nowhere", "there is no such folder")):
        with pytest.raises(MfsdpError, match=why) as caught:
            listing(path)
        assert caught.value.exit_code == BAD_INPUT


def test_text_of_a_stranger_does_not_reach_the_terminal(tmp_path):
    folder = write(tmp_path, 1)
    record = json.loads((folder / "manifest.json").read_text()) | {"contents": ["\x1b[2J"], "created": "\x1b]0;x\x07"}
    (folder / "manifest.json").write_text(json.dumps(record))
    assert "\x1b" not in render(listing(tmp_path)) and "\ufffd[2J" in render(listing(tmp_path))


def test_ages_and_columns():
    now = datetime(2026, 1, 10, tzinfo=timezone.utc)
    told = [age_words((now - timedelta(seconds=s)).isoformat(), now) for s in (-5, 0, 59, 60, 3599, 3600, 86399, 86400, 40 * 86400)]
    assert told == ["0 s", "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 d", "40 d"]
    assert age_words("soon", now) == age_words("2026-01-01", now) == "-", "no time, and one without a zone"
    assert columns([("a", "b", "n"), ("long", "", "100")], numbers=1) == ["a     b    n", "long     100"]


@pytest.mark.parametrize("num_bytes, words", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"),
                                              (5000 * 2**40, "5000.0 TiB")])
def test_sizes_in_words(num_bytes, words):
    assert size_words(num_bytes) == words
