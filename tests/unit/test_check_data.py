"""--check-data: what is found in rows by a real tokenizer, and what the launcher makes of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from facts_for_tests import make_facts, make_settings
from grpo_for_tests import grpo_settings
from inputs_for_tests import write_chats, write_prompts
from make_tiny_model import make_tokenizer

from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID, MACHINE_UNFIT, MfsdpError, Problem
from mfsdp_cli.launch import check_data as launcher
from mfsdp_cli.launch.plan import make_plan
from mfsdp_cli.launch.start import Checked
from mfsdp_cli.train.check_data import check


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer and as many embeddings as it has tokens."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(480)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer)}))
    return folder


@pytest.fixture
def chats(tmp_path):
    """19 short conversations, and one with an answer of 60 letters at row 19."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_chats(tmp_path / "train.parquet", 19)
    table = pq.read_table(path)
    long = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "z" * 60}]]
    pq.write_table(pa.concat_tables([table, pa.table({"messages": long}, schema=table.schema)]), path)
    return str(path)


def sft(chats, **settings):
    return make_settings(**{"engine__tensor_model_parallel_size": 1, "data__train_files": [chats], "data__val_files": []} | settings)


def test_chats_are_counted_and_measured(model, chats):
    (split,), problems = check("sft", sft(chats), str(model))
    assert problems == [] and (split["name"], split["rows"], split["usable"], split["above"]) == ("training", 20, 20, 0)
    tokens = split["tokens"]
    assert tokens["min"] <= tokens["median"] < 60 < tokens["p99"] == tokens["max"] and split["limit"] == 1024
    assert 0 < split["targets"] < tokens["total"]
    assert check("sft", sft(chats, data__train_max_samples=19), str(model))[0][0]["tokens"]["max"] < 60


def test_the_longest_row_against_the_limit(model, chats):
    most = check("sft", sft(chats), str(model))[0][0]["tokens"]["max"]
    assert check("sft", sft(chats, data__max_length=most), str(model))[1] == []
    (split,), (problem,) = check("sft", sft(chats, data__max_length=most - 1), str(model))
    assert (split["above"], split["usable"], split["fate"], split["above_share"]) == (1, 19, "refused", 0.05)
    assert problem.key == f"{chats} row 19" and problem.code == BAD_INPUT and f"it is {most} tokens long" in problem.why
    (split,), (problem,) = check("sft", sft(chats, data__max_length=most - 1, data__truncation="right"), str(model))
    assert split["usable"] == 20 and split["fate"] == "cut" and problem.level == "warning"
    assert problem.fix == f"raise it to {most} to keep them whole"
    # A micro batch of TP 4 with sequence parallelism is a multiple of 4.
    assert check("sft", sft(chats, data__max_token_len_per_gpu=103, engine__tensor_model_parallel_size=4), str(model))[0][0]["limit"] == 100


def test_rows_without_a_target_are_named(model, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = str(tmp_path / "bad.parquet")
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in ("b", " ", "c")]
    pq.write_table(pa.table({"messages": rows}), path)
    (split,), (problem,) = check("sft", sft(path), str(model))
    assert split["usable"] == 2 and problem.key == f"{path} row 1" and "nothing to learn" in problem.why


def test_prompts_above_the_limit_are_told_by_their_fate(model, tmp_path):
    path = str(write_prompts(tmp_path / "prompts.parquet", 12))
    settings = grpo_settings(data__train_files=[path], data__val_files=[path], data__train_batch_size=4)
    splits, problems = check("grpo", settings, str(model))
    assert problems == [] and [s["name"] for s in splits] == ["training", "validation"] and splits[0]["usable"] == 12
    most = splits[0]["tokens"]["max"]
    short = splits[0]["tokens"]["min"]
    settings.data.max_prompt_length = most - 1
    splits, problems = check("grpo", settings, str(model))
    assert splits[0]["fate"] == "left out" and splits[0]["usable"] == 12 - splits[0]["above"] and problems[0].level == "warning"
    settings.data.max_prompt_length, settings.data.train_batch_size = short, 12
    assert "not one full batch" in check("grpo", settings, str(model))[1][-1].why
    settings.data.filter_overlong_prompts = False
    splits, problems = check("grpo", settings, str(model))
    assert splits[0]["fate"] == "refused" and problems[0].code == BAD_INPUT and "above data.max_prompt_length" in problems[0].why
    settings.trainer.val_only = True
    assert [s["name"] for s in check("grpo", settings, str(model))[0]] == ["validation"]


