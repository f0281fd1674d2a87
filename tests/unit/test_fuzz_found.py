"""What fuzzing found, each by its least example: once a traceback, a hang or no JSON; now a problem with its exit code."""

from __future__ import annotations

import json
import time

import fuzz_for_tests as fuzz
import pytest
from inputs_for_tests import TINY_QWEN2, write_chats, write_checkpoint, write_model

from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID, OK


def told(args, code: int, *words: str) -> dict:
    """The JSON of a command that must end with this code and say these words."""
    outcome = fuzz.call([*map(str, args), "--json"])
    assert (outcome.fault, outcome.code) == ("", code), outcome.err.decode()
    text = outcome.out.decode() + outcome.err.decode()
    assert all(word in text for word in words), text
    return outcome.data


def run(tmp_path, *more) -> list:
    if not (tmp_path / "model").exists():
        write_model(tmp_path / "model")
    write_chats(tmp_path / "chats.parquet", 16)
    return ["sft", "--dry-run", f"model.path={tmp_path / 'model'}", f"data.train_files=[{tmp_path / 'chats.parquet'}]", "engine.device=cpu",
            f"trainer.output_dir={tmp_path / 'run'}", *more]


LAUGHS = "\n".join(["l0: &l0 [x, x, x, x, x, x, x, x, x, x]", *(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9))])
CHAIN = "\n".join(["l0: &l0 [x]", *(f"l{i}: &l{i} [*l{i - 1}]" for i in range(1, 2000))])


@pytest.mark.parametrize("text, why", [
    (LAUGHS, "100,000 values"),
    (CHAIN, "nests more than 50 deep"),
    ("engine: {override_transformer_config: &m {a: *m}}", "endless"),
    ("data: {train_files: &d [*d]}", "endless"),
    ("[" * 20_000, "nests more than 50 deep"),
    ("engine: {override_transformer_config: {a: [{? [b] : 1}]}}", "a key must be text"),
], ids=["aliases that multiply", "a chain of aliases", "a mapping in itself", "a list in itself", "brackets", "a list as key"])
def test_yaml(tmp_path, text, why):
    file = fuzz.write(tmp_path / "run.yaml", text.encode())
    told(["sft", "--dry-run", "--config", file], CONFIG_INVALID, why)


def test_aliases_that_settings_may_have(tmp_path):
    file = fuzz.write(tmp_path / "run.yaml", b"optim: {lr: &lr 2e-5, min_lr: *lr}\ndata: {val_files: &f [a, b], train_files: *f}\n")
    data = told(["config", "show", "--only-changed", "--config", file], OK)
    assert {row["key"]: row["value"] for row in data["settings"]} == {
        "optim.lr": 2e-5, "optim.min_lr": 2e-5, "data.val_files": ["a", "b"], "data.train_files": ["a", "b"]}


@pytest.mark.parametrize("setting, why", [
    ("trainer.seed=" + "9" * 5000, "expected an integer"),
    (f"data.train_batch_size={2**63}", "beyond the greatest integer, 9223372036854775807"),
    ("trainer.nnodes=100000000", "above the greatest value, 4096 nodes"),
    ("trainer.n_gpus_per_node=1000000", "above the greatest value, 1024 ranks"),
])
def test_numbers_beyond_all_use(tmp_path, setting, why):
    told(run(tmp_path, setting), CONFIG_INVALID, why)


def test_the_largest_batch_is_judged_in_time(tmp_path):
    start = time.process_time()
    told(run(tmp_path, f"data.train_batch_size={2**63 - 1}", "data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2"),
         CONFIG_INVALID, "batch-divides")
    assert time.process_time() - start < 2


def test_a_home_of_nobody(tmp_path):
    told(run(tmp_path, "model.path=~nobody-of-this-name/model"), BAD_INPUT, "there is no folder ~nobody-of-this-name/model")
    told(["prep-data", "messages", "-i", "~nobody-of-this-name", "-o", tmp_path / "out"], BAD_INPUT, "no such file or folder")


