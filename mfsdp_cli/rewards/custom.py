"""A user's own reward function: FILE.py:FUNCTION, as verl calls it.

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> number | {"score": number, …}

It is called with keywords, so the order of its parameters does not matter. It is looked at before a launch (`check`): first
its source, then by importing and calling it once, in a child process, since it may import anything or hang.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from mfsdp_cli.children import run_child
from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID, Problem
from mfsdp_cli.rewards.base import RewardResult, Scorer, fresh_environment

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
SIGNATURE = "FUNCTION(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"
EXAMPLE_ROW = ("openai/gsm8k", "40 + 2 = 42\n#### 42", "42", {"split": "train", "index": 0})


def split_spec(spec: str) -> tuple[Path, str]:
    """("file.py", "function") of "file.py:function". Raises ValueError when it is not of that form."""
    file, colon, function = spec.rpartition(":")
    if not (colon and file and function.isidentifier()):
        raise ValueError(f"{spec!r} is not FILE.py:FUNCTION")
    return Path(os.path.expanduser(file)), function


def load(spec: str) -> Scorer:
    """The scorer that calls the user's function; its folder is importable. Whatever the file raises while it is imported is raised."""
    path, name = split_spec(spec)
    sys.path.append(str(path.resolve().parent))
    module_spec = importlib.util.spec_from_file_location(f"mfsdp_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look their module up by name
    module_spec.loader.exec_module(module)
    function = getattr(module, name)
    if complaint := complaint_about(function):
        raise TypeError(f"{spec}: {complaint}")

    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> RewardResult:
        return as_result(function(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info))

    return score


def as_result(returned: object) -> RewardResult:
    """What a user's function returned, as a result: a number, a dict with "score" (and perhaps "pred", "acc"), or a RewardResult.

    "right" means "acc" is true when there is one, else a score above 0. NaN, infinity, None and anything else is an error.
    """
    if isinstance(returned, RewardResult):
        return returned if math.isfinite(returned.score) else not_a_score(returned.score)
    fields = returned if isinstance(returned, dict) else {"score": returned}
    if "score" not in fields:
        return RewardResult(0.0, None, "error", f"returned a dict without \"score\": its keys are {sorted(map(str, fields))[:8]}")
    try:
        score = float(fields["score"])
    except (TypeError, ValueError):
        return not_a_score(fields["score"])
    if not math.isfinite(score) or isinstance(fields["score"], str):
        return not_a_score(fields["score"])
    parsed = fields.get("pred")
    return RewardResult(score, None if parsed is None else str(parsed), "right" if fields.get("acc", score > 0) else "wrong")


def not_a_score(value: object) -> RewardResult:
    return RewardResult(0.0, None, "error", f"returned {value!r:.60} ({type(value).__name__}), not a finite number")


def complaint_about(function: Callable) -> str:
    """What is wrong with the function's signature; empty when it can be called."""
    if not callable(function):
        return f"is {type(function).__name__}, not a function"
    if inspect.iscoroutinefunction(function):
        return "is async: it would return a coroutine, not a number"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without one
        return ""
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return complaint_about_names({p.name for p in by_keyword}, any(p.kind == p.VAR_KEYWORD for p in parameters),
                                 [p.name for p in by_keyword if p.default is p.empty],
                                 [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY])


def complaint_about_names(names: set[str], takes_any: bool, required: list[str], positional_only: list[str]) -> str:
    missing = [name for name in ARGUMENTS if name not in names and not takes_any]
    unknown = [name for name in required if name not in ARGUMENTS]
    faults = []
    if missing:
        faults.append(f"does not take {', '.join(missing)}")
    if unknown:
        faults.append(f"needs {', '.join(unknown)}, which is never given")
    if positional_only:
        faults.append(f"takes {', '.join(positional_only)} by position only; arguments are given by name")
    return "; ".join(faults)


# ---------------------------------------------------------------- before a launch


def check(spec: str, row: tuple[str, str, str, dict] | None = None, timeout_s: float = 60.0) -> list[Problem]:
    """Everything that is wrong with a custom function, found before a launch and without importing it into this process.

    row: a real (data_source, solution_str, ground_truth, extra_info) of the run's data. Without one an invented row of GSM8K is
    tried, and a function that fails on it gives a warning only: it may need what the real rows have.
    """
    try:
        path, name = split_spec(spec)
    except ValueError as error:
        return [problem(spec, str(error), "write reward.function=path/to/file.py:compute_score")]
    try:
        if path.exists() and not path.is_file():
            return [problem(spec, f"{path} is no file", "name an existing Python file", code=BAD_INPUT)]  # a device could be read for ever
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        return [problem(spec, f"not valid Python: {error.msg}", "correct the file", where=f"{path}:{error.lineno or 1}", code=BAD_INPUT)]
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # the last two: brackets within brackets without end
        why = f"{path} cannot be read: {getattr(error, 'strerror', None) or error or type(error).__name__}"
        return [problem(spec, why, "name an existing Python file", code=BAD_INPUT)]
    return check_source(spec, path, name, tree) or check_call(spec, path, row, timeout_s)


def problem(spec: str, why: str, fix: str, where: str = "", code: int = CONFIG_INVALID, level: str = "error") -> Problem:
    return Problem("reward.function", spec, why, fix, where=where, code=code, level=level)


def check_source(spec: str, path: Path, name: str, tree: ast.Module) -> list[Problem]:
    """The function is there, with a signature that can be called. A name bound in another way than by `def` is left to the call."""
    functions = {}
    bound = set()
    for node in module_level(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions[node.name] = node
        bound.update(alias.asname or alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias))
        if isinstance(node, ast.ClassDef):
            bound.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    if name not in functions:
        if name in bound or "*" in bound:
            return []
        near = difflib.get_close_matches(name, functions, n=1) or list(functions)[:5]
        fix = f"name one of its functions: {', '.join(near)}" if near else f"define {SIGNATURE.replace('FUNCTION', name)}"
        return [problem(spec, f"{path} has no function {name}", fix, where=str(path), code=BAD_INPUT)]
    node = functions[name]
    where = f"{path}:{node.lineno}"
    if isinstance(node, ast.AsyncFunctionDef):
        return [problem(spec, f"{name} is async: it would return a coroutine, not a number", f"write it as def {name}(…)", where=where)]
    arguments = node.args
    without_default = arguments.args[:len(arguments.args) - len(arguments.defaults)]
    without_default += [a for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    complaint = complaint_about_names({a.arg for a in arguments.args + arguments.kwonlyargs}, arguments.kwarg is not None,
                                      [a.arg for a in without_default], [a.arg for a in arguments.posonlyargs])
    return [problem(spec, f"{name} {complaint}", f"write def {SIGNATURE.replace('FUNCTION', name)}", where=where)] if complaint else []


def module_level(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the file is imported: everything outside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from module_level(child)


def check_call(spec: str, path: Path, row: tuple | None, timeout_s: float) -> list[Problem]:
    """Import it and call it on one row, in a child process with a deadline."""
    request = json.dumps([spec, row or EXAMPLE_ROW], default=str)
    try:
        done = run_child([sys.executable, "-m", "mfsdp_cli.rewards.custom"], fresh_environment(), timeout_s, request)
    except subprocess.TimeoutExpired:
        return [problem(spec, f"importing it and scoring one row took more than {timeout_s:g} s",
                        "load heavy things once, at the top of the file, and bound what one call may take", where=str(path))]
    report = next((line.removeprefix(MARK) for line in reversed(done.stdout.splitlines()) if line.startswith(MARK)), None)
    if report is None:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
        why = f"the process that tried it ended with status {done.returncode}: {last}"
        return [problem(spec, why, "correct the function", where=str(path))]
    stage, why, where = json.loads(report)
    if not why:
        return []
    level = "error" if row is not None or stage == "import" else "warning"
    example = "" if row is not None or stage == "import" else " (an invented row of GSM8K; the run's rows may differ)"
    return [problem(spec, f"{why}{example}", "correct the function", where=where or str(path), level=level)]


# ---------------------------------------------------------------- in that child process

MARK = "mfsdp-reward-check: "


def try_once(spec: str, row: list) -> tuple[str, str, str]:
    """("import" or "call", what went wrong or "", "file:line" of it)."""
    stage = "import"
    try:
        score = load(spec)
        stage = "call"
        result = score(*row)
    except BaseException as error:  # sys.exit in the user's file is a finding, too
        path = split_spec(spec)[0]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == path.resolve()]
        where = f"{path}:{lines[-1]}" if lines else ""
        doing = "importing it" if stage == "import" else "scoring one row"
        return stage, f"{doing} raised {type(error).__name__}: {error}"[:400], where
    return stage, result.detail if result.status == "error" else "", ""


def main():
    spec, row = json.loads(sys.stdin.read())
    print("\n" + MARK + json.dumps(try_once(spec, row)), flush=True)


if __name__ == "__main__":
    main()
