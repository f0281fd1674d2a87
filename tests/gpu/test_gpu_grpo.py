"""`mfsdp grpo` with vLLM on the trainer's GPU: the policy that samples is the policy that is trained, and it learns."""

from __future__ import annotations


import pytest
from gpu_processes import ON_CPU, need_gpus, need_packages
from program import mfsdp

from mfsdp_cli.errors import OK
from mfsdp_cli.train.metrics import read_metrics

MISMATCH = 0.02  # nats a token, mean: bfloat16 kernels of two programs
STEPS = 2 if ON_CPU else 30
SAMPLER = ["engine.device=cpu", "engine.dtype=float32", "--rollout", "hf"] if ON_CPU else [
    "engine.device=cuda", "engine.dtype=bfloat16", "--rollout", "vllm", "rollout.gpu_memory_utilization=0.2", "rollout.enforce_eager=True"]


def call(*args):
    code, out, err = mfsdp(*args, timeout_s=400)
    assert code == OK, err
    return out.strip()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(checkpoint of a short SFT, folder of prompts): a model that answers some sums right."""
    need_packages("ray", *([] if ON_CPU else ["vllm"]))
    from make_tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("start")
    sizes = {} if ON_CPU else dict(hidden_size=256, num_layers=4, intermediate_size=512)
    model = make_tiny_model(folder / "model", **sizes)
    rows = ["--rows", 64, "--test-rows", 8] if ON_CPU else ["--rows", 2000, "--test-rows", 200]
    call("prep-data", "arithmetic", "-o", folder / "sft", *rows, "-q")
    call("prep-data", "arithmetic", "--for", "rl", "-o", folder / "rl", *rows, "-q")
    device = "cpu" if ON_CPU else "cuda"
    # 250 steps leave a model of this size at about 20 % of the sums
    training = ["data.train_batch_size=8", "trainer.total_training_steps=3"] if ON_CPU else [
        "data.train_batch_size=128", "data.max_token_len_per_gpu=16384", "trainer.total_training_steps=250", "engine.dtype=bfloat16",
        "optim.lr=2e-3"]
    files = ["--model", model, "--train-files", folder / "sft" / "train.parquet", "--output", folder / "run"]
    checkpoint = call("sft", "--preset", "sft-tiny-cpu", *files, "--nproc", 1, f"engine.device={device}", "trainer.save_freq=-1",
                      "trainer.logger=[console]", "-q", *training)
    return checkpoint, folder / "rl"


def grpo(started, run_dir, *more, num_steps: int = STEPS) -> list[dict]:
    """Records of the run."""
    checkpoint, prompts = started
    batch = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=4"] if ON_CPU else [
        "rollout.n=16", "actor.ppo_max_token_len_per_gpu=32768", "data.val_max_samples=200"]
    train, unseen = prompts / "train.parquet", prompts / "test.parquet"
    files = ["--model", checkpoint, "--train-files", train, "--val-files", unseen, "--output", run_dir]
    call("grpo", "--preset", "grpo-tiny-cpu", *files, *batch, f"trainer.total_training_steps={num_steps}", "trainer.save_freq=-1",
         "trainer.test_freq=-1", "trainer.logger=[console]", "optim.lr=5e-4", "optim.lr_warmup_steps_ratio=0.1",
         "rollout.val_temperature=1.0", f"rollout.val_n={2 if ON_CPU else 8}", "-q", *SAMPLER, *more)
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
    assert all(r["grad_norm"] > 0 for r in steps(colocated)) or ON_CPU  # updates that change something
    assert max(mismatches(colocated)) < MISMATCH


def test_the_pass_rate_rises(colocated):
    """On 200 questions that training does not see, 8 answers each at temperature 1, before and after: a standard error of about
    2 points, mostly the questions', which are the same."""
    rates = [r["val_pass_rate"] for r in colocated if "val_pass_rate" in r]
    training = [r["pass_rate"] for r in steps(colocated)]
    print(f"pass rate on unseen questions {rates[0]:.3f} -> {rates[-1]:.3f}; of training answers "
          f"{sum(training[:5]) / len(training[:5]):.3f} (first 5 steps) -> {sum(training[-5:]) / len(training[-5:]):.3f} (last 5)")
    assert len(rates) == 2
    if not ON_CPU:
        assert 0.05 < rates[0] < 0.8, "the start must leave something to learn"
        assert rates[-1] > rates[0] + 0.03


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
