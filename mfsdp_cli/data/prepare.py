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
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mfsdp_cli.data.sources import Record, locate, read_records, split_files
from mfsdp_cli.errors import BAD_INPUT, USAGE, MfsdpError, Problem

SCHEMA_VERSION = "1"
SPLITS = ("train", "test")
MAX_LISTED = 20
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ARITHMETIC_ROWS = {"train": 2000, "test": 200}
# Two training rows of MATH end in an empty \\boxed{}; the answer to both is 0 ("there are … primes"). Key: sha256 of the problem.
MATH_EMPTY_BOXES = {
    "34d3b36d1c41910066ed6681c639b2d3e572a221fd3b55ee4a84c1f4a1ecb9aa": "0",
    "641a7ef94229c8ca020ec3014841b02e7d7416b7c2dd451cddcae8068fb4976f": "0",
}


class BadRow(Exception):
    """A row that cannot be used; the text is the reason."""


@dataclass(frozen=True)
class Example:
    """One usable row: the chat (its last message is the assistant's), the answer as the source spells it, the gold value."""

    messages: list[dict]
    answer: str
    gold: str | None
    question: str
    data_source: str
    ability: str = "math"
    note: str = ""


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
            raise MfsdpError(Problem(f"--{split}-rows", str(limit), "not a number of rows", "give a positive number", code=USAGE))
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
    problems = report_bad(bad, skip_bad) + [
        Problem(f"{split} row {index}", "", example.note, "", level="note") for split, rows in examples.items() for index, example in rows if example.note
    ]
    if any(p.level == "error" for p in problems):
        raise MfsdpError(problems)
    empty = [split for split, found in examples.items() if not found]
    if empty:
        raise MfsdpError(Problem("input", str(input), f"no usable row for {' and '.join(empty)}", "give data with at least one good row",
                                 code=BAD_INPUT))
    return write_splits(examples, Path(out_dir), purpose, origin, problems, dropped={s: sum(f.split == s for f in bad) for s in examples})


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
    elif not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
        raise BadRow("no assistant message with text: nothing to learn")
    return replace(example, messages=messages)


def text_of(row: dict, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"column {key} is {'missing' if key not in row else 'not a text' if not isinstance(value, str) else 'empty'}")
    return value


def question_and_answer(question: str, instruction: str, answer: str, gold: str, data_source: str, note: str = "") -> Example:
    prompt = f"{question} {instruction}".rstrip()
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Example(messages, answer, gold, question, data_source, note=note)


def from_gsm8k(row: dict) -> Example:
    answer = text_of(row, "answer")
    return question_and_answer(text_of(row, "question"), GSM8K_INSTRUCTION, answer, gsm8k_gold(answer), "openai/gsm8k")


def from_math(row: dict) -> Example:
    question, answer, note = text_of(row, "problem"), text_of(row, "solution"), ""
    missing = MATH_EMPTY_BOXES.get(hashlib.sha256(question.strip().encode()).hexdigest())
    if missing and "\\boxed{}" in answer:
        answer, note = answer.replace("\\boxed{}", f"\\boxed{{{missing}}}"), f"the solution's box is empty in the data set: filled with {missing}"
    return question_and_answer(question, MATH_INSTRUCTION, answer, math_gold(answer), "DigitalLearningGmbH/MATH-lighteval", note)


def from_arithmetic(row: dict) -> Example:
    return question_and_answer(row["question"], "", row["answer"], gsm8k_gold(row["answer"]), "arithmetic")


def from_messages(row: dict) -> Example:
    """A chat: column `messages` of {role, content}, or `conversations` of {from, value} as ShareGPT has it."""
    if row.get("messages") is not None:
        turns = row["messages"]
    elif isinstance(row.get("conversations"), list):
        turns = [{"role": SHAREGPT_ROLES.get(t["from"], t["from"]), "content": t.get("value")} if isinstance(t, dict) and "from" in t else t
                 for t in row["conversations"]]
    else:
        raise BadRow("no column messages (or conversations)")
    messages = check_messages(turns)
    gold = next((str(row[key]).strip() for key in ("answer", "ground_truth") if row.get(key) is not None), None)
    last_answer = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
    question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    return Example(messages, gold or last_answer, gold, question, str(row.get("data_source") or "messages"), str(row.get("ability") or "chat"))


