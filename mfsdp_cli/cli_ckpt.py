"""`mfsdp ckpt`: checkpoints listed, inspected, compared and exported. Imported by `cli`; the work is in `checkpoint` and `launch`."""

from typing import Annotated, Literal, Optional

import typer

from mfsdp_cli.errors import MISMATCH, OK, USAGE, MfsdpError, Problem
from mfsdp_cli.options import STYLE, CheckpointPath, Json, NoColor, Quiet
from mfsdp_cli.output import Console

app = typer.Typer(help="List, inspect and compare checkpoints, export one to Hugging Face format", no_args_is_help=True,
                  add_completion=False, **STYLE)


@app.command("list", no_args_is_help=True)
def list_(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Run folder, checkpoints folder, or verl's folder of global_step_N")],
    latest: Annotated[bool, typer.Option("--latest", help="Print only the path of the one that a resume takes")] = False,
    best: Annotated[bool, typer.Option("--best", help="Print only the path of the one with the best validation")] = False,
    metric: Annotated[Optional[Literal["val_loss", "val_reward", "val_pass_rate"]], typer.Option(
        "--metric", help="Metric to find the best by; default: the run's trainer.best_metric")] = None,
    json: Json = False, no_color: NoColor = False,
) -> int:
    """List the checkpoints of a run, with what is complete, latest and best

    \b
    Examples:
      mfsdp ckpt list runs/sft
      mfsdp ckpt export-hf "$(mfsdp ckpt list runs/sft --best)" -o out

    Reads the disk alone: one line for each step folder, also for what an interrupted save left. An
    incomplete one is no failure here; --latest and --best exit with 5 when there is none.
    """
    from mfsdp_cli.checkpoint.listing import listing, one, render

    if latest and best:
        raise MfsdpError(Problem("--latest --best", "", "each names one checkpoint", "give one of the two", "command line", USAGE))
    data = listing(path, metric)
    text = one(data, "latest" if latest else "best") if latest or best else render(data)
    Console(json=json, no_color=no_color).product(text, {"ok": True, "exit_code": OK, **data})
    return OK


@app.command("inspect", no_args_is_help=True)
def inspect(
    path: CheckpointPath,
    tensors: Annotated[Optional[str], typer.Option(
        "--tensors", metavar="PATTERN", help="List tensors by name: a part of it, or a pattern as '*.exp_avg'; '*' lists all")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte again and compare checksums")] = False,
    json: Json = False, no_color: NoColor = False,
) -> int:
    """Say what a checkpoint holds and whether it is complete; needs no torch

    \b
    Examples:
      mfsdp ckpt inspect runs/sft
      mfsdp ckpt inspect runs/sft/checkpoints/step_000100 --tensors linear_fc1 --verify
    """
    from mfsdp_cli.checkpoint.inspect import inspect as look
    from mfsdp_cli.checkpoint.inspect import render

    data = look(path, tensors=tensors, verify=verify)
    console = Console(json=json, no_color=no_color)
    console.problems([Problem(**p) for p in data["problems"]])
    console.product(render(data), {"ok": data["exit_code"] == OK, **data})
    return data["exit_code"]


@app.command("diff", no_args_is_help=True)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint, or run folder, or Hugging Face folder")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, to compare it with")],
    values: Annotated[bool, typer.Option("--values", help="Compare every value too, in a process with torch")] = False,
    tensors: Annotated[str, typer.Option("--tensors", metavar="PATTERN", help="Only tensors of such names, as in inspect")] = "",
    json: Json = False, quiet: Quiet = False, no_color: NoColor = False,
) -> int:
    """Compare two checkpoints: tensors, records and settings

    \b
    Examples:
      mfsdp ckpt diff runs/a runs/b
      mfsdp ckpt diff runs/a/checkpoints/step_000100 out --values --tensors embedding

    \b
    Exits with 0 when the tensors are equal in names, shapes and dtypes, and with --values in every value;
    with 6 when they are not. Steps, versions, topology and settings are told, and do not count. They may
    be of any layout. Names are compared as they are, but for the module. that wrappers leave in them.
    """
    from mfsdp_cli.checkpoint.diff import render
    from mfsdp_cli.launch.diff import compare

    code, data = compare(a, b, tensors, values, quiet=quiet, no_color=no_color)
    if code in (OK, MISMATCH) or json:
        Console(json=json, no_color=no_color).product(render(data), data)
    return code


@app.command("export-hf", no_args_is_help=True)
def export_hf(
    path: CheckpointPath,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write: config, tokenizer, safetensors")],
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], typer.Option("--dtype", help="Of the weights; auto: as trained")] = "auto",
    source: Annotated[Optional[str], typer.Option("--source", help="Folder of the source model, where the checkpoint has no index of it")] = None,
    no_forward_check: Annotated[bool, typer.Option("--no-forward-check", help="Do not load the result and run it once")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a Hugging Face folder that is there")] = False,
    json: Json = False, quiet: Quiet = False, no_color: NoColor = False,
) -> int:
    """Write a checkpoint as a Hugging Face model, compared with the source model's index and run against the shards

    \b
    One process on the CPU. At its peak it holds a few times the largest tensor, and for the
    check one layer of the model. Checkpoints of verl's Megatron-FSDP path are exported too.

    \b
    Examples:
      mfsdp ckpt export-hf runs/sft -o out
      mfsdp ckpt export-hf runs/sft/checkpoints/step_000100 -o out --dtype bfloat16
      mfsdp ckpt export-hf ckpts/global_step_20/actor -o out --source Qwen2.5-Math-7B

    Prints the path of the folder, which exists only when every check has passed.
    """
    from mfsdp_cli.launch.export import export

    code, data = export(path, out, dtype=dtype, source=source, forward_check=not no_forward_check, overwrite=overwrite,
                        quiet=quiet, no_color=no_color)
    if code == OK or json:
        Console(json=json, no_color=no_color).product(out, data)
    return code
