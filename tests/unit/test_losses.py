"""The losses by hand, against a padded reference of one sequence at a time, under any split, and their gradients."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path

import pytest
import torch

from mfsdp_cli.config.schema_grpo import KL_TYPES, LOSS_AGG_MODES, ActorSettings
from mfsdp_cli.train import losses
from mfsdp_cli.train.losses import (
    Totals, actor_loss, aggregate, count_totals, kl_penalty, means, merge, policy_loss, sequence_ids, sft_loss,
)

NAN = math.nan
MODES = list(LOSS_AGG_MODES)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def log(*values):
    return vector(*values).log()


def test_needs_torch_alone():
    tree = ast.parse(Path(losses.__file__).read_text(encoding="utf-8"))
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    outside = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert outside == {"torch", "mfsdp_cli"} and [name for name in imported if "mfsdp" in name] == ["mfsdp_cli.config.schema_grpo"]


# --- sft ----------------------------------------------------------------------------------------------------------------


def test_sft_loss_by_hand():
    log_probs = vector(-1, NAN, -2, -math.inf, -4).requires_grad_()
    loss = sft_loss(log_probs, torch.tensor([1.0, 0, 1, 0, 1]), 14)  # 14 targets over all ranks, three of them here: (1 + 2 + 4) / 14
    assert loss.item() == 0.5
    loss.backward()
    assert log_probs.grad.tolist() == [-1 / 14, 0, -1 / 14, 0, -1 / 14]


def test_sft_loss_of_a_rank_without_work_is_zero_with_gradient_zero():
    log_probs = vector(NAN, 3).requires_grad_()
    loss = sft_loss(log_probs, torch.zeros(2), 5)
    loss.backward()
    assert loss.item() == 0 and log_probs.grad.tolist() == [0, 0]


# --- policy loss by hand ------------------------------------------------------------------------------------------------


def ppo(ratios, advantages, mask=None, **changes):
    new = log(*ratios).requires_grad_()
    mask = torch.ones(len(ratios)) if mask is None else mask
    settings = ActorSettings(**({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0} | changes))
    out, stats = policy_loss(new, torch.zeros_like(new), vector(*advantages), mask, torch.zeros(len(ratios), dtype=torch.long), settings)
    out.sum().backward()
    return out.tolist(), new.grad.tolist(), {key: float(value) for key, value in stats.items()}


def test_ppo_by_hand():
    # ratio 1, 1.5, 0.5, 1.1 with A = 2: the loss is -2 min(r, 1.28); the gradient of -2 r in log r is -2 r, and 0 above 1.28
    out, grad, stats = ppo([1, 1.5, 0.5, 1.1], [2, 2, 2, 2])
    assert out == pytest.approx([-2, -2.56, -1, -2.2]) and grad == pytest.approx([-2, 0, -1, -2.2])
    assert stats["clip_high"] == 1 and stats["clip_low"] == stats["clip_dual"] == 0
    # with A = -2: 2 max(r, 0.8), at most 2 * 3: the ratio 0.5 is clipped at 0.8, 1.5 is not clipped, 4 is cut by the dual clip
    out, grad, stats = ppo([1, 1.5, 0.5, 4], [-2, -2, -2, -2])
    assert out == pytest.approx([2, 3, 1.6, 6]) and grad == pytest.approx([2, 3, 0, 0])
    assert stats["clip_low"] == 1 and stats["clip_high"] == 0 and stats["clip_dual"] == 1
    assert stats["ratio"] == pytest.approx(7) and stats["ratio_max"] == pytest.approx(4)
    assert stats["ppo_kl"] == pytest.approx(-math.log(1.5 * 0.5 * 4))
    # without the dual clip the loss grows on: 2 * 4
    out, grad, stats = ppo([4], [-2], clip_ratio_c=0.0)
    assert out == pytest.approx([8]) and grad == pytest.approx([8]) and stats["clip_dual"] == 0


def test_a_zero_advantage_gives_zero_and_is_never_clipped():
    out, grad, stats = ppo([0.1, 1, 9], [0, 0, 0])
    assert [abs(x) for x in out + grad] == [0] * 6 and stats["clip_low"] == stats["clip_high"] == stats["clip_dual"] == 0


def test_on_policy_the_gradient_is_minus_the_advantage_for_either_loss():
    for kind in ("ppo", "gspo"):
        out, grad, _ = ppo([1, 1, 1], [3, -1, 0.5], policy_loss=kind)
        assert out == pytest.approx([-3, 1, -0.5]) and grad == pytest.approx([-3, 1, -0.5])


def test_gspo_by_hand():
    # sequence 0: ratios 4 and 1 over two tokens, s = sqrt(4 * 1) = 2, clipped at 1.28 with A = 1: loss -1.28, no gradient; its third
    # token is masked. Sequence 1: ratios 0.9 and 0.4, s = 0.6, A = 1: not clipped, loss -0.6, and each token has that gradient.
    new = log(4, 1, 100, 0.9, 0.4).requires_grad_()
    mask, ids = torch.tensor([1, 1, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1])
    settings = ActorSettings(policy_loss="gspo", clip_ratio_low=0.2, clip_ratio_high=0.28)
    out, stats = policy_loss(new, torch.zeros(5), torch.ones(5), mask, ids, settings)
    out.sum().backward()
    assert out.tolist() == pytest.approx([-1.28, -1.28, 0, -0.6, -0.6]) and new.grad.tolist() == pytest.approx([0, 0, 0, -0.6, -0.6])
    assert stats["clip_high"] == 2 and stats["clip_low"] == 0 and stats["num_tokens"] == 4
    assert stats["ratio"] == pytest.approx(2 + 2 + 0.6 + 0.6) and stats["ratio_max"] == pytest.approx(2)
    # A = -1 and s = 5: no dual clip for sequences
    out, _ = policy_loss(log(5), torch.zeros(1), -torch.ones(1), torch.ones(1), torch.tensor([0]), settings)
    assert out.tolist() == pytest.approx([5])


def test_weights_multiply_loss_and_gradient_and_get_none_themselves():
    new, weights = log(1, 1.5, 0.5).requires_grad_(), vector(0.5, 2, 0).requires_grad_()
    out, _ = policy_loss(new, torch.zeros(3), vector(2, -2, 2), torch.ones(3), torch.zeros(3, dtype=torch.long), ActorSettings(), weights)
    out.sum().backward()
    assert out.tolist() == pytest.approx([-1, 6, 0]) and new.grad.tolist() == pytest.approx([-1, 6, 0]) and weights.grad is None


def test_only_the_new_log_probs_get_a_gradient():
    new, *others = inputs = [vector(-1, -2).requires_grad_() for _ in range(4)]
    for kind in ("ppo", "gspo"):
        policy_loss(*inputs[:3], torch.ones(2), torch.tensor([0, 1]), ActorSettings(policy_loss=kind), inputs[3])[0].sum().backward()
    assert new.grad is not None and [x.grad for x in others] == [None] * 3


def test_what_is_masked_is_never_used():
    garbage = vector(NAN, -1, math.inf, -math.inf).requires_grad_()
    mask, ids = torch.tensor([0, 1, 0, 0]), torch.tensor([0, 0, 0, 1])
    for kind in ("ppo", "gspo"):
        settings = ActorSettings(policy_loss=kind, entropy_coeff=0.1, loss_agg_mode="seq-mean-token-mean")
        other = garbage.detach()
        extra = {"weights": other, "ref_log_probs": other, "entropy": other}
        loss, stats = actor_loss(garbage, other, other, mask, ids, settings, Totals(1, 1, 4), **extra)
        [gradient] = torch.autograd.grad(loss, garbage)
        assert loss.item() == pytest.approx(-1.0 + 0.1)  # -w A r = -(-1)(-1)(1), and -0.1 * entropy of -1
        assert gradient.tolist() == pytest.approx([0, -1.0, 0, 0])
        assert stats["num_tokens"] == 1 and stats["nonfinite"] == 0 and all(math.isfinite(value) for value in stats.values())


def test_a_nan_or_infinity_that_counts_is_told():
    for kind in ("ppo", "gspo"):
        settings, ids = ActorSettings(policy_loss=kind), torch.tensor([0, 1])
        out, stats = policy_loss(vector(NAN, -1), vector(-1, -1), vector(1, 1), torch.ones(2), ids, settings)
        assert out.isnan().tolist() == [True, False] and stats["nonfinite"] == 1 and math.isnan(stats["ratio"])
    for new, old in ((-math.inf, -1), (-1, -math.inf)):
        _, stats = policy_loss(vector(new), vector(old), vector(1), torch.ones(1), torch.tensor([0]), ActorSettings())
        assert stats["nonfinite"] == 1


def test_ratios_are_bounded():
    out, grad, stats = ppo([math.exp(50)], [-1], clip_ratio_c=0.0)
    assert out == pytest.approx([math.exp(20)]) and grad == [0] and stats["ratio_max"] == pytest.approx(math.exp(20))
    assert ppo([math.exp(50)], [-1], policy_loss="gspo")[0] == pytest.approx([math.exp(10)])


def test_settings_without_sense():
    for c in (0.5, 1.0):
        with pytest.raises(AssertionError, match="clip_ratio_c"):
            ppo([1], [1], clip_ratio_c=c)
    with pytest.raises(ValueError, match="unknown policy loss 'cispo'"):
        ppo([1], [1], policy_loss="cispo")
    one = vector(-1)
    with pytest.raises(AssertionError, match="reference"):
        actor_loss(one, one, one, torch.ones(1), torch.tensor([0]), ActorSettings(), Totals(1, 1, 1))
    with pytest.raises(AssertionError, match="entropy"):
        actor_loss(one, one, one, torch.ones(1), torch.tensor([0]), ActorSettings(use_kl_loss=False, entropy_coeff=0.1), Totals(1, 1, 1))


# --- kl -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, values, gradients", [
    # d = log 2, log 1/2, 0; k3 = 1/2 + log 2 - 1, 2 - log 2 - 1, 0; its gradient 1 - exp(-d) = 1 - 1/2, 1 - 2, 0
    ("k1", [math.log(2), -math.log(2), 0], [1, 1, 1]),
    ("abs", [math.log(2), math.log(2), 0], [1, -1, 0]),
    ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0], [math.log(2), -math.log(2), 0]),
    ("k3", [math.log(2) - 0.5, 1 - math.log(2), 0], [0.5, -1, 0]),
])
def test_kl_by_hand(kind, values, gradients):
    names = {"k1": ("k1", "kl"), "abs": ("abs",), "k2": ("k2", "mse"), "k3": ("k3", "low_var_kl")}[kind]
    for name in names:
        new, ref = log(0.5, 0.1, 0.3).requires_grad_(), log(0.25, 0.2, 0.3).requires_grad_()
        kl = kl_penalty(new, ref, name)
        kl.sum().backward()
        assert kl.tolist() == pytest.approx(values) and new.grad.tolist() == pytest.approx(gradients, abs=1e-12) and ref.grad is None


def test_every_kind_of_the_settings_is_known_and_no_other():
    for kind in KL_TYPES:
        assert kl_penalty(vector(-1), vector(-1), kind).item() == 0
    for kind in ("k3+", "full", "low_var"):
        with pytest.raises(ValueError, match="unknown KL estimator"):
            kl_penalty(vector(-1), vector(-1), kind)


def test_k3_is_bounded_as_in_verl():
    new = vector(-40, -3, 40).requires_grad_()
    kl = kl_penalty(new, vector(0, 0, 0), "k3")
    kl.sum().backward()
    # d = -40 and -3: exp(3) - 4 = 16.1 and more, cut at 10; d = 40: bounded at 20, exp(-20) + 19, cut at 10
    assert kl.tolist() == [10, 10, 10] and new.grad.tolist() == [0, 0, 0]


def test_expected_value_and_gradient_by_enumeration():
    """Over all four tokens of a small vocabulary: what the docstring says of each estimator's mean and mean gradient."""
    logits = vector(0.3, -0.2, 0.5, 0.1).requires_grad_()
    ref = vector(0.1, 0.4, 0.2, -0.3).log_softmax(0)
    p = logits.log_softmax(0)
    reverse, forward = (p.exp() * (p - ref)).sum(), (ref.exp() * (ref - p)).sum()
    gradient_of = {"KL(p || ref)": torch.autograd.grad(reverse, logits, retain_graph=True)[0],
                   "KL(ref || p)": torch.autograd.grad(forward, logits, retain_graph=True)[0], "0": torch.zeros(4)}
    for kind, gradient in (("k1", "0"), ("k2", "KL(p || ref)"), ("k3", "KL(ref || p)")):
        estimate = kl_penalty(p, ref, kind)
        expected = torch.autograd.grad((p.exp().detach() * estimate).sum(), logits, retain_graph=True)[0]
        assert expected.tolist() == pytest.approx(gradient_of[gradient].tolist(), abs=1e-12)
        if kind != "k2":
            assert (p.exp() * estimate).sum().item() == pytest.approx(reverse.item(), abs=1e-12)


