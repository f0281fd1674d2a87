"""Megatron is imported once, before the first fork; tiny models are made once each."""

from __future__ import annotations

import gc

import pytest

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # as the launcher sets it; its threads would not survive a fork
    "CUDA_VISIBLE_DEVICES": "",  # these tests run over gloo on any machine
}


@pytest.fixture(scope="package", autouse=True)
def megatron():
    """Taken back after this folder's tests: those of tests/unit show nvidia-smis of their own to the program."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import mfsdp_cli.engine.megatron  # noqa: F401

        gc.collect()
        gc.freeze()  # else every forked rank's garbage collection would copy the pages of all that was imported
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny("qwen2") -> folder of a model named in models.FAMILIES; keywords go to make_tiny_model."""
    from models import FAMILIES
    from make_tiny_model import make_tiny_model

    made: dict = {}

    def get(name: str = "qwen2", **options):
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp("model") / name, **FAMILIES[name], **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """Folder with train.parquet, 64 sums and differences for reinforcement learning, and test.parquet, 8 of them."""
    from program import mfsdp

    folder = tmp_path_factory.mktemp("prompts")
    code, _, err = mfsdp("prep-data", "arithmetic", "--for", "rl", "-o", folder, "--rows", 64, "--test-rows", 8)
    assert code == 0, err
    return folder
