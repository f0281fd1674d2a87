"""Packing: sequences end to end, labels shifted inside each, padding that touches nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mfsdp_cli.data.pack import pack
from mfsdp_cli.types import Sample


def sample(row: int, ids: list[int], mask: list[int]) -> Sample:
    return Sample(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool), row)


FIRST = sample(4, [10, 11, 12, 13], [0, 0, 1, 1])
SECOND = sample(7, [20, 21, 22], [1, 1, 0])


def test_two_sequences_by_hand():
    batch = pack([FIRST, SECOND])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.labels.tolist() == [0, 12, 13, 0, 21, 0, 0]
    assert batch.target_mask.tolist() == [0, 1, 1, 0, 1, 0, 0]  # 13 is followed by the other sequence: no target; 20 has no predecessor
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert (batch.max_seqlen, batch.num_real_tokens, batch.rows) == (4, 7, (4, 7))
    assert int(batch.target_mask.sum()) == FIRST.num_targets + SECOND.num_targets == 3
    assert [t.dtype for t in (batch.input_ids, batch.labels, batch.target_mask, batch.position_ids, batch.cu_seqlens)] == [
        torch.int64, torch.int64, torch.float32, torch.int64, torch.int32]


def test_padding_is_a_masked_sequence_of_its_own():
    batch = pack([FIRST, SECOND], multiple_of=4)
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 8] and batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch.labels.tolist() == [0, 12, 13, 0, 21, 0, 0, 0] and batch.target_mask.tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    assert (batch.max_seqlen, batch.num_real_tokens, batch.rows) == (4, 7, (4, 7))
    assert pack([SECOND], multiple_of=8).max_seqlen == 5  # 3 real tokens, 5 of padding


def test_no_padding_where_the_length_divides():
    assert pack([FIRST], multiple_of=4).cu_seqlens.tolist() == [0, 4]


@pytest.mark.parametrize("multiple_of, length", [(1, 2), (2, 2), (8, 8)])
def test_no_samples_give_one_masked_sequence(multiple_of, length):
    batch = pack([], multiple_of=multiple_of)
    assert batch.cu_seqlens.tolist() == [0, length] and batch.target_mask.tolist() == [0] * length
    assert batch.labels.tolist() == batch.input_ids.tolist() == [0] * length
    assert (batch.num_real_tokens, batch.rows, batch.max_seqlen) == (0, (), length)


def test_random_batches_against_a_token_by_token_rule():
    draw = np.random.default_rng(0)
    for _ in range(100):
        samples = [sample(row, draw.integers(1, 99, n).tolist(), draw.integers(0, 2, n).tolist())
                   for row, n in enumerate(draw.integers(1, 20, draw.integers(1, 7)).tolist())]
        multiple_of = int(draw.integers(1, 9))
        batch = pack(samples, multiple_of=multiple_of)
        counted = batch.target_mask.bool()
        pairs = list(zip(batch.labels[counted].tolist(), batch.input_ids[counted].tolist(), strict=True))
        wanted = [(int(s.input_ids[t]), int(s.input_ids[t - 1])) for s in samples for t in range(1, s.num_tokens) if s.loss_mask[t]]
        assert pairs == wanted
        assert len(batch.input_ids) % multiple_of == 0 and len(batch.input_ids) - batch.num_real_tokens < multiple_of
        assert int(batch.cu_seqlens[-1]) == len(batch.input_ids)
        assert batch.max_seqlen == int(torch.diff(batch.cu_seqlens).max())
