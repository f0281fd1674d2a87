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


# ---------------------------------------------------------------- Slurm

# Stand-ins that write down how they were called. srun runs its program once for each task, with the task's number; `mfsdp` says
# that it was called, waits for USR1 if told to, and ends as $ENDS says.
SRUN = '''
echo "srun $*" >>"$CALLS"
tasks=$SLURM_NNODES
while [[ ${1:-} == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#--ntasks=}; shift; done
pids=()
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@" & pids+=($!); done
trap 'kill -USR1 "${pids[@]}"' USR1
trap 'kill -TERM "${pids[@]}" 2>/dev/null; exit 143' TERM
worst=0
for pid in "${pids[@]}"; do
  code=0; wait "$pid" || code=$?
  while kill -0 "$pid" 2>/dev/null; do code=0; wait "$pid" || code=$?; done
  ((code > worst)) && worst=$code
done
exit "$worst"
'''
SCONTROL = '''
echo "scontrol $*" >>"$CALLS"
if [[ $1 == show ]]; then printf '%s\\n' ${SLURM_JOB_NODELIST//,/ }; fi
'''
MFSDP = '''
echo "mfsdp $*" >>"$CALLS"
if [[ -n ${WAITS:-} ]]; then
  trap 'echo "mfsdp got USR1" >>"$CALLS"; exit "$ENDS"' USR1
  touch "$WAITS.$SLURM_PROCID"
  while :; do sleep 0.1; done
fi
exit "${ENDS:-0}"
'''
RAY = '''
echo "ray $* mode=$RAY_AUTH_MODE token=${#RAY_AUTH_TOKEN}" >>"$CALLS"
case $1 in
  start) trap 'echo "ray ended" >>"$CALLS"; exit 0' TERM; [[ -n ${NEVER_JOINS:-} ]] || touch "$CALLS.joined.$RANDOM$RANDOM"; while :; do sleep 0.1; done ;;
  status) for node in "$CALLS".joined.*; do [[ -e $node ]] && echo " 1 node_abc"; done; true ;;
esac
'''


@pytest.fixture
def slurm(tmp_path):
    """Start a Slurm script among the stand-ins; returns the process and a function that reads the calls."""
    for name, body in {"srun": SRUN, "scontrol": SCONTROL, "mfsdp": MFSDP, "ray": RAY}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (tmp_path / "bin" / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()

    def start(script, *args, **environ):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SRUN", "RAY"))}
        environ = clean | {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "CALLS": str(calls), "SLURM_JOB_ID": "12345", "SLURM_NNODES": "3",
                           "SLURM_JOB_NODELIST": "n1,n2,n3", "SLURM_GPUS_ON_NODE": "8"} | environ
        return subprocess.Popen([ROOT / "scripts" / script, *args], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    start.calls = lambda prefix: sorted(line for line in calls.read_text().splitlines() if line.startswith(prefix))
    return start


def test_slurm_starts_one_launcher_a_node(slurm):
    job = slurm("slurm-sft.sh", "--config", "my run.yaml", "optim.lr=2e-5")
    _, err = job.communicate(timeout=30)
    assert job.returncode == 0, err
    flags = "--nnodes 3 --rdzv-endpoint n1:22345 --nproc 8 --config my run.yaml optim.lr=2e-5"
    assert slurm.calls("mfsdp") == [f"mfsdp sft --node-rank {rank} {flags}" for rank in range(3)]
    assert slurm.calls("scontrol") == ["scontrol show hostnames n1,n2,n3"], "a run that is done is not queued again"


@pytest.mark.parametrize("script", ["slurm-sft.sh", "slurm-grpo.sh"])
def test_slurm_queues_a_stopped_job_again(slurm, tmp_path, script):
    import signal
    import time

    job = slurm(script, "--config", "a.yaml", WAITS=str(tmp_path / "up"), ENDS="75")
    tasks = 3 if script == "slurm-sft.sh" else 1
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("up.*"))) < tasks:
        assert time.monotonic() < deadline and job.poll() is None, job.communicate()
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 75 and "queueing job 12345 again" in err
    assert slurm.calls("mfsdp got") == ["mfsdp got USR1"] * tasks and "scontrol requeue 12345" in slurm.calls("scontrol")