# --- aggregation --------------------------------------------------------------------------------------------------------


# sequences of 3, 1 and no counted tokens: losses 1, 2, 3 and 10
HAND = (vector(1, 2, 3, NAN, 10, NAN), torch.tensor([1, 1, 1, 0, 1, 0]), torch.tensor([0, 0, 0, 1, 1, 2]))


@pytest.mark.parametrize("mode, value", [
    ("token-mean", 16 / 4), ("seq-mean-token-sum", (6 + 10) / 2), ("seq-mean-token-mean", (2 + 10) / 2),
    ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
])
def test_aggregation_by_hand(mode, value):
    totals = count_totals([3, 1, 0], 8)
    assert totals == Totals(4, 2, 8)
    assert aggregate(*HAND, mode, totals).item() == pytest.approx(value)


def test_unknown_mode():
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'"):
        aggregate(*HAND, "mean", Totals(4, 2, 8))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_counts(mode):
    values = vector(NAN, 1, 2).requires_grad_()
    for totals in (count_totals([0, 0], 8), count_totals([], 8), Totals(100, 10, 8)):  # a batch without tokens; a rank without
        loss = aggregate(values, torch.zeros(3), torch.tensor([0, 0, 1]), mode, totals)
        [gradient] = torch.autograd.grad(loss, values)
        assert loss.item() == 0 and gradient.tolist() == [0, 0, 0]


