"""Metrics of a run: metrics.jsonl always, TensorBoard and wandb when asked for, and the console's one line a step.

A record is a flat dict. Keys that the console knows: step, total_steps, loss, lr, grad_norm, tokens_per_s, memory_gib,
eta_s; a validation record has val_loss instead of loss. Everything else goes to the loggers as it is.

metrics.jsonl is only ever appended to. Each line carries "attempt": 1 for the first start of the run, one more for each
resume. A resumed attempt repeats the steps after its checkpoint; `read_metrics` gives each step once, as it last was.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
import uuid
from collections import deque
from pathlib import Path

from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, MfsdpError, Problem

METRICS = "metrics.jsonl"
NON_FINITE = "nonfinite"
_BOOKKEEPING = ("step", "total_steps", "attempt", "time")


class MetricsLog:
    """Writes records to RUN/metrics.jsonl and to the loggers asked for. On ranks other than the writer it does nothing.

    loggers      of trainer.logger; "console" and "file" need nothing here
    resume_step  step of the checkpoint this attempt continues from; 0 for a new run
    attempt      number of this attempt; None: one more than the last in the file
    notes        what was repaired at opening, for the console
    """

    def __init__(self, run_dir: str | Path, loggers: list[str], project: str, name: str, config: dict, is_writer: bool,
                 resume_step: int = 0, attempt: int | None = None):
        self.notes: list[str] = []
        self.is_writer = is_writer
        self._file = self._tensorboard = self._wandb = None
        if not is_writer:
            return
        run_dir = Path(run_dir)
        path = run_dir / METRICS
        self._repair(path)
        self.attempt = attempt if attempt is not None else _last_attempt(path) + 1
        self._file = open(path, "ab", buffering=0)
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter

            # events of steps that this attempt repeats are hidden, as in read_metrics
            purge_step = resume_step + 1 if resume_step else None
            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step, flush_secs=30)
        if "wandb" in loggers:
            import wandb

            self._wandb = wandb.init(project=project, name=name, id=_wandb_id(run_dir), resume="allow", config=config, dir=str(run_dir))
            # wandb's own step may not go back, and a resumed attempt does
            self._wandb.define_metric("*", step_metric="step")

    def log(self, record: dict) -> None:
        """Append one record; it is on its way to the disk when this returns. Values: numbers, strings, None, lists of these.

        JSON has no NaN and infinity: such a value becomes null and "nonfinite" lists its key. Raises MfsdpError when the disk is full."""
        if not self.is_writer:
            return
        assert "step" in record, record
        lost = [key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        line = {"attempt": self.attempt, "time": round(time.time(), 3)} | record | {key: None for key in lost}
        if lost:
            line[NON_FINITE] = lost
        try:
            data = (json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n").encode()
            if self._file.write(data) < len(data):  # the last bytes that there was room for; the next attempt cuts them off
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise MfsdpError(Problem(self._file.name, error.strerror, f"the metrics of step {record['step']} cannot be written",
                                     "make room there; the same command then goes on", code=MACHINE_UNFIT)) from error
        if self._tensorboard is not None:
            for key, value in record.items():
                if key not in _BOOKKEEPING and isinstance(value, (int, float)):
                    self._tensorboard.add_scalar(key, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(record)

    def sync(self) -> None:
        """What was logged is on the disk when this returns: before a checkpoint is, after which nobody would log it again."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        for sink, end in ((self._file, "close"), (self._tensorboard, "close"), (self._wandb, "finish")):
            if sink is not None:
                getattr(sink, end)()
        self._file = self._tensorboard = self._wandb = None
        self.is_writer = False

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _repair(self, path: Path) -> None:
        """Cut off a last line without its end: the process died while writing it."""
        if not path.is_file():
            return
        with open(path, "rb+") as file:
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                file.truncate(whole)
                self.notes.append(f"{path.name}: removed a half-written last line of {len(data) - whole} bytes")


def read_metrics(path: str | Path) -> list[dict]:
    """Records of a metrics.jsonl (or of its run folder), each step as the last attempt that reached it left it.

    From the first training step of an attempt on, the records of earlier attempts are dropped: they belong to a course
    that was abandoned. Training and validation records of one step are two records. A half-written last line, of a run
    that is writing or was killed, is ignored; any other line that is no JSON object raises MfsdpError with its number."""
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    kept: dict[tuple[int, bool], dict] = {}
    attempt = None
    for record in _lines(path):
        step, is_validation = record["step"], _is_validation(record)
        if record.get("attempt") != attempt and not is_validation:
            attempt = record.get("attempt")
            kept = {key: old for key, old in kept.items() if key[0] < step or old.get("attempt") == attempt}
        kept.pop((step, is_validation), None)  # so that the order is that of writing
        kept[step, is_validation] = record
    return list(kept.values())


