"""The parts of bench_grpo.py: each returns a dict of plain numbers. All but `run_mfsdp` run in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from bench_common import ROOT, kill_tree, timed, write_model
from shapes import SHAPES

PROMPT = 64  # tokens at most
LEARNING_RATE = 1e-6
NUM_UPDATES = 8


def prepare(args) -> dict:
    """FOLDER/model with random weights, FOLDER/rl/train.parquet with prompts."""
    write_model(args.folder / "model", args.shape)
    rows = args.prompts * (args.warmup + args.steps + 1)
    command = [sys.executable, "-m", "mfsdp_cli", "prep-data", "arithmetic", "--for", "rl", "-o", args.folder / "rl", "--rows", str(rows)]
    subprocess.run([*command, "--test-rows", "1", "-q"], cwd=ROOT, check=True, stdout=sys.stderr)
    return {"weights_gb": weights_gb(args)}


def weights_gb(args) -> float:
    return sum(file.stat().st_size for file in (args.folder / "model").glob("*.safetensors")) / 1e9


# --- mfsdp ----------------------------------------------------------------------------------------------------------------


def run_mfsdp(args) -> dict:
    """The command itself, ended without a checkpoint once the steps are made; medians over the measured ones."""
    last, run_dir = args.warmup + args.steps, args.folder / "run"
    files = ["--model", args.folder / "model", "--train-files", args.folder / "rl" / "train.parquet", "--output", run_dir]
    settings = {
        "engine.dtype": "bfloat16", "reward.name": "length", "rollout.n": args.n,
        "rollout.gpu_memory_utilization": args.gpu_share, "rollout.max_num_seqs": args.max_num_seqs,
        "data.train_batch_size": args.prompts, "data.max_prompt_length": PROMPT, "data.max_response_length": args.response,
        "actor.ppo_mini_batch_size": args.prompts, "actor.ppo_max_token_len_per_gpu": args.micro_tokens, "actor.use_kl_loss": False,
        "actor.kl_loss_coef": 0.0, "optim.lr": LEARNING_RATE, "optim.min_lr": LEARNING_RATE, "optim.lr_warmup_steps": 0,
        "trainer.total_training_steps": last + 1, "trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
    }
    command = [sys.executable, "-m", "mfsdp_cli", "grpo", "--nproc", args.nproc, "--rollout", args.sampler, *files]
    command += [*(f"{key}={value}" for key, value in settings.items()), *args.set]
    environ = os.environ | ({"TORCH_LOGS": "recompiles"} if args.profile else {})
    with open(args.log or os.devnull, "a") as log:
        process = subprocess.Popen([str(part) for part in command], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        limit, told = threading.Timer(args.timeout, kill_tree, [process.pid]), []
        limit.start()
        for text in process.stderr:
            told.append(text)
            print(text, end="", file=log, flush=True)
            if text.startswith(f"step {last}/"):
                break
        limit.cancel()
        end_run(process)
    metrics = run_dir / "metrics.jsonl"
    records = [r for line in metrics.read_text().splitlines() if "loss" in (r := json.loads(line))] if metrics.is_file() else []
    if len(records) < last:
        text = "".join(told)
        reason = text[text.index("error:") :] if "error:" in text else text[-400:]
        return {"failed": f"{len(records)} of {last} steps: {reason.strip()[:400]}"}
    logs = (run_dir / "attempts" / "001").glob("trainer*.log")
    recompilations = sum(log.read_text().count("Recompiling function") for log in logs)
    found = medians(records, args.warmup)
    found["train_tokens_per_s"] /= args.nproc
    return found | {"weights_gb": weights_gb(args), "recompilations": recompilations}


def end_run(process) -> None:
    """The second request ends a run at once, without saving."""
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()


def medians(records: list[dict], warmup: int) -> dict:
    """Of a run's steps after the first `warmup`. wall_s is from the end of a step to the end of the next; rest_s is what rollout, rewards,
    update and weights leave of it."""
    pairs = list(zip(records, records[1:]))[warmup - 1 :]
    chosen = [after for _, after in pairs]

    def median(key: str) -> float:
        return statistics.median(r[key] for r in chosen)

    wall = statistics.median(after["time"] - before["time"] for before, after in pairs)
    busy = median("sampling_s") + median("update_s") + median("sync_s")
    own = ("sampling_s", "reward_s", "update_s", "sync_s", "rollout_tokens_per_s")
    return {
        "steps_per_hour": 3600 / wall, "wall_s": wall, **{key: median(key) for key in own}, "idle_share": 1 - busy / wall,
        "rest_s": wall - busy - median("reward_s"), "train_tokens_per_s": median("update_tokens_per_s"),
        "tokens": median("num_tokens"), "mismatch": max(r["mismatch/abs"] for r in records),
        "memory_gib": max(r["memory_gib"] for r in records),
        "each_update_s": [r["update_s"] for r in records], "each_sync_s": [r["sync_s"] for r in records],
    }


# --- the yardsticks -------------------------------------------------------------------------------------------------------


def messages(args) -> list[list[dict]]:
    import pyarrow.parquet as pq

    return pq.read_table(args.folder / "rl" / "train.parquet", columns=["prompt"])["prompt"].to_pylist()


def vllm_offline(args) -> dict:
    """Tokens/s by way of asking, each measured on its second run."""
    import torch
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    folder = str(args.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages(args)[: args.prompts]]
    requests = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, gpu_memory_utilization=args.gpu_share,
              max_model_len=PROMPT + args.response, max_num_seqs=args.max_num_seqs, enforce_eager=not torch.cuda.is_available())
    common = dict(temperature=1.0, max_tokens=args.response, ignore_eos=True, detokenize=False)
    one = [SamplingParams(**common, n=1, seed=seed, logprobs=0, flat_logprobs=True) for seed in range(args.prompts * args.n)]
    single = [r for r in requests for _ in range(args.n)]
    ways = {
        "plain": (requests, SamplingParams(**common, n=args.n)),
        "with log-probabilities": (requests, SamplingParams(**common, n=args.n, logprobs=0)),
        "as ours": (single, one),
        "as ours, without seeds": (single, SamplingParams(**common, n=1, logprobs=0, flat_logprobs=True)),
    }
    found = {}
    for name, (asked, params) in ways.items():
        for _ in range(2):
            started = time.perf_counter()
            outputs = llm.generate(asked, params, use_tqdm=False)
            found[name] = sum(len(o.token_ids) for r in outputs for o in r.outputs) / (time.perf_counter() - started)
    return found


def sft(args) -> dict:
    from bench_sft import ours

    length = args.response + 32
    step, device = ours(args.shape, args.micro_tokens // length * length, length)
    return {"tokens_per_s": timed(step, device, 3, 6).tokens_per_s}


def trl(args) -> dict:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from mfsdp_cli.rewards.length import score

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def words(completions, **_):
        return [score("", completion[0]["content"], "", {}).score for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=args.trl_micro,
            gradient_accumulation_steps=args.prompts * args.n // args.trl_micro, num_generations=args.n,
            max_completion_length=args.response, use_vllm=args.sampler == "vllm", vllm_mode="colocate",
            vllm_gpu_memory_utilization=args.gpu_share, vllm_max_model_length=PROMPT + args.response, beta=0.0, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", bf16=True, use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False,
            max_steps=args.warmup + args.steps, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        )
        prompts = Dataset.from_list([{"prompt": m} for m in messages(args)])
        GRPOTrainer(str(args.folder / "model"), reward_funcs=words, args=config, train_dataset=prompts, callbacks=[Clock()]).train()
    wall = statistics.median(b - a for a, b in zip(ends[args.warmup - 1 :], ends[args.warmup :]))
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {"steps_per_hour": 3600 / wall, "wall_s": wall, "peak_gib": memory}


# --- one trainer rank alone -----------------------------------------------------------------------------------------------


def updates(args) -> dict:
    """Updates of the policy on made-up responses whose lengths differ from update to update, as they do in a run."""
    import numpy as np
    import torch

    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.train.ranks import TrainerRank
    from mfsdp_cli.types import Experience, Sample

    settings = GrpoSettings()
    settings.model.path, settings.engine.dtype = str(args.folder / "model"), "bfloat16"
    settings.actor.use_kl_loss, settings.actor.ppo_max_token_len_per_gpu = False, args.micro_tokens
    settings.data.max_response_length = args.response
    rank = TrainerRank(settings, args.folder / "update", 0, 1, 0)
    rank.start("env://")
    random, vocab_size = np.random.default_rng(0), SHAPES[args.shape]["vocab_size"]

    def response(row: int) -> Experience:
        length = int(random.integers(max(2, args.response // 4), args.response + 1))
        ids = random.integers(0, vocab_size, 32 + length)
        rollout = np.full(length, -np.log(vocab_size), dtype=np.float32)
        return Experience(Sample(ids, np.arange(len(ids)) >= 32, row), np.ones(length, bool), rollout, float(random.normal()))

    def one_update() -> tuple[float, int]:
        batch = [response(row) for row in range(args.prompts * args.n)]
        started = time.perf_counter()
        rank.update(batch, list(range(len(batch))), LEARNING_RATE)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started, sum(e.sample.num_tokens for e in batch)

    found: dict = {"seconds": [], "tokens": [], "micro_batches": [], "compiled": []}
    for _ in range(NUM_UPDATES):
        before = compiled()
        seconds, tokens = one_update()
        for key, value in zip(found, (seconds, tokens, -(-tokens // args.micro_tokens), compiled() - before)):
            found[key].append(value)
    if args.profile:
        profile_to_stderr(one_update)
    return found


def compiled() -> int:
    """Functions that torch.compile has compiled so far, anew for other sizes included."""
    import torch._dynamo.utils

    return torch._dynamo.utils.counters["frames"]["total"]


def profile_to_stderr(call) -> None:
    import torch._dynamo.utils
    from torch.profiler import ProfilerActivity, profile

    print(torch._dynamo.utils.compile_times(), file=sys.stderr)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        seconds, tokens = call()
    print(f"the profiled update: {seconds:.2f} s, {tokens} tokens", file=sys.stderr)
    for key in ("cuda_time_total", "self_cpu_time_total"):
        print(prof.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70), file=sys.stderr)
