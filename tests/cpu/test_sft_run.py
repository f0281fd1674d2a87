"""`mfsdp sft` whole: launcher, torchrun, two ranks, run folder; stopped, continued, exported; and its failures."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
from program import finish, mfsdp, start

from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, OK, RUN_FAILED, STOPPED

STEPS = 60


def write_chats(path, rows: list[tuple[str, str]]):
    import pyarrow as pa
    import pyarrow.parquet as pq

    chats = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in rows]
    pq.write_table(pa.table({"messages": chats}), path)
    return path


def sums(number: int) -> list[tuple[str, str]]:
    return [(f"What is {n} + {n}?", f"#### {2 * n}") for n in range(number)]


def kill_at(process, text: str) -> None:
    """SIGKILL of the launcher when it tells this line."""
    for line in process.stderr:
        if line.startswith(text):
            process.kill()
            break
    assert finish(process)[0] == -signal.SIGKILL


def as_soon_as_it_may(*command) -> tuple[int, str, str]:
    for _ in range(120):
        code, out, err = mfsdp(*command)
        if code != MACHINE_UNFIT or "still at work" not in err:
            return code, out, err
        time.sleep(0.5)
    raise AssertionError(err)


def test_stopped_killed_continued_inspected_and_exported(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    run_dir, train = tmp_path / "run", write_chats(tmp_path / "train.parquet", sums(40))
    command = ["sft", "--preset", "sft-tiny-cpu", "--model", tiny("qwen2"), "--train-files", train, "--output", run_dir, "--nproc", 2,
               "data.train_batch_size=4", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1"]
    process = start(*command)
    for line in process.stderr:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGTERM)
            break
    code, out, err = finish(process)
    assert code == STOPPED, err
    [folder] = run_dir.glob("checkpoints/step_*")
    stopped_at = int(folder.name.removeprefix("step_"))
    assert 2 < stopped_at < STEPS and out == f"{folder}\n" and "the same command again" in err

    process = start(*command)
    kill_at(process, f"step {stopped_at + 2}/")
    code, out, err = as_soon_as_it_may(*command)  # the ranks that the dead launcher left save first
    [(_, went_on_at)] = re.findall(r"weights from (.*)step_(\d+)", err)
    went_on_at = int(went_on_at)
    assert went_on_at >= stopped_at + 2
    last = run_dir / "checkpoints" / f"step_{STEPS:06d}"
    assert code == OK, err
    assert out == f"{last}\n"  # the product, and nothing else
    steps = [int(line.split()[1].removesuffix(f"/{STEPS}")) for line in err.splitlines() if line.startswith("step ")]
    assert steps[0] == went_on_at + 1 and steps[-1] == STEPS and steps == sorted(set(steps))
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["attempt"]) for r in records] == [(n, 1 + (n > stopped_at) + (n > went_on_at)) for n in range(1, STEPS + 1)]
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert list((run_dir / "tensorboard").iterdir())

    code, out, err = mfsdp("ckpt", "inspect", run_dir, "--verify", "--json")
    report = json.loads(out)
    assert code == OK and report["step"] == STEPS and report["problems"] == [] and report["export"]["possible"], err

    code, out, err = mfsdp("ckpt", "export-hf", run_dir, "-o", tmp_path / "hf")
    assert code == OK and out == f"{tmp_path / 'hf'}\n", err
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.fixture(scope="module")
def failed(tiny, tmp_path_factory):
    """Two runs that fail, at the same time: name -> (run folder, exit code, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("failed")
    rows = sums(20)
    good = write_chats(folder / "good.parquet", rows)
    long = write_chats(folder / "long.parquet", rows[:7] + [("Count!", "1 2 3 4 5 " * 60)] + rows[7:])
    common = ["sft", "--preset", "sft-tiny-cpu", "--model", tiny("qwen2"), "--nproc", 1, "data.train_batch_size=4",
              "data.max_token_len_per_gpu=256"]
    processes = {
        "overlong": start(*common, "--train-files", long, "--output", folder / "overlong"),
        "diverging": start(*common, "--train-files", good, "--output", folder / "diverging", "optim.lr=1.0e+30", "optim.lr_warmup_steps=0",
                           "trainer.save_freq=1"),
    }
    return {name: (folder / name, *finish(process)) for name, process in processes.items()}


def test_an_overlong_row_is_named_before_the_first_step(failed):
    run_dir, code, out, err = failed["overlong"]
    assert code == BAD_INPUT and out == "", err
    assert "long.parquet row 7" in err and "above the limit of 256" in err and "data.truncation" in err
    assert not (run_dir / "metrics.jsonl").exists() and not (run_dir / "checkpoints").exists()
    assert json.loads((run_dir / "attempts" / "001" / "failure.json").read_text())["exit_code"] == BAD_INPUT


def test_a_diverging_run_ends_with_its_batch_and_its_last_checkpoint(failed):
    run_dir, code, out, err = failed["diverging"]
    assert code == RUN_FAILED and out == "", err
    assert "step 2: global gradient norm is" in err and "nothing was applied" in err and "step_000001" in err
    batch = json.loads((run_dir / "attempts" / "001" / "bad_batch.json").read_text())
    assert len(batch["rows"]) == 4 and all(len(row["input_ids"]) == row["num_tokens"] for row in batch["rows"])
    assert [p.name for p in run_dir.glob("checkpoints/step_*")] == ["step_000001"]
