"""Saves a checkpoint so that a process killed at any moment leaves a complete one behind, if there was one before. No torch.

Order of a save: `begin` -> the ranks write into step_N.tmp -> barrier -> rank 0 `commit`s: flush every file, write the
manifest last, rename, move `latest`. Only then `retention.prune`. Suffixes: `.tmp` is being written or being deleted and never read;
`.old` exists for the moment in which a step that is saved again takes the place of its predecessor, and counts as that step until
then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from mfsdp_cli.checkpoint.manifest import LATEST, OLD, TMP, Manifest, flush, is_complete, step_folder, write_atomically, write_manifest


def begin(checkpoints_dir: str | Path, step: int) -> Path:
    """An empty folder to write step `step` into. Removes first what interrupted saves and deletions left, of any step: one run writes
    here at a time, and it may need the room."""
    checkpoints_dir = Path(checkpoints_dir)
    if not checkpoints_dir.is_dir():
        checkpoints_dir.mkdir(parents=True)
        flush(checkpoints_dir.parent)
    for remains in checkpoints_dir.glob(f"step_*{TMP}"):
        shutil.rmtree(remains)
    _settle_old(checkpoints_dir / step_folder(step))
    tmp = checkpoints_dir / (step_folder(step) + TMP)
    tmp.mkdir()
    return tmp


def commit(tmp: str | Path, manifest: Manifest, flushed: Mapping[str, dict] = {}) -> Path:
    """Make the folder that `begin` gave a checkpoint and point `latest` at it. On one rank, after a barrier.
    flushed: as in `write_manifest`.

    An existing folder of that step is replaced: it steps aside as `.old`, which still counts as the step, until the
    new one has its name."""
    tmp = Path(tmp)
    assert tmp.name == step_folder(manifest.step) + TMP, (tmp, manifest.step)
    write_manifest(tmp, manifest, flushed)
    final, old = tmp.with_suffix(""), tmp.with_suffix(OLD)
    if final.exists():
        os.rename(final, old)
    os.rename(tmp, final)
    flush(final.parent)
    write_atomically(final.parent / LATEST, final.name + "\n")
    if old.exists():
        delete(old)
    return final


def _settle_old(final: Path) -> None:
    """Finish or undo a replacement that was interrupted: afterwards there is no `.old`."""
    old = final.with_name(final.name + OLD)
    if not old.exists():
        return
    if is_complete(old) and not is_complete(final):
        if final.exists():
            delete(final)
        os.rename(old, final)
    else:
        delete(old)


def delete(folder: Path) -> None:
    """Rename to `.tmp` first, so that a deletion cut short never leaves half a checkpoint under a good name."""
    grave = folder.with_suffix(TMP)
    if grave != folder:
        if grave.exists():
            shutil.rmtree(grave)
        os.rename(folder, grave)
    shutil.rmtree(grave)
