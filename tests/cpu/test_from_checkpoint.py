"""A run that starts from a checkpoint has exactly its weights, whatever the layout, and nothing else of it; so has a reference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from direct import run_loop
from models import OPTIM, Layout, conversations, largest_difference, packed_log_probs
from ranks import run_ranks
from runs import stored, train_ranks, training_records, validation_losses
from test_export_weights import CASES, exported, read, train_and_save
from test_grpo_loop import by_letters, settings_for, steps

from mfsdp_cli.checkpoint.reuse import SOURCE_INDEX, ModelSource, model_checkpoint
from mfsdp_cli.config.schema import SftSettings

BATCH = conversations(seed=40)
OTHER_LAYOUTS = {"dense": Layout(ranks=1, dtype="bfloat16"), "mixture": Layout(ranks=2, tp=2)}


def engine_from(source: ModelSource, layout: Layout, optim):
    import torch
    from megatron.core import parallel_state as mpu

    from mfsdp_cli.engine.megatron import init_distributed
    from mfsdp_cli.train import checkpoints

    if not mpu.is_initialized():
        init_distributed(layout.settings, timeout_s=60)
    settings = SftSettings()
    settings.engine = layout.settings
    return checkpoints.build_engine(settings, source, None, optim, torch.device("cpu"))


def what_they_say(checkpoint: Path, folder: Path, layout: Layout):
    """Log-probabilities by a policy and by a frozen model, each from the checkpoint and from a Hugging Face folder; the weights that the
    first one hands on; rows of the embeddings."""
    sources = [model_checkpoint(checkpoint), ModelSource(folder)]
    engines = [engine_from(source, layout, optim)[0] for optim in (OPTIM, None) for source in sources]
    assert all(p.requires_grad for p in engines[0].module.parameters()) and not any(p.requires_grad for p in engines[2].module.parameters())
    log_probs = [packed_log_probs(engine, BATCH) for engine in engines]
    return log_probs, dict(engines[0].named_weights()), [engine.vocab_rows for engine in engines]


@pytest.mark.parametrize("case", CASES)
def test_policy_and_reference_are_those_of_the_exported_folder(tiny, tmp_path, case):
    name, options, layout = CASES[case]
    model = tiny(name, **options)
    checkpoint, weights = run_ranks(layout.ranks, train_and_save, model, layout, tmp_path / "run")[0]
    exported(checkpoint, tmp_path / "hf")
    for layout in (layout, OTHER_LAYOUTS[case]):
        (policy, policy_hf, reference, reference_hf), handed_on, rows = run_ranks(
            layout.ranks, what_they_say, checkpoint, tmp_path / "hf", layout)[0]
        assert largest_difference(handed_on, weights) == 0.0  # also: a tied output layer is in neither
        for others in (policy_hf, reference, reference_hf):
            assert all(np.array_equal(mine, other) for mine, other in zip(policy, others, strict=True)), layout
    assert case != "dense" or rows == [512, 509, 512, 509]  # padded for two ranks; one rank needs no padding of a folder's


@pytest.fixture(scope="module")
def settings(tiny, tmp_path_factory) -> SftSettings:
    from mfsdp_cli.data.prepare import prepare

    folder = tmp_path_factory.mktemp("data")
    prepare("arithmetic", input=None, out_dir=str(folder), purpose="sft", train_rows=40, test_rows=6)
    s = SftSettings()
    s.model.path = str(tiny("qwen2"))
    s.data.train_files, s.data.val_files = [str(folder / "train.parquet")], [str(folder / "test.parquet")]
    s.data.train_batch_size, s.data.max_token_len_per_gpu = 4, 128
    s.engine.dtype, s.engine.device = "float32", "cpu"
    s.optim.lr, s.optim.eps = 1e-3, 1e-6
    s.trainer.total_training_steps, s.trainer.save_freq, s.trainer.test_freq = 4, -1, -1
    return s


def second_stage(settings: SftSettings, path: Path, tp: int = 1) -> SftSettings:
    """Other data order, other learning rate."""
    return dataclasses.replace(
        settings, model=dataclasses.replace(settings.model, path=str(path)), optim=dataclasses.replace(settings.optim, lr=5e-4),
        engine=dataclasses.replace(settings.engine, tensor_model_parallel_size=tp),
        trainer=dataclasses.replace(settings.trainer, seed=7, n_gpus_per_node=tp),
    )


def test_a_second_stage_starts_where_the_first_ended(settings, tiny, tmp_path):
    first, second, split = tmp_path / "first", tmp_path / "second", tmp_path / "split"
    train_ranks(settings, first)
    step = first / "checkpoints" / "step_000004"
    ended = validation_losses(first)[4]

    train_ranks(second_stage(settings, step), second)
    assert validation_losses(second)[0] == ended < validation_losses(first)[0] and validation_losses(second)[4] < ended
    records = training_records(second)
    assert [(r["step"], r["samples_consumed"]) for r in records] == [(1, 4), (2, 8), (3, 12), (4, 16)]  # from its own beginning
    tensors = stored(second / "checkpoints" / "step_000004" / "dist_ckpt")
    assert int(tensors["optimizer.num_updates"]) == 4

    # By the run's folder, on two tensor-parallel ranks, stopped and continued: then its own checkpoint is the one that counts.
    across = second_stage(settings, first, tp=2)
    train_ranks(across, split, stop_after=2)
    train_ranks(across, split, attempt="002")
    assert validation_losses(split)[0] == pytest.approx(ended, rel=1e-6)
    for mine, wanted in zip(training_records(split), records, strict=True):
        assert (mine["step"], mine["samples_consumed"]) == (wanted["step"], wanted["samples_consumed"])
        assert (mine["loss"], mine["grad_norm"]) == pytest.approx((wanted["loss"], wanted["grad_norm"]), rel=1e-5)

    # The export of a grandchild is checked against the first model's index.
    model = tiny("qwen2")
    last = split / "checkpoints" / "step_000004"
    assert json.loads((last / SOURCE_INDEX).read_text()) == json.loads((step / SOURCE_INDEX).read_text()) == ModelSource(model).tensors()
    report = exported(last, tmp_path / "hf")
    assert report["forward_check_difference"] < 1e-4 and read(tmp_path / "hf").keys() == read(model).keys()
    assert json.loads((last / "manifest.json").read_text())["source_model"] == str(first)


def test_grpo_from_a_checkpoint(settings, tiny, tmp_path):
    """Policy, frozen reference and sampler have the checkpoint's weights; what it saves can be exported in turn."""
    from mfsdp_cli.data.prepare import prepare

    train_ranks(settings, tmp_path / "sft")
    prepare("arithmetic", input=None, out_dir=str(tmp_path), purpose="rl", train_rows=16, test_rows=6)
    grpo = settings_for(tiny, tmp_path, tmp_path / "run", actor__use_kl_loss=True)
    grpo.model.path = str(tmp_path / "sft" / "checkpoints" / "step_000004")
    first, second, _ = steps(run_loop(grpo, tmp_path / "run", by_letters))
    assert first["kl"] < 1e-9 < second["kl"] and first["mismatch/abs"] < 1e-5 and first["weight_version"] == 1
    exported(tmp_path / "run" / "checkpoints" / "step_000003", tmp_path / "hf")
    assert largest_difference(read(tmp_path / "hf"), read(tiny("qwen2"))) > 1e-4
