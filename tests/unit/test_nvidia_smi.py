"""An nvidia-smi that is there and does not work is told, and never taken in silence for a machine without GPUs."""

import json
import os
import time
from pathlib import Path

import pytest
from facts_for_tests import make_facts, only, passes
from inputs_for_tests import write_chats, write_model

from mfsdp_cli.config.rules_machine import NVIDIA_SMI_FIX
from mfsdp_cli.errors import MACHINE_UNFIT
from mfsdp_cli.launch.doctor import examine, exit_code
from mfsdp_cli.launch.host import list_gpus
from mfsdp_cli.launch.machine import look
from mfsdp_cli.launch.start import check

GOOD = "0, GPU-11, 143771, 9.0, NVIDIA H200\n1, GPU-22, 143771, 9.0, NVIDIA H200\n"
# what NVIDIA's own program prints, on stdout, and its exit code
NO_DRIVER = ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is "
             "installed and running.\n")
BROKEN = {
    "no driver": (f"cat <<'E'\n{NO_DRIVER}\nE\nexit 9", "exit code 9: NVIDIA-SMI has failed because it couldn't communicate"),
    "mismatch": ("echo 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18", "exit code 18: Failed to initialize NVML"),
    "speaks on stderr": ("echo 'no library' >&2\nexit 127", "exit code 127: no library"),
    "says nothing": ("exit 1", "exit code 1: it says nothing"),
    "no devices": ("echo 'No devices were found'", "prints no table of GPUs: No devices were found"),
    "prints nothing": ("exit 0", "prints nothing"),
    "garbage": ("printf '\\377\\376 a,b,c,d,e\\n'", "prints no table of GPUs"),
    "a web page": ("echo '<html>, <body>, login, first, please'", "prints no table of GPUs: <html>"),
    "killed": ("kill -9 $$", "exit code -9"),
}


@pytest.fixture
def smi(tmp_path):
    """Make an nvidia-smi that runs this shell text; returns the environment with it on the PATH."""
    def make(text: str, mode: int = 0o755) -> dict[str, str]:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        program.chmod(mode)
        return {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    return make


def test_a_working_one_has_no_error(smi):
    h200 = ("NVIDIA H200", 143771, 9.0)
    assert list_gpus(smi(f"cat <<'E'\n{GOOD}E")) == ([h200, h200], "")
    hides = smi(f"cat <<'E'\n{GOOD}E") | {"CUDA_VISIBLE_DEVICES": ""}
    assert list_gpus(hides) == ([], ""), "hidden on purpose"
    assert list_gpus(smi("echo '0, GPU-11, nan, inf, X'")) == ([("X", 0, 0.0)], "")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_told(smi, name):
    text, reason = BROKEN[name]
    gpus, error = list_gpus(smi(text))
    assert gpus == [] and error.startswith("nvidia-smi") and reason in error and "\n" not in error


def test_one_that_hangs_is_ended_with_its_children(smi, tmp_path):
    """Also a child of its own, which holds the pipe open, does not keep us."""
    begin = time.monotonic()
    gpus, error = list_gpus(smi(f"sleep 300 & echo $! > {tmp_path}/child\nwait"), limit_s=0.5)
    assert (gpus, error) == ([], "nvidia-smi is there but failed: no answer within 0.5 s") and time.monotonic() - begin < 20
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() - begin < 60, "it lives on"
        time.sleep(0.05)


def test_one_that_is_no_program(smi):
    for text in ("#!/no/such/interpreter\n", "#!/bin/sh -x -y\n"):
        gpus, error = list_gpus(smi(text))
        assert gpus == [] and error.startswith("nvidia-smi")
    assert "nvidia-smi is there but failed: No such file" in list_gpus(smi("#!/no/such/interpreter\n"))[1]


def test_the_rule():
    error = "nvidia-smi is there but failed with exit code 9: no driver"
    blind = make_facts(num_gpus=0, gpu_names=(), gpu_memory_mib=(), gpu_compute_capability=(), gpu_error=error)
    told = only(blind, level="warning", rule="gpus-seen", engine__dtype="float32")
    assert (told.key, told.found, told.fix) == ("engine.device", "auto", NVIDIA_SMI_FIX) and "the run would use the CPU" in told.why
    refused = only(blind, engine__device="cuda")
    assert (refused.rule, refused.why, refused.code) == ("gpus-enough", error, MACHINE_UNFIT)
    assert passes(blind, engine__device="cpu", engine__dtype="float32"), "who asks for the CPU needs no GPU"
    assert passes(make_facts(gpu_error="")), "GPUs that are seen are no matter"


def test_a_dry_run_warns(smi, tmp_path):
    write_model(tmp_path / "model"), write_chats(tmp_path / "train.parquet", 9)
    checked = check("sft", preset=None, config=None, flags={}, resume=None, environ=smi(BROKEN["no driver"][0]), assignments=[
        f"model.path={tmp_path}/model", f"data.train_files={tmp_path}/train.parquet", f"trainer.output_dir={tmp_path}/run"])
    assert checked.plan.device == "cpu" and [p.level for p in checked.problems if p.rule == "gpus-seen"] == ["warning"]


def test_doctor_tells_it(smi, tmp_path):
    seen = look(smi(BROKEN["mismatch"][0]), str(tmp_path), None, deep=False)
    told = {c.name: c for c in examine(seen)}["gpus"]
    assert told.status == "warning" and "Driver/library version mismatch" in told.why and told.fix == NVIDIA_SMI_FIX
    begin = time.monotonic()
    slow = look(smi("sleep 300"), str(tmp_path), None, deep=False, limit_s=0.5)
    assert "no answer within 0.5 s" in slow.gpu_error and time.monotonic() - begin < 20, "it is asked once"
    assert exit_code(examine(slow)) in (0, 4) and json.dumps(slow.gpu_error)
