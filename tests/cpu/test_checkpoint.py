"""The sharded checkpoint at the level of the engine: strict, safe to open, and with the configuration's word above the file's."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from models import OPTIM, HfLoop, Layout, build, conversations, largest_difference, packed_log_probs, step, weights
from ranks import run_ranks
from runs import stored

from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID, MfsdpError

ALL = ["model", "optimizer", "extra"]
BATCHES = [conversations(seed) for seed in range(20, 24)]
OTHER_OPTIM = replace(OPTIM, lr=5e-4, weight_decay=0.5, betas=[0.8, 0.9])


def save_after_two(model, layout: Layout, folder: Path):
    """Two steps, a save, two more steps: (weights saved, last two steps, weights after them, rows of the embedding)."""
    from mfsdp_cli.checkpoint import dtensor

    engine = build(model, layout)
    for batch in BATCHES[:2]:
        step(engine, batch, OPTIM.lr)
    saved = weights(engine)
    dtensor.save(engine, folder, ALL)
    return saved, [step(engine, batch, OPTIM.lr) for batch in BATCHES[2:]], weights(engine), engine.vocab_rows


def load_and_go_on(model, layout: Layout, folder: Path, vocab_rows: int, optim=OPTIM):
    """(weights loaded, notes, last two steps, weights after them), on an engine that has computed something before the load."""
    from mfsdp_cli.checkpoint import dtensor

    engine = build(model, layout, optim, load_weights=False, vocab_rows=vocab_rows)
    packed_log_probs(engine, BATCHES[0])  # a bare forward leaves raw parameters in place, into which a load would be lost
    notes = dtensor.load(engine, folder, ALL)
    evaluated, loaded = packed_log_probs(engine, BATCHES[3]), weights(engine)  # in this order: an export would put loaded weights in use
    steps = [step(engine, batch, optim.lr) for batch in BATCHES[2:]]
    return loaded, evaluated, [note.why for note in notes], steps, weights(engine)


@pytest.mark.parametrize("name, options, saver, loaders", [
    ("qwen2", {"vocab_size": 509}, Layout(ranks=2, tp=2, dtype="bfloat16"), [Layout(ranks=2, tp=2, dtype="bfloat16"), Layout()]),
    ("qwen3_moe", {}, Layout(ranks=2, ep=2), [Layout(ranks=2, ep=2), Layout(ranks=2, tp=2)]),
], ids=["dense-bfloat16-padded", "mixture"])
def test_any_layout_loads_what_another_saved(tiny, tmp_path, name, options, saver, loaders):
    model = tiny(name, **options)
    saved, steps, after, vocab_rows = run_ranks(saver.ranks, save_after_two, model, saver, tmp_path / "dcp")[0]
    for layout in loaders:
        loaded, _, notes, others, ending = run_ranks(layout.ranks, load_and_go_on, model, layout, tmp_path / "dcp", vocab_rows)[0]
        assert largest_difference(loaded, saved) == 0.0, layout  # weight decay, for one, has touched nothing
        if layout == saver:
            assert others == steps and largest_difference(ending, after) == 0.0 and notes == []
        else:
            tolerance = 1e-5 if saver.dtype == layout.dtype else 2e-2
            for mine, wanted in zip(others, steps, strict=True):
                assert mine == pytest.approx(wanted, rel=tolerance), layout
            assert len(notes) == (layout.ranks != saver.ranks) and all("another number of ranks" in note for note in notes)


def test_the_configuration_wins_over_the_file(tiny, tmp_path):
    """Saved at one learning rate, decay and pair of betas, continued at others: as a plain loop whose settings are changed."""
    model, layout = tiny("qwen2"), Layout(ranks=2)
    saved, *_ = run_ranks(2, save_after_two, model, layout, tmp_path / "dcp")[0]
    loop = HfLoop(model)
    for batch in BATCHES[:2]:
        loop.step(batch, OPTIM.lr)
    assert largest_difference(saved, loop.weights(tmp_path / "hf")) < 1e-5
    theirs = [loop.log_probs(sample).detach().numpy() for sample in BATCHES[3]]
    for group in loop.optimizer.param_groups:
        group.update(betas=tuple(OTHER_OPTIM.betas), weight_decay=OTHER_OPTIM.weight_decay if group["weight_decay"] else 0.0)
    wanted = [loop.step(batch, OTHER_OPTIM.lr) for batch in BATCHES[2:]]
    for _, evaluated, _, steps, after in run_ranks(2, load_and_go_on, model, layout, tmp_path / "dcp", 512, OTHER_OPTIM):
        assert max(abs(a - b).max() for a, b in zip(evaluated, theirs, strict=True)) < 1e-5
        for mine, other in zip(steps, wanted, strict=True):
            assert mine == pytest.approx(other, rel=1e-5)
    assert largest_difference(after, loop.weights(tmp_path / "hf")) < 1e-5


class Runs:
    """A pickle that touches a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def write(state: dict, folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def refusals(model, layout: Layout, good: Path, folders: list[Path]):
    """Texts of what is refused, and whether the engine was left as it was; then the good folder loads, random states too."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mfsdp_cli.checkpoint import dtensor

    def draw():
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(2).tolist()
        return torch.rand(2).tolist(), tracked

    engine = build(model, layout)
    before, texts = weights(engine), []
    for folder in folders:
        with pytest.raises(MfsdpError) as caught:
            dtensor.load(engine, folder, ALL)
        assert caught.value.exit_code == BAD_INPUT
        texts.append(str(caught.value))
    unchanged = largest_difference(weights(engine), before) == 0.0
    torch.manual_seed(1234 + engine.dp_rank)
    dtensor.save(engine, good, ALL)
    drawn, later = draw(), draw()
    dtensor.load(engine, good, ALL)
    return texts, unchanged, drawn, later, draw()


def test_a_load_is_whole_or_refused_and_restores_random_states(tiny, tmp_path):
    model, layout = tiny("qwen2"), Layout(ranks=2)
    run_ranks(2, save_after_two, model, layout, tmp_path / "dcp")
    state = stored(tmp_path / "dcp")
    name = "model.decoder.layers.1.mlp.linear_fc2.weight"
    moment = "optimizer.state.decoder.final_layernorm.weight.exp_avg"
    assert state[name].shape == (64, 128) and name in state and moment in state
    evil = shutil.copytree(tmp_path / "dcp", tmp_path / "evil")
    (evil / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    cut = shutil.copytree(tmp_path / "dcp", tmp_path / "cut")
    file = max(cut.glob("*.distcp"), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    folders = [
        write({k: v for k, v in state.items() if k != name}, tmp_path / "missing"),
        write({k: v for k, v in state.items() if k != moment}, tmp_path / "no-moment"),
        write({k: v for k, v in state.items() if k.startswith("model.")}, tmp_path / "no-optimizer"),
        write(state | {"model.decoder.layers.2.mlp.linear_fc2.weight": state[name]}, tmp_path / "extra"),
        write(state | {name: state[name][:, :100].contiguous()}, tmp_path / "shape"),
        write(state | {"model.step": 3}, tmp_path / "object"),
        cut,
        evil,
    ]
    pair = run_ranks(2, refusals, model, layout, tmp_path / "good", folders)
    for texts, unchanged, drawn, later, again in pair:
        assert unchanged
        assert "1 tensors missing" in texts[0] and name in texts[0]
        assert "1 tensors missing" in texts[1] and moment in texts[1]
        # two moments of 16 parameters, two of these in halves, and the number of updates
        assert "37 tensors missing, among them optimizer.num_updates" in texts[2]
        assert "1 tensors too many" in texts[3] and "layers.2." in texts[3]
        assert f"{name} [64, 100]" in texts[4] and "[64, 128]" in texts[4]
        assert "1 pickled objects" in texts[5] and "model.step" in texts[5]
        assert "cut short" in texts[6] and file.name in texts[6]
        assert "system" in texts[7] and "attack" in texts[7]
        assert drawn != later and again == drawn
    assert pair[0][2][0] != pair[1][2][0]  # each rank has its own
    assert not (tmp_path / "ran").exists()
    pickle.loads((evil / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()  # and it would have run


def test_a_vocabulary_that_the_new_ranks_cannot_share_is_refused(tmp_path):
    """509 rows were not padded, since one rank needs no padding; two cannot take them over."""
    from mfsdp_cli.checkpoint import manifest, saving
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.train.checkpoints import find_resume

    made = manifest.Manifest(step=3, total_steps=9, samples_consumed=24, contents=ALL, topology={"world": 1, "tp": 1}, dtype="float32",
                             padded_vocab_size=509, architecture="Qwen2ForCausalLM", source_model="m", num_tensors=1)
    saving.commit(saving.begin(tmp_path / "checkpoints", 3), made)
    settings = SftSettings()
    found, _ = find_resume(settings, tmp_path)
    assert (found.position.step, found.position.samples_consumed) == (3, 24)
    settings.engine.tensor_model_parallel_size = 2
    with pytest.raises(MfsdpError) as caught:
        find_resume(settings, tmp_path)
    [problem] = caught.value.problems
    assert problem.key == "engine.tensor_model_parallel_size" and "509 rows" in problem.why and caught.value.exit_code == CONFIG_INVALID
