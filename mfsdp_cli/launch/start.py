"""`mfsdp sft` and `mfsdp grpo` from settings to outcome: load, look at the machine, judge, and then only print the plan or start it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.checkpoint.finding import complete_steps
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS
from mfsdp_cli.config.load import load
from mfsdp_cli.config.rulebook import judge
from mfsdp_cli.config.rules import check as check_rules
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.config.values import validates_only
from mfsdp_cli.errors import OK, STOPPED, Problem, exit_code_of
from mfsdp_cli.launch.command import child_command, child_environment, shell_line
from mfsdp_cli.launch.facts import Facts, gather
from mfsdp_cli.launch.fit import disk_problems, memory_problems
from mfsdp_cli.launch.folder import folder_problems, open_attempt, record_command, run_folder
from mfsdp_cli.launch.plan import Plan, make_plan
from mfsdp_cli.launch.reward import function_problems, reward_problems
from mfsdp_cli.output import Console, crash_folder, print_stderr
from mfsdp_cli.records import Record

if TYPE_CHECKING:
    from mfsdp_cli.launch.outcome import Outcome


class Checked(Record):
    """Settings that have been looked at from all sides; `problems` of level error keep them from starting."""

    settings: SftSettings | GrpoSettings
    origins: dict[str, str]
    facts: Facts
    plan: Plan
    run_dir: Path
    problems: list[Problem]

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.problems)

    @property
    def validates_only(self) -> bool:
        return validates_only(self.settings)


def check(kind: str, *, preset: str | None, config: str | None, assignments: list[str], flags: Mapping[str, object], resume: str | None,
          environ: Mapping[str, str]) -> Checked:
    """Load the settings and judge them against this machine. Reads only; raises nothing for the user's mistakes."""
    loaded = load(kind, preset=preset, config=config, assignments=assignments, flags={**flags, **_resume_flags(resume)}, environ=environ)
    origins = loaded.origins | {key: "--resume" for key in _resume_flags(resume)}
    run_dir = run_folder(loaded.settings)
    facts = gather(loaded.settings, environ, run_dir)
    _name_checkpoints(loaded.settings, facts)
    problems = loaded.problems + check_rules(loaded.settings, origins, facts) + reward_problems(loaded.settings, origins, facts)
    plan = make_plan(loaded.settings, facts)
    problems += judge("launch", loaded.settings, origins, facts, {
        "function": function_problems(loaded.settings, facts),
        "folder": folder_problems(run_dir, loaded.settings, origins),
        "memory": memory_problems(loaded.settings, plan, facts),
        "disk": disk_problems(loaded.settings, plan, facts, str(run_dir), len(complete_steps(run_dir / CHECKPOINTS))),
    })
    if any(p.level == "error" and p.key in ("--preset", "--config", preset, config) for p in loaded.problems):
        # what a file that could not be read may well have given is not missing
        problems = [p for p in problems if p.rule not in ("model-given", "train-files-given")]
    return Checked(loaded.settings, origins, facts, plan, run_dir, list(dict.fromkeys(problems)))


def start(checked: Checked, called: list[str], console: Console) -> Outcome:
    """Write the run folder, start this node's ranks, or the driver of them, and wait for their end.

    called  the command line that brought us here, for command.txt
    """
    from mfsdp_cli.launch.run import run

    settings = checked.settings
    attempt = open_attempt(checked.run_dir, settings, checked.origins)
    with attempt.lock, crash_folder(attempt.path):
        command = child_command(settings, checked.run_dir, attempt.path, attempt.node_rank)
        added = child_environment(settings, checked.plan, checked.facts)
        line = shell_line(command, added)
        record_command(attempt, shlex.join(called), line)
        console.say(f"starting {line}")
        console.say(f"logs in {attempt.path}")
        return run(command, {**checked.facts.environ, **added}, attempt, console)


def tell(outcome: Outcome, console: Console, val_only: bool = False) -> int:
    """Print how the run ended and, when there is one, its product: the last complete checkpoint, or what was validated. Returns
    the exit code."""
    if outcome.status in ("failed", "killed"):
        console.problems(outcome.problems)
        from mfsdp_cli.launch.outcome import describe

        print_stderr(f"error: {describe(outcome)}")
    elif outcome.message:
        print_stderr(f"warning: {outcome.message}")
    if outcome.status == "stopped":
        print_stderr(f"stopped; the same command again goes on from {outcome.checkpoint}")
    if val_only and outcome.exit_code == OK:
        console.product([f"{name} {value:g}" for name, value in outcome.metrics.items() if name.startswith("val_")], outcome.to_dict())
    elif console.json or (outcome.checkpoint is not None and outcome.exit_code in (OK, STOPPED)):
        console.product(str(outcome.checkpoint), outcome.to_dict())
    return outcome.exit_code


def _name_checkpoints(settings: SftSettings | GrpoSettings, facts: Facts) -> None:
    """A run folder as model stands for the checkpoint that is its latest now: the ranks, and every later attempt, take that one."""
    if facts.model_source:
        settings.model.path = str(facts.model_source.checkpoint)
    if facts.reference_source:
        settings.ref.path = str(facts.reference_source.checkpoint)


def _resume_flags(resume: str | None) -> dict[str, object]:
    """--resume auto, never or a checkpoint, as the settings they stand for."""
    if resume is None:
        return {}
    if resume in ("auto", "never"):
        return {"trainer.resume_mode": "auto" if resume == "auto" else "disable"}
    return {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": resume}
