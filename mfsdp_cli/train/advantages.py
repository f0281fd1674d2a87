"""From the scores of a batch of responses to their advantages: each response against the others of its prompt.

Plain numpy, in the driver. Sums run over sorted scores, so that the order of the responses changes no bit of the outcome.
"""

from __future__ import annotations

import numpy as np

STD_EPS = 1e-6


def group_advantages(scores, groups, estimator: str, norm_by_std: bool = True) -> np.ndarray:
    """Advantage of every response, float64 [N], from its score [N] and the number of its prompt [N].

    With m and s the mean and the standard deviation of the group (n - 1 in the denominator, as torch.std and verl have it):
      grpo     (score - m) / (s + 1e-6); score - m if not norm_by_std       Shao et al. 2024, DeepSeekMath, section 4.1.2
      dr_grpo  score - m, whatever norm_by_std says                         Liu et al. 2025, arXiv 2503.20783; its other half is
               loss_agg_mode seq-mean-token-sum-norm
      rloo     score - mean of the others = n / (n - 1) * (score - m)       Ahmadian et al. 2024, arXiv 2402.14740
    In a group of equal scores every advantage is exactly 0: without this, rounding of the mean would be blown up by 1e6. Such a
    group moves the policy by the KL and entropy terms alone; all others are kept whole, [0, .95 x 7] for one.
    ValueError: an unknown estimator, a score that is not finite, a group of one response (it has nothing to be compared with).
    """
    if estimator not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"unknown advantage estimator {estimator!r}; there are grpo, dr_grpo and rloo")
    scores, _, members = _grouped(scores, groups)
    advantages = np.zeros(len(scores))
    for rows in members:
        ordered = np.sort(scores[rows])
        if ordered[0] == ordered[-1]:
            continue
        centered = scores[rows] - ordered.mean()
        if estimator == "rloo":
            centered *= len(rows) / (len(rows) - 1)
        elif estimator == "grpo" and norm_by_std:
            centered /= ordered.std(ddof=1) + STD_EPS
        advantages[rows] = centered
    return advantages


def zero_variance_groups(scores, groups) -> np.ndarray:
    """Numbers of the groups whose scores are all equal, ascending: they teach nothing. ValueError as in `group_advantages`."""
    scores, names, members = _grouped(scores, groups)
    return np.array([name for name, rows in zip(names, members, strict=True) if np.ptp(scores[rows]) == 0], dtype=names.dtype)


def _grouped(scores, groups) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Scores as float64, the groups' numbers, and the rows of each."""
    scores, groups = np.asarray(scores, dtype=np.float64), np.asarray(groups)
    if scores.ndim != 1 or scores.shape != groups.shape:
        raise ValueError(f"one score and one group for each response, but their shapes are {scores.shape} and {groups.shape}")
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise ValueError(f"{len(bad)} of {len(scores)} scores are not finite; the first is {scores[bad[0]]}, of response {bad[0]}")
    names, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    single = names[counts == 1]
    if len(single):
        raise ValueError(f"{len(single)} of {len(names)} groups have a single response, which cannot be compared: {single[:10].tolist()}")
    return scores, names, [np.flatnonzero(inverse == number) for number in range(len(names))]
