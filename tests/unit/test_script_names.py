"""Every name that a script, or a test which needs a GPU, takes of this project's modules, or patches in one, is there.

Read, not run: most of these programs need a GPU, and would only be found broken on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIBLINGS = [ROOT / "scripts", ROOT / "tests" / "gpu", ROOT / "tests" / "cpu", ROOT / "tests" / "unit"]  # on sys.path together
PROGRAMS = sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "tests" / "gpu").glob("*.py")])


def source_of(module: str) -> Path | None:
    """The file, or the folder of a package, of one of this project's modules."""
    parts = module.split(".")
    for folder in [ROOT] if parts[0] == "mfsdp_cli" else SIBLINGS:
        path = folder.joinpath(*parts)
        if (file := path.with_suffix(".py")).exists():
            return file
        if path.is_dir():
            return path
    return None


@cache
def names_in(module: str) -> frozenset[str]:
    """What a module binds at its top level, `if` and `try` included; of a package, its modules too."""
    path = source_of(module)
    found = {p.stem for p in path.iterdir()} if path.is_dir() else set()
    file = path / "__init__.py" if path.is_dir() else path
    waiting = list(ast.parse(file.read_text()).body) if file.exists() else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return frozenset(found)


def wanted(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, module, name): imports, attributes of modules, and a module followed by the name of what is patched in it."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and source_of(node.module):
            for alias in node.names:
                yield node.lineno, node.module, alias.name
                if source_of(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            modules |= {a.asname or a.name: a.name for a in node.names if source_of(a.name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))):
            yield node.lineno, module, node.attr
        values = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        for one, other in zip(values, values[1:]):
            if isinstance(other, ast.Constant) and isinstance(other.value, str) and (module := modules.get(ast.unparse(one))):
                yield node.lineno, module, other.value


def missing(tree: ast.Module) -> list[str]:
    return [f"line {line}: {module} has no {name}" for line, module, name in wanted(tree) if name not in names_in(module)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_every_name_is_there(program):
    assert missing(ast.parse(program.read_text())) == []


def test_what_is_missing_is_found():
    text = """
from mfsdp_cli.checkpoint import dtensor, nothing
from mfsdp_cli.types import Sample, Samples
import bench_common
parts = {"a": (dtensor, "_state"), "b": (dtensor, "collect"), "c": (dtensor.dcp, "save")}
setattr(bench_common, "timing", dtensor.stores(bench_common.timed))
"""
    assert sorted(missing(ast.parse(text))) == [
        "line 2: mfsdp_cli.checkpoint has no nothing", "line 3: mfsdp_cli.types has no Samples",
        "line 5: mfsdp_cli.checkpoint.dtensor has no _state", "line 6: bench_common has no timing",
        "line 6: mfsdp_cli.checkpoint.dtensor has no stores"]
