"""How a run ended: from what the ranks left behind (result.json, failure-rank*.json, torchrun's table) to an exit code."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import field
from pathlib import Path

from mfsdp_cli.checkpoint.finding import latest_complete
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS
from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID, MACHINE_UNFIT, MISMATCH, OK, RUN_FAILED, SIGNAL_BASE, STOPPED, Problem
from mfsdp_cli.launch.folder import Attempt
from mfsdp_cli.output import print_stderr
from mfsdp_cli.records import Record

TAIL_LINES = 15
TAIL_BYTES = 1 << 14
# torch.distributed.elastic prints a block with these two lines for each rank it saw fail; the root cause comes last
TABLE_ENTRY = re.compile(r"^\s+rank\s*: (\d+) .*\n\s+exitcode\s*: (-?\d+) ", re.MULTILINE)
# Its own report begins with this line; what a rank said before it is what counts
TORCHRUN_REPORT = re.compile(r"^E\d{4} [^\n]*failed \(exitcode: ", re.MULTILINE)
# A rank that dies so takes the others down, and they write failure files about lost connections: these come second
FATAL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
MORE_HOST_MEMORY = "fewer ranks or samplers a node, or more memory for the job"
# What a rank says when memory is used up -> (whose, the way out)
OUT_OF_MEMORY = {
    re.compile(r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"): (
        "GPU memory", "lower data.max_token_len_per_gpu (grpo: actor.ppo_max_token_len_per_gpu, rollout.gpu_memory_utilization), "
        "engine.recompute=full, more TP or more ranks"),
    re.compile(r"node running low on memory|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|^MemoryError"): (
        "host memory", MORE_HOST_MEMORY),
}


class Outcome(Record):
    """status      done, stopped (state is saved), interrupted (nothing to save), failed, killed
    checkpoint  last complete checkpoint of the run folder, None when there is none
    step, metrics  of the last step, as far as the ranks told
    message     one or two sentences about an end that was not the planned one
    log_tail    last lines of the log that tells most, `log`
    """

    exit_code: int
    status: str
    run_dir: Path
    attempt_dir: Path
    checkpoint: Path | None = None
    step: int | None = None
    total_steps: int | None = None
    metrics: dict = field(default_factory=dict)
    message: str = ""
    problems: list[Problem] = field(default_factory=list)
    log: Path | None = None
    log_tail: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        return {
            "ok": self.exit_code == OK, "exit_code": self.exit_code, "status": self.status, "run_dir": str(self.run_dir),
            "attempt_dir": str(self.attempt_dir), "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "step": self.step, "total_steps": self.total_steps, "metrics": self.metrics, "message": self.message,
            "problems": [p.to_dict() for p in self.problems], "log": None if self.log is None else str(self.log),
        }


def conclude(attempt: Attempt, returncode: int, stop_signal: int | None, forced: bool, num_oom_kills: int = 0) -> Outcome:
    """Judge an ended child.

    returncode     as subprocess has it: negative for a signal
    stop_signal    the first signal that asked us to stop, if any
    forced         we ended the processes ourselves, so their failures say nothing
    num_oom_kills  processes that the kernel killed meanwhile, in our cgroup, because memory was used up
    """
    checkpoint = latest_complete(attempt.run_dir / CHECKPOINTS)
    common = {"run_dir": attempt.run_dir, "attempt_dir": attempt.path, "checkpoint": checkpoint}
    if forced:
        return _stopped(common, stop_signal, "ended at once on request; steps after the last checkpoint are lost")
    dead_rank, code = _torchrun_table(attempt.log)
    if returncode < 0:
        return _died(attempt, common, None, returncode, num_oom_kills)
    if -code in FATAL_SIGNALS:
        return _died(attempt, common, dead_rank, code, num_oom_kills)
    if failures := _failures(attempt.path):
        return _failed(attempt, common, failures)
    result = _read_json(attempt.path / "result.json")
    if returncode != 0 and result is None:
        return _died(attempt, common, dead_rank, code or returncode, num_oom_kills)
    if result is None:
        return _without_result(attempt, common, stop_signal)
    common |= {"step": result.get("step"), "total_steps": result.get("total_steps"), "metrics": result.get("metrics") or {}}
    late = f"the ranks ended with exit code {returncode} after they had written their result" if returncode != 0 else ""
    if result.get("status") == "stopped":
        return _stopped(common, stop_signal, late)
    return Outcome(OK, "done", message=late, **common)


def _stopped(common: dict, stop_signal: int | None, message: str) -> Outcome:
    """75 when there is a checkpoint to continue from, else the shell's code for the signal."""
    if common["checkpoint"] is not None:
        return Outcome(STOPPED, "stopped", message=message, **common)
    code = SIGNAL_BASE + (stop_signal or signal.SIGTERM)
    return Outcome(code, "interrupted", message="stopped before a checkpoint was written", **common)


def _without_result(attempt: Attempt, common: dict, stop_signal: int | None) -> Outcome:
    """Exit code 0 and no result.json: right on every node but the first, where rank 0 writes it."""
    if attempt.node_rank > 0:
        return _stopped(common, stop_signal, "") if stop_signal else Outcome(OK, "done", **common)
    log, tail = _tail(attempt.log)
    return Outcome(RUN_FAILED, "failed", message="the ranks ended without an error and without a result", log=log, log_tail=tail, **common)


