import pytest
from facts_for_tests import CHAT, VERSIONS, make_facts, only, passes, problems

from mfsdp_cli.config.rules_files import chat_type_problem
from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID, MACHINE_UNFIT
from mfsdp_cli.launch.facts import ParquetFacts


def test_gpus():
    assert passes(trainer__n_gpus_per_node=8)
    problem = only(make_facts(num_gpus=4))
    assert problem.code == MACHINE_UNFIT and "8 ranks need a GPU each, and there are 4" in problem.why
    assert "CUDA_VISIBLE_DEVICES=0,1" in only(make_facts(num_gpus=2, environ={"CUDA_VISIBLE_DEVICES": "0,1"})).why
    problem = only(make_facts(num_gpus=0), engine__device="cuda")
    assert problem.key == "engine.device" and problem.code == MACHINE_UNFIT
    assert passes(make_facts(num_gpus=0), engine__device="cpu", engine__dtype="float32")
    assert passes(make_facts(num_gpus=0), engine__dtype="float32"), "auto without GPUs is cpu"


def test_cpu():
    cpu = {"engine__device": "cpu", "engine__dtype": "float32", "engine__tensor_model_parallel_size": 1}
    assert passes(make_facts(num_cpus=2), trainer__n_gpus_per_node=8, **cpu)
    assert only(make_facts(num_cpus=2), level="warning", trainer__n_gpus_per_node=9, data__train_batch_size=9,
        **cpu).key == "trainer.n_gpus_per_node"
    assert only(level="note", **(cpu | {"engine__dtype": "bfloat16"})).key == "engine.dtype"


@pytest.mark.parametrize("name, version, level", [
    ("torch", None, "error"), ("torch", "2.10.0", "warning"), ("torch", "2.11.0+cu130", None), ("megatron-core", None, "error"),
    ("megatron-core", "0.20.0rc1", "warning"), ("megatron-bridge", "0.6.1", "warning"), ("transformers", "5.8.0", None),
    ("transformers", "5.7.9", "warning"), ("transformers", "5.12.1", None), ("transformers", "5.12.2", "warning"),
    ("transformers", None, "error"),
])
def test_packages(name, version, level):
    facts = make_facts(versions=VERSIONS | {name: version})
    if level is None:
        assert passes(facts)
        return
    problem = only(facts, level=level)
    assert problem.key == name and problem.found == (version or "not installed") and problem.code in (MACHINE_UNFIT, CONFIG_INVALID)
    assert level == "warning" or problem.code == MACHINE_UNFIT


def test_tensorboard():
    assert passes(trainer__logger=["tensorboard"])
    assert only(make_facts(versions=VERSIONS | {"tensorboard": None}), trainer__logger=["tensorboard"]).code == MACHINE_UNFIT


def test_wandb(tmp_path):
    wandb, logger = VERSIONS | {"wandb": "0.22.0"}, {"trainer__logger": ["console", "wandb"]}
    assert "not installed" in only(**logger).why
    home = {"HOME": str(tmp_path)}
    assert "WANDB_API_KEY" in only(make_facts(versions=wandb, environ=home), **logger).why
    for environ in ({"WANDB_API_KEY": "k"}, {"WANDB_MODE": "offline"}, {"WANDB_MODE": "disabled"}):
        assert passes(make_facts(versions=wandb, environ=home | environ), **logger)
    assert problems(make_facts(versions=wandb, environ=home | {"WANDB_MODE": "online"}), **logger)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert passes(make_facts(versions=wandb, environ=home), **logger)
    assert problems(make_facts(versions=wandb, environ=home | {"WANDB_BASE_URL": "https://wandb.example.org:8080"}), **logger)


def test_model_folder():
    problem = only(make_facts(model_path=None, model_config=None, model_error="there is no folder x"))
    assert (problem.key, problem.why, problem.code) == ("model.path", "there is no folder x", BAD_INPUT)
    assert "no tokenizer" in only(make_facts(has_tokenizer=False)).why
    assert "no weight files" in only(make_facts(model_weight_files=())).why
    assert "safetensors only" in only(make_facts(model_weight_files=("pytorch_model.bin",))).why


