"""Prompts out of parquet: rendering, overlong ones, faulty rows and columns, and their order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_tiny_model import make_tokenizer

from mfsdp_cli.config.schema_grpo import RlDataSettings
from mfsdp_cli.data.chat import ChatTokenizer
from mfsdp_cli.data.loader import BatchStream, batch_rows
from mfsdp_cli.data.prepare import prepare
from mfsdp_cli.data.prompts import PromptDataset
from mfsdp_cli.errors import BAD_INPUT, MfsdpError


@pytest.fixture(scope="module")
def chat():
    return ChatTokenizer(make_tokenizer(480))


def row_of(question: str, gold="4", source: str = "arithmetic", **more) -> dict:
    return {"data_source": source, "prompt": [{"role": "user", "content": question}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": gold}, "extra_info": {"split": "train", "index": 3}, **more}


def write(path: Path, rows: list[dict]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


def dataset_of(files, chat, max_samples: int = -1, **options) -> PromptDataset:
    settings = RlDataSettings(**{"max_prompt_length": 12, **options})
    return PromptDataset([files] if isinstance(files, str) else files, settings, chat, max_samples)


def problems_of(files, chat, **options) -> list:
    with pytest.raises(MfsdpError) as caught:
        dataset_of(files, chat, **options)
    assert caught.value.exit_code == BAD_INPUT
    return caught.value.problems


# ---------------------------------------------------------------- rendering


def test_what_prep_data_writes_is_read_and_ends_where_the_assistant_is_to_speak(tmp_path, chat):
    report = prepare("arithmetic", input=None, out_dir=str(tmp_path), purpose="rl", train_rows=5, test_rows=2)
    dataset = dataset_of(report.files, chat, max_prompt_length=100)
    assert len(dataset) == 7 and dataset.notes == [] and dataset.num_overlong == 0
    prompt = dataset.prompt(5)
    question = prompt.messages[0]["content"]
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(prompt.input_ids.tolist()) == text and prompt.input_ids.dtype == np.int64
    assert (prompt.row, prompt.data_source, prompt.extra_info["split"], prompt.extra_info["index"]) == (5, "arithmetic", "test", 0)
    sign, a, b = ("+" if "+" in question else "-"), *[int(word.strip("?")) for word in question.split() if word.strip("?").isdigit()]
    assert prompt.ground_truth == str(a + b if sign == "+" else a - b)
    # the prompt is exactly what the SFT data puts in front of its answers
    rendered = chat.render([*prompt.messages, {"role": "assistant", "content": "1"}])
    first = int(np.flatnonzero(rendered.loss_mask)[0])
    assert np.array_equal(rendered.input_ids[:first], prompt.input_ids)


def test_a_chat_of_several_turns_and_a_number_as_gold(tmp_path, chat):
    talk = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"))]
    dataset = dataset_of(write(tmp_path / "a.parquet", [row_of("", gold=7, prompt=talk)]), chat, max_prompt_length=100)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in talk) + "<|im_start|>assistant\n"
    prompt = dataset.prompt(0)
    assert chat.tokenizer.decode(prompt.input_ids.tolist()) == text and prompt.messages == talk and prompt.ground_truth == "7"


def test_a_template_that_opens_no_turn_is_told(tmp_path):
    tokenizer = make_tokenizer(480)
    tokenizer.chat_template = tokenizer.chat_template.split("{%- if add_generation_prompt")[0]
    [note] = dataset_of(write(tmp_path / "a.parquet", [row_of("a")]), ChatTokenizer(tokenizer)).notes
    assert note.level == "warning" and "add_generation_prompt" in note.why


# ---------------------------------------------------------------- length
# <|im_start|> user \n ? <|im_end|> \n <|im_start|> assistant \n is 9 tokens; every digit is one more.


def digits(tmp_path) -> str:
    return write(tmp_path / "digits.parquet", [row_of("1" * n + "?") for n in (1, 9, 2, 3, 4, 8)])


def test_overlong_prompts_are_left_out_counted_and_named(tmp_path, chat):
    file = digits(tmp_path)
    dataset = dataset_of(file, chat)
    assert [dataset.prompt(i).row for i in range(len(dataset))] == [0, 2, 3]
    assert [len(dataset.prompt(i).input_ids) for i in range(3)] == [10, 11, 12]
    assert dataset.num_overlong == 3
    assert dataset.summary == "3 prompts of 6 rows, 33 tokens, longest 12, 3 above 12 tokens left out"
    [note] = dataset.notes
    assert note.level == "warning" and "raise it to 18" in note.fix
    assert f"3 of 6 prompts are longer and left out; the longest has 18 tokens; they are: {file} row 1 (18), {file} row 4 (13)" in note.why


def test_unfiltered_they_are_errors_or_cut(tmp_path, chat):
    file = digits(tmp_path)
    problems = problems_of(file, chat, filter_overlong_prompts=False)
    assert [p.key for p in problems] == [f"{file} row {row}" for row in (1, 4, 5)]
    assert "13 tokens long, above data.max_prompt_length=12" in problems[1].why
    whole = dataset_of(file, chat, max_prompt_length=18).prompt(1).input_ids
    for truncation, kept in (("left", whole[6:]), ("right", whole[:12])):
        dataset = dataset_of(file, chat, filter_overlong_prompts=False, truncation=truncation)
        assert len(dataset) == 6 and np.array_equal(dataset.prompt(1).input_ids, kept)
        assert f"3 above 12 tokens cut ({truncation})" in dataset.summary and "3 of 6 prompts are longer and cut" in dataset.notes[0].why


def test_no_prompt_left_is_an_error(tmp_path, chat):
    [problem] = problems_of(digits(tmp_path), chat, max_prompt_length=9)
    assert "all 6 prompts are longer" in problem.why
    [problem] = problems_of(digits(tmp_path), chat, max_samples=0)
    assert "no rows" in problem.why


# ---------------------------------------------------------------- faults


def test_every_faulty_row_is_named_at_once(tmp_path, chat):
    rows = [
        row_of("a"), row_of("b", gold=None), row_of("c", gold="  "), row_of("d", source=""), row_of("e", prompt=[]),
        row_of("f", prompt=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "4"}]),
        row_of("g", prompt=[{"role": "robot", "content": "q"}]), row_of("h", prompt=[{"role": "user", "content": None}]),
        row_of("i", reward_model=None),
    ]
    good, bad = write(tmp_path / "good.parquet", [row_of("a")]), write(tmp_path / "bad.parquet", rows)
    problems = problems_of([good, bad], chat)
    assert [p.key for p in problems] == [f"{bad} row {i}" for i in range(1, 9)]
    parts = ["ground_truth is empty", "ground_truth is empty", "data_source is empty", "prompt is empty", "ends with an assistant message",
             "role 'robot'", "content NoneType", "ground_truth is empty"]
    for problem, part in zip(problems, parts, strict=True):
        assert part in problem.why
    assert len(problems_of(write(tmp_path / "many.parquet", [row_of("a", gold="")] * 25), chat)) == 21


def test_files_without_the_columns_are_all_told(tmp_path, chat):
    bare = [{k: v for k, v in row_of("a").items() if k not in ("reward_model", "data_source")}]
    files = [
        str(tmp_path / "none.parquet"),
        write(tmp_path / "bare.parquet", bare),
        write(tmp_path / "text.parquet", [row_of("a", prompt="a?")]),
        write(tmp_path / "list.parquet", [row_of("a", gold=["4"])]),
        write(tmp_path / "good.parquet", [row_of("a")]),
    ]
    problems = problems_of(files, chat)
    assert [p.where for p in problems] == [files[0], files[1], files[1], files[2], files[3]]
    parts = ["not a readable", "no such column", "no such column", "is string, not a list", "list<element: string>"]
    for problem, part in zip(problems, parts, strict=True):
        assert part in problem.why
    assert [p.found for p in problems[1:3]] == ["data_source", "reward_model"] and "data.prompt_key" in problems[1].fix


def test_files_that_differ_in_what_only_a_scorer_reads_are_noted(tmp_path, chat):
    a = write(tmp_path / "a.parquet", [row_of("a")])
    b = write(tmp_path / "b.parquet", [row_of("b", extra_info={"index": "3"})])
    c = write(tmp_path / "c.parquet", [{k: v for k, v in row_of("c").items() if k != "extra_info"}])
    dataset = dataset_of([a, b, c], chat)
    assert [dataset.prompt(i).extra_info for i in range(3)] == [{"split": "train", "index": 3}, {"index": "3"}, {}]
    first, second = dataset.notes
    assert "extra_info.index: string, not int64; extra_info.split: missing, not string" in first.why and first.level == "note"
    assert second.where == c


# ---------------------------------------------------------------- order


def test_the_stream_hands_out_prompts_in_the_seeded_order_and_resumes(tmp_path, chat):
    file = write(tmp_path / "a.parquet", [row_of("1" * (9 if n == 2 else 1) + "?", gold=str(n)) for n in range(8)])  # row 2 is too long
    used = [0, 1, 3, 4, 5, 6, 7]
    with BatchStream(dataset_of(file, chat), 3, seed=5, shuffle=True) as stream:
        seen = [[prompt.row for prompt in next(stream)] for _ in range(4)]
        assert stream.num_dropped == 1 and stream.epoch == 2
    assert seen == [[used[at] for at in batch_rows(7, 3, 5, True, done).tolist()] for done in (0, 3, 6, 9)]
    with BatchStream(dataset_of(file, chat), 3, 5, True, samples_consumed=6) as resumed:
        assert [prompt.row for prompt in next(resumed)] == seen[2]
    assert [len(dataset_of(file, chat, max_samples=n)) for n in (2, 3, 4, 100)] == [2, 2, 3, 7]


def test_a_survey_tells_what_would_be_raised_and_measures_all(tmp_path, chat):
    from dataclasses import replace

    file = digits(tmp_path)
    for limit, told in ((12, [f"{file} row {row}" for row in (1, 4, 5)]), (1, [f"{file} row {row}" for row in range(6)])):
        refuses = replace(RlDataSettings(), max_prompt_length=limit, filter_overlong_prompts=False)
        seen = PromptDataset([file], refuses, chat, survey=True)
        assert [p.key for p in seen.problems] == told and seen.notes == [] and len(seen) == 6 - len(told)
        assert list(seen.lengths) == list(range(6)) and (seen.lengths[0], seen.lengths[1], seen.lengths[4]) == (10, 18, 13) and seen.largest_id > 0
    none = PromptDataset([file], replace(RlDataSettings(), max_prompt_length=1), chat, survey=True)
    assert [p.why for p in none.problems] == ["all 6 prompts are longer: none is left"] and len(none.lengths) == 6
