"""Megatron-Bridge, imported without TransformerEngine when there is none, and what goes through it: the model's
configuration and weights in, weights out.

Import order matters: megatron.core must decide whether TransformerEngine is there before a stand-in for it exists (`lean`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mfsdp_cli.engine import cpu, lean
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    cpu.install()

# These decide "is TransformerEngine there?" at import, and must be asked before the stand-in exists.
with lean.compiled_when_called():
    import megatron.core.distributed
    import megatron.core.extensions.transformer_engine as _te_extension
    import megatron.core.models.backends
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer

HAVE_TRANSFORMER_ENGINE = bool(_te_extension.HAVE_TE)


def _import_auto_bridge():
    lean.empty_packages()
    with lean.stand_ins(HAVE_TRANSFORMER_ENGINE):
        import megatron.bridge.peft.lora
        import megatron.bridge.peft.utils
        from megatron.bridge.models.conversion import param_mapping
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    # Both are asked for every tensor of an export, and took half of its time: a module of ModelOpt, which no model here has (the question
    # imports modelopt, or fails to), and a copy of the configuration for a broadcast over pipeline stages, of which there is one.
    param_mapping.is_modelopt_dynamic_module = lambda module: False
    param_mapping.remove_non_pickleables = lambda config, max_depth: config
    if not HAVE_TRANSFORMER_ENGINE:
        # Bridge asks these when it looks for adapters during an export.
        for module in (megatron.bridge.peft.lora, megatron.bridge.peft.utils):
            for flag in [n for n in vars(module) if n.startswith("HAVE_TE")]:
                setattr(module, flag, False)
    return AutoBridge


AutoBridge = _import_auto_bridge()
if ON_CPU:
    cpu.patch_megatron()

from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata  # noqa: E402


def open_model(path: str, trust_remote_code: bool = False, with_weights: bool = True) -> AutoBridge:
    """The bridge of one Hugging Face folder or hub id. Reads config.json; weights are read when asked for. Without weights
    the folder need not have any, and the bridge's `hf_pretrained` is the configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    lean.import_family((config.architectures or [None])[0], HAVE_TRANSFORMER_ENGINE)
    return AutoBridge.from_hf_pretrained(path, trust_remote_code=trust_remote_code) if with_weights else AutoBridge.from_hf_config(config)


def config_of(bridge: AutoBridge):
    """The model's configuration in transformers' class."""
    return getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)


def load_hf_weights(bridge: AutoBridge, model: list) -> None:
    """Copy the source model's weights into `model` (unwrapped, or wrapped and not yet run). Collective.

    Raises MfsdpError on every rank rather than load in part. Bridge only warns about a parameter without a source tensor,
    says nothing of a source tensor that no parameter takes (model_bridge.py, build_conversion_tasks), and copies what has
    another shape as long as it is not too short, so names and shapes are compared here.
    """
    from megatron.core.utils import unwrap_model

    tasks = conversion_tasks(bridge, model)
    built = {bare_name(name) for chunk in unwrap_model(model) for name, _ in chunk.named_parameters()}
    assert built <= {bare_name(t.param_name) for t in tasks}, "Bridge does not know all of the model's parameters"
    shapes = source_shapes(bridge)
    everywhere: list = [None] * dist.get_world_size()
    # each expert-parallel rank knows its own experts
    dist.all_gather_object(everywhere, ({h for t in tasks for h in _sources(t)}, _misfits(bridge, tasks, shapes)))
    needed = set().union(*(part[0] for part in everywhere))
    problems = {f"{name} is missing": "the model needs it" for name in needed - shapes.keys()}
    problems |= {f"{name} is superfluous": "no parameter of the model takes it" for name in shapes.keys() - needed
                 if not _is_tied_copy(bridge, name) and not name.endswith("rotary_emb.inv_freq")}
    problems |= {found: why for part in everywhere for found, why in part[1].items()}
    if problems:
        raise MfsdpError([Problem(str(bridge.hf_pretrained.model_name_or_path), found, why, "use a folder whose weights belong to its config.json",
                                  code=BAD_INPUT) for found, why in sorted(problems.items())])
    bridge.load_hf_weights(model)


def source_shapes(bridge: AutoBridge) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape in the source model's safetensors files. Reads their headers only."""
    from safetensors import safe_open

    source, shapes = bridge.hf_pretrained.state.source, {}
    names = set(source.get_all_keys())  # of the index, when there is one
    for file in sorted(source.path.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            shapes |= {name: tuple(reader.get_slice(name).get_shape()) for name in names.intersection(reader.keys())}
    return shapes


def _sources(task) -> list[str]:
    hf_param = task.mapping.hf_param
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())