def one_file(**changes):
    return {"val.parquet": ParquetFacts("val.parquet", 10, {"messages": CHAT}),
            "train.parquet": ParquetFacts(**({"path": "train.parquet", "num_rows": 100, "columns": {"messages": CHAT}} | changes))}


@pytest.mark.parametrize("changes, why", [
    ({"error": "no such file", "num_rows": 0, "columns": {}}, "no such file"),
    ({"columns": {"prompt": "string"}}, "there is no column messages; columns: prompt"),
    ({"columns": {"messages": "string"}}, "not a list of structs (JSON as text?)"),
])
def test_data_files(changes, why):
    problem = only(make_facts(parquet=one_file(**changes)))
    assert problem.key == "data.train_files" and problem.found == "train.parquet" and why in problem.why and problem.code == BAD_INPUT


def test_an_empty_file():
    found = problems(make_facts(parquet=one_file(num_rows=0)))
    assert [p.key for p in found] == ["data.train_batch_size", "data.train_files"] and found[1].code == BAD_INPUT


def test_another_column_name():
    assert passes(make_facts(parquet={n: ParquetFacts(n, 100, {"chat": CHAT}) for n in ("train.parquet", "val.parquet")}),
        data__messages_key="chat")
    problem = only(make_facts(parquet=one_file(columns={"message": CHAT})))
    assert problem.fix == "data.messages_key=message"


def test_validation_files_are_judged_too():
    parquet = one_file() | {"val.parquet": ParquetFacts("val.parquet", 0, {}, "no such file")}
    assert only(make_facts(parquet=parquet)).key == "data.val_files"
    assert only(level="warning", data__val_files=["train.parquet"]).key == "data.val_files"


def test_tools_are_not_dropped_in_silence():
    assert "tools" in only(make_facts(parquet=one_file(columns={"messages": CHAT, "tools": "string"})), level="warning").why


def test_files_of_one_data_set_have_one_type():
    kinds = {"a": CHAT, "b": "large_list<item: struct<role: large_string, content: string> not null>",
             "c": "list<element: struct<role: string, content: string, name: string>>"}
    parquet = {n: ParquetFacts(n, 100, {"messages": k, "row_" + n: "int64"}) for n, k in kinds.items()}
    assert passes(make_facts(parquet=parquet), data__train_files=["a", "b"], data__val_files=[])
    problem = only(make_facts(parquet=parquet), data__train_files=["a", "b", "c"], data__val_files=[])
    assert problem.found == "c" and "name: string" in problem.why and "in a" in problem.why


@pytest.mark.parametrize("kind, why", [
    (CHAT, ""),
    ("list<item: struct<content: string, role: string>>", ""),
    ("large_list<element: struct<role: large_string not null, content: string not null> not null>", ""),
    ("list<element: struct<role: string, content: string, tool_calls: list<element: struct<a: int64, b: string>>>>", ""),
    ("list<element: struct<role: string>>", "no field content"),
    ("list<element: struct<from: string, value: string>>", "no field role"),
    ("list<element: struct<role: string, content: list<element: struct<type: string, text: string>>>>", "its field content is list"),
    ("list<element: string>", "not a list of structs"),
    ("struct<role: string, content: string>", "not a list of structs"),
    ("string", "JSON as text?"),
    ("int64", "not a list of structs"),
])
def test_chat_types(kind, why):
    found = chat_type_problem(kind)
    assert found == "" if why == "" else why in found


def test_chat_types_are_pyarrows_words(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mfsdp_cli.launch.facts import read_footer

    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "x"}]], "text": ["x"]}), path)
    columns = read_footer(str(path)).columns
    assert chat_type_problem(columns["messages"]) == "" and chat_type_problem(columns["text"]) != ""
