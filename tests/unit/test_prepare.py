"""prep-data: gold answers, the written schema, bad rows told all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mfsdp_cli.data.convert import BadRow, gsm8k_gold, math_gold
from mfsdp_cli.data.prepare import prepare, schema
from mfsdp_cli.data.sources import split_files
from mfsdp_cli.errors import BAD_INPUT, USAGE, MfsdpError

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("MFSDP_TEST_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(not (DATA / "gsm8k").exists(), reason="the public data sets are not here: set MFSDP_TEST_DATA")


def jsonl(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def rows_of(path) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def chat(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# ---------------------------------------------------------------- gold


@pytest.mark.parametrize("answer, gold", [
    ("Half of 48 is <<48/2=24>>24.\n#### 72", "72"),
    ("x\n#### 1,250", "1250"),
    ("x\n####5", "5"),
    ("x\n#### $5", "5"),
    ("x\n#### -3", "-3"),
    ("x\n#### 42.", "42"),
    ("x\n#### 42.00", "42.00"),
    ("#### 10\nWait.\n#### 42", "42"),
])
def test_gsm8k_gold_is_the_number_after_the_last_marker(answer, gold):
    assert gsm8k_gold(answer) == gold


@pytest.mark.parametrize("answer", ["no marker 42", "x ####", "x #### 42 apples", "x #### forty"])
def test_gsm8k_gold_is_never_null(answer):
    with pytest.raises(BadRow):
        gsm8k_gold(answer)


@pytest.mark.parametrize("solution, gold", [
    (r"so $\boxed{7}$.", "7"),
    (r"The final value goes in \boxed as requested. So the answer is \boxed{7}.", "7"),
    (r"So the answer is \boxed{7}, in a \boxed as requested.", "7"),
    (r"first \boxed{3}, later \boxed{4}", "4"),
    (r"\fbox{8}", "8"),
    (r"hence $x=\boxed 2$.", "2"),
    (r"hence $\boxed {17}.$$ and so on", "17"),
    (r"\boxed{\frac{\sqrt{3}}{2}} done }", r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{[0, \}}", r"[0, \}"),
    (r"\boxed{\text{a \boxed{9} inside}}", "9"),
    (r"$\boxed{1,250}$", "1,250"),
])
def test_math_gold_is_the_last_box_with_its_braces_balanced(solution, gold):
    assert math_gold(solution) == gold


@pytest.mark.parametrize("solution", [r"so \boxed{8", r"\boxed{4} and \boxed{8", "no box", r"\boxed{}", r"\boxed{ }", r"\boxedfoo{3}"])
def test_math_gold_is_never_null(solution):
    with pytest.raises(BadRow):
        math_gold(solution)


# ---------------------------------------------------------------- what is written


def test_gsm8k_sft_row(tmp_path):
    source = jsonl(tmp_path / "in" / "train.jsonl", [{"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}])
    report = prepare("gsm8k", input=str(source), out_dir=str(tmp_path / "out"), purpose="sft")
    path = str(tmp_path / "out" / "train.parquet")
    assert report.files == [path] and report.rows == {path: 1} and report.problems == []
    assert rows_of(path) == [{
        "messages": [
            {"role": "user", "content": '2+2? Let\'s think step by step and output the final answer after "####".'},
            {"role": "assistant", "content": "2+2=<<2+2=4>>4\n#### 4"},
        ],
        "data_source": "openai/gsm8k",
        "extra_info": {"split": "train", "index": 0, "answer": "2+2=<<2+2=4>>4\n#### 4"},
    }]


def test_math_rl_row_is_the_layout_verl_reads(tmp_path):
    row = {"problem": "What is half?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac12}$."}
    source = jsonl(tmp_path / "train.jsonl", [row])
    report = prepare("math", input=str(source), out_dir=str(tmp_path / "out"), purpose="rl", system="Be brief.")
    assert rows_of(report.files[0]) == [{
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is half? Let's think step by step and output the final answer within \\boxed{}."},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac12"},
        "extra_info": {"split": "train", "index": 0, "answer": r"It is $\boxed{\frac12}$.", "question": "What is half?"},
    }]


def test_every_source_and_split_has_the_same_schema(tmp_path):
    import pyarrow.parquet as pq

    chats = jsonl(tmp_path / "chats.jsonl", [{**chat(("user", "a"), ("assistant", "b")), "answer": 7}])
    gsm = jsonl(tmp_path / "gsm.jsonl", [{"question": "q", "answer": "#### 1"}])
    for purpose in ("sft", "rl"):
        files = prepare("arithmetic", input=None, out_dir=str(tmp_path / purpose / "a"), purpose=purpose, train_rows=3, test_rows=2).files
        files += prepare("messages", input=str(chats), out_dir=str(tmp_path / purpose / "m"), purpose=purpose).files
        files += prepare("gsm8k", input=str(gsm), out_dir=str(tmp_path / purpose / "g"), purpose=purpose).files
        assert len(files) == 4
        for path in files:
            assert pq.read_schema(path).equals(schema(purpose), check_metadata=False), path


def test_metadata_names_schema_source_and_content(tmp_path):
    import pyarrow.parquet as pq

    first = prepare("arithmetic", input=None, out_dir=str(tmp_path / "1"), purpose="sft", seed=1).files[0]
    again = prepare("arithmetic", input=None, out_dir=str(tmp_path / "2"), purpose="sft", seed=1).files[0]
    other = prepare("arithmetic", input=None, out_dir=str(tmp_path / "3"), purpose="sft", seed=2).files[0]
    a, b, c = (pq.read_schema(path).metadata for path in (first, again, other))
    assert a[b"mfsdp.schema"] == b"sft 1" and a[b"mfsdp.source"] == b"arithmetic seed=1"
    assert a[b"mfsdp.content_sha256"] == b[b"mfsdp.content_sha256"] != c[b"mfsdp.content_sha256"]
    assert b"huggingface" not in a
    assert sorted(os.listdir(tmp_path / "1")) == ["test.parquet", "train.parquet"]  # no temporary file is left


def test_arithmetic_is_right_and_its_splits_do_not_overlap(tmp_path):
    report = prepare("arithmetic", input=None, out_dir=str(tmp_path), purpose="rl")
    assert list(report.rows.values()) == [2000, 200]
    questions = set()
    for path in report.files:
        for row in rows_of(path):
            a, sign, b = row["extra_info"]["question"].removeprefix("What is ").removesuffix("?").split()
            value = int(a) + int(b) if sign == "+" else int(a) - int(b)
            assert row["reward_model"]["ground_truth"] == str(value) and 0 <= value <= 198
            assert row["extra_info"]["answer"] == f"{a} {sign} {b} = {value}\n#### {value}"
            questions.add(row["extra_info"]["question"])
    assert len(questions) == 2200


@pytest.mark.parametrize("rows, flag", [({"train_rows": 0}, "--rows"), ({"test_rows": -1}, "--test-rows")])
def test_row_counts_that_are_none_are_refused_by_their_flag(tmp_path, rows, flag):
    with pytest.raises(MfsdpError) as caught:
        prepare("arithmetic", input=None, out_dir=str(tmp_path), purpose="sft", **rows)
    assert caught.value.problems[0].key == flag and caught.value.exit_code == USAGE


def test_arithmetic_refuses_more_questions_than_there_are(tmp_path):
    with pytest.raises(MfsdpError) as caught:
        prepare("arithmetic", input=None, out_dir=str(tmp_path), purpose="sft", train_rows=15000, test_rows=51)
    assert "15050" in caught.value.problems[0].why and caught.value.exit_code == USAGE  # 100·100 sums + 5050 differences


@needs_data
@pytest.mark.parametrize("source, counts", [("gsm8k", [7473, 1319]), ("math", [7500, 5000])])
def test_the_public_data_sets_convert_whole(tmp_path, source, counts):
    report = prepare(source, input=str(DATA / source), out_dir=str(tmp_path), purpose="rl")
    assert list(report.rows.values()) == counts and report.dropped == {"train": 0, "test": 0}
    golds = [row["reward_model"]["ground_truth"] for path in report.files for row in rows_of(path)]
    assert all(golds)
    if source == "math":  # the two empty boxes of the train split, told and filled
        assert [p.key for p in report.problems] == ["train row 5529", "train row 5531"]
        assert (golds[5529], golds[5531], golds[825], golds[1655]) == ("0", "0", "17", "2")
    else:
        assert report.problems == [] and all(float(gold) == float(gold) for gold in golds)


# ---------------------------------------------------------------- chat data


def test_messages_of_both_spellings_keep_their_turns(tmp_path):
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = {"conversations": [{"from": names[role], "value": text} for role, text in turns]}
    source = jsonl(tmp_path / "train.jsonl", [chat(*turns), sharegpt])
    rows = rows_of(prepare("messages", input=str(source), out_dir=str(tmp_path / "out"), purpose="sft").files[0])
    assert rows[0]["messages"] == rows[1]["messages"] == chat(*turns)["messages"]
    assert rows[0]["extra_info"]["answer"] == "d" and rows[0]["data_source"] == "messages"


def test_messages_survive_the_parquet_round_trip(tmp_path):
    source = jsonl(tmp_path / "train.jsonl", [chat(("user", "a"), ("assistant", "b")), chat(("user", "c"), ("assistant", "d"))])
    first = prepare("messages", input=str(source), out_dir=str(tmp_path / "one"), purpose="sft").files[0]
    second = prepare("messages", input=first, out_dir=str(tmp_path / "two"), purpose="sft").files[0]
    assert rows_of(first) == rows_of(second)


def test_every_bad_row_is_told_with_its_line_and_reason(tmp_path):
    good = chat(("user", "a"), ("assistant", "b"))
    source = tmp_path / "train.jsonl"
    bad = [
        chat(("user", "a")),
        chat(("user", "a"), ("assistant", "  ")),
        chat(("user", "a"), ("system", "s"), ("assistant", "b")),
        chat(("user", "a"), ("robot", "b")),
        {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "b"}]},
        {"messages": []},
        {"text": "a"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [1]}]},
    ]
    jsonl(source, [good, *bad])
    with source.open("a") as file:
        file.write("{not json\n[1]\n")
    with pytest.raises(MfsdpError) as caught:
        prepare("messages", input=str(source), out_dir=str(tmp_path / "out"), purpose="sft")
    problems = caught.value.problems
    assert [p.where for p in problems] == [f"{source}:{line}" for line in range(2, 12)]
    assert [p.key for p in problems] == [f"train row {row}" for row in range(1, 11)]
    wanted = ["no assistant message", "message 2 (assistant) is empty", "message 2 is a system", "role 'robot'",
              "message 1 (user) has content NoneType", "is empty", "no column messages", "tool_calls", "is not JSON", "is list"]
    for problem, part in zip(problems, wanted, strict=True):
        assert part in problem.why
    assert caught.value.exit_code == BAD_INPUT and not (tmp_path / "out").exists()

    report = prepare("messages", input=str(source), out_dir=str(tmp_path / "out"), purpose="sft", skip_bad=True)
    assert list(report.rows.values()) == [1] and report.dropped == {"train": 10}
    assert len(report.problems) == 10 and {p.level for p in report.problems} == {"warning"}
    assert report.to_dict()["problems"][0]["why"] == problems[0].why


def test_many_bad_rows_are_counted_and_the_first_twenty_listed(tmp_path):
    source = jsonl(tmp_path / "train.jsonl", [{"question": "q", "answer": "none"}] * 25)
    with pytest.raises(MfsdpError) as caught:
        prepare("gsm8k", input=str(source), out_dir=str(tmp_path / "out"), purpose="sft")
    assert len(caught.value.problems) == 21 and caught.value.problems[-1].found == "25"
    with pytest.raises(MfsdpError, match="no usable row"):
        prepare("gsm8k", input=str(source), out_dir=str(tmp_path / "out"), purpose="sft", skip_bad=True)


def test_rl_needs_a_gold_answer(tmp_path):
    turns = chat(("user", "a"), ("assistant", "b"))
    source = jsonl(tmp_path / "train.jsonl", [{**turns, "ground_truth": "b"}, {**turns, "answer": 3}, turns])
    with pytest.raises(MfsdpError) as caught:
        prepare("messages", input=str(source), out_dir=str(tmp_path / "out"), purpose="rl")
    assert [p.key for p in caught.value.problems] == ["train row 2"] and "ground_truth" in caught.value.problems[0].why
    rows = rows_of(prepare("messages", input=str(source), out_dir=str(tmp_path / "out"), purpose="rl", skip_bad=True).files[0])
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["b", "3"]
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": "a"}]] * 2


def test_system_message_does_not_replace_one_silently(tmp_path):
    source = jsonl(tmp_path / "train.jsonl", [chat(("system", "mine"), ("user", "a"), ("assistant", "b"))])
    with pytest.raises(MfsdpError, match="system message of its own"):
        prepare("messages", input=str(source), out_dir=str(tmp_path / "out"), purpose="sft", system="other")


# ---------------------------------------------------------------- input


def test_row_limits_and_a_test_split_held_out_of_one_file(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", [{"question": str(i), "answer": f"#### {i}"} for i in range(10)])
    report = prepare("gsm8k", input=str(source), out_dir=str(tmp_path / "out"), purpose="rl", test_rows=3, seed=5)
    train, test = (rows_of(path) for path in report.files)
    seen = [row["extra_info"]["index"] for row in train], [row["extra_info"]["index"] for row in test]
    assert len(seen[1]) == 3 and sorted(seen[0] + seen[1]) == list(range(10))
    report = prepare("gsm8k", input=str(source), out_dir=str(tmp_path / "out"), purpose="rl", train_rows=4)
    assert "earlier call" in report.problems[0].why and len(report.files) == 1
    assert [row["extra_info"]["index"] for row in rows_of(report.files[0])] == [0, 1, 2, 3]


def test_a_folder_gives_its_splits_and_ambiguity_is_refused(tmp_path):
    (tmp_path / "main").mkdir()
    for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet", "training.parquet"):
        (tmp_path / "main" / name).touch()
    found = split_files(tmp_path)
    assert [p.name[:11] for p in found["train"]] == ["train-00000", "train-00001"] and len(found["test"]) == 1
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(MfsdpError, match="several kinds"):
        split_files(tmp_path)


def test_missing_input_says_what_to_give(tmp_path):
    for given, part in ((str(tmp_path / "none.jsonl"), "no such file"), (None, "no default data set")):
        with pytest.raises(MfsdpError) as caught:
            prepare("messages", input=given, out_dir=str(tmp_path), purpose="sft")
        assert part in caught.value.problems[0].why and caught.value.exit_code == BAD_INPUT
    (tmp_path / "validation.jsonl").touch()
    with pytest.raises(MfsdpError, match="no train.* file; it holds validation.jsonl"):
        prepare("messages", input=str(tmp_path), out_dir=str(tmp_path), purpose="sft")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(MfsdpError, match="cannot be read"):
        prepare("messages", input=str(tmp_path / "torn.parquet"), out_dir=str(tmp_path), purpose="sft")


def test_an_unreachable_hub_says_to_give_a_local_path(tmp_path):
    pytest.importorskip("huggingface_hub")
    code = (
        "from mfsdp_cli.data.prepare import prepare\nfrom mfsdp_cli.errors import MfsdpError\n"
        f"try: prepare('gsm8k', input=None, out_dir={str(tmp_path)!r}, purpose='sft')\n"
        "except MfsdpError as e: print(e.exit_code, e.problems[0].found, e.problems[0].fix)\n"
        "import sys; assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "5 openai/gsm8k give a local file or folder\n", done.stderr
