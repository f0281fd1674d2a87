"""One GRPO update is the same on every layout and however it is split, and equals a plain loop over transformers' model."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model
from ranks import run_ranks
from waits import Waits

from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.engine import megatron  # noqa: F401  imported once, before the ranks fork
from mfsdp_cli.train import losses
from mfsdp_cli.train.ranks import TrainerRank
from mfsdp_cli.types import Experience, Sample

LR = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "m", family="qwen2", vocab_size=512)


def settings_for(model, tp=1, **actor) -> GrpoSettings:
    settings = GrpoSettings()
    settings.model.path = str(model)
    settings.engine.dtype, settings.engine.device = "float32", "cpu"
    settings.engine.tensor_model_parallel_size = tp
    settings.data.max_response_length = 12
    settings.rollout.temperature = 0.8
    settings.actor.kl_loss_coef, settings.actor.entropy_coeff = 0.05, 0.01
    settings.actor.ppo_max_token_len_per_gpu = 64
    for name, value in actor.items():
        setattr(settings.actor, name, value)
    return settings


def responses(seed=0) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt, response) token ids; one response is empty."""
    rng = np.random.default_rng(seed)
    lengths = [(5, 7), (9, 12), (4, 0), (6, 3), (8, 9), (5, 1)]
    return [(rng.integers(0, 500, p), rng.integers(0, 500, r)) for p, r in lengths]


def batch_of(old=None, ref=None, seed=1) -> list[Experience]:
    rng = np.random.default_rng(seed)
    batch = []
    for i, (prompt, response) in enumerate(responses()):
        sample = Sample(np.concatenate([prompt, response]), np.arange(len(prompt) + len(response)) >= len(prompt), i)
        mask = rng.random(len(response)) > 0.2
        noise = rng.normal(0, 0.3, len(response)).astype(np.float32)
        rollout = (old[i] + noise if old else np.full(len(response), -6.0) + noise).astype(np.float32)
        batch.append(Experience(sample, mask, rollout, float(rng.normal()), old and old[i], ref and ref[i]))
    return batch


def started(settings, world) -> TrainerRank:
    from mfsdp_cli.train import checkpoints

    rank = TrainerRank(settings, None, int(os.environ["RANK"]), world, 0)
    checkpoints.find_resume = lambda *_: (None, [])  # no run folder here
    rank.start("env://")
    return rank


def update(settings, world, indices):
    """In a rank: log-probabilities, one update, log-probabilities again; and the statistics, merged over the ranks."""
    import torch.distributed as dist

    rank = started(settings, world)
    samples = [e.sample for e in batch_of()]

    def everywhere(reference):
        parts: list = [None] * world
        dist.all_gather_object(parts, rank.log_probs(samples, reference))
        return {i: v for part in parts for i, v in part.items()}

    old, ref = everywhere(False), everywhere(True)
    result = rank.update(batch_of(old, {i: v * 1.1 for i, v in ref.items()}), indices, LR)
    parts: list = [None] * world
    dist.all_gather_object(parts, result["stats"])
    return old, everywhere(False), result["grad_norm"], losses.merge(p for p in parts if p)


LAYOUTS = [(2, 1, {}), (2, 2, {}), (4, 2, {}), (1, 1, {"ppo_max_token_len_per_gpu": 21}), (1, 1, {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1})]


def test_one_update_does_not_depend_on_layout_or_split(model):
    indices = [0, 1, 2, 3, 4, 5]
    old, new, norm, stats = run_ranks(1, update, settings_for(model), 1, indices)[0]
    assert sorted(old) == indices and old[2].shape == (0,)
    assert max(np.abs(new[i] - old[i]).max() for i in (0, 1, 3, 4, 5)) > 1e-4  # the update did something
    for world, tp, actor in LAYOUTS:
        old2, new2, norm2, stats2 = run_ranks(world, update, settings_for(model, tp, **actor), world, indices)[0]
        for i in indices:
            np.testing.assert_allclose(old2[i], old[i], atol=1e-5)
            np.testing.assert_allclose(new2[i], new[i], atol=2e-5)
        assert norm2 == pytest.approx(norm, rel=1e-5)
        assert stats2.keys() == stats.keys()
        for key, value in stats.items():
            assert stats2[key] == pytest.approx(value, rel=1e-4, abs=1e-5), (world, tp, actor, key)


class _LooksAtItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float(grad.sum())


