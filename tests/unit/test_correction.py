"""Mismatch of sampler and trainer, by hand and against plain loops: measured, weighed, and stopped."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mfsdp_cli.train.correction import alarm, correction_weights, mismatch_metrics, mismatch_stats, usable_mask
from mfsdp_cli.train.losses import means, merge

INF, NAN = math.inf, math.nan


def tensor(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_mismatch_by_hand():
    # d = sampler - trainer: 0.1, -0.3, 0; the fourth token is masked
    rollout, old, mask = tensor(-1.0, -2.0, -0.5, NAN), tensor(-1.1, -1.7, -0.5, 3.0), tensor(1, 1, 1, 0)
    metrics = mismatch_metrics(mismatch_stats(rollout, old, mask))
    assert metrics["num_tokens"] == 3 and metrics["num_unmeasured"] == 0 and metrics["unmeasured_share"] == 0
    assert metrics["abs"] == pytest.approx(0.4 / 3) and metrics["abs_max"] == pytest.approx(0.3)
    assert metrics["k1"] == pytest.approx(-0.2 / 3)
    # exp(-0.1) - 0.9 = 0.00483742, exp(0.3) - 1.3 = 0.04985881, 0; their sum 0.05469623
    assert metrics["k3"] == pytest.approx(0.05469623 / 3, rel=1e-5)
    # nll 3.5 / 3 and 3.3 / 3
    assert metrics["rollout_perplexity"] == pytest.approx(math.exp(3.5 / 3)) and metrics["old_perplexity"] == pytest.approx(math.exp(1.1))
    assert metrics["perplexity_ratio"] == pytest.approx(metrics["old_perplexity"] / metrics["rollout_perplexity"])


def test_what_is_not_finite_is_counted_and_left_out():
    rollout = tensor(-1.0, -INF, NAN, -1.0, -1.0, NAN, -INF)
    old = tensor(-1.5, -1.0, -1.0, NAN, -1.5, -INF, NAN)
    metrics = mismatch_metrics(mismatch_stats(rollout, old, tensor(1, 1, 1, 1, 1, 1, 0)))
    assert metrics["num_tokens"] == 2 and metrics["abs"] == pytest.approx(0.5) and metrics["abs_max"] == pytest.approx(0.5)
    assert metrics["num_sampler_nonfinite"] == 3 and metrics["num_trainer_nonfinite"] == 2
    assert metrics["num_unmeasured"] == 4 and metrics["unmeasured_share"] == pytest.approx(4 / 6)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("rollout, old, mask", [
    (tensor(), tensor(), tensor()), (tensor(NAN, 1.0), tensor(-INF, 2.0), tensor(0, 0)), (tensor(NAN), tensor(-1.0), tensor(1)),
])
def test_nothing_to_measure(rollout, old, mask):
    metrics = mismatch_metrics(mismatch_stats(rollout, old, mask))
    assert metrics["num_tokens"] == metrics["abs"] == metrics["abs_max"] == metrics["k3"] == 0 and metrics["perplexity_ratio"] == 1
    weights, used, stats = correction_weights(rollout, old, mask, "truncate", 2.0)
    assert not used.any() and not weights.any() and means(stats)["weight"] == 0


def test_a_huge_gap_stays_finite():
    metrics = mismatch_metrics(mismatch_stats(tensor(-1e4, -1.0), tensor(-1.0, -1e4), tensor(1, 1)))
    assert metrics["abs"] == pytest.approx(9999) and all(math.isfinite(value) for value in metrics.values())


def test_stats_of_parts_add_up_to_those_of_the_whole():
    draw = torch.Generator().manual_seed(3)
    rollout, old = -torch.rand(200, generator=draw) * 5, -torch.rand(200, generator=draw) * 5
    rollout[::17] = NAN
    mask = torch.rand(200, generator=draw) < 0.7
    whole = mismatch_stats(rollout, old, mask)
    cuts = sorted(random.Random(0).sample(range(1, 200), 6))
    parts = zip(rollout.tensor_split(cuts), old.tensor_split(cuts), mask.tensor_split(cuts), strict=True)
    merged = merge(mismatch_stats(*part) for part in parts)
    assert merged.keys() == whole.keys()
    assert [float(merged[key]) for key in whole] == pytest.approx([float(whole[key]) for key in whole], rel=1e-9)


# rho of five tokens, with bound 2: 4, 0.25, 1, 2 and 0.5; the exact bounds are kept
ROLLOUT = torch.tensor([-2.0, -1.0, -1.0, -2.0, -1.0], dtype=torch.float64)
OLD = ROLLOUT + torch.tensor([4.0, 0.25, 1.0, 2.0, 0.5], dtype=torch.float64).log()


@pytest.mark.parametrize("mode, expected, outside", [
    ("none", [1, 1, 1, 1, 1], 0), ("truncate", [2, 0.25, 1, 2, 0.5], 1), ("mask", [0, 0, 1, 2, 0.5], 2),
])
def test_weights_by_hand(mode, expected, outside):
    threshold = 2 * (1 + 1e-12)  # exp(log(2)) need not be 2
    weights, used, stats = correction_weights(ROLLOUT, OLD, torch.ones(5), mode, threshold)
    assert weights.tolist() == pytest.approx(expected) and used.tolist() == [True] * 5
    assert stats["outside"] == outside and stats["num_tokens"] == 5 and stats["num_dropped"] == 0
    assert stats["weight"] == pytest.approx(sum(expected)) and stats["weight_sq"] == pytest.approx(sum(w * w for w in expected))
    assert stats["weight_max"] == pytest.approx(max(expected))
    assert means(stats)["outside"] == pytest.approx(outside / 5)


@pytest.mark.parametrize("mode", ["none", "truncate", "mask"])
def test_tokens_without_a_sampler_log_prob_leave_the_mask(mode):
    rollout, old = tensor(-1.0, NAN, -INF, INF, -1.0, NAN), tensor(-1.0, -1.0, -1.0, -1.0, -1.0, NAN)
    mask = tensor(1, 1, 1, 1, 1, 0)
    weights, used, stats = correction_weights(rollout, old, mask, mode, 2.0)
    assert weights.tolist() == [1, 0, 0, 0, 1, 0] and used.tolist() == [True, False, False, False, True, False]
    assert used.tolist() == usable_mask(rollout, mask).tolist()
    assert stats["num_tokens"] == 2 and stats["num_dropped"] == 3 and stats["outside"] == 0


def test_a_trainers_nan_is_not_forgiven():
    for mode in ("truncate", "mask"):
        weights, used, _ = correction_weights(tensor(-1.0, -1.0), tensor(NAN, -1.0), tensor(1, 1), mode, 2.0)
        assert weights.isnan().tolist() == [True, False] and used.all()


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()
    for mode in ("none", "truncate", "mask"):
        assert not correction_weights(ROLLOUT, old, torch.ones(5), mode, 2.0)[0].requires_grad


def test_weights_are_bounded_whatever_the_gap():
    rollout, old = tensor(-1e5, -0.1, -3.0), tensor(-0.1, -1e5, -3.0)
    assert correction_weights(rollout, old, tensor(1, 1, 1), "truncate", 2.0)[0].tolist() == pytest.approx([2, 0, 1], abs=1e-8)
    assert correction_weights(rollout, old, tensor(1, 1, 1), "mask", 2.0)[0].tolist() == [0, 0, 1]


def test_expected_truncated_weight_over_the_sampler_is_the_truncated_mass():
    # E_sampler[rho] = 1; with a bound it is the sum of min(p_trainer, C p_sampler), by enumeration of five tokens
    sampler, trainer = torch.tensor([0.4, 0.3, 0.2, 0.09, 0.01]), torch.tensor([0.1, 0.3, 0.3, 0.2, 0.1])
    for bound, expected in ((1e9, 1.0), (2.0, 0.1 + 0.3 + 0.3 + 0.18 + 0.02)):
        weights, _, _ = correction_weights(sampler.log(), trainer.log(), torch.ones(5), "truncate", bound)
        assert float((sampler * weights).sum()) == pytest.approx(expected, rel=1e-6)


def test_unknown_mode():
    with pytest.raises(ValueError, match="unknown rollout_correction 'clip'"):
        correction_weights(ROLLOUT, OLD, torch.ones(5), "clip", 2.0)


def metrics_of(gaps, trainer=-1.0):
    old = torch.full((len(gaps),), trainer)
    return mismatch_metrics(mismatch_stats(old + torch.tensor(gaps), old, torch.ones(len(gaps))))


def test_alarm_by_hand():
    assert alarm(metrics_of([0.05, -0.05, 0.0]), 0.1) is None
    told = alarm(metrics_of([0.15, -0.15]), 0.1)
    assert told.startswith("sampler and trainer differ by 0.15 nats per token on average (0.15 at most, 2 tokens), above 0.1")
    assert alarm(metrics_of([5.0]), 0.0) is None  # only logged
    assert alarm(metrics_of([NAN] * 2), 0.0) is None
    # one token of 100 may lack its log-probability, two may not
    assert alarm(metrics_of([NAN] + [0.0] * 99), 0.1) is None
    told = alarm(metrics_of([NAN] * 2 + [0.0] * 98), 0.1)
    assert told.startswith("the sampler's log-probability is not finite for 2 of 100 tokens, above the 1%")
    for threshold in (0.0, 0.1):
        told = alarm(metrics_of([0.0, 0.0], trainer=NAN), threshold)
        assert told.startswith("the trainer's log-probability is not finite for 2 of 2 tokens")
    assert alarm(mismatch_metrics(mismatch_stats(tensor(), tensor(), tensor())), 0.1) is None
    assert alarm(metrics_of([0.0]) | {"abs": NAN}, 0.1) is not None
