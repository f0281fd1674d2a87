"""The pool of scoring processes: order, deadlines, deaths, and that nothing is left. Real processes, no mocks."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError
from mfsdp_cli.rewards import pool as pool_module
from mfsdp_cli.rewards.base import RewardResult, scorer_for, scorer_name
from mfsdp_cli.rewards.length import overlong_penalty
from mfsdp_cli.rewards.length import score as score_length
from mfsdp_cli.rewards.pool import RewardPool

ROOT = Path(__file__).resolve().parents[2]
TRICKY = '''
import os, signal, subprocess, sys, time

def score(data_source, solution_str, ground_truth, extra_info=None):
    """Does what the response says."""
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "power":
        10 ** 10 ** 9  # one instruction, which no signal handler interrupts
    if solution_str == "child":
        child = subprocess.Popen(["sleep", "1000"])
        open(ground_truth, "w").write(str(child.pid))
        time.sleep(1000)
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "raise":
        raise KeyError("boom")
    if solution_str == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "die once" and not os.path.exists(ground_truth):
        open(ground_truth, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "slow":
        time.sleep(0.3)
    print("noise on stdout")
    heavy = {"torch", "ray", "numpy"} & set(sys.modules)
    odd = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "modules": len(heavy)}
    return odd.get(solution_str, len(solution_str))
'''


@pytest.fixture(scope="module")
def tricky(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "tricky.py"
    path.write_text(TRICKY)
    return f"{path}:score"


def items(*responses, gold=""):
    return [("any", response, gold, {"index": index}) for index, response in enumerate(responses)]


def gone(pid):
    """Whether the process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, limit_s=20):
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_two_unparseable_in_five_keep_order_and_length():
    batch = [("openai/gsm8k", response, "42", {}) for response in ("#### 42", "no marker", "#### 41", "", "#### 42.0")]
    with RewardPool(2, 10.0, "gsm8k") as pool:
        results = pool.score(batch)
    assert [result.status for result in results] == ["right", "unparseable", "wrong", "unparseable", "right"]
    assert [result.score for result in results] == [1, 0, 0, 0, 1]


def test_a_hanging_scorer_costs_its_own_item_only(tricky):
    with RewardPool(2, 0.5, function=tricky) as pool:
        before = {worker.process.pid for worker in pool.workers}
        results = pool.score(items("a", "loop", "bb", "sleep", "ccc", "power", "dddd"))
        assert [result.status for result in results] == ["right", "timed_out", "right", "timed_out", "right", "timed_out", "right"]
        assert [result.score for result in results] == [1, 0, 2, 0, 3, 0, 4]
        assert results[1].detail == "no grade within 0.5 s"
        assert len(pool.workers) == 2 and all(gone(pid) for pid in before)  # three were killed: both first ones at least
        assert [result.score for result in pool.score(items("a", "bb"))] == [1, 2]


def test_processes_that_a_scorer_started_die_with_it(tricky, tmp_path):
    with RewardPool(1, 1.0, function=tricky) as pool:
        assert pool.score(items("child", gold=str(tmp_path / "pid")))[0].status == "timed_out"
    assert wait_until(lambda: gone(int((tmp_path / "pid").read_text())))


def test_what_is_raised_and_what_is_no_number_are_errors_with_a_reason(tricky):
    with RewardPool(1, 10.0, function=tricky) as pool:
        results = pool.score(items("raise", "nan", "inf", "none", "text", "ok"))
    assert [result.status for result in results] == ["error"] * 5 + ["right"]
    assert [result.score for result in results] == [0, 0, 0, 0, 0, 2]
    kinds = ("nan (float)", "inf (float)", "None (NoneType)")
    assert [result.detail for result in results[:4]] == ["KeyError: 'boom'", *(f"returned {kind}, not a finite number" for kind in kinds)]


def test_a_worker_that_dies_is_replaced_and_its_item_tried_once_more(tricky, tmp_path):
    with RewardPool(2, 10.0, function=tricky) as pool:
        results = pool.score(items("a", "die", "bb", "die once", "exit", gold=str(tmp_path / "died")))
        assert [result.status for result in results] == ["right", "error", "right", "right", "error"]
        assert results[1].detail == "the scoring process died 2 times, last by signal 9"
        assert results[4].detail == "the scoring process died 2 times, last by status 3"
        assert results[3].score == len("die once") and len(pool.workers) == 2


def test_kill_9_from_outside_in_mid_batch_loses_nothing(tricky):
    with RewardPool(2, 30.0, function=tricky) as pool:
        victim = pool.workers[0].process.pid
        timer = threading.Thread(target=lambda: wait_until(lambda: pool.workers[0].index is not None) and os.kill(victim, signal.SIGKILL))
        timer.start()
        results = pool.score(items(*["slow"] * 8))
        timer.join()
        assert gone(victim)
    assert [(result.status, result.score) for result in results] == [("right", 4)] * 8


def test_a_worker_killed_between_batches(tricky):
    with RewardPool(1, 30.0, function=tricky) as pool:
        pool.score(items("a"))
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        assert pool.score(items("bb", "ccc"))[0].score == 2


