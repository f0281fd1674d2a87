"""Proves an export by running it: log-probabilities of a fixed sequence by the Megatron model on the checkpoint's shards, and by
transformers on the written files.

Neither model is ever whole in memory. Both are built on the meta device, and each layer gets its weights just before it runs and
loses them after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mfsdp_cli.checkpoint.hf_folder import read_hf
from mfsdp_cli.checkpoint.stored_weights import StoredWeights
from mfsdp_cli.engine import forward
from mfsdp_cli.types import PackedBatch

CHECK_TOKENS = 48
# Mean difference of log-probabilities between Megatron's model and transformers' on the same weights; a weight in the
# wrong place moves it by tenths and more.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def check_ids(vocab_size: int) -> torch.Tensor:
    return (torch.arange(CHECK_TOKENS) * 7919 + 11) % vocab_size


@torch.no_grad()
def megatron_log_probs(model: torch.nn.Module, stored: StoredWeights, vocab_size: int) -> torch.Tensor:
    """float32 [CHECK_TOKENS - 1] of a hollow model (`engine.megatron.hollow_model`) with the stored weights."""
    def fill(prefix: str, module: torch.nn.Module) -> None:
        for name, param in list(module.named_parameters()):
            _set(module, name, stored.read(f"{prefix}.{name}", param))

    by_layer(model, fill)
    embedding = model.embedding.word_embeddings
    if model.share_embeddings_and_output_weights:
        # the model hands over its embedding, which has lost its weights by then
        def with_weight(module, args, kwargs):
            return args, kwargs | {"weight": stored.read("embedding.word_embeddings.weight", embedding.weight)}

        model.output_layer.register_forward_pre_hook(with_weight, with_kwargs=True)
    ids = check_ids(vocab_size)
    places = torch.arange(len(ids))
    batch = PackedBatch(
        input_ids=ids, labels=ids.roll(-1), target_mask=(places < len(ids) - 1).float(), targets=places[:-1], position_ids=places,
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32), max_seqlen=len(ids), num_real_tokens=len(ids),
    )
    return forward.log_probs(model.eval(), batch, vocab_size)[0][:-1].float()


@torch.no_grad()
def transformers_log_probs(folder: Path) -> torch.Tensor:
    """float32 [CHECK_TOKENS - 1] of the model in a Hugging Face folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    for module in model.modules():
        if module._non_persistent_buffers_set:  # rotary frequencies: from the configuration, not the files
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)
    by_layer(model, _filler(model, folder))
    ids = check_ids(config.vocab_size)
    return torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1].float(), -1).gather(-1, ids[1:, None])[:, 0]


def _filler(model, folder: Path) -> Callable[[str, torch.nn.Module], None]:
    """Loads a layer as from_pretrained loads the whole model, with the same renaming and stacking of tensors."""
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    files = {tensor.name: tensor.files[0] for tensor in read_hf(folder).tensors}
    tied = {} if "lm_head.weight" in files else {"lm_head": "model.embed_tokens"}
    how = LoadStateDictConfig(dtype=model.dtype, weight_mapping=get_model_conversion_mapping(model))

    def fill(prefix: str, module: torch.nn.Module) -> None:
        source = tied.get(prefix, prefix)
        names = [name for name in files if name.startswith(f"{source}.")]
        readers = {file: safe_open(folder / file, "pt") for file in {files[name] for name in names}}
        tensors = {prefix + name.removeprefix(source): readers[files[name]].get_slice(name) for name in names}
        convert_and_load_state_dict_in_model(model, tensors, how, tp_plan=None)

    return fill


def by_layer(model: torch.nn.Module, fill: Callable[[str, torch.nn.Module], None]) -> None:
    """Have `fill(name, module)` called before a layer's forward pass; after it, its parameters lose their storage."""
    def drop(module, *_) -> None:
        for name, param in list(module.named_parameters()):
            _set(module, name, torch.empty_like(param, device="meta"))

    for name, module in list(layers(model)):
        module.register_forward_pre_hook(lambda module, _, name=name: fill(name, module))
        module.register_forward_hook(drop)


def layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, module) of what has parameters: the layers of a list as a whole, and outside of lists each module by itself."""
    seen: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in seen):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, torch.nn.ModuleList) or any(True for _ in module.parameters(recurse=False)):
            seen.append(name)
            yield name, module


def _set(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)


def limit(folder: Path, dtype: torch.dtype) -> float:
    """Largest mean difference that rounding explains, for the dtypes in the folder and of the computation."""
    dtypes = {t.dtype for t in read_hf(folder).tensors} | {str(dtype).removeprefix("torch.")}
    return TOLERANCE["float32" if dtypes == {"float32"} else "bfloat16"]
