"""The arrows between the parts, and the weight of the front end. Both by looking at what is really imported."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from inputs_for_tests import write_chats, write_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mfsdp_cli"
HEAVY = ("torch", "transformers", "ray", "vllm", "megatron", "pydantic")
SLOW = ("rich", "yaml", "pyarrow", "numpy")  # allowed in the front end, but only inside functions

# Who may import whom, by the longest matching prefix. The records of BASE are open to all.
FRONT = {"__main__", "children", "cli", "cli_ckpt", "cli_config", "cli_train", "errors", "lazy", "options", "output", "records", "samples",
         "types"}
BASE = {"__version__", "children", "errors", "records", "types", "config.schema", "config.schema_grpo"}
ALLOWED = {
    "__main__": {"cli"},
    "cli": {"cli_ckpt", "cli_config", "cli_train", "lazy", "options", "output", "launch", "data.prepare"},
    "cli_ckpt": {"options", "output", "launch", "checkpoint.inspect", "checkpoint.listing", "checkpoint.diff"},
    "lazy": {"options"},
    "cli_config": {"options", "output", "config"},
    "cli_train": {"options", "output", "launch", "samples"},
    "samples": {"output"},
    "options": {"config"},
    "output": set(),
    "children": set(),
    "errors": set(),
    "records": set(),
    "types": set(),
    "config": {"config", "rewards.base", "rewards.gsm8k", "rewards.numbers"},
    "config.from_verl": {"config", "launch.facts"},  # the facts of no machine, for the rules that need none
    "launch": {"launch", "config", "output", "checkpoint.manifest", "checkpoint.finding", "checkpoint.export_source", "checkpoint.export_target",
               "checkpoint.shard_files", "checkpoint.inspect", "checkpoint.diff", "checkpoint.dcp_metadata", "checkpoint.reuse", "rewards.custom"},
    "data": {"data"},
    "data.convert": {"data", "rewards.latex"},  # one reading of a box, in golds and in responses
    "engine": {"engine"},
    "rollout": {"rollout"},
    "rewards": {"rewards"},
    "checkpoint": {"checkpoint"},
    **{f"checkpoint.{name}": {"checkpoint", "output"} for name in ("inspect", "listing", "diff", "diff_values")},
    "checkpoint.dtensor": {"checkpoint", "engine"},
    "checkpoint.export_progress": {"output"},
    "checkpoint.export_proof": {"checkpoint", "engine"},
    "checkpoint.stored_weights": {"checkpoint", "engine"},
    "checkpoint.export_hf": {"checkpoint", "engine", "output"},  # a program of its own, which tells problems as the others do
    # of launch: arithmetic, readings of the host, and the contract of the launcher
    "train": {"train", "engine", "rollout", "rewards", "data", "checkpoint", "config", "launch.host", "launch.locks", "launch.plan", "launch.run"},
}
# Parts of a package that are front end although the rest of it is not.
FRONT_MODULES = ("config", "launch", "data.prepare", "data.sources", "data.convert", "checkpoint.manifest", "checkpoint.finding",
                 "checkpoint.saving", "checkpoint.retention", "checkpoint.listing", "checkpoint.words", "checkpoint.diff", "checkpoint.inspect",
                 "checkpoint.dcp_metadata", "checkpoint.dcp_pickle", "checkpoint.hf_folder", "checkpoint.layouts",
                 "checkpoint.export_source", "checkpoint.export_target", "checkpoint.reuse", "rewards.custom", "rewards.base",
                 "rewards.gsm8k", "rewards.numbers", "rewards.latex")


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def only_for_types(tree):
    """Ids of the nodes below `if TYPE_CHECKING:`, which are never executed."""
    guarded = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {id(inner) for node in guarded for statement in node.body for inner in ast.walk(statement)}


def imported_names(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def all_imports():
    """(module, imported dotted name, whether at module level) of every import that is executed."""
    for name, tree in modules():
        skip = only_for_types(tree)
        inside = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
        for node in ast.walk(tree):
            if id(node) not in skip:
                for target in imported_names(node):
                    yield name, target, id(node) not in inside


def under(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def rule_of(module):
    keys = [key for key in ALLOWED if under(module, [key])]
    return ALLOWED[max(keys, key=len)] if keys else None


def test_no_arrow_points_upward():
    wrong = []
    for module, target, _ in all_imports():
        if module and under(target, ["mfsdp_cli"]):
            assert rule_of(module) is not None, f"{module} has no place in the design"
            inner = target.removeprefix("mfsdp_cli").lstrip(".")
            if not under(inner, BASE | rule_of(module)):
                wrong.append(f"{module} -> {inner}")
    assert wrong == []


def test_the_walk_sees_an_upward_arrow():
    assert ("launch.run", "mfsdp_cli.launch.outcome.conclude", True) in set(all_imports())
    assert not under("train.sft", ALLOWED["config"]) and not under("engine.megatron", ALLOWED["launch"])


def test_front_end_modules_import_nothing_heavy_and_slow_things_late():
    wrong = [f"{module}: {target}" for module, target, at_module_level in all_imports()
             if (module in FRONT or under(module, FRONT_MODULES)) and (under(target, HEAVY) or (at_module_level and under(target, SLOW)))]
    assert wrong == []


PROGRAM = """
import os, sys
from mfsdp_cli import cli
sys.argv[0] = "mfsdp"
try:
    cli.main()
