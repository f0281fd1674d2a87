"""What a GRPO run keeps of its responses, as a person asks for it."""

import json
from pathlib import Path

import pytest

from mfsdp_cli import cli
from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.samples import COLUMNS, choose, read_samples, render, shorten


def row(number: int, reward: float, status: str = "wrong", **changes) -> dict:
    return {"step": 7, "row": number, "group": number // 2, "index": number % 2, "prompt": f"{number} + 1?",
            "response": f"line\n#### {number}", "reward": reward, "status": status, "parsed": None if status == "unparseable" else str(number), "ground_truth": str(number + 1),
            "advantage": reward - 0.5, "num_tokens": 5, "is_truncated": False} | changes


ROWS = [row(0, 0.0, "unparseable"), row(1, 1.0, "right"), row(2, 0.0), row(3, 0.5), row(4, 1.0, "right"), row(5, -1.0, "unparseable")]


def keep(run: Path, step: int, rows: list[dict], prefix: str = "step_") -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (run / "samples").mkdir(parents=True, exist_ok=True)
    path = run / "samples" / f"{prefix}{step:06d}.parquet"
    pq.write_table(pa.table({name: [r[name] for r in rows] for name in COLUMNS}), path)
    return path


def call(capsys, *args: str):
    code = cli.guarded(lambda: cli.app(["samples", *args], prog_name="mfsdp", standalone_mode=False), list(args))
    return code, *capsys.readouterr()


def rows_of(chosen, name):
    return [r["row"] for r in chosen[name]]


def test_best_worst_and_unparseable():
    chosen = choose(ROWS, best=2, worst=3, unparseable=5)
    assert (rows_of(chosen, "best"), rows_of(chosen, "worst"), rows_of(chosen, "unparseable")) == ([1, 4], [5, 0, 2], [0, 5])
    assert rows_of(choose(ROWS, 5, 5, 1), "worst") == [5], "a row is not best and worst at once"
    assert choose([], 3, 3, 3) == choose(ROWS, 0, 0, 0) == {"best": [], "worst": [], "unparseable": []}


def test_the_last_step_unless_one_is_named(tmp_path):
    keep(tmp_path, 7, ROWS), keep(tmp_path, 12, ROWS[:2]), keep(tmp_path, 15, ROWS[:1], "val_step_")
    (tmp_path / "samples/step_000020.part").write_text("half")
    path, rows = read_samples(str(tmp_path), None)
    assert path.name == "step_000012.parquet" and rows == ROWS[:2]
    assert read_samples(str(tmp_path), 7)[1] == ROWS and read_samples(str(tmp_path), None, validation=True)[1] == ROWS[:1]
    with pytest.raises(MfsdpError) as error:
        read_samples(str(tmp_path), 8)
    assert error.value.exit_code == 5 and error.value.problems[0].fix == "steps: 7, 12"


def test_what_is_not_there_is_said(tmp_path):
    for run, why in ((tmp_path / "none", "there is no such folder"), (tmp_path, "no responses are kept in it")):
        with pytest.raises(MfsdpError) as error:
            read_samples(str(run), None)
        assert why in error.value.problems[0].why and error.value.exit_code == 5
    path = keep(tmp_path, 1, ROWS)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(MfsdpError, match="not readable as parquet"):
        read_samples(str(tmp_path), 1)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"step": [1]}), path)
    with pytest.raises(MfsdpError, match="columns are missing: row, group"):
        read_samples(str(tmp_path), 1)


def test_long_texts_lose_their_middle():
    assert shorten("0123456789abcdef", 11) == "012 […] def" and shorten("0123456789a", 11) == "0123456789a"
    text = "a" * 500 + "b" * 500
    assert len(shorten(text, 600)) == 600 and shorten(text, 600).startswith("a" * 298) and shorten(text, 600).endswith("b" * 297)


def test_plain_text_elsewhere_than_on_a_terminal(tmp_path, capsys):
    keep(tmp_path, 7, ROWS)
    code, out, err = call(capsys, str(tmp_path), "--best", "1", "--worst", "1", "--unparseable", "1")
    assert (code, err) == (0, "")
    head, best, worst, odd = out.rstrip("\n").split("\n\n")
    assert head == f"{tmp_path}/samples/step_000007.parquet: 6 responses, mean reward 0.250; 2 right, 2 unparseable, 2 wrong"
    assert best == ("best: row 1 response 1 of group 0: reward 1.000 advantage 0.500 right, read '1' of '2', 5 tokens\n"
                    "  prompt: 1 + 1?\n  response: line\n    #### 1")
    assert worst.startswith("worst: row 5 ") and odd.startswith("no readable answer: row 0 ") and "read None of '1'" in odd


def test_json_has_texts_whole(tmp_path, capsys):
    keep(tmp_path, 7, [row(0, 1.0, "right", response="x" * 2000), row(1, float("nan"))])
    code, out, _ = call(capsys, str(tmp_path), "--json")
    data = json.loads(out)
    assert code == 0 and data["ok"] is True and data["num_samples"] == 2 and data["best"][0]["response"] == "x" * 2000
    code, out, err = call(capsys, str(tmp_path), "--step", "3", "--json")
    assert code == 5 and json.loads(out)["problems"][0]["key"] == "--step" and "steps: 7" in err


def test_a_response_cannot_write_to_the_terminal(tmp_path):
    rows = [row(0, 1.0, response="a\x1b[31mb\r\nc\t\x07")]
    text = render(tmp_path / "f", rows, choose(rows, 1, 0, 0))
    assert text.endswith("  response: a\ufffd[31mb\ufffd\n    c\ufffd\ufffd")


def test_a_table_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "140")
    rows = [row(0, 1.0, "right", response="[bold]" + "y" * 900)]
    text = render(tmp_path / "f", rows, choose(rows, 1, 1, 1), no_color=True)
    assert "\x1b" not in text and "[bold]" in text and "[…]" in text and max(map(len, text.splitlines()[1:])) <= 140
