from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest

from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError
from mfsdp_cli.train.metrics import EtaMeter, MetricsLog, count_words, duration_words, read_metrics, step_line


def open_log(run_dir, **changes) -> MetricsLog:
    arguments = {"run_dir": run_dir, "loggers": ["console", "file"], "project": "p", "name": "n", "config": {}, "is_writer": True}
    return MetricsLog(**arguments | changes)


def lines(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_record_is_one_line_and_readable_at_once(tmp_path):
    log = open_log(tmp_path)
    for step in (1, 2):
        log.log({"step": step, "total_steps": 2, "loss": 0.5 / step})
        assert [(line["step"], line["loss"], line["attempt"]) for line in lines(tmp_path)][-1] == (step, 0.5 / step, 1)
    log.close()
    log.log({"step": 3})  # closed: nothing more
    assert len(lines(tmp_path)) == 2 and lines(tmp_path)[0]["time"] > 1.6e9


def test_only_the_writer_writes(tmp_path):
    with open_log(tmp_path, is_writer=False, loggers=["tensorboard", "wandb"]) as log:
        log.log({"step": 1, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_json_cannot_hold_become_null_and_are_named(tmp_path):
    with open_log(tmp_path) as log:
        log.log({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 1e-5})
        with pytest.raises(ValueError):
            log.log({"step": 2, "per_rank": [math.nan]})
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"], line["lr"], line["nonfinite"]) == (None, None, 1e-5, ["loss", "grad_norm"])


def test_a_half_written_line_is_cut_off_and_told(tmp_path):
    with open_log(tmp_path) as log:
        log.log({"step": 1, "loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert [r["step"] for r in read_metrics(tmp_path)] == [1], "a reader of a live run does not trip over it"
    with open_log(tmp_path) as log:
        assert log.notes == ["metrics.jsonl: removed a half-written last line of 15 bytes"]
        log.log({"step": 2, "loss": 0.9})
    assert [(r["step"], r["attempt"]) for r in read_metrics(tmp_path)] == [(1, 1), (2, 2)]


def test_a_file_that_is_only_half_a_line_starts_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{")
    with open_log(tmp_path) as log:
        log.log({"step": 1})
    assert lines(tmp_path)[0]["attempt"] == 1


def test_a_resumed_attempt_replaces_what_it_repeats(tmp_path):
    """Attempt 1 reaches 6 and validates at 2, 4, 6; attempt 2 resumes at 4 and has come to 5."""
    with open_log(tmp_path) as log:
        for step in range(1, 7):
            log.log({"step": step, "loss": 10.0 + step})
            if step % 2 == 0:
                log.log({"step": step, "val_loss": 20.0 + step})
    with open_log(tmp_path, resume_step=4) as log:
        log.log({"step": 5, "loss": 35.0})
    assert len(lines(tmp_path)) == 10, "nothing is erased"
    assert [(r["step"], r.get("loss", r.get("val_loss"))) for r in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 11.0), (2, 12.0), (2, 22.0), (3, 13.0), (4, 14.0), (4, 24.0), (5, 35.0)]


def test_a_validation_right_after_resume_does_not_hide_the_training_step(tmp_path):
    with open_log(tmp_path, attempt=1) as log:
        for step in (1, 2, 3):
            log.log({"step": step, "loss": float(step)})
        log.log({"step": 2, "val_loss": 0.2})
    with open_log(tmp_path, attempt=7) as log:
        log.log({"step": 2, "val_loss": 0.7})
        log.log({"step": 3, "loss": 33.0})
    assert [(r["step"], r.get("loss", r.get("val_loss"))) for r in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (2, 0.7), (3, 33.0)]


@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_resumes_reads_as_one_course(tmp_path, seed):
    """Each attempt starts somewhere in what was reached; the truth is the list one would keep by hand."""
    rng, truth = random.Random(seed), {}
    for attempt in range(1, rng.randint(2, 6)):
        start = rng.randint(0, len(truth))
        truth = {step: value for step, value in truth.items() if step <= start}
        with open_log(tmp_path) as log:
            for step in range(start + 1, start + rng.randint(2, 8)):
                truth[step] = attempt + step / 100
                log.log({"step": step, "loss": truth[step]})
    assert {r["step"]: r["loss"] for r in read_metrics(tmp_path)} == truth
    assert [r["step"] for r in read_metrics(tmp_path)] == sorted(truth)


def test_a_line_that_is_no_record_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(MfsdpError, match=r"metrics\.jsonl:2 = hello"):
        read_metrics(tmp_path)


def test_wandb_keeps_its_id_and_may_go_back_in_steps(tmp_path, monkeypatch):
    """A stand-in for the package, which the project does not install: what it is asked is recorded."""
    calls = []

    class Run:
        def define_metric(self, *args, **kwargs):
            calls.append(("define_metric", args, kwargs))

        def log(self, *args, **kwargs):
            calls.append(("log", args, kwargs))

        def finish(self):
            calls.append(("finish",))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **kw: calls.append(("init", kw)) or Run()))
    for _ in range(2):
        with open_log(tmp_path, loggers=["wandb"], config={"a": 1}) as log:
            log.log({"step": 5, "loss": 1.0})
    first, second = [kw for name, *rest in calls if name == "init" for kw in rest]
    assert first == second and first["resume"] == "allow" and first["config"] == {"a": 1} and len(first["id"]) == 16
    assert calls[1:4] == [("define_metric", ("*",), {"step_metric": "step"}), ("log", ({"step": 5, "loss": 1.0},), {}), ("finish",)]


@pytest.mark.parametrize("record, line", [
    ({"step": 12, "total_steps": 100, "loss": 0.41234, "lr": 1e-5, "grad_norm": 0.9149,
      "tokens_per_s": 18240.0,
      "memory_gib": 61.28, "eta_s": 4320},
     "step 12/100 loss 0.4123 lr 1.0e-05 grad_norm 0.91 tok/s 18.2k mem 61.3GiB eta 1h12m"),
    ({"step": 12, "total_steps": 100, "val_loss": 0.5}, "step 12/100 val_loss 0.5000"),
    ({"eta_s": 0, "loss": math.nan, "step": 1, "total_steps": 1, "lr": 0.0, "memory_gib": None}, "step 1/1 loss nan lr 0.0e+00 eta 0s"),
])
def test_step_line(record, line):
    assert step_line(record) == line


@pytest.mark.parametrize("seconds, words", [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (725, "12m05s"), (3599.6, "1h00m"),
                                            (4320, "1h12m"), (183600, "2d03h")])
def test_duration_words(seconds, words):
    assert duration_words(seconds) == words


@pytest.mark.parametrize("count, words", [(0, "0"), (999, "999"), (999.6, "1.0k"), (18249, "18.2k"), (999_940, "999.9k"),
                                          (999_960, "1.0M")])
def test_count_words(count, words):
    assert count_words(count) == words


def test_eta_forgets_slow_first_steps_and_counts_pauses():
    now = 100.0
    meter = EtaMeter(total_steps=10, window=2, clock=lambda: now)
    assert meter.add(1, 1000, 10.0) == {"tokens_per_s": 100.0, "eta_s": 90.0}
    now += 1.0
    meter.add(2, 1000, 1.0)
    now += 1.0
    # window: steps 2 and 3, 2000 tokens in 2 s
    assert meter.add(3, 1000, 1.0) == {"tokens_per_s": 1000.0, "eta_s": 7.0}
    now += 5.0  # a step of 1 s after a save of 4 s: pauses of 4 s in 4 steps
    assert meter.add(4, 1000, 1.0) == {"tokens_per_s": 1000.0, "eta_s": 6 * (1.0 + 1.0)}


def test_tensorboard_hides_what_a_resume_repeats(tmp_path):
    """The real package, in a process of its own so that this file needs no torch."""
    code = """
import sys
from mfsdp_cli.train.metrics import MetricsLog
for resume_step, steps in ((0, (1, 2, 3)), (1, (2,))):
    with MetricsLog(sys.argv[1], ["tensorboard"], "p", "n", {}, True, resume_step=resume_step) as log:
        for step in steps:
            log.log({"step": step, "total_steps": 9, "loss": resume_step * 10.0 + step, "note": "text"})
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1] + "/tensorboard"); events.Reload()
print(events.Tags()["scalars"], [(e.step, e.value) for e in events.Scalars("loss")])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['loss'] [(1, 1.0), (2, 12.0)]"


def test_a_full_disk_is_told_with_the_step(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(MfsdpError, match="No space left on device: the metrics of step 7 cannot be written") as caught, open_log(tmp_path) as log:
        log.log({"step": 7, "loss": 1.0})
    assert caught.value.exit_code == MACHINE_UNFIT


def test_half_a_line_is_a_full_disk_too(tmp_path):
    """A file may grow to 250 bytes: the last line is cut, which is told, and the next attempt cuts it off."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_log(tmp_path) as log:
        log.log({"step": 1, "loss": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (250, before[1]))
        try:
            with pytest.raises(MfsdpError, match="No space left|File too large"):
                for step in range(2, 10):
                    log.log({"step": step, "loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 250
    with open_log(tmp_path) as log:
        assert "half-written last line" in log.notes[0]
        log.log({"step": 4, "loss": 1.0})
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4]