def test_more_workers_than_items_and_no_items():
    with RewardPool(3, 10.0, "length") as pool:
        assert pool.score([]) == []
        assert [result.score for result in pool.score([("x", "word " * 25, "", {}), ("x", "word", "", {"target_words": 1})])] == [0.5, 1.0]


def test_random_batches_come_back_in_order():
    with RewardPool(2, 10.0, "gsm8k") as pool:
        for size in (1, 2, 3, 50, 301):
            batch = [("openai/gsm8k", f"#### {n}", str(n - n % 3 // 2), {}) for n in range(size)]
            assert [result.score for result in pool.score(batch)] == [float(n % 3 < 2) for n in range(size)]


def test_close_leaves_no_process_even_if_one_hangs(tricky):
    pool = RewardPool(2, 60.0, function=tricky)
    pids = [worker.process.pid for worker in pool.workers]
    failure = []
    thread = threading.Thread(target=lambda: failure.append(pytest.raises(BaseException, pool.score, items("sleep", "loop"))))
    thread.start()
    assert wait_until(lambda: all(worker.index is not None for worker in pool.workers))
    pool.close()
    assert all(gone(pid) for pid in pids)
    thread.join()
    pool.close()  # again does nothing
    with pytest.raises(AssertionError, match="closed"):
        pool.score(items("a"))


def test_workers_end_when_their_pool_is_killed(tmp_path):
    program = ("import time; from mfsdp_cli.rewards.pool import RewardPool; pool = RewardPool(2, 5.0, 'gsm8k'); pool.score([]);"
               "pool.score([('', '#### 1', '1', {})] * 4); print(*[w.process.pid for w in pool.workers], flush=True); time.sleep(1000)")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(gone(pid) for pid in pids)
        parent.kill()
    assert wait_until(lambda: all(gone(pid) for pid in pids))


def test_workers_hold_nothing_of_the_trainer(tricky):
    with RewardPool(1, 10.0, function=tricky) as pool:
        assert pool.score(items("modules"))[0].score == 0
        environ = Path(f"/proc/{pool.workers[0].process.pid}/environ").read_text().split("\0")
        assert "CUDA_VISIBLE_DEVICES=" in environ
        descriptors = os.listdir(f"/proc/{pool.workers[0].process.pid}/fd")
    assert len(descriptors) == 4  # three and the connection


def test_self_test_passes_for_every_scorer_of_ours():
    for name in ("auto", "gsm8k", "gsm8k_flexible", "length"):
        with RewardPool(1, 30.0, name) as pool:
            pool.self_test()


def test_self_test_stops_a_run_whose_grading_is_broken(monkeypatch):
    monkeypatch.setitem(pool_module.KNOWN, "gsm8k", [("openai/gsm8k", "#### 41", "42", 1.0)])
    pool = RewardPool(1, 10.0, "gsm8k")
    with pytest.raises(MfsdpError, match="scores 0, not 1") as error:
        pool.self_test()
    assert error.value.exit_code == MACHINE_UNFIT and pool.workers == []


def test_a_function_that_cannot_be_imported_stops_the_run(tmp_path):
    (tmp_path / "broken.py").write_text("import package_that_is_not_there\n\ndef score(**kwargs): return 1\n")
    pool = RewardPool(2, 10.0, function=f"{tmp_path / 'broken.py'}:score")
    pids = [worker.process.pid for worker in pool.workers]
    with pytest.raises(MfsdpError, match="ModuleNotFoundError: No module named 'package_that_is_not_there'"):
        pool.score(items("a"))
    assert all(gone(pid) for pid in pids)


# ---------------------------------------------------------------- which scorer; length


def test_each_data_source_has_its_scorer():
    for source in ("openai/gsm8k", "arithmetic"):
        assert scorer_name("auto", source) == "gsm8k"
    for source in ("DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math500", "aime24", "amc23", "math-ai/aime25"):
        assert scorer_name("auto", source) == "math"
    assert scorer_name("length", "anything") == "length"
    assert scorer_for("gsm8k_flexible", "anything")("", "it is 7", "7", {}).score == 1
    with pytest.raises(MfsdpError, match="openai/gsm8k, arithmetic, .*aime\\*, amc\\*"):
        scorer_for("auto", "my/data")


def test_overlong_penalty_of_dapo_equation_13():
    """Limit 100, buffer 20: nothing up to 80, then a line to -1 at 100."""
    assert [overlong_penalty(n, 100, 20) for n in (0, 80, 81, 90, 100, 500)] == [0, 0, -0.05, -0.5, -1, -1]
    assert overlong_penalty(90, 100, 20, factor=0.4) == pytest.approx(-0.2)
    assert overlong_penalty(100, 100, 0) == 0


def test_length_scorer():
    assert [score_length("", "w " * n, "", {}).score for n in (0, 25, 50, 75, 100, 200)] == [0, 0.5, 1, 0.5, 0, 0]
    assert score_length("", "w " * 46, "", {}).status == "right" and score_length("", "w " * 40, "", {}).status == "wrong"
    assert score_length("", "w w", "", {"target_words": 4}) == RewardResult(0.5, "2", "wrong")
