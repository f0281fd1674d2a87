"""Checkpoint folders on disk: names, manifest, the `latest` pointer, retention. Standard library only, no torch.

    checkpoints/step_000100/{manifest.json, dist_ckpt/, huggingface/, trainer.json}
    checkpoints/latest          text file, name of the folder to resume from

Order of a save: `begin` -> the ranks write into step_N.tmp -> barrier -> rank 0 `commit`s: flush every file, write the
manifest last, rename, move `latest`. Only then `prune`. A process killed at any moment leaves a complete checkpoint
behind if there was one before. Suffixes: `.tmp` is being written or being deleted and never read; `.old` exists for the
moment in which a step that is saved again takes the place of its predecessor, and counts as that step until then.

Every file's size is checked on each use; its CRC-32 only by `verify`. zlib.crc32 was chosen over blake2b because the
manifest guards against damage, not forgery: 3.1 against 0.4 GiB/s a thread on an AMD EPYC, and files go in parallel.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path

from mfsdp_cli.errors import BAD_INPUT, MISMATCH, MfsdpError, Problem

SCHEMA = 1
MANIFEST = "manifest.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"
DIST_CKPT = "dist_ckpt"
HUGGINGFACE = "huggingface"
TMP, OLD = ".tmp", ".old"
_FOLDER = re.compile(r"step_(\d{6,})(\.tmp|\.old)?")
_BLOCK_BYTES = 8 << 20
_MOST_LISTED = 10


def step_folder(step: int) -> str:
    return f"step_{step:06d}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds and how it was made; `files` is filled in by `write_manifest`.

    samples_consumed  conversations seen since step 0, over all ranks: the position in the data
    contents          subset of model, optimizer, extra
    topology          ranks: world, dp, tp, pp, cp, ep, etp
    source_model      what the run started from: Hugging Face folder, hub id or checkpoint
    created           UTC, ISO 8601
    files             relative path -> {"bytes": size, "crc32": 8 hex digits}; the manifest itself is not in it
    """

    step: int
    total_steps: int
    samples_consumed: int
    contents: list[str]
    topology: dict[str, int]
    dtype: str
    padded_vocab_size: int
    architecture: str
    source_model: str
    num_tensors: int
    versions: dict[str, str] = field(default_factory=dict)
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    schema: int = SCHEMA
    files: dict[str, dict] = field(default_factory=dict)


# ---------------------------------------------------------------- saving

def begin(checkpoints_dir: str | Path, step: int) -> Path:
    """An empty folder to write step `step` into. Removes what an interrupted save of the same step left."""
    checkpoints_dir = Path(checkpoints_dir)
    checkpoints_dir.mkdir(parents=True, exist_ok=True)
    _settle_old(checkpoints_dir / step_folder(step))
    tmp = checkpoints_dir / (step_folder(step) + TMP)
    if tmp.exists():
        shutil.rmtree(tmp)
    tmp.mkdir()
    return tmp


def commit(tmp: str | Path, manifest: Manifest) -> Path:
    """Make the folder that `begin` gave a checkpoint and point `latest` at it. On one rank, after a barrier.

    An existing folder of that step is replaced: it steps aside as `.old`, which still counts as the step, until the
    new one has its name."""
    tmp = Path(tmp)
    assert tmp.name == step_folder(manifest.step) + TMP, (tmp, manifest.step)
    write_manifest(tmp, manifest)
    final, old = tmp.with_suffix(""), tmp.with_suffix(OLD)
    if final.exists():
        os.rename(final, old)
    os.rename(tmp, final)
    _fsync(final.parent)
    _write_atomically(final.parent / LATEST, final.name + "\n")
    if old.exists():
        _delete(old)
    return final


