"""Rules on the model folder and on the data files: what names, footers and headers tell. See `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from mfsdp_cli.config.rulebook import OWN, rule
from mfsdp_cli.config.values import kind_of, nearest, validates_only
from mfsdp_cli.errors import BAD_INPUT, Problem

GOLD = "reward_model.ground_truth"
OPTIONAL = ("extra_info",)

# --- the model folder -----------------------------------------------------------------------------------------------


def _folder(s, f) -> bool:
    return bool(s.model.path) and not f.model_error and f.model_path is not None


@rule("model-exists", "model.path is a folder with config.json and whole weight files, or a hub id", "huggingface/safetensors, format",
      fix="the path of a complete Hugging Face folder")
def model_exists(s, f) -> Iterator[Problem]:
    """Or a checkpoint of mfsdp's. Headers of safetensors files are read: one that is cut short, or a pointer of Git LFS in its place,
    is told here."""
    if s.model.path and f.model_error:
        fix = f.model_fix or "give a folder with config.json, tokenizer and safetensors, or a hub id"
        yield Problem("model.path", s.model.path, f.model_error, fix, code=BAD_INPUT)


@rule("model-checkpoint", "a run folder given as model has one checkpoint to take", "mfsdp checkpoint/manifest.py", level="warning",
      fix="the step folder itself")
def model_checkpoint(s, f) -> Iterator[Problem]:
    for key, warnings in (("model.path", f.model_warnings), ("ref.path", f.reference_warnings)):
        yield from (replace(w, key=key, found=w.found or w.key) for w in warnings)


@rule("model-is-here", "the model is on this machine", OWN, level="note", fix="hf download MODEL")
def model_is_here(s, f) -> Iterator[Problem]:
    path = s.model.path
    if path and not f.model_error and f.model_path is None:
        why = "it is not in the local Hugging Face cache: it will be downloaded, and its shape is not checked before"
        yield Problem("model.path", path, why, f"hf download {path}", level="note")


@rule("tokenizer-there", "the model folder has a tokenizer", "transformers 5.12, AutoTokenizer", fix="copy the model's tokenizer files")
def tokenizer_there(s, f) -> Iterator[Problem]:
    if _folder(s, f) and not f.has_tokenizer:
        yield Problem(
            "model.path", s.model.path, "the folder has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)",
            "copy the tokenizer files of the model into it", code=BAD_INPUT,
        )


@rule("chat-template", "the tokenizer has a chat template", "transformers 5.12, apply_chat_template; liquid-finetune PR 37",
      fix="a chat_template.jinja in the model folder, for example of the model's instruct version")
def chat_template(s, f) -> Iterator[Problem]:
    """Chats become text by it, and what the model learns or answers is found in that text."""
    if _folder(s, f) and f.has_tokenizer and not f.has_chat_template:
        why = "its tokenizer has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
        yield Problem("model.path", s.model.path, why, "use a chat model, or put a chat_template.jinja into the folder", code=BAD_INPUT)


@rule("weights-are-safetensors", "the model folder has weights, as safetensors", "megatron-bridge 0.6.2 models/hf_pretrained/state.py",
      fix="save_pretrained(..., safe_serialization=True)")
def weights(s, f) -> Iterator[Problem]:
    if not _folder(s, f) or f.model_source is not None:
        return
    if not f.model_weight_files:
        why = "the folder has no weight files (*.safetensors)"
        yield Problem("model.path", s.model.path, why, "download the model whole", code=BAD_INPUT)
    elif not any(name.endswith(".safetensors") for name in f.model_weight_files):
        yield Problem(
            "model.path", s.model.path, f"weights are read from safetensors only, and the folder has {f.model_weight_files[0]}",
            "save the model again with save_pretrained(..., safe_serialization=True)", code=BAD_INPUT,
        )


# --- the data files -------------------------------------------------------------------------------------------------


def train_rows(s, f) -> int:
    """Training rows, as far as the files can be read."""
    rows = sum(f.parquet[p].num_rows for p in s.data.train_files if p in f.parquet)
    return rows if s.data.train_max_samples < 0 else min(rows, s.data.train_max_samples)


def files_are_readable(s, f) -> bool:
    return bool(s.data.train_files) and all(p in f.parquet and not f.parquet[p].error for p in s.data.train_files)


@rule("one-full-batch", "there are rows for one batch", "verl issue 606", training=True,
      fix="a smaller data.train_batch_size, or more data")
def one_full_batch(s, f) -> Iterator[Problem]:
    rows, size = train_rows(s, f), s.data.train_batch_size
    if files_are_readable(s, f) and rows < size:
        why = f"there are {rows} training {'rows' if kind_of(s) == 'sft' else 'prompts'}, so not one full batch"
        yield Problem("data.train_batch_size", str(size), why, f"at most {rows}, or more data" if rows else "more data")


def _files(s, f) -> Iterator[tuple]:
    """(key, facts) of each file that the run reads and that can be read."""
    for key in ("val_files",) if validates_only(s) else ("train_files", "val_files"):
        yield from ((key, f.parquet[path]) for path in getattr(s.data, key) if not f.parquet[path].error)


@rule("data-readable", "every data file is there and is parquet", "Apache Parquet, format",
      fix="the path of a file that mfsdp prep-data wrote")
def data_readable(s, f) -> Iterator[Problem]:
    for key in ("val_files",) if validates_only(s) else ("train_files", "val_files"):
        for path in getattr(s.data, key):
            if f.parquet[path].error:
                yield _bad_file(key, path, f.parquet[path].error, "give the path of a parquet file; mfsdp prep-data writes them")


@rule("data-columns", "every data file has the columns that are read, with their types",
      "verl's layout of data: utils/dataset/rl_dataset.py", fix="mfsdp prep-data messages rewrites a file")
def data_columns(s, f) -> Iterator[Problem]:
    for key, facts in _files(s, f):
        yield from _column_faults(s, key, facts)


def _column_faults(s, key: str, facts) -> Iterator[Problem]:
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


def _whole(s, f) -> Iterator[tuple]:
    return ((key, facts) for key, facts in _files(s, f) if not list(_column_faults(s, key, facts)))


@rule("data-nulls", "no row lacks its data_source or its gold answer", "the null counts in the file's footer", kinds=("grpo",),
      fix="fill them in, or leave the rows out")
def data_nulls(s, f) -> Iterator[Problem]:
    for key, facts in _files(s, f):
        all_rows = getattr(s.data, key.replace("files", "max_samples")) < 0  # else the nulls may be in rows that are not read
        for name in ("data_source", GOLD) if all_rows else ():
            if facts.nulls.get(name):
                yield _bad_file(key, facts.path, f"{name} is null in {facts.nulls[name]} of {facts.num_rows} rows", _rewrite(s))


@rule("data-rows", "every data file has rows", OWN, fix="leave the file out, or write it again")
def data_rows(s, f) -> Iterator[Problem]:
    for key, facts in _whole(s, f):
        if facts.num_rows == 0:
            yield _bad_file(key, facts.path, "the file has no rows", "leave it out, or write it again")


@rule("data-unused-columns", "the data has no columns that chats may need and that are not read", OWN, level="warning",
      fix="nothing, if no chat needs them")
def data_unused_columns(s, f) -> Iterator[Problem]:
    for key, facts in _whole(s, f):
        if facts.num_rows:
            yield from _unused_columns(s, key, facts)


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


@rule("data-one-type", "the chats of all training files have one type", "Apache Arrow: one data set has one schema", training=True,
      fix="mfsdp prep-data messages rewrites a file")
def same_schema(s, f) -> Iterator[Problem]:
    """One data set is made of all training files, so their chats must have one type."""
    first, (_, column, *_) = None, _columns(s)[0]
    for path in s.data.train_files:
        kind = f.parquet[path].columns.get(column)
        if f.parquet[path].error or kind is None or chat_type_problem(kind):
            continue
        kind = _normal(kind)
        if first is not None and kind != first[1]:
            yield _bad_file("train_files", path, f"column {column} is {kind}, but {first[1]} in {first[0]}", _rewrite(s))
        first = first or (path, kind)


@rule("val-apart", "no file is trained on and validated on", OWN, level="warning", training=True, fix="another file for validation")
def validation_is_apart(s, f) -> Iterator[Problem]:
    for path in s.data.val_files:
        if path in s.data.train_files:
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