@pytest.mark.parametrize("ends", [1, 3, 137])
def test_slurm_leaves_a_failed_job_as_it_is(slurm, ends):
    job = slurm("slurm-sft.sh", "--config", "a.yaml", ENDS=str(ends))
    job.communicate(timeout=30)
    assert job.returncode == ends and slurm.calls("scontrol requeue") == []


def test_slurm_makes_a_ray_cluster_for_the_job_and_ends_it(slurm):
    job = slurm("slurm-grpo.sh", "--config", "a.yaml", RAY_ADDRESS="elsewhere:1")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert slurm.calls("mfsdp") == ["mfsdp grpo --nnodes 3 --ray-address n1:22345 --nproc 8 --config a.yaml"]
    guard = "mode=token token=64"
    head, worker = f"ray start --head --node-ip-address=n1 --port=22345 --block {guard}", f"ray start --address=n1:22345 --block {guard}"
    assert slurm.calls("ray start") == sorted([head, worker, worker])
    assert len(slurm.calls("ray status")) >= 1 and slurm.calls("ray ended") == ["ray ended"] * 3
    started = [call for call in slurm.calls("srun") if "ray start" in call]
    assert any("--nodelist=n1" in call for call in started) and any("--ntasks=2" in call and "--exclude=n1" in call for call in started)


def test_slurm_does_not_wait_for_ever_for_nodes(slurm):
    job = slurm("slurm-grpo.sh", "--config", "a.yaml", SLURM_JOB_NODELIST="n1,n2,n3,n4", SLURM_NNODES="4", MFSDP_RAY_LIMIT_S="0", NEVER_JOINS="1")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 4 and "nodes have joined Ray" in err and slurm.calls("mfsdp") == []


@pytest.mark.parametrize("script", ["slurm-sft.sh", "slurm-grpo.sh"])
def test_slurm_files_are_for_sbatch(slurm, script):
    job = slurm(script, SLURM_JOB_ID="")
    out, err = job.communicate(timeout=30)
    assert (job.returncode, out) == (2, "") and "this is a file for sbatch" in err
    text = (ROOT / "scripts" / script).read_text()
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.M) and "#SBATCH --requeue\n" in text
    assert text.index("#SBATCH") < text.index("set -euo pipefail"), "sbatch reads its lines only before the first command"


def test_what_slurm_starts_is_accepted_by_the_command(tmp_path):
    """The flags of slurm-sft.sh, on every node, dry."""
    from inputs_for_tests import write_chats, write_model

    from mfsdp_cli.launch.start import check

    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.parquet", 64)
    for rank in range(3):
        flags = {"node-rank": rank, "nnodes": 3, "rdzv-endpoint": "n1:22345", "nproc": 8, "model": str(tmp_path / "model"),
                 "train-files": [str(tmp_path / "train.parquet")], "output": str(tmp_path / "run")}
        checked = check("sft", preset=None, config=None, flags=flags, resume=None, environ={"PATH": ""},
                        assignments=["engine.device=cpu", "engine.dtype=float32", "data.train_batch_size=24"])
        assert checked.exit_code == 0 and checked.plan.world_size == 24, checked.problems


def test_the_benchmark_of_the_start_measures_three_ends():
    import json

    done = subprocess.run([sys.executable, ROOT / "scripts" / "bench_start.py", "--runs", "1", "--imports", "3", "--json"], capture_output=True,
                          text=True, timeout=120)
    cases = {row["case"]: row for row in json.loads(done.stdout)["cases"]}
    assert list(cases) == ["python -c pass", "--help", "usage error", "failing check"]
    assert all(row["best_ms"] > cases["python -c pass"]["best_ms"] for name, row in cases.items() if name != "python -c pass")
    assert len(cases["--help"]["imports_ms"]) == 3
