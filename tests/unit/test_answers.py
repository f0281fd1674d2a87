"""What is kept of a step's responses, without torch."""

from __future__ import annotations

import numpy as np

from mfsdp_cli.rewards.base import RewardResult
from mfsdp_cli.samples import read_samples
from mfsdp_cli.train.answers import Answer, chat_text, write_samples
from mfsdp_cli.types import Prompt, Response


def test_chat_text():
    assert chat_text([{"role": "user", "content": "1+1?"}]) == "1+1?"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert chat_text(chat) == "system: Be brief.\nuser: 1+1?"


def test_what_is_written_is_what_mfsdp_samples_reads(tmp_path):
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}]
    prompt = Prompt(row=7, input_ids=np.arange(3), messages=chat, data_source="arithmetic", ground_truth="2", extra_info={})
    answers = [Answer(prompt, Response(np.arange(n + 1), np.zeros(n + 1, np.float32), f"#### {n}", n == 1, 1), 0, n,
                      RewardResult(float(n == 2), str(n), "right" if n == 2 else "wrong"), float(n == 2), n - 1.0) for n in range(3)]
    write_samples(tmp_path, 5, answers, -1)
    path, rows = read_samples(str(tmp_path), None)
    assert path.name == "step_000005.parquet" and [r["reward"] for r in rows] == [0, 0, 1] and [r["advantage"] for r in rows] == [-1, 0, 1]
    assert rows[0]["prompt"] == "user: 1+1?\nassistant: 3\nuser: Sure?" and rows[2]["response"] == "#### 2" and rows[2]["parsed"] == "2"
    assert [r["is_truncated"] for r in rows] == [False, True, False] and [r["num_tokens"] for r in rows] == [1, 2, 3]
