"""Where an export is written: beside its target, in a folder of its own, and renamed when it is whole. No torch.

    OUT.tmp/lock      held while an export runs; a killed one lets go of it
    OUT.tmp/log       what the libraries say
    OUT.tmp/model/    the folder being written
    OUT.tmp/old/      the folder that it replaces, for the moment between two renames

Whenever a process is killed, OUT is what it was, or the new export, or (between the renames) absent; the next export puts
the old folder back and clears the rest away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, MfsdpError, Problem

CHAT_TEMPLATES = "additional_chat_templates"  # the one folder that transformers puts beside a tokenizer
LOCK, LOG, MODEL, OLD = "lock", "log", "model", "old"


@dataclass(frozen=True)
class Target:
    """out: the folder to be; work: what is written meanwhile."""

    out: Path
    work: Path

    @property
    def model(self) -> Path:
        return self.work / MODEL

    @property
    def log(self) -> Path:
        return self.work / LOG

    def publish(self) -> None:
        """Give the written folder its name. Everything in it must be flushed."""
        if self.out.exists():
            self.out.rename(self.work / OLD)
        self.model.rename(self.out)
        _flush(self.out.parent)

    def keep_log(self) -> Path:
        """Move the log out of the folder that is about to go."""
        kept = self.out.with_name(self.out.name + ".export.log")
        os.replace(self.log, kept)
        return kept


def place(out: str | Path) -> Target:
    out = Path(os.path.realpath(os.path.expanduser(out)))
    return Target(out, out.with_name(out.name + ".tmp"))


def refusals(out: str | Path, checkpoint: Path, overwrite: bool) -> list[Problem]:
    """Why nothing may be written to `out`. A folder with data of another kind is never replaced, whatever is said."""
    target = place(out)
    folder, problems = target.out, []

    def no(why: str, fix: str, code: int = BAD_INPUT) -> None:
        problems.append(Problem("--out", str(out), why, fix, "command line", code))

    root = checkpoint.resolve()
    if folder == root or folder in root.parents or root in folder.parents:
        no(f"it and the checkpoint {checkpoint} lie in each other", "name a folder elsewhere")
    elif folder.exists() and not folder.is_dir():
        no("is a file", "name a folder")
    elif folder.is_dir() and os.path.ismount(folder):
        no("is a mount point, which cannot be replaced in one step", f"name a folder in it: {Path(out) / 'model'}")
    elif folder.is_dir() and any(folder.iterdir()):
        if foreign := _foreign(folder):
            no(f"the folder is not empty, and {foreign}: no export is written over it", "name another folder")
        elif not overwrite:
            no("the folder is not empty", "name another, or add --overwrite")
    if target.work.exists() and not _is_ours(target.work):
        no(f"{target.work} is where it would be written, and that is not the remains of an export", "name another folder")
    parent = folder.parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        no(f"{parent} cannot be written to", "name a folder on which you may write", MACHINE_UNFIT)
    return problems


@contextlib.contextmanager
def claimed(out: str | Path, checkpoint: Path) -> Iterator[Target]:
    """The target for this process alone; what is left in its work folder is deleted on the way out.

    Raises MfsdpError when `out` must not be replaced or another export writes there."""
    if problems := refusals(out, checkpoint, overwrite=True):
        raise MfsdpError(problems)
    target = place(out)
    lock = _lock(target)
    try:
        _recover(target)
        yield target
    finally:
        shutil.rmtree(target.work, ignore_errors=True)
        os.close(lock)


def _lock(target: Target) -> int:
    while True:
        target.work.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(target.work / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        except FileNotFoundError:  # an export that ends has just deleted the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise MfsdpError(Problem("--out", str(target.out), "another export is writing there", "wait for it, or name another folder",
                                     "command line", BAD_INPUT)) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(target.work / LOCK)):
                return lock
        os.close(lock)


def _recover(target: Target) -> None:
    """Undo what a killed export has left."""
    old = target.work / OLD
    if old.exists() and not target.out.exists():
        old.rename(target.out)
    for remains in (target.model, old):
        if remains.exists():
            shutil.rmtree(remains)


def _foreign(folder: Path) -> str:
    """What in a folder no export writes; "" when it is a Hugging Face folder like ours."""
    entries = sorted(folder.iterdir())
    if other := [p.name for p in entries if (p.is_symlink() or not p.is_file()) and p.name != CHAT_TEMPLATES]:
        return f"it has {other[0]}/ in it" if (folder / other[0]).is_dir() else f"{other[0]} is no plain file"
    try:
        config = json.loads((folder / "config.json").read_text())
        return "" if isinstance(config, dict) and ("model_type" in config or "architectures" in config) else "its config.json is no model's"
    except (OSError, ValueError, RecursionError):
        return "it has no config.json of a model"


def _is_ours(work: Path) -> bool:
    """A work folder, or one that was made a moment before its lock."""
    names = {p.name for p in work.iterdir()} if work.is_dir() and not work.is_symlink() else {"a file"}
    return not names or (LOCK in names and names <= {LOCK, LOG, MODEL, OLD})


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
