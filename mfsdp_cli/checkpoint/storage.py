"""torch DCP's files, written and read by several threads at a time, and checked.

What DCP does by default costs a save half its speed or more: one thread a rank; a CRC-32 of every tensor in its zip record, which
nothing reads, while the manifest's CRC-32 of whole files, which `--verify` reads, would take another pass over the disk. Here
it is taken from the bytes on their way to the file. DCP's threads also lose their exceptions, and with them tensors of the
checkpoint, in silence: a disk that fills up is such an exception. Here they are raised.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

MOST_THREADS = 8


class Writer(dcp.FileSystemWriter):
    """Writes as many files as it has threads. Afterwards `files` has size and CRC-32 of each that this rank has written, by
    name, as the manifest lists them: of the bytes that were meant to be written."""

    def __init__(self, folder: str | Path, num_threads: int):
        super().__init__(folder, thread_count=num_threads)
        self.fs = _Files()

    @property
    def files(self) -> dict[str, dict]:
        return self.fs.written

    def write_data(self, plan, planner) -> Future:
        with _without_zip_checksums():
            try:
                done = super().write_data(plan, planner)
            finally:
                self._raise_root()
        assert len(done.value()) == len(plan.items), f"{len(done.value())} of {len(plan.items)} parts written"
        return done

    def _raise_root(self) -> None:
        """What went wrong first while files were written: torch's threads lose it, or tell what only followed from it."""
        if self.fs.errors:
            raise self.fs.errors[0] from None


class OnceReader(dcp.FileSystemReader):
    """One for many loads of a tensor each: reads `.metadata` once, not at every load."""

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        self._metadata = super().read_metadata()

    def read_metadata(self, *args, **kwargs):
        return self._metadata


class Reader(dcp.FileSystemReader):
    """Reads its part of the tensors with several threads."""

    def __init__(self, folder: str | Path, num_threads: int):
        super().__init__(folder)
        self.num_threads = num_threads

    def read_data(self, plan, planner) -> Future:
        in_order = sorted(plan.items, key=lambda item: _place(self.storage_data[item.storage_index]))
        size = max(1, -(-len(in_order) // self.num_threads))
        parts = [dataclasses.replace(plan, items=in_order[i : i + size]) for i in range(0, len(in_order), size)]
        read = super().read_data
        with ThreadPoolExecutor(self.num_threads) as threads:
            list(threads.map(lambda part: read(part, planner), parts))
        done: Future = Future()
        done.set_result(None)
        return done


def num_threads() -> int:
    """Threads for one rank's files: its share of the cores that this process may use."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // num_ranks_here()))


def num_ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _place(stored) -> tuple[str, int]:
    return stored.relative_path, stored.offset


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _Files(FileSystem):
    """written: name -> {bytes, crc32}; errors: what went wrong in any thread."""

    def __init__(self):
        self.written: dict[str, dict] = {}
        self.errors: list[BaseException] = []

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[BinaryIO]:
        try:
            with super().create_stream(path, mode) as stream:
                counted = _Counted(stream)
                yield counted
            self.written[Path(path).name] = {"bytes": counted.num_bytes, "crc32": f"{counted.crc32:08x}"}
        except BaseException as error:
            self.errors.append(_root(error))
            raise

    def rename(self, path, new_path) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


def _root(error: BaseException) -> BaseException:
    """The failed write, where torch's zip writer, ending its file all the same, has raised something else over it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class _Counted:
    """A file that is written from front to back, with the size and the CRC-32 of all that was written."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.num_bytes, self.crc32 = 0, 0
        self.flush, self.fileno, self.close = stream.flush, stream.fileno, stream.close

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        written = self._stream.write(view)
        assert written == len(view), "buffered files write all or raise"
        self.num_bytes += written
        self.crc32 = zlib.crc32(view, self.crc32)
        return written

    def tell(self) -> int:
        return self.num_bytes
