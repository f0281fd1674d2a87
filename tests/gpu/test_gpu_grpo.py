"""`mfsdp grpo` with vLLM on the trainer's GPU: the policy that samples is the policy that is trained, and it learns.

One run shows all that one GPU can show. It starts from random weights and is to write digits, which takes no training beforehand:
10 of some 430 tokens are digits, so that about one response of 8 tokens in six has one.
"""

from __future__ import annotations

import time

import pytest
from gpu_processes import ON_CPU, need_gpus, need_packages, watched

from mfsdp_cli.train.metrics import read_metrics

# Nats a token, mean: bfloat16 kernels of two programs. With these weights transformers in bfloat16 is 0.007 from float32 (CPU), so that two
# programs differ by 0.01; weights off by one step of Adam at 5e-4 in random directions make 0.025, and learning's are not random.
MISMATCH = 0.02
STEPS = 2 if ON_CPU else 12
QUESTIONS, ANSWERS = (8, 2) if ON_CPU else (100, 4)  # of the validation
BATCH = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=4"] if ON_CPU else [
    "data.train_batch_size=64", "actor.ppo_mini_batch_size=64", "rollout.n=16", "actor.ppo_max_token_len_per_gpu=32768"]
SAMPLER = ["engine.device=cpu", "engine.dtype=float32", "--rollout", "hf"] if ON_CPU else [
    "engine.device=cuda", "engine.dtype=bfloat16", "--rollout", "vllm", "rollout.gpu_memory_utilization=0.2", "rollout.enforce_eager=True"]
REWARD = '''
def digits(solution_str, **_):
    count = sum(c in "0123456789" for c in solution_str)
    return {"score": count / max(1, len(solution_str)), "acc": count > 0}
'''


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Folder with model, prompts and reward function."""
    need_packages("ray", *([] if ON_CPU else ["vllm"]))
    from make_tiny_model import make_tiny_model

    began, folder = time.monotonic(), tmp_path_factory.mktemp("start")
    # Untied: with an output layer that is the embedding, random weights repeat the prompt's last token.
    make_tiny_model(folder / "model", tied=False, **({} if ON_CPU else dict(hidden_size=256, num_layers=4, intermediate_size=512)))
    (folder / "reward.py").write_text(REWARD)
    print(f"{time.monotonic() - began:6.1f} s  model of random weights", flush=True)
    watched("prep-data", "arithmetic", "--for", "rl", "-o", folder, "--rows", 16 if ON_CPU else 768, "--test-rows", QUESTIONS, "-q")
    return folder


def grpo(folder, run_dir, *more, num_steps: int = STEPS) -> list[dict]:
    """Records of the run."""
    files = ["--model", folder / "model", "--train-files", folder / "train.parquet", "--val-files", folder / "test.parquet",
             "--output", run_dir]
    watched("grpo", "--preset", "grpo-tiny-cpu", *files, *BATCH, "--reward-fn", f"{folder / 'reward.py'}:digits",
            f"trainer.total_training_steps={num_steps}", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.logger=[console]",
            "data.max_response_length=8", "rollout.val_temperature=1.0", f"rollout.val_n={ANSWERS}", *SAMPLER, *more)
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
    """On 100 questions that training does not see, 4 answers each at temperature 1, before and after. Answers of random weights hardly
    depend on the question: 400 independent ones with rate p have a standard error of sqrt(p (1 - p) / 400), 1.9 points at p = 1/6 and
    2.5 at most. The rise asked for is eight times that of a difference of two such rates, 3.5 at most."""
    rates = [r["val_pass_rate"] for r in colocated if "val_pass_rate" in r]
    training = [r["pass_rate"] for r in steps(colocated)]
    print(f"pass rate on unseen questions {rates[0]:.3f} -> {rates[-1]:.3f}; of training answers at step 1 {training[0]:.3f}, in the "
          f"last 5 {sum(training[-5:]) / len(training[-5:]):.3f}")
    assert len(rates) == 2
    if not ON_CPU:
        assert 0.05 < rates[0] < 0.6, "the start must leave something to learn"
        assert rates[-1] > rates[0] + 0.3


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
