"""What is told about scorer and data before a launch, on real parquet files."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from facts_for_tests import CHAT
from grpo_for_tests import grpo_facts, grpo_settings

from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID
from mfsdp_cli.launch.facts import read_footer
from mfsdp_cli.launch.reward import function_problems, reward_problems

KIND = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])


@pytest.fixture
def told(tmp_path):
    """told(train=(sources, golds), val=(sources, golds), **settings) -> problems."""
    def call(where=None, kind=KIND, **settings):
        facts = {}
        for name in ("train", "val"):
            sources, golds = settings.pop(name, (["openai/gsm8k"] * 2, ["1", "2"]))
            path = str(tmp_path / f"{name}.parquet")
            rows = [None if gold is Ellipsis else {"style": "rule", "ground_truth": gold} for gold in golds]
            pq.write_table(pa.table({"prompt": [[{"role": "user", "content": "?"}]] * len(rows), "data_source": pa.array(sources, pa.string()),
                                     "reward_model": pa.array(rows, kind)}), path)
            facts[path] = read_footer(path)
        train, val = facts
        settings = {"data__train_files": [train], "data__val_files": [val]} | settings
        return reward_problems(grpo_settings(**settings), where or {}, grpo_facts(parquet=facts))
    return call


def test_known_sources_and_numbers_are_in_order(told):
    assert told() == []
    assert told(train=(["DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/aime_2024"], ["\\frac{1}{2}", "x"])) == []
    assert told(train=(["openai/gsm8k"] * 3, ["1,250", "-3.50", "$ 7."])) == []


def test_unknown_sources_are_counted(told):
    problem, = told(train=(["a", "b", "a", "openai/gsm8k"], ["1"] * 4), val=(["a"], ["1"]))
    assert (problem.key, problem.found, problem.where, problem.code) == ("reward.name", "auto", "default", CONFIG_INVALID)
    assert problem.why == "no scorer is known for data_source 'a' (3 rows), 'b' (1 row)"
    assert "reward.name=gsm8k" in problem.fix and "reward.function=" in problem.fix and "openai/gsm8k" in problem.fix
    assert told({"reward.name": "r.yaml:3"}, train=(["a"], ["1"]))[0].where == "r.yaml:3"
    many, = told(train=([f"s{i}" for i in range(8)], ["1"] * 8))
    assert many.why.endswith("'s4' (1 row) and 3 more")


def test_a_scorer_by_name_takes_any_source(told):
    assert told(train=(["a"], ["1"]), reward__name="gsm8k") == []
    assert told(train=(["a"], ["x"]), reward__name="math") == []


def test_only_rows_that_are_used_count(told):
    late = (["openai/gsm8k", "a"], ["1", "2"])
    assert told(train=late, data__train_max_samples=1) == []
    assert len(told(train=late, data__train_max_samples=2)) == 1
    assert told(train=late, trainer__val_only=True) == [], "training files are not read"
    assert len(told(val=late, trainer__val_only=True)) == 1


def test_golds_that_are_no_numbers(told):
    problem, = told(train=(["arithmetic"] * 3, ["1/0", "5", "five"]))
    assert problem.key == "data.train_files" and problem.code == BAD_INPUT
    assert problem.why == "2 gold answers are no numbers, and gsm8k compares numbers: row 0 '1/0', row 2 'five'"
    assert told(train=(["a"], ["five"]), reward__name="gsm8k_flexible")[0].code == BAD_INPUT


def test_empty_golds_and_sources(told):
    problem, = told(train=(["arithmetic"] * 3, ["1", " ", ""]))
    assert problem.why.startswith("reward_model.ground_truth is empty in 2 of 3 rows") and problem.why.endswith("rows 1, 2")
    source, = told(train=(["arithmetic", ""], ["1", "2"]), reward__name="gsm8k")
    assert source.why.startswith("data_source is empty in 1 of 2 rows")
    assert told(train=(["arithmetic", None], ["1", None])) == [], "nulls of a whole file are told from its footer"
    cut, = told(train=(["arithmetic"] * 3, ["1", None, ...]), data__train_max_samples=2)
    assert cut.why.startswith("reward_model.ground_truth is empty in 1 of 2 rows")


def test_numbers_may_be_stored_as_numbers(told):
    assert told(train=(["arithmetic"] * 2, [1.5, 2.0]), val=(["arithmetic"], [3.0]), kind=pa.struct([("ground_truth", pa.float64())])) == []
    nan, = told(train=(["arithmetic"] * 2, [1.5, float("nan")]), val=(["arithmetic"], [3.0]), kind=pa.struct([("ground_truth", pa.float64())]))
    assert nan.why.startswith("reward_model.ground_truth is empty in 1 of 2 rows")


def test_files_that_the_rules_refuse_are_left_to_them(told, tmp_path):
    bad = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"prompt": ["x"], "data_source": [1], "reward_model": ["x"]}), bad)
    files = {str(path): read_footer(str(path)) for path in (bad, tmp_path / "none.parquet")}
    assert CHAT and reward_problems(grpo_settings(data__train_files=list(files), data__val_files=[]), {}, grpo_facts(parquet=files)) == []


def test_damaged_pages_are_told(tmp_path):
    path = tmp_path / "t.parquet"
    rows = [{"ground_truth": str(i)} for i in range(1000)]
    pq.write_table(pa.table({"data_source": ["arithmetic"] * 1000, "reward_model": rows}), path)
    data = bytearray(path.read_bytes())
    data[4:1500] = b"\xff" * 1496
    path.write_bytes(data)
    facts = grpo_facts(parquet={str(path): read_footer(str(path))})
    settings = grpo_settings(data__train_files=[str(path)], data__val_files=[], reward__function="none.py:f")
    problem, = reward_problems(settings, {}, facts)
    assert problem.why.startswith("its rows cannot be read: ") and problem.code == BAD_INPUT
    function, = function_problems(settings, facts)
    assert function.key == "reward.function"
