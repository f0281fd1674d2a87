"""`mfsdp config`: settings as they resolve, and what settings there are; `mfsdp rules`. Imported by `cli`; the data comes from `config.show`."""

from typing import Annotated, Optional

import typer

from mfsdp_cli.errors import OK, exit_code_of
from mfsdp_cli.options import STYLE, Assignments, Config, Json, Kind, NoColor, Preset, Quiet, complete_preset, complete_rule
from mfsdp_cli.output import Console

app = typer.Typer(help="Show settings, compare them, list keys and presets", no_args_is_help=True, add_completion=False, **STYLE)


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
    a: Annotated[str, typer.Argument(metavar="A", help="Preset, YAML file or run folder", autocompletion=complete_preset)],
    b: Annotated[str, typer.Argument(metavar="B", help="Preset, YAML file or run folder", autocompletion=complete_preset)],
    json: Json = False,
) -> int:
    """Print the settings in which two presets, files or runs of one kind differ, and where each value comes from

    \b
    Examples:
      mfsdp config diff sft-gsm8k-qwen2.5-math-7b run.yaml
      mfsdp config diff runs/a runs/b --json

    Exits with 0 whether they differ or not; without a difference nothing is printed.
    """
    from mfsdp_cli.config.show import compare

    kind, rows = compare(a, b)
    lines = [f"{r['key']}: {_yaml(r['a'])} -> {_yaml(r['b'])}  # {r['origin_a']} -> {r['origin_b']}" for r in rows]
    data = {"ok": True, "exit_code": OK, "kind": kind, "a": a, "b": b, "differences": rows}
    if lines or json:
        Console(json=json).product(lines, data)
    return OK


@app.command()
def schema(kind: Kind = "sft", json: Json = False) -> int:
    """List every setting of a kind of run: key, type, default, range, meaning; --json adds a JSON Schema

    \b
    Examples:
      mfsdp config schema
      mfsdp config schema --kind grpo --json

    Settings in seconds (s) take a duration too: 90s, 30m, 1h30m. With --json, json_schema is the schema of a --config
    file for editors and other programs.
    """
    from mfsdp_cli.config import show
    from mfsdp_cli.config.json_schema import json_schema

    rows = show.schema(kind)
    lines = []
    for row in rows:
        bounds = [f"{sign} {row[name]:g}" for name, sign in (("low", ">="), ("high", "<=")) if row[name] is not None]
        limits = [f"one of {', '.join(map(str, row['choices']))}"] if row["choices"] else bounds
        wanted = ", ".join([row["type"], *([row["unit"]] if row["unit"] else []), *limits])
        lines += [f"{row['key']}: {_yaml(row['default'])}  # {wanted}", f"    {row['doc']}"]
    Console(json=json).product(lines, {"ok": True, "exit_code": OK, "kind": kind, "keys": rows, "json_schema": json_schema(kind)})
    return OK


@app.command()
def presets(json: Json = False) -> int:
    """List the shipped presets"""
    from mfsdp_cli.config import show

    rows = show.presets()
    width = max((len(row["name"]) for row in rows), default=0)
    Console(json=json).product([f"{row['name']:<{width}}  {row['about']}" for row in rows], {"ok": True, "exit_code": OK, "presets": rows})
    return OK


@app.command("from-verl", no_args_is_help=True)
def from_verl(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Launch script of verl's SFT or GRPO trainer; it is read, never run")],
    arguments: Annotated[Optional[list[str]], typer.Argument(metavar="[ARG]...", help="Arguments of the script: its $1, $2, $@")] = None,
    var: Annotated[Optional[list[str]], typer.Option("--var", metavar="NAME=VALUE", help="Variable that the script finds set")] = None,
    out: Annotated[Optional[str], typer.Option("--out", "-o", metavar="FILE", help="YAML file to write; default: stdout")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over a file that is there")] = False,
    json: Json = False, quiet: Quiet = False, no_color: NoColor = False,
) -> int:
    """Turn a verl launch script into a file of settings, and tell what became of each key

    \b
    Examples:
      mfsdp config from-verl run.sh -o run.yaml
      mfsdp config from-verl run.sh --var MODEL_PATH=Qwen/Qwen3-8B trainer.total_epochs=2 > run.yaml

    Prints the YAML, or with -o its path; the report is on stderr. Exits with 3 when a key could not be taken over;
    the rest is written all the same.
    """
    from mfsdp_cli.config.conversion import report, write
    from mfsdp_cli.config.from_verl import convert

    console = Console(json=json, quiet=quiet, no_color=no_color)
    result = convert(script, arguments, var or [])
    if out is not None:
        write(result, out, overwrite)
    console.say("\n".join(report(result)) + "\n")
    console.problems(result.problems)
    console.product(result.text.removesuffix("\n") if out is None else out,
                    {"ok": result.exit_code == OK, "exit_code": result.exit_code, "written": out, **result.to_dict()})
    return result.exit_code


def rules(
    id: Annotated[Optional[str], typer.Argument(metavar="[ID]", help="Explain this one", autocompletion=complete_rule)] = None,
    kind: Kind = None,
    json: Json = False,
) -> int:
    """List the rules that a run must keep, or explain one

    \b
    Examples:
      mfsdp rules
      mfsdp rules tp-divides-model
      mfsdp rules --kind grpo --json

    mfsdp sft --dry-run and mfsdp grpo --dry-run judge by them; a problem names its rule in brackets.
    """
    from mfsdp_cli.config import rulebook

    chosen = [r for r in ([rulebook.find(id)] if id else rulebook.book()) if kind is None or kind in r.kinds]
    lines = rulebook.explain(chosen[0]) if id and chosen else rulebook.table(chosen)
    Console(json=json).product(lines, {"ok": True, "exit_code": OK, "rules": [r.to_dict() for r in chosen]})
    return OK


def _yaml(value) -> str:
    """JSON is YAML, and leaves no doubt about what is text."""
    import json

    return json.dumps(value, ensure_ascii=False)
