"""Everything that lets CUDA-only Megatron code run on CPU with gloo. Nothing else in the package asks "if cpu".

Megatron-Core and Megatron-FSDP compute with ordinary torch operators; what ties them to CUDA is small: streams and
events, literal `device="cuda"`, the CUDA random state, `DeviceMesh(device_type="cuda")`, coalesced asynchronous
collectives, and what gloo lacks. `install()` replaces these; it must run before anything of megatron is imported.
`patch_megatron()` finishes the work on the modules once they are imported. On a machine with a GPU neither is called.

Sources (megatron-core 0.19.2): core/distributed/fsdp/mcore_fsdp_adapter.py, core/distributed/fsdp/src/megatron_fsdp/
{megatron_fsdp,param_and_grad_buffer,uneven_dtensor}.py, core/tensor_parallel/{random,mappings}.py,
core/optimizer/clip_grads.py, core/transformer/moe/token_dispatcher.py.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_mode: TorchFunctionMode | None = None


class _Event:
    """A finished event, and a finished collective's handle."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def synchronize(self):
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """The one stream that there is."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class _CurrentDevice(str):
    """What torch.cuda.current_device() returns: a device for `device=`, and the number 0 in f"cuda:{...}".

    Needed beside the mode below, because autograd runs backward functions with the mode stack empty.
    """

    def __format__(self, spec: str) -> str:
        return "0"


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every tensor that asks for a CUDA device to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "record_stream":
            return None
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name == "to" and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def install() -> None:
    """Make `torch.cuda`'s bookkeeping harmless and "cuda" mean "cpu". Call once, before megatron is imported."""
    global _mode
    if _mode is not None:
        return
    assert not torch.cuda.is_available(), "engine.cpu is for machines without a visible GPU"
    stream = _Stream()
    cuda = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda s: contextlib.nullcontext(s)
    cuda.current_device = lambda: _CurrentDevice("cpu")
    cuda.device_count = lambda: 0
    for name in ("set_device", "set_stream", "synchronize", "empty_cache", "_lazy_init", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # torch.manual_seed would come back here through torch.cuda.manual_seed_all.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: None
    cuda.nvtx.range_push = lambda *args: None
    cuda.nvtx.range_pop = lambda *args: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    _mode = _CudaMeansCpu()
    _mode.__enter__()


def patch_megatron() -> None:
    """Replace what is bound inside megatron's modules. Call after they are imported, before a model is built."""
    assert _mode is not None, "install() comes first"
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as buffers
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    if getattr(adapter, "_mfsdp_cpu", False):
        return
    adapter._mfsdp_cpu = True
    mcore_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    adapter.DeviceMesh = _CpuMesh
    _default_to_cpu(adapter.FullyShardedDataParallel)
    buffers._coalescing_manager = _one_by_one
    dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    _patch_collectives()


class _CpuMesh:
    """Stands for torch's DeviceMesh inside the FSDP adapter, which hard-codes device_type="cuda"."""

    @staticmethod
    def from_group(groups, device_type, **kwargs):
        return dist.DeviceMesh.from_group(groups, "cpu", **kwargs)


def _default_to_cpu(wrapper: type) -> None:
    original = wrapper.__init__

    def __init__(self, *args, **kwargs):
        kwargs["device"] = torch.device("cpu")
        original(self, *args, **kwargs)

    wrapper.__init__ = __init__


@contextlib.contextmanager
def _one_by_one(group=None, device=None, async_ops=False):
    """For torch's coalescing manager: gloo would return before the buffers are filled, and they are freed meanwhile."""
    yield _Event()


def _as_numpy(tensor, as_numpy=False, record_stream=False):
    """maybe_move_tensor_to_cpu of moe_utils.py, which converts CUDA tensors only; all_to_all wants plain numbers."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_collectives() -> None:
    """What gloo lacks: AVG, uneven all_gather, and asynchronous calls whose buffers may be freed before the wait."""
    reduce_scatter, all_gather, all_reduce = dist.reduce_scatter_tensor, dist.all_gather, dist.all_reduce
    all_gather_into = dist.all_gather_into_tensor

    def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        average = op == dist.ReduceOp.AVG
        # Megatron-FSDP reduces into a slice of the input; gloo needs two buffers.
        result = torch.empty_like(output)
        reduce_scatter(result, input, op=dist.ReduceOp.SUM if average else op, group=group)
        output.copy_(result / dist.get_world_size(group) if average else result)
        return _Event() if async_op else None

    def all_reduce_sync(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        average = op == dist.ReduceOp.AVG
        all_reduce(tensor, op=dist.ReduceOp.SUM if average else op, group=group)
        if average:
            tensor.div_(dist.get_world_size(group))
        return _Event() if async_op else None

    def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
        all_gather_into(output_tensor, input_tensor, group=group)
        return _Event() if async_op else None

    def all_gather_uneven(tensor_list, tensor, group=None, async_op=False):
        longest = max(t.numel() for t in tensor_list)
        if all(t.numel() == longest for t in tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor.reshape(-1)
        parts = [torch.empty_like(padded) for _ in tensor_list]
        all_gather(parts, padded, group=group)
        for target, part in zip(tensor_list, parts):
            target.reshape(-1).copy_(part[: target.numel()])
        return _Event() if async_op else None

    dist.reduce_scatter_tensor = reduce_scatter_tensor
    dist.all_reduce = all_reduce_sync
    dist.all_gather_into_tensor = all_gather_into_tensor
    dist.all_gather = all_gather_uneven
