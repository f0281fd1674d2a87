"""Packing: sequences end to end, labels shifted inside each, padding that touches nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mfsdp_cli.data.pack import pack, with_experience
from mfsdp_cli.types import Experience, Sample


def sample(row: int, ids: list[int], mask: list[int]) -> Sample:
    return Sample(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool), row)


FIRST = sample(4, [10, 11, 12, 13], [0, 0, 1, 1])
SECOND = sample(7, [20, 21, 22], [1, 1, 0])


def test_two_sequences_by_hand():
    batch = pack([FIRST, SECOND])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.labels.tolist() == [0, 12, 13, 0, 21, 0, 0]
    assert batch.target_mask.tolist() == [0, 1, 1, 0, 1, 0, 0]  # 13 is followed by the other sequence: no target; 20 has no predecessor
    assert batch.targets.tolist() == [1, 2, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert (batch.max_seqlen, batch.num_real_tokens, batch.rows) == (4, 7, (4, 7))
    assert int(batch.target_mask.sum()) == FIRST.num_targets + SECOND.num_targets == 3
    assert [t.dtype for t in (batch.input_ids, batch.labels, batch.target_mask, batch.targets, batch.position_ids, batch.cu_seqlens)] == [
        torch.int64, torch.int64, torch.float32, torch.int64, torch.int64, torch.int32]


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
    assert batch.targets.tolist() == [0]  # the output layer's weights take part in its collectives all the same


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
        assert batch.targets.tolist() == (counted.nonzero()[:, 0].tolist() or [0])
        assert len(batch.input_ids) % multiple_of == 0 and len(batch.input_ids) - batch.num_real_tokens < multiple_of
        assert int(batch.cu_seqlens[-1]) == len(batch.input_ids)
        assert batch.max_seqlen == int(torch.diff(batch.cu_seqlens).max())


def experience(sample: Sample, rollout: list[float], advantage: float, old: list[float] | None = None) -> Experience:
    """The first token of the response does not count."""
    values = np.array(rollout, dtype=np.float32)
    return Experience(sample, np.arange(len(values)) > 0, values, advantage, None if old is None else np.array(old, dtype=np.float32))


def test_experience_stands_where_the_labels_do():
    batch = [experience(sample(0, [10, 11, 12, 13], [0, 0, 1, 1]), [-1.5, -np.inf], 0.5, [-1.0, -2.0]),
             experience(sample(1, [20, 21], [0, 0]), [], 9.0, []),
             experience(sample(2, [30, 31, 32, 33], [0, 1, 1, 1]), [np.nan, -0.25, -3.0], -2.0, [-3.0, -4.0, -5.0])]
    packed = pack([batch[2].sample, batch[1].sample, batch[0].sample], multiple_of=4)
    found = with_experience(packed, batch)
    assert found.labels.tolist() == [31, 32, 33, 0, 0, 0, 0, 12, 13, 0, 0, 0]
    assert found.mask.tolist() == [False, True, True, False, False, False, False, False, True, False, False, False]
    np.testing.assert_array_equal(found.rollout_log_probs, np.array([np.nan, -0.25, -3, 0, 0, 0, 0, -1.5, -np.inf, 0, 0, 0], dtype=np.float32))
    assert found.advantages.tolist() == [-2, -2, -2, 0, 0, 0, 0, 0.5, 0.5, 0, 0, 0]
    assert found.old_log_probs.tolist() == [-3, -4, -5, 0, 0, 0, 0, -1, -2, 0, 0, 0] and found.ref_log_probs is None
    assert [t.dtype for t in (found.mask, found.rollout_log_probs, found.advantages, found.old_log_probs)] == [torch.bool] + [torch.float32] * 3
    assert all(getattr(found, name) is value for name, value in vars(packed).items())


def test_experience_of_no_samples_and_of_a_wrong_number_of_tokens():
    whole = sample(0, [10, 11, 12, 13], [0, 0, 1, 1])
    none = with_experience(pack([]), [experience(whole, [-1.0, -2.0], 1.0, [-1.0, -2.0])])
    assert none.mask.tolist() == [False, False] and none.old_log_probs.tolist() == none.advantages.tolist() == [0, 0] and none.ref_log_probs is None
    with pytest.raises(AssertionError, match="1 values for 2 targets"):
        with_experience(pack([whole]), [experience(whole, [-1.0], 1.0)])
