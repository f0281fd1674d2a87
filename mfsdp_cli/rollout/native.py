"""The trainer's side of vLLM's own weight transfer (0.24, vllm/distributed/weight_transfer): weights go from GPU to GPU.

    ipc   engines on the trainer's GPUs: every rank fills a buffer on its GPU and tells the engine's worker there its CUDA IPC handle
    nccl  engines on GPUs of their own: the trainer's rank 0 broadcasts to all their workers, in a group of its own

The engine's side is `VllmSampler.open_transfer`, `begin_update`, `receive`, `end_update`. vLLM is imported inside, since it costs seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Stream = Iterator[tuple[str, "torch.Tensor"]]  # (Hugging Face name, full tensor on this rank's GPU)


def send_ipc(named_weights: Stream, send: Callable[[dict], None]) -> None:
    """Collective over the trainer. `send` is called on rank 0, once for each buffer of 1 GiB, with what `VllmSampler.receive` wants, and must
    return only when every engine has taken its weights out: the buffer is used again."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    IPCWeightTransferEngine.trainer_send_weights(named_weights, {"send_mode": lambda info: send(asdict(info)), "packed": True})


def open_nccl(address: str, port: int, world_size: int):
    """The trainer's place, rank 0, in a group with all engine workers. Returns when the last has joined."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    return NCCLWeightTransferEngine.trainer_init({"master_address": address, "master_port": port, "world_size": world_size})


def send_nccl(named_weights: Stream, group) -> None:
    """On the rank that holds `group`, while every engine is in `receive` with `update_info` of the same stream."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    NCCLWeightTransferEngine.trainer_send_weights(named_weights, {"group": group, "packed": True})


def layout_of(named_weights: Stream) -> dict:
    """What `VllmSampler.receive` must know before an NCCL broadcast: the stream's names, dtypes and shapes, in its order."""
    found = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named_weights]
    names, dtype_names, shapes = (list(column) for column in zip(*found))
    return {"names": names, "dtype_names": dtype_names, "shapes": shapes, "packed": True}
