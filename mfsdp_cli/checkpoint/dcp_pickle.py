"""A program that says in JSON what a `.metadata` of torch.distributed.checkpoint (DCP) on its stdin holds. Standard library only.

`.metadata` is a pickle, and a pickle may call any function it names. Here only the classes that DCP writes (torch 2.x,
`torch/distributed/checkpoint/{metadata,planner,filesystem}.py`) are known, each with a stand-in that holds what it is given and does
nothing; any other name stops the reading. Even so a pickle can ask for any amount of memory in five bytes, copy what it has for ever, or
crash the interpreter with a tuple nested a million deep. So `dcp_metadata` runs this in a process of its own, which has bounds.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import sys
from math import prod

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "complex32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}
MOST_DIMENSIONS = 64  # torch's own limit
LONGEST_NAME = 200  # of a refused class, as it is told
# A 70B model's file of 15 MB takes 0.34 GiB and less than a second
MEMORY_BYTES, MEMORY_PER_BYTE = 1 << 30, 64
SECONDS, SECONDS_PER_MIB = 5, 4


class _State(list):
    """Stand-in of DCP's classes: [-1] is the state it was pickled with. `list.append` takes the state without a copy and in C, which
    halves the time for a large file."""

    __slots__ = ()
    __setstate__ = list.append
    __hash__ = object.__hash__  # a MetadataIndex is a key
    __eq__ = object.__eq__


class _Tensor(_State):
    __slots__ = ()


class _Unread:
    """What nobody looks at: enums, paths."""

    __slots__ = ()

    def __new__(cls, *_):
        return None


_CHECKPOINT = "torch.distributed.checkpoint."
_KNOWN = {
    (_CHECKPOINT + "metadata", "Metadata"): _State,
    (_CHECKPOINT + "metadata", "TensorStorageMetadata"): _Tensor,
    (_CHECKPOINT + "metadata", "BytesStorageMetadata"): _State,
    (_CHECKPOINT + "metadata", "ChunkStorageMetadata"): _State,
    (_CHECKPOINT + "metadata", "TensorProperties"): _State,
    (_CHECKPOINT + "metadata", "MetadataIndex"): _State,
    (_CHECKPOINT + "metadata", "StorageMeta"): _State,
    (_CHECKPOINT + "metadata", "_MEM_FORMAT_ENCODING"): _Unread,
    (_CHECKPOINT + "filesystem", "_StorageInfo"): _State,
    # Megatron's own saver keeps the ranks' plans in the file
    (_CHECKPOINT + "planner", "SavePlan"): _State,
    (_CHECKPOINT + "planner", "WriteItem"): _State,
    (_CHECKPOINT + "planner", "TensorWriteData"): _State,
    (_CHECKPOINT + "planner", "BytesIOWriteData"): _State,
    (_CHECKPOINT + "planner", "WriteItemType"): _Unread,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Unread,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    **{(module, cls): _Unread for module in ("pathlib", "pathlib._local") for cls in ("PosixPath", "PurePosixPath", "WindowsPath")},
    **{("torch", dtype): dtype for dtype in DTYPE_BYTES},
}


class Refused(Exception):
    """The pickle asks for something that DCP does not write."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in _KNOWN:
            raise Refused(ascii(f"{module}.{name}")[1:-1][:LONGEST_NAME])
        return _KNOWN[module, name]

    def persistent_load(self, pid):
        raise Refused("a persistent id")


def read(file) -> dict:
    """tensors  [name, shape, dtype, number of chunks, [indices into `files` where they lie]]
    objects  names of stored values that are no tensors
    files    [name, bytes that it must at least have]
    holes    [name, why] of what is stored in part or not at all

    Raises Refused, or nearly anything for a damaged pickle."""
    metadata = _Unpickler(file).load()[-1]
    ends: dict[str, int] = {}
    places: dict[str, tuple[set, set]] = {}  # name -> offsets of stored chunks, files
    for index, info in metadata["storage_data"].items():
        index, info = index[-1], info[-1]
        path, end, name = info["relative_path"], info["offset"] + info["length"], index["fqn"]
        if end > ends.get(path, -1):
            ends[path] = end
        if name not in places:
            places[name] = set(), set()
        places[name][0].add(index.get("offset"))
        places[name][1].add(path)
    numbers = {path: i for i, path in enumerate(sorted(ends))}
    found: dict = {"tensors": [], "objects": [], "files": [(_file(path), _size(ends[path])) for path in numbers], "holes": []}
    for name, entry in metadata["state_dict_metadata"].items():
        offsets, files = places.get(name, ((), ()))
        if isinstance(entry, _Tensor):
            tensor, held = _tensor(entry[-1], offsets)
            found["tensors"].append((_text(name), *tensor, sorted(numbers[path] for path in files)))
            wanted = prod(tensor[0])
            if held < wanted:
                found["holes"].append((name, f"{held:,} of {wanted:,} elements are stored"))
        else:
            found["objects"].append(_text(name))
            if not files:
                found["holes"].append((name, "no file holds this value"))
    return found


def _tensor(state: dict, offsets: set) -> tuple[tuple[tuple[int, ...], str, int], int]:
    """((shape, dtype, number of chunks), elements that lie in a file)."""
    shape, dtype, chunks = state["size"], state["properties"][-1][0], [chunk[-1] for chunk in state["chunks"]]
    if type(shape) is not tuple or len(shape) > MOST_DIMENSIONS or dtype not in DTYPE_BYTES:
        raise ValueError("a tensor without a shape and a dtype")
    return (tuple(map(_size, shape)), dtype, len(chunks)), sum(prod(chunk["sizes"]) for chunk in chunks if chunk["offsets"] in offsets)


def _size(number) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError("a size that is none")
    return number


def _text(name) -> str:
    if type(name) is not str or not name.isprintable():
        raise ValueError("a name that is no text")
    return name


def _file(path) -> str:
    parts = _text(path).split("/")
    if not all(0 < len(part.encode()) < 256 for part in parts) or ".." in parts:
        raise ValueError("the name of a file that is not below the folder")
    return path


def report(file) -> dict:
    """`read`, or {"refused": name} or {"damaged": reason}."""
    try:
        return read(file)
    except Refused as refused:
        return {"refused": str(refused)}
    except Exception as error:
        return {"damaged": ascii(f"{type(error).__name__}: {error}")[1:-1][:LONGEST_NAME]}


def bound(num_bytes: int) -> None:
    """Limit this process's memory and time, in proportion to the size of the file."""
    memory = MEMORY_BYTES + MEMORY_PER_BYTE * num_bytes
    seconds = SECONDS + SECONDS_PER_MIB * (num_bytes >> 20)
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, hard))


if __name__ == "__main__":
    bound(os.fstat(0).st_size)
    gc.disable()
    json.dump(report(sys.stdin.buffer), sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # at once: freeing a million objects takes as long as reading them
