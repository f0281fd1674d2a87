"""Rewards that look at length alone."""

from __future__ import annotations

from mfsdp_cli.rewards.base import RewardResult

TARGET_WORDS = 50


def overlong_penalty(num_tokens: int, max_response_length: int, buffer_length: int, factor: float = 1.0) -> float:
    """Soft overlong punishment, to be added to the reward: 0 up to `max_response_length - buffer_length` tokens, then falling
    linearly to `-factor` at `max_response_length`, and `-factor` beyond. A buffer of 0 turns it off.

    DAPO (arXiv 2503.14476), eq. 13, where factor is 1.
    """
    assert 0 <= buffer_length <= max_response_length, (buffer_length, max_response_length)
    if buffer_length == 0:
        return 0.0
    excess = num_tokens - (max_response_length - buffer_length)
    return -factor * min(max(excess / buffer_length, 0.0), 1.0)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> RewardResult:
    """1 for a response of exactly `extra_info["target_words"]` words (50 if absent), falling linearly to 0 at none and at twice as many.

    Needs no gold answer: it shows in a few steps whether a set-up learns at all. "right" means within a tenth of the target.
    """
    target = int((extra_info or {}).get("target_words", TARGET_WORDS))
    if target < 1:
        raise ValueError(f"extra_info.target_words is {target}: must be at least 1")
    num_words = len(solution_str.split())
    reward = max(0.0, 1.0 - abs(num_words - target) / target)
    return RewardResult(reward, str(num_words), "right" if reward >= 0.9 else "wrong")