except SystemExit as end:
    code = end.code
loaded = sorted(m for m in sys.modules if "." not in m or m.startswith("mfsdp_cli"))
import json
os.write(3, json.dumps([code, loaded]).encode())
"""


def run_and_list(args, cwd):
    """Exit code of `mfsdp args`, and the top-level modules and modules of ours that it had loaded at its end."""
    reader, writer = os.pipe()
    program = PROGRAM.replace("os.write(3", f"os.write({writer}")
    subprocess.run([sys.executable, "-c", program, *args], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                   pass_fds=[writer], timeout=60)
    os.close(writer)
    with os.fdopen(reader) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("args, code", [
    (["--help"], 0), (["--version"], 0), (["sft", "--help"], 0), (["stf"], 2), (["sft", "--modle", "x"], 2),
])
def test_help_and_usage_errors_load_nothing_heavy_or_slow(tmp_path, args, code):
    ended, loaded = run_and_list(args, tmp_path)
    assert ended == code and not set(loaded) & {*HEAVY, *SLOW, "json", "tempfile"}
    ours = {name.removeprefix("mfsdp_cli.") for name in loaded if name.startswith("mfsdp_cli.")}
    assert ours == {"cli", "cli_ckpt", "cli_config", "cli_train", "errors", "lazy", "options", "output", "records"}


@pytest.mark.parametrize("args, code", [
    (["sft", "--model", "model", "--train-files", "train.parquet", "--tp", "3", "optim.lr=fast", "--dry-run"], 3),
    (["sft", "--model", "model", "--train-files", "none.parquet", "optim.lr=fast"], 3),
    (["sft", "--model", "model", "--train-files", "train.parquet", "engine.device=cpu", "--dry-run"], 0),
    (["grpo", "--model", "model", "--train-files", "train.parquet", "rollout.n=1", "--dry-run"], 3),
])
def test_a_check_loads_nothing_slow_either(tmp_path, args, code):
    """Parquet footers are read without pyarrow, package versions without importlib.metadata; only a YAML file needs yaml."""
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.parquet", 9)
    ended, loaded = run_and_list(args, tmp_path)
    late = {"email", "ssl", "tempfile", "mfsdp_cli.launch.run", "mfsdp_cli.launch.outcome"}
    assert ended == code and not set(loaded) & {*HEAVY, *SLOW, *late}


@pytest.mark.parametrize("args, code", [
    (["sft", "--model", "model", "--train-files", "train.parquet", "engine.device=cpu", "--dry-run"], 0),
    (["sft", "--model", "model", "--train-files", "none.parquet", "optim.lr=x"], 3),
    (["config", "show", "--preset", "sft-tiny-cpu"], 0),
    (["prep-data", "arithmetic", "-o", "d", "--rows", "3", "--test-rows", "1"], 0),
    (["ckpt", "inspect", "model", "--tensors", "norm"], 0),
    (["ckpt", "list", "none"], 5),
    (["ckpt", "diff", "model", "model"], 0),
    (["ckpt", "inspect", "none"], 5),
    (["doctor"], 0),
])
def test_the_front_end_loads_nothing_heavy(tmp_path, args, code):
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.parquet", 9)
    ended, loaded = run_and_list(args, tmp_path)
    assert ended == code and not set(loaded) & set(HEAVY)
