"""The losses, as functions of log-probabilities on packed tokens. Needs torch and nothing else.

Every tensor is [T], the tokens of one micro batch of one rank laid end to end; a sequence lies whole in one micro batch.
  mask     bool or 0/1 [T], the tokens that count. What the other inputs hold elsewhere is never used: NaN there stays there.
  seq_ids  int64 [T], number of the sequence a token belongs to, below T (see `sequence_ids`).

Denominators belong to the whole mini batch (`Totals`), so the values of the micro batches and ranks are summed, never averaged,
and how the batch was split changes nothing.

Statistics are dicts of float64 scalars that can be added up over micro batches and ranks (`merge`) and then divided (`means`):
  num_*  counts · *_max  maxima · *_loss  shares of the mini batch's loss, complete once summed · all others  sums over tokens
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mfsdp_cli.config.schema_grpo import ActorSettings

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: verl's bound, against overflow
GSPO_LOG_RATIO_BOUND = 10.0  # of a sequence, per token; verl's
LOW_VAR_KL_BOUND = 10.0  # of k3 of a token; verl's


@dataclass(frozen=True)
class Totals:
    """Denominators: of the whole mini batch, over all micro batches and ranks.

    num_tokens     tokens that count
    num_sequences  sequences with at least one of them
    max_length     constant divisor of seq-mean-token-sum-norm: data.max_response_length
    """

    num_tokens: int
    num_sequences: int
    max_length: int


def count_totals(tokens_per_sequence: Iterable[int], max_length: int) -> Totals:
    """Totals from the number of tokens that count in each sequence of the mini batch; 0 for a sequence that has none."""
    counts = [int(count) for count in tokens_per_sequence]
    return Totals(sum(counts), sum(count > 0 for count in counts), max_length)


def sequence_ids(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 [T] from the starts of the sequences [S + 1] (and, last, T)."""
    lengths = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths, output_size=num_tokens)


def sft_loss(log_probs: torch.Tensor, target_mask: torch.Tensor, num_targets: int) -> torch.Tensor:
    """Negative log-likelihood of the targets over their number in the *global* batch. Summed over micro batches and ranks: the mean."""
    assert num_targets > 0
    return -_fill(log_probs, target_mask.bool()).sum() / num_targets


# --- reinforcement learning ---------------------------------------------------------------------------------------------


