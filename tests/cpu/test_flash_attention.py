"""Which attention is taken where: FlashAttention 4 is chosen by what is installed, the GPU and the size; its numbers are in tests/gpu."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
from ranks import run_ranks

WORKS = "def flash_attn_varlen_func(q, k, v, **options):\n    return v.repeat_interleave(q.shape[1] // v.shape[1], 1), options"
PACKAGES = {
    "none": {},
    "flash-attn 2": {"flash_attn/__init__.py": ""},
    "flash-attn 2 that is broken": {"flash_attn/__init__.py": "import no_such_extension"},
    "flash-attn-4": {"flash_attn/cute/__init__.py": WORKS},
    "flash-attn-4 without cutlass": {"flash_attn/cute/__init__.py": "import no_such_cutlass"},
}


def choice(folder, capability: int) -> tuple[bool, list[str]]:
    import torch

    import mfsdp_cli.engine.megatron  # noqa: F401  (decides how megatron is imported)
    from mfsdp_cli.engine.attention import flash_attention_4

    torch.cuda.get_device_capability = lambda device: (capability, 0)
    sys.path.insert(0, str(folder))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = flash_attention_4(torch.device("cuda"))
    return found is not None, [str(w.message) for w in told]


@pytest.mark.parametrize("installed", PACKAGES)
def test_what_is_installed_and_the_gpu_decide(tmp_path, installed):
    for name, text in PACKAGES[installed].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for capability in (8, 9, 10, 12):
        [(found, told)] = run_ranks(1, choice, tmp_path, capability)
        written_for = capability in (9, 10)
        assert found == (installed == "flash-attn-4" and written_for)
        assert [("no_such" in text and "slower" in text) for text in told] == [True] * (written_for and any("no_such" in t for t in PACKAGES[installed].values()))


def calls_by_size() -> dict[tuple, bool]:
    """(tokens, heads, dimensions of a head, longest sequence) -> whether FlashAttention 4 is asked. Nothing is computed: the tensors are empty
    views of that size."""
    import torch

    import mfsdp_cli.engine.megatron  # noqa: F401
    from mfsdp_cli.engine import attention

    asked: list = []

    def four(q, k, v, **options):
        asked.append(options)
        return (q,)

    attention.flash_attention_4 = lambda device: four
    attention._FlashAttention = SimpleNamespace(apply=lambda q, *rest: q)
    config = SimpleNamespace(context_parallel_size=1, attention_dropout=0.0, window_size=None, rotary_interleaved=False)
    found = {}
    for size in ((16384, 12, 128, 2048), (16384, 12, 128, 620), (16384, 12, 128, 210), (2432, 12, 128, 1025), (16384, 14, 64, 2048), (16384, 12, 96, 2048)):
        tokens, heads, d, longest = size
        q = torch.empty(1, device="meta", dtype=torch.bfloat16).expand(tokens, heads, d)
        asked.clear()
        attention.PackedAttention(config, 1, None, None, softmax_scale=0.1)._varlen(q, q, q, SimpleNamespace(cu_seqlens_q=None, max_seqlen_q=longest))
        found[size] = bool(asked)
        assert all(options["causal"] and options["softmax_scale"] == 0.1 and options["max_seqlen_q"] == longest for options in asked)
    return found


def test_flash_attention_4_is_taken_where_it_pays():
    """Where it was the faster one on an H200 (docs/performance.md), and for heads that tests/gpu covers."""
    [found] = run_ranks(1, calls_by_size)
    assert list(found.values()) == [True, True, False, False, True, False]
