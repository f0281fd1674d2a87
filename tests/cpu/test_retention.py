"""Retention in a real run: the validation at a save is in the checkpoint, and a resumed run judges by what is on disk."""

from __future__ import annotations

import json

from runs import changed, sft_settings, train_ranks, validation_losses

from mfsdp_cli.checkpoint.finding import complete_steps
from mfsdp_cli.checkpoint.listing import listing
from mfsdp_cli.checkpoint.manifest import require_complete


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
