"""The run folder that a start finds, and leaves."""

import json

import pytest
from cli_for_tests import checked, folder_errors, inputs, save, start_once  # noqa: F401  fixtures

from mfsdp_cli import errors
from mfsdp_cli.launch.start import check


def test_the_run_folder_holds_what_was_asked_for(inputs):
    result = checked(inputs, "optim.lr=3e-4")
    attempt = start_once(result)
    again = check("sft", preset=None, config=str(inputs / "run/config.yaml"), assignments=[], flags={}, resume=None, environ={"PATH": ""})
    assert again.settings == result.settings and attempt.path == inputs / "run/attempts/001"
    assert (attempt.path / "config.yaml").read_text() == (inputs / "run/config.yaml").read_text()
    origins = json.loads((inputs / "run/origin.json").read_text())
    assert origins["optim.lr"] == "command line" and origins["model.path"] == "--model"
    assert start_once(result).path.name == "002"


def test_what_an_unreadable_file_may_have_given_is_not_missing(tmp_path):
    (tmp_path / "run.yaml").write_text("model: [1,\n")
    common = {"assignments": [], "flags": {"output": str(tmp_path / "run")}, "resume": None, "environ": {"PATH": ""}}
    for preset, config in ((None, str(tmp_path / "run.yaml")), (None, "none.yaml"), ("sft-gsm8k", None)):
        found = [p for p in check("sft", preset=preset, config=config, **common).problems if p.level == "error"]
        assert len(found) == 1 and found[0].key in ("--preset", "--config", config)
    missing = {p.rule for p in check("sft", preset=None, config=None, **common).problems if p.level == "error"}
    assert missing == {"model-given", "train-files-given"}


def test_a_used_folder_is_continued_or_refused_but_never_mixed(inputs):
    start_once(checked(inputs))
    assert not folder_errors(checked(inputs, resume="never"))
    save(inputs / "run", 3)
    assert not folder_errors(checked(inputs)) and not folder_errors(checked(inputs, "optim.lr=1", "trainer.total_epochs=9"))
    refused = folder_errors(checked(inputs, resume="never"))["trainer.resume_mode"]
    assert refused.where == "--resume" and "holds checkpoints up to step 3" in refused.why
    with pytest.raises(errors.MfsdpError):
        start_once(checked(inputs, resume="never"))
    changed = folder_errors(checked(inputs, "trainer.seed=7", "data.train_batch_size=16", "data.max_length=512"))
    assert set(changed) == {"trainer.seed", "data.train_batch_size", "data.max_length"}
    assert changed["trainer.seed"].found == "7" and "made with 42" in changed["trainer.seed"].why
    assert changed["data.max_length"].fix.startswith("set data.max_length back to null")


def test_damaged_checkpoints_are_not_overwritten_from_step_0(inputs):
    start_once(checked(inputs))
    (save(inputs / "run", 3) / "trainer.json").unlink()
    problem, = folder_errors(checked(inputs)).values()
    assert problem.code == errors.BAD_INPUT and problem.found == "step_000003" and "ckpt inspect" in problem.fix


def test_resume_from_a_path_is_checked_before_the_start(inputs):
    saved = save(inputs / "other", 3)
    assert not folder_errors(checked(inputs, resume=str(saved)))
    (saved / "trainer.json").unlink()
    problem, = folder_errors(checked(inputs, resume=str(saved))).values()
    assert problem.code == errors.BAD_INPUT and problem.where == "--resume" and "trainer.json" in problem.key
    problem, = folder_errors(checked(inputs, resume="yes")).values()
    assert problem.found == "yes" and problem.fix == "auto, never, or the folder of a run or checkpoint"
