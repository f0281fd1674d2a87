"""Tests that need an NVIDIA GPU: `scripts/test.sh tests/gpu`, or `python -m pytest tests/gpu` where the packages are there already.

Skipped without one. MFSDP_GPU_TESTS_ON_CPU=1 runs what has a meaning on the CPU there, in smaller sizes, to try out the tests themselves.
The pytest process never touches the GPU: everything happens in processes of its own (`gpu_processes`) and through the command.
"""

from __future__ import annotations

import pytest
from gpu_processes import ON_CPU, SMALL, Ranks, gpus

NOT_INHERITED = ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS")  # tests/conftest.py sets them for the CPU


@pytest.fixture(scope="package", autouse=True)
def device():
    """ "cuda" or "cpu"; and the environment that the processes inherit."""
    if not gpus() and not ON_CPU:
        pytest.skip("no NVIDIA GPU is visible (MFSDP_GPU_TESTS_ON_CPU=1 tries the tests' logic on the CPU)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("HF_HUB_OFFLINE", "1")
        if ON_CPU:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        else:
            patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
            for name in NOT_INHERITED:
                patch.delenv(name, raising=False)
        yield "cpu" if ON_CPU else "cuda"


@pytest.fixture(scope="package")
def one_rank(device):
    """A process that is a group of one rank, for all tests that take it: torch and Megatron are imported once."""
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """Folder of a Qwen2 model with random weights and a tokenizer: heads of 64, four layers, big enough for rounding to add up."""
    from make_tiny_model import make_tiny_model

    large = dict(vocab_size=4096, hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=2, intermediate_size=1408)
    sizes = dict(vocab_size=512) if SMALL else large
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen2", **sizes)


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
