"""A model that is a checkpoint of ours: found, judged and told before a launch, and never another step than the one that was judged."""

from dataclasses import replace
from pathlib import Path

import pytest
from facts_for_tests import make_facts, make_settings, only, problems
from grpo_for_tests import grpo_settings
from inputs_for_tests import write_checkpoint, write_model

from mfsdp_cli.checkpoint.reuse import ModelSource, model_checkpoint
from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID, MfsdpError
from mfsdp_cli.launch.facts import gather
from mfsdp_cli.launch.folder import folder_problems


def facts_of(path, **settings):
    settings = make_settings(model__path=str(path), data__train_files=[], data__val_files=[], **settings)
    return gather(settings, {"PATH": ""}, Path("runs/none"))


def test_a_step_a_checkpoints_folder_and_a_run_are_found(tmp_path, monkeypatch):
    run = tmp_path / "run"
    older, step = write_checkpoint(run, 3, rows=512), write_checkpoint(run, 12, rows=640)
    (run / "config.yaml").write_text("")
    for path, found in ((older, older), (step, step), (run / "checkpoints", step), (run, step)):
        source = model_checkpoint(path)
        assert source == ModelSource(found / "huggingface", found, 512 if found == older else 640), path
        facts = facts_of(path)
        assert (facts.model_error, facts.model_path, facts.model_source) == ("", str(found / "huggingface"), source)
        assert facts.has_tokenizer and facts.model_config["hidden_size"] == 64
        assert facts.model_weight_files == ("dist_ckpt/__0_0.distcp", "dist_ckpt/__1_0.distcp")
    assert source.tensors() == {"model.norm.weight": {"shape": [4], "dtype": "float32"}}
    assert source.tensor_shapes() == {"model.norm.weight": (4,)}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_checkpoint("~/run").checkpoint == step


def test_what_is_no_checkpoint_is_left_to_others(tmp_path):
    model = write_model(tmp_path / "step_000003")  # an export may have any name
    assert model_checkpoint(model) is None and facts_of(model).model_source is None
    assert ModelSource(model).tensors() == {"model.norm.weight": {"shape": [4], "dtype": "float32"}}
    (tmp_path / "empty").mkdir()
    assert all(model_checkpoint(path) is None for path in (tmp_path / "empty", "Qwen/Qwen2.5-0.5B", tmp_path / "none"))
    assert "has no config.json" in facts_of(tmp_path / "empty").model_error


def test_a_part_of_a_checkpoint_is_told_with_the_whole(tmp_path):
    step = write_checkpoint(tmp_path / "run", 3)
    for part, holds in (("huggingface", "configuration and tokenizer alone"), ("dist_ckpt", "weights alone")):
        facts = facts_of(step / part)
        assert holds in facts.model_error and facts.model_fix == f"give the checkpoint itself: {step}" and facts.model_path is None


def test_a_checkpoint_that_cannot_be_started_from_is_told(tmp_path):
    step = write_checkpoint(tmp_path / "a", 3)
    (step / "dist_ckpt" / "__1_0.distcp").write_bytes(bytes(5))
    (step / "trainer.json").unlink()
    facts = facts_of(step)
    assert "__1_0.distcp: 5 bytes: manifest.json lists it with 8 bytes; and 1 more" in facts.model_error
    assert "another checkpoint" in facts.model_fix
    assert "none of these is a complete checkpoint" in facts_of(tmp_path / "a").model_error
    for name in ("checkpoints", "attempts"):
        (tmp_path / "b" / name).mkdir(parents=True)
        assert "there is no checkpoint here" in facts_of(tmp_path / "b").model_error
    without = write_checkpoint(tmp_path / "c", 4, contents=("extra",))
    facts = facts_of(without)
    assert "holds extra: it was saved without the weights" in facts.model_error and "checkpoint.save_contents" in facts.model_fix
    with pytest.raises(MfsdpError) as caught:
        model_checkpoint(without)
    assert caught.value.exit_code == BAD_INPUT


