"""`facts_for_tests` for reinforcement learning: 8 ranks of TP 4, two vLLM engines of 4 GPUs on the same GPUs."""

from __future__ import annotations

from facts_for_tests import CHAT, Judge, make_facts, with_overrides

from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.launch.facts import Facts, ParquetFacts

GOLD = "struct<style: string, ground_truth: string>"
COLUMNS = {"data_source": "string", "prompt": CHAT, "ability": "string", "reward_model": GOLD,
           "extra_info": "struct<split: string, index: int64>"}


def prompt_file(path: str, rows: int = 1000, nulls: dict | None = None, **columns) -> ParquetFacts:
    """A type of None takes the column out."""
    return ParquetFacts(path, rows, {k: v for k, v in (COLUMNS | columns).items() if v is not None}, nulls=nulls or {})


def grpo_facts(**overrides) -> Facts:
    parquet = {name: prompt_file(name) for name in ("train.parquet", "val.parquet")}
    return make_facts(**({"parquet": parquet} | overrides))


def cpu_facts(**overrides) -> Facts:
    return grpo_facts(**({"num_gpus": 0, "gpu_names": (), "gpu_memory_mib": (), "num_cpus": 8} | overrides))


def grpo_settings(**overrides) -> GrpoSettings:
    settings = GrpoSettings()
    settings.model.path = "models/qwen"
    settings.data.train_files, settings.data.val_files = ["train.parquet"], ["val.parquet"]
    settings.engine.tensor_model_parallel_size = settings.rollout.tensor_model_parallel_size = 4
    settings.trainer.n_gpus_per_node = 8
    return with_overrides(settings, overrides)


CPU = {"engine__device": "cpu", "engine__dtype": "float32", "engine__tensor_model_parallel_size": 1, "trainer__n_gpus_per_node": 2,
       "rollout__name": "hf", "rollout__tensor_model_parallel_size": 1}


_grpo = Judge(grpo_settings, grpo_facts)
problems, only, passes = _grpo.problems, _grpo.only, _grpo.passes
