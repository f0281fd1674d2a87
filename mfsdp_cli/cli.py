"""The `mfsdp` command: parses, calls one function, prints its result. Only cheap imports here: --help must be quick."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated, Literal, Optional

import typer

from mfsdp_cli import __version__, cli_config
from mfsdp_cli.errors import EXIT_CODES, MACHINE_UNFIT, OK, RUN_FAILED, USAGE, MfsdpError, Problem
from mfsdp_cli.options import STYLE, Assignments, CheckpointPath, Config, Json, NoColor, Preset, Quiet, Verbose
from mfsdp_cli.output import Console, print_json, print_stderr, print_stdout, save_traceback, silence_stdout

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)  # what a machine may refuse: not a bug of ours
OVERVIEW = """Post-train Hugging Face language models with Megatron-FSDP

\b
Examples:
  mfsdp prep-data gsm8k -o data/gsm8k
  mfsdp sft --preset sft-gsm8k-qwen2.5-math-7b --train-files data/gsm8k/train.parquet --dry-run
  CKPT=$(mfsdp sft --config run.yaml) && mfsdp ckpt export-hf "$CKPT" -o out

Every command prints its product on stdout and everything else on stderr; --json makes the product one JSON
object, also on failure. NO_COLOR, FORCE_COLOR and TERM=dumb are respected; MFSDP_DEBUG=1 shows the traceback
of an internal error.
"""
CODES = "\b\nExit codes:\n" + "\n".join(f"{code:>5}  {meaning}" for code, meaning in EXIT_CODES.items()) + (
    "\n128+n  the child was killed by signal n (137: most likely the host ran out of memory)")

app = typer.Typer(help=OVERVIEW, epilog=CODES, invoke_without_command=True, **STYLE)
ckpt = typer.Typer(help="Inspect a checkpoint, export it to Hugging Face format", no_args_is_help=True, **STYLE)


@app.callback()
def root(ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit")] = False) -> None:
    if version:
        print_stdout(f"mfsdp {__version__}")
        raise typer.Exit(OK)
    if ctx.invoked_subcommand is None:
        print_stdout(ctx.get_help())


@app.command("prep-data", no_args_is_help=True)
def prep_data(
    source: Annotated[Literal["gsm8k", "math", "messages", "arithmetic"], typer.Argument(
        metavar="SOURCE", help="gsm8k, math, messages (any chat data) or arithmetic (generated)")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder for train.parquet and test.parquet")],
    input: Annotated[Optional[str], typer.Option("--input", "-i", help="File, folder or hub id; default: the source's hub id")] = None,
    purpose: Annotated[Literal["sft", "rl"], typer.Option("--for", help="sft: messages; rl: prompt and reward_model")] = "sft",
    rows: Annotated[Optional[int], typer.Option("--rows", help="Training rows: the first N, or N generated ones")] = None,
    test_rows: Annotated[Optional[int], typer.Option("--test-rows", help="Test rows, likewise; split off when the input has none")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of generated rows and of a split")] = 0,
    system: Annotated[Optional[str], typer.Option("--system", help="System message to put before each chat")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out and count unusable rows instead of refusing them")] = False,
    json: Json = False, quiet: Quiet = False, no_color: NoColor = False,
) -> int:
    """Write training data as parquet, for sft or rl

    \b
    Examples:
      mfsdp prep-data gsm8k -o data/gsm8k
      mfsdp prep-data messages -i chats.jsonl -o data/chats --test-rows 200
      mfsdp prep-data arithmetic -o data/sums --rows 2000 --test-rows 200

    Prints the paths written, one a line.
    """
    from mfsdp_cli.data.prepare import prepare

    console = Console(json=json, quiet=quiet, no_color=no_color)
    report = prepare(source, input=input, out_dir=out, purpose=purpose, train_rows=rows, test_rows=test_rows, seed=seed, system=system,
                     skip_bad=skip_bad, progress=lambda split, done, total: console.say(f"{split}: {done} of {total} rows"))
    console.problems(report.problems)
    console.product(report.files, {"ok": True, "exit_code": OK, **report.to_dict()})
    return OK


@app.command(no_args_is_help=True)
def sft(
    settings: Assignments = None,
    preset: Preset = None,
    config: Config = None,
    model: Annotated[Optional[str], typer.Option("--model", help="Hugging Face folder or hub id to start from")] = None,
    train_files: Annotated[Optional[list[str]], typer.Option("--train-files", help="Parquet files, repeated or comma-separated")] = None,
    val_files: Annotated[Optional[list[str]], typer.Option("--val-files", help="Parquet files to validate on, likewise")] = None,
    output: Annotated[Optional[str], typer.Option("--output", help="Run folder; default: runs/<trainer.experiment_name>")] = None,
    nproc: Annotated[Optional[int], typer.Option("--nproc", help="Ranks on each node: GPUs, or processes on CPU ($NPROC)")] = None,
    tp: Annotated[Optional[int], typer.Option("--tp", help="Tensor-parallel ranks ($TP)")] = None,
    pp: Annotated[Optional[int], typer.Option("--pp", help="Pipeline stages; must be 1 with Megatron-FSDP ($PP)")] = None,
    ep: Annotated[Optional[int], typer.Option("--ep", help="Expert-parallel ranks ($EP)")] = None,
    cp: Annotated[Optional[int], typer.Option("--cp", help="Context-parallel ranks")] = None,
    nnodes: Annotated[Optional[int], typer.Option("--nnodes", help="Nodes; start mfsdp on each of them")] = None,
    node_rank: Annotated[Optional[int], typer.Option("--node-rank", help="Number of this node, from 0")] = None,
    rdzv_endpoint: Annotated[Optional[str], typer.Option("--rdzv-endpoint", help="host:port of node 0, where the nodes meet")] = None,
    resume: Annotated[Optional[str], typer.Option("--resume", help="auto: go on where this run stopped; never; or a checkpoint")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Check all of it and show the plan; writes and starts nothing")] = False,
    json: Json = False, quiet: Quiet = False, verbose: Verbose = False, no_color: NoColor = False,
) -> int:
    """Fine-tune a model on chats, through torchrun

    \b
    Examples:
      mfsdp sft --preset sft-gsm8k-qwen2.5-math-7b --train-files data/gsm8k/train.parquet --dry-run
      mfsdp sft --config run.yaml --output runs/a optim.lr=2e-5 trainer.total_epochs=2
      mfsdp sft --model ./model --train-files a.parquet,b.parquet --nproc 8 --tp 4

    \b
    Settings: defaults < preset < --config file < $NPROC, $TP, $PP, $EP < KEY=VALUE < named options.
    `mfsdp config schema` lists the keys. The same command again goes on where it stopped.
    Ctrl-C once saves and exits with 75; twice ends at once.

    Prints the path of the last complete checkpoint.
    """
    from mfsdp_cli.launch import report
    from mfsdp_cli.launch import sft as launch

    console = Console(json=json, quiet=quiet, verbose=verbose, no_color=no_color)
    flags = {"model": model, "train-files": _split(train_files), "val-files": _split(val_files), "output": output, "nproc": nproc, "tp": tp,
             "pp": pp, "ep": ep, "cp": cp, "nnodes": nnodes, "node-rank": node_rank, "rdzv-endpoint": rdzv_endpoint}
    checked = launch.check(preset=preset, config=config, assignments=settings or [], flags=flags, resume=resume, environ=os.environ)
    if dry_run:
        console.problems(checked.problems)
        console.product(report.dry_run_text(checked), report.dry_run_data(checked))
        return checked.exit_code
    if checked.exit_code != OK:
        raise MfsdpError(checked.problems, hint="mfsdp sft … --dry-run shows the whole plan and starts nothing")
    console.problems(checked.problems)
    outcome = launch.start(checked, ["mfsdp", *sys.argv[1:]], console)
    return launch.tell(outcome, console)


@ckpt.command("inspect", no_args_is_help=True)
def ckpt_inspect(
    path: CheckpointPath,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor: name, shape, dtype, bytes")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte again and compare checksums")] = False,
    json: Json = False, no_color: NoColor = False,
) -> int:
    """Say what a checkpoint holds and whether it is complete; needs no torch

    \b
    Examples:
      mfsdp ckpt inspect runs/sft
      mfsdp ckpt inspect runs/sft/checkpoints/step_000100 --tensors --verify
    """
    from mfsdp_cli.checkpoint.inspect import inspect, render

    data = inspect(path, tensors=tensors, verify=verify)
    console = Console(json=json, no_color=no_color)
    console.problems([Problem(**p) for p in data["problems"]])
    console.product(render(data), {"ok": data["exit_code"] == OK, **data})
    return data["exit_code"]


@ckpt.command("export-hf", no_args_is_help=True)
def ckpt_export_hf(
    path: CheckpointPath,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write: config, tokenizer, safetensors")],
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], typer.Option("--dtype", help="Of the weights; auto: as trained")] = "auto",
    source: Annotated[Optional[str], typer.Option("--source", help="Source model, if it is no longer where the run found it")] = None,
    no_forward_check: Annotated[bool, typer.Option("--no-forward-check", help="Do not load the result and run it once")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty")] = False,
    json: Json = False, no_color: NoColor = False,
) -> int:
    """Write a checkpoint as a Hugging Face model, compared with the source model's index

    \b
    Examples:
      mfsdp ckpt export-hf runs/sft -o out
      mfsdp ckpt export-hf runs/sft/checkpoints/step_000100 -o out --dtype bfloat16

    Prints the path of the folder.
    """
    from mfsdp_cli.launch.export import export

    code, data = export(path, out, dtype=dtype, source=source, forward_check=not no_forward_check, overwrite=overwrite)
    if code == OK or json:
        Console(json=json, no_color=no_color).product(out, data)
    return code


app.add_typer(ckpt, name="ckpt")
app.add_typer(cli_config.app, name="config")


def _split(values: list[str] | None) -> list[str] | None:
    """--train-files a,b --train-files c: three files."""
    return [part for value in values for part in value.split(",") if part] if values else None


def main() -> None:
    """The console script: run, then leave with the exit code of what happened."""
    args = sys.argv[1:]
    code = guarded(lambda: app(args, prog_name="mfsdp", standalone_mode=False), args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    sys.exit(code)


def guarded(call: Callable[[], int | None], args: list[str]) -> int:
    """Turn every way in which the call can end into an exit code; with --json among the args a failure is an object too."""
    console = Console(json="--json" in args, no_color="--no-color" in args)
    try:
        return call() or OK
    except MfsdpError as error:
        return _fail(console, error)
    except SystemExit as error:  # typer's own answer to a broken pipe on stdout, where its help goes
        if isinstance(error.__context__, BrokenPipeError):
            silence_stdout()
            return OK
        raise
    except OSError as error:
        if error.errno not in REFUSED:
            return _own_bug(console, error)
        where = str(error.filename) if error.filename else "file system"
        problem = Problem(where, "", error.strerror, "make it writable, or choose another place", code=MACHINE_UNFIT)
        return _fail(console, MfsdpError(problem))
    except Exception as error:
        if not hasattr(error, "show"):
            return _own_bug(console, error)
        error.show()  # a usage error, or the help of a bare call; typer does not export these classes
        return _print_failure(console, USAGE, [Problem("command line", "", error.format_message(), "mfsdp -h", code=USAGE)])


def _fail(console: Console, error: MfsdpError) -> int:
    console.problems(error.problems, error.hint)
    return _print_failure(console, error.exit_code, error.problems)


def _print_failure(console: Console, code: int, problems: list[Problem]) -> int:
    if console.json:
        print_json({"ok": False, "exit_code": code, "problems": [p.to_dict() for p in problems]})
    return code


def _own_bug(console: Console, error: Exception) -> int:
    """An exception that should not have got here: one line, and the traceback in a file to attach."""
    file = save_traceback(error)
    print_stderr(f"error: internal error: {type(error).__name__}: {error} (please report it with {file})")
    if os.environ.get("MFSDP_DEBUG"):
        print_stderr(file.read_text(encoding="utf-8"))
    problem = Problem("internal error", type(error).__name__, str(error), f"please report it with {file}", code=RUN_FAILED)
    return _print_failure(console, RUN_FAILED, [problem])
