from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELL = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SHELL, ids=lambda p: p.name)
def test_shell_scripts_parse_run_and_stop_at_errors(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert os.access(script, os.X_OK), f"{script} has no run bit"
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and re.search(r"^set -e?uo pipefail$", text, re.M)


def test_ci_runs_the_readmes_test_command_and_test_installs_first():
    assert "\nscripts/test.sh " in (ROOT / ".ci" / "run").read_text()
    test = (ROOT / "scripts" / "test.sh").read_text()
    assert test.index("scripts/install.sh") < test.index("exec .venv/bin/python -m pytest")


@pytest.mark.parametrize("code", [0, 1, 5])
def test_ci_keeps_the_exit_code_of_the_tests(tmp_path, code):
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "scripts" / "test.sh").write_text(f"#!/usr/bin/env bash\necho tested $1\nexit {code}\n")
    (tmp_path / "scripts" / "test.sh").chmod(0o755)
    done = subprocess.run([tmp_path / ".ci" / "run", "unit"], cwd="/", capture_output=True, text=True)
    closing = "ci: passed" if code == 0 else f"ci: FAILED (exit code {code})"
    assert (done.returncode, done.stdout.splitlines()) == (code, ["tested unit", closing])


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in lines), "only name==version: no addresses, no options"
    return dict(line.split("==") for line in lines)


def test_pins_are_plain_and_agree_with_the_project():
    import tomllib

    from packaging.requirements import Requirement

    versions = pins()
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = metadata["project"]
    extras = project["optional-dependencies"]
    for text in [*metadata["build-system"]["requires"], *project["dependencies"], *extras["train"], "pytest"]:
        wanted = Requirement(text)
        assert versions[wanted.name] in wanted.specifier, f"{text} against the pin {versions.get(wanted.name)}"


def test_pins_are_closed_under_requirements():
    """--no-deps installs nothing that is not listed: everything but megatron-bridge must find what it requires."""
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    versions = pins()
    missing = []
    for name in versions.keys() - {"megatron-bridge"}:
        for text in metadata.requires(name) or []:
            wanted = Requirement(text)
            if (wanted.marker is None or wanted.marker.evaluate({"extra": ""})) and canonicalize_name(wanted.name) not in versions:
                missing.append(f"{name} requires {text}")
    assert missing == []


def find_python(environ: dict[str, str]) -> subprocess.CompletedProcess:
    code = f"source {ROOT}/scripts/install.sh; find_python"
    return subprocess.run(["/bin/bash", "-c", code], env=environ, capture_output=True, text=True)


def fake(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def shims(tmp_path) -> dict[str, str]:
    """A PATH whose Pythons do not work, like pyenv's shims without a chosen version, and an empty home."""
    for name in ("python3.12", "python3", "python"):
        fake(tmp_path / "shims" / name, f"echo 'pyenv: {name}: command not found' >&2; exit 127")
    os.symlink(shutil.which("dirname"), tmp_path / "shims" / "dirname")
    return {"PATH": str(tmp_path / "shims"), "HOME": str(tmp_path / "home")}


def test_a_working_pyenv_python_is_found_behind_a_broken_shim(shims, tmp_path):
    working = tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python"
    fake(working, f'exec {sys.executable} "$@"')
    done = find_python(shims)
    assert (done.returncode, done.stdout.strip()) == (0, str(working)), done.stderr


def test_a_chosen_python_must_be_3_12(shims, tmp_path):
    done = find_python(shims | {"MFSDP_PYTHON": str(fake(tmp_path / "py311", "exit 1"))})
    assert done.returncode == 1 and f"MFSDP_PYTHON={tmp_path}/py311 is no working Python 3.12" in done.stderr and done.stdout == ""
    good = fake(tmp_path / "py312", f'exec {sys.executable} "$@"')
    assert find_python(shims | {"MFSDP_PYTHON": str(good)}).stdout.strip() == str(good)


@pytest.mark.skipif(any(Path(folder, "python3.12").exists() for folder in ("/usr/bin", "/usr/local/bin")),
                    reason="this machine has a system Python 3.12")
def test_without_any_python_the_way_out_is_told(shims):
    done = find_python(shims)
    assert done.returncode == 1 and done.stdout == ""
    assert "no working Python 3.12" in done.stderr and "pyenv install 3.12" in done.stderr


def test_an_installed_environment_is_left_alone(tmp_path):
    """The stamp covers pins, project metadata and place; changing one of them means installing again."""
    for name in ("requirements.txt", "pyproject.toml", "scripts"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    fake(tmp_path / ".venv" / "bin" / "python", f'case "$*" in *ensurepip*) exit 0;; *) echo "$*" >>{tmp_path}/calls; exit 1;; esac')
    script = f"source {tmp_path}/scripts/install.sh"
    subprocess.run(["bash", "-c", f"{script}; wanted_stamp >$stamp"], check=True)
    assert subprocess.run([tmp_path / "scripts" / "install.sh"], cwd="/").returncode == 0
    assert not (tmp_path / "calls").exists(), "nothing may be installed a second time"
    with open(tmp_path / "requirements.txt", "a") as file:
        file.write("# changed\n")
    done = subprocess.run([tmp_path / "scripts" / "install.sh"], cwd="/", capture_output=True, text=True)
    assert done.returncode != 0, "the stand-in for pip fails, and so must the script"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "install -q uv==" in calls[0] and "install -q --no-deps -r requirements.txt" in calls[1]
    assert not (tmp_path / ".venv" / "mfsdp-installed").exists(), "a failed installation is not stamped"


def test_quickstart_explains_a_wrong_option_without_installing():
    done = subprocess.run([ROOT / "scripts" / "quickstart.sh", "--help-me"], capture_output=True, text=True)
    assert done.returncode == 2 and "--dir DIR" in done.stdout and done.stderr == ""
