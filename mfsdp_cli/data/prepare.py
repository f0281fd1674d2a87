"""Public data sets to parquet: `train.parquet` and `test.parquet` in verl's layout, one fixed schema for every split. No torch.

Decisions, all as verl's own preprocessing scripts make them: `data_source` is the key that verl's reward router knows; the
instruction that asks for the final answer is appended to the question, for SFT and RL alike, so that a model fine-tuned on the
one meets the same prompts in the other; the assistant text of SFT is the source's full answer, GSM8K's `<<48/2=24>>` marks
included. Unlike verl's, gold answers are read from the last marker or box whatever its spacing, and a row without one is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mfsdp_cli.data.convert import CONVERTERS, BadRow, Example, from_arithmetic
from mfsdp_cli.data.sources import Record, locate, read_records, split_files
from mfsdp_cli.errors import BAD_INPUT, USAGE, MfsdpError, Problem

SCHEMA_VERSION = "1"
SPLITS = ("train", "test")
MAX_LISTED = 20
ARITHMETIC_ROWS = {"train": 2000, "test": 200}


@dataclass(frozen=True)
class PreparedReport:
    """What was written. `problems` holds warnings and notes only: errors are raised."""

    files: list[str]
    rows: dict[str, int]
    dropped: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def to_dict(self) -> dict:
        return asdict(self)


def prepare(
    source: str,
    *,
    input: str | None,
    out_dir: str,
    purpose: str,
    train_rows: int | None = None,
    test_rows: int | None = None,
    seed: int = 0,
    system: str | None = None,
    skip_bad: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> PreparedReport:
    """Write OUT_DIR/train.parquet and test.parquet.

    source    gsm8k, math, messages (any chat data) or arithmetic (generated, no download)
    input     a .jsonl, .json or .parquet file, a folder with train* and test* files, or a hub id; null: the source's own hub id
    purpose   sft: column messages; rl: columns prompt and reward_model
    train_rows, test_rows  use the first N rows of a split. A single file that has no test split gives test_rows rows to one, chosen by seed
    system    put this system message before every chat
    skip_bad  drop and count unusable rows instead of refusing
    progress  called with (split, rows done, rows in all)
    Raises MfsdpError naming the unusable rows, the missing input or the wrong argument; nothing is written then.
    """
    if source not in CONVERTERS and source != "arithmetic":
        raise MfsdpError(Problem("source", source, "not a source", f"use one of {', '.join([*CONVERTERS, 'arithmetic'])}", code=USAGE))
    if purpose not in ("sft", "rl"):
        raise MfsdpError(Problem("--for", purpose, "not a purpose", "use sft or rl", code=USAGE))
    limits = {"train": train_rows, "test": test_rows}
    for split, limit in limits.items():
        if limit is not None and limit < (1 if split == "train" else 0):
            flag = "--rows" if split == "train" else "--test-rows"
            raise MfsdpError(Problem(flag, str(limit), "not a number of rows", "give a positive number", code=USAGE))
    if source == "arithmetic":
        records, origin = arithmetic_records(limits, seed), f"arithmetic seed={seed}"
        convert = from_arithmetic
    else:
        place = locate(source, input)
        records, origin = read_splits(place, limits, seed), input or source
        convert = CONVERTERS[source]
    examples, bad = {}, []
    for split, rows in records.items():
        examples[split], faults = convert_all(rows, convert, system, purpose, split, progress)
        bad += faults
    problems = report_bad(bad, skip_bad)
    for split, found in examples.items():
        problems += [Problem(f"{split} row {index}", "", example.note, "", level="note") for index, example in found if example.note]
    if any(p.level == "error" for p in problems):
        raise MfsdpError(problems)
    empty = [split for split, found in examples.items() if not found]
    if empty:
        raise MfsdpError(Problem("input", str(input), f"no usable row for {' and '.join(empty)}", "give data with at least one good row",
                                 code=BAD_INPUT))
    rows = write_splits(examples, Path(out_dir), purpose, origin)
    stale = Path(out_dir) / "test.parquet"
    if "test" not in examples and stale.exists():
        why = "is from an earlier call; this one wrote no test split"
        problems.append(Problem(str(stale), "", why, "delete it if it is unwanted", level="note"))
    return PreparedReport(list(rows), rows, {split: sum(f.split == split for f in bad) for split in examples}, problems)


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class Fault:
    split: str
    where: str
    index: int
    reason: str


def convert_all(records: list[Record], convert, system, purpose, split, progress) -> tuple[list[tuple[int, Example]], list[Fault]]:
    """(index, example) of the good rows, and the faults of the others."""
    good, faults = [], []
    for done, record in enumerate(records, start=1):
        try:
            if record.error:
                raise BadRow(record.error)
            good.append((record.index, finish(convert(record.value), system, purpose)))
        except BadRow as error:
            faults.append(Fault(split, record.where, record.index, str(error)))
        if progress and (done % 1000 == 0 or done == len(records)):
            progress(split, done, len(records))
    return good, faults


def finish(example: Example, system: str | None, purpose: str) -> Example:
    """Check the chat and put the system message in front."""
    messages = example.messages
    if system:
        if messages[0]["role"] == "system":
            raise BadRow("has a system message of its own, and --system gives another")
        messages = [{"role": "system", "content": system}, *messages]
    if purpose == "rl":
        if not example.gold:
            raise BadRow("no gold answer: column answer or ground_truth is missing or empty")
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise BadRow("no prompt: the chat holds no user message before its last answer")
    elif not any(m["role"] == "assistant" for m in messages):
        raise BadRow("no assistant message: nothing to learn")
    return replace(example, messages=messages)


# ---------------------------------------------------------------- splits


def read_splits(place: Path, limits: dict[str, int | None], seed: int) -> dict[str, list[Record]]:
    """The rows of each split; a lone file gives `test_rows` of its rows, chosen by seed, to a test split."""
    records = {split: read_records(paths) for split, paths in split_files(place).items()}
    if "test" not in records and limits["test"]:
        rows = records["train"]
        if limits["test"] >= len(rows):
            why = f"{place.name} holds {len(rows)} rows: none would be left to train on"
            raise MfsdpError(Problem("--test-rows", str(limits["test"]), why, f"give at most {max(len(rows) - 1, 0)}", code=USAGE))
        chosen = set(random.Random(seed).sample(range(len(rows)), limits["test"]))
        records = {"train": [r for i, r in enumerate(rows) if i not in chosen], "test": [r for i, r in enumerate(rows) if i in chosen]}
    elif limits["test"] == 0:
        records.pop("test", None)
    return {split: rows[:limits[split]] for split, rows in records.items()}


def arithmetic_records(limits: dict[str, int | None], seed: int) -> dict[str, list[Record]]:
    """Sums and differences of numbers of one or two digits; no question occurs twice. `17 + 25 = 42`, then `#### 42`."""
    counts = {split: ARITHMETIC_ROWS[split] if limits[split] is None else limits[split] for split in SPLITS}
    universe = [(a, sign, b) for a in range(100) for b in range(100) for sign in "+-" if sign == "+" or a >= b]
    if sum(counts.values()) > len(universe):
        why = f"with {counts['test']} test rows that is {sum(counts.values())}, and there are only {len(universe)} different questions"
        raise MfsdpError(Problem("--rows", str(counts["train"]), why, f"ask for at most {len(universe)} in all", code=USAGE))
    drawn = iter(random.Random(seed).sample(universe, sum(counts.values())))
    records = {}
    for split in SPLITS:
        if counts[split]:
            records[split] = [arithmetic_record(split, index, *next(drawn)) for index in range(counts[split])]
    return records


def arithmetic_record(split: str, index: int, a: int, sign: str, b: int) -> Record:
    value = a + b if sign == "+" else a - b
    row = {"question": f"What is {a} {sign} {b}?", "answer": f"{a} {sign} {b} = {value}\n#### {value}"}
    return Record(row, index, f"{split} row {index}")


# ---------------------------------------------------------------- report and files


def report_bad(faults: list[Fault], skip_bad: bool) -> list[Problem]:
    """One problem a row for the first 20, then one with the count."""
    if not faults:
        return []
    level, fix = ("warning", "dropped") if skip_bad else ("error", "correct the row, or drop every such row with --skip-bad")
    told = [(f"{f.split} row {f.index}", "", f.reason, fix, f.where) for f in faults[:MAX_LISTED]]
    if len(faults) > MAX_LISTED:
        told.append(("rows", str(len(faults)), f"{len(faults)} rows cannot be used; the first {MAX_LISTED} are listed", fix, ""))
    return [Problem(*words, code=BAD_INPUT, level=level) for words in told]


def schema(purpose: str):
    """The pyarrow schema of every split. No nulls, so that files of different splits and sources concatenate."""
    import pyarrow as pa

    chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    info = [("split", pa.string()), ("index", pa.int64()), ("answer", pa.string())]
    if purpose == "sft":
        return pa.schema([("messages", chat), ("data_source", pa.string()), ("extra_info", pa.struct(info))])
    return pa.schema([
        ("data_source", pa.string()),
        ("prompt", chat),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([*info, ("question", pa.string())])),
    ])


def to_row(example: Example, split: str, index: int, purpose: str) -> dict:
    info = {"split": split, "index": index, "answer": example.answer}
    if purpose == "sft":
        return {"messages": example.messages, "data_source": example.data_source, "extra_info": info}
    return {
        "data_source": example.data_source,
        "prompt": example.messages,
        "ability": example.ability,
        "reward_model": {"style": "rule", "ground_truth": example.gold},
        "extra_info": {**info, "question": example.question},
    }


def write_splits(examples: dict, out_dir: Path, purpose: str, origin: str) -> dict[str, int]:
    """Rows of each file written, by path. Each is written under a temporary name first: a file called train.parquet is always whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    out_dir.mkdir(parents=True, exist_ok=True)
    rows_written = {}
    for split, found in examples.items():
        rows = [to_row(example, split, index, purpose) for index, example in found]
        digest = hashlib.sha256(json.dumps(rows, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
        metadata = {"mfsdp.schema": f"{purpose} {SCHEMA_VERSION}", "mfsdp.source": origin, "mfsdp.content_sha256": digest}
        table = pa.Table.from_pylist(rows, schema=schema(purpose).with_metadata(metadata))
        path = out_dir / f"{split}.parquet"
        temporary = out_dir / f".{split}.parquet.{os.getpid()}.tmp"
        try:
            pq.write_table(table, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        rows_written[str(path)] = len(rows)
    return rows_written
