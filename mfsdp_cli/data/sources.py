"""Where raw rows come from: a .jsonl, .json or .parquet file, a folder of them, or a data set on the Hugging Face hub. No torch."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mfsdp_cli.errors import BAD_INPUT, MACHINE_UNFIT, MfsdpError, Problem

HUB_IDS = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}
HUB_PATTERNS = {"openai/gsm8k": ["main/*.parquet"]}  # its other configuration, socratic, has other answers
SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Record:
    """One raw row. index counts from 0 in its split; where is "FILE:LINE" or "FILE row N"; error says why it could not be read."""

    value: dict | None
    index: int
    where: str
    error: str = ""


def refuse(found, why: str, fix: str, code: int = BAD_INPUT) -> MfsdpError:
    return MfsdpError(Problem("input", str(found), why, fix, code=code))


def locate(source: str, given: str | None) -> Path:
    """The local file or folder to read. A hub id is fetched through huggingface_hub, from its cache when it is there."""
    if given is None and source not in HUB_IDS:
        raise refuse("", f"{source} has no default data set", "give a .jsonl or .parquet file, or a folder of them")
    given = given or HUB_IDS[source]
    path = Path(os.path.expanduser(given))
    if path.exists():
        return path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", given) and path.suffix not in SUFFIXES:
        return fetch(given)
    raise refuse(given, "no such file or folder", "give a file, a folder or a hub id such as openai/gsm8k")


def fetch(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise refuse(hub_id, "not a local path, and the package huggingface_hub, which would fetch it, is not installed",
                     "give a local file or folder, or install huggingface_hub", code=MACHINE_UNFIT) from None
    patterns = HUB_PATTERNS.get(hub_id, [f"*{suffix}" for suffix in SUFFIXES])
    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # offline, unknown, gated: each of its releases raises other classes for them
        cause = (str(error).strip().splitlines() or [""])[0][:200]
        why = f"not a local path, and the hub did not give it: {type(error).__name__}: {cause}"
        raise refuse(hub_id, why, "give a local file or folder") from error


def split_files(place: Path) -> dict[str, list[Path]]:
    """Files of each split. A folder's are called train* and test*, in it or in one folder below; a lone file is the train split."""
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise refuse(place, f"cannot read {place.suffix or 'a file without suffix'}", f"give {', '.join(SUFFIXES)}")
        return {"train": [place]}
    found = {}
    candidates = sorted(p for p in [*place.glob("*"), *place.glob("*/*")] if p.suffix in SUFFIXES and p.is_file())
    for split in ("train", "test"):
        paths = [p for p in candidates if re.match(rf"{split}([^a-zA-Z]|$)", p.stem)]
        kinds = sorted({f"{p.parent.relative_to(place)}/*{p.suffix}" for p in paths})
        if len(kinds) > 1:
            raise refuse(place, f"{split} files of several kinds: {', '.join(kinds)}", "give the folder or file of one of them")
        if paths:
            found[split] = paths
    if "train" not in found:
        names = ", ".join(str(p.relative_to(place)) for p in candidates[:5]) or "no .jsonl, .json or .parquet file"
        raise refuse(place, f"no train* file; it holds {names}", "name the file itself, or call it train.jsonl")
    return found


def read_records(paths: list[Path]) -> list[Record]:
    """Every row of the files of one split, in order; a row that cannot be read is kept, with its error."""
    records = []
    for path in paths:
        try:
            rows = list(READERS[path.suffix](path))
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise refuse(path, f"cannot be read: {error}", f"give a {path.suffix} file that is whole") from error
        for value, where, error in rows:
            if not error and not isinstance(value, dict):
                error = f"is {type(value).__name__}, not an object with named columns"
            records.append(Record(None if error else value, len(records), where, error))
    return records


def read_jsonl(path: Path):
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line), f"{path}:{number}", ""
            except (ValueError, RecursionError) as error:
                yield None, f"{path}:{number}", f"is not JSON: {error}"


def read_json(path: Path):
    """A list of rows; or JSON lines, which some data sets call .json."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        yield from read_jsonl(path)
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        yield row, f"{path} row {number}", ""


def read_parquet(path: Path):
    import pyarrow.parquet as pq

    number = 0
    for batch in pq.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            yield row, f"{path} row {number}", ""
            number += 1


READERS = {".jsonl": read_jsonl, ".json": read_json, ".parquet": read_parquet}
