"""Reads the `.metadata` file of torch.distributed.checkpoint (DCP) without torch, and without running what is in it.

`.metadata` is a pickle, and a pickle may call any function it names. Here only the classes that DCP writes (torch 2.x,
`torch/distributed/checkpoint/{metadata,planner,filesystem}.py`) are known, each mapped to a stand-in of ours that holds
attributes and does nothing; any other name stops the reading.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

METADATA = ".metadata"
DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}


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
    try:
        with open(path, "rb") as file:
            tensors, objects, files, holes = _collect(_Unpickler(file).load())
    except _Refused as refused:
        raise _bad(path, str(refused), "torch.distributed.checkpoint writes no such thing: the file may be an attack, so reading stopped",
                   "use a checkpoint from a source you trust; if this is one, report the name") from None
    except Exception as error:  # a damaged pickle raises nearly any type
        raise _bad(path, f"{type(error).__name__}: {error}", "the file is damaged or cut short", "use another checkpoint") from error
    problems = [Problem(f"{folder}: {name}", "", why, "use another checkpoint", code=BAD_INPUT) for name, why in holes]
    return DcpContents(folder, tuple(tensors), tuple(objects), files, tuple(_check_files(folder, files) + problems))


def _collect(metadata) -> tuple[list[TensorEntry], list[str], dict[str, int], list[tuple[str, str]]]:
    """Tensors, names of other values, bytes needed of each file, and (name, why) of what is stored in part."""
    files: dict[str, int] = {}
    placed: dict[str, list[tuple[tuple | None, str]]] = {}
    for index, info in metadata.storage_data.items():
        files[info.relative_path] = max(files.get(info.relative_path, 0), info.offset + info.length)
        placed.setdefault(index.fqn, []).append((getattr(index, "offset", None), info.relative_path))
    tensors, objects, holes = [], [], []
    for name, entry in metadata.state_dict_metadata.items():
        stored = placed.get(name, [])
        if not isinstance(entry, _Tensor):
            objects.append(name)
            if not stored:
                holes.append((name, "no file holds this value"))
            continue
        places = tuple(sorted({file for _, file in stored}))
        tensors.append(TensorEntry(name, entry.size, entry.properties.dtype, len(entry.chunks), places))
        offsets = {offset for offset, _ in stored}
        num_held = sum(prod(chunk.sizes) for chunk in entry.chunks if chunk.offsets in offsets)
        if num_held < prod(entry.size):
            holes.append((name, f"{num_held:,} of {prod(entry.size):,} elements are stored"))
    return tensors, objects, files, holes


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


# ---------------------------------------------------------------- the pickle

class _Record:
    """Any of DCP's small classes: keeps the attributes it is given."""

    def __init__(self, *arguments):
        self.arguments = arguments


class _Tensor(_Record):
    pass


class _Properties(_Record):
    def __setstate__(self, state):
        self.dtype = state[0]


def _ignored(*_):
    return None


def _joined_path(*parts) -> str:
    return "/".join(map(str, parts))


_CHECKPOINT = "torch.distributed.checkpoint."
_ALLOWED = {
    (_CHECKPOINT + "metadata", "Metadata"): _Record,
    (_CHECKPOINT + "metadata", "TensorStorageMetadata"): _Tensor,
    (_CHECKPOINT + "metadata", "BytesStorageMetadata"): _Record,
    (_CHECKPOINT + "metadata", "ChunkStorageMetadata"): _Record,
    (_CHECKPOINT + "metadata", "TensorProperties"): _Properties,
    (_CHECKPOINT + "metadata", "MetadataIndex"): _Record,
    (_CHECKPOINT + "metadata", "StorageMeta"): _Record,
    (_CHECKPOINT + "metadata", "_MEM_FORMAT_ENCODING"): _ignored,
    (_CHECKPOINT + "filesystem", "_StorageInfo"): _Record,
    # Megatron's own saver keeps the ranks' plans in the file
    (_CHECKPOINT + "planner", "SavePlan"): _Record,
    (_CHECKPOINT + "planner", "WriteItem"): _Record,
    (_CHECKPOINT + "planner", "TensorWriteData"): _Record,
    (_CHECKPOINT + "planner", "BytesIOWriteData"): _Record,
    (_CHECKPOINT + "planner", "WriteItemType"): _ignored,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _ignored,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    **{(module, cls): _joined_path for module in ("pathlib", "pathlib._local") for cls in ("PosixPath", "PurePosixPath", "WindowsPath")},
    **{("torch", dtype): dtype for dtype in DTYPE_BYTES},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in _ALLOWED:
            raise _Refused(f"{module}.{name}")
        return _ALLOWED[module, name]

    def persistent_load(self, pid):
        raise _Refused("a persistent id")


class _Refused(Exception):
    pass


def _bad(path: Path, found: str, why: str, fix: str) -> MfsdpError:
    return MfsdpError(Problem(str(path), found, why, fix, code=BAD_INPUT))