def _misfits(bridge: AutoBridge, tasks: list, shapes: dict) -> dict[str, str]:
    """Source tensors that do not make up, one above the other, the parameter they are for, split over ranks or not."""
    problems = {}
    for task in tasks:
        parts = [(name, shapes[name]) for name in _sources(task) if name in shapes]
        if task.megatron_module is None or len(parts) < len(_sources(task)):
            continue
        whole = list(task.param_weight.shape)
        config = task.megatron_module.config
        if task.param_name.endswith(("word_embeddings.weight", "output_layer.weight")):  # split over ranks, and padded
            allowed = [[bridge.hf_pretrained.config.vocab_size, *whole[1:]]]
        else:
            splits = {1, config.tensor_model_parallel_size, config.expert_tensor_parallel_size}
            allowed = [[n * (split if axis == i else 1) for i, n in enumerate(whole)] for split in splits for axis in range(len(whole))]
        if [sum(shape[0] for _, shape in parts), *parts[0][1][1:]] not in allowed or len({shape[1:] for _, shape in parts}) > 1:
            found = ", ".join(f"{name} is {list(shape)}" for name, shape in parts)
            problems[found] = f"by config.json one rank's part of it is {whole}"
    return problems


def bare_name(name: str) -> str:
    """A parameter's name without its wrappers: Megatron-FSDP adds one "module.", Float16Module another."""
    return re.sub(r"^(module\.)+", "", name)


def _is_tied_copy(bridge: AutoBridge, name: str) -> bool:
    return name == "lm_head.weight" and bool(getattr(bridge.hf_pretrained.config, "tie_word_embeddings", False))


def conversion_tasks(bridge: AutoBridge, model: list) -> list:
    """Bridge's steps from Megatron's parameters to Hugging Face tensors, in its order; `param_name` and `param_weight` tell the
    parameter. Collective."""
    from megatron.core.utils import unwrap_model

    return [t for t in bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, unwrap_model(model)) if t is not None]


def whole_tasks(tasks: Iterable, dtype: torch.dtype) -> Iterator:
    """Steps of `conversion_tasks`, each with its parameter whole on this rank and in `dtype`, when its turn comes. Collective."""
    for task in tasks:
        yield replace(task, param_weight=whole(task.param_weight, dtype))


def whole(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a parameter, gathered over the ranks that Megatron-FSDP has split it over. Collective.

    As megatron_fsdp/uneven_dtensor.py, uneven_dtensor_to_full_tensor, which Bridge calls; but ranks tell each other what they hold once, not
    at every export (pickled, with several waits for the GPU a tensor), and gather in `dtype`, not in the float32 of the main weights."""
    if not isinstance(weight, DTensor):
        return weight.detach().to(dtype, copy=True)
    part = weight.to_local().detach()
    chunks, flat = _chunks(weight), part.to(dtype, copy=True).flatten()
    for mesh_dim, placement in enumerate(weight.placements):
        group = weight.device_mesh.get_group(mesh_dim)
        if isinstance(placement, (Shard, _StridedShard)) and group.size() > 1:
            parts = [flat.new_empty(size) for size in chunks.sizes[mesh_dim]]
            dist.all_gather(parts, flat, group=group)
            flat = torch.cat(parts)
    if len(chunks.places) == 1:
        return flat.view(weight.shape)
    full = flat.new_empty(weight.shape)
    for (offset, shape), chunk in zip(chunks.places, flat.split([math.prod(shape) for _, shape in chunks.places]), strict=True):
        full[tuple(slice(o, o + n) for o, n in zip(offset, shape))] = chunk.view(shape)
    return full


class _Chunks(NamedTuple):
    """sizes: elements that each rank of a mesh dimension's group brings; places: (offset, shape) of all chunks in the order gathered."""

    sizes: dict[int, list[int]]
    places: list[tuple[tuple[int, ...], tuple[int, ...]]]


def _chunks(weight: DTensor) -> _Chunks:
    """Collective at the first call for a parameter, whose layout never changes."""
    known = getattr(weight, "_mfsdp_chunks", None)
    if known is None:
        if not hasattr(weight._local_tensor, "__create_chunk_list__"):
            update_uneven_dtensor_chunk_metadata(weight)
        [mine] = weight.__create_chunk_list__()
        sizes, places = {}, [(tuple(mine.offsets), tuple(mine.sizes))]
        for mesh_dim, placement in enumerate(weight.placements):
            assert isinstance(placement, (Shard, _StridedShard, Replicate)), placement
            group = weight.device_mesh.get_group(mesh_dim)
            if not isinstance(placement, Replicate) and group.size() > 1:
                told: list = [None] * group.size()
                dist.all_gather_object(told, places, group=group)
                sizes[mesh_dim] = [sum(math.prod(shape) for _, shape in part) for part in told]
                places = [place for part in told for place in part]
        known = weight._mfsdp_chunks = _Chunks(sizes, places)
    return known


def export_weights(bridge: AutoBridge, model: list, vocab_size: int, tasks: Iterable, on_cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (Hugging Face name, full tensor, on CPU or where the model is), padding rows of the vocabulary cut off. Collective: every rank
    must iterate to the end. `tasks`: those of `conversion_tasks`, one taken at a time, with the parameters whole.
    """
    steps = bridge.export_hf_weights(model, cpu=on_cpu, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False)
    for name, tensor in steps:
        if name in ("model.embed_tokens.weight", "lm_head.weight") and tensor.shape[0] > vocab_size:
            tensor = tensor[:vocab_size]
        yield name, tensor.contiguous()
