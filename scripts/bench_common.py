"""What the benchmarks of training share: the machine in words, contenders in processes of their own, model folders with random weights."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from shapes import SHAPES, write_config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed works too
PACKAGES = ("torch", "triton", "transformers", "megatron-core", "megatron-bridge", "transformer-engine", "liger-kernel", "trl", "vllm",
            "ray")
LEARNING_RATE = 1e-5  # of supervised steps


def machine() -> dict:
    """{"gpu", "date", "versions"} of what is measured; no process is started on the GPU for it."""
    return {"gpu": " + ".join(gpu_names()) or "none (CPU)", "date": datetime.date.today().isoformat(),
            "versions": {name: version for name in PACKAGES if (version := installed(name))}}


def gpu_names() -> list[str]:
    from mfsdp_cli.launch.host import list_gpus

    return [name for name, *_ in list_gpus(os.environ)[0]]


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine_words(found: dict) -> str:
    return f"{found['gpu']}, {found['date']}, " + ", ".join(f"{name} {version}" for name, version in found["versions"].items())


# --- words on the command line ---------------------------------------------------------------------------------------------


def choices_of(allowed):
    def parse(text: str) -> list[str]:
        if wrong := [name for name in text.split(",") if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: choose from {', '.join(allowed)}")
        return text.split(",")

    return parse


# --- processes ------------------------------------------------------------------------------------------------------------


def visible(count: int) -> dict[str, str]:
    """Variables of a process that sees so many of the GPUs that this one sees."""
    found = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if not (names := gpu_names()):
        return found | {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if len(names) < count:
        raise SystemExit(f"{count} GPUs are asked for, and {len(names)} are visible")
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return found | {"CUDA_VISIBLE_DEVICES": ",".join(numbers.split(",")[:count])}


def alone() -> dict[str, str]:
    """Those of a process with one GPU that is no rank of anything: accelerate would wrap the peers' models in DDP for one rank, and
    transformers' trainer in DataParallel for several GPUs."""
    return visible(1)


def one_rank(port: int) -> dict[str, str]:
    """Those of a process that is a group of one rank, as torchrun and `launch.command` would set them."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return visible(1) | place | {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def several_ranks(count: int) -> dict[str, str]:
    """Those of torchrun for `count` ranks, which get GPUs of their own."""
    return visible(count) | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def run_child(script: str, part: str, arguments: list[str], timeout_s: float, log: Path | None = None, ranks: int = 1, **environ: str) -> dict:
    """The row that `SCRIPT --part PART ARGUMENTS` prints (see `print_row`), or {"failed": reason}. Its own process, or those of `ranks`
    under torchrun: nothing that it leaves on the GPU, and none of its patches, reach another part. Once the row is there the process and
    all that it started are killed. stderr goes to `log`, if given."""
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "scripts" / script), "--part", part, *arguments]
    with open(log or os.devnull, "a") as sink:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink if log else None, text=True,
                                 env=os.environ | {"PYTHONPATH": python_path} | environ)
        late = threading.Event()
        limit = threading.Timer(timeout_s, lambda: (late.set(), kill_tree(child.pid)))
        limit.start()
        row = next((line for line in child.stdout if line.startswith('{"')), None)
        limit.cancel()
        if row is None:
            code = child.wait()
            return {"failed": f"took more than {timeout_s:g} s" if late.is_set() else f"ended with {code} and without a word"}
        kill_tree(child.pid)
        child.wait()
    return json.loads(row)


def print_row(part: Callable[[], dict]) -> None:
    """Call a part and print its result as one line of JSON; a failure becomes {"failed": reason}, its traceback goes to stderr. Of several
    ranks the first prints; another one's failure ends its process, and torchrun all."""
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        row = part()
    except Exception as error:
        if not is_first:
            raise
        traceback.print_exc()
        row = {"failed": "out of memory" if type(error).__name__ == "OutOfMemoryError" else f"{type(error).__name__}: {error}"[:300]}
    if is_first:
        print("\n" + json.dumps(row), flush=True)


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and to all that it started, whatever their sessions."""
    parents = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal():
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    for member in family:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue


# --- time -----------------------------------------------------------------------------------------------------------------


class Clock:
    """Steps that are issued back to back, as a training loop issues them: the GPU is waited for before the first and after the last,
    and the ends of the steps between are events of its stream."""

    def __init__(self, device):
        self.on_gpu = device.type == "cuda"

    def start(self) -> None:
        self._wait()
        self.began, self.marks = time.perf_counter(), [self._mark()]

    def step_ended(self) -> None:
        self.marks.append(self._mark())

    def stop(self) -> tuple[float, list[float]]:
        """(seconds of all steps, seconds of each)"""
        self._wait()
        seconds, pairs = time.perf_counter() - self.began, list(zip(self.marks, self.marks[1:]))
        return seconds, [a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairs]

    def _wait(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def _mark(self):
        if not self.on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class Timed:
    """tokens, each: of every timed step; seconds: of all of them together."""

    tokens: list[int]
    seconds: float
    each: list[float]
    loss: float

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.seconds


def timed(step, device, warmup: int, steps: int) -> Timed:
    """step() -> (tokens, loss as a number or a tensor, for which nothing waits)"""
    for _ in range(warmup):
        step()
    clock, tokens = Clock(device), []
    clock.start()
    for _ in range(steps):
        num_tokens, loss = step()
        clock.step_ended()
        tokens.append(num_tokens)
    return Timed(tokens, *clock.stop(), float(loss))


# --- models ---------------------------------------------------------------------------------------------------------------


@contextmanager
def config_folder(shape: str):
    """A model folder with config.json alone, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(write_config(folder, shape))


def write_model(folder: Path, shape: str) -> Path:
    """A folder of that shape with random bfloat16 weights and the small tokenizer of make_tiny_model."""
    import torch
    from make_tiny_model import make_tokenizer
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(min(2048, SHAPES[shape]["vocab_size"] - 9))
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = Qwen2Config(**SHAPES[shape], **ends, bos_token_id=None, max_position_embeddings=32768, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def matrix_parameters(shape: str) -> int:
    """Weights that take part in matrix products: the layers and one vocabulary matrix."""
    s = SHAPES[shape]
    h, kv = s["hidden_size"], s["num_key_value_heads"] * s["hidden_size"] // s["num_attention_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * s["intermediate_size"]
    return s["num_hidden_layers"] * layer + s["vocab_size"] * h


def share_of_peak(shape: str, tokens_per_s: float, tflops: float) -> float:
    """Model FLOP utilisation of training, 6 x parameters x tokens; attention's own products are not counted."""
    return 6 * matrix_parameters(shape) * tokens_per_s / (tflops * 1e12)


# --- data -----------------------------------------------------------------------------------------------------------------


def token_rows(shape: str, tokens: int, seq: int):
    """int64 [tokens // seq, seq], the same for all contenders."""
    import numpy as np

    return np.random.default_rng(0).integers(0, SHAPES[shape]["vocab_size"], (tokens // seq, seq))


def gsm8k_lengths(budget: int, seed: int) -> list[int]:
    """Tokens of conversations as GSM8K has them (log-normal; mean 210, 95 % below 340, the chat template included), as many as
    fit into `budget` in the order drawn."""
    import numpy as np

    drawn = np.random.default_rng(seed).lognormal(5.296, 0.32, size=budget // 64 + 1).clip(90, 620).astype(int)
    return drawn[: max(1, int(np.searchsorted(drawn.cumsum(), budget, side="right")))].tolist()
