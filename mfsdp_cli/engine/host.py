"""Between host and device without waiting: copies from and to pinned memory, which are queued like kernels.

A copy from or to pageable memory waits for everything queued before it (CUDA programming guide, "API synchronization behavior")."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; its host memory may be reused at once."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class ToHost:
    """Numbers that the device may still be working out, on their way to the host behind all that is queued so far.

    numbers  float32 [n], on the device
    """

    def __init__(self, numbers: torch.Tensor):
        self._done = None
        self._values = numbers
        if numbers.is_cuda:
            self._values = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def get(self) -> list[float]:
        """Waits for them, and for nothing that was queued later."""
        if self._done is not None:
            self._done.synchronize()
        return self._values.tolist()
