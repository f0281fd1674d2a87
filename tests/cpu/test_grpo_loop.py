"""What a whole run of GRPO does in unusual cases, by its own loop in one process (`direct`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from direct import Direct, by_letters, run_loop, settings_for, steps

from mfsdp_cli.rewards.base import RewardResult


def always_the_same(*_) -> RewardResult:
    return RewardResult(0.0, None, "unparseable")


class StaleFromStep1(Direct):
    """Tells the driver that it has the weights of step 1, and goes on with those before."""

    def on_samplers(self, method, *args):
        if method == "update_weights" and self.sampler.version >= 1:
            self.sampler.version += 1
            return [self.sampler.version]
        return super().on_samplers(method, *args)


def test_stale_weights_in_the_sampler_stop_the_run_at_that_step(tiny, prompts, tmp_path):
    limit = {"algorithm__mismatch_alarm": 0.005, "trainer__save_freq": 1}
    sound = steps(run_loop(settings_for(tiny, prompts, tmp_path / "sound", **limit), tmp_path / "sound", by_letters))
    assert len(sound) == 3 and all(r["mismatch/abs"] < 1e-5 and r["staleness"] == 0 for r in sound)
    with pytest.raises(RuntimeError, match="step 2: sampler and trainer differ by .* stale weights in the sampler"):
        run_loop(settings_for(tiny, prompts, tmp_path / "stale", **limit), tmp_path / "stale", by_letters, StaleFromStep1)
    assert [p.name for p in sorted((tmp_path / "stale" / "checkpoints").glob("step_*"))] == ["step_000001"]  # nothing of step 2 was saved


def test_one_step_ahead_samples_with_the_weights_of_the_step_before(tiny, prompts, tmp_path):
    found = {}
    for ahead in (False, True):
        run = tmp_path / str(ahead)
        found[ahead] = steps(run_loop(settings_for(tiny, prompts, run, rollout__one_step_ahead=ahead, optim__lr=3e-4, trainer__total_training_steps=4),
                                     run, by_letters))
    assert [r["staleness"] for r in found[False]] == [0, 0, 0, 0]
    assert [r["staleness"] for r in found[True]] == [0, 1, 1, 1]
    assert [r["weight_version"] for r in found[True]] == [1, 1, 2, 3]
    assert [r["samples_consumed"] for r in found[True]] == [r["samples_consumed"] for r in found[False]] == [4, 8, 12, 16]
    assert found[True][0]["reward"] == found[False][0]["reward"] and found[True][0]["mismatch/abs"] < 1e-5
    assert all(1e-4 < r["mismatch/abs"] < 0.1 for r in found[True][1:])  # measured, and below the alarm's default


def test_a_group_of_equal_rewards_teaches_nothing_and_is_counted(tiny, prompts, tmp_path):
    records = steps(run_loop(settings_for(tiny, prompts, tmp_path, optim__weight_decay=0.0), tmp_path, always_the_same))
    assert [r["zero_variance_share"] for r in records] == [1.0] * 3
    assert [r["grad_norm"] for r in records] == [0.0] * 3 and [r["loss"] for r in records] == [0.0] * 3
    assert [r["unparseable_share"] for r in records] == [1.0] * 3


def flat_for_even_answers(data_source, solution, ground_truth, extra_info) -> RewardResult:
    return always_the_same() if int(ground_truth) % 2 == 0 else by_letters(data_source, solution, ground_truth, extra_info)


def test_flat_groups_are_replaced_by_those_of_further_prompts(tiny, prompts, tmp_path):
    import pyarrow.parquet as pq

    from mfsdp_cli.data.loader import epoch_order

    settings = settings_for(tiny, prompts, tmp_path, algorithm__filter_groups=True, algorithm__filter_groups_max_batches=2, trainer__samples_per_step=-1)
    records = steps(run_loop(settings, tmp_path, flat_for_even_answers))
    gold = [int(r["ground_truth"]) for r in pq.read_table(prompts / "train.parquet", columns=["reward_model"]).column(0).to_pylist()]
    order = [int(row) for epoch in range(4) for row in epoch_order(64, settings.trainer.seed, epoch, True)]
    at = 0
    for record in records:  # by hand: batches of 4 prompts until 4 have an odd answer, three batches at most
        kept, batches = [], 0
        while len(kept) < 4 and batches < 3:
            kept, batches, at = kept + [row for row in order[at : at + 4] if gold[row] % 2], batches + 1, at + 4
        told = pq.read_table(tmp_path / "samples" / f"step_{record['step']:06d}.parquet").to_pydict()
        assert list(dict.fromkeys(told["row"])) == kept[:4] and record["rollout_batches"] == batches
        assert record["samples_consumed"] == at and record["num_groups"] == len(kept[:4])
        assert record["responses_sampled"] == batches * 16 and record["responses_filtered"] == batches * 16 - 4 * len(kept[:4])
        assert record["zero_variance_share"] == 0.0


def test_when_no_group_differs_the_cap_ends_the_search(tiny, prompts, tmp_path):
    settings = settings_for(tiny, prompts, tmp_path, algorithm__filter_groups=True, algorithm__filter_groups_max_batches=1, trainer__total_training_steps=1)
    [record] = steps(run_loop(settings, tmp_path, always_the_same))
    assert record["rollout_batches"] == 2 and record["samples_consumed"] == 8 and record["grad_norm"] == 0.0 and record["zero_variance_share"] == 1.0


class SilentOnce(Direct):
    """The first response of every batch has no tokens at all, as of an engine that was aborted."""

    def begin_sampling(self, prompts, sampling, seeds):
        [first, *others], *rest = super().begin_sampling(prompts, sampling, seeds)
        return [[replace(first, input_ids=first.input_ids[:0], log_probs=first.log_probs[:0], text="", is_truncated=False), *others], *rest]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_response_of_no_tokens_is_counted_and_harms_nothing(tiny, prompts, tmp_path, mode):
    settings = settings_for(tiny, prompts, tmp_path, actor__loss_agg_mode=mode, actor__ppo_mini_batch_size=2, actor__use_kl_loss=True)
    records = steps(run_loop(settings, tmp_path, by_letters, SilentOnce))
    assert [r["empty_responses"] for r in records] == [1, 1, 1]
    assert all(np.isfinite([r["loss"], r["grad_norm"], r["kl"], r["entropy"]]).all() and r["grad_norm"] > 0 for r in records)


class NoMoreThanWeights(Direct):
    """A policy without optimizer, and no reference, although the settings of training would have one."""

    def start_trainers(self):
        state = super().start_trainers()
        assert self.rank.policy.optimizer is None and self.rank.reference is None
        return state


def test_validation_only_takes_no_step(tiny, prompts, tmp_path):
    settings = settings_for(tiny, prompts, tmp_path, trainer__val_only=True, rollout__val_n=2, rollout__val_temperature=0.7, actor__use_kl_loss=True)
    [record] = run_loop(settings, tmp_path, by_letters, NoMoreThanWeights)
    assert record["step"] == 0 and "loss" not in record and 0 <= record["val_reward"] <= 1
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "samples" / "val_step_000000.parquet").exists()


class NotANumber(Direct):
    """The update of step 2 finds a gradient that is not a number."""

    def on_ranks(self, method, *args, **more):
        if method == "update" and self.sampler.version == 2:
            args[0][0] = replace(args[0][0], advantage=float("nan"))
        return super().on_ranks(method, *args, **more)


def test_a_gradient_that_is_not_a_number_ends_the_run_and_leaves_its_samples(tiny, prompts, tmp_path):
    import pyarrow.parquet as pq

    with pytest.raises(RuntimeError, match="gradient norm is nan"):
        run_loop(settings_for(tiny, prompts, tmp_path, trainer__save_freq=1), tmp_path, by_letters, NotANumber)
    assert [p.name for p in sorted((tmp_path / "checkpoints").glob("step_*"))] == ["step_000001"]
    assert pq.read_table(tmp_path / "samples" / "step_000002.parquet").num_rows == 16  # what it was about to learn from
