import io
import json
import math
import random

import pytest

from mfsdp_cli.errors import Problem
from mfsdp_cli.output import Console, StepLines, format_problems, print_json, use_color


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("environ, flag, on_terminal, in_pipe", [
    ({}, False, True, False),
    ({"NO_COLOR": "1"}, False, False, False),
    ({"NO_COLOR": ""}, False, True, False),
    ({"TERM": "dumb"}, False, False, False),
    ({"FORCE_COLOR": "1"}, False, True, True),
    ({"FORCE_COLOR": "0"}, False, True, False),
    ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False, False),
    ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, True, True),
    ({"FORCE_COLOR": "1"}, True, False, False),
    ({"GITHUB_ACTIONS": "true"}, False, True, False),
])
def test_color(environ, flag, on_terminal, in_pipe):
    assert use_color(Terminal(), flag, environ) is on_terminal
    assert use_color(io.StringIO(), flag, environ) is in_pipe


def test_problems_are_told_at_once():
    problems = [
        Problem("rollout.n", "1", "needs 2", "set it to 2", "run.yaml:14"),
        Problem("wandb", "", "no login", "", level="warning"),
        Problem("parallel.szie", "4", "no such key", "did you mean size?", "run.yaml:22"),
    ]
    assert format_problems(problems, "try --dry-run") == """error: 2 problems in run.yaml

  run.yaml:14  rollout.n = 1
      needs 2
      fix: set it to 2
  run.yaml:22  parallel.szie = 4
      no such key
      fix: did you mean size?

warning:

  wandb
      no login

hint: try --dry-run"""


def test_a_rule_is_named_in_passing():
    problem = Problem("rollout.n", "1", "needs 2", "set it to 2", "--n", rule="group-of-two")
    assert format_problems([problem]).splitlines()[2] == "  --n  rollout.n = 1  [group-of-two]"
    assert "\033[2m[group-of-two]\033[0m\n" in format_problems([problem], color=True)


def test_problems_from_several_places_name_no_file():
    problems = [Problem("a", "1", "w", "f", "run.yaml:1"), Problem("b", "1", "w", "f", "--tp")]
    assert format_problems(problems).startswith("error: 2 problems\n")
    assert format_problems(problems[:1]).startswith("error: 1 problem in run.yaml\n")


def test_only_the_level_is_colored():
    text = format_problems([Problem("a", "1", "w", "f")], color=True)
    assert text.startswith("\033[1;31merror:\033[0m 1 problem\n") and text.count("\033") == 2


def test_quiet_leaves_only_errors(capsys):
    console = Console(quiet=True)
    console.say("hello")
    console.problems([Problem("a", "1", "w", "f", level="note")])
    assert capsys.readouterr() == ("", "")
    console.problems([Problem("a", "1", "w", "f"), Problem("b", "1", "w", "f", level="warning")])
    err = capsys.readouterr().err
    assert "a = 1" in err and "b = 1" not in err


def test_json_has_no_nan_and_says_where_it_was(capsys):
    print_json({"a": [1.5, math.nan, {"b": -math.inf}], "ok": True})
    data = json.loads(capsys.readouterr().out)
    assert data == {"schema": 1, "a": [1.5, None, {"b": None}], "ok": True, "non_finite": ["a.1", "a.2.b"]}


def test_json_is_standard_for_any_numbers(capsys):
    draw = random.Random(0)
    for _ in range(50):
        numbers = [draw.choice([math.nan, math.inf, -math.inf, draw.random(), draw.randint(-9, 9)]) for _ in range(6)]
        print_json({"numbers": numbers})
        data = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(text))
        assert data["numbers"] == [n if math.isfinite(n) else None for n in numbers]


def shown_steps(capsys, steps, verbose=False, seconds_a_step=0.0):
    now = [0.0]
    with StepLines(Console(verbose=verbose), io.StringIO(), clock=lambda: now[0]) as lines:
        for step in steps:
            now[0] += seconds_a_step
            lines.feed(f"step {step}/95 loss 0.5")
    return [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()], lines.last_step


def test_step_lines_come_at_a_falling_rate(capsys):
    shown, last = shown_steps(capsys, range(1, 96))
    assert shown == [*range(1, 11), 20, 30, 40, 50, 60, 70, 80, 90, 95] and last == 95


def test_a_resumed_run_shows_its_own_first_steps(capsys):
    assert shown_steps(capsys, range(41, 71))[0] == [*range(41, 51), 60, 70]


def test_a_slow_run_is_never_silent_for_long(capsys):
    assert shown_steps(capsys, range(1, 20), seconds_a_step=61.0)[0] == [*range(1, 20)]
    assert shown_steps(capsys, range(1, 20), seconds_a_step=31.0)[0] == [*range(1, 11), 12, 14, 16, 18]


def test_verbose_shows_every_step(capsys):
    assert shown_steps(capsys, range(1, 30), verbose=True)[0] == [*range(1, 30)]


def test_status_lines_always_pass(capsys):
    with StepLines(Console(), io.StringIO()) as lines:
        lines.feed("saved runs/a/checkpoints/step_000020")
        lines.feed("step by step")
        lines.feed("step 0/95 val_loss 2.5")  # before the first step, so nothing can be saved yet
        lines.feed("step 0/95 val_pass_rate 0.5")
        assert lines.last_step is None
        lines.feed("step 1/95 reward 0.5 pass 0.5")  # of mfsdp grpo
        assert lines.last_step == 1
    shown = ["saved runs/a/checkpoints/step_000020", "step by step", "step 0/95 val_loss 2.5", "step 0/95 val_pass_rate 0.5"]
    assert capsys.readouterr().err.splitlines() == [*shown, "step 1/95 reward 0.5 pass 0.5"]


def test_a_terminal_gets_a_bar_with_the_lines_above(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    with StepLines(Console(), screen) as lines:
        for step in range(1, 12):
            lines.feed(f"step {step}/95 loss 0.5{step} [x]")
        lines.feed("saved step_000011 [/b]")
        assert lines.bar.tasks[0].completed == 11 and lines.bar.tasks[0].total == 95
    assert lines.bar is None
    assert "saved step_000011 [/b]" in screen.getvalue() and "11/95" in screen.getvalue() and "step 2/95 loss 0.52 [x]" in screen.getvalue()
    assert "step 11/95" not in screen.getvalue()
