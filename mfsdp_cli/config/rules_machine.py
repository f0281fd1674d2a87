"""Rules on the machine: GPUs, environment, packages, the model folder and the data files. See `rules`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mfsdp_cli.config.rules_model import uses_cuda
from mfsdp_cli.config.rules_rollout import joins_cluster, sampler_gpus
from mfsdp_cli.config.values import kind_of, nearest, validates_only
from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, Problem

KNOWN_GOOD = {"torch": "2.11.0", "megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "transformers": "5.12.1"}
TRANSFORMERS = ((5, 8, 0), (5, 12, 1))  # range that Bridge 0.6.2 declares
KNOWN_GOOD_RAY = {"ray": "2.60.0"}
GOLD = "reward_model.ground_truth"
OPTIONAL = ("extra_info",)


# --- GPUs and environment -------------------------------------------------------------------------------------------


def gpus(s, f) -> Iterator[Problem]:
    ranks, more = s.trainer.n_gpus_per_node, sampler_gpus(s)
    if s.engine.device == "cuda" and f.num_gpus == 0:
        yield Problem(
            "engine.device", "cuda", "nvidia-smi shows no GPU, or CUDA_VISIBLE_DEVICES hides them all",
            "engine.device=cpu, or run where there are GPUs", code=MACHINE_UNFIT,
        )
    elif uses_cuda(s, f) and not joins_cluster(s) and ranks + more > f.num_gpus:
        hidden = f" (CUDA_VISIBLE_DEVICES={f.environ['CUDA_VISIBLE_DEVICES']})" if f.environ.get("CUDA_VISIBLE_DEVICES") else ""
        samplers = f", the samplers {more} more" if more else ""
        why = f"{ranks} ranks need a GPU each{samplers}, and there are {f.num_gpus}{hidden}"
        fix = "rollout.colocate=True, or fewer ranks" if more else f"--nproc {f.num_gpus}, with a TP that divides it"
        yield Problem("trainer.n_gpus_per_node", str(ranks), why, fix, code=MACHINE_UNFIT)
    if not uses_cuda(s, f) and ranks > 4 * f.num_cpus:
        yield Problem(
            "trainer.n_gpus_per_node", str(ranks), f"{ranks} processes on {f.num_cpus} cores will be very slow",
            f"--nproc {max(1, f.num_cpus)}", level="warning",
        )
    if not uses_cuda(s, f) and s.engine.dtype == "bfloat16":
        yield Problem("engine.dtype", "bfloat16", "bfloat16 is slow on CPU", "engine.dtype=float32", level="note")


def max_connections(s, f) -> Iterator[Problem]:
    value = f.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value is not None and value.strip() == "1":
        why = "Megatron-FSDP needs parallel hardware queues; with 1 its gathers and reductions wait for the compute"
        yield Problem("CUDA_DEVICE_MAX_CONNECTIONS", "1", why, "set it to 8, or unset it", "environment")
    elif value is not None and not (value.strip().isdecimal() and int(value) > 1):
        yield Problem("CUDA_DEVICE_MAX_CONNECTIONS", value, "not an integer above 1", "set it to 8, or unset it", "environment")
    if "CUDA_MAX_CONNECTIONS" in f.environ:
        yield Problem(
            "CUDA_MAX_CONNECTIONS", f.environ["CUDA_MAX_CONNECTIONS"], "CUDA does not know this variable",
            "its name is CUDA_DEVICE_MAX_CONNECTIONS", "environment", level="warning",
        )


# --- packages -------------------------------------------------------------------------------------------------------


def packages(s, f) -> Iterator[Problem]:
    for name, good in (KNOWN_GOOD | (KNOWN_GOOD_RAY if kind_of(s) == "grpo" else {})).items():
        version = f.versions.get(name)
        if version is None:
            yield Problem(
                name, "not installed", "training needs it", f"pip install {name}=={good}, or scripts/install.sh", "environment",
                MACHINE_UNFIT,
            )
            continue
        numbers = tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])
        right = TRANSFORMERS[0] <= numbers <= TRANSFORMERS[1] if name == "transformers" else version.partition("+")[0] == good
        if not right:
            tried = "5.8 to 5.12.1" if name == "transformers" else good
            yield Problem(name, version, f"tried with {tried} only", f"pip install {name}=={good}", "environment", level="warning")


def loggers(s, f) -> Iterator[Problem]:
    wanted = s.trainer.logger
    for name in ("wandb", "tensorboard"):
        if name in wanted and f.versions.get(name) is None:
            yield Problem(
                "trainer.logger", name, f"the package {name} is not installed",
                f"pip install {name}, or leave it out: metrics.jsonl is always written", code=MACHINE_UNFIT,
            )
    if "wandb" in wanted and f.versions.get("wandb") is not None and not _wandb_ready(f.environ):
        why = "there is no WANDB_API_KEY, no login in ~/.netrc, and WANDB_MODE is not offline"
        yield Problem("trainer.logger", "wandb", why, "wandb login, or WANDB_MODE=offline, or leave it out", code=MACHINE_UNFIT)


def _wandb_ready(environ) -> bool:
    """Whether wandb can start without asking. Besides the environment this reads netrc, as `wandb login` writes it."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun"):
        return True
    host = environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0].partition(":")[0]
    file = Path(environ.get("NETRC") or os.path.join(environ.get("HOME", ""), ".netrc"))
    try:
        return re.search(rf"\bmachine\s+{re.escape(host)}\b", file.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False


# --- the model folder -----------------------------------------------------------------------------------------------


def model_folder(s, f) -> Iterator[Problem]:
    path = s.model.path
    if not path:
        return
    if f.model_error:
        yield Problem(
            "model.path", path, f.model_error, "give a folder with config.json, tokenizer and safetensors, or a hub id", code=BAD_INPUT,
        )
    elif f.model_path is None:
        why = "it is not in the local Hugging Face cache: it will be downloaded, and its shape is not checked before"
        yield Problem("model.path", path, why, f"hf download {path}", level="note")
    else:
        if not f.has_tokenizer:
            yield Problem(
                "model.path", path, "the folder has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)",
                "copy the tokenizer files of the model into it", code=BAD_INPUT,
            )
        if not f.model_weight_files:
            yield Problem("model.path", path, "the folder has no weight files (*.safetensors)", "download the model whole", code=BAD_INPUT)
        elif not any(name.endswith(".safetensors") for name in f.model_weight_files):
            yield Problem(
                "model.path", path, f"weights are read from safetensors only, and the folder has {f.model_weight_files[0]}",
                "save the model again with save_pretrained(..., safe_serialization=True)", code=BAD_INPUT,
            )


# --- the data files -------------------------------------------------------------------------------------------------


def train_rows(s, f) -> int:
    """Training rows, as far as the files can be read."""
    rows = sum(f.parquet[p].num_rows for p in s.data.train_files if p in f.parquet)
    return rows if s.data.train_max_samples < 0 else min(rows, s.data.train_max_samples)


def files_are_readable(s, f) -> bool:
    return bool(s.data.train_files) and all(p in f.parquet and not f.parquet[p].error for p in s.data.train_files)


def data_files(s, f) -> Iterator[Problem]:
    for key in ("val_files",) if validates_only(s) else ("train_files", "val_files"):
        for path in getattr(s.data, key):
            facts = f.parquet[path]
            if facts.error:
                yield _bad_file(key, path, facts.error, "give the path of a parquet file; mfsdp prep-data writes them")
                continue
            faults = list(_column_faults(s, key, facts))
            yield from faults
            if not faults and facts.num_rows == 0:
                yield _bad_file(key, path, "the file has no rows", "leave it out, or write it again")
            elif not faults:
                yield from _unused_columns(s, key, facts)


def _column_faults(s, key: str, facts) -> Iterator[Problem]:
    """Of the columns that this kind of run reads; what a footer cannot tell, such as an unknown data_source, is told by the trainer."""
    for setting, column, judge, right in _columns(s):
        if column not in facts.columns and column in OPTIONAL:
            continue
        if column not in facts.columns:
            near = nearest(column, list(facts.columns)) if setting else None
            fix = f"{setting}={near}" if near else f"{setting}, or {_rewrite(s)}" if setting else _rewrite(s)
            yield _bad_file(key, facts.path, f"there is no column {column}; columns: {', '.join(facts.columns)}", fix)
        elif wrong := judge(facts.columns[column]):
            fix = f"it must be {right}; {_rewrite(s)}"
            yield _bad_file(key, facts.path, f"column {column} is {facts.columns[column]}: {wrong}", fix)
    all_rows = getattr(s.data, key.replace("files", "max_samples")) < 0  # else the nulls may be in rows that are not read
    for name in ("data_source", GOLD) if kind_of(s) == "grpo" and all_rows else ():
        if facts.nulls.get(name):
            yield _bad_file(key, facts.path, f"{name} is null in {facts.nulls[name]} of {facts.num_rows} rows", _rewrite(s))


def _columns(s) -> list[tuple]:
    """(setting that names it or "", column, judge of its type, the right type) of each column that is read."""
    chat = "list<struct<role: string, content: string>>"
    if kind_of(s) == "sft":
        return [("data.messages_key", s.data.messages_key, chat_type_problem, chat)]
    return [
        ("data.prompt_key", s.data.prompt_key, chat_type_problem, chat),
        ("", "data_source", text_type_problem, "string"),
        ("", "reward_model", gold_type_problem, "struct<ground_truth: string, …>"),
        ("", "extra_info", struct_type_problem, "struct<…>"),
    ]


def _unused_columns(s, key: str, facts) -> Iterator[Problem]:
    unused = {"tools": "tool schemas are not rendered"}
    if kind_of(s) == "grpo":
        unused |= {"images": "models here read text", "videos": "models here read text"}
    for column, why in unused.items():
        if column in facts.columns:
            yield _bad_file(
                key, facts.path, f"its column {column} is not used: {why}", "nothing to do, if no chat needs it", level="warning",
            )


def _rewrite(s) -> str:
    return "mfsdp prep-data messages rewrites it" + (" with --for rl" if kind_of(s) == "grpo" else "")


def same_schema(s, f) -> Iterator[Problem]:
    """One data set is made of all training files, so their chats must have one type."""
    first, (_, column, *_) = None, _columns(s)[0]
    for path in () if validates_only(s) else s.data.train_files:
        kind = f.parquet[path].columns.get(column)
        if f.parquet[path].error or kind is None or chat_type_problem(kind):
            continue
        kind = _normal(kind)
        if first is not None and kind != first[1]:
            yield _bad_file("train_files", path, f"column {column} is {kind}, but {first[1]} in {first[0]}", _rewrite(s))
        first = first or (path, kind)


def validation_is_apart(s, f) -> Iterator[Problem]:
    for path in s.data.val_files:
        if path in s.data.train_files and not validates_only(s):
            yield _bad_file(
                "val_files", path, "the same file is trained on, so validation tells nothing", "give another file", level="warning",
            )


def _bad_file(key: str, path: str, why: str, fix: str, level: str = "error") -> Problem:
    return Problem(f"data.{key}", path, why, fix, code=BAD_INPUT, level=level)


def _normal(kind: str) -> str:
    """pyarrow's word for a type, without the differences that change nothing: large types, name of the element, nullability."""
    return re.sub(r"^list<\w+: ", "list<", kind.replace(" not null", "").replace("large_", ""))


def chat_type_problem(kind: str) -> str:
    """Why a column of this pyarrow type cannot hold chats; empty when it can.

    >>> chat_type_problem("list<element: struct<role: string, content: string>>")
    ''
    """
    match = re.fullmatch(r"list<struct<(.*)>>", _normal(kind))
    if match is None:
        return "not a list of structs" + (" (JSON as text?)" if _normal(kind) == "string" else "")
    fields = _top_level_fields(match[1])
    for name in ("role", "content"):
        if name not in fields:
            return f"its struct has no field {name}"
        if fields[name] != "string":
            return f"its field {name} is {fields[name]}, not text"
    return ""


def text_type_problem(kind: str) -> str:
    return "" if _normal(kind) == "string" else "not text"


def gold_type_problem(kind: str) -> str:
    """Why a column of this type cannot hold gold answers; empty when it can.

    >>> gold_type_problem("struct<style: string, ground_truth: string>")
    ''
    """
    match = re.fullmatch(r"struct<(.*)>", _normal(kind))
    if match is None:
        return "not a struct"
    found = _top_level_fields(match[1]).get("ground_truth")
    if found is None:
        return "it has no field ground_truth"
    return "" if re.fullmatch(r"string|u?int\d+|float|double", found) else f"its field ground_truth is {found}, not text"


def struct_type_problem(kind: str) -> str:
    return "" if kind == "null" or _normal(kind).startswith("struct<") else "not a struct"


def _top_level_fields(inside: str) -> dict[str, str]:
    """Fields of `a: string, b: struct<c: int64, d: int64>`: name -> type."""
    fields, depth, start = {}, 0, 0
    for i, letter in enumerate(inside + ","):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            name, _, kind = inside[start:i].strip().partition(": ")
            fields[name] = kind
            start = i + 1
    return fields


RULES = (gpus, max_connections, packages, loggers, model_folder, data_files, same_schema, validation_is_apart)
