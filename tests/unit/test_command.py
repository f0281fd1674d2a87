import subprocess
import sys

import pytest
from facts_for_tests import VERSIONS, make_facts, make_settings
from grpo_for_tests import CPU, cpu_facts, grpo_facts, grpo_settings

from mfsdp_cli.launch.command import child_command, child_environment, driver_command, shell_line, torchrun_command
from mfsdp_cli.launch.plan import make_plan


def environment(settings, facts):
    return child_environment(settings, make_plan(settings, facts), facts)


def test_one_node():
    assert torchrun_command(make_settings(), "runs/a", "runs/a/attempts/001", 0) == [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "8", "--standalone", "--max-restarts", "0",
        "-m", "mfsdp_cli.train.sft", "--config", "runs/a/attempts/001/config.yaml", "--run-dir", "runs/a",
        "--attempt-dir", "runs/a/attempts/001",
    ]


@pytest.mark.parametrize("endpoint, host, port", [("node0:29500", "node0", "29500"), ("[fe80::1]:29500", "fe80::1", "29500")])
def test_several_nodes_meet_where_the_rank_decides(endpoint, host, port):
    settings = make_settings(trainer__nnodes=2, trainer__rdzv_endpoint=endpoint, trainer__startup_timeout_s=60)
    command = torchrun_command(settings, "r", "r/attempts/001-node1", 1)
    assert command[3:16] == ["--nnodes", "2", "--nproc-per-node", "8", "--node-rank", "1", "--master-addr", host, "--master-port", port,
                             "--rdzv-conf", "timeout=60", "--max-restarts"]


@pytest.mark.parametrize("inherited, set_to", [(None, "8"), ("1", "8"), ("0", "8"), ("many", "8"), ("2", "2"), ("32", "32")])
def test_max_connections_is_always_explicit_and_above_one(inherited, set_to):
    environ = {} if inherited is None else {"CUDA_DEVICE_MAX_CONNECTIONS": inherited}
    assert environment(make_settings(), make_facts(environ=environ))["CUDA_DEVICE_MAX_CONNECTIONS"] == set_to


def test_gpus_are_left_as_they_are():
    added = environment(make_settings(), make_facts())
    assert added == {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def test_kernels_that_flash_attention_4_compiles_are_kept():
    enabled, folder = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    added = environment(make_settings(), make_facts(environ={"HOME": "/home/a"}))
    assert (added[enabled], added[folder]) == ("1", "/home/a/.cache/mfsdp/flash-attn-4")
    assert environment(make_settings(), make_facts(environ={"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}))[folder] == "/c/mfsdp/flash-attn-4"
    own = environment(make_settings(), make_facts(environ={"HOME": "/home/a", enabled: "0", folder: "/x"}))
    assert (own[enabled], own[folder]) == ("0", "/x"), "the user's own choice"
    without = make_facts(environ={"HOME": "/home/a"}, versions=VERSIONS | {"flash-attn-4": None})
    assert enabled not in environment(make_settings(), without)
    assert enabled not in environment(make_settings(engine__device="cpu"), make_facts(environ={"HOME": "/home/a"}))


def test_cpu_hides_gpus_and_shares_cores():
    settings = make_settings(engine__device="cpu")
    added = environment(settings, make_facts(num_cpus=20))
    assert (added["CUDA_VISIBLE_DEVICES"], added["OMP_NUM_THREADS"], added["TORCHDYNAMO_DISABLE"]) == ("", "2", "1")  # 20 // 8
    assert environment(settings, make_facts(num_cpus=2))["OMP_NUM_THREADS"] == "1"
    assert environment(settings, make_facts(environ={"OMP_NUM_THREADS": "5"}))["OMP_NUM_THREADS"] == "5"


def test_the_driver_of_grpo():
    expected = [sys.executable, "-m", "mfsdp_cli.train.grpo", "--config", "runs/a/attempts/001/config.yaml", "--run-dir", "runs/a",
                "--attempt-dir", "runs/a/attempts/001"]
    assert driver_command("runs/a", "runs/a/attempts/001") == expected
    assert child_command(grpo_settings(), "runs/a", "runs/a/attempts/001", 0) == expected
    assert child_command(make_settings(), "r", "r/1", 0) == torchrun_command(make_settings(), "r", "r/1", 0)


@pytest.mark.parametrize("capability", [8.0, 9.0, 10.0])
@pytest.mark.parametrize("inherited, set_to", [(None, "8"), ("2", "2")])
def test_a8c_grpo_never_leaves_max_connections_unset(capability, inherited, set_to):
    environ = {} if inherited is None else {"CUDA_DEVICE_MAX_CONNECTIONS": inherited}
    added = environment(grpo_settings(), grpo_facts(environ=environ, gpu_compute_capability=(capability,) * 8))
    assert added == {
        "CUDA_DEVICE_MAX_CONNECTIONS": set_to, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def test_grpo_keeps_the_users_choices_and_hides_gpus_on_cpu():
    assert environment(grpo_settings(), grpo_facts(environ={"VLLM_USE_FLASHINFER_SAMPLER": "1"}))["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    on_cpu = environment(grpo_settings(**CPU), cpu_facts())
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == "" and "VLLM_USE_V2_MODEL_RUNNER" not in on_cpu


def test_shell_line_survives_the_shell():
    program = "import os, sys; print(os.environ['A'], sys.argv[1:])"
    line = shell_line([sys.executable, "-c", program, "two words", "$HOME 'x'"], {"A": "1 & 2"})
    assert subprocess.run(line, shell=True, capture_output=True, text=True).stdout == "1 & 2 ['two words', \"$HOME 'x'\"]\n"