def test_sequence_ids():
    assert sequence_ids(torch.tensor([0, 3, 4, 6], dtype=torch.int32), 6).tolist() == [0, 0, 0, 1, 2, 2]


# --- against a padded reference -----------------------------------------------------------------------------------------


def random_sequences(seed: int, num: int) -> list[dict]:
    """Sequences of 1 to 12 tokens, some of them without any that counts; inputs are NaN where they do not."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        length = int(torch.randint(1, 13, (), generator=draw))
        mask = torch.rand(length, generator=draw) < torch.tensor([0.0, 0.5, 1.0])[torch.randint(0, 3, (), generator=draw)]
        new = -3 * torch.rand(length, generator=draw, dtype=torch.float64)
        old, ref = (new + 0.4 * torch.randn(length, generator=draw, dtype=torch.float64) for _ in range(2))
        old += (torch.rand(length, generator=draw) < 0.1) * -1.5  # ratios that the dual clip meets
        sequence = {
            "new": new, "old": old, "ref": ref, "entropy": torch.rand(length, generator=draw, dtype=torch.float64),
            "weights": 2 * torch.rand(length, generator=draw, dtype=torch.float64),
            "advantages": torch.randn((), generator=draw, dtype=torch.float64).expand(length).clone(),
        }
        made.append({key: value.masked_fill(~mask, NAN) for key, value in sequence.items()} | {"mask": mask})
    return made


def packed(sequences: list[dict], dtype=torch.float64) -> dict:
    together = {key: torch.cat([s[key] for s in sequences]) for key in sequences[0]}
    ids = torch.cat([torch.full((len(s["mask"]),), number) for number, s in enumerate(sequences)])
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in together.items()} | {"ids": ids}


def run(sequences: list[dict], settings: ActorSettings, totals: Totals, dtype=torch.float64):
    """Loss, gradient of each sequence and statistics of one pack."""
    batch = packed(sequences, dtype)
    new = batch["new"].requires_grad_()
    loss, stats = actor_loss(new, batch["old"], batch["advantages"], batch["mask"], batch["ids"], settings, totals,
                             weights=batch["weights"], ref_log_probs=batch["ref"], entropy=batch["entropy"])
    [gradient] = torch.autograd.grad(loss, new)
    return loss.detach(), gradient.split([len(s["mask"]) for s in sequences]), stats


def totals_of(sequences: list[dict]) -> Totals:
    return count_totals([s["mask"].sum() for s in sequences], 12)


def reference_token_loss(t: dict, settings: ActorSettings) -> torch.Tensor:
    """[S, R] by the textbook: each sequence on its own row, scalars in plain sight. Masked places hold harmless numbers."""
    rows = []
    names = ("new", "old", "ref", "entropy", "weights", "advantages", "mask")
    for new, old, ref, entropy, weight, adv, mask in zip(*(t[name] for name in names), strict=True):
        if settings.policy_loss == "gspo":
            counted = max(1, int(mask.sum()))
            sequence_log_ratio = ((new - old) * mask).sum() / counted
            # of the paper's sequence objective; every token holds s, so that their mean is s and has its gradient
            ratio = sequence_log_ratio.exp().expand(len(new))
        else:
            ratio = (new - old).exp()
        surrogate = torch.minimum(ratio * adv, ratio.clip(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high) * adv)
        if settings.policy_loss == "ppo" and settings.clip_ratio_c:
            surrogate = torch.where(adv < 0, torch.maximum(surrogate, settings.clip_ratio_c * adv), surrogate)
        d = new - ref
        kl = {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[settings.kl_loss_type]
        rows.append(-surrogate * weight + settings.kl_loss_coef * kl - settings.entropy_coeff * entropy)
    return torch.stack(rows)


def reference_loss(token_loss: torch.Tensor, mask: torch.Tensor, mode: str, max_length: int) -> torch.Tensor:
    per_sequence = [(row[m], int(m.sum())) for row, m in zip(token_loss, mask, strict=True) if m.any()]
    if not per_sequence:
        return token_loss.sum() * 0
    if mode == "token-mean":
        return torch.cat([row for row, _ in per_sequence]).mean()
    if mode == "seq-mean-token-mean":
        return torch.stack([row.mean() for row, _ in per_sequence]).mean()
    sums = torch.stack([row.sum() for row, _ in per_sequence]).mean()
    return sums / max_length if mode == "seq-mean-token-sum-norm" else sums


def pad(sequences: list[dict]) -> dict:
    width = max(len(s["mask"]) for s in sequences)
    filled = [{key: value.nan_to_num(nan=-0.5) if value.is_floating_point() else value for key, value in s.items()} for s in sequences]
    return {key: torch.stack([torch.nn.functional.pad(s[key], (0, width - len(s[key]))) for s in filled]) for key in filled[0]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_against_the_padded_reference(kind, mode):
    kl_types = ("k1", "abs", "k2", "k3")
    for seed in range(24):
        sequences = random_sequences(seed, 1 + seed % 7)
        settings = ActorSettings(
            policy_loss=kind, loss_agg_mode=mode, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=(0.0, 2.0)[seed % 2],
            kl_loss_type=kl_types[seed // 2 % 4], kl_loss_coef=0.3, entropy_coeff=0.2,
        )
        if kind == "gspo":  # weights within a sequence that differ would make its tokens differ
            for s in sequences:
                s["weights"] = torch.where(s["mask"], 0.7, NAN).double()
        loss, gradients, stats = run(sequences, settings, totals_of(sequences))
        padded = pad(sequences)
        new = padded["new"].requires_grad_()
        expected = reference_loss(reference_token_loss(padded, settings), padded["mask"], mode, 12)
        [gradient] = torch.autograd.grad(expected, new)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
        assert stats["total_loss"].item() == pytest.approx(loss.item(), abs=1e-12)
        assert (stats["policy_loss"] + stats["kl_loss"] + stats["entropy_loss"]).item() == pytest.approx(loss.item(), abs=1e-12)
        for mine, row in zip(gradients, gradient, strict=True):
            assert mine.tolist() == pytest.approx(row[:len(mine)].tolist(), abs=1e-12)


def test_the_clips_are_met_by_the_random_inputs():
    sequences = [s for seed in range(24) for s in random_sequences(seed, 1 + seed % 7)]
    stats = run(sequences, ActorSettings(clip_ratio_c=2.0), totals_of(sequences))[2]
    assert min(stats["clip_low"], stats["clip_high"], stats["clip_dual"]) >= 5 and stats["nonfinite"] == 0
    assert sum(not s["mask"].any() for s in sequences) >= 10


def test_gradients_by_finite_differences():
    for seed in (1, 3):
        batch = packed(random_sequences(seed, 3))
        assert batch["mask"].any()
        safe = batch["new"].nan_to_num(nan=-1.0).requires_grad_()
        for mode in MODES:
            settings = ActorSettings(loss_agg_mode=mode, clip_ratio_c=2.0, kl_loss_coef=0.3, entropy_coeff=0.1)

            def loss(new, settings=settings, batch=batch):
                return actor_loss(new, batch["old"], batch["advantages"], batch["mask"], batch["ids"], settings, Totals(7, 3, 12),
                                  weights=batch["weights"], ref_log_probs=batch["ref"], entropy=new.exp())[0]

            [gradient] = torch.autograd.grad(loss(safe), safe)
            with torch.no_grad():
                slopes = [(loss(safe + bump) - loss(safe - bump)).item() / 2e-6 for bump in 1e-6 * torch.eye(len(safe), dtype=safe.dtype)]
            assert gradient.tolist() == pytest.approx(slopes, abs=1e-7)


# --- invariance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_any_split_and_any_order_give_the_same(kind, mode):
    settings = ActorSettings(policy_loss=kind, loss_agg_mode=mode, kl_loss_coef=0.1, entropy_coeff=0.05)
    padding = {"mask": torch.zeros(3, dtype=torch.bool)} | {key: torch.full((3,), NAN, dtype=torch.float64)
                                                            for key in ("new", "old", "ref", "entropy", "weights", "advantages")}
    for seed in range(12):
        sequences = random_sequences(100 + seed, 9)
        totals = totals_of(sequences)
        dtype, exact = ((torch.float32, {"rel": 1e-6, "abs": 1e-6}), (torch.float64, {"rel": 1e-13, "abs": 1e-13}))[seed % 2]
        whole, whole_gradients, whole_stats = run(sequences, settings, totals, dtype)
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(9, generator=draw).tolist()
        cuts = sorted({0, 9} | set(torch.randint(1, 9, (seed % 4 + seed // 4,), generator=draw).tolist()))
        loss, stats, gradients = 0.0, [], {}
        for start, end in zip(cuts, cuts[1:], strict=False):
            members = order[start:end]
            share, parts, part_stats = run([sequences[i] for i in members] + [padding], settings, totals, dtype)
            loss += share
            stats.append(part_stats)
            gradients |= dict(zip(members, parts, strict=False))
        stats.append(run([padding], settings, totals, dtype)[2])  # a rank without work
        assert loss.item() == pytest.approx(whole.item(), **exact)
        for number, gradient in enumerate(whole_gradients):
            assert gradients[number].tolist() == pytest.approx(gradient.tolist(), **exact)
        assert means(merge(stats)) == pytest.approx(means(whole_stats), **exact)


def test_float32_in_float32_out():
    sequences = random_sequences(7, 4)
    loss, gradients, stats = run(sequences, ActorSettings(), totals_of(sequences), torch.float32)
    assert loss.dtype == gradients[0].dtype == torch.float32 and {value.dtype for value in stats.values()} == {torch.float64}


def test_merge_and_means_by_hand():
    first = {"num_tokens": 3, "ratio": 6.0, "ratio_max": 2.5, "total_loss": 0.25}
    second = {"num_tokens": 1, "ratio": 2.0, "ratio_max": 4.0, "total_loss": 0.5}
    sums = merge([first, second])
    assert sums == {"num_tokens": 4, "ratio": 8.0, "ratio_max": 4.0, "total_loss": 0.75}
    assert means(sums) == {"num_tokens": 4, "ratio": 2.0, "ratio_max": 4.0, "total_loss": 0.75}
    assert means({"num_tokens": 0, "ratio": 0.0}) == {"num_tokens": 0, "ratio": 0.0}