def actor_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, seq_ids: torch.Tensor,
    settings: ActorSettings, totals: Totals, *, weights: torch.Tensor | None = None, ref_log_probs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy loss + kl_loss_coef * KL to the reference - entropy_coeff * entropy, aggregated; and its statistics.

    The importance weights act on the policy loss alone, as in verl. ref_log_probs and entropy, when given, are measured even where
    their coefficient is 0; entropy [T] is that of the distribution at each token, in nats, and carries a gradient if it is to be trained.
    """
    mask = mask.bool()
    losses, stats = policy_loss(log_probs, old_log_probs, advantages, mask, seq_ids, settings, weights)
    terms = {"policy_loss": losses}
    kl_coef = settings.kl_loss_coef if settings.use_kl_loss else 0.0
    assert kl_coef == 0 or ref_log_probs is not None, "a KL term needs the reference's log-probabilities"
    assert settings.entropy_coeff == 0 or entropy is not None, "an entropy term needs the entropy"
    if ref_log_probs is not None:
        kl = kl_penalty(_fill(log_probs, mask), _fill(ref_log_probs, mask), settings.kl_loss_type)
        stats["kl"] = _sum(kl)
        if kl_coef:
            terms["kl_loss"] = kl_coef * kl
    if entropy is not None:
        entropy = _fill(entropy, mask)
        stats["entropy"] = _sum(entropy)
        if settings.entropy_coeff:
            terms["entropy_loss"] = -settings.entropy_coeff * entropy
    shares = {name: aggregate(term, mask, seq_ids, settings.loss_agg_mode, totals) for name, term in terms.items()}
    loss = sum(shares.values())
    return loss, stats | {name: _sum(share) for name, share in shares.items()} | {"total_loss": _sum(loss)}


def policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, seq_ids: torch.Tensor,
    settings: ActorSettings, weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate loss of each token [T], 0 where masked, and statistics. Gradients flow through log_probs alone.

    With r the ratio and A the advantage: max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)), which is eq. 7 of PPO
    (Schulman et al. 2017) with the sign of a loss and the two bounds of DAPO (Yu et al. 2025, "clip-higher").
      ppo   r = exp(log p - log p_old) of the token. If clip_ratio_c > 1 and A < 0 the loss is at most -A clip_ratio_c, from where on
            the gradient is 0 (dual clip, Ye et al. 2020, arXiv 1912.09729); 0 switches it off.
      gspo  r = s sg[1 / p] p with s = exp(mean of log p - log p_old over the sequence): in value that of the sequence, in gradient of
            each token (GSPO-token of Zheng et al. 2025, arXiv 2507.18071). No dual clip, as in verl. The paper's objective is this
            under seq-mean-token-mean, which verl forces and we leave to loss_agg_mode.
    weights [T], detached, multiply the losses (truncated importance sampling; see `correction`).
    Statistics: num_tokens; sums of ratio, ppo_kl (log p_old - log p), clip_low (A < 0), clip_high (A > 0), clip_dual; ratio_max;
    nonfinite, the tokens whose log-ratio is not finite. NaN is not hidden; of an infinite log-ratio only nonfinite may speak.
    """
    low, high, dual = settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c
    assert dual == 0 or dual > 1, f"clip_ratio_c is {dual}: below 1 it would cut off what the policy may still learn"
    mask = mask.bool()
    log_probs, old_log_probs, advantages = (_fill(x, mask) for x in (log_probs, old_log_probs.detach(), advantages.detach()))
    change = log_probs - old_log_probs
    if settings.policy_loss == "gspo":
        of_sequence = _sequence_means(change.detach(), mask, seq_ids)
        ratio = (log_probs - log_probs.detach() + of_sequence).clamp(max=GSPO_LOG_RATIO_BOUND).exp()
    elif settings.policy_loss == "ppo":
        ratio = change.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    else:
        raise ValueError(f"unknown policy loss {settings.policy_loss!r}; there are ppo and gspo")
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(plain, clipped)
    is_clipped, is_dual = clipped > plain, torch.zeros_like(mask)  # neither where masked: the advantage is 0 there
    if settings.policy_loss == "ppo" and dual:
        ceiling = -advantages * dual
        is_dual = (advantages < 0) & (losses > ceiling)
        losses = torch.where(is_dual, ceiling, losses)
    stats = {
        "num_tokens": _sum(mask), "ratio": _sum(_fill(ratio, mask)), "ratio_max": _fill(ratio, mask).detach().double().max(),
        "ppo_kl": -_sum(change.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)), "clip_low": _sum(is_clipped & (advantages < 0)),
        "clip_high": _sum(is_clipped & (advantages > 0)), "clip_dual": _sum(is_dual), "nonfinite": _sum(~change.isfinite()),
    }
    return _fill(losses if weights is None else losses * weights.detach(), mask), stats


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate of KL(policy || reference) at each token, of which the token sampled from the policy is all that is known.

    With d = log p - log p_ref (Schulman 2020, joschu.net/blog/kl-approx.html; names and bounds of verl):
      kl, k1          d                   unbiased, any sign
      abs             |d|
      mse, k2         d^2 / 2             low variance, small bias
      low_var_kl, k3  exp(-d) + d - 1     unbiased and never negative; d within ±20, the outcome at most 10
    The gradient is that of the expression, with respect to log_probs; there are no straight-through kinds (verl's k1+, k3+). Hence, as
    a term of the loss, over tokens of the policy itself: k1 has an expected gradient of 0 and does nothing but noise, k2 has that of
    KL(policy || reference), k3 that of KL(reference || policy). Outside its bounds k3 has none. In the reward no gradient is taken,
    and k1 is the one without bias in the value. Raises ValueError for an unknown kind.
    """
    difference = log_probs - ref_log_probs.detach()
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    if kind in ("low_var_kl", "k3"):
        bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return ((-bounded).exp() + bounded - 1).clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND)
    raise ValueError(f"unknown KL estimator {kind!r}; there are kl = k1, abs, mse = k2, low_var_kl = k3")


def aggregate(token_losses: torch.Tensor, mask: torch.Tensor, seq_ids: torch.Tensor, mode: str, totals: Totals) -> torch.Tensor:
    """This micro batch's share of the mini batch's loss; the sum over micro batches and ranks is, by verl's names:

      token-mean               mean over tokens (DAPO's)
      seq-mean-token-sum       mean over sequences of the sum over their tokens
      seq-mean-token-mean      mean over sequences of the mean over their tokens (GRPO's first form; GSPO's)
      seq-mean-token-sum-norm  seq-mean-token-sum over the constant totals.max_length (Dr. GRPO, Liu et al. 2025)
    A sequence without tokens that count is no sequence; a batch without any gives 0, with gradient 0. ValueError: unknown mode.
    """
    mask = mask.bool()
    losses = _fill(token_losses, mask)
    num_sequences = max(1, totals.num_sequences)
    if mode == "token-mean":
        return losses.sum() / max(1, totals.num_tokens)
    if mode == "seq-mean-token-sum":
        return losses.sum() / num_sequences
    if mode == "seq-mean-token-sum-norm":
        return losses.sum() / (num_sequences * totals.max_length)
    if mode == "seq-mean-token-mean":
        return (losses / _sequence_sums(mask, seq_ids).clamp(min=1)[seq_ids].to(losses.dtype)).sum() / num_sequences
    raise ValueError(f"unknown loss_agg_mode {mode!r}; there are token-mean and seq-mean-token-{{sum,mean,sum-norm}}")


# --- statistics ---------------------------------------------------------------------------------------------------------


def merge(parts: Iterable[dict]) -> dict:
    """Statistics of the whole from those of its parts (tensors or numbers): maxima of the maxima, sums of all else."""
    merged: dict = {}
    for part in parts:
        for key, value in part.items():
            if key in merged:
                value = max(merged[key], value) if key.endswith("_max") else merged[key] + value
            merged[key] = value
    return merged


def means(sums: dict) -> dict[str, float]:
    """Sums over tokens divided by num_tokens; counts, maxima and losses as they are. Without tokens: 0."""
    num_tokens = max(1.0, float(sums["num_tokens"]))
    is_whole = {key: key.startswith("num_") or key.endswith(("_max", "_loss")) for key in sums}
    return {key: float(value) / (1.0 if is_whole[key] else num_tokens) for key, value in sums.items()}


# --- helpers ------------------------------------------------------------------------------------------------------------


def _fill(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """0 where the mask is False. Not a product: NaN times 0 is NaN, in the value and in the gradient."""
    return torch.where(mask, values, 0.0)


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.detach().sum(dtype=torch.float64)


def _sequence_sums(values: torch.Tensor, seq_ids: torch.Tensor) -> torch.Tensor:
    """float64 [T]: the sum of the sequence i at i. T is room enough, and asks the device for no number; in double precision, because
    on a GPU the order of these additions is not fixed."""
    return torch.zeros(len(values), dtype=torch.float64, device=values.device).index_add_(0, seq_ids, values.double())


def _sequence_means(values: torch.Tensor, mask: torch.Tensor, seq_ids: torch.Tensor) -> torch.Tensor:
    """[T]: at each token the mean of `values` over the masked tokens of its sequence. `values` are 0 where the mask is False."""
    return (_sequence_sums(values, seq_ids) / _sequence_sums(mask, seq_ids).clamp(min=1))[seq_ids].to(values.dtype)
