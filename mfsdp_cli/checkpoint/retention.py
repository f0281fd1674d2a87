"""Which checkpoints a run keeps, decided from what is on disk alone: nothing is remembered. No torch.

The newest N stay, those of every K steps, and the best by a metric, whose value at the save is in the manifest. A save at a step without
validation has no value, and is never among the best; nor is one that was not a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from mfsdp_cli.checkpoint.finding import complete_steps, pointed_step, step_folders
from mfsdp_cli.checkpoint.manifest import OLD, TMP, require_complete
from mfsdp_cli.checkpoint.saving import delete

BETTER = {"val_loss": "lower", "val_reward": "higher", "val_pass_rate": "higher"}


def prune(checkpoints_dir: str | Path, keep: int | None, every: int | None = None, best: int = 0, metric: str = "") -> list[Path]:
    """Delete complete checkpoints that none of these keeps, and the remains of interrupted saves; returns what was deleted.

    keep    newest checkpoints; None: all
    every   steps divisible by it; None: none
    best    best checkpoints by `metric`, a key of BETTER

    Never deletes the newest complete checkpoint, the one `latest` names, a folder without a readable manifest, or remains newer
    than the newest complete checkpoint."""
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
        beyond = others[: max(0, len(complete) - max(keep, len(spared)))]
        held = {step for step in beyond if every and step % every == 0}
        if best and beyond:
            held |= set(ranked({step: require_complete(folder).metrics for step, folder in complete.items()}, metric)[:best])
        doomed += [complete[step] for step in beyond if step not in held]
    for folder in doomed:
        delete(folder)
    return doomed


def ranked(metrics: Mapping[int, Mapping[str, float | None]], metric: str) -> list[int]:
    """Steps that have a value, the best first; of equals the earlier one."""
    sign = 1 if BETTER[metric] == "lower" else -1
    values = {step: entry[metric] for step, entry in metrics.items() if entry.get(metric) is not None}
    return sorted(values, key=lambda step: (sign * values[step], step))


def recorded(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """What the manifest keeps of a validation: None for what is not a number."""
    return {name: value if math.isfinite(value) else None for name in BETTER if (value := metrics.get(name)) is not None}
