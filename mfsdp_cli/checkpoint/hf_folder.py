"""Reads what a Hugging Face model folder holds from its config, index and safetensors headers. No torch, no weights read.

A safetensors file is 8 bytes (little-endian length of the header), the header as JSON {name: {dtype, shape,
data_offsets}}, then the bytes of the tensors.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from mfsdp_cli.checkpoint.dcp_metadata import TensorEntry
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
# code in a safetensors header -> torch's name
DTYPE_NAMES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I16": "int16",
               "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
               "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64"}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class HfContents:
    """config: parsed config.json, None when there is none; tensors of all safetensors files; problems: files of the
    index that are missing, files cut short, tensors that the index places elsewhere."""

    folder: Path
    config: dict | None
    has_tokenizer: bool
    tensors: tuple[TensorEntry, ...]
    num_file_bytes: int
    problems: tuple[Problem, ...]


def read_hf(folder: str | Path) -> HfContents:
    """What is in a Hugging Face folder; faults are in `.problems`. Raises MfsdpError for JSON that does not parse."""
    folder = Path(folder)
    tensors: dict[str, TensorEntry] = {}
    problems, num_file_bytes = [], 0
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        num_file_bytes += shard.stat().st_size
        found, problem = _read_header(shard)
        tensors.update((entry.name, entry) for entry in found)
        problems += [problem] if problem else []
    if (folder / INDEX).is_file():
        places = _places(folder / INDEX)
        for name in sorted(set(places.values()) - {shard.name for shard in shards}):
            problems.append(_problem(folder / name, "missing", f"{INDEX} places tensors in it"))
        for name, file in sorted(places.items()):
            if (folder / file).is_file() and (name not in tensors or tensors[name].files != (file,)):
                problems.append(_problem(folder / file, "", f"{INDEX} places {name} in it, but it is not there"))
    return HfContents(folder, _json(folder / "config.json") if (folder / "config.json").is_file() else None,
                      any((folder / name).is_file() for name in TOKENIZER_FILES), tuple(tensors.values()), num_file_bytes, tuple(problems))


def _read_header(path: Path) -> tuple[list[TensorEntry], Problem | None]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > min(_MAX_HEADER_BYTES, size - 8):
            return [], _problem(path, f"{size:,} bytes", "cut short or not a safetensors file: its header does not fit")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = [TensorEntry(name, tuple(entry["shape"]), DTYPE_NAMES[entry["dtype"]], 1, (path.name,)) for name, entry in header.items()]
            needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if not all(type(n) is int and n >= 0 for entry in tensors for n in entry.shape):
                raise ValueError("a shape that is no list of sizes")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return [], _problem(path, f"{type(error).__name__}: {error}", "its safetensors header is damaged")
    if size < needed:
        return tensors, _problem(path, f"{size:,} bytes", f"cut short: its header describes {needed:,} bytes")
    return tensors, None


def _json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        return data
    except (ValueError, RecursionError, OSError) as error:
        raise MfsdpError(_problem(path, str(error), "this file cannot be read")) from None


def _places(index: Path) -> dict[str, str]:
    """Name of a tensor -> file, of an index."""
    places = _json(index).get("weight_map", {})
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise MfsdpError(_problem(index, "weight_map", "it must map names of tensors to names of files"))
    return places


def _problem(where: Path, found: str, why: str) -> Problem:
    return Problem(str(where), found, why, "copy the file again, or use another folder", code=BAD_INPUT)
