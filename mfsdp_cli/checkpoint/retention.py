"""Which checkpoints a run keeps, decided from what is on disk alone: nothing is remembered. No torch."""

from __future__ import annotations

from pathlib import Path

from mfsdp_cli.checkpoint.finding import complete_steps, pointed_step, step_folders
from mfsdp_cli.checkpoint.manifest import OLD, TMP
from mfsdp_cli.checkpoint.saving import delete


def prune(checkpoints_dir: str | Path, keep: int | None) -> list[Path]:
    """Delete all but the `keep` newest complete checkpoints (None: keep all), and the remains of interrupted saves.

    Reads the folder, remembers nothing. Never deletes the newest complete checkpoint, the one `latest` names, a folder
    without a readable manifest, or remains newer than the newest complete checkpoint. Returns what was deleted."""
    assert keep is None or keep >= 1, keep
    checkpoints_dir = Path(checkpoints_dir)
    complete = complete_steps(checkpoints_dir)
    if not complete:
        return []
    newest = max(complete)
    doomed = []
    for folder, step, suffix in step_folders(checkpoints_dir):
        replaced = suffix == OLD and complete.get(step) not in (None, folder)
        if replaced or (suffix == TMP and step < newest):
            doomed.append(folder)
    if keep is not None:
        spared = {newest} | ({pointed_step(checkpoints_dir)} & complete.keys())
        others = sorted(complete.keys() - spared)
        doomed += [complete[step] for step in others[: max(0, len(complete) - max(keep, len(spared)))]]
    for folder in doomed:
        delete(folder)
    return doomed
