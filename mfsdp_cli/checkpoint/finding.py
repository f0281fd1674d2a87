"""Finds checkpoints on disk: step folders by name, the one that `latest` names, the one that a path means. Only reads; no torch."""

from __future__ import annotations

import re
from pathlib import Path

from mfsdp_cli.checkpoint.manifest import CHECKPOINTS, DIST_CKPT, HUGGINGFACE, LATEST, MANIFEST, OLD, TMP, is_complete, step_folder
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

_FOLDER = re.compile(r"step_(\d{6,})(\.tmp|\.old)?")


def resolve(path: str | Path, problems: list[Problem] | None = None) -> Path:
    """The step folder meant by a run folder, a checkpoints folder, a step folder or a folder inside one.

    Raises MfsdpError when there is none. Warnings about the choice are appended to `problems`."""
    path = existing_folder(path)
    for folder in (path, path.parent) if path.name in (DIST_CKPT, HUGGINGFACE) else (path,):
        if is_step_folder(folder):
            return folder
    checkpoints_dir = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    found = latest_complete(checkpoints_dir, problems)
    if found is not None:
        return found
    names = ", ".join(folder.name for folder, _, _ in step_folders(checkpoints_dir))
    if names:
        raise _bad(checkpoints_dir, names, "none of these is a complete checkpoint", "give one of them to see what it lacks")
    raise _bad(path, "", f"there is no checkpoint here: neither {MANIFEST} nor step_N folders", "give a run or checkpoint folder")


def existing_folder(path: str | Path) -> Path:
    """`path`, with a name even when it is ".". Raises MfsdpError (BAD_INPUT) when it is no folder."""
    path = Path(path) if Path(path).name else Path(path).absolute()
    if not path.exists():
        raise _bad(path, "missing", "there is no such folder", "give a run or checkpoint folder")
    if not path.is_dir():
        raise _bad(path, "a file", "a checkpoint is a folder", "give a run or checkpoint folder")
    return path


def is_step_folder(folder: Path) -> bool:
    """By its manifest or its name; says nothing about completeness."""
    return (folder / MANIFEST).is_file() or bool(_FOLDER.fullmatch(folder.name))


def latest_complete(checkpoints_dir: str | Path, problems: list[Problem] | None = None) -> Path | None:
    """The checkpoint that `latest` names if it is complete, else the newest complete one, else None.

    A choice other than the one `latest` names is told as a warning appended to `problems`."""
    checkpoints_dir = Path(checkpoints_dir)
    pointed = pointed_step(checkpoints_dir)
    if pointed is not None:
        for suffix in ("", OLD):
            if is_complete(folder := checkpoints_dir / (step_folder(pointed) + suffix)):
                return folder
    complete = complete_steps(checkpoints_dir)
    if not complete:
        return None
    newest = complete[max(complete)]
    if problems is not None:
        pointer = checkpoints_dir / LATEST
        found = pointer.read_text(errors="replace").strip() if pointer.is_file() else "missing"
        problems.append(Problem(str(pointer), found, f"it names no complete checkpoint; {newest.name}, the newest complete one, is used",
                                "nothing, if that is the one you want; else give the step folder", code=BAD_INPUT, level="warning"))
    return newest


def complete_steps(checkpoints_dir: str | Path) -> dict[int, Path]:
    """Step -> folder of every complete checkpoint."""
    found: dict[int, Path] = {}
    for folder, step, suffix in step_folders(Path(checkpoints_dir)):
        if suffix != TMP and (suffix == "" or step not in found) and is_complete(folder):
            found[step] = folder
    return found


def step_folders(checkpoints_dir: Path) -> list[tuple[Path, int, str]]:
    """(folder, step, suffix) of everything named like a checkpoint; of one step the plain name comes first."""
    if not checkpoints_dir.is_dir():
        return []
    matches = [(p, _FOLDER.fullmatch(p.name)) for p in checkpoints_dir.iterdir()]
    return sorted(((p, int(m[1]), m[2] or "") for p, m in matches if m and p.is_dir()), key=lambda entry: entry[1:])


def pointed_step(checkpoints_dir: Path) -> int | None:
    pointer = checkpoints_dir / LATEST
    match = _FOLDER.fullmatch(pointer.read_text(errors="replace").strip()) if pointer.is_file() else None
    return int(match[1]) if match and not match[2] else None


def _bad(where: Path, found: str, why: str, fix: str) -> MfsdpError:
    return MfsdpError(Problem(str(where), found, why, fix, code=BAD_INPUT))