def test_a_pointer_that_leads_nowhere_is_a_warning(tmp_path):
    step = write_checkpoint(tmp_path / "run", 3)
    (step.parent / "latest").write_text("step_000009\n")
    facts = facts_of(tmp_path / "run")
    assert facts.model_source.checkpoint == step and [p.level for p in facts.model_warnings] == ["warning"]
    assert "step_000003, the newest complete one, is used" in facts.model_warnings[0].why


def test_the_reference_likewise(tmp_path):
    step = write_checkpoint(tmp_path / "run", 3, rows=640)
    model = str(write_model(tmp_path / "m"))
    settings = grpo_settings(model__path=model, data__train_files=[], data__val_files=[], ref__path=str(tmp_path / "run"))
    facts = gather(settings, {"PATH": ""}, tmp_path)
    assert (facts.reference_error, facts.reference_source.checkpoint, facts.reference_source.vocab_rows) == ("", step, 640)
    assert facts.reference_config["hidden_size"] == 64
    settings.ref.path = str(step / "huggingface")
    facts = gather(settings, {"PATH": ""}, tmp_path)
    assert facts.reference_error and facts.reference_fix == f"give the checkpoint itself: {step}"


def test_a_resume_that_the_ranks_would_refuse_is_told_before(tmp_path):
    """By the same function: rows of the embedding that the ranks cannot share, and contents that were not saved."""
    run = tmp_path / "run"
    step = write_checkpoint(run, 3, rows=509, contents=("model",))
    resumed = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(step)}
    other = make_settings(trainer__output_dir=str(tmp_path / "new"), **resumed)
    for settings in (make_settings(trainer__output_dir=str(run)), other):
        found = folder_problems(Path(settings.trainer.output_dir), settings, {"engine.tensor_model_parallel_size": "--tp"})
        assert [(p.key, p.code, p.where) for p in found] == [
            ("checkpoint.load_contents", BAD_INPUT, "default"), ("engine.tensor_model_parallel_size", CONFIG_INVALID, "--tp")]
        assert "509 rows, which 4 ranks cannot share evenly" in found[1].why
        assert found[1].fix == "use the 1 that the checkpoint was made with"
        settings.engine.tensor_model_parallel_size, settings.checkpoint.load_contents = 1, ["model"]
        assert folder_problems(Path(settings.trainer.output_dir), settings, {}) == []


# ---------------------------------------------------------------- rules


def test_what_is_wrong_with_it_is_told_with_its_own_fix(tmp_path):
    step = write_checkpoint(tmp_path / "run", 3)
    (step.parent / "latest").write_text("step_000009\n")
    wrong = facts_of(step / "huggingface")
    problem = only(replace(make_facts(), model_path=None, model_config=None, model_error=wrong.model_error, model_fix=wrong.model_fix))
    assert (problem.key, problem.fix, problem.code) == ("model.path", f"give the checkpoint itself: {step}", BAD_INPUT)
    right = facts_of(tmp_path / "run")
    chosen = {name: getattr(right, name) for name in ("model_source", "model_weight_files", "model_warnings")}
    chosen = replace(make_facts(), **chosen)
    assert problems(chosen, engine__tensor_model_parallel_size=1) == [], "weights that are no safetensors are those of a checkpoint"
    problem = only(chosen, level="warning")
    assert problem.key == "model.path" and "step_000003, the newest complete one, is used" in problem.why


def test_tp_divides_the_rows_that_a_checkpoint_fixes():
    """Qwen2.5-Math-7B on 8 ranks may have TP 1, 2 or 4; of a folder's 152,066 rows TP 4 would be padded, those of a checkpoint stay."""
    source = ModelSource(Path("c/huggingface"), Path("c"), 152066)
    problem = only(replace(make_facts(), model_source=source))
    assert (problem.key, problem.found, problem.code) == ("engine.tensor_model_parallel_size", "4", CONFIG_INVALID)
    assert "model.path is a checkpoint with 152066 rows" in problem.why
    assert problem.fix == "TP values that work: 1, 2; or give its export: mfsdp ckpt export-hf c -o DIR"
    assert problems(replace(make_facts(), model_source=source), engine__tensor_model_parallel_size=2) == []
    assert "ref.path is a checkpoint" in only(replace(make_facts(), reference_source=source)).why