@pytest.mark.parametrize("name, data, why", [
    ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', "not a weight index"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": ["model.safetensors"]}}', "not a weight index"),
    ("model.safetensors.index.json", b'{"weight_map": {"a":' + b"[" * 100_000, "not a weight index"),
    ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "damaged safetensors header"),
    ("model.safetensors", (7).to_bytes(8, "little") + b'{"a":1}', "damaged safetensors header"),
    ("config.json", b'{"a":' * 100_000, "not readable as JSON"),
    ("config.json", json.dumps(TINY_QWEN2 | {"architectures": [1]}).encode(), "architecture"),
    ("config.json", json.dumps(TINY_QWEN2 | {"vocab_size": 10**400}).encode(), "a positive integer below 2^31"),
])
def test_model_folders(tmp_path, name, data, why):
    write_model(tmp_path / "model")
    fuzz.write(tmp_path / "model" / name, data)
    told(run(tmp_path), BAD_INPUT, why)


@pytest.mark.parametrize("name, data, why", [
    ("config.json", b"\xff", "this file cannot be read"),
    ("model.safetensors.index.json", b'{"weight_map": []}', "must map names of tensors to names of files"),
    ("model.safetensors", (57).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":["x"],"data_offsets":[0, 4]}} ', "header is damaged"),
])
def test_model_folders_inspected(tmp_path, name, data, why):
    write_model(tmp_path / "model")
    fuzz.write(tmp_path / "model" / name, data)
    told(["ckpt", "inspect", tmp_path / "model"], BAD_INPUT, why)


@pytest.mark.parametrize("change, why", [
    ({"files": []}, "files"), ({"files": {"a": 1}}, "files"), ({"files": {"a": {"bytes": "1", "crc32": ""}}}, "lacks bytes or crc32"),
    ({"step": "2"}, "step"), ({"contents": {}}, "contents"), ({"topology": {"tp": None}}, "topology"),
    ({"padded_vocab_size": -1}, "padded_vocab_size"),
    ({"total_steps": 10**400}, "total_steps"), ({"versions": 1, "created": None}, "versions, created"),
], ids=str)
def test_manifests(tmp_path, change, why):
    manifest = write_checkpoint(tmp_path / "run", 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    told(["ckpt", "inspect", manifest.parent], BAD_INPUT, why)
    told(run(tmp_path), BAD_INPUT, "step_000002")
    manifest.write_text("[" * 100_000)
    told(run(tmp_path), BAD_INPUT, "step_000002")


def test_a_column_name_that_is_no_text(tmp_path):
    call = run(tmp_path)
    file = tmp_path / "chats.parquet"
    file.write_bytes(file.read_bytes().replace(b"messages", b"messag\xff\xfe"))
    told(call, BAD_INPUT, "not readable as parquet")


def test_rows_nested_without_end(tmp_path):
    for name in ("rows.json", "rows.jsonl"):
        file = fuzz.write(tmp_path / name, b"[" * 100_000)
        told(["prep-data", "messages", "-i", file, "-o", tmp_path / "out"], BAD_INPUT, "is not JSON")


def test_a_negative_number_of_rows(tmp_path):
    call = run(tmp_path)
    file = tmp_path / "chats.parquet"
    data = file.read_bytes()
    at = data.rindex(b"\x16\x20\x19")  # num_rows = 16, a zigzag varint, and the list of row groups behind it
    file.write_bytes(data[:at] + b"\x16\x1f\x19" + data[at + 3:])
    told(call, BAD_INPUT, "not readable as parquet: it tells of -16 rows")


def test_a_number_that_fills_the_footer(tmp_path):
    call = run(tmp_path)
    footer = b"\x15" + b"\xff" * 130_000
    (tmp_path / "chats.parquet").write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    start = time.process_time()
    told(call, BAD_INPUT, "not readable as parquet")
    assert time.process_time() - start < 1


def test_samples_with_nulls_or_other_types(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"step": 1, "row": 0, "group": 0, "index": 0, "prompt": "1?", "response": "1", "reward": 1.0, "status": "right", "parsed": None,
           "ground_truth": "1", "advantage": 0.0, "num_tokens": 1, "is_truncated": False}
    (tmp_path / "samples").mkdir()
    for change, code, why in (({}, OK, "right"), ({"prompt": None}, BAD_INPUT, "columns have nulls: prompt"),
                              ({"reward": "much"}, BAD_INPUT, "another type than is written")):
        pq.write_table(pa.Table.from_pylist([row | change]), tmp_path / "samples" / "step_000001.parquet")
        told(["samples", tmp_path], code, why)
