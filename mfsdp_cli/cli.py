"""The `mfsdp` command: parses, calls one function, prints its result. Only cheap imports here: --help must be quick."""
# Without `from __future__ import annotations`, here and in the others with commands: typer would evaluate the text of each four times.

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Literal, Optional

import typer

from mfsdp_cli import __version__, cli_ckpt, cli_config, cli_train
from mfsdp_cli.errors import BAD_INPUT, EXIT_CODES, INTERRUPTED, MACHINE_UNFIT, OK, RUN_FAILED, USAGE, MfsdpError, Problem
from mfsdp_cli.lazy import LazyTyper
from mfsdp_cli.options import STYLE, Json, NoColor, Quiet
from mfsdp_cli.output import Console, print_json, print_stderr, print_stdout, save_traceback, silence_stdout

# What a machine may refuse, and paths that lead nowhere: no bugs of ours
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO,
           errno.ESTALE)
NO_WAY = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
OVERVIEW = """Post-train Hugging Face language models with Megatron-FSDP

\b
Examples:
  mfsdp prep-data gsm8k -o data/gsm8k
  mfsdp sft --preset sft-gsm8k-qwen2.5-math-7b --train-files data/gsm8k/train.parquet --dry-run
  CKPT=$(mfsdp sft --config run.yaml) && mfsdp ckpt export-hf "$CKPT" -o out
  mfsdp grpo --preset grpo-gsm8k-math-qwen2.5-math-7b --model out --dry-run

Every command prints its product on stdout and everything else on stderr; --json makes the product one JSON
object, also on failure. NO_COLOR, FORCE_COLOR and TERM=dumb are respected; MFSDP_DEBUG=1 shows the traceback
of an internal error.
"""
CODES = "\b\nExit codes:\n" + "\n".join(f"{code:>5}  {meaning}" for code, meaning in EXIT_CODES.items()) + (
    "\n128+n  the child was killed by signal n (137: most likely the host ran out of memory)")

app = LazyTyper(help=OVERVIEW, epilog=CODES, invoke_without_command=True, **STYLE)


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


@app.command("doctor")
def doctor(
    output: Annotated[str, typer.Option("--output", help="Where runs will be written: its disk is looked at")] = "runs",
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, help="Nodes of the runs to come")] = 1,
    ray_address: Annotated[Optional[str], typer.Option("--ray-address", help="Ask this Ray cluster too; default: $RAY_ADDRESS")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also import torch, TransformerEngine and vLLM, each in a process")] = False,
    json: Json = False,
) -> int:
    """Look at this machine: versions, GPUs, driver, network, disk, and what does not fit

    \b
    Examples:
      mfsdp doctor
      mfsdp doctor --deep && mfsdp sft --config run.yaml
      mfsdp doctor --nnodes 2 --ray-address auto --json

    Takes a second, since nothing is imported; --deep takes up to a minute. Exits with 4 when runs would fail here.
    """
    from mfsdp_cli.launch import doctor as clinic

    checks = clinic.doctor(os.environ, folder=output, nnodes=nnodes, ray_address=ray_address, deep=deep)
    if clinic.exit_code(checks) != OK:
        print_stderr(f"error: {clinic.verdict(checks)}")
    Console(json=json).product(clinic.as_lines(checks), clinic.as_data(checks))
    return clinic.exit_code(checks)


for command in (cli_train.sft, cli_train.grpo, cli_train.samples):
    app.command(command.__name__, no_args_is_help=True)(command)
app.command("rules")(cli_config.rules)
app.add_typer(cli_ckpt.app, name="ckpt")
app.add_typer(cli_config.app, name="config")


def main() -> None:
    """The console script: run, then leave with the exit code of what happened."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # a shell can close them: `mfsdp … >&-`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # in this order it takes the same file descriptor, which children get
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
    told = print_json.count
    try:
        code = call() or OK
        if code == INTERRUPTED and print_json.count == told:  # typer ends so after Ctrl-C; a run that was launched tells its own end
            return _print_failure(console, code, [Problem("interrupted", "", EXIT_CODES[INTERRUPTED], "start again", code=code)])
        return code
    except MfsdpError as error:
        return _fail(console, error)
    except SystemExit as error:  # typer's own answer to a broken pipe on stdout, where its help goes
        if isinstance(error.__context__, BrokenPipeError):
            silence_stdout()
            return OK
        raise
    except OSError as error:
        if error.errno not in REFUSED + NO_WAY:
            return _own_bug(console, error)
        refused = error.errno in REFUSED
        fix, code = ("make it writable, or choose another place", MACHINE_UNFIT) if refused else ("name another place", BAD_INPUT)
        return _fail(console, MfsdpError(Problem(str(error.filename or "file system"), "", error.strerror, fix, code=code)))
    except UnicodeEncodeError as error:
        if not any("\udc80" <= letter <= "\udcff" for letter in error.object):
            return _own_bug(console, error)
        problem = Problem("command line", ascii(error.object), "it holds a name that is not valid text", "rename it", code=USAGE)
        return _fail(console, MfsdpError(problem))
    except Exception as error:
        if not hasattr(error, "show"):
            return _own_bug(console, error)
        text = io.StringIO()
        error.show(text)  # a usage error, or the help of a bare call; typer does not export these classes
        print_stderr(text.getvalue().rstrip("\n"))
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