def _failed(attempt: Attempt, common: dict, failures: list[dict]) -> Outcome:
    """The earliest failure is the cause; the others mostly follow from it."""
    first = failures[0]
    name = first.get("name") or f"rank{first.get('rank')}"
    others = f" ({len(failures) - 1} more ranks failed after it)" if len(failures) > 1 else ""
    who = f"{re.sub(r'^rank(?=[0-9])', 'rank ', name)} failed{others}"
    message = f"{who}: {first.get('type', 'error')}: {first.get('message', '')}"
    _write_failure(attempt, {**first, "failed_ranks": [f.get("rank") for f in failures]})
    log, tail = _tail(attempt.path / f"{name}.log", attempt.log)
    problems = [Problem(**p) for p in first.get("problems") or []] + _memory_problems(f"{first.get('type')}: {first.get('message')}")
    if first.get("type") == "MfsdpError":  # mistakes of the user's, told one by one: no need of the traceback, nor of all of them on one line
        message, log, tail = f"{who}, for the reasons above", None, []
    return Outcome(first.get("exit_code") or RUN_FAILED, "failed", message=message, problems=problems, log=log, log_tail=tail, **common)


def _torchrun_table(log: Path) -> tuple[int | None, int]:
    """(rank, exit code) from torchrun's table, whose last entry is the first failure that it saw: that one if a fatal signal ended it,
    else a rank that one did end (the others then only report lost connections), else that one all the same. A rank that torchrun
    itself killed in the end shows a fatal signal too, which is why the order matters."""
    entries = [(int(rank), int(code)) for rank, code in TABLE_ENTRY.findall(log.read_text(encoding="utf-8", errors="replace"))]
    fatal = [entry for entry in entries[-1:] + entries if -entry[1] in FATAL_SIGNALS]
    return (fatal or entries[-1:] or [(None, 0)])[0]


def _memory_problems(text: str) -> list[Problem]:
    """The way out when a rank failed because memory was used up; its own words come with the failure."""
    return [Problem(whose, "used up", "a rank asked for more than there is", fix, code=RUN_FAILED)
            for pattern, (whose, fix) in OUT_OF_MEMORY.items() if pattern.search(text)]


def _died(attempt: Attempt, common: dict, rank: int | None, code: int, num_oom_kills: int) -> Outcome:
    """No rank could tell: a signal, or an end before our code ran. rank None: the process that we started."""
    who = attempt.program if rank is None else f"rank {rank}"
    log, tail = _tail(*([] if rank is None else [attempt.path / f"rank{rank}.log"]), attempt.log)
    if code < 0:
        exit_code, status, message = SIGNAL_BASE - code, "killed", f"{who} was killed by {signal_words(-code, num_oom_kills)}"
    else:
        ours = rank is not None and code in (CONFIG_INVALID, MACHINE_UNFIT, BAD_INPUT, MISMATCH)  # on a full disk there is no file
        exit_code = code if ours else RUN_FAILED
        status, message = "failed", f"{who} ended with exit code {code} and left no failure file"
    _write_failure(attempt, {"rank": rank, "type": status, "message": message, "exit_code": exit_code, "problems": []})
    return Outcome(exit_code, status, message=message, log=log, log_tail=tail, **common)


def signal_words(number: int, num_oom_kills: int = 0) -> str:
    """ 'signal 9 (SIGKILL)', with the reason where it is known, or the usual one where there is one."""
    certain = f"; the host ran out of memory: its kernel killed {num_oom_kills} of the processes here. Use {MORE_HOST_MEMORY}"
    likely = f"; most likely the host ran out of memory: dmesg tells. Then use {MORE_HOST_MEMORY}"
    reasons = {signal.SIGKILL: certain if num_oom_kills > 0 else likely,
               signal.SIGSEGV: "; a crash in native code", signal.SIGTERM: ", from outside mfsdp"}
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    return f"signal {number} ({name}){reasons.get(number, '')}"


def describe(outcome: Outcome) -> str:
    """An unplanned end for people: what happened, the last log lines, where the rest is."""
    lines = [outcome.message]
    if outcome.log_tail:
        lines += ["", f"  last lines of {outcome.log}:", *(f"    {line}" for line in outcome.log_tail)]
    return "\n".join([*lines, "", f"logs: {outcome.attempt_dir}"])


def _failures(folder: Path) -> list[dict]:
    found = [_read_json(path) for path in folder.glob("failure-*.json")]
    return sorted((f for f in found if f is not None), key=lambda f: f.get("time") or 0.0)


def _write_failure(attempt: Attempt, failure: dict) -> None:
    try:
        (attempt.path / "failure.json").write_text(json.dumps(failure, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:  # on a full disk: what it would say is printed in any case
        print_stderr(f"warning: {error}")


def _read_json(path: Path) -> dict | None:
    """None when the file is absent or was cut off by the death of its writer."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _tail(*logs: Path) -> tuple[Path | None, list[str]]:
    """The first of the logs that holds something, and its last lines."""
    for log in logs:
        if log.is_file() and log.stat().st_size:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
            said = TORCHRUN_REPORT.split(text)[0].strip() or text
            return log, said.splitlines()[-TAIL_LINES:]
    return None, []
