"""The learning rate by hand, and the loss by hand: targets of all ranks count alike, however they are spread."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from models import Layout, build, step
from ranks import run_ranks

from mfsdp_cli.config.schema import OptimSettings
from mfsdp_cli.train.schedule import learning_rate
from mfsdp_cli.types import Sample

OPTIM = OptimSettings(lr=1.0, min_lr=0.2, lr_warmup_init=0.1, lr_warmup_steps_ratio=0.2)


def curve(total: int, **changes) -> list[float]:
    optim = replace(OPTIM, **changes)
    return [learning_rate(optim, n, total) for n in range(1, total + 1)]


@pytest.mark.parametrize("style, values", [
    # 10 steps, 2 of warm-up: 0.1 + 0.9 * 1/2, 1.0; then eighths of the way from 1.0 to 0.2
    ("linear", [0.55, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
    ("constant", [0.55] + [1.0] * 9),
    ("cosine", [0.55, 1.0, *(0.2 + 0.4 * (1 + math.cos(math.pi * n / 8)) for n in range(1, 9))]),
])
def test_ten_steps_by_hand(style, values):
    assert curve(10, lr_decay_style=style) == pytest.approx(values)
    assert curve(10, lr_decay_style=style)[5] == pytest.approx({"linear": 0.6, "constant": 1.0, "cosine": 0.6}[style])  # half way


def test_edges_of_the_warm_up():
    assert curve(4, lr_warmup_steps=0, lr_decay_style="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])  # none
    assert curve(4, lr_warmup_steps_ratio=0.0, lr_decay_style="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert curve(4, lr_warmup_steps=4, lr_warmup_init=0.0) == pytest.approx([0.25, 0.5, 0.75, 1.0])  # nothing but
    assert curve(4, lr_warmup_steps=9, lr_warmup_init=0.0) == pytest.approx([0.25, 0.5, 0.75, 1.0])  # cut at the run's end
    assert curve(4, lr_warmup_steps=3, lr_decay_style="linear")[2:] == pytest.approx([1.0, 0.2])  # one step to fall
    assert curve(9, lr_warmup_init=0.0)[:2] == pytest.approx([1.0, 0.2 + 0.4 * (1 + math.cos(math.pi / 8))])  # int(0.2 * 9) = 1
    assert curve(1) == pytest.approx([0.2])  # int(0.2) = 0 steps of warm-up: the one step is the last
    assert curve(1, lr_warmup_steps=1) == pytest.approx([1.0])


def test_the_defaults_end_at_min_lr_and_peak_once():
    optim = OptimSettings()
    values = [learning_rate(optim, n, 100) for n in range(1, 101)]
    assert values[0] == pytest.approx(5e-7) and values[19] == pytest.approx(1e-5) and values[-1] == pytest.approx(1e-6)
    assert values.index(max(values)) == 19
    assert np.all(np.diff(values[:20]) > 0) and np.all(np.diff(values[19:]) < 0)
    assert values[59] == pytest.approx(5.5e-6)  # step 60 is half way from 20 to 100


def one_loss(model, layout: Layout, batch):
    return step(build(model, layout), batch, 1e-3, layout.num_micro)[0]


def test_every_target_weighs_the_same(tiny):
    """One rank has 1 target, the other 59. The mean over targets is that of the parts by their numbers of targets, not of the ranks."""
    random = np.random.default_rng(5)
    few = Sample(random.integers(0, 430, 20), np.arange(20) == 19, 0)
    many = Sample(random.integers(0, 430, 60), np.arange(60) >= 1, 1)
    only_few, only_many = (run_ranks(1, one_loss, tiny("llama"), Layout(), [part])[0] for part in (few, many))
    assert abs(only_few - only_many) > 0.1
    for both in run_ranks(2, one_loss, tiny("llama"), Layout(ranks=2, num_micro=2), [few, many]):
        assert both == pytest.approx((only_few + 59 * only_many) / 60, rel=1e-6)
