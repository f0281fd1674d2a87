"""The real GSM8K: prepared, trained on for 50 steps, exported, and the exported model's loss is the trainer's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from program import ROOT, mfsdp

DATA = Path(os.environ.get("MFSDP_TEST_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"
HELD_OUT = 32

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs GSM8K's train.jsonl and test.jsonl in {DATA} (MFSDP_TEST_DATA names its parent)")


def loss_of(folder: Path, rows: list) -> float:
    """Mean negative log-probability of the targets of chats, by transformers, one chat at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mfsdp_cli.data.chat import ChatTokenizer

    model, chat = AutoModelForCausalLM.from_pretrained(folder), ChatTokenizer(AutoTokenizer.from_pretrained(folder))
    assert model.dtype == torch.float32
    total, num_targets = 0.0, 0
    for messages in rows:
        rendered = chat.render(messages)
        ids, mask = torch.from_numpy(rendered.input_ids), torch.from_numpy(rendered.loss_mask)
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        total -= log_probs[mask[1:]].double().sum().item()
        num_targets += int(mask[1:].sum())
    return total / num_targets


def test_gsm8k_from_raw_rows_to_a_verified_model(tiny, tmp_path):
    import pyarrow.parquet as pq

    code, out, err = mfsdp("prep-data", "gsm8k", "--input", DATA, "-o", tmp_path / "data", "--for", "sft")
    train, test = tmp_path / "data" / "train.parquet", tmp_path / "data" / "test.parquet"
    assert code == 0 and out == f"{train}\n{test}\n", err
    tables = [pq.read_table(path).to_pylist() for path in (train, test)]
    assert [len(rows) for rows in tables] == [7473, 1319]
    for number, row in enumerate(tables[0] + tables[1]):
        [question, answer] = row["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant") and question["content"], number
        gold = answer["content"].rsplit("####", 1)[1].strip()
        assert gold and float(gold.replace(",", "")) is not None, number

    run_dir = tmp_path / "run"
    code, out, err = mfsdp("sft", "--preset", "sft-tiny-cpu", "--model", tiny("qwen2"), "--train-files", train, "--val-files", test,
                           "--output", run_dir, f"data.val_max_samples={HELD_OUT}", "data.train_batch_size=8", "trainer.test_freq=-1",
                           "trainer.save_freq=-1", "trainer.total_training_steps=50", "optim.lr=1e-3", "optim.min_lr=1e-4", "optim.lr_warmup_steps_ratio=0.1")
    assert code == 0, err
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if "loss" in r]
    before, after = [r["val_loss"] for r in records if "loss" not in r]
    assert len(losses) == 50 and np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5]) and after < 0.75 * before
    assert np.mean(losses[:2]) == pytest.approx(np.log(512), rel=0.1)  # random weights know nothing

    code, out, err = mfsdp("ckpt", "export-hf", out.strip(), "-o", tmp_path / "hf")
    assert code == 0, err
    held_out = [row["messages"] for row in tables[1][:HELD_OUT]]
    assert loss_of(tmp_path / "hf", held_out) == pytest.approx(after, abs=1e-4)
    assert loss_of(tiny("qwen2"), held_out) == pytest.approx(before, abs=1e-4)