def check_messages(turns) -> list[dict]:
    if not isinstance(turns, list) or not turns:
        raise BadRow("messages is not a list of {role, content}, or is empty")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise BadRow(f"message {number} is not an object with role and content")
        role, content = turn.get("role"), turn.get("content")
        if role not in ("system", "user", "assistant", "tool"):
            raise BadRow(f"message {number} has role {role!r}: must be system, user, assistant or tool")
        if role == "system" and number > 1:
            raise BadRow(f"message {number} is a system message: only the first may be")
        if not isinstance(content, str):
            raise BadRow(f"message {number} ({role}) has content {type(content).__name__}, not a text")
        extra = sorted(key for key, value in turn.items() if key not in ("role", "content") and value not in (None, [], ""))
        if extra:
            raise BadRow(f"message {number} has {', '.join(extra)}, which the written schema (role, content) cannot hold")
        messages.append({"role": role, "content": content})
    return messages


CONVERTERS = {"gsm8k": from_gsm8k, "math": from_math, "messages": from_messages}


# ---------------------------------------------------------------- gold answers


def gsm8k_gold(answer: str) -> str:
    """The number after the last `####`, without thousands commas. `#### $1,250.` gives 1250."""
    if "####" not in answer:
        raise BadRow("the answer has no #### marker")
    tail = answer.rpartition("####")[2].strip()
    gold = tail.replace(",", "").replace("$", "").removesuffix(".")
    if not re.fullmatch(r"[-+]?(\d+(\.\d+)?|\.\d+)", gold):
        raise BadRow(f"the text after #### is {tail[:40]!r}, not a number")
    return gold


def math_gold(solution: str) -> str:
    """What the last `\\boxed{…}`, `\\fbox{…}` or `\\boxed 5` holds, braces balanced."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*", solution))):
        rest = solution[match.end():]
        if rest.startswith("{"):
            return braced(rest)
        bare = re.match(r"-?\d[\d,]*(\.\d+)?|[A-Za-z](?=\$)", rest)  # `\boxed as asked` is prose, not a box
        if bare:
            return bare[0].rstrip(",")
    raise BadRow("the solution has no \\boxed{} or \\fbox{}")


def braced(text: str) -> str:
    """The inside of the balanced group that opens `text`; escaped braces do not count."""
    depth, at = 0, 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                inside = text[1:at].strip()
                if not inside:
                    raise BadRow("the last box is empty")
                return inside
        at += 1
    raise BadRow("the last box is cut off: its braces do not balance")


# ---------------------------------------------------------------- splits


def read_splits(place: Path, limits: dict[str, int | None], seed: int) -> dict[str, list[Record]]:
    """The rows of each split; a lone file gives `test_rows` of its rows, chosen by seed, to a test split."""
    records = {split: read_records(paths) for split, paths in split_files(place).items()}
    if "test" not in records and limits["test"]:
        rows = records["train"]
        if limits["test"] >= len(rows):
            raise MfsdpError(Problem("--test-rows", str(limits["test"]), f"{place.name} holds {len(rows)} rows: none would be left to train on",
                                     f"give at most {max(len(rows) - 1, 0)}", code=USAGE))
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
        raise MfsdpError(Problem("--train-rows", str(counts["train"]), f"with {counts['test']} test rows that is {sum(counts.values())}, and there are "
                                 f"only {len(universe)} different questions", f"ask for at most {len(universe)} in all", code=USAGE))
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
    problems = [Problem(f"{f.split} row {f.index}", "", f.reason, fix, where=f.where, code=BAD_INPUT, level=level) for f in faults[:MAX_LISTED]]
    if len(faults) > MAX_LISTED:
        problems.append(Problem("rows", str(len(faults)), f"{len(faults)} rows cannot be used; the first {MAX_LISTED} are listed", fix,
                                code=BAD_INPUT, level=level))
    return problems


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


def write_splits(examples: dict, out_dir: Path, purpose: str, origin: str, problems: list[Problem], dropped: dict[str, int]) -> PreparedReport:
    """Each file under a temporary name first: a file called train.parquet is always whole."""
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
    for split in SPLITS:
        stale = out_dir / f"{split}.parquet"
        if split not in examples and stale.exists():
            problems.append(Problem(str(stale), "", "was there before, and this call wrote no such split", "delete it if it is not wanted", level="note"))
    return PreparedReport(list(rows_written), rows_written, dropped, problems)
