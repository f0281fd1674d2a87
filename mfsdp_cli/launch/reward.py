"""What a run's scorer makes of the run's data, told before anything is started: a function of the user's own is tried on a
row; the column data_source must name what reward.name=auto knows; every gold answer must be there, and readable by the scorer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mfsdp_cli.config.rules_machine import GOLD, gold_type_problem, text_type_problem
from mfsdp_cli.config.values import kind_of, validates_only
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.launch.facts import Facts, ParquetFacts

NUMERIC = ("gsm8k", "gsm8k_flexible")  # scorers whose gold answer is a number
MAX_LISTED = 5


def reward_problems(settings: SftSettings | GrpoSettings, origins: dict[str, str], facts: Facts) -> list[Problem]:
    """What is wrong with the scorer and with what it grades by. A function is imported and called in a child process only; a dry
    run does so too. Reads two columns of each file of prompts."""
    if kind_of(settings) == "sft":
        return []
    found = list(data_problems(settings, facts))
    if settings.reward.function is not None:
        from mfsdp_cli.rewards.custom import check

        found += check(settings.reward.function, first_row(settings.data.train_files + settings.data.val_files, facts))
    return [replace(p, where=p.where or origins.get(p.key, "default" if p.key == "reward.name" else "")) for p in found]


def first_row(files: list[str], facts: Facts) -> tuple[str, str, str, dict] | None:
    """(data_source, the gold answer as a response, ground_truth, extra_info) of the first row that can be read."""
    import pyarrow.parquet

    for path in files:
        if path not in facts.parquet or facts.parquet[path].error or not facts.parquet[path].num_rows:
            continue
        wanted = [name for name in ("data_source", "reward_model", "extra_info") if name in facts.parquet[path].columns]
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                row = next(file.iter_batches(batch_size=1, columns=wanted)).to_pylist()[0]
        except (pyarrow.ArrowException, OSError):  # told by `data_problems`
            continue
        gold = row.get("reward_model")
        if row.get("data_source") and isinstance(gold, dict) and gold.get("ground_truth") is not None:
            gold = str(gold["ground_truth"])
            return row["data_source"], f"#### {gold}", gold, row.get("extra_info") or {}
    return None


# --- what is graded by ----------------------------------------------------------------------------------------------


def data_problems(settings: GrpoSettings, facts: Facts) -> Iterator[Problem]:
    """Of the rows that the run would use; files and columns that `rules_machine` refuses are left to it."""
    import pyarrow

    unknown: Counter[str] = Counter()
    for key in ("val_files",) if validates_only(settings) else ("train_files", "val_files"):
        left = getattr(settings.data, key.replace("files", "max_samples"))
        for path in getattr(settings.data, key):
            file = facts.parquet[path]
            limit = file.num_rows if left < 0 else min(left, file.num_rows)
            left = left if left < 0 else left - limit
            if limit == 0 or not _readable(file):
                continue
            try:
                sources, golds = read_grading(path, limit)
            except (pyarrow.ArrowException, OSError) as error:
                why = f"its rows cannot be read: {str(error).splitlines()[0]}"
                yield Problem(f"data.{key}", path, why, "write the file again", code=BAD_INPUT)
                continue
            yield from _empty(f"data.{key}", file, sources, golds, limit)
            if settings.reward.function is None:
                yield from _not_numbers(settings.reward.name, f"data.{key}", path, sources, golds)
                unknown.update(source for source in sources if source and scorer_of(settings.reward.name, source) is None)
    if unknown:
        yield _unknown_sources(unknown)


def _readable(file: ParquetFacts) -> bool:
    columns = file.columns
    return not file.error and not (text_type_problem(columns.get("data_source", "")) or gold_type_problem(columns.get("reward_model", "")))


def read_grading(path: str, limit: int) -> tuple[list[str | None], list[str | None]]:
    """data_source and gold answer, as text, of the first `limit` rows of a file. Reads these columns only."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        table = file.read(columns=["data_source", GOLD]).slice(0, limit)
    golds = table["reward_model"].combine_chunks().flatten()[0].to_pylist()  # null where the struct is
    return table["data_source"].to_pylist(), [None if gold is None or gold != gold else str(gold) for gold in golds]


def scorer_of(name: str, source: str) -> str | None:
    """The scorer of a data_source; None when auto knows none."""
    from mfsdp_cli.rewards.base import scorer_name

    try:
        return scorer_name(name, source)
    except MfsdpError:
        return None


def _unknown_sources(counts: Counter[str]) -> Problem:
    from mfsdp_cli.rewards.base import PREFIXES, ROUTES

    values = [f"{value!r} ({number} row{'s' if number > 1 else ''})" for value, number in counts.most_common()]
    known = ", ".join([*ROUTES, *(f"{prefix}*" for prefix in PREFIXES)])
    fix = f"reward.name=gsm8k (#### and a number), math (\\boxed{{}}), or reward.function=FILE.py:FUNCTION. auto knows {known}"
    return Problem("reward.name", "auto", f"no scorer is known for data_source {_listed(values)}", fix)


def _empty(key: str, file: ParquetFacts, sources: list, golds: list, limit: int) -> Iterator[Problem]:
    """Null and blank values; nulls that the footer told are `rules_machine`'s, which counts those of the whole file."""
    for name, values, why in (("data_source", sources, "it says which scorer grades"), (GOLD, golds, "no answer could be graded")):
        by_footer = limit == file.num_rows and file.nulls.get(name)
        rows = [i for i, value in enumerate(values) if (value is None and not by_footer) or (value is not None and not value.strip())]
        if rows:
            fix = "fill it in, or remove the rows"
            yield Problem(key, file.path, f"{name} is empty in {len(rows)} of {limit} rows: {why}; rows {_listed(rows)}", fix, code=BAD_INPUT)


def _not_numbers(name: str, key: str, path: str, sources: list, golds: list) -> Iterator[Problem]:
    numeric = {source for source in set(sources) if source and scorer_of(name, source) in NUMERIC}
    wrong = []
    for row, (source, gold) in enumerate(zip(sources, golds, strict=True)):
        if source in numeric and gold is not None and gold.strip() and not _is_number(gold):
            wrong.append(f"row {row} {gold[:40]!r}")
    if wrong:
        why = f"{len(wrong)} gold answers are no numbers, and gsm8k compares numbers: {_listed(wrong)}"
        yield Problem(key, path, why, "reward.name=math, or reward.function=FILE.py:FUNCTION, or correct the rows", code=BAD_INPUT)


def _is_number(text: str) -> bool:
    from mfsdp_cli.rewards.gsm8k import gold_value
    from mfsdp_cli.rewards.numbers import Unreadable

    try:
        gold_value(text)
    except (ValueError, Unreadable):
        return False
    return True


def _listed(items: Iterable) -> str:
    items = [str(item) for item in items]
    return ", ".join(items[:MAX_LISTED]) + (f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else "")
