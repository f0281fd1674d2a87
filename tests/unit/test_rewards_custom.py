"""Custom reward functions: what is found before a launch, and what their return values become."""

import time

import pytest

from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID
from mfsdp_cli.rewards.base import RewardResult
from mfsdp_cli.rewards.custom import as_result, check, load

VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    return float(ground_truth in solution_str)\n"


@pytest.fixture
def write(tmp_path):
    def write(source, name="reward.py"):
        path = tmp_path / name
        path.write_text(source)
        return f"{path}:compute_score"
    return write


def only(problems):
    assert len(problems) == 1, problems
    assert problems[0].key == "reward.function"
    return problems[0]


@pytest.mark.parametrize("source", [
    VERL,
    "def compute_score(ground_truth, solution_str, data_source, extra_info): return {'score': 1, 'pred': 4}\n",
    "def compute_score(**row): return True\n",
    "def compute_score(data_source, *, solution_str, ground_truth, extra_info=None): return 0.5\n",
    "import functools\ndef f(solution_str, k, **_): return k\ncompute_score = functools.partial(f, k=2)\n",
    "try:\n    import nothing_of_the_kind\nexcept ImportError:\n    def compute_score(**_): return 1\n",
    "from mfsdp_cli.rewards.base import RewardResult\ndef compute_score(**_): return RewardResult(1.0, 'x', 'right')\n",
    "print('noise')\ndef compute_score(**_):\n    print('more noise')\n    return 1\n"])
def test_accepted(write, source):
    assert check(write(source)) == []


@pytest.mark.parametrize("source, why, line", [
    ("def compute_score(solution_str, ground_truth): return 1\n", "does not take data_source, extra_info", 1),
    ("\ndef compute_score(data_source, solution_str, ground_truth, extra_info, model): return 1\n", "needs model, which is never given", 2),
    ("def compute_score(data_source, solution_str, /, ground_truth, extra_info): return 1\n", "by position only", 1),
    ("async def compute_score(**_): return 1\n", "is async", 1),
    ("def compute_score(**_):\n    return 1 +\n", "not valid Python", 2)])
def test_refused_from_the_source_alone(write, source, why, line):
    problem = only(check(write(source), timeout_s=0.001))
    assert why in problem.why and problem.where.endswith(f"reward.py:{line}") and problem.level == "error"


def test_refused_before_anything_is_read(write, tmp_path):
    assert "is not FILE.py:FUNCTION" in only(check("reward.py")).why
    missing = only(check(f"{tmp_path / 'none.py'}:compute_score"))
    assert "No such file" in missing.why and missing.code == BAD_INPUT
    misspelt = only(check(write(VERL).replace("compute_score", "compute_scores")))
    assert "has no function compute_scores" in misspelt.why and misspelt.fix == "name one of its functions: compute_score"
    nested = write("class A:\n    def compute_score(self, **_): return 1\n")
    assert "has no function compute_score" in only(check(nested)).why


ROW = ("my/data", "the answer is 7", "7", {"index": 3})


@pytest.mark.parametrize("source, why, line", [
    ("import nothing_of_the_kind\n" + VERL, "importing it raised ModuleNotFoundError: No module named 'nothing_of_the_kind'", 1),
    ("def compute_score(**row):\n    return row['extra_info']['tests']\n", "scoring one row raised KeyError: 'tests'", 2),
    ("def compute_score(**_): return None\n", "returned None (NoneType), not a finite number", None),
    ("def compute_score(**_): return float('nan')\n", "returned nan (float), not a finite number", None),
    ("def compute_score(**_): return {'reward': 1}\n", "returned a dict without \"score\": its keys are ['reward']", None),
    ("import os\nos._exit(9)\n" + VERL, "ended with status 9", None),
    ("import sys\nsys.exit('no licence')\n" + VERL, "importing it raised SystemExit: no licence", 2),
    ("compute_score = 4\n", "is int, not a function", None)])
def test_refused_by_trying_it_in_a_child_process(write, source, why, line):
    problem = only(check(write(source), ROW))
    assert why in problem.why and problem.level == "error" and problem.code == CONFIG_INVALID
    assert problem.where.endswith("reward.py" if line is None else f"reward.py:{line}")


def test_failure_on_an_invented_row_is_a_warning_but_import_is_an_error(write):
    problem = only(check(write("def compute_score(**row):\n    return row['extra_info']['tests']\n")))
    assert problem.level == "warning" and "invented row" in problem.why
    assert only(check(write("raise RuntimeError('no')\n" + VERL))).level == "error"


def test_one_that_hangs_is_given_up(write):
    begin = time.monotonic()
    assert "more than 1 s" in only(check(write("import time\ntime.sleep(1000)\n" + VERL), ROW, timeout_s=1.0)).why
    assert time.monotonic() - begin < 30


def test_a_custom_function_sees_the_row_and_its_neighbours_in_the_folder(write, tmp_path):
    (tmp_path / "helper_of_reward.py").write_text("BONUS = 2\n")
    spec = write("from helper_of_reward import BONUS\n\ndef compute_score(extra_info, solution_str, ground_truth, data_source):\n"
                 "    return {'score': extra_info['index'] + BONUS, 'pred': [data_source, solution_str, ground_truth]}\n")
    result = load(spec)(*ROW)
    assert result == RewardResult(5.0, "['my/data', 'the answer is 7', '7']", "right")


def test_return_values():
    import numpy as np

    assert as_result(0.25) == RewardResult(0.25, None, "right")
    assert as_result(-1) == RewardResult(-1.0, None, "wrong")
    assert as_result(True) == RewardResult(1.0, None, "right")
    assert as_result(np.float32(0.5)) == RewardResult(0.5, None, "right")
    assert as_result({"score": 0.1, "acc": False, "pred": 12}) == RewardResult(0.1, "12", "wrong")
    assert as_result(RewardResult(0.0, "x", "unparseable")) == RewardResult(0.0, "x", "unparseable")
    for value in ("1.0", None, [1], float("inf"), {"score": None}, {}, RewardResult(float("nan"), None, "right")):
        assert (as_result(value).status, as_result(value).score) == ("error", 0)


@pytest.mark.parametrize("text, why", [
    (b"def score(**k): return 1\0", "null bytes"), (b"x = " + b"(" * 1000, "nested parentheses"), (b"\xff", "cannot be read"), (b"", "no function"),
])
def test_a_file_that_is_no_program(tmp_path, text, why):
    file = tmp_path / "score.py"
    file.write_bytes(text)
    problem, = check(f"{file}:score")
    assert why in problem.why and "None" not in problem.where


def test_what_is_no_file_is_not_read():
    """A device would be read for ever, and no path holds a NUL."""
    assert ["is no file" in check(f"{path}:score")[0].why for path in ("/dev/zero", "/dev/null", "/")] == [True] * 3
    assert "cannot be read" in check("a\0b.py:score")[0].why


def test_a_function_may_print_what_is_no_text(tmp_path):
    file = tmp_path / "score.py"
    file.write_text("import os\ndef score(**k):\n    os.write(1, b'\\xff\\n')\n    os.write(2, b'\\xfe')\n    return 1\n")
    assert check(f"{file}:score") == []
