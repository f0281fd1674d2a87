"""What surrounds a run, at random: the machine under `mfsdp doctor`, a reward function of the user's own, rows under --check-data.

As test_fuzz has settings and files: never a traceback, never a hang, a documented exit code, one JSON object with --json.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import fuzz_for_tests as fuzz
import pytest
from hypothesis import strategies as st
from inputs_for_tests import write_chats, write_model, write_prompts
from test_fuzz import dry_run, fuzzed, sound, story_of, write_samples  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model with a tokenizer that works, chats and prompts."""
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("base")
    write_model(folder / "model")
    make_tokenizer(480).save_pretrained(folder / "model")
    write_chats(folder / "chats.parquet", 64), write_prompts(folder / "prompts.parquet", 64)
    return folder


# ---------------------------------------------------------------- doctor

TABLES = ["0, GPU-11, 143771, 9.0, NVIDIA H200", "0, GPU-11, [N/A], [N/A], Strange", "1, GPU-2, nan, inf, X", "31000, 535.104.05", "-5, 5",
          "9" * 5000 + ", 1", "٣, GPU-1, ٣, ٣, ٣", ",,,,,,", "0, GPU-11, 1e999, -1, ", "4, 580", "4, x.y", "4, ",
          "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "No devices were found", "<html>", "\x00\x01"]
NUMBERS_OF_THE_KERNEL = ("/proc/meminfo", "/proc/driver/nvidia/version", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/memory.max",
                         "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "/sys/class/net/lo/flags")
MACHINE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MAX_CONNECTIONS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
                     "NCCL_P2P_DISABLE", "TORCH_DISTRIBUTED_DEBUG", "CUDA_LAUNCH_BLOCKING", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TERM",
                     "RAY_AUTH_TOKEN_PATH", "OMP_NUM_THREADS", "NCCL_DEBUG", "TMPDIR")
# no address that Ray itself would be asked about: that takes seconds
CLUSTERS = ("127.0.0.1:1", "[::1]:1", ":1", "127.0.0.1:99999", "127.0.0.1:" + "9" * 30, "é" * 300 + ":1", "\udcff:1", "x..y:1", "a b:1", "*:0")


def read_words_as(drawn: dict[str, object]):
    """The kernel's files, of which some are missing, cut short, or hold other words."""
    from mfsdp_cli.launch.host import read_words

    def read(path: str) -> list[str]:
        words = read_words(path)
        change = drawn.get(path)
        return words if change is None else words[:change] if isinstance(change, int) else change
    return read


@fuzzed(0.06)
def test_doctor(draw, base, here):
    """Under odd variables, a kernel that tells less, and every kind of nvidia-smi."""
    from mfsdp_cli.launch import host, machine

    program = here / "bin" / "nvidia-smi"
    lines = draw(st.lists(st.one_of(st.sampled_from(TABLES), st.text(max_size=20)), max_size=3))
    (here / "table").write_bytes(draw(st.one_of(st.just("\n".join(lines).encode("utf-8", "replace")), st.binary(max_size=20))))
    fuzz.write(program, f"#!/bin/sh\n/bin/cat {here}/table\nexit {draw(st.sampled_from([0, 0, 0, 9, 127]))}\n".encode())
    program.chmod(draw(st.sampled_from([0o755, 0o755, 0o644])))
    value = st.one_of(fuzz.INTEGERS.map(str), fuzz.TEXT, st.sampled_from(["0,1", "GPU-1", "MIG-1", "^lo", "=lo", "lo,eth0", "-1"])).map(fuzz.as_argument)
    environ = draw(st.dictionaries(st.sampled_from(MACHINE_VARIABLES), value, max_size=3))
    environ["PATH"] = draw(st.sampled_from([f"{program.parent}:{os.environ['PATH']}", str(program.parent), ""]))
    if draw(st.booleans()):
        environ["RAY_ADDRESS"] = draw(st.sampled_from(CLUSTERS))
    words = st.one_of(st.integers(0, 4), st.lists(st.sampled_from(["max", "0", "100000", "MemTotal:", "inactive_file", "x", "٣"]), max_size=3))
    drawn = draw(st.dictionaries(st.sampled_from(NUMBERS_OF_THE_KERNEL), words, max_size=2))
    folder = fuzz.as_argument(draw(st.one_of(st.just("runs"), fuzz.TEXT)))
    args = ["doctor", f"--output={folder}", *(["--nnodes", draw(fuzz.INTEGERS.map(str))] if draw(st.booleans()) else []),
            *(["--json"] if draw(st.booleans()) else [])]
    with pytest.MonkeyPatch.context() as patch:
        for module in (host, machine):
            patch.setattr(module, "read_words", read_words_as(drawn))
        outcome = fuzz.call(args, environ)
    return story_of(args, here / "table", environ=environ | {"kernel": drawn}), outcome


# ---------------------------------------------------------------- reward.function

HEAD = "def score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    "
SOURCES = [HEAD + body for body in (
    "return 1.0", "return None", "return float('nan')", "return '1'", "return {'acc': 1}", "return {'score': 1, 'pred': object()}", "return 10**400",
    "return [1]", "raise ValueError('no')", "raise SystemExit(0)", "import os; os._exit(7)", "import os; os.kill(os.getpid(), 11)",
    "while True: pass", "return score(1, 2, 3)", "print('x' * 10**6); return 1", "import sys; sys.stdout.close(); return 1",
    "import os; os.write(1, b'\\xff'); return 1", "yield 1", "class E(Exception):\n        __str__ = None\n    raise E", "raise KeyboardInterrupt",
)] + [
    "import sys\nsys.exit(0)\n" + HEAD + "return 1", "raise RuntimeError\n" + HEAD + "return 1", "while True: pass\n" + HEAD + "return 1",
    "import nowhere\n" + HEAD + "return 1", "from nowhere import *\n", "score = 5", "score = print", "score = lambda **k: 1", "class score: pass",
    "def score(): return 1", "def score(a, b, c, d, e): return 1", "def score(*args): return 1", "async def score(**k): return 1",
    "def score(data_source, solution_str, ground_truth, extra_info, /): return 1", "def score(", "", "\tx", "del score", "# -*- coding: nonsense -*-\n",
    "x = " + "(" * 1000, "x = " + "[" * 150 + "]" * 150, "\0", "x = '\\ud800'\n" + HEAD + "return 1", "import threading\n" + HEAD + "return 1",
    "if True:\n    def score(**k): return 1", "def f(): pass\nscore = f", HEAD + "return 1\nscore.__signature__ = 5",
]


@fuzzed(0.03)
def test_reward_functions(draw, base, here):
    """Names, places and files of a user's own scorer. Those that never end are given 3 s here."""
    from mfsdp_cli.rewards import custom

    text = draw(st.sampled_from(SOURCES))
    file = fuzz.write(here / draw(st.sampled_from(["score.py", "a b.py", "json.py", "é.py", "no_ending", ".py"])),
                      draw(st.one_of(st.just(text.encode()), st.just(text.encode()), st.just(text.encode()), fuzz.damaged(text.encode()))))
    place = draw(st.sampled_from([str(file)] * 6 + [str(here), "/dev/zero", "/dev/null", "~nobody/x.py", "score.py", "x" * 300 + ".py", ""]))
    name = fuzz.as_argument(draw(st.one_of(*[st.just("score")] * 4, st.sampled_from(["scor", "f", "os", "1", "score ", "__name__", ""]), fuzz.TEXT)))
    spec = f"{place}:{name}" if draw(st.integers(0, 9)) else fuzz.as_argument(draw(fuzz.TEXT))
    args = dry_run(draw, "grpo", [*sound(base, "grpo"), "reward.name=auto", f"--reward-fn={spec}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom, "check", partial(custom.check, timeout_s=3.0))
        outcome = fuzz.call(args)
    return story_of(args, file), outcome


# ---------------------------------------------------------------- --check-data


@st.composite
def rows_of(draw, kind: str):
    """Rows of which some are odd in what only a reader of rows can see."""
    text = st.one_of(st.none(), st.sampled_from(["1 + 1?", "#### 2", "", " ", "x" * 3000, "<|im_end|>", "\x00", "{{ 1 / 0 }}", "é" * 200, "\u2028"]))
    role = st.sampled_from(["user", "assistant", "system", "user", "assistant", "tool", "robot", "", None])
    message = st.one_of(st.none(), st.fixed_dictionaries({"role": role, "content": text}))
    chat = st.one_of(st.none(), st.lists(message, max_size=4), st.just([{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]))
    asked = st.one_of(chat, st.just([{"role": "user", "content": "1?"}]))
    rows = draw(st.integers(0, 6))
    if kind == "sft":
        return {"messages": draw(st.lists(chat, min_size=rows, max_size=rows))}
    gold = st.one_of(st.none(), st.fixed_dictionaries({"ground_truth": text}))
    return {"prompt": draw(st.lists(asked, min_size=rows, max_size=rows)),
            "data_source": draw(st.lists(st.sampled_from(["arithmetic", "openai/gsm8k", "", None]), min_size=rows, max_size=rows)),
            "reward_model": draw(st.lists(gold, min_size=rows, max_size=rows))}


def write_rows(path: Path, columns: dict[str, list]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    kinds = {"messages": chat, "prompt": chat, "data_source": pa.string(), "reward_model": pa.struct([("ground_truth", pa.string())])}
    pq.write_table(pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()}), path)
    return path


def in_this_process(command: list[str], what: str) -> int:
    """What launch.check_data starts, without the ten seconds that its imports take each time."""
    from mfsdp_cli.train import check_data

    before, sys.argv = sys.argv, command[2:]
    try:
        check_data.main()
    finally:
        sys.argv = before
    return 0


@fuzzed(0.02)
def test_check_data(draw, base, here):
    """Rows through the real tokenizer."""
    from mfsdp_cli.launch import check_data

    kind = draw(st.sampled_from(fuzz.KINDS))
    file = write_rows(here / "train.parquet", draw(rows_of(kind)))
    if draw(st.integers(0, 5)) == 5:
        shutil.copy(base / ("chats.parquet" if kind == "sft" else "prompts.parquet"), file)
        fuzz.write(file, draw(fuzz.damaged(file.read_bytes())))
    most = draw(st.sampled_from([[], ["data.train_max_samples=1"], ["data.truncation=left"], ["data.truncation=right"],
                                 ["data.max_length=12" if kind == "sft" else "data.max_prompt_length=12"],
                                 ["data.max_token_len_per_gpu=2"] if kind == "sft" else ["data.filter_overlong_prompts=False"]]))
    use = draw(st.sampled_from(["train", "train", "val"]))
    small = ["data.train_batch_size=1", *(["actor.ppo_mini_batch_size=1"] if kind == "grpo" else [])]
    args = dry_run(draw, kind, [*sound(base, kind), *small, f"data.{use}_files=[{file}]", *most, "--check-data"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_data, "run_child", in_this_process)
        outcome = fuzz.call(args)
    return story_of(args, file), outcome


def test_check_data_in_a_child_of_its_own(base):
    """As it is started in earnest, once."""
    for kind in fuzz.KINDS[:1]:
        outcome = fuzz.call([kind, *sound(base, kind), "--check-data", "--dry-run", "--json"])
        assert (outcome.code, outcome.fault) == (0, "") and outcome.data["data"]["splits"][0]["rows"] == 64, outcome
