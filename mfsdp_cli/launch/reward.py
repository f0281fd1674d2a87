"""A scoring function of the user's own, tried on a row of the run's data before anything is started."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mfsdp_cli.config.values import kind_of
from mfsdp_cli.errors import Problem

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.launch.facts import Facts


def reward_problems(settings: SftSettings | GrpoSettings, origins: dict[str, str], facts: Facts) -> list[Problem]:
    """What is wrong with reward.function. It is imported and called in a child process only; a dry run does so too."""
    if kind_of(settings) == "sft" or settings.reward.function is None:
        return []
    from mfsdp_cli.rewards.custom import check

    found = check(settings.reward.function, first_row(settings.data.train_files, facts))
    return [replace(p, where=p.where or origins.get("reward.function", "")) for p in found]


def first_row(files: list[str], facts: Facts) -> tuple[str, str, str, dict] | None:
    """(data_source, the gold answer as a response, ground_truth, extra_info) of the first row that can be read."""
    import pyarrow.parquet

    for path in files:
        if path not in facts.parquet or facts.parquet[path].error or not facts.parquet[path].num_rows:
            continue
        wanted = [name for name in ("data_source", "reward_model", "extra_info") if name in facts.parquet[path].columns]
        with pyarrow.parquet.ParquetFile(path) as file:
            row = next(file.iter_batches(batch_size=1, columns=wanted)).to_pylist()[0]
        gold = row.get("reward_model")
        if row.get("data_source") and isinstance(gold, dict) and gold.get("ground_truth") is not None:
            gold = str(gold["ground_truth"])
            return row["data_source"], f"#### {gold}", gold, row.get("extra_info") or {}
    return None
