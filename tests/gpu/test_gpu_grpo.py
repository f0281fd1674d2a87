"""`mfsdp grpo` with vLLM on the trainer's GPU: the policy that samples is the policy that is trained, and it learns arithmetic.

One run shows all that one GPU can show. It starts from a short `mfsdp sft` on right answers of which one in four is marked with `####`, as
the reward of prep-data's rows wants it. A model of this size, so little trained, mostly guesses the digit; that the mark counts is what it
can learn from the reward in 30 steps, whatever the digit.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gpu_processes import ON_CPU, need_gpus, need_packages, watched

from mfsdp_cli.train.metrics import read_metrics

# Nats a token, mean: bfloat16 kernels of two programs. Measured: 0.009 with random weights of this size, which spread over all tokens,
# and 0.0013 after SFT. That no step samples with old weights is shown exactly in float32 (tests/cpu/test_grpo_loop.py).
MISMATCH = 0.02
STEPS = 2 if ON_CPU else 30
TAUGHT = ["data.train_batch_size=8", "trainer.total_training_steps=2", "engine.device=cpu"] if ON_CPU else [
    "data.train_batch_size=64", "trainer.total_training_steps=100", "engine.device=cuda", "engine.dtype=bfloat16", "optim.lr=2e-3",
    "data.max_token_len_per_gpu=8192"]
BATCH = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=4"] if ON_CPU else [
    "data.train_batch_size=64", "actor.ppo_mini_batch_size=64", "rollout.n=16", "actor.ppo_max_token_len_per_gpu=32768"]
SAMPLER = ["engine.device=cpu", "engine.dtype=float32", "--rollout", "hf"] if ON_CPU else [
    "engine.device=cuda", "engine.dtype=bfloat16", "--rollout", "vllm", "rollout.gpu_memory_utilization=0.2", "rollout.enforce_eager=True"]


def one_digit_questions(folder: Path) -> None:
    """From all questions of prep-data arithmetic those of digits whose answer is one: rl.parquet, and the teacher's sft.parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "train.parquet")
    rows = [row for row in table.to_pylist() if len(row["extra_info"]["question"]) == len("What is 7 + 2?")
            and len(row["reward_model"]["ground_truth"]) == 1]
    assert len(rows) == 110  # 55 sums up to 9, 55 differences
    pq.write_table(pa.Table.from_pylist(rows, table.schema), folder / "rl.parquet")
    chats = [[*row["prompt"], {"role": "assistant", "content": mark + row["reward_model"]["ground_truth"]}] for row in rows
             for mark in ("#### ", "", "", "")]
    pq.write_table(pa.table({"messages": chats}), folder / "sft.parquet")


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(checkpoint of a model that answers as its teacher, file of questions)"""
    need_packages("ray", *([] if ON_CPU else ["vllm"]))
    from make_tiny_model import make_tiny_model

    began, folder = time.monotonic(), tmp_path_factory.mktemp("start")
    make_tiny_model(folder / "model", tied=False, **({} if ON_CPU else dict(hidden_size=256, num_layers=4, intermediate_size=512)))
    print(f"{time.monotonic() - began:6.1f} s  model of random weights", flush=True)
    watched("prep-data", "arithmetic", "--for", "rl", "-o", folder, "--rows", 15050, "--test-rows", 0, "-q")
    one_digit_questions(folder)
    checkpoint = watched("sft", "--preset", "sft-tiny-cpu", "--model", folder / "model", "--train-files", folder / "sft.parquet", "--output",
                         folder / "run", "--nproc", 1, "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.logger=[console]", *TAUGHT)
    return checkpoint, folder / "rl.parquet"


def grpo(started, run_dir, *more, num_steps: int = STEPS) -> list[dict]:
    """Records of the run, whose reward is the one that prep-data's rows ask for: exact match after `####`."""
    checkpoint, questions = started
    files = ["--model", checkpoint, "--train-files", questions, "--output", run_dir]
    watched("grpo", "--preset", "grpo-tiny-cpu", *files, *BATCH, f"trainer.total_training_steps={num_steps}", "trainer.save_freq=-1",
            "trainer.test_freq=-1", "trainer.logger=[console]", "data.max_response_length=8", *SAMPLER, *more)
    return list(read_metrics(run_dir))


@pytest.fixture(scope="module")
def colocated(started, tmp_path_factory):
    way = "file" if ON_CPU else "ipc"
    return grpo(started, tmp_path_factory.mktemp("colocated") / "run", "--nproc", 1, f"rollout.weight_transfer={way}")


def steps(records) -> list[dict]:
    return [r for r in records if "loss" in r]


def mismatches(records) -> list[float]:
    found = [r["mismatch/abs"] for r in steps(records)]
    print(f"mean mismatch in nats a token: step 1 {found[0]:.1e}, largest of {len(found)} steps {max(found):.1e}; weights over in "
          f"{sorted(r['sync_s'] for r in steps(records))[len(found) // 2]:.2f} s")
    return found


def test_sampler_and_trainer_agree_before_and_after_updates(colocated):
    """Step 1 samples with the weights it began with; every later step with those of an update that came by CUDA IPC."""
    assert [r["weight_version"] for r in steps(colocated)] == list(range(1, STEPS + 1))
    assert all(r["grad_norm"] > 0 for r in steps(colocated)[:3]) or ON_CPU
    assert max(mismatches(colocated)) < MISMATCH


def test_the_pass_rate_rises(colocated):
    """Of the answers sampled for training, 1,024 a step at temperature 1. With digits right at a rate q, at least the 1/10 of guesses, it starts
    at q / 4 and can rise to q by the mark alone. At q = 1/10: 0.025 with a standard error of 0.005, and 0.1 with one of 0.004 over the
    last five steps: twice the first rate, if that is by chance two standard errors too high, is still 7 below. A smaller model (2 layers,
    hidden 128, float32, CPU) went from 0.05 to 0.24 in ten steps and to 0.47 in 30, digits included."""
    rates = [r["pass_rate"] for r in steps(colocated)]
    last = sum(rates[-5:]) / len(rates[-5:])
    print(f"pass rate {rates[0]:.3f} at step 1, {last:.3f} in the last 5 of {len(rates)}")
    if not ON_CPU:
        assert 0.005 < rates[0] < 0.4, "the start must leave something to learn, and something to learn from"
        assert last > 2 * rates[0]


def test_samplers_on_gpus_of_their_own_get_the_weights_by_nccl(started, tmp_path):
    need_gpus(2)
    if ON_CPU:
        pytest.skip("NCCL needs GPUs")
    records = grpo(started, tmp_path / "run", "--nproc", 1, "rollout.colocate=False", "rollout.weight_transfer=nccl", num_steps=4)
    assert [r["weight_version"] for r in steps(records)] == [1, 2, 3, 4] and max(mismatches(records)) < MISMATCH


@pytest.mark.parametrize("layout", [[], ["--tp", 2, "--gen-tp", 2]], ids=["fsdp2, an engine on each", "tp2, one engine on both"])
def test_colocated_on_two_gpus(started, tmp_path, layout):
    need_gpus(2)
    if ON_CPU:
        pytest.skip("one process of tests/cpu/test_grpo_run.py does this")
    records = grpo(started, tmp_path / "run", "--nproc", 2, *layout, num_steps=4)
    assert [r["weight_version"] for r in steps(records)] == [1, 2, 3, 4] and max(mismatches(records)) < MISMATCH
