"""The run folder: who may use it, and what is written into it before the ranks start.

`folder_problems` only reads, so that a dry run judges as the real start would; `open_attempt` takes the lock and writes.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mfsdp_cli.checkpoint.finding import complete_steps, latest_complete, resolve
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS, TMP, require_complete, write_atomically
from mfsdp_cli.checkpoint.reuse import resume_problems
from mfsdp_cli.config.values import kind_of, validates_only
from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, MfsdpError, Problem
from mfsdp_cli.launch.locks import ALIVE, is_free, try_lock
from mfsdp_cli.records import Record

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings

CONFIG = "config.yaml"
# A resumed run goes on where the data order stopped; each of these keys changes which rows or weights that means.
FIXED_ON_RESUME = {
    "sft": (
        "model.path", "data.train_files", "data.messages_key", "data.train_batch_size", "data.train_max_samples", "data.shuffle",
        "data.truncation", "data.max_length", "trainer.seed",
    ),
    "grpo": (
        "model.path", "ref.path", "data.train_files", "data.prompt_key", "data.train_batch_size", "data.train_max_samples", "data.shuffle",
        "data.truncation", "data.filter_overlong_prompts", "data.max_prompt_length", "trainer.seed",
    ),
}


class Attempt(Record):
    """One start of a run on one node. `path` is RUN/attempts/NNN; the lock is held while `lock` is open; `program` is what
    the launcher starts, in words."""

    run_dir: Path
    path: Path
    node_rank: int
    lock: TextIO
    program: str

    @property
    def log(self) -> Path:
        return self.path / "launcher.log"


def run_folder(settings: SftSettings | GrpoSettings) -> Path:
    """trainer.output_dir, or runs/<experiment_name>."""
    trainer = settings.trainer
    return Path(os.path.expanduser(trainer.output_dir)) if trainer.output_dir else Path("runs") / trainer.experiment_name


def folder_problems(run_dir: Path, settings: SftSettings | GrpoSettings, origins: dict[str, str]) -> list[Problem]:
    """What keeps these settings from starting, or going on, in this folder. Reads only."""
    if run_dir.exists() and not run_dir.is_dir():
        return [Problem("trainer.output_dir", str(run_dir), "is a file; a run needs a folder", "name another folder",
                        origins.get("trainer.output_dir", ""), BAD_INPUT)]
    node_rank = settings.trainer.node_rank
    return (_lock_problems(run_dir, node_rank) or _survivors(run_dir, node_rank)) + _resume_problems(run_dir, settings, origins)


def open_attempt(run_dir: Path, settings: SftSettings | GrpoSettings, origins: dict[str, str]) -> Attempt:
    """Lock the run folder, judge it once more under the lock, and write config.yaml, origin.json and a new attempts/NNN.

    Raises MfsdpError when another launcher holds the lock or the folder cannot be used.
    """
    from mfsdp_cli.config.load import dump_yaml

    node_rank = settings.trainer.node_rank
    try:
        (run_dir / "attempts").mkdir(parents=True, exist_ok=True)
        lock = open(lock_file(run_dir, node_rank), "a+", encoding="utf-8")
        if not try_lock(lock, fcntl.LOCK_EX):
            lock.close()
            raise MfsdpError(_held(run_dir, node_rank))
        if problems := _survivors(run_dir, node_rank) + _resume_problems(run_dir, settings, origins):
            lock.close()
            raise MfsdpError(problems)
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {os.uname().nodename} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        lock.flush()
        path = next_attempt(run_dir / "attempts", node_rank)
        path.mkdir()
        text = dump_yaml(settings)
        write_atomically(path / CONFIG, text)
        if (node_rank == 0 and not validates_only(settings)) or not (run_dir / CONFIG).exists():  # it must not change how training goes on
            write_atomically(run_dir / CONFIG, text)
            write_atomically(run_dir / "origin.json", json.dumps(origins, indent=1, ensure_ascii=False) + "\n")
    except OSError as e:
        raise MfsdpError(Problem("trainer.output_dir", str(run_dir), f"the run folder cannot be written: {e.strerror}",
                                 "choose a folder that you may write, on a disk with room", origins.get("trainer.output_dir", ""),
                                 MACHINE_UNFIT)) from e
    return Attempt(run_dir, path, node_rank, lock, "torchrun" if kind_of(settings) == "sft" else "the driver")


def record_command(attempt: Attempt, called: str, started: str) -> None:
    """Append to command.txt how mfsdp was called and what it starts."""
    with open(attempt.run_dir / "command.txt", "a", encoding="utf-8") as file:
        file.write(f"# {time.strftime('%Y-%m-%d %H:%M:%S')} {attempt.path.name}\n{called}\n{started}\n")


def lock_file(run_dir: Path, node_rank: int) -> Path:
    """Nodes share a run folder; each has one launcher in it."""
    return run_dir / ("lock" if node_rank == 0 else f"lock-node{node_rank}")


def next_attempt(attempts: Path, node_rank: int) -> Path:
    """attempts/001, 002, … on node 0; attempts/001-node1 … on the others, whose launchers count by themselves."""
    last, suffix = _last_attempt(attempts, node_rank), _node_suffix(node_rank)
    number = int(last.name.removesuffix(suffix)) if last else 0
    return attempts / f"{number + 1:03d}{suffix}"


def _last_attempt(attempts: Path, node_rank: int) -> Path | None:
    suffix = _node_suffix(node_rank)
    names = [p.name for p in attempts.iterdir() if p.name.endswith(suffix)] if attempts.is_dir() else []
    numbered = [name for name in names if name.removesuffix(suffix).isdecimal()]
    return attempts / max(numbered, key=lambda name: int(name.removesuffix(suffix))) if numbered else None


def _node_suffix(node_rank: int) -> str:
    return "" if node_rank == 0 else f"-node{node_rank}"


def _resume_problems(run_dir: Path, settings: SftSettings | GrpoSettings, origins: dict[str, str]) -> list[Problem]:
    """A folder with checkpoints is continued with the settings that made them, or refused; never begun anew."""
    checkpoints, mode = run_dir / CHECKPOINTS, settings.trainer.resume_mode
    if mode == "resume_path":
        return _resume_path_problems(settings, origins)
    steps = complete_steps(checkpoints)
    if mode == "disable" and steps:
        return [Problem("trainer.resume_mode", mode, f"{run_dir} holds checkpoints up to step {max(steps)}; a new run would mix with them",
                        "choose another --output, or --resume auto to continue", origins.get("trainer.resume_mode", ""))]
    if mode == "auto" and steps:
        return _changed_keys(run_dir, settings, origins, max(steps)) + _misfits(latest_complete(checkpoints), settings, origins)
    damaged = sorted(p.name for p in checkpoints.glob("step_*") if not p.name.endswith(TMP)) if mode == "auto" else []
    if damaged:
        return [Problem(str(checkpoints), ", ".join(damaged), "none of these is complete, and starting at step 0 would write over the run",
                        f"mfsdp ckpt inspect {checkpoints / damaged[-1]} says what is missing; or choose another --output", code=BAD_INPUT)]
    return []


def _resume_path_problems(settings: SftSettings | GrpoSettings, origins: dict[str, str]) -> list[Problem]:
    path = settings.trainer.resume_from_path
    if path is None:
        return []  # `config.rules` says so
    try:
        return _misfits(resolve(path), settings, origins)
    except MfsdpError as error:
        where = origins.get("trainer.resume_from_path", "")
        if where == "--resume" and not Path(path).exists():
            fix = "auto, never, or the folder of a run or checkpoint"
            return [Problem("trainer.resume_from_path", path, "there is no such folder", fix, where, BAD_INPUT)]
        return [replace(p, where=where) for p in error.problems]


def _misfits(checkpoint: Path, settings: SftSettings | GrpoSettings, origins: dict[str, str]) -> list[Problem]:
    """Why these settings cannot continue from this step folder. Raises MfsdpError when it is incomplete."""
    return [replace(p, where=origins.get(p.key, "default")) for p in resume_problems(settings, require_complete(checkpoint))]


def _lock_problems(run_dir: Path, node_rank: int) -> list[Problem]:
    file = lock_file(run_dir, node_rank)
    if not file.is_file():
        return []
    with open(file, encoding="utf-8") as lock:  # read-only: a dry run leaves no trace
        return [] if try_lock(lock, fcntl.LOCK_SH) else [_held(run_dir, node_rank)]


def _survivors(run_dir: Path, node_rank: int) -> list[Problem]:
    """Processes of this node's last attempt that live on without their launcher, which was killed: they save and end, and nobody
    may write here, nor prune what they have read, before that."""
    path = _last_attempt(run_dir / "attempts", node_rank)
    if path is None or is_free(path / ALIVE):
        return []
    return [Problem(str(path), "still at work", "its launcher is gone, and its processes are saving or ending",
                    f"wait for them: the logs in {path.name} tell how far they are", code=MACHINE_UNFIT)]


def _held(run_dir: Path, node_rank: int) -> Problem:
    file = lock_file(run_dir, node_rank)
    holder = file.read_text(encoding="utf-8", errors="replace").strip() or "holder unknown"
    return Problem(str(file), holder, "another mfsdp works in this run folder",
                   "wait for it, stop it (kill its pid: it saves first), or choose another --output", code=MACHINE_UNFIT)


def _changed_keys(run_dir: Path, settings: SftSettings | GrpoSettings, origins: dict[str, str], step: int) -> list[Problem]:
    """Settings that differ from those the folder's checkpoints were made with and would make the rest another run."""
    from mfsdp_cli.config.load import read_resolved, to_dict
    from mfsdp_cli.config.values import as_text, other_kind

    file, kind = run_dir / CONFIG, kind_of(settings)
    if not file.is_file():
        return []
    try:
        before = to_dict(read_resolved(file, kind))
    except MfsdpError as error:
        if _parses(file, other_kind(kind)):
            why = f"it holds checkpoints up to step {step} of mfsdp {other_kind(kind)}, and this is mfsdp {kind}"
            where = origins.get("trainer.output_dir", "default")
            return [Problem("trainer.output_dir", str(run_dir), why, "choose another --output", where)]
        return [Problem(str(file), "", f"the settings of the earlier attempt cannot be read: {error}",
                        "restore the file, or choose another --output", code=BAD_INPUT)]
    now, problems = to_dict(settings), []
    for key in ("model.path",) if validates_only(settings) else FIXED_ON_RESUME[kind]:
        section, name = key.split(".")
        old, new = before[section][name], now[section][name]
        if old != new:
            why = f"{run_dir} holds checkpoints up to step {step}, made with {as_text(old)}; otherwise the rest would be another run"
            fix = f"set {key} back to {as_text(old)}, or choose another --output"
            problems.append(Problem(key, as_text(new), why, fix, origins.get(key, "default")))
    return problems


def _parses(file: Path, kind: str) -> bool:
    from mfsdp_cli.config.load import read_resolved

    try:
        read_resolved(file, kind)
    except MfsdpError:
        return False
    return True
