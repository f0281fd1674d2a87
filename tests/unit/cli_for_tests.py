"""The command line in this process, its inputs, what it offers, and run folders as it leaves them."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from inputs_for_tests import write_chats, write_model
from typer.main import get_command

from mfsdp_cli import cli
from mfsdp_cli.checkpoint.manifest import Manifest
from mfsdp_cli.checkpoint.saving import begin, commit
from mfsdp_cli.launch.folder import open_attempt
from mfsdp_cli.launch.start import check

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("NPROC", "TP", "PP", "EP", "GEN_TP", "CUDA_DEVICE_MAX_CONNECTIONS", "NO_COLOR", "FORCE_COLOR")
CLEAN = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {"PYTHONPATH": str(ROOT)}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def mfsdp(capsys, monkeypatch):
    """Call the command line in this process, as main() does: mfsdp("sft", "-n", cwd=folder, NPROC="2")."""
    def call(*args, cwd=None, **environ):
        args = [str(arg) for arg in args]
        with monkeypatch.context() as patch:
            for name in VARIABLES:
                patch.delenv(name, raising=False)
            for name, value in {"COLUMNS": "120", **environ}.items():
                patch.setenv(name, value)
            if cwd is not None:
                patch.chdir(cwd)
            code = cli.guarded(lambda: cli.app(args, prog_name="mfsdp", standalone_mode=False), args)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def inputs(tmp_path):
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.parquet", 20)
    return tmp_path


SFT = ("sft", "--model", "model", "--train-files", "train.parquet", "engine.device=cpu", "engine.dtype=float32", "data.train_batch_size=6")


def commands(group=None, path=()):
    group = group or get_command(cli.app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def checked(folder, *assignments, resume=None):
    flags = {"model": str(folder / "model"), "train-files": [str(folder / "train.parquet")], "output": str(folder / "run")}
    assignments = ["engine.device=cpu", *assignments]
    return check("sft", preset=None, config=None, assignments=assignments, flags=flags, resume=resume, environ={"PATH": ""})


def save(run_dir, step):
    folder = begin(run_dir / "checkpoints", step)
    (folder / "trainer.json").write_text("{}")
    return commit(folder, Manifest(step, 9, 8 * step, ["model", "optimizer", "extra"], {"world": 1}, "float32", 8, "Qwen2ForCausalLM", "model", 1))


def folder_errors(result):
    return {p.key: p for p in result.problems if p.level == "error"}


def start_once(result):
    """As `launch.start.start` does before it starts anything."""
    attempt = open_attempt(result.run_dir, result.settings, result.origins)
    attempt.lock.close()
    return attempt