def test_files_that_differ_in_what_a_scorer_reads_are_noted(model, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    a, b = str(write_prompts(tmp_path / "a.parquet", 3)), str(tmp_path / "b.parquet")
    table = pq.read_table(a)
    extra = pa.array([{"index": i} for i in range(3)])
    pq.write_table(table.set_column(table.schema.get_field_index("extra_info"), "extra_info", extra), b)
    problems = check("grpo", grpo_settings(data__train_files=[a, b], data__val_files=[]), str(model))[1]
    assert "extra_info.split: missing, not string" in [p for p in problems if p.level == "note"][0].why


def test_a_model_that_does_not_fit_its_tokenizer(model, chats, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps({"vocab_size": 20}))
    problem, = check("sft", sft(chats), str(other))[1]
    assert problem.key == "model.path" and "embedding has 20 rows" in problem.why
    (other / "tokenizer.json").write_text("{}")
    splits, (problem,) = check("sft", sft(chats), str(other))
    assert splits == [] and "its tokenizer cannot be loaded" in problem.why and problem.code == BAD_INPUT


# ---------------------------------------------------------------- the launcher

CHILD = """
import json, sys
assert sys.argv[1] == "sft" and "model.path" and open(sys.argv[sys.argv.index("--config") + 1]).read()
tokens = {"total": 5000, "min": 2, "median": 5, "p99": 9, "max": 12}
split = {"name": "training", "files": ["t"], "rows": 1000, "usable": 990, "tokens": tokens, "limit": 9,
         "above": 10, "above_share": 0.01, "fate": "refused", "targets": 7}
problem = {"key": "t row 3", "found": "", "why": "too long", "fix": "cut it", "where": "", "code": 5, "level": "error"}
if EXIT:
    sys.exit(EXIT)
open(sys.argv[sys.argv.index("--report") + 1], "w").write(json.dumps({"splits": [split], "problems": [problem]}))
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """child(exit_code) -> name of a module that stands for the reading process."""
    def make(exit_code=0):
        (tmp_path / "stand_in.py").write_text(CHILD.replace("EXIT", str(exit_code)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "stand_in"
    return make


def checked(tmp_path, problems=()):
    settings, facts = make_settings(), make_facts()
    return Checked(settings, {}, facts, make_plan(settings, facts), tmp_path / "run", list(problems))


def test_what_the_child_finds_joins_the_problems(tmp_path, child):
    result, report = launcher.check_data(checked(tmp_path), child())
    assert result.exit_code == BAD_INPUT and result.problems[0].key == "t row 3"
    head, line = launcher.data_lines(report)
    assert head.split() == ["data", "rows", "usable", "tokens", "min", "median", "p99", "max", "limit", "above"]
    assert line.split() == ["training", "1000", "990", "5000", "2", "5", "9", "12", "9", "10", "1.0", "%", "refused"]


def test_nothing_is_read_when_files_or_model_are_wrong(tmp_path, child):
    wrong = Problem("data.train_files", "a", "wrong", "right", code=BAD_INPUT)
    result, report = launcher.check_data(checked(tmp_path, [wrong]), "no_such_module")
    assert report is None and launcher.data_lines(report) == [] and result.exit_code == BAD_INPUT
    assert [p.level for p in result.problems] == ["error", "note"]
    for other in (replace(wrong, level="warning"), replace(wrong, code=CONFIG_INVALID), replace(wrong, code=MACHINE_UNFIT)):
        assert launcher.check_data(checked(tmp_path, [other]), child())[1] is not None


def test_a_child_that_fails_is_told(tmp_path, child):
    with pytest.raises(MfsdpError) as caught:
        launcher.check_data(checked(tmp_path), child(7))
    assert caught.value.exit_code == 7 and "ended with exit code 7" in str(caught.value)
