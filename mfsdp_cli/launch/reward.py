"""What a run's scorer makes of the run's data, told before anything is started: a function of the user's own is tried on a row,
and the columns that are graded by are read and judged (`config.rules_columns`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mfsdp_cli.config.rulebook import judge
from mfsdp_cli.config.rules_columns import Grading
from mfsdp_cli.config.rules_files import GOLD, gold_type_problem, text_type_problem
from mfsdp_cli.config.values import kind_of, validates_only
from mfsdp_cli.errors import BAD_INPUT, Problem

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.launch.facts import Facts, ParquetFacts


def reward_problems(settings: SftSettings | GrpoSettings, origins: dict[str, str], facts: Facts) -> list[Problem]:
    """What is wrong with what is graded by. Reads two columns of each file of prompts."""
    if kind_of(settings) == "sft":
        return []
    found = list(read_columns(settings, facts))
    columns = [part for part in found if isinstance(part, Grading)]
    return [part for part in found if isinstance(part, Problem)] + judge("columns", settings, origins, facts, columns)


def function_problems(settings: SftSettings | GrpoSettings, facts: Facts) -> list[Problem]:
    """What is wrong with reward.function. It is imported and called in a child process only; a dry run does so too."""
    if kind_of(settings) == "sft" or settings.reward.function is None:
        return []
    from mfsdp_cli.rewards.custom import check

    return check(settings.reward.function, first_row(settings.data.train_files + settings.data.val_files, facts))


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
        except (pyarrow.ArrowException, ValueError, OSError):  # told by `read_columns`
            continue
        gold = row.get("reward_model")
        if row.get("data_source") and isinstance(gold, dict) and gold.get("ground_truth") is not None:
            gold = str(gold["ground_truth"])
            return row["data_source"], f"#### {gold}", gold, row.get("extra_info") or {}
    return None


def read_columns(settings: GrpoSettings, facts: Facts) -> Iterator[Grading | Problem]:
    """What the rows that the run would use are graded by; of files that the rules on footers refuse, nothing."""
    for key in ("val_files",) if validates_only(settings) else ("train_files", "val_files"):
        left = getattr(settings.data, key.replace("files", "max_samples"))
        for path in getattr(settings.data, key):
            file = facts.parquet[path]
            limit = file.num_rows if left < 0 else min(left, file.num_rows)
            left = left if left < 0 else left - limit
            if limit == 0 or not _readable(file):
                continue
            import pyarrow  # only when there are rows to read

            try:
                yield Grading(key, file, *read_grading(path, limit))
            except (pyarrow.ArrowException, ValueError, OSError) as error:
                why = f"its rows cannot be read: {str(error).splitlines()[0]}"
                yield Problem(f"data.{key}", path, why, "write the file again", code=BAD_INPUT)


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
