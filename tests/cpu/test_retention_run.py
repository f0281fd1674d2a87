"""Retention in a real run: the validation at a save is in the checkpoint, and a resumed run judges by what is on disk."""

from __future__ import annotations

import json

from direct import by_letters, run_loop, settings_for
from runs import changed, sft_settings, train_ranks, validation_losses

from mfsdp_cli.checkpoint.finding import complete_steps
from mfsdp_cli.checkpoint.listing import listing
from mfsdp_cli.checkpoint.manifest import require_complete
from mfsdp_cli.train.metrics import read_metrics


def test_the_best_on_disk_outlives_a_resume(tiny, tmp_path):
    """Stopped at step 3, whose save is not validated; 1 and 2 are, and the loss falls. Then 2 is given a value that no step can beat."""
    kept = {"save_freq": 1, "test_freq": 1, "max_ckpt_to_keep": 1, "keep_best": 1}
    settings = changed(sft_settings(tiny, tmp_path / "data", steps=5), trainer=kept)
    run_dir, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    train_ranks(settings, run_dir, stop_after=3)
    losses = validation_losses(run_dir)
    assert losses[2] < losses[1] and sorted(complete_steps(checkpoints)) == [2, 3]
    best, stopped = (require_complete(folder) for _, folder in sorted(complete_steps(checkpoints).items()))
    assert (best.metrics, best.best_metric, stopped.metrics) == ({"val_loss": losses[2]}, "val_loss", {})
    record = checkpoints / "step_000002" / "manifest.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"metrics": {"val_loss": 0.0}}))
    train_ranks(settings, run_dir, attempt="002")
    data = listing(run_dir)
    assert [(row["step"], row["latest"], row["best"]) for row in data["checkpoints"]] == [(2, False, True), (5, True, False)]
    assert data["checkpoints"][1]["metrics"] == {"val_loss": validation_losses(run_dir)[5]}


def test_grpo_keeps_the_best_of_its_metric(tiny, prompts, tmp_path):
    kept = {"save_freq": 1, "test_freq": 1, "max_ckpt_to_keep": 1, "keep_best": 1, "best_metric": "val_pass_rate"}
    run_loop(settings_for(tiny, prompts, tmp_path, **{f"trainer__{name}": value for name, value in kept.items()}), tmp_path, by_letters)
    found = {r["step"]: r for r in read_metrics(tmp_path) if "val_pass_rate" in r and r["step"] > 0}
    best = min(found, key=lambda step: (-found[step]["val_pass_rate"], step))
    left = {step: require_complete(folder) for step, folder in complete_steps(tmp_path / "checkpoints").items()}
    assert sorted(found) == [1, 2, 3] and set(left) == {best, 3}
    assert left[best].metrics == {name: found[best][name] for name in ("val_reward", "val_pass_rate")}
