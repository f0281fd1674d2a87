"""What depends on the step alone, as pure functions: nothing to save, so a resume cannot get it wrong."""

from __future__ import annotations

import math

from mfsdp_cli.config.schema import OptimSettings
from mfsdp_cli.launch.plan import warmup_steps


def learning_rate(optim: OptimSettings, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Rises linearly from lr_warmup_init to reach lr at the last warm-up step, then falls to reach min_lr at total_steps;
    cosine: min_lr + (lr - min_lr) * (1 + cos(pi * progress)) / 2, as in megatron/core/optimizer_param_scheduler.py, which
    counts from 0 and so spends its first step at lr_warmup_init.
    """
    assert 1 <= step <= total_steps, (step, total_steps)
    warmup = warmup_steps(optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, total_steps)
    if step <= warmup:
        return optim.lr_warmup_init + (optim.lr - optim.lr_warmup_init) * step / warmup
    progress = (step - warmup) / (total_steps - warmup)
    share = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}[optim.lr_decay_style]
    return optim.min_lr + (optim.lr - optim.min_lr) * share


def due(step: int, freq: int) -> bool:
    """Whether something done every `freq` steps falls on this one; -1: never."""
    return freq > 0 and step % freq == 0