WAITS = {
    "item": lambda x, m: x[0].item(), "float": lambda x, m: float(x.sum()), "if": lambda x, m: 1 if m.any() else 0, "cpu": lambda x, m: x.cpu(),
    "max": lambda x, m: max(x[0], x[1]), "tolist": lambda x, m: x.tolist(), "print": lambda x, m: f"{x.sum()}{x}", "get": lambda x, m: x[m],
    "set": lambda x, m: x.index_put_((m,), x[:2].clone()), "nonzero": lambda x, m: m.nonzero(), "where": lambda x, m: torch.where(m),
    "masked_select": lambda x, m: x.masked_select(m), "unique": lambda x, m: x.unique(), "equal": lambda x, m: x.equal(x),
    "slice": lambda x, m: x[: m.sum()], "repeat": lambda x, m: x.repeat_interleave(m.long()),
    "to": lambda x, m: x.to("cpu", non_blocking=True), "tensor": lambda x, m: torch.tensor([1.0], device=x.device),
    "backward": lambda x, m: _LooksAtItsGradient.apply(x.requires_grad_()).sum().backward(),
}
NO_WAITS = {
    "masked_fill": lambda x, m: x.masked_fill_(m, 0.0), "set": lambda x, m: x.index_put_((m,), torch.zeros(())),
    "where": lambda x, m: torch.where(m, x, 0.0), "get": lambda x, m: x[m.long()], "sum": lambda x, m: sum([x.sum(), m.sum()]),
    "repeat": lambda x, m: x.repeat_interleave(m.long(), output_size=2), "to": lambda x, m: m.to(torch.float64).to(x),
    "zeros": lambda x, m: torch.zeros(3, device=x.device).fill_(2.0), "len": lambda x, m: range(len(x)), "max": lambda x, m: x.detach().max(),
}


@pytest.mark.parametrize("calls, expected", [(WAITS, True), (NO_WAITS, False)])
def test_what_counts_as_a_wait(calls, expected):
    for name, call in calls.items():
        x = torch.arange(4.0)
        with Waits() as waits:
            call(x, x > 1)
        assert bool(waits.found) == expected, (name, waits.found)


def waits_of_update(settings, world):
    """In a rank: the waits of an update and of the reference's log-probabilities, each the second of its kind, once all is set up."""
    rank = started(settings, world)
    samples, old = [e.sample for e in batch_of()], {i: np.full(len(r), -6.0, np.float32) for i, (_, r) in enumerate(responses())}
    found = []
    for call in (lambda: rank.update(batch_of(old, old), range(6), LR), lambda: rank.log_probs(samples, True)):
        call()
        with Waits() as waits:
            call()
        found.append(waits.found)
    return found


@pytest.mark.parametrize("world, tp, actor", [
    (1, 1, {"ppo_max_token_len_per_gpu": 21}), (2, 2, {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": "gspo"}),
])
def test_a_rank_waits_for_its_gpu_once_an_update_and_once_a_batch_of_log_probs(model, world, tp, actor):
    for update, log_probs in run_ranks(world, waits_of_update, settings_for(model, tp, **actor), world):
        assert [w.split(":")[0] for w in update] == ["tolist at mfsdp_cli/train/ranks.py"], update
        assert [w.split(":")[0] for w in log_probs] == ["cpu at mfsdp_cli/train/ranks.py"], log_probs


def test_update_equals_a_plain_loop(model):
    """The mini batch [0, 1, 3] against transformers' model, padded arithmetic written out for token-mean PPO with a KL term."""
    from transformers import AutoModelForCausalLM

    indices = [0, 1, 3]
    settings = settings_for(model, entropy_coeff=0.0)
    old, _, norm, stats = run_ranks(1, update, settings, 1, indices)[0]
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference = {i: v * 1.1 for i, v in old.items()}  # policy and reference start from the same weights
    batch = batch_of(old, reference)
    total, count = 0.0, sum(int(batch[i].mask.sum()) for i in indices)
    for i in indices:
        e = batch[i]
        ids = torch.from_numpy(e.sample.input_ids)
        logits = hf(ids[None]).logits[0, :-1] / settings.rollout.temperature
        log_probs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0][-len(e.mask):]
        np.testing.assert_allclose(log_probs.detach().numpy(), old[i], atol=1e-5)
        weight = torch.exp(torch.from_numpy(e.old_log_probs - e.rollout_log_probs)).clamp(max=2.0)
        ratio = torch.exp(log_probs - torch.from_numpy(e.old_log_probs))
        policy = -torch.minimum(ratio * e.advantage, ratio.clamp(0.8, 1.2) * e.advantage) * weight
        d = log_probs - torch.from_numpy(e.ref_log_probs)
        token = policy + 0.05 * (torch.exp(-d) + d - 1)
        total = total + (token * torch.from_numpy(e.mask)).sum() / count
    total.backward()
    theirs = torch.sqrt(sum((p.grad**2).sum() for p in hf.parameters() if p.grad is not None)).item()
    assert stats["total_loss"] == pytest.approx(total.item(), rel=1e-5)
    assert norm == pytest.approx(theirs, rel=1e-5)
