"""Reads the parameters of an unsharded model from a DTensor checkpoint of any layout, one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from mfsdp_cli.checkpoint import dtensor
from mfsdp_cli.checkpoint.dcp_metadata import TensorEntry
from mfsdp_cli.checkpoint.export_source import PARAMETERS
from mfsdp_cli.checkpoint.storage import OnceReader


class StoredWeights:
    """The model parameters in the DCP folder `folder`; `tensors` are those entries of it, already read by `read_dcp`: torch
    unpickles the metadata as it is."""

    def __init__(self, folder: Path, tensors: tuple[TensorEntry, ...]):
        self.folder = folder
        self._entries = {PARAMETERS + dtensor.canonical(t.name.removeprefix(PARAMETERS)): t for t in tensors}
        assert len(self._entries) == len(tensors), "two stored tensors have one name"
        self._reader = OnceReader(folder)

    def check(self, model: torch.nn.Module) -> None:
        """Raise MfsdpError unless the checkpoint holds exactly the parameters of this unsharded model, in their shapes."""
        state = {}
        for name, param in model.named_parameters():
            state |= self._parts(name, param)
        dtensor.compare(self.folder, state, self._entries, [PARAMETERS.rstrip(".")])

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The parameter `name` of the model, in the shape and dtype of `like`, which needs no storage."""
        tensor = torch.empty_like(like, device="cpu", requires_grad=False)
        state = {self._entries[key].name: part for key, part in self._parts(name, tensor).items()}
        dcp.load(state, storage_reader=self._reader, no_dist=True)
        return tensor

    def _parts(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Stored name -> part of the tensor: a gated linear_fc1 is stored as its two halves."""
        key = PARAMETERS + dtensor.canonical(name)
        if f"{key}_w" in self._entries:
            return dict(zip((f"{key}_w", f"{key}_v"), tensor.chunk(2)))
        return {key: tensor}
