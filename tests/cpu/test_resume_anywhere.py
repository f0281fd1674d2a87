"""Stopped after any steps and continued each time, a run is the one that was never stopped, bit for bit: with rows of very different
lengths packed under a tight budget, several epochs, validation in between, and on every kind of layout.

MFSDP_SEEDS=20 tries so many random runs instead of a few.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import changed, sft_settings, stored, train_ranks, training_records, validation_losses

from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.launch.run import STOP_FILE
from mfsdp_cli.train.schedule import learning_rate

SEEDS = int(os.environ.get("MFSDP_SEEDS", 2))
ROWS, BATCH, STEPS = 23, 4, 12  # five steps an epoch, three rows left out of each: two epochs and a part of the third
LAYOUTS = [  # model, ranks, engine settings
    ("qwen3_moe", 2, {"expert_model_parallel_size": 2}),
    ("qwen2", 2, {}),
    ("qwen2", 2, {"tensor_model_parallel_size": 2}),
    ("qwen2", 2, {"tensor_model_parallel_size": 2, "dtype": "bfloat16"}),
    ("qwen3_moe", 2, {"tensor_model_parallel_size": 2}),
    ("qwen3_moe", 4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    ("qwen2", 1, {"recompute": "full"}),
    ("qwen2", 4, {"tensor_model_parallel_size": 2}),
    ("llama", 3, {}),
]


def write_rows(path: Path, seed: int) -> Path:
    """Answers of 1 to 40 words."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    chats = [[{"role": "user", "content": f"Count to {n}"}, {"role": "assistant", "content": " ".join(map(str, range(n)))}]
             for n in (rng.choice([1, 2, 3, 20, 40]) for _ in range(ROWS))]
    pq.write_table(pa.table({"messages": chats}), path)
    return path


def choose(tiny, folder: Path, seed: int) -> SftSettings:
    rng = random.Random(seed)
    model, ranks, engine = LAYOUTS[seed % len(LAYOUTS)]
    settings = sft_settings(tiny, folder, ranks=ranks, steps=STEPS, model=model)
    files = {"train_files": [str(write_rows(folder / "rows.parquet", seed))], "train_batch_size": BATCH, "max_token_len_per_gpu": 160}
    return changed(settings, engine=engine, data=files | {"use_dynamic_bsz": rng.random() < 0.7, "shuffle": rng.random() < 0.8},
                   trainer={"test_freq": rng.choice([1, 3]), "save_freq": rng.choice([-1, 2]), "seed": seed},
                   checkpoint={"background_save": rng.choice([None, True])})


@dataclass(frozen=True)
class AskedAtOnce:
    """The request to stop is there before the first step: the attempt makes that step, saves and stops."""

    attempt_dir: Path

    def __call__(self) -> None:
        (self.attempt_dir / STOP_FILE).touch()


def train_to(settings: SftSettings, run_dir: Path, number: int, start: int, end: int) -> None:
    """One attempt, from step `start` up to `end` if that is not the last step."""
    attempt = f"{number:03d}"
    asked = AskedAtOnce(run_dir / "attempts" / attempt) if end - start == 1 else None
    train_ranks(settings, run_dir, attempt=attempt, stop_after=end if end < STEPS and not asked else None, before_train=asked)


def same_end(run_dir: Path, other: Path, step: int = STEPS) -> None:
    tensors, others = (stored(run / "checkpoints" / f"step_{step:06d}" / "dist_ckpt") for run in (run_dir, other))
    assert tensors.keys() == others.keys() and [name for name in tensors if not tensors[name].equal(others[name])] == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_stopped_anywhere_is_never_stopped(tiny, tmp_path, seed):
    settings, rng = choose(tiny, tmp_path, seed), random.Random(seed + 1000)
    stops = sorted(rng.sample(range(1, STEPS), rng.randint(1, 3)) if seed else [5, 6])  # first the end of an epoch, and one step on
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    train_ranks(settings, straight)
    for number, (start, end) in enumerate(zip([0, *stops], [*stops, STEPS]), 1):
        train_to(settings, parts, number, start, end)
    records = training_records(straight)
    assert training_records(parts) == records and len(records) == STEPS, (seed, stops)
    assert max(r["num_tokens"] for r in records) > 1.3 * min(r["num_tokens"] for r in records)  # packing is uneven
    losses, again = validation_losses(straight), validation_losses(parts)
    assert losses and all(again.get(step, loss) == loss for step, loss in losses.items())
    same_end(straight, parts)


def test_the_schedule_follows_the_configuration_and_does_not_restart(tiny, tmp_path):
    """Four steps of six, then continued as a run of eight: the learning rate is that of steps 5 to 8 of eight."""
    settings = changed(sft_settings(tiny, tmp_path, ranks=1, steps=6), data={"val_files": []})
    train_ranks(settings, tmp_path / "run", stop_after=4)
    train_ranks(changed(settings, trainer={"total_training_steps": 8}), tmp_path / "run", attempt="002")
    rates = [r["lr"] for r in training_records(tmp_path / "run")]
    assert rates == [learning_rate(settings.optim, n, 6) for n in range(1, 5)] + [learning_rate(settings.optim, n, 8) for n in range(5, 9)]
    log = (tmp_path / "run" / "attempts" / "002" / "rank0.log").read_text()
    assert "planned for 6 steps and now has 8: its learning-rate curve changes" in log
