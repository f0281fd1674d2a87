"""Our reader of parquet footers against pyarrow's: equal, or it hands over."""

from __future__ import annotations

import random

import pytest
from inputs_for_tests import write_chats, write_prompts

from mfsdp_cli.launch import facts
from mfsdp_cli.launch.facts import _read_footer_with_pyarrow, read_footer
from mfsdp_cli.launch.footer import NotPlain, read_plain


def by_pyarrow(path):
    found = _read_footer_with_pyarrow(str(path))
    assert not found.error
    return found.num_rows, found.columns, found.nulls


def test_files_that_people_train_on_are_read_without_pyarrow(tmp_path, monkeypatch):
    chats, prompts = write_chats(tmp_path / "chats.parquet", 20), write_prompts(tmp_path / "prompts.parquet", 7)
    rows, columns, nulls = read_plain(str(chats))
    assert (rows, columns) == (20, {"messages": "list<element: struct<role: string, content: string>>"})
    assert nulls == {"messages.list.element.role": 0, "messages.list.element.content": 0}
    assert read_plain(str(prompts)) == by_pyarrow(prompts) and read_plain(str(chats)) == by_pyarrow(chats)
    monkeypatch.setattr(facts, "_read_footer_with_pyarrow", lambda path: pytest.fail("pyarrow was needed"))
    assert read_footer(str(chats)).columns == columns


def test_nulls_are_counted_over_all_row_groups(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    gold = [None if i % 3 == 0 else str(i) for i in range(10)]  # 0, 3, 6 and 9
    table = pa.table({"reward_model": pa.array([{"style": "rule", "ground_truth": g} for g in gold])})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    rows, _, nulls = read_plain(str(tmp_path / "a.parquet"))
    assert rows == 10 and nulls == {"reward_model.style": 0, "reward_model.ground_truth": 4}


def random_type(draw, depth, odd):
    import pyarrow as pa

    plain = [pa.string(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()]
    others = [pa.large_string(), pa.int8(), pa.uint32(), pa.date32(), pa.timestamp("us"), pa.binary(),
              pa.dictionary(pa.int32(), pa.string()), pa.decimal128(5, 2), pa.large_list(pa.int64()), pa.map_(pa.string(), pa.int64()),
              pa.string_view(), pa.float16()]
    what = draw.random()
    if depth == 0 or what < 0.5:
        return draw.choice(others if odd and draw.random() < 0.3 else plain)
    if what < 0.75:
        name = draw.choice(["item", "element", "x"])
        return pa.list_(pa.field(name, random_type(draw, depth - 1, odd), nullable=draw.random() < 0.8))
    inside = [pa.field(f"f{i}", random_type(draw, depth - 1, odd), nullable=draw.random() < 0.8) for i in range(draw.randint(1, 3))]
    return pa.struct(inside)


@pytest.mark.parametrize("odd", [False, True])
def test_any_schema_is_read_as_pyarrow_does_or_left_to_it(tmp_path, odd):
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, path, read = random.Random(7), tmp_path / "a.parquet", 0
    for _ in range(150):
        fields = [pa.field(f"c{i}", random_type(draw, 3, odd), nullable=draw.random() < 0.8) for i in range(draw.randint(1, 3))]
        schema = pa.schema(fields, metadata={"huggingface": "x" * draw.randint(0, 300)})
        layout = {"store_schema": draw.random() < 0.7, "version": draw.choice(["1.0", "2.6"]),
                  "use_compliant_nested_type": draw.random() < 0.8}
        try:
            pq.write_table(schema.empty_table(), path, **layout)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            continue  # parquet has no such type
        try:
            found = read_plain(str(path))
        except NotPlain:
            assert odd or not layout["use_compliant_nested_type"], schema
            continue
        read += 1
        assert found == by_pyarrow(path), schema
    assert read > (40 if odd else 100)


def test_damaged_footers_are_left_to_pyarrow(tmp_path):
    path, draw = write_chats(tmp_path / "a.parquet", 20), random.Random(3)
    whole = path.read_bytes()
    size = int.from_bytes(whole[-8:-4], "little")
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(whole) - size - 8, len(whole))] = draw.randrange(256)
        path.write_bytes(damaged[: draw.randrange(len(whole))] if draw.random() < 0.1 else damaged)
        try:
            read_plain(str(path))
        except NotPlain:
            pass  # and nothing else
    for text in (b"", b"PAR1", b"PAR1PAR1", b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(text)
        assert read_footer(str(path)).error.startswith("not readable as parquet")
    assert read_footer(str(tmp_path)).error.startswith("is a folder") and read_footer("none").error == "no such file"
