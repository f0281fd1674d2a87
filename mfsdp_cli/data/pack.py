"""Samples laid end to end (THD), with next-token labels. The one place where labels shift against tokens.

All of it happens on the CPU, where every position is known: on a GPU, finding one would be a wait for the GPU."""

from __future__ import annotations

import numpy as np
import torch

from mfsdp_cli.types import Experience, PackedBatch, PackedExperience, Sample


def pack(samples: list[Sample], *, multiple_of: int = 1) -> PackedBatch:
    """One micro batch of one rank, on the CPU.

    multiple_of  the number of tokens is made divisible by this (TP, with sequence parallelism): a masked padding sequence of its own
                 is appended, so that the real sequences neither see nor move for it.
    No samples   gives one masked padding sequence: a rank without work still joins the collectives of the others.
    """
    assert multiple_of >= 1
    lengths = [sample.num_tokens for sample in samples]
    num_real = sum(lengths)
    num_padding = -num_real % multiple_of if samples else max(2, multiple_of)
    if num_padding:
        lengths.append(num_padding)
    num_tokens = num_real + num_padding
    input_ids, labels = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int64)
    target_mask = np.zeros(num_tokens, dtype=np.float32)
    starts = np.cumsum([0, *lengths])
    for sample, start, end in zip(samples, starts, starts[1:], strict=False):  # the padding sequence stays zero
        input_ids[start:end] = sample.input_ids
        learned = sample.loss_mask[1:]
        labels[start:end - 1] = np.where(learned, sample.input_ids[1:], 0)
        target_mask[start:end - 1] = learned
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        target_mask=torch.from_numpy(target_mask),
        targets=torch.from_numpy(np.flatnonzero(target_mask) if target_mask.any() else np.zeros(1, dtype=np.int64)),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=max(lengths),
        num_real_tokens=num_real,
        rows=tuple(sample.row for sample in samples),
    )


def with_experience(packed: PackedBatch, batch: list[Experience]) -> PackedExperience:
    """The micro batch with what the loss needs besides; its `rows` are positions in `batch`."""
    places = np.flatnonzero(packed.target_mask.numpy())
    part = [batch[row] for row in packed.rows]

    def laid_out(arrays: list, dtype: type) -> torch.Tensor:
        values = np.concatenate([np.zeros(0), *arrays]).astype(dtype)
        assert len(values) == len(places), f"{len(values)} values for {len(places)} targets"
        out = np.zeros(len(packed.target_mask), dtype)
        out[places] = values
        return torch.from_numpy(out)

    return PackedExperience(
        **vars(packed),
        mask=laid_out([e.mask for e in part], np.bool_),
        rollout_log_probs=laid_out([e.rollout_log_probs for e in part], np.float32),
        advantages=laid_out([np.full(len(e.mask), e.advantage) for e in part], np.float32),
        old_log_probs=None if batch[0].old_log_probs is None else laid_out([e.old_log_probs for e in part], np.float32),
        ref_log_probs=None if batch[0].ref_log_probs is None else laid_out([e.ref_log_probs for e in part], np.float32),
    )
