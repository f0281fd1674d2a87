"""Advantages by hand, against a plain loop, and whatever the order of the responses."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from mfsdp_cli.train.advantages import group_advantages, zero_variance_groups

ESTIMATORS = ("grpo", "dr_grpo", "rloo")


def test_grpo_by_hand():
    # mean 1/2; squares 4 * 1/4 over n - 1 = 3: variance 1/3, standard deviation 0.5773503; 0.5 / 0.5773513 = 0.8660239
    assert group_advantages([1, 0, 0, 1], [7, 7, 7, 7], "grpo") == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=1e-7)
    assert group_advantages([1, 0, 0, 1], [7, 7, 7, 7], "grpo", norm_by_std=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_two_groups_are_apart_and_may_be_interleaved_and_uneven():
    # group 3: scores 2, 4, mean 3, standard deviation sqrt(2); group 1: 0, 0, 3, mean 1, squares 1 + 1 + 4 over 2: sqrt(3)
    advantages = group_advantages([2, 0, 4, 0, 3], [3, 1, 3, 1, 1], "grpo")
    near, far = 1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(3) + 1e-6)
    assert advantages == pytest.approx([-near, -far, near, -far, 2 * far], rel=1e-12)


def test_dr_grpo_is_the_distance_from_the_mean():
    assert group_advantages([1, 2, 6], [0, 0, 0], "dr_grpo").tolist() == [-2, -1, 3]
    assert group_advantages([1, 2, 6], [0, 0, 0], "dr_grpo", norm_by_std=False).tolist() == [-2, -1, 3]


def test_rloo_is_the_distance_from_the_mean_of_the_others():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    assert group_advantages([1, 2, 6], [0, 0, 0], "rloo").tolist() == [-3, -1.5, 4.5]


def test_the_group_of_one_zero_and_seven_times_95_is_kept_whole():
    # d = 0.95, n = 8: mean 7/8 d; sum of squares d^2 * 7/8, over 7: standard deviation d / sqrt(8) = 0.3358757
    # (0 - 7/8 d) / s = -7/8 * sqrt(8) = -2.474874; (d - 7/8 d) / s = sqrt(8) / 8 = 0.353553; the 1e-6 takes 3e-6 of each
    scores = [0.0] + [0.95] * 7
    advantages = group_advantages(scores, [0] * 8, "grpo")
    assert advantages == pytest.approx([-2.474874] + [0.353553] * 7, abs=1e-5)
    assert zero_variance_groups(scores, [0] * 8).tolist() == []


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("value", [0.0, 0.1, 0.95, -1 / 3, 1e300, 1e-300])
def test_equal_scores_give_exactly_zero(estimator, value):
    for n in (2, 3, 7, 10):
        assert group_advantages([value] * n, [0] * n, estimator).tolist() == [0.0] * n
        assert zero_variance_groups([value] * n, [5] * n).tolist() == [5]


def test_zero_variance_groups_are_named_in_order():
    scores = [0, 1, 0, 0, 1, 1, 0.3, 0.3, 0.3, 0.3000001]
    groups = [9, 9, 4, 4, 2, 2, 6, 6, 8, 8]
    assert zero_variance_groups(scores, groups).tolist() == [2, 4, 6]
    assert group_advantages(scores, groups, "grpo")[2:8].tolist() == [0] * 6
    assert zero_variance_groups([], np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_against_a_plain_loop_and_in_any_order(estimator):
    draw = np.random.default_rng(0)
    for _ in range(25):
        num_groups = draw.integers(1, 9)
        groups = np.concatenate([np.full(draw.integers(2, 9), name) for name in draw.choice(1000, num_groups, replace=False)])
        scores = draw.choice([draw.random(len(groups)), draw.integers(0, 2, len(groups)), draw.random(len(groups)).round(1)], axis=0)
        advantages = group_advantages(scores, groups, estimator)
        for row, (score, group) in enumerate(zip(scores, groups, strict=True)):
            mine = [s for s, g in zip(scores.tolist(), groups, strict=True) if g == group]
            mean = statistics.fmean(mine)
            expected = {"grpo": (score - mean) / (statistics.stdev(mine) + 1e-6), "dr_grpo": score - mean,
                        "rloo": score - (sum(mine) - score) / (len(mine) - 1)}[estimator]
            assert advantages[row] == pytest.approx(expected, abs=1e-9)
        order = draw.permutation(len(groups))
        assert (group_advantages(scores[order], groups[order], estimator) == advantages[order]).all()  # to the bit
        assert max(abs(advantages[groups == name].sum()) for name in groups) < 1e-9


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match=r"2 of 3 groups have a single response, .*: \[4, 7\]"):
        group_advantages([1, 0, 1, 0], [4, 2, 7, 2], "grpo")
    with pytest.raises(ValueError, match="1 of 1 groups"):
        zero_variance_groups([1], [0])
    with pytest.raises(ValueError, match="2 of 4 scores are not finite; the first is nan, of response 1"):
        group_advantages([1, math.nan, 1, math.inf], [0, 0, 1, 1], "rloo")
    with pytest.raises(ValueError, match="unknown advantage estimator 'gae'"):
        group_advantages([1, 0], [0, 0], "gae")
    with pytest.raises(ValueError, match="one score and one group"):
        group_advantages([1, 0], [0, 0, 0], "grpo")
