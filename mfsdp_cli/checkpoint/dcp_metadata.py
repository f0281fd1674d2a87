"""Reads the `.metadata` file of torch.distributed.checkpoint (DCP) without torch, and without running what is in it: see `dcp_pickle`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mfsdp_cli.checkpoint import dcp_pickle
from mfsdp_cli.checkpoint.dcp_pickle import DTYPE_BYTES
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

METADATA = ".metadata"


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor. num_bytes: elements times element size, whatever the storage adds; files: where its chunks lie."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_chunks: int
    files: tuple[str, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class DcpContents:
    """objects: names of stored values that are no tensors; files: name -> bytes that file must at least have;
    problems: files missing or cut short, tensors with elements that no chunk holds."""

    folder: Path
    tensors: tuple[TensorEntry, ...]
    objects: tuple[str, ...]
    files: dict[str, int]
    problems: tuple[Problem, ...]


def read_dcp(folder: str | Path) -> DcpContents:
    """Contents of a DCP folder. Raises MfsdpError (BAD_INPUT) when `.metadata` is missing, damaged or names a class
    that DCP does not write."""
    folder = Path(folder)
    path = folder / METADATA
    if not path.is_file():
        raise _bad(path, "missing", "the save did not finish, or this is no DCP folder", "use another checkpoint")
    found = _read_apart(path)
    if "refused" in found:
        raise _bad(path, found["refused"],
                   "torch.distributed.checkpoint writes no such thing: the file may be an attack, so reading stopped",
                   "use a checkpoint from a source you trust; if this is one, report the name")
    if "damaged" in found:
        raise _bad(path, found["damaged"], "the file is damaged or cut short", "use another checkpoint")
    files = dict(found["files"])
    names = list(files)
    tensors = tuple(TensorEntry(name, tuple(shape), dtype, num_chunks, tuple(names[i] for i in places))
                    for name, shape, dtype, num_chunks, places in found["tensors"])
    problems = _check_files(folder, files)
    problems += [Problem(f"{folder}: {name}", "", why, "use another checkpoint", code=BAD_INPUT) for name, why in found["holes"]]
    return DcpContents(folder, tensors, tuple(found["objects"]), files, tuple(problems))


def _read_apart(path: Path) -> dict:
    """What `dcp_pickle` reports, from a process of its own."""
    with open(path, "rb") as file:
        reader = subprocess.run([sys.executable, "-I", "-S", dcp_pickle.__file__], stdin=file, capture_output=True)
    if reader.returncode == 0:
        return json.loads(reader.stdout)
    if reader.returncode == -signal.SIGXCPU:
        return {"damaged": "reading it took too long"}
    if reader.returncode < 0:
        return {"damaged": f"reading it crashed: {signal.Signals(-reader.returncode).name}"}
    return {"damaged": reader.stderr.decode(errors="replace").strip().rpartition("\n")[2]}


def _check_files(folder: Path, files: dict[str, int]) -> list[Problem]:
    problems = []
    for name, needed in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            problems.append(Problem(str(path), "missing", f"{METADATA} places tensors in it",
                                    "use another checkpoint or copy the file here", code=BAD_INPUT))
        elif (size := path.stat().st_size) < needed:
            problems.append(Problem(str(path), f"{size:,} bytes", f"cut short: {METADATA} places data up to byte {needed:,}",
                                    "use another checkpoint or copy the file again", code=BAD_INPUT))
    return problems


def _bad(path: Path, found: str, why: str, fix: str) -> MfsdpError:
    return MfsdpError(Problem(str(path), found, why, fix, code=BAD_INPUT))
