"""An update of GRPO is queued without waiting for the GPU, as torch itself tells it (`torch.cuda.set_sync_debug_mode`).

tests/cpu/test_grpo_update.py asks the same of the operators; copies from pageable memory, which wait too, are only seen here."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from gpu_processes import ON_CPU
from test_gpu_numerics import engine_of, where

from mfsdp_cli.config.schema import OptimSettings
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.types import Experience, Sample

LENGTHS = (40, 300, 77, 512, 20, 130)


def waits_of_update(model) -> dict[str, list[str]]:
    """Where an update and a pass for log-probabilities waited, in their third run, once all sizes are compiled."""
    import torch

    from mfsdp_cli.train.ranks import TrainerRank

    settings = GrpoSettings()
    settings.actor.ppo_max_token_len_per_gpu = 600
    settings.data.max_response_length = max(LENGTHS)
    rank = TrainerRank(settings, None, 0, 1, 0)
    rank.device, rank.policy = where(), engine_of(model, "local", OptimSettings())
    random, batch = np.random.default_rng(0), []
    for row, length in enumerate(LENGTHS):
        logs = np.full(length - 8, -8.0, dtype=np.float32)
        sample = Sample(random.integers(0, 500, length), np.arange(length) >= 8, row)
        batch.append(Experience(sample, np.ones(length - 8, bool), logs, 1.0 - row % 3, logs, logs))
    calls = {"update": lambda: rank.update(batch, range(len(batch)), 1e-6), "log_probs": lambda: rank.log_probs([e.sample for e in batch], False)}
    return {name: waits(call, torch.cuda.set_sync_debug_mode) for name, call in calls.items()}


def waits(call, set_mode) -> list[str]:
    """Of torch's warnings those of a wait; another one says, when the mode is set, that it is a prototype."""
    call(), call()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            call()
        finally:
            set_mode("default")
    return [f"{w.filename}:{w.lineno} {w.message}" for w in caught if "called a synchronizing" in str(w.message)]


def test_an_update_and_a_pass_for_log_probs_wait_once(one_rank, model):
    if ON_CPU:
        pytest.skip("nothing waits on the CPU")
    [found] = one_rank.run(waits_of_update, model)
    for name, places in found.items():
        print(f"{name} waits at", *places, sep="\n  ")
        assert len(places) == 1 and "train/ranks.py" in places[0], (name, places)
