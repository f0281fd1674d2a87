"""Where a program would wait for a GPU, seen on the CPU, where nothing waits.

A tensor's value asked for by the host (`float(x)`, `x.tolist()`, `if x:`), an operator whose result has a size that only the values
tell (a mask as an index, `nonzero`, `unique`), and a copy to the device (`x.to(device)`, `torch.tensor(3.0, device=device)`): only one
from pinned memory does not wait, and `engine.host` is where it is made. Asked of the operators and not of the source: Megatron counts too.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGES = ("mfsdp_cli", "megatron", "tests")
NO_WAITS = {
    ("to", "mfsdp_cli/engine/host.py", "to_device"),
    ("to", "mfsdp_cli/engine/optimizer.py", "_step"),  # torch's AdamW makes sure of a scale that is on the device already
    ("tolist", "mfsdp_cli/engine/attention.py", "_one_by_one"),  # a GPU has flash attention, and need not go through a batch sequence by sequence
    ("_local_scalar_dense", "megatron/core/tensor_parallel/random.py", "fork"),  # looks whether the CPU's random state has changed
}
TO_HOST = {"tolist", "cpu", "__repr__"}  # methods for which no operator runs on the CPU; `numpy` is none: it refuses a GPU's tensor
TO_DEVICE = {"to", "cuda", "tensor", "as_tensor", "asarray"}
OF_VALUES = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "_unique2", "unique_dim", "unique_consecutive",
             "bincount"}


class Waits:
    """Context manager; `found` gets "what at file:line in function" of every wait that is not one of `NO_WAITS`."""

    def __init__(self):
        self.found: list[str] = []

    def add(self, what: str) -> None:
        frames = [(short(frame.filename), frame) for frame in traceback.extract_stack()[:-2]]
        name, frame = [(name, frame) for name, frame in frames if name and frame.name != "__torch_function__"][-1]
        if (what, name, frame.name) not in NO_WAITS:
            self.found.append(f"{what} at {name}:{frame.lineno} in {frame.name}")

    def __enter__(self) -> Waits:
        self.modes = [_Functions(self.add), _Operators(self.add)]
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*error)


def short(path: str) -> str:
    """From the package's name on; "" for other packages' files."""
    parts = Path(path).parts
    starts = [i for i, part in enumerate(parts) if part in PACKAGES]
    return "/".join(parts[starts[-1]:]) if starts else ""


class _Functions(TorchFunctionMode):
    def __init__(self, add):
        super().__init__()
        self.add = add

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        names_device = any(isinstance(value, (torch.device, str)) for value in (*args, *kwargs.values()))
        if (name in TO_HOST and isinstance(args[0], torch.Tensor)) or (name in TO_DEVICE and names_device):
            self.add(name)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, add):
        super().__init__()
        self.add = add

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in OF_VALUES or _indexes_by_mask(name, args) or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.add(name)
        return func(*args, **kwargs)


def _indexes_by_mask(name: str, args: tuple) -> bool:
    """x[mask], and x[mask] = values; x[mask] = number is a masked_fill."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        return False
    by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return by_mask and not (name.startswith(("index_put", "_index_put")) and args[2].numel() == 1)
