"""Weights on their way from the trainer to the samplers: a folder of safetensors in the memory file system, one for each version.

    folder = transfer_folder(run_dir, num_bytes)                                  once
    path = write_weights(engine.named_weights(dtype), folder, is_writer)          on every rank, one of which (of each host) writes
    sampler.update_weights(str(path))                                             every sampler
    remove_versions(folder, keep=path)                                            when all of them have loaded it; keep=None at the end

The folder has the layout of a Hugging Face model folder (shards and their index), so that transformers and vLLM load it as they are.
A version stays until the samplers have the next one: a sampler that is started anew finds the current weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, MfsdpError, Problem

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
SHARD_BYTES = 1 << 30
MARGIN_BYTES = 64 << 20


def transfer_folder(run_dir: Path, num_bytes: int, one_host: bool = True, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Where versions of num_bytes are to lie: shared memory if two of them fit, since the next is written before the last is removed; else
    the run folder, which samplers on other hosts can read too (one_host False: unless each host has a writer of its own).

    Raises MfsdpError if neither has the room. Creates nothing.
    """
    wanted = 2 * num_bytes + MARGIN_BYTES
    in_memory = min(free_bytes(shared_memory), available_memory()) if one_host and shared_memory.is_dir() else 0
    if in_memory >= wanted:
        name = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=6).hexdigest()
        return shared_memory / f"mfsdp-{os.getuid()}-{name}"
    on_disk = free_bytes(run_dir)
    if on_disk >= wanted:
        return run_dir / "weights"
    why = (f"handing the weights to the samplers takes room for two versions of {gib(num_bytes)}, {gib(wanted)} in all: "
           f"{shared_memory} has {gib(in_memory)} to give, and the run folder's disk {gib(on_disk)}")
    raise MfsdpError(Problem(str(run_dir), gib(on_disk), why, f"free memory, or {gib(wanted - on_disk)} on that disk", code=MACHINE_UNFIT))


def write_weights(named_weights: Iterator[tuple[str, torch.Tensor]], folder: Path, is_writer: bool) -> Path | None:
    """The folder of the new version, whole, on a writer; null on other ranks.

    Collective as the stream is: every rank iterates to its end, also a writer whose disk is full, which raises MfsdpError only then.
    Holds one shard (1 GiB) beyond the stream's own tensor.
    """
    if not is_writer:
        for _ in named_weights:
            pass
        return None
    writer, failure = _Writer(folder), None
    for name, tensor in named_weights:
        failure = failure or writer.attempt(writer.add, name, tensor)
    failure = failure or writer.attempt(writer.finish)
    if failure:
        shutil.rmtree(writer.temporary, ignore_errors=True)
        why = f"weights for the samplers cannot be written: {failure}"
        problem = Problem(str(folder), gib(writer.num_bytes), why, "free memory or disk space there", code=MACHINE_UNFIT)
        raise MfsdpError(problem) from failure
    return writer.path


def remove_versions(folder: Path, keep: Path | None) -> None:
    """Remove every version but `keep`, and what a killed writer left; with None the folder itself too. Nothing there is no fault."""
    for path in folder.glob("version_*"):
        if path != keep:
            shutil.rmtree(path)
    if keep is None and folder.is_dir():
        folder.rmdir()


class _Writer:
    def __init__(self, folder: Path):
        versions = [int(path.name.removeprefix("version_")) for path in folder.glob("version_??????")]
        self.path = folder / f"version_{max(versions, default=0) + 1:06d}"
        self.temporary = folder / f"{self.path.name}.tmp"
        self.num_bytes = 0
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = 0
        self._weight_map: dict[str, str] = {}

    @staticmethod
    def attempt(action, *args) -> Exception | None:
        from safetensors import SafetensorError

        try:
            action(*args)
        except (OSError, SafetensorError) as error:
            return error
        return None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self._weight_map and name not in self._shard, name
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._shard_bytes + size > SHARD_BYTES:
            self._flush()
        tensor = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that overlap, as tied ones do
        shares = tensor.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in self._shard.values()}
        self._shard[name] = tensor.clone() if shares else tensor
        self._shard_bytes += size
        self.num_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        if not self._weight_map:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir()
        free = free_bytes(folder)
        if free < self._shard_bytes:
            raise OSError(f"{gib(self._shard_bytes)} to write, {gib(free)} free")
        file = f"model-{len(set(self._weight_map.values())) + 1:05d}.safetensors"
        save_file(self._shard, self.temporary / file, metadata={"format": "pt"})
        self._weight_map |= dict.fromkeys(self._shard, file)
        self._shard, self._shard_bytes = {}, 0

    def finish(self) -> None:
        assert self._shard, "no weights"
        self._flush()
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": self._weight_map}
        (self.temporary / "model.safetensors.index.json").write_text(json.dumps(index))
        self.temporary.rename(self.path)


# ---------------------------------------------------------------- what a folder holds


def tensor_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape in a folder's safetensors files. Reads their headers only."""
    from safetensors import safe_open

    shapes = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "np") as reader:
            shapes |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    return shapes


def num_bytes_of(shapes: dict[str, tuple[int, ...]], bytes_per_element: int) -> int:
    return sum(math.prod(shape) for shape in shapes.values()) * bytes_per_element


def check_same_tensors(where: str | Path, found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], is_tied: bool) -> None:
    """Raise MfsdpError unless what was found there is exactly the tensors of the model: vLLM and transformers only warn, and go on with the old
    or with random ones. A tied output layer and stored rotary frequencies may be there or not."""
    def essential(shapes):
        return {name: shape for name, shape in shapes.items()
                if not name.endswith("rotary_emb.inv_freq") and not (is_tied and name == "lm_head.weight")}

    found, wanted = essential(found), essential(wanted)
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    wrong += [f"{name} is superfluous" for name in found.keys() - wanted.keys()]
    wrong += [f"{name} is {list(found[name])}, not {list(wanted[name])}" for name in found.keys() & wanted.keys()
              if found[name] != wanted[name]]
    if wrong:
        listed = "; ".join(sorted(wrong)[:20]) + ("; …" if len(wrong) > 20 else "")
        raise MfsdpError(Problem(str(where), f"{len(wrong)} tensors", f"these are not the weights of the sampler's model: {listed}",
                                 "give the sampler the model that is trained", code=BAD_INPUT))


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def available_memory() -> int:
    """A file in shared memory takes real memory, of which the file system itself knows nothing."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
