"""Megatron-Core and Megatron-Bridge imported without what our models do not use: half of the CPU time of their imports.

Megatron-Core compiles 40 functions at import with torch.compile, which brings in TorchInductor; here each is compiled when it is
called first. `megatron.bridge` and `megatron.bridge.models` import every family they know, with transformers' code of each; here
these packages stay empty, only their modules are imported, and `import_family` adds the one that a model needs.

Sources: megatron-core 0.19.2 core/jit.py; megatron-bridge 0.6.2 __init__.py, models/__init__.py, peft/lora_layers.py.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PACKAGES = ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.models.llama", "megatron.bridge.models.qwen")
FAMILIES = {
    "LlamaForCausalLM": "megatron.bridge.models.llama.llama_bridge",
    "Qwen2ForCausalLM": "megatron.bridge.models.qwen.qwen2_bridge",
    "Qwen3ForCausalLM": "megatron.bridge.models.qwen.qwen3_bridge",
    "Qwen3MoeForCausalLM": "megatron.bridge.models.qwen.qwen3_moe_bridge",
}
STAND_INS = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Within the block torch.compile returns at once."""
    compile_now = torch.compile
    torch.compile = functools.partial(_compile_later, compile_now)
    try:
        yield
    finally:
        torch.compile = compile_now


def _compile_later(compile_now: Callable, function: Callable | None = None, **options) -> Callable:
    if function is None:  # a decorator with options
        return functools.partial(_compile_later, compile_now, **options)
    compiled = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal compiled
        if compiled is None:  # when torch is told to compile nothing, its compiler is not even imported
            compiled = function if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else compile_now(function, **options)
        return compiled(*args, **kwargs)

    call._torchdynamo_inline = function  # as torch.compile has it: one compiled function in another becomes part of it
    return call


def empty_packages() -> None:
    """Put Bridge's packages into sys.modules without what their __init__ imports; modules in them are found as ever."""
    import megatron  # noqa: F401

    for name in PACKAGES:
        parent, _, last = name.rpartition(".")
        spec = importlib.machinery.PathFinder.find_spec(name, sys.modules[parent].__path__)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        setattr(sys.modules[parent], last, module)


def import_family(architecture: str | None, have_transformer_engine: bool) -> None:
    """Make Bridge know an architecture, a name in config.json's "architectures"; one that is not ours by importing all that it knows."""
    with stand_ins(have_transformer_engine):
        if architecture in FAMILIES:
            importlib.import_module(FAMILIES[architecture])
        else:
            _fill_packages()


@functools.cache
def _fill_packages() -> None:
    for name in reversed(PACKAGES[1:]):  # the innermost first: models imports the others; megatron.bridge would add diffusion alone
        module = sys.modules[name]
        module.__spec__.loader.exec_module(module)


class _Absent(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        raise RuntimeError("TransformerEngine is not installed")


class _StandIn(types.ModuleType):
    """A module in which every public name is a class that cannot be built."""

    __version__ = "0.0.0"
    __path__: list = []

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or type(name, (_Absent,), {})


@contextmanager
def stand_ins(have_transformer_engine: bool) -> Iterator[None]:
    """Bridge imports `transformer_engine.pytorch` unconditionally in peft/lora_layers.py: without TransformerEngine an empty stand-in
    is in sys.modules for the length of an import."""
    names = () if have_transformer_engine else STAND_INS
    sys.modules.update({name: _StandIn(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
