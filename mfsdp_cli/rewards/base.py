"""What a scorer is, what it returns, and which one grades which data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mfsdp_cli.errors import CONFIG_INVALID, MfsdpError, Problem

STATUSES = ("right", "wrong", "unparseable", "timed_out", "error")
ROUTES = {"openai/gsm8k": "gsm8k", "arithmetic": "gsm8k", "DigitalLearningGmbH/MATH-lighteval": "math", "HuggingFaceH4/MATH-500": "math",
          "math500": "math"}
PREFIXES = {"aime": "math", "amc": "math"}


@dataclass(frozen=True)
class RewardResult:
    """The grade of one response.

    score   finite; 0 unless status is "right" or "wrong"
    parsed  the answer that was found in the response, None when there is none
    status  right, wrong: an answer was read; unparseable: none could be read; timed_out: grading took too long;
            error: the scorer failed, which says nothing about the response
    detail  one line for people
    """

    score: float
    parsed: str | None
    status: str
    detail: str = ""

    def __post_init__(self):
        assert self.status in STATUSES, self.status


Scorer = Callable[[str, str, str, dict], RewardResult]  # (data_source, solution_str, ground_truth, extra_info)


def fresh_environment() -> dict[str, str]:
    """Environment of a scoring process: it finds this package wherever this process found it, and sees no GPU."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def graded(is_right: bool, parsed: str) -> RewardResult:
    return RewardResult(float(is_right), parsed, "right" if is_right else "wrong")


def unparseable(detail: str, parsed: str | None = None) -> RewardResult:
    return RewardResult(0.0, parsed, "unparseable", detail)


def scorer_name(name: str, data_source: str) -> str:
    """The scorer that grades rows of `data_source`: `name` itself unless it is "auto". Raises MfsdpError for an unknown source."""
    if name != "auto":
        return name
    by_prefix = (scorer for prefix, scorer in PREFIXES.items() if re.match(prefix, data_source.rpartition("/")[2].lower()))
    found = ROUTES.get(data_source) or next(by_prefix, None)
    if found is None:
        known = ", ".join([*ROUTES, *(f"{prefix}*" for prefix in PREFIXES)])
        raise MfsdpError(Problem("reward.name", "auto", f"no scorer is known for data_source {data_source!r} (known: {known})",
                                 "set reward.name to gsm8k, gsm8k_flexible, math or length, or give reward.function", code=CONFIG_INVALID))
    return found


def scorer_for(name: str, data_source: str) -> Scorer:
    """The function that grades rows of `data_source` under `reward.name`. Modules are imported when needed: math loads sympy."""
    chosen = scorer_name(name, data_source)
    if chosen in ("gsm8k", "gsm8k_flexible"):
        from mfsdp_cli.rewards import gsm8k

        return gsm8k.score_strict if chosen == "gsm8k" else gsm8k.score_flexible
    if chosen == "math":
        from mfsdp_cli.rewards import math

        return math.score
    assert chosen == "length", chosen
    from mfsdp_cli.rewards import length

    return length.score
