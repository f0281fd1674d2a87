"""`mfsdp config`: settings as they resolve, and what settings there are. Imported by `cli`; the data comes from `config.show`."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from mfsdp_cli.errors import OK, USAGE, MfsdpError, Problem, exit_code_of
from mfsdp_cli.options import STYLE, Assignments, Config, Json, Kind, NoColor, Preset
from mfsdp_cli.output import Console

app = typer.Typer(help="Show settings, compare them, list keys and presets", no_args_is_help=True, **STYLE)


@app.command()
def show(
    settings: Assignments = None,
    preset: Preset = None,
    config: Config = None,
    kind: Kind = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say beside each value where it comes from")] = False,
    only_changed: Annotated[bool, typer.Option("--only-changed", help="Leave out what has its default value")] = False,
    json: Json = False, no_color: NoColor = False,
) -> int:
    """Print the settings as they resolve; the text is accepted back by --config

    \b
    Examples:
      mfsdp config show --preset sft-gsm8k-qwen2.5-math-7b --only-changed
      mfsdp config show --config run.yaml optim.lr=2e-5 --origin
      mfsdp config show --kind grpo

    Without --kind the preset's name or the keys tell it. Judges keys, types and ranges; mfsdp sft --dry-run and
    mfsdp grpo --dry-run also look at the machine, the model and the data.
    """
    from mfsdp_cli.config.load import infer_kind, load
    from mfsdp_cli.config.show import resolved

    kind = kind or infer_kind(preset, config, settings or [])
    loaded = load(kind, preset=preset, config=config, assignments=settings or [])
    rows = [row for row in resolved(loaded.settings, loaded.origins) if row["changed"] or not only_changed]
    lines = [f"{row['key']}: {_yaml(row['value'])}" for row in rows]
    if origin:
        width = max(map(len, lines), default=0)
        lines = [f"{line:<{width}}  # {row['origin']}" for line, row in zip(lines, rows, strict=True)]
    code = exit_code_of(loaded.problems)
    console = Console(json=json, no_color=no_color)
    console.problems(loaded.problems)
    problems = [p.to_dict() for p in loaded.problems]
    console.product(lines, {"ok": code == OK, "exit_code": code, "kind": kind, "settings": rows, "problems": problems})
    return code


@app.command(no_args_is_help=True)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Preset or YAML file")],
    b: Annotated[str, typer.Argument(metavar="B", help="Preset or YAML file")],
    json: Json = False,
) -> int:
    """Print the settings in which two presets or files of one kind differ

    \b
    Example:
      mfsdp config diff sft-gsm8k-qwen2.5-math-7b runs/a/config.yaml
    """
    from mfsdp_cli.config import show
    from mfsdp_cli.config.load import infer_kind, load

    kinds = [infer_kind(preset=name) for name in (a, b)]
    if kinds[0] != kinds[1]:
        raise MfsdpError(Problem(f"{a}, {b}", f"{kinds[0]}, {kinds[1]}", "settings of two kinds of run", "compare two of one kind",
                                 "command line", USAGE))
    both = [load(kinds[0], preset=name, environ={}) for name in (a, b)]
    problems = [p for loaded in both for p in loaded.problems]
    if exit_code_of(problems) != OK:
        raise MfsdpError(problems)
    rows = show.diff(both[0].settings, both[1].settings)
    lines = [f"{row['key']}: {_yaml(row['a'])} -> {_yaml(row['b'])}" for row in rows]
    Console(json=json).product(lines, {"ok": True, "exit_code": OK, "kind": kinds[0], "a": a, "b": b, "differences": rows})
    return OK


@app.command()
def schema(kind: Kind = "sft", json: Json = False) -> int:
    """List every setting of a kind of run: key, type, default, range, meaning

    \b
    Examples:
      mfsdp config schema
      mfsdp config schema --kind grpo --json
    """
    from mfsdp_cli.config import show

    rows = show.schema(kind)
    lines = []
    for row in rows:
        bounds = [f"{sign} {row[name]:g}" for name, sign in (("low", ">="), ("high", "<=")) if row[name] is not None]
        limits = [f"one of {', '.join(map(str, row['choices']))}"] if row["choices"] else bounds
        wanted = ", ".join([row["type"], *([row["unit"]] if row["unit"] else []), *limits])
        lines += [f"{row['key']}: {_yaml(row['default'])}  # {wanted}", f"    {row['doc']}"]
    Console(json=json).product(lines, {"ok": True, "exit_code": OK, "kind": kind, "keys": rows})
    return OK


@app.command()
def presets(json: Json = False) -> int:
    """List the shipped presets"""
    from mfsdp_cli.config import show

    rows = show.presets()
    width = max((len(row["name"]) for row in rows), default=0)
    Console(json=json).product([f"{row['name']:<{width}}  {row['about']}" for row in rows], {"ok": True, "exit_code": OK, "presets": rows})
    return OK


def _yaml(value) -> str:
    """JSON is YAML, and leaves no doubt about what is text."""
    return jsonlib.dumps(value, ensure_ascii=False)