def write_manifest(folder: str | Path, manifest: Manifest) -> Manifest:
    """Flush every file under `folder` to the disk, take size and CRC-32, and write manifest.json last."""
    folder = Path(folder)
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    for path in paths:
        _fsync(path)
    checksums = _crc32_all(paths)
    files = {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "crc32": c} for p, c in zip(paths, checksums)}
    manifest = replace(manifest, files=files)
    for subfolder in [p for p in folder.rglob("*") if p.is_dir()]:
        _fsync(subfolder)
    _write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


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
    for folder, step, suffix in _folders(checkpoints_dir):
        replaced = suffix == OLD and complete.get(step) not in (None, folder)
        if replaced or (suffix == TMP and step < newest):
            doomed.append(folder)
    if keep is not None:
        spared = {newest} | ({_pointed_step(checkpoints_dir)} & complete.keys())
        others = sorted(complete.keys() - spared)
        doomed += [complete[step] for step in others[: max(0, len(complete) - max(keep, len(spared)))]]
    for folder in doomed:
        _delete(folder)
    return doomed


def _settle_old(final: Path) -> None:
    """Finish or undo a replacement that was interrupted: afterwards there is no `.old`."""
    old = final.with_name(final.name + OLD)
    if not old.exists():
        return
    if is_complete(old) and not is_complete(final):
        if final.exists():
            _delete(final)
        os.rename(old, final)
    else:
        _delete(old)


def _delete(folder: Path) -> None:
    """Rename to `.tmp` first, so that a deletion cut short never leaves half a checkpoint under a good name."""
    grave = folder.with_suffix(TMP)
    if grave != folder:
        if grave.exists():
            shutil.rmtree(grave)
        os.rename(folder, grave)
    shutil.rmtree(grave)


# ---------------------------------------------------------------- finding and reading

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
    names = ", ".join(folder.name for folder, _, _ in _folders(checkpoints_dir))
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
    pointed = _pointed_step(checkpoints_dir)
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
    for folder, step, suffix in _folders(Path(checkpoints_dir)):
        if suffix != TMP and (suffix == "" or step not in found) and is_complete(folder):
            found[step] = folder
    return found


def is_complete(folder: str | Path) -> bool:
    return not examine(Path(folder))[1]


def require_complete(path: str | Path) -> Manifest:
    """The manifest of a step folder whose files are all there in full size.

    Raises MfsdpError (BAD_INPUT) with everything that is missing, cut short or unreadable."""
    manifest, problems = examine(Path(path))
    if problems:
        raise MfsdpError(problems)
    return manifest


def verify(path: str | Path) -> list[Problem]:
    """Read every byte of a step folder again; one problem for each file that is not what was saved."""
    folder = Path(path)
    manifest, problems = examine(folder)
    if manifest is None:
        return problems
    intact = [name for name, entry in manifest.files.items() if _size(folder / name) == entry["bytes"]]
    for name, found in zip(intact, _crc32_all([folder / name for name in intact])):
        wanted = manifest.files[name]["crc32"]
        if found != wanted:
            problems.append(Problem(str(folder / name), f"CRC-32 {found}", f"the bytes differ from those saved, whose CRC-32 was {wanted}",
                                    "use another checkpoint or a copy of this file", code=MISMATCH))
    return problems


