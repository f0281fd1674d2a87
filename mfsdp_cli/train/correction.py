"""Sampler and trainer give the same tokens different probabilities: how different, what to weigh them by, when to stop.

The sampler's log-probabilities are those of the distribution that each token was drawn from; the trainer's ("old") are of the same
weights and tokens, before the update. Kernels and precision explain some 0.01 nats per token; stale weights, another temperature or a
stale prefix cache explain much more. Packed tensors [T] and sums over tokens as in `losses`; see there for `merge`.
"""

from __future__ import annotations

import math

import torch

from mfsdp_cli.train.losses import LOG_RATIO_BOUND

MOST_DROPPED = 0.01  # share of tokens without a usable sampler log-probability above which the run is not to be trusted


def usable_mask(rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """bool [T]: the tokens that count in the loss, and hence in `losses.Totals`: those of `mask` with a finite sampler log-probability."""
    return mask.bool() & rollout_log_probs.isfinite()


def mismatch_stats(rollout_log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over the masked tokens where both are finite (num_tokens), d = sampler - trainer, in nats:

    abs |d| · abs_max · k1 d · k3 exp(-d) + d - 1, both estimates of KL(sampler || trainer) (see `losses.kl_penalty`) · rollout_nll and
    old_nll, minus the log-probabilities. And the masked tokens that could not be measured: num_unmeasured, of which
    num_sampler_nonfinite for want of the sampler's and num_trainer_nonfinite of the trainer's; a token may lack both.
    """
    mask = mask.bool()
    rollout, old = rollout_log_probs.detach().double(), old_log_probs.detach().double()
    has_rollout, has_old = rollout.isfinite(), old.isfinite()
    both = mask & has_rollout & has_old
    rollout, old = torch.where(both, rollout, 0.0), torch.where(both, old, 0.0)
    difference = rollout - old
    bounded = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "num_tokens": both.sum().double(), "abs": difference.abs().sum(), "abs_max": _max(difference.abs()), "k1": difference.sum(),
        "k3": ((-bounded).exp() + bounded - 1).sum(), "rollout_nll": -rollout.sum(), "old_nll": -old.sum(),
        "num_unmeasured": (mask & ~both).sum().double(), "num_sampler_nonfinite": (mask & ~has_rollout).sum().double(),
        "num_trainer_nonfinite": (mask & ~has_old).sum().double(),
    }


def mismatch_metrics(sums: dict) -> dict[str, float]:
    """From the merged sums: means per token (abs, k1, k3), abs_max, the perplexities and their ratio, trainer / sampler, the share of
    unmeasured tokens, and the counts. Where nothing was measured the means are 0 and the perplexities 1."""
    s = {key: float(value) for key, value in sums.items()}
    num = max(1.0, s["num_tokens"])
    counts = {key: value for key, value in s.items() if key.startswith("num_")}
    return counts | {
        "abs": s["abs"] / num, "abs_max": s["abs_max"], "k1": s["k1"] / num, "k3": s["k3"] / num,
        "rollout_perplexity": _exp(s["rollout_nll"] / num), "old_perplexity": _exp(s["old_nll"] / num),
        "perplexity_ratio": _exp(s["k1"] / num),
        "unmeasured_share": s["num_unmeasured"] / max(1.0, s["num_tokens"] + s["num_unmeasured"]),
    }


def correction_weights(
    rollout_log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor, mode: str, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weight of each token [T], detached; the mask to use from here on (`usable_mask`), bool [T]; and statistics.

    With rho = p_trainer / p_sampler of the token:
      none      1
      truncate  min(rho, threshold)                               TIS, Yao et al. 2025, fengyao.notion.site/off-policy-rl
      mask      rho within [1 / threshold, threshold], else 0     IcePop; the token stays in the denominators
    A token without a finite sampler log-probability counts in no mode, neither in the loss nor in its denominators. A trainer's
    log-probability that is not finite is a fault and not forgiven: NaN gives NaN, and `alarm` names it.
    Sums: num_tokens of the mask returned; weight and weight_sq (their means give the effective share of the sample, weight^2 /
    weight_sq); weight_max; outside, the tokens that were truncated or masked; num_dropped. Raises ValueError for an unknown mode.
    """
    if mode not in ("none", "truncate", "mask"):
        raise ValueError(f"unknown rollout_correction {mode!r}; there are none, truncate and mask")
    assert threshold >= 1
    used = usable_mask(rollout_log_probs, mask)
    rollout, old = torch.where(used, rollout_log_probs.detach(), 0.0), torch.where(used, old_log_probs.detach(), 0.0)
    ratio = (old - rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    outside = torch.zeros_like(used)
    weights = torch.ones_like(ratio)
    if mode == "truncate":
        outside, weights = ratio > threshold, ratio.clamp(max=threshold)
    elif mode == "mask":
        outside = (ratio > threshold) | (ratio < 1 / threshold)
        weights = torch.where(outside, 0.0, ratio)
    weights = torch.where(used, weights, 0.0)
    precise = weights.double()
    return weights, used, {
        "num_tokens": used.sum().double(), "weight": precise.sum(), "weight_sq": precise.square().sum(), "weight_max": _max(precise),
        "outside": outside.sum().double(), "num_dropped": (mask.bool() & ~used).sum().double(),
    }


def alarm(metrics: dict[str, float], threshold: float) -> str | None:
    """Why the run must stop, or None, from `mismatch_metrics`. threshold: largest mean |difference| per token, nats; 0: none is too large.

    A trainer's log-probability that is not finite always stops it; a sampler's above a share of 1 %, unless the threshold is 0.
    """
    num, num_bad, num_missing = (int(metrics[key]) for key in ("num_tokens", "num_trainer_nonfinite", "num_sampler_nonfinite"))
    num_all = num + int(metrics["num_unmeasured"])
    if num_bad:
        return f"the trainer's log-probability is not finite for {num_bad} of {num_all} tokens: its weights or its forward pass are broken"
    if threshold == 0:
        return None
    if num_missing > MOST_DROPPED * num_all:
        return (f"the sampler's log-probability is not finite for {num_missing} of {num_all} tokens, above the {MOST_DROPPED:.0%} "
                "that may be left out")
    # `not <=` and not `>`, so that NaN stops the run too
    if not metrics["abs"] <= threshold:
        return (f"sampler and trainer differ by {metrics['abs']:.4g} nats per token on average ({metrics['abs_max']:.4g} at most, "
                f"{num} tokens), above {threshold:g}: stale weights in the sampler, a prefix cache that outlived an update, or "
                "log-probabilities of another temperature, top_p or top_k")
    return None


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # beyond, a float overflows


def _max(values: torch.Tensor) -> torch.Tensor:
    return values.max() if len(values) else values.sum()  # 0 for a batch of empty responses
