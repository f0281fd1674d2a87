"""What stays and what goes; test_manifest.py has the order in which it goes, and the kills in between."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from facts_for_tests import make_settings, problems
from grpo_for_tests import grpo_settings
from inputs_for_tests import write_checkpoint

from mfsdp_cli.checkpoint import finding, retention
from mfsdp_cli.checkpoint.manifest import require_complete, step_folder
from mfsdp_cli.config.values import leaves


def write(run: Path, losses: dict[int, float | None]) -> Path:
    """Checkpoints by step; None is a save without validation. Returns their folder."""
    for step, loss in losses.items():
        write_checkpoint(run, step, metrics={} if loss is None else retention.recorded({"val_loss": loss}), best_metric="val_loss")
    return run / "checkpoints"


def left(folder: Path) -> list[int]:
    return sorted(finding.complete_steps(folder))


def test_every_n_steps_stay_beside_the_last(tmp_path):
    folder = write(tmp_path, dict.fromkeys((100, 200, 300, 400, 500, 600, 700)))
    retention.prune(folder, 2, every=300)
    assert left(folder) == [300, 600, 700], "600 is one of the last two as well"
    retention.prune(folder, 1, every=300)
    assert left(folder) == [300, 600, 700]


def test_the_best_stay_beside_the_last(tmp_path):
    folder = write(tmp_path, {1: 0.5, 2: 0.2, 3: 0.4, 4: 0.9, 5: 0.8})
    retention.prune(folder, 1, best=2, metric="val_loss")
    assert left(folder) == [2, 3, 5]
    write(tmp_path, {6: 0.1})
    retention.prune(folder, 1, best=2, metric="val_loss")
    assert left(folder) == [2, 6], "6 is best and last"
    write(tmp_path, {7: 0.7})
    retention.prune(folder, 1, best=2, metric="val_loss")
    assert left(folder) == [2, 6, 7]


def test_higher_is_better_where_it_is(tmp_path):
    for step, rate in ((1, 0.9), (2, 0.1), (3, 0.5), (4, 0.0)):
        write_checkpoint(tmp_path, step, metrics={"val_pass_rate": rate, "val_reward": -rate})
    folder = tmp_path / "checkpoints"
    retention.prune(folder, 1, best=1, metric="val_pass_rate")
    assert left(folder) == [1, 4]


def test_what_was_no_number_or_not_validated_never_wins(tmp_path):
    folder = write(tmp_path, {1: float("nan"), 2: float("-inf"), 3: None, 4: 5.0, 5: None, 6: None})
    assert json.loads((folder / "step_000001" / "manifest.json").read_text())["metrics"] == {"val_loss": None}
    retention.prune(folder, 1, best=3, metric="val_loss")
    assert left(folder) == [4, 6], "fewer than three have a value"


def test_of_equals_the_earlier_is_better(tmp_path):
    folder = write(tmp_path, {1: 0.5, 2: 0.25, 3: 0.25, 4: 0.5})
    retention.prune(folder, 1, best=1, metric="val_loss")
    assert left(folder) == [2, 4]
    assert retention.ranked({4: {"val_loss": 1.0}, 2: {"val_loss": 1.0}, 3: {"val_loss": 0.5}, 1: {}}, "val_loss") == [3, 2, 4]


def test_damaged_ones_are_neither_best_nor_deleted(tmp_path):
    folder = write(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    (folder / "step_000001" / "trainer.json").unlink()
    retention.prune(folder, 1, best=1, metric="val_loss")
    assert left(folder) == [2, 4] and (folder / "step_000001").is_dir()


@pytest.mark.parametrize("seed", range(8))
def test_against_the_rules_on_random_folders(tmp_path, seed):
    """By the rules written down once more: pruned in one go, or after each save as a run does, no one that must stay is gone."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(1, 30), 8))
    losses = {step: rng.choice([None, float("nan"), rng.randint(1, 4) / 4]) for step in steps}
    keep, every, best = rng.randint(1, 3), rng.choice([None, 2, 5]), rng.randint(0, 3)
    folder = tmp_path / "checkpoints"
    for step in steps:
        write(tmp_path, {step: losses[step]})
        before = left(folder)
        retention.prune(folder, keep, every, best, "val_loss")
        numbers = [(losses[s], s) for s in before if losses[s] is not None and losses[s] == losses[s]]
        wanted = set(before[-keep:]) | {s for s in before if every and s % every == 0} | {s for _, s in sorted(numbers)[:best]}
        assert set(left(folder)) == wanted and step in wanted
    assert require_complete(finding.latest_complete(folder)).step == steps[-1]


def test_the_pointed_one_stays_whatever_its_value(tmp_path):
    folder = write(tmp_path, {1: 9.0, 2: 0.1, 3: 0.2, 4: 0.3})
    (folder / "latest").write_text(step_folder(1))
    retention.prune(folder, 1, best=1, metric="val_loss")
    assert left(folder) == [1, 2, 4]


def test_the_metrics_that_settings_offer_are_those_with_a_direction():
    offered = {choice for kind in ("sft", "grpo") for choice in leaves(kind)["trainer.best_metric"].choices}
    assert offered == set(retention.BETTER)
    assert {kind: leaves(kind)["trainer.best_metric"].default for kind in ("sft", "grpo")} == {"sft": "val_loss", "grpo": "val_reward"}
    assert retention.recorded({"val_reward": 1.5, "val_response_length": 7.0, "val_pass_rate": float("inf")}) == {
        "val_reward": 1.5, "val_pass_rate": None}


@pytest.mark.parametrize("save, test, fix", [(100, 30, 25), (100, 100, None), (100, 20, None), (100, 200, 100), (100, -1, 100),
                                             (-1, 7, None)])
def test_the_best_need_a_validation_at_each_save(save, test, fix):
    found = problems(trainer__keep_best=1, trainer__save_freq=save, trainer__test_freq=test, rule="keep-best-validates")
    assert [p.fix.split(",")[0] for p in found] == ([] if fix is None else [f"trainer.test_freq={fix}"])
    assert problems(trainer__save_freq=save, trainer__test_freq=test, rule="keep-best-validates") == []


def test_the_best_need_validation_data_and_a_known_metric():
    [problem] = problems(trainer__keep_best=2, data__val_files=[], rule="keep-best-validates")
    assert problem.key == "trainer.keep_best" and "val_files is empty" in problem.why
    assert make_settings().trainer.best_metric == "val_loss" and grpo_settings().trainer.best_metric == "val_reward"


@pytest.mark.parametrize("every, save, told", [(500, 100, None), (250, 100, "trainer.keep_every=300"), (50, 100, "trainer.keep_every=100"),
                                               (100, -1, "leave it out")])
def test_only_saved_steps_can_be_kept(every, save, told):
    found = problems(trainer__keep_every=every, trainer__save_freq=save, rule="keep-every-saves")
    assert [p.fix.split(", or")[0] for p in found] == ([] if told is None else [told])
