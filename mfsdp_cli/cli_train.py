"""`mfsdp sft`, `mfsdp grpo`, `mfsdp samples`. Imported by `cli`; the work is in `launch` and `samples`."""

import os
import sys
from typing import Annotated, Literal, Optional

import typer

from mfsdp_cli.errors import OK, MfsdpError
from mfsdp_cli.options import Assignments, Config, Json, NoColor, Preset, Quiet, Verbose
from mfsdp_cli.output import Console

Model = Annotated[Optional[str], typer.Option("--model", help="Hugging Face folder, hub id, or checkpoint to start from")]
TrainFiles = Annotated[Optional[list[str]], typer.Option("--train-files", help="Parquet files, repeated or comma-separated")]
ValFiles = Annotated[Optional[list[str]], typer.Option("--val-files", help="Parquet files to validate on, likewise")]
Output = Annotated[Optional[str], typer.Option("--output", help="Run folder; default: runs/<trainer.experiment_name>")]
Nproc = Annotated[Optional[int], typer.Option("--nproc", help="Ranks on each node: GPUs, or processes on CPU ($NPROC)")]
Tp = Annotated[Optional[int], typer.Option("--tp", help="Tensor-parallel ranks ($TP)")]
Pp = Annotated[Optional[int], typer.Option("--pp", help="Pipeline stages; must be 1 with Megatron-FSDP ($PP)")]
Ep = Annotated[Optional[int], typer.Option("--ep", help="Expert-parallel ranks ($EP)")]
Cp = Annotated[Optional[int], typer.Option("--cp", help="Context-parallel ranks")]
Resume = Annotated[Optional[str], typer.Option("--resume", help="auto: go on where this run stopped; never; or a checkpoint")]
CheckData = Annotated[bool, typer.Option("--check-data", help="First read every row through the tokenizer: lengths, faulty rows")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Check all of it and show the plan; writes and starts nothing")]


Suggest = Annotated[bool, typer.Option("--suggest", help="List layouts that fit the GPUs, fastest first; starts nothing")]
Gpus = Annotated[Optional[int], typer.Option("--gpus", min=1, max=1024, help="With --suggest: GPUs of each node; default: those here")]
GpuMemory = Annotated[Optional[str], typer.Option("--gpu-memory", metavar="SIZE", help="With --suggest: memory of each GPU, as 80GiB")]


def sft(
    settings: Assignments = None, preset: Preset = None, config: Config = None,
    model: Model = None, train_files: TrainFiles = None, val_files: ValFiles = None, output: Output = None,
    nproc: Nproc = None, tp: Tp = None, pp: Pp = None, ep: Ep = None, cp: Cp = None,
    nnodes: Annotated[Optional[int], typer.Option("--nnodes", help="Nodes; start mfsdp on each of them")] = None,
    node_rank: Annotated[Optional[int], typer.Option("--node-rank", help="Number of this node, from 0")] = None,
    rdzv_endpoint: Annotated[Optional[str], typer.Option("--rdzv-endpoint", help="host:port of node 0, where the nodes meet")] = None,
    resume: Resume = None, dry_run: DryRun = False, check_data: CheckData = False,
    suggest: Suggest = False, gpus: Gpus = None, gpu_memory: GpuMemory = None,
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
    flags = {"model": model, "train-files": _split(train_files), "val-files": _split(val_files), "output": output, "nproc": nproc, "tp": tp,
             "pp": pp, "ep": ep, "cp": cp, "nnodes": nnodes, "node-rank": node_rank, "rdzv-endpoint": rdzv_endpoint}
    console = Console(json=json, quiet=quiet, verbose=verbose, no_color=no_color)
    if _suggests(suggest, gpus, gpu_memory):
        return _suggest("sft", preset, config, settings, flags, gpus, gpu_memory, console)
    return _run("sft", preset, config, settings, flags, resume, dry_run, check_data, console)


def grpo(
    settings: Assignments = None, preset: Preset = None, config: Config = None,
    model: Model = None, train_files: TrainFiles = None, val_files: ValFiles = None, output: Output = None,
    nproc: Nproc = None, tp: Tp = None, pp: Pp = None, ep: Ep = None, cp: Cp = None,
    gen_tp: Annotated[Optional[int], typer.Option("--gen-tp", help="GPUs of one vLLM engine ($GEN_TP)")] = None,
    rollout: Annotated[Optional[Literal["vllm", "hf"]], typer.Option("--rollout", help="Sampler; hf: transformers, slow")] = None,
    reward_fn: Annotated[Optional[str], typer.Option("--reward-fn", metavar="FILE.py:FUNCTION", help="Your own scoring function")] = None,
    nnodes: Annotated[Optional[int], typer.Option("--nnodes", help="Nodes of the Ray cluster that take part")] = None,
    ray_address: Annotated[Optional[str], typer.Option("--ray-address", help="Ray cluster to join: auto or host:port")] = None,
    val_only: Annotated[Optional[bool], typer.Option("--val-only", help="Validate and stop")] = None,
    resume: Resume = None, dry_run: DryRun = False, check_data: CheckData = False,
    suggest: Suggest = False, gpus: Gpus = None, gpu_memory: GpuMemory = None,
    json: Json = False, quiet: Quiet = False, verbose: Verbose = False, no_color: NoColor = False,
) -> int:
    """Reinforcement learning (GRPO), through Ray

    \b
    Examples:
      mfsdp prep-data gsm8k --for rl -o data/gsm8k-rl
      mfsdp grpo --preset grpo-gsm8k-math-qwen2.5-math-7b --train-files data/gsm8k-rl/train.parquet --dry-run
      mfsdp grpo --model "$CKPT" --train-files a.parquet --rollout hf --reward-fn score.py:score rollout.n=8
      mfsdp grpo --config runs/a/config.yaml --nnodes 4 --ray-address auto

    \b
    Settings: defaults < preset < --config file < $NPROC, $TP, $PP, $EP, $GEN_TP < KEY=VALUE < named options.
    `mfsdp config schema --kind grpo` lists the keys; verl's names of them work too. The same command again goes on
    where it stopped. Ctrl-C once saves and exits with 75; twice ends at once. `mfsdp samples RUN` shows responses.

    Prints the path of the last complete checkpoint; with --val-only what was measured, one number a line.
    """
    flags = {"model": model, "train-files": _split(train_files), "val-files": _split(val_files), "output": output, "nproc": nproc, "tp": tp,
             "pp": pp, "ep": ep, "cp": cp, "gen-tp": gen_tp, "rollout": rollout, "reward-fn": reward_fn, "nnodes": nnodes,
             "ray-address": ray_address, "val-only": val_only}
    console = Console(json=json, quiet=quiet, verbose=verbose, no_color=no_color)
    if _suggests(suggest, gpus, gpu_memory):
        return _suggest("grpo", preset, config, settings, flags, gpus, gpu_memory, console)
    return _run("grpo", preset, config, settings, flags, resume, dry_run, check_data, console)


def samples(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder of mfsdp grpo")],
    step: Annotated[Optional[int], typer.Option("--step", help="Responses of this step; default: the last that was kept")] = None,
    val: Annotated[bool, typer.Option("--val", help="Responses of validation instead of training")] = False,
    best: Annotated[int, typer.Option("--best", min=0, help="How many of the highest rewards")] = 3,
    worst: Annotated[int, typer.Option("--worst", min=0, help="How many of the lowest rewards")] = 3,
    unparseable: Annotated[int, typer.Option("--unparseable", min=0, help="How many without a readable answer")] = 3,
    json: Json = False, no_color: NoColor = False,
) -> int:
    """Show responses of a GRPO run, best and worst first

    \b
    Examples:
      mfsdp samples runs/grpo
      mfsdp samples runs/grpo --step 20 --best 0 --worst 10 --unparseable 0
      mfsdp samples runs/grpo --val --json

    Long texts are shortened in the middle on screen; --json has them whole.
    """
    from mfsdp_cli.samples import choose, read_samples, render

    path, rows = read_samples(run, step, val)
    chosen = choose(rows, best, worst, unparseable)
    console = Console(json=json, no_color=no_color)
    data = {"ok": True, "exit_code": OK, "path": str(path), "num_samples": len(rows), **chosen}
    console.product(render(path, rows, chosen, no_color), data)
    return OK


def _run(kind: str, preset: str | None, config: str | None, settings: list[str] | None, flags: dict, resume: str | None, dry_run: bool,
         reads_data: bool, console: Console) -> int:
    """Check; then show the plan, or start it and tell how it ended."""
    from mfsdp_cli.launch import report
    from mfsdp_cli.launch import start as launch

    checked = launch.check(kind, preset=preset, config=config, assignments=settings or [], flags=flags, resume=resume, environ=os.environ)
    data, table = None, []
    if reads_data:
        from mfsdp_cli.launch.check_data import check_data, data_lines

        checked, data = check_data(checked)
        table = data_lines(data)
    if dry_run:
        console.problems(checked.problems)
        text = [report.dry_run_text(checked), *([""] if table else []), *table]
        console.product(text, report.dry_run_data(checked) | ({"data": data} if reads_data else {}))
        return checked.exit_code
    if table:
        console.say("\n".join(table))
    if checked.exit_code != OK:
        raise MfsdpError(checked.problems, hint=f"mfsdp {kind} … --dry-run shows the whole plan and starts nothing")
    console.problems(checked.problems)
    outcome = launch.start(checked, ["mfsdp", *sys.argv[1:]], console)
    return launch.tell(outcome, console, checked.validates_only)


def _suggests(suggest: bool, gpus: int | None, gpu_memory: str | None) -> bool:
    if not suggest and (gpus is not None or gpu_memory is not None):
        raise typer.BadParameter("--gpus and --gpu-memory go with --suggest")
    return suggest


def _suggest(kind: str, preset: str | None, config: str | None, settings: list[str] | None, flags: dict, gpus: int | None,
             gpu_memory: str | None, console: Console) -> int:
    from mfsdp_cli.launch.suggest import suggest, suggestion_text

    found = suggest(kind, preset=preset, config=config, assignments=settings or [], flags=flags, gpus=gpus, gpu_memory=gpu_memory,
                    environ=os.environ)
    console.problems(found.problems)
    console.product(suggestion_text(found), found.to_dict())
    return found.exit_code


def _split(values: list[str] | None) -> list[str] | None:
    """--train-files a,b --train-files c: three files."""
    return [part for value in values for part in value.split(",") if part] if values else None
