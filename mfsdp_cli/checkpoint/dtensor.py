"""Save and load a sharded model and optimizer as a torch.distributed.checkpoint (DCP) of DTensors, strictly.

The names in a checkpoint do not depend on the layout that wrote it: wrapper prefixes are cut off, experts carry their
global number, TransformerEngine's fused norms have the names of the unfused ones, and a gated linear_fc1 is stored as its
two halves (`_w` gate, `_v` up; megatron core/transformer/fsdp_dtensor_checkpoint.py) so that tensor parallelism can
change. Only tensors are stored, never pickled objects:

    model.<name>                                    float32 main weights
    optimizer.state.<name>.{exp_avg, exp_avg_sq}    Adam's moments; hyper-parameters are the configuration's, not the file's
    optimizer.num_updates                           steps of the optimizer, for Adam's bias correction
    rng.<rank>.<generator>                          random states, restored when the layout is the same
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from mfsdp_cli.checkpoint.dcp_metadata import TensorEntry, read_dcp
from mfsdp_cli.checkpoint.storage import Reader, Writer, num_threads
from mfsdp_cli.engine.bridge import bare_name
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

_SHARDS: WeakKeyDictionary = WeakKeyDictionary()
MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNMENT = 64  # bytes
UPDATES = "optimizer.num_updates"
_TE_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_"), "input_layernorm."),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_"), "pre_mlp_layernorm."),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)"), r"mlp.experts.local_experts.\2.\1.weight"),
)


def save(engine, folder: str | Path, contents: list[str]) -> None:
    """Write the parts of `engine` named in `contents` into `folder`, and flush them to the disk. Collective."""
    write(collect(engine, contents), folder)


def write(state: dict[str, torch.Tensor], folder: str | Path, group=None) -> tuple[int, dict[str, dict]]:
    """Write what `collect` or `copied` gave. Collective, in `group`. Returns the number of tensors, and size and CRC-32 of every
    file by name, of all ranks."""
    writer = Writer(folder, num_threads())
    dcp.save(state, storage_writer=writer, process_group=group)
    done: list = [None] * dist.get_world_size()
    dist.all_gather_object(done, (list(state), writer.files), group=group)
    return len(set().union(*(names for names, _ in done))), {name: entry for _, files in done for name, entry in files.items()}


def load(engine, folder: str | Path, contents: list[str]) -> list[Problem]:
    """Fill `engine` from `folder`. Collective. Returns notes on what was not restored.

    Raises MfsdpError when a tensor is missing, superfluous or of another shape: nothing is loaded in part. (DCP and
    Megatron skip what is missing; Megatron forces strict=False for gated models.)"""
    stored = stored_tensors(folder)
    state = collect(engine, contents)
    notes = _settle_rng(state, stored)
    read_into(state, folder, stored, contents)
    engine.module.module.install_optimized_model_weights()
    engine.module.synchronize_param_gather()  # an evaluation before this gathered weights that the next one would use again
    if "optimizer" in contents:
        engine.set_num_updates(int(state[UPDATES]))
    if "extra" in contents:
        _set_rng({k.split(".", 2)[2]: v for k, v in state.items() if k.startswith("rng.")})
    return notes


# ---------------------------------------------------------------- names

def canonical(name: str) -> str:
    """The checkpoint's name of a parameter: without wrappers, with the unfused layers' names."""
    name = bare_name(name)
    for pattern, plain in _TE_NAMES:
        name = pattern.sub(plain, name)
    return name


class _Parameters:
    """What megatron's handle_swiglu_in_state_dict needs of a model, whatever wrappers are around it.

    The function looks parameters up one "module." deeper than they are when no Float16Module is there (float32)."""

    def __init__(self, model: torch.nn.Module):
        from megatron.core.utils import get_model_config

        self.config = get_model_config(model)
        self.named_modules = model.named_modules
        self._parameters = {bare_name(name): param for name, param in model.named_parameters()}

    def get_parameter(self, name: str):
        return self._parameters[bare_name(name)]


# ---------------------------------------------------------------- the tensors of this rank

def collect(engine, contents: list[str]) -> dict[str, torch.Tensor]:
    """name -> DTensor that shares memory with the engine; loading into it loads the engine. Collective."""
    from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_experts_in_state_dict, handle_swiglu_in_state_dict

    model = engine.module.module
    weights = {bare_name(k): v for k, v in engine.module.state_dict_for_save_checkpoint().items() if isinstance(v, DTensor)}
    moments = None
    if "optimizer" in contents:
        # the names that the optimizer gives its parameters: wrapped once more, experts numbered globally
        moments = {"state": {f"module.{bare_name(n)}": entry for n, entry in engine.optimizer_state().items()}}
    weights, moments = handle_swiglu_in_state_dict(_Parameters(model), weights, moments)
    weights = handle_experts_in_state_dict(weights, engine.module.config.num_moe_experts)
    weights = {canonical(name): tensor for name, tensor in weights.items()}
    shards = _shards(engine, weights)
    state: dict[str, torch.Tensor] = {}
    if "model" in contents:
        state |= {f"model.{name}": _placed(tensor, shards[name]) for name, tensor in weights.items()}
    if moments is not None:
        for name, entry in moments["state"].items():
            name = canonical(name)
            state |= {f"optimizer.state.{name}.{moment}": _placed(entry[moment], shards[name]) for moment in MOMENTS}
        state[UPDATES] = torch.tensor(engine.num_updates)
    if "extra" in contents:
        state |= {f"rng.{dist.get_rank():05d}.{k}": v for k, v in _rng().items()}
    return state


def copied(state: dict[str, torch.Tensor], buffer: torch.Tensor | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A copy of `state` in host memory, which what is trained next does not touch, and that memory: to be given again as `buffer`,
    for the next copy to write over."""
    parts = {name: tensor._local_tensor if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    ends = list(itertools.accumulate(-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts.values()))
    buffer = _host_memory(ends[-1]) if buffer is None else buffer
    assert len(buffer) == ends[-1], "what is saved has the same size each time"
    copies: dict[str, torch.Tensor] = {}
    for (name, part), start in zip(parts.items(), [0, *ends]):
        place = buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)
        copies[name] = place.copy_(part.detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            copies[name] = _placed(DTensor(copies[name], tensor._spec, requires_grad=False), _shard(tensor))
    return copies, buffer


def _host_memory(num_bytes: int) -> torch.Tensor:
    """uint8, page-locked where there are GPUs. torch's own page-locked tensors have sizes of powers of two: up to twice as much."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if torch.cuda.is_available():
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if code:
            raise MemoryError(f"{num_bytes / 2**30:.1f} GiB of host memory cannot be locked (CUDA error {code}); checkpoint.background_save=False "
                              "saves without a copy")
    return memory


def num_bytes(engine, contents: list[str]) -> int:
    """What a copy of this rank's part takes, but for the little that is not weights or moments. Collective, as `collect`."""
    weights = sum(tensor._local_tensor.nbytes for tensor in collect(engine, ["model"]).values())
    return weights * (("model" in contents) + len(MOMENTS) * ("optimizer" in contents))


def _shards(engine, weights: dict[str, DTensor]) -> dict[str, tuple]:
    """name -> how DCP is told which part of the whole tensor this rank holds: Megatron-FSDP's shards are uneven. Collective at
    an engine's first save or load: several collectives a tensor, so that of its moments, which are cut as it is, and those of
    later saves are spared."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    if engine not in _SHARDS:
        preprocess_state_dict_for_uneven_dtensor(weights)  # in the order of the names, the same on every rank
        _SHARDS[engine] = {name: _shard(tensor) for name, tensor in weights.items()}
    return _SHARDS[engine]


def _shard(tensor: DTensor) -> tuple:
    part = tensor._local_tensor  # to_local() may give another object each time
    return part.shape, part.__create_chunk_list__, part.__create_write_items__


def _placed(tensor: DTensor, shard: tuple) -> DTensor:
    part = tensor._local_tensor
    shape, part.__create_chunk_list__, part.__create_write_items__ = shard
    assert part.shape == shape, (part.shape, shape)
    return tensor


def stored_tensors(folder: str | Path) -> dict[str, TensorEntry]:
    """name -> shape and dtype of what the checkpoint holds. Raises MfsdpError for a damaged one, for one whose metadata
    would run code (torch unpickles it as it is), and for one with pickled objects in it."""
    found = read_dcp(folder)
    if found.problems:
        raise MfsdpError(list(found.problems))
    if found.objects:
        raise MfsdpError(_problem(folder, f"{len(found.objects)} pickled objects, among them {found.objects[0]}", "mfsdp stores only tensors"))
    return {t.name: t for t in found.tensors}


def read_into(state: dict[str, torch.Tensor], folder: str | Path, stored: dict[str, TensorEntry], contents: list[str]) -> None:
    """Fill the tensors of `state`, DTensors or plain ones, in place; strictly, as `load` says. Collective."""
    compare(folder, state, stored, contents)
    dcp.load(state, storage_reader=Reader(folder, num_threads()))


def compare(folder, state: dict[str, torch.Tensor], stored: dict[str, TensorEntry], contents: list[str]) -> None:
    """Raise unless the checkpoint holds exactly the tensors wanted, over all ranks, in the same shapes."""
    mine = {name: tuple(t.shape) for name, t in state.items()}
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    wanted = {name: shape for part in everywhere for name, shape in part.items()}
    relevant = tuple(f"{c}." for c in contents)
    missing = sorted(wanted.keys() - stored.keys())
    extra = sorted(n for n in stored.keys() - wanted.keys() if n.startswith(relevant))
    shapes = sorted(n for n in wanted.keys() & stored.keys() if wanted[n] != stored[n].shape)
    problems = []
    if missing:
        problems.append(_problem(folder, f"{len(missing)} tensors missing, among them {missing[0]}", "the model needs them"))
    if extra:
        problems.append(_problem(folder, f"{len(extra)} tensors too many, among them {extra[0]}", "the model has no place for them"))
    for name in shapes[:10]:
        problems.append(_problem(folder, f"{name} {list(stored[name].shape)}", f"the model wants {list(wanted[name])}"))
    if problems:
        raise MfsdpError(problems)


def _problem(folder, found: str, why: str) -> Problem:
    return Problem(str(folder), found, why, "use the model and save_contents that wrote this checkpoint", code=BAD_INPUT)


# ---------------------------------------------------------------- random states

def _rng() -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {f"tracker-{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    if not states:
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states({k.removeprefix("tracker-"): v for k, v in states.items() if k.startswith("tracker-")})


def _settle_rng(state: dict, stored: dict) -> list[Problem]:
    """Drop the random states from what is to be loaded unless the checkpoint has those of exactly these ranks."""
    mine = {n for n in state if n.startswith("rng.")}
    fits = mine <= stored.keys() and len({n.split(".")[1] for n in stored if n.startswith("rng.")}) == dist.get_world_size()
    verdicts: list = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, fits)
    if not mine or all(verdicts):
        return []
    for name in mine:
        del state[name]
    return [Problem("checkpoint.load_contents", "extra", "the checkpoint's random states belong to another number of ranks",
                    "nothing: they only matter with dropout, and the data order does not depend on them", level="note")]
