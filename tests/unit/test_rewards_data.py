"""Every gold answer of GSM8K and MATH against itself and against that of the next row, in several processes."""

import json
import multiprocessing
import os
from fractions import Fraction
from pathlib import Path

import pytest

from mfsdp_cli.data.convert import gsm8k_gold, math_gold
from mfsdp_cli.rewards import gsm8k
from mfsdp_cli.rewards.base import scorer_for

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("MFSDP_TEST_DATA", ROOT.parent / "shared" / "data"))
pytestmark = pytest.mark.skipif(not (DATA / "math").exists(), reason="the public data sets are not here: set MFSDP_TEST_DATA")

# Rows whose answer equals the next one's in another spelling, by our policies: a unit, a percent or degree sign, a name.
EQUAL_TO_NEXT = {"train": {3003, 5622, 5884, 6047, 6746}, "test": {3810, 4358}}


def rows(name, split):
    return [json.loads(line) for line in (DATA / name / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def math_golds(split):
    return [math_gold(row["solution"].replace("\\boxed{}", "\\boxed{0}")) for row in rows("math", split)]


def grade(pair):
    """(score, status) of a response that ends in the first answer, against the second."""
    answer, gold = pair
    result = scorer_for("math", "")("math500", f"We find $\\boxed{{{answer}}}$.", gold, {})
    return result.score, result.status


@pytest.fixture(scope="module")
def grade_all():
    with multiprocessing.get_context("spawn").Pool(min(8, os.cpu_count())) as pool:
        yield lambda pairs: pool.map(grade, pairs, chunksize=100)


@pytest.mark.parametrize("split, num_rows", [("train", 7500), ("test", 5000)])
def test_math(grade_all, split, num_rows):
    golds = math_golds(split)
    assert len(golds) == num_rows
    pairs = [(gold, gold) for gold in golds] + list(zip(golds[1:], golds[:-1], strict=True))
    results = grade_all(pairs)
    own, neighbours = results[:num_rows], results[num_rows:]
    assert [golds[i] for i, result in enumerate(own) if result != (1, "right")] == []
    equal = {i for i in range(num_rows - 1) if golds[i] == golds[i + 1]} | EQUAL_TO_NEXT[split]
    assert [pairs[num_rows + i] for i, (score, _) in enumerate(neighbours) if score != (i in equal)] == []
    assert {status for _, status in neighbours} == {"right", "wrong"}  # every gold answer can be read


@pytest.mark.parametrize("split, num_rows", [("train", 7473), ("test", 1319)])
def test_gsm8k(split, num_rows):
    answers = [row["answer"] for row in rows("gsm8k", split)]
    golds = [gsm8k_gold(answer) for answer in answers]
    assert len(golds) == num_rows
    for score in (gsm8k.score_strict, gsm8k.score_flexible):
        assert [i for i, gold in enumerate(golds) if score("openai/gsm8k", answers[i], gold, {}).score != 1] == []
        wrong = [i for i in range(num_rows - 1)
                 if score("openai/gsm8k", answers[i + 1], golds[i], {}).score != (Fraction(golds[i]) == Fraction(golds[i + 1]))]
        assert wrong == []


@pytest.mark.parametrize("name", ["math500", "aime24", "amc23"])
def test_evaluation_sets(name):
    """Their own answer field against the box of the solution, or against itself where there is no solution with one."""
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [(math_gold(row["solution"]) if name == "math500" else str(row["answer"]), str(row["answer"]))
             for row in map(json.loads, lines)]
    assert [pair for pair in pairs if grade(pair) != (1, "right")] == []
