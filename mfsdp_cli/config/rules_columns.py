"""Rules on what is in two columns of reinforcement-learning data: data_source, which says who grades, and the gold answer.

Pure, as the others: `launch.reward` reads the columns and has them judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mfsdp_cli.config.rulebook import rule
from mfsdp_cli.config.rules_files import GOLD
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem
from mfsdp_cli.records import Record

if TYPE_CHECKING:
    from mfsdp_cli.launch.facts import ParquetFacts

GRPO = ("grpo",)
NUMERIC = ("gsm8k", "gsm8k_flexible")  # scorers whose gold answer is a number
MAX_LISTED = 5


class Grading(Record):
    """What the first rows of one file are graded by: those that the run uses. key is train_files or val_files."""

    key: str
    file: ParquetFacts
    sources: list[str | None]
    golds: list[str | None]


@rule("data-source-known", "with reward.name=auto every data_source names a scorer", "mfsdp rewards/base.py ROUTES; the names are verl's",
      kinds=GRPO, reads="columns", fix="reward.name=gsm8k or math, or reward.function=FILE.py:FUNCTION")
def source_is_known(s, f, columns: list[Grading]) -> Iterator[Problem]:
    if s.reward.function is not None:
        return
    counts = Counter(source for c in columns for source in c.sources if source)
    unknown = [(source, count) for source, count in counts.most_common() if scorer_of(s.reward.name, source) is None]
    if unknown:
        from mfsdp_cli.rewards.base import PREFIXES, ROUTES

        values = [f"{source!r} ({count} row{'s' if count > 1 else ''})" for source, count in unknown]
        known = ", ".join([*ROUTES, *(f"{prefix}*" for prefix in PREFIXES)])
        fix = f"reward.name=gsm8k (#### and a number), math (\\boxed{{}}), or reward.function=FILE.py:FUNCTION. auto knows {known}"
        yield Problem("reward.name", "auto", f"no scorer is known for data_source {_listed(values)}", fix)


@rule("gold-there", "every row that is used has its data_source and its gold answer", "mfsdp data/prompts.py; NeMo-RL issue 2783",
      kinds=GRPO, reads="columns", fix="fill them in, or remove the rows")
def gold_is_there(s, f, columns: list[Grading]) -> Iterator[Problem]:
    """Blank ones, and nulls where the footer cannot tell whether they are among the rows that are used (`data-nulls`)."""
    for c in columns:
        for name, values, why in (("data_source", c.sources, "it says which scorer grades"), (GOLD, c.golds, "no answer could be graded")):
            by_footer = len(values) == c.file.num_rows and c.file.nulls.get(name)
            rows = [i for i, value in enumerate(values) if (value is None and not by_footer) or (value is not None and not value.strip())]
            if rows:
                why = f"{name} is empty in {len(rows)} of {len(values)} rows: {why}; rows {_listed(rows)}"
                yield Problem(f"data.{c.key}", c.file.path, why, "fill it in, or remove the rows", code=BAD_INPUT)


@rule("gold-is-number", "where gsm8k grades, every gold answer is a number", "mfsdp rewards/gsm8k.py", kinds=GRPO, reads="columns",
      fix="reward.name=math, or correct the rows")
def gold_is_number(s, f, columns: list[Grading]) -> Iterator[Problem]:
    """A response to such a row could never be right: its group would teach nothing."""
    for c in columns if s.reward.function is None else ():
        numeric = {source for source in set(c.sources) if source and scorer_of(s.reward.name, source) in NUMERIC}
        wrong = [f"row {row} {gold[:40]!r}" for row, (source, gold) in enumerate(zip(c.sources, c.golds, strict=True))
                 if source in numeric and gold is not None and gold.strip() and not _is_number(gold)]
        if wrong:
            why = f"{len(wrong)} gold answers are no numbers, and gsm8k compares numbers: {_listed(wrong)}"
            fix = "reward.name=math, or reward.function=FILE.py:FUNCTION, or correct the rows"
            yield Problem(f"data.{c.key}", c.file.path, why, fix, code=BAD_INPUT)


def scorer_of(name: str, source: str) -> str | None:
    """The scorer of a data_source; None when auto knows none."""
    from mfsdp_cli.rewards.base import scorer_name

    try:
        return scorer_name(name, source)
    except MfsdpError:
        return None


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