def examine(folder: Path) -> tuple[Manifest | None, list[Problem]]:
    """The manifest, as far as it can be read, and everything that keeps the checkpoint from being complete."""
    try:
        manifest = _read_manifest(folder)
    except MfsdpError as error:
        return None, error.problems
    if folder.name.endswith(TMP):
        return manifest, [_problem(folder, "a .tmp folder", "the save was interrupted, or is still going on", "use a folder without .tmp")]
    problems = []
    for name, entry in manifest.files.items():
        size = _size(folder / name)
        if size is None:
            problems.append(_problem(folder / name, "missing", f"{MANIFEST} lists it with {entry['bytes']:,} bytes",
                                     "use another checkpoint or copy the file back"))
        elif size != entry["bytes"]:
            problems.append(_problem(folder / name, f"{size:,} bytes", f"{MANIFEST} lists it with {entry['bytes']:,} bytes",
                                     "use another checkpoint or copy the file back"))
    if len(problems) > _MOST_LISTED:
        rest = len(problems) - _MOST_LISTED
        problems[_MOST_LISTED:] = [_problem(folder, f"{rest} more files", "missing or of the wrong size, like those above",
                                            "use another checkpoint")]
    return manifest, problems


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise _bad(folder, "missing", "there is no such folder", "give a checkpoint folder that exists")
    if not path.is_file():
        raise _bad(folder, f"no {MANIFEST}", f"{MANIFEST} is written last, so this save was interrupted or is still going on",
                   "use another checkpoint")
    try:
        data = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise _bad(path, str(error), f"{MANIFEST} cannot be read", "use another checkpoint") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise _bad(path, "no schema number", "this is not a manifest of mfsdp's", "give a checkpoint that mfsdp wrote")
    if data["schema"] > SCHEMA:
        raise _bad(path, f"schema {data['schema']}", f"written by a newer mfsdp; this one reads schema {SCHEMA}", "update mfsdp")
    known = {f.name: f.type for f in fields(Manifest)}
    if lacking := sorted(known.keys() - data.keys()):
        raise _bad(path, f"without {', '.join(lacking)}", "the manifest lacks required keys", "use another checkpoint")
    if wrong := [name for name, kind in known.items() if not _fits(data[name], kind)]:
        raise _bad(path, ", ".join(wrong), "values of another type than mfsdp writes", "use another checkpoint")
    if any(not (_fits(entry.get("bytes"), "int") and _fits(entry.get("crc32"), "str")) for entry in data["files"].values()):
        raise _bad(path, "files", "an entry lacks bytes or crc32", "use another checkpoint")
    if outside := [n for n in data["files"] if n.startswith("/") or ".." in n.split("/")]:
        raise _bad(path, outside[0], "a manifest lists only files below its own folder", "do not use this checkpoint")
    return Manifest(**{key: data[key] for key in known})


def _fits(value, kind: str) -> bool:
    """Whether a value of JSON has the type of a field of `Manifest`; numbers there are counts and sizes."""
    outer, _, inner = kind.removesuffix("]").partition("[")
    if outer == "int":
        return type(value) is int and 0 <= value < 2**63
    if outer == "dict":
        return isinstance(value, dict) and all(_fits(v, inner.partition(", ")[2] or inner) for v in value.values())
    if outer == "list":
        return isinstance(value, list) and all(_fits(v, inner) for v in value)
    return isinstance(value, {"str": str, "": object}[outer])


def _folders(checkpoints_dir: Path) -> list[tuple[Path, int, str]]:
    """(folder, step, suffix) of everything named like a checkpoint; of one step the plain name comes first."""
    if not checkpoints_dir.is_dir():
        return []
    matches = [(p, _FOLDER.fullmatch(p.name)) for p in checkpoints_dir.iterdir()]
    return sorted(((p, int(m[1]), m[2] or "") for p, m in matches if m and p.is_dir()), key=lambda entry: entry[1:])


def _pointed_step(checkpoints_dir: Path) -> int | None:
    pointer = checkpoints_dir / LATEST
    match = _FOLDER.fullmatch(pointer.read_text(errors="replace").strip()) if pointer.is_file() else None
    return int(match[1]) if match and not match[2] else None


def _problem(where: Path, found: str, why: str, fix: str) -> Problem:
    return Problem(str(where), found, why, fix, code=BAD_INPUT)


def _bad(where: Path, found: str, why: str, fix: str) -> MfsdpError:
    return MfsdpError(_problem(where, found, why, fix))


# ---------------------------------------------------------------- bytes

def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _crc32(path: Path) -> str:
    total = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            total = zlib.crc32(block, total)
    return f"{total:08x}"


def _crc32_all(paths: list[Path]) -> list[str]:
    from concurrent.futures import ThreadPoolExecutor  # zlib lets go of the interpreter's lock

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_crc32, paths))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot flush a folder; that is no reason to lose a save
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _fsync(path.parent)
