from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from mfsdp_cli.train.ahead import from_bytes, to_bytes
from mfsdp_cli.types import Response

PROMPTS = [SimpleNamespace(row=7), SimpleNamespace(row=2)]


def response(tokens: list[int], text: str, cut: bool, version: int) -> Response:
    return Response(np.array(tokens, dtype=np.int64), np.array([-0.1] * len(tokens), dtype=np.float32), text, cut, version)


def test_responses_come_back_as_they_were_and_as_old_as_they_were():
    groups = [[response([5, 6], "a ✓", False, 3), response([], "", False, 3)], [response([1], "\ud83d", True, 3), response([9, 9, 9], "c", True, 2)]]
    found = from_bytes(to_bytes(PROMPTS, groups, num_updates=4), PROMPTS, 2, num_updates=1)
    for mine, wanted in zip(sum(found, []), sum(groups, []), strict=True):
        assert mine.input_ids.dtype == np.int64 and mine.input_ids.tolist() == wanted.input_ids.tolist()
        assert mine.log_probs.dtype == np.float32 and mine.log_probs.tolist() == wanted.log_probs.tolist()
        assert (mine.text, mine.is_truncated) == (wanted.text, wanted.is_truncated)
        assert 1 - mine.weight_version == 4 - wanted.weight_version
    assert [len(group) for group in found] == [2, 2]


def test_those_of_other_prompts_or_of_another_number_are_not_taken():
    data = to_bytes(PROMPTS, [[response([1], "a", False, 0)], [response([2], "b", False, 0)]], 1)
    assert from_bytes(data, PROMPTS, 1, 1) is not None
    assert from_bytes(data, PROMPTS[::-1], 1, 1) is None
    assert from_bytes(data, PROMPTS, 2, 1) is None
