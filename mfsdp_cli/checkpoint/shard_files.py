"""Safetensors files that are laid out before their tensors come, so that none has to be kept.

The header of a safetensors file tells where each tensor lies. Names, shapes and dtypes of an export are known from the source
model, so each tensor is written to its place when it arrives, in any order.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mfsdp_cli.checkpoint.dcp_metadata import DTYPE_BYTES
from mfsdp_cli.checkpoint.hf_folder import DTYPE_NAMES, INDEX

SHARD_BYTES = 5_000_000_000
_CODES = {name: code for code, name in DTYPE_NAMES.items()}
_WRITE_BYTES = 1 << 30  # a single write ends at 2 GiB


@dataclass
class _Place:
    file: str
    offset: int
    num_bytes: int


class ShardFiles:
    """Files of at most `shard_bytes` (a larger tensor gets one of its own) in `folder`, and their index when there are several.

    entries: name -> {"shape", "dtype"}, written in this order. Raises OSError as the disk does.
    """

    def __init__(self, folder: Path, entries: dict[str, dict], shard_bytes: int = SHARD_BYTES):
        self.folder, self._places, self._open = folder, {}, {}
        self.num_bytes = total_bytes(entries)
        shards = _split(entries, shard_bytes)
        count = len(shards)
        self.files = ["model.safetensors"] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        for file, names in zip(self.files, shards):
            self._lay_out(file, {name: entries[name] for name in names})
        if count > 1:
            places = {name: place.file for name, place in self._places.items()}
            text = json.dumps({"metadata": {"total_size": self.num_bytes}, "weight_map": places}, indent=2) + "\n"
            (folder / INDEX).write_text(text)

    def _lay_out(self, file: str, entries: dict[str, dict]) -> None:
        header, end = {"__metadata__": {"format": "pt"}}, 0
        # wide elements first, so that every tensor is aligned to its own
        for name, entry in sorted(entries.items(), key=lambda item: -DTYPE_BYTES[item[1]["dtype"]]):
            start, end = end, end + _num_bytes(entry)
            header[name] = {"dtype": _CODES[entry["dtype"]], "shape": entry["shape"], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        for name in entries:
            start, stop = header[name]["data_offsets"]
            self._places[name] = _Place(file, 8 + len(text) + start, stop - start)
        descriptor = os.open(self.folder / file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._open[file] = descriptor
        os.pwrite(descriptor, struct.pack("<Q", len(text)) + text, 0)
        os.ftruncate(descriptor, 8 + len(text) + end)

    def write(self, name: str, tensor) -> None:
        """Put a torch tensor, of the shape and dtype announced, in its place."""
        import torch

        place, descriptor = self._places[name], self._open[self._places[name].file]
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        assert len(data) == place.num_bytes, (name, len(data), place)
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:done + _WRITE_BYTES], place.offset + done)

    def close(self, flush: bool = True) -> None:
        while self._open:
            _, descriptor = self._open.popitem()
            try:
                if flush:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(self, kind, *_) -> None:
        self.close(flush=kind is None)


def total_bytes(entries: dict[str, dict]) -> int:
    return sum(_num_bytes(entry) for entry in entries.values())


def _num_bytes(entry: dict) -> int:
    return prod(entry["shape"]) * DTYPE_BYTES[entry["dtype"]]


def _split(entries: dict[str, dict], shard_bytes: int) -> list[list[str]]:
    shards, size = [[]], 0
    for name, entry in entries.items():
        num_bytes = _num_bytes(entry)
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards
