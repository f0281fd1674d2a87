"""Random settings, files and folders through the real command line: never a traceback, never a hang, a documented exit code, and with
--json one object on stdout.

A few hundred examples, the same each time. MFSDP_FUZZ=10000 draws so many, shared out among the tests, MFSDP_FUZZ_SEED=7 others; then a
fault does not end a test: each is told once, with its shortest example, and the exit codes are counted.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import fuzz_for_tests as fuzz
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from inputs_for_tests import TINY_QWEN2, write_chats, write_checkpoint, write_model, write_prompts

WANTED = int(os.environ.get("MFSDP_FUZZ", 0))
SEED = os.environ.get("MFSDP_FUZZ_SEED")
USUAL = 320  # examples of a plain run of the tests


def fuzzed(share: float, **strategies):
    """Run the function below on its share of the examples. It draws what it likes and returns (story, outcome)."""
    def decorate(body):
        def test(base, tmp_path, monkeypatch, capsys):
            harvest, here = fuzz.Harvest(), Path(tempfile.mkdtemp(dir=tmp_path))
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            monkeypatch.setenv("HOME", str(base)), monkeypatch.setenv("HF_HUB_OFFLINE", "1"), monkeypatch.chdir(tmp_path)

            def run(data):
                shutil.rmtree(here), here.mkdir()
                story, outcome = body(data.draw, base, here)
                harvest.add(outcome, story)
                if not WANTED:
                    assert not outcome.fault, f"{outcome.fault}\n{story}\n{outcome.err.decode('utf-8', 'replace')[-3000:]}"

            count = max(1, round((WANTED or USUAL) * share))
            wrapped = settings(max_examples=count, derandomize=SEED is None, database=None, deadline=None,
                               suppress_health_check=list(HealthCheck), print_blob=False)(given(st.data())(run))
            (seed(int(SEED))(wrapped) if SEED is not None else wrapped)()
            if WANTED:
                with capsys.disabled():
                    print(f"\n{test.__name__}: {sum(harvest.codes.values())} examples, exit codes {dict(harvest.codes)}", *harvest.faults)
            assert not harvest.faults, "\n\n".join(f"== {fault}\n{story}" for fault, story in harvest.faults.items())
        test.__name__ = body.__name__
        return test
    return decorate


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Inputs that pass every check, to be damaged: a model, chats, prompts, a checkpoint, samples."""
    folder = tmp_path_factory.mktemp("base")
    write_model(folder / "model")
    write_chats(folder / "chats.parquet", 64), write_prompts(folder / "prompts.parquet", 64)
    run = folder / "run"
    write_checkpoint(run, 2)
    code = fuzz.call(["config", "show", *sound(folder, "sft")])
    assert code.code == 0 and not code.fault, code
    (run / "config.yaml").write_bytes(code.out)
    (run / "lock").write_text("pid 1 on host since 2026-01-01 00:00:00\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (run / "attempts" / "001").mkdir(parents=True)
    write_samples(folder / "samples.parquet")
    return folder


def write_samples(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"step": 1, "row": i, "group": 0, "index": i, "prompt": "1 + 1?", "response": f"{i}", "reward": float(i), "status": "ok",
             "parsed": str(i),
             "ground_truth": "2", "advantage": 0.5, "num_tokens": 3, "is_truncated": False} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def sound(base: Path, kind: str) -> list[str]:
    """Settings that pass."""
    data = base / ("chats.parquet" if kind == "sft" else "prompts.parquet")
    small = ["rollout.name=hf", "reward.name=gsm8k"] if kind == "grpo" else []
    return [f"model.path={base / 'model'}", f"data.train_files=[{data}]", "engine.device=cpu", "trainer.total_training_steps=2",
            f"trainer.output_dir={base / 'runs'}", *small]


def story_of(args, *files: Path, environ=None) -> str:
    """What to do to see it again."""
    shown = [f"{path.name}: {path.read_bytes()[:3000]!r}" for path in files if path.is_file()]
    return "\n".join([" ".join(map(ascii, args)), *([f"environ {environ!r}"] if environ else []), *shown])


def dry_run(draw, kind: str, args: list[str]) -> list[str]:
    return [kind, *args, "--dry-run", *(["--json"] if draw(st.booleans()) else [])]


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_sound_inputs_pass(base, kind):
    outcome = fuzz.call([kind, *sound(base, kind), "--dry-run", "--json"])
    assert (outcome.code, outcome.fault) == (0, ""), outcome.out


@fuzzed(0.3)
def test_settings(draw, base, here):
    """Arguments and named options over settings that pass, or over none."""
    kind = draw(st.sampled_from(fuzz.KINDS))
    args = (sound(base, kind) if draw(st.integers(0, 4)) else []) + draw(fuzz.assignments(kind))
    for name in draw(st.lists(st.sampled_from(["tp", "pp", "ep", "cp", "nproc", "nnodes", "model", "output", "resume", "train-files",
                                               "config", "preset",
                                               "ray-address", "rollout", "node-rank", "rdzv-endpoint"]), max_size=2)):
        args += [f"--{name}", fuzz.as_argument(draw(st.one_of(fuzz.INTEGERS.map(str), fuzz.TEXT)))]
    if draw(st.integers(0, 12)) == 12:
        args += ["--suggest", "--gpus", draw(st.sampled_from(["8", "1", "1024", "0", "x"])), "--gpu-memory",
                 fuzz.as_argument(draw(st.one_of(st.just("80GiB"), fuzz.TEXT)))]
    args = dry_run(draw, kind, args)
    return story_of(args), fuzz.call(args)


@fuzzed(0.15)
def test_yaml_files(draw, base, here):
    kind = draw(st.sampled_from(fuzz.KINDS))
    file = fuzz.write(here / "run.yaml", draw(fuzz.yaml_bytes(kind)))
    use = draw(st.sampled_from(["config", "preset", "show", "diff", "kind"]))
    given_args = sound(base, kind) if draw(st.booleans()) else []
    if use == "show":
        args = ["config", "show", "--config", str(file), *(["--origin"] if draw(st.booleans()) else []),
                *(["--json"] if draw(st.booleans()) else [])]
    elif use == "diff":
        args = ["config", "diff", str(file), str(base / "run"), "--json"]
    elif use == "kind":
        args = ["config", "show", "--preset", str(file), "--kind", kind]
    else:
        args = dry_run(draw, kind, [*given_args, f"--{use}", str(file)])
    return story_of(args, file), fuzz.call(args)


@st.composite
def tables(draw):
    """Bytes of a parquet file whose columns have the names that are read, and other types, no rows, or nulls at any depth."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ["messages", "prompt", "data_source", "reward_model", "extra_info", "question", "answer", "reward", "response"]
    text = st.one_of(st.none(), st.sampled_from(["user", "assistant", "1 + 1?", "#### 2", "", "arithmetic", "\x00", "9" * 5000]))
    message = st.one_of(st.none(), st.fixed_dictionaries({"role": text, "content": text}))
    makers = [(pa.string(), text), (pa.large_string(), text), (pa.int64(), st.one_of(st.none(), st.integers(-2**63, 2**63 - 1))),
              (pa.float64(), st.floats()), (pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
                                            st.one_of(st.none(), st.lists(message, max_size=3))),
              (pa.struct([("ground_truth", pa.string()), ("style", pa.string())]),
               st.one_of(st.none(), st.fixed_dictionaries({"ground_truth": text}))),
              (pa.struct([("ground_truth", pa.list_(pa.int32()))]), st.none()),
              (pa.list_(pa.list_(pa.string())), st.lists(st.none(), max_size=2)),
              (pa.binary(), st.one_of(st.none(), st.binary(max_size=4))), (pa.bool_(), st.booleans()), (pa.null(), st.none()),
              (pa.map_(pa.string(), pa.int32()), st.none()), (pa.decimal128(38, 2), st.none()), (pa.timestamp("ns"), st.none()),
              (pa.dictionary(pa.int8(), pa.string()), text)]
    rows, columns = draw(st.sampled_from([0, 1, 2, 9])), {}
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=5, unique=True)):
        kind, values = draw(st.sampled_from(makers))
        columns[name] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return out.getvalue().to_pybytes()


def parquet_bytes(*files: Path):
    whole = [path.read_bytes() for path in files]
    return st.one_of(*(fuzz.damaged(data) for data in whole), tables(), tables().flatmap(fuzz.damaged), st.binary(max_size=40))


@fuzzed(0.15)
def test_parquet_files(draw, base, here):
    """As training and validation data, and as what prep-data rewrites."""
    file = fuzz.write(here / "train.parquet", draw(parquet_bytes(base / "chats.parquet", base / "prompts.parquet")))
    use = draw(st.sampled_from(["sft", "grpo", "sft", "grpo", "prep"]))
    if use == "prep":
        args = ["prep-data", draw(st.sampled_from(["messages", "gsm8k", "math"])), "-i", str(file), "-o", str(here / "out"), "--for",
                draw(st.sampled_from(["sft", "rl"])),
                *(["--skip-bad"] if draw(st.booleans()) else []), *(["--test-rows", "1"] if draw(st.booleans()) else []),
                *(["--json"] if draw(st.booleans()) else [])]
    else:
        column = draw(st.sampled_from(["messages", "prompt", "data_source", "question"]))
        args = [*sound(base, use), f"data.{draw(st.sampled_from(['train', 'val']))}_files=[{file}]",
                f"data.{'messages' if use == 'sft' else 'prompt'}_key={column}",
                *(["reward.name=auto"] if use == "grpo" and draw(st.booleans()) else [])]
        args = dry_run(draw, use, args)
    return story_of(args, file), fuzz.call(args)


@fuzzed(0.15)
def test_model_folders(draw, base, here):
    """config.json, weight headers and index, tokenizer files of a model."""
    model = here / "model"
    shutil.copytree(base / "model", model)
    which = draw(st.sampled_from(["config.json"] * 4 + ["model.safetensors"] * 2 + ["model.safetensors.index.json",
                                                                                    "tokenizer_config.json"]))
    header = {"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}
    if which == "config.json":
        known = draw(st.sampled_from([{}, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                           "architectures": ["Qwen3MoeForCausalLM"]},
                                      {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "architectures": ["LlamaForCausalLM"]},
                                      {"head_dim": 16, "layer_types": ["full_attention"], "rope_parameters": {"rope_type": "default"},
                                       "quantization_config": {"quant_method": "fp8"}}]))
        data = draw(fuzz.json_bytes(TINY_QWEN2 | known))
    elif which == "model.safetensors":
        text = draw(st.one_of(fuzz.json_bytes(header), st.just(json.dumps(header).encode())))
        length = draw(st.sampled_from([len(text), len(text) + 1, 0, 2**63, 2**64 - 1]))
        data = length.to_bytes(8, "little") + text + bytes(draw(st.sampled_from([16, 0, 15])))
    elif which == "tokenizer_config.json":
        data = draw(fuzz.json_bytes({"chat_template": "{{ messages }}"}))
    else:
        data = draw(fuzz.json_bytes({"metadata": {"total_size": 16}, "weight_map": {"model.norm.weight": "model.safetensors"}}))
    file = fuzz.write(model / which, data)
    kind = draw(st.sampled_from(fuzz.KINDS))
    split = draw(st.lists(st.sampled_from(["engine.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4",
                                           "engine.expert_model_parallel_size=2", "engine.device=cuda",
                                           "rollout.name=vllm" if kind == "grpo" else "optim.lr=1",
                                           "engine.override_transformer_config={moe_aux_loss_coeff: 0.1}"]), max_size=3))
    use = draw(st.sampled_from(["run", "run", "run", "suggest", "inspect", "reference"]))
    if use == "inspect":
        args = ["ckpt", "inspect", str(model), "--tensors", "*", *(["--json"] if draw(st.booleans()) else [])]
    elif use == "suggest":
        args = [kind, *sound(base, kind), f"model.path={model}", "engine.device=cuda", "--suggest", "--gpus", "8", "--gpu-memory", "80GiB",
                "--json"]
    else:
        key = "ref.path" if use == "reference" and kind == "grpo" else "model.path"
        args = dry_run(draw, kind, [*sound(base, kind), f"{key}={model}", *split])
    return story_of(args, file), fuzz.call(args)


VARIABLES = ("NPROC", "TP", "PP", "EP", "GEN_TP", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "HF_HOME",
             "HF_HUB_CACHE", "HF_HUB_OFFLINE",
             "XDG_CACHE_HOME", "HOME", "TMPDIR", "PATH", "RAY_ADDRESS", "WANDB_API_KEY", "WANDB_MODE", "TERM", "COLUMNS", "LINES",
             "NO_COLOR", "FORCE_COLOR", "PYTORCH_CUDA_ALLOC_CONF",
             "NCCL_ALGO", "NVTE_FLASH_ATTN", "RAY_AUTH_TOKEN_PATH", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_JOB_ID",
             "VLLM_USE_V1", "LANG", "PYTHONPATH")


@fuzzed(0.07)
def test_environment(draw, base, here):
    kind = draw(st.sampled_from(fuzz.KINDS))
    value = st.one_of(fuzz.INTEGERS.map(str), fuzz.TEXT).map(fuzz.as_argument)
    environ = draw(st.dictionaries(st.sampled_from(VARIABLES), value, min_size=1, max_size=4))
    args = dry_run(draw, kind, sound(base, kind) + (["model.path=some/model", "engine.device=auto"] if draw(st.booleans()) else []))
    return story_of(args, environ=environ), fuzz.call(args, environ)


def manifest_of(base: Path) -> dict:
    return json.loads((base / "run" / "checkpoints" / "step_000002" / "manifest.json").read_text())


@fuzzed(0.1)
def test_run_folders(draw, base, here):
    """Manifest, settings, lock, pointer, metrics of an earlier run, and its names; resumed, listed, inspected, compared, exported,
    started from."""
    run = here / "run"
    shutil.copytree(base / "run", run)
    step = run / "checkpoints" / "step_000002"
    file = run / draw(st.sampled_from(["config.yaml", "lock", "metrics.jsonl", "checkpoints/latest", "origin.json", "attempts/002",
                                       "checkpoints/step_000003/manifest.json"]
                                      + ["checkpoints/step_000002/" + n for n in ["manifest.json"] * 4 + [
                                          "trainer.json", "source_index.json", "dist_ckpt/.metadata", "huggingface/config.json"]]))
    if file.name == "manifest.json":
        data = draw(fuzz.json_bytes(manifest_of(base)))
    elif file.name == "config.yaml":
        data = draw(st.one_of(fuzz.damaged(file.read_bytes()), fuzz.yaml_bytes("sft")))
    elif file.name == "config.json":
        data = draw(fuzz.json_bytes(TINY_QWEN2))
    else:
        data = draw(st.one_of(fuzz.damaged(file.read_bytes() if file.is_file() else b"step_000002\n"), st.binary(max_size=30)))
    fuzz.write(file, data)
    if file.parent == step and draw(st.booleans()):  # so that sizes agree, and the content is what is judged
        kept = manifest_of(base)
        kept["files"] = {name: {"bytes": (step / name).stat().st_size, "crc32": entry["crc32"]} for name, entry in kept["files"].items()}
        if file.name != "manifest.json":
            fuzz.write(step / "manifest.json", json.dumps(kept).encode())
    place = draw(st.sampled_from([run, run / "checkpoints", step]))
    use = draw(st.sampled_from(["resume", "resume", "list", "inspect", "compare", "export", "model", "path", "diff", "grpo"]))
    more = ["--json"] if draw(st.booleans()) else []
    args = {
        "inspect": ["ckpt", "inspect", str(place), "--tensors", "*", *(["--verify"] if draw(st.booleans()) else []), *more],
        "list": ["ckpt", "list", str(place), *(["--best"] if draw(st.booleans()) else []), *more],
        "compare": ["ckpt", "diff", str(place), str(base / "run"), *more],
        "export": ["ckpt", "export-hf", str(place), "-o", str(here / "out"), *more],
        "diff": ["config", "diff", str(run), str(base / "run"), *more],
    }.get(use) or dry_run(draw, "grpo" if use == "grpo" else "sft", [*sound(base, "grpo" if use == "grpo" else "sft"), *{
        "model": [f"model.path={place}"], "path": ["--resume", str(place)]}.get(use, [f"trainer.output_dir={run}"])])
    return story_of(args, file), fuzz.call(args)


@fuzzed(0.05)
def test_samples_and_rows(draw, base, here):
    """What GRPO kept, and what prep-data reads."""
    use = draw(st.sampled_from(["samples", "json", "jsonl"]))
    more = ["--json"] if draw(st.booleans()) else []
    if use == "samples":
        name = draw(st.sampled_from(["step_000001", "step_1", "val_step_000001", "step_" + "9" * 50, "step_x", "step_١"]))
        file = fuzz.write(here / "samples" / f"{name}.parquet",
                          draw(st.one_of(fuzz.damaged((base / "samples.parquet").read_bytes()), parquet_bytes(base / "samples.parquet"),
                                         samples())))
        args = ["samples", str(here), *(["--val"] if draw(st.booleans()) else []),
                *(["--step", draw(fuzz.INTEGERS.map(str))] if draw(st.booleans()) else []), *more]
    else:
        row = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}], "question": "1?",
               "answer": "x #### 2", "problem": "p", "solution": "\\boxed{2}"}
        file = fuzz.write(here / f"data.{use}", draw(st.one_of(fuzz.json_bytes(row), fuzz.json_bytes([row]))))
        args = ["prep-data", draw(st.sampled_from(["messages", "gsm8k", "math"])), "-i", str(file), "-o", str(here / "out"), "--for",
                draw(st.sampled_from(["sft", "rl"])),
                *(["--skip-bad"] if draw(st.booleans()) else []), *more]
    return story_of(args, file), fuzz.call(args)


@st.composite
def samples(draw):
    """Samples with nulls, NaN, or other types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mfsdp_cli.samples import COLUMNS

    rows, columns = draw(st.integers(0, 3)), {}
    values = {"number": st.one_of(st.none(), st.integers(-5, 2**40)), "float": st.one_of(st.none(), st.floats()),
              "text": st.one_of(st.none(), st.text(max_size=900)), "bool": st.booleans()}
    kinds = {"number": pa.int64(), "float": pa.float64(), "text": pa.string(), "bool": pa.bool_()}
    usual = {"reward": "float", "advantage": "float",
             "is_truncated": "bool"} | {name: "text" for name in ("prompt", "response", "status", "parsed", "ground_truth")}
    for name in COLUMNS:
        kind = usual.get(name, "number") if draw(st.integers(0, 9)) else draw(st.sampled_from(list(kinds)))
        columns[name] = pa.array(draw(st.lists(values[kind], min_size=rows, max_size=rows)), kinds[kind])
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return out.getvalue().to_pybytes()


VERL_SCRIPT = b"""#!/usr/bin/env bash
set -x
export CUDA_DEVICE_MAX_CONNECTIONS=1
MODEL=${MODEL:-Qwen/Qwen2.5-7B}
ARGS=(actor_rollout_ref.model.path=$MODEL "data.train_batch_size=$((8 * 4))")
python3 -m verl.trainer.main_ppo --config-name ppo ${ARGS[@]} actor_rollout_ref.rollout.n=8 trainer.nnodes=${NNODES:-1} "$@"
"""


@fuzzed(0.05)
def test_other_commands(draw, base, here):
    use = draw(st.sampled_from(["from-verl", "from-verl", "from-verl", "schema", "rules", "show", "words"]))
    word = fuzz.TEXT.map(fuzz.as_argument)
    more = ["--json"] if draw(st.booleans()) else []
    if use == "from-verl":
        pieces = st.sampled_from(["${x:-${x:-", "$((1/0))", "$((2**99999))", "$((9" + "9" * 5000 + "))", "{a,b}" * 12, "`ls`", "$(cat",
                                  "<<E\n", "for i in 1 2; do", "\\\n", "'", '"', "a[1", "((", "${#a[@]}", "${a//x/y}", "\xff", "#", "if [",
                                  "&& ||"])
        lines = draw(st.lists(st.one_of(pieces, st.text(max_size=15)), max_size=4))
        text = draw(st.one_of(fuzz.damaged(VERL_SCRIPT), st.just(VERL_SCRIPT + "\n".join(lines).encode("utf-8", "replace")),
                              st.just("\n".join(lines).encode("utf-8", "replace") + VERL_SCRIPT)))
        file = fuzz.write(here / "run.sh", text)
        args = ["config", "from-verl", str(file), *draw(st.lists(word.filter(lambda w: not w.startswith("-")), max_size=2)),
                *(["--var", draw(word)] if draw(st.booleans()) else []), *(["-o", str(here / "out.yaml")] if draw(st.booleans()) else []),
                *more]
        return story_of(args, file), fuzz.call(args)
    args = {"schema": ["config", "schema", "--kind", draw(st.one_of(st.sampled_from(fuzz.KINDS), word)), *more],
            "rules": ["rules", draw(st.one_of(word, st.sampled_from(["tp-divides-model", "lr-peak"]))), *more],
            "show": ["config", "show", *draw(fuzz.assignments(draw(st.sampled_from(fuzz.KINDS)))), *more],
            "words": [draw(st.sampled_from(["sft", "grpo", "ckpt", "config", "samples", "prep-data", "nonsense"])),
                      *draw(st.lists(word, max_size=3)), "--dry-run", *more]}[use]
    return story_of(args), fuzz.call(args)
