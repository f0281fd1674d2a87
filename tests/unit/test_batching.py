"""Micro batches: each row once, none over budget, as many on every rank, balanced."""

from __future__ import annotations

import random

import pytest

from mfsdp_cli.errors import BAD_INPUT, MfsdpError
from mfsdp_cli.train.batching import fixed_micro_batches, plan_micro_batches


def test_hard_case_a10_eight_sevens_in_a_budget_of_eight():
    assert plan_micro_batches([7] * 8, dp_size=1, max_tokens=8) == [[[0], [1], [2], [3], [4], [5], [6], [7]]]
    two = plan_micro_batches([7] * 8, dp_size=2, max_tokens=8)
    assert [len(rank) for rank in two] == [4, 4] and sorted(sum(sum(two, []), [])) == list(range(8))


def test_hard_case_a10_a_row_above_the_budget_is_named():
    with pytest.raises(MfsdpError) as caught:
        plan_micro_batches([7, 9], dp_size=1, max_tokens=8)
    [problem] = caught.value.problems
    assert "row 2 of the 2" in problem.why and "index 1" in problem.why and "9 tokens" in problem.why and problem.found == "8"
    assert caught.value.exit_code == BAD_INPUT
    with pytest.raises(MfsdpError) as caught:
        plan_micro_batches([9, 7, 12], dp_size=1, max_tokens=8)
    assert len(caught.value.problems) == 2


def test_by_hand():
    # 24 tokens in a budget of 10 on one rank: three micro batches of 8
    assert plan_micro_batches([5, 4, 4, 4, 4, 3], dp_size=1, max_tokens=10) == [[[0, 5], [1, 3], [2, 4]]]
    plan = plan_micro_batches([8, 3, 3, 2], dp_size=2, max_tokens=8)
    assert plan == [[[0]], [[1, 2, 3]]]  # 8 and 3 + 3 + 2


def test_fewer_rows_than_ranks_leave_empty_micro_batches():
    assert plan_micro_batches([5, 3], dp_size=4, max_tokens=8) == [[[0]], [[1]], [[]], [[]]]


def test_random_plans_are_exact_bounded_even_and_balanced():
    draw = random.Random(0)
    for _ in range(400):
        max_tokens, dp_size = draw.randint(4, 64), draw.randint(1, 8)
        lengths = [draw.randint(1, max_tokens) for _ in range(draw.randint(1, 60))]
        plan = plan_micro_batches(lengths, dp_size=dp_size, max_tokens=max_tokens)
        assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
        assert len(plan) == dp_size and len({len(rank) for rank in plan}) == 1
        loads = [[sum(lengths[i] for i in micro) for micro in rank] for rank in plan]
        assert max(max(rank) for rank in loads) <= max_tokens
        # the emptiest-bin rule: no two micro batches differ by more than the longest sequence; so the ranks' totals do not either
        flat = [load for rank in loads for load in rank]
        assert max(flat) - min(flat) <= max(lengths)
        totals = [sum(rank) for rank in loads]
        assert max(totals) - min(totals) <= max(lengths)
        # never more micro batches than twice what the tokens need, and one
        assert len(plan[0]) <= 2 * -(-sum(lengths) // (dp_size * max_tokens)) + 1
        assert plan == plan_micro_batches(list(lengths), dp_size=dp_size, max_tokens=max_tokens)


def test_fixed_micro_batches_by_hand():
    assert fixed_micro_batches(8, 2, 2) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert fixed_micro_batches(5, 2, 2) == [[[0, 1], [2, 3]], [[4], []]]


def test_random_fixed_micro_batches_are_exact_and_even():
    draw = random.Random(1)
    for _ in range(200):
        num_rows, dp_size, size = draw.randint(1, 50), draw.randint(1, 8), draw.randint(1, 6)
        plan = fixed_micro_batches(num_rows, dp_size, size)
        assert [i for rank in plan for micro in rank for i in micro] == list(range(num_rows))
        assert len({len(rank) for rank in plan}) == 1 and all(len(micro) <= size for rank in plan for micro in rank)
