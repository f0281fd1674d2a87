import ast
import json
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from mfsdp_cli.config import show
from mfsdp_cli.config.json_schema import json_schema
from mfsdp_cli.config.load import dump_yaml, load
from mfsdp_cli.config.sources import preset_files
from mfsdp_cli.config.values import SETTINGS, coerce, kind_of, leaf_of, leaves, other_kind
from mfsdp_cli.errors import MfsdpError

PACKAGE = Path(__file__).parents[2] / "mfsdp_cli"
# These declare, rename, convert or print settings, so a mention there is no use.
NOT_READERS = {"schema.py", "schema_grpo.py", "aliases.py", "aliases_grpo.py", "show.py", "load.py", "sources.py", "values.py",
               "from_verl.py", "conversion.py", "verl_defaults.py", "json_schema.py"}
ALL = {(kind, leaf.key): leaf for kind in SETTINGS for leaf in leaves(kind).values()}


SECTIONS = {key.partition(".")[0] for _, key in ALL}
# Names that hold a section where they are a parameter's type: "EngineSettings" -> {"engine"}.
CLASSES: dict[str, set[str]] = {}
for section in (f for settings in SETTINGS.values() for f in fields(settings)):
    CLASSES.setdefault(section.type, set()).add(section.name)


@cache
def settings_read() -> set[str]:
    """Keys that the package reads: SECTION.NAME at the end of any expression, or NAME of a variable that holds a section."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if file.name not in NOT_READERS:
            found |= read_in(ast.parse(file.read_text(encoding="utf-8")))
    return found


def read_in(tree) -> set[str]:
    holders, found = held(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = last_name(node.value)
            sections = {owner} if isinstance(node.value, ast.Attribute) and owner in SECTIONS else set()
            found |= {f"{section}.{node.attr}" for section in sections | holders.get(owner, set())}
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # getattr(s.engine, name) in a loop over names that the function spells out
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and last_name(call.func) == "getattr"]
            by_name = {last_name(call.args[0]) for call in calls}
            texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            found |= {f"{section}.{text}" for section in by_name & SECTIONS for text in texts}
    return found


def held(tree) -> dict[str, set[str]]:
    """Variables and parameters of a file that hold a section."""
    holders: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            for name, sections in CLASSES.items():
                if name in ast.unparse(node.annotation):
                    holders.setdefault(node.arg, set()).update(sections)
        for target in node.targets if isinstance(node, ast.Assign) else ():
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for name, value in zip(target.elts, node.value.elts, strict=True) if several else ((target, node.value),):
                if isinstance(value, ast.Attribute) and value.attr in SECTIONS:
                    holders.setdefault(last_name(name), set()).add(value.attr)
    return holders


def last_name(node) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_every_setting_has_one_line_of_documentation():
    for leaf in ALL.values():
        assert 10 < len(leaf.doc) < 140 and "\n" not in leaf.doc and not leaf.doc.endswith("."), leaf.key


def test_every_default_is_legal():
    for leaf in ALL.values():
        if leaf.kind != "dict":
            assert coerce(leaf.default, leaf) == leaf.default, leaf.key


def test_every_type_is_one_that_can_be_read():
    assert {leaf.kind for leaf in ALL.values()} == {"str", "int", "float", "bool", "dict", "list[str]", "list[float]"}


# One legal value each: the schema itself is the check, and what is always so needs no reading.
SINGLE_CHOICE = {leaf.key for leaf in ALL.values() if len(leaf.choices) == 1}


@pytest.mark.parametrize("key", list(dict.fromkeys(key for _, key in ALL)))
def test_every_setting_is_read_somewhere(key):
    assert key in SINGLE_CHOICE or key in settings_read(), f"{key} is in the schema, and nothing reads it"


def test_the_search_for_readers_knows_a_reader_from_a_namesake():
    read = lambda text: read_in(ast.parse(text))
    assert read("a = s.settings.optim.lr") == {"optim.lr"}
    assert read("t, o = s.trainer, s.optim\nprint(o.eps, t.seed)") == {"optim.eps", "trainer.seed"}
    assert read("def f(e: EngineSettings):\n return e.dtype") == {"engine.dtype"}
    assert read("def f(s):\n for n in ('a',):\n  getattr(s.engine, n)") == {"engine.a"}
    assert read("group.lr, lr, optim.lr, self.lr") == set(), "another object with a field of that name reads no setting"


def test_leaf_of():
    for kind in SETTINGS:
        assert leaf_of("optim.lr", kind).kind == "float"
        assert leaf_of("engine.override_transformer_config.a.b", kind).key == "engine.override_transformer_config"
        assert leaf_of("optim.lr.x", kind) is None and leaf_of("optim", kind) is None and leaf_of("", kind) is None
        assert kind_of(SETTINGS[kind]()) == kind == other_kind(other_kind(kind))
    assert leaf_of("rollout.n", "grpo").default == 8 and leaf_of("rollout.n", "sft") is None
    assert (leaf_of("optim.lr", "sft").default, leaf_of("optim.lr", "grpo").default) == (1e-5, 1e-6), "a section may have defaults of its own"


def test_schema_is_json_with_all_that_one_needs():
    for kind in SETTINGS:
        assert [row["key"] for row in json.loads(json.dumps(show.schema(kind)))] == list(leaves(kind))
    rows = {row["key"]: row for row in show.schema("sft")}
    assert rows["optim.lr_warmup_steps_ratio"] == {
        "key": "optim.lr_warmup_steps_ratio", "type": "float", "default": 0.2, "unit": "", "choices": [], "low": 0.0, "high": 1.0,
        "doc": "share of all steps spent warming up",
    }
    assert rows["data.max_length"]["type"] == "int | None" and rows["data.max_length"]["unit"] == "tokens"
    assert rows["engine.dtype"]["choices"] == ["bfloat16", "float32"]


def test_resolved_tells_value_origin_and_change():
    loaded = load("sft", assignments=["optim.lr=1e-5", "data.shuffle=False", "checkpoint.mbridge_config.memory_efficient=True"],
        environ={"TP": "2"})
    rows = {row["key"]: row for row in show.resolved(loaded.settings, loaded.origins)}
    assert rows["optim.lr"] == {"key": "optim.lr", "value": 1e-5, "origin": "command line", "changed": False}
    assert rows["data.shuffle"] == {"key": "data.shuffle", "value": False, "origin": "command line", "changed": True}
    assert rows["engine.tensor_model_parallel_size"]["origin"] == "$TP"
    assert rows["checkpoint.mbridge_config"]["origin"] == "command line"
    assert rows["optim.eps"] == {"key": "optim.eps", "value": 1e-8, "origin": "default", "changed": False}


def test_compare_tells_values_and_origins_of_presets_files_and_runs(tmp_path):
    (tmp_path / "a.yaml").write_text("data:\n  val_files: [x]\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(load("sft", assignments=["optim.lr=3"], environ={}).settings))
    (run / "origin.json").write_text('{"optim.lr": "--lr"}')
    a, b = str(tmp_path / "a.yaml"), str(run)
    kind, rows = show.compare(a, b)
    assert kind == "sft" and rows == [
        {"key": "data.val_files", "a": ["x"], "b": [], "origin_a": f"{a}:2", "origin_b": "default"},
        {"key": "optim.lr", "a": 1e-5, "b": 3.0, "origin_a": "default", "origin_b": "--lr"},
    ]
    assert show.compare(b, b) == ("sft", [])
    rows = show.compare("sft-tiny-cpu", a)[1]
    assert {"key": "engine.device", "a": "cpu", "b": "auto", "origin_a": "preset sft-tiny-cpu", "origin_b": "default"} in rows
    (run / "origin.json").write_text("[]")
    assert show.compare(a, b)[1][1]["origin_b"].startswith(str(run / "config.yaml")), "a damaged origin.json is not needed"


def test_compare_names_what_is_not_there(tmp_path):
    with pytest.raises(MfsdpError) as caught:
        show.compare("grpo-tiny-cpuu", str(tmp_path))
    first, second = caught.value.problems
    assert (first.why, first.fix) == ("no such preset, file or run folder", "did you mean grpo-tiny-cpu?")
    assert second.why == "a folder without config.yaml is no run folder"


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_json_schema_takes_what_the_program_takes(kind, tmp_path):
    jsonschema = pytest.importorskip("jsonschema", reason="the package jsonschema comes with ray")
    import yaml

    schema = json.loads(json.dumps(json_schema(kind)))
    jsonschema.Draft202012Validator.check_schema(schema)
    judge = jsonschema.Draft202012Validator(schema)
    for name, path in preset_files().items():
        if name.startswith(kind):
            assert list(judge.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))) == []
    assert list(judge.iter_errors(yaml.safe_load(dump_yaml(SETTINGS[kind]())))) == []
    wrong = ({"optim": {"lrr": 1}}, {"optim": {"lr": "fast"}}, {"optim": {"lr": -1}}, {"data": {"truncation": "rigth"}}, {"dat": {}},
             {"trainer": {"logger": ["swanlab"]}}, {"trainer": {"startup_timeout_s": "soon"}}, {"data": {"train_batch_size": None}})
    for data in wrong:
        assert list(judge.iter_errors(data)), data
    right = ({"trainer": {"startup_timeout_s": "1h30m"}}, {"trainer": {"startup_timeout_s": 90}}, {"trainer": {"max_ckpt_to_keep": None}})
    for data in right:
        assert list(judge.iter_errors(data)) == [], data
    assert schema["properties"]["optim"]["properties"]["lr_warmup_steps_ratio"] == {
        "description": "share of all steps spent warming up", "type": "number",
        "default": leaves(kind)["optim.lr_warmup_steps_ratio"].default,
        "minimum": 0.0, "maximum": 1.0}