def _lines(path: Path):
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
                record["step"]
            except (ValueError, KeyError, TypeError):
                raise MfsdpError(Problem(f"{path}:{number}", line.strip()[:60], "not a metrics record (a JSON object with a step)",
                                         "remove this line", code=BAD_INPUT)) from None
            yield record


def _last_attempt(path: Path) -> int:
    return max((record.get("attempt", 1) for record in _lines(path)), default=0) if path.is_file() else 0


def _is_validation(record: dict) -> bool:
    return "loss" not in record and any(key.startswith("val_") for key in record)


def _wandb_id(run_dir: Path) -> str:
    """One id for the life of the run folder, so that a resume continues the same wandb run."""
    path = run_dir / "wandb-id"
    if not path.is_file():
        part = path.with_suffix(".part")
        part.write_text(uuid.uuid4().hex[:16])
        os.replace(part, path)
    return path.read_text().strip()


# ---------------------------------------------------------------- console

def step_line(record: dict) -> str:
    """"step 12/100 loss 0.4123 lr 1.0e-05 grad_norm 0.91 tok/s 18.2k mem 61.3GiB eta 1h12m"; what the record lacks is left out."""
    formats = {
        "loss": lambda v: f"loss {v:.4f}", "val_loss": lambda v: f"val_loss {v:.4f}", "lr": lambda v: f"lr {v:.1e}",
        "grad_norm": lambda v: f"grad_norm {v:.2f}", "tokens_per_s": lambda v: f"tok/s {count_words(v)}",
        "memory_gib": lambda v: f"mem {v:.1f}GiB", "eta_s": lambda v: f"eta {duration_words(v)}",
    }
    parts = [f"step {record['step']}/{record['total_steps']}"]
    return " ".join(parts + [form(record[key]) for key, form in formats.items() if record.get(key) is not None])


def grpo_line(record: dict) -> str:
    return (f"step {record['step']}/{record['total_steps']} reward {record['reward']:.3f} pass {record['pass_rate']:.3f} loss {record['loss']:.4f} "
            f"kl {record.get('kl', 0.0):.4f} entropy {record['entropy']:.3f} len {record['response_length']:.0f} trunc {record['truncated_share']:.2f} "
            f"clip {record['clip_low_share'] + record['clip_high_share']:.3f} mismatch {record['mismatch/abs']:.1e} grad_norm {record['grad_norm']:.2f} tok/s {count_words(record['tokens_per_s'])} "
            f"rollout {record['rollout_s']:.1f}s update {record['update_s']:.1f}s eta {duration_words(record['eta_s'])}")


def count_words(count: float) -> str:
    """950 -> "950", 18240 -> "18.2k", 1234567 -> "1.2M"."""
    if count < 999.5:
        return f"{count:.0f}"
    return f"{count / 1e3:.1f}k" if count < 999_950 else f"{count / 1e6:.1f}M"


def duration_words(seconds: float) -> str:
    """45 -> "45s", 725 -> "12m05s", 4320 -> "1h12m", 183600 -> "2d03h"."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


class EtaMeter:
    """Throughput over the last `window` steps, and the time left.

    The time left counts what lies between the steps too (saving, validating), by its share of the time since the first
    step; the steps themselves by the window, so that slow first steps are soon forgotten."""

    def __init__(self, total_steps: int, window: int = 20, clock=time.monotonic):
        self.total_steps = total_steps
        self.clock = clock
        self._window: deque[tuple[int, float]] = deque(maxlen=window)
        self._num_steps = 0
        self._busy_s = 0.0
        self._start_s: float | None = None

    def add(self, step: int, num_tokens: int, seconds: float) -> dict:
        """Count a finished step of `num_tokens` over all ranks that took `seconds`; {"tokens_per_s", "eta_s"} for the record."""
        now = self.clock()
        if self._start_s is None:
            self._start_s = now - seconds
        self._window.append((num_tokens, seconds))
        self._num_steps += 1
        self._busy_s += seconds
        window_s = sum(s for _, s in self._window)
        pause_s = max(0.0, now - self._start_s - self._busy_s) / self._num_steps
        return {
            "tokens_per_s": sum(n for n, _ in self._window) / max(window_s, 1e-9),
            "eta_s": (self.total_steps - step) * (window_s / len(self._window) + pause_s),
        }
