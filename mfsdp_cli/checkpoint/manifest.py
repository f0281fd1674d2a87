"""The record of a checkpoint, manifest.json: what was saved, how it was made, and whether all of it is there. No torch.

    checkpoints/step_000100/{manifest.json, dist_ckpt/, huggingface/, trainer.json}
    checkpoints/latest          text file, name of the folder to resume from

The record is written last (`saving`), so that a folder with one was saved to its end. Every file's size is checked on each use; its
CRC-32 only by `verify`. zlib.crc32 was chosen over blake2b because the manifest guards against damage, not forgery: 3.1 against
0.4 GiB/s a thread on an AMD EPYC, and files go in parallel.
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path

from mfsdp_cli.errors import BAD_INPUT, MISMATCH, MfsdpError, Problem
from mfsdp_cli.records import Record

SCHEMA = 1
MANIFEST = "manifest.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"
DIST_CKPT = "dist_ckpt"
HUGGINGFACE = "huggingface"
TMP, OLD = ".tmp", ".old"
ADDED = {"metrics": {}, "best_metric": ""}  # what checkpoints of earlier versions lack, and what that means
_BLOCK_BYTES = 8 << 20
_MOST_LISTED = 10


def step_folder(step: int) -> str:
    return f"step_{step:06d}"


class Manifest(Record):
    """What a checkpoint holds and how it was made; `files` is filled in by `write_manifest`.

    samples_consumed  conversations seen since step 0, over all ranks: the position in the data
    contents          subset of model, optimizer, extra
    topology          ranks: world, dp, tp, pp, cp, ep, etp
    source_model      what the run started from: Hugging Face folder, hub id or checkpoint
    created           UTC, ISO 8601
    metrics           of the validation at this step, None for what was not a number; without one, empty
    best_metric       the one by which the run judges (trainer.best_metric)
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
    metrics: dict[str, float | None] = field(default_factory=dict)
    best_metric: str = ""


def write_manifest(folder: str | Path, manifest: Manifest, flushed: Mapping[str, dict] = {}) -> Manifest:
    """Flush every file under `folder` to the disk, take size and CRC-32, and write manifest.json last.

    flushed  entries of files that their writers have flushed and summed up already: only their size is checked. Raises OSError
             when it differs.
    """
    folder = Path(folder)
    paths = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MANIFEST}
    rest = [path for name, path in paths.items() if name not in flushed]
    for path in rest:
        flush(path)
    checksums = dict(zip(rest, _crc32_all(rest)))
    files = {n: flushed[n] if n in flushed else {"bytes": p.stat().st_size, "crc32": checksums[p]} for n, p in paths.items()}
    for name, entry in flushed.items():
        if (size := _size(folder / name)) != entry["bytes"]:
            raise OSError(f"{folder / name}: {entry['bytes']:,} bytes were written, and the disk has {size}")
    manifest = replace(manifest, files=files)
    for subfolder in [p for p in folder.rglob("*") if p.is_dir()]:
        flush(subfolder)
    write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


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
    data = ADDED | data
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
    if outer == "float | None":
        return value is None or (type(value) is float and math.isfinite(value)) or _fits(value, "int")
    return isinstance(value, {"str": str, "": object}[outer])


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


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot flush a folder; that is no reason to lose a save
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    flush(path.parent)
