"""An export in a process of its own, without the seconds that its imports take."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks

from mfsdp_cli.errors import MfsdpError

GATE, UP = (f"model.layers.0.mlp.{half}_proj.weight" for half in ("gate", "up"))
SWAPPED = {GATE: UP, UP: GATE}


def exported(checkpoint: Path, out: Path, **options) -> dict:
    """The report of an export on a fork of this process; raises MfsdpError as the export does."""
    result = run_ranks(1, export_here, checkpoint, out, **options)[0]
    if isinstance(result, list):
        raise MfsdpError(result)
    return result


def export_here(checkpoint: Path, out: Path, swap: bool = False, full_after: int | None = None, **options) -> dict | list:
    """swap: two tensors change places; full_after: writes that fit on the disk."""
    from mfsdp_cli.checkpoint import export_hf, export_target
    from mfsdp_cli.engine import bridge

    if swap:
        stream = bridge.export_weights
        bridge.export_weights = lambda *args, **kwargs: ((SWAPPED.get(name, name), tensor) for name, tensor in stream(*args, **kwargs))
    if full_after is not None:
        fill_disk(full_after)
    try:
        with export_target.claimed(out, checkpoint) as target:
            return export_hf.export(checkpoint, target, **options)
    except MfsdpError as error:
        return error.problems


def fill_disk(writes: int) -> None:
    import errno
    import os

    pwrite, left = os.pwrite, [writes]

    def fails(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    os.pwrite = fails


def read(folder: Path) -> dict:
    """Name -> tensor of all safetensors files."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
