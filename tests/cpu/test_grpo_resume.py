"""GRPO that fails in the middle and goes on from its last checkpoint is the run that never failed, bit for bit: seeds of the samplers,
position in the data (also when flat groups took more of it), reference, several updates a step, and a rollout that was under way."""

from __future__ import annotations

from pathlib import Path

import pytest
from direct import Direct, by_letters, run_loop, settings_for, steps
from runs import stored

from mfsdp_cli.rewards.base import RewardResult

EXACT = ("reward", "loss", "grad_norm", "entropy", "response_length", "samples_consumed", "mismatch/abs", "lr", "rollout_batches", "staleness")
VARIANTS = {
    "flat groups, reference, two updates": {"algorithm__filter_groups": True, "algorithm__filter_groups_max_batches": 2, "actor__use_kl_loss": True,
                                            "actor__ppo_mini_batch_size": 2},
    "one step ahead": {"rollout__one_step_ahead": True, "optim__lr": 3e-4},
}


class FailsAtStep4(Direct):
    """The update of step 4 finds no GPU."""

    calls = 0

    def on_ranks(self, method, *args, **more):
        self.calls += method == "save"
        if method == "update" and self.calls == 3:
            raise ConnectionError("the GPU has fallen off the bus")
        return super().on_ranks(method, *args, **more)


def flat_for_every_third(data_source, solution, ground_truth, extra_info) -> RewardResult:
    return RewardResult(0.0, None, "unparseable") if int(ground_truth) % 3 == 0 else by_letters(data_source, solution, ground_truth, extra_info)


def course(records: list[dict]) -> list[tuple]:
    return [tuple(r.get(key) for key in EXACT) for r in steps(records)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_failed_goes_on_as_if_it_had_not(tiny, prompts, tmp_path, variant):
    def settings(run_dir: Path):
        return settings_for(tiny, prompts, run_dir, trainer__total_training_steps=5, trainer__save_freq=1, **VARIANTS[variant])

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    wanted = course(run_loop(settings(straight), straight, flat_for_every_third))
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        run_loop(settings(broken), broken, flat_for_every_third, FailsAtStep4)
    assert (broken / "checkpoints" / "latest").read_text() == "step_000003\n"
    assert course(run_loop(settings(broken), broken, flat_for_every_third)) == wanted and len(wanted) == 5
    tensors, others = (stored(run / "checkpoints" / "step_000005" / "dist_ckpt") for run in (straight, broken))
    assert tensors.keys() == others.keys() and [name for name in tensors if not tensors[name].equal(others[name])] == []
