"""From a packed batch to the log-probability of each label and the entropy, over a vocabulary split across tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.utils.checkpoint import checkpoint

from mfsdp_cli.engine import host
from mfsdp_cli.engine.attention import PackedPositions
from mfsdp_cli.engine.vocab_parallel import label_log_probs
from mfsdp_cli.types import PackedBatch

# Numbers that are kept for the backward pass, 8 GiB in bfloat16; where all logits would be more, they are formed again in it.
MOST_LOGITS = 2**32
# Above 2^31 numbers kernels count with 64 bits, and are slower: then, and when they are formed again, as many at a time.
PIECE = 2**29


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The same batch with its tensors on `device`. Nothing waits."""
    return replace(batch, **{name: host.to_device(value, device) for name, value in vars(batch).items() if torch.is_tensor(value)})


def packed_positions(batch: PackedBatch) -> PackedPositions:
    return PackedPositions(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        position_ids=batch.position_ids,
    )


def log_probs(model: torch.nn.Module, batch: PackedBatch, vocab_size: int, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(labels[t] | input_ids[..t]) for every target, and the entropy of the distribution at t; float32 [T] each, 0 at other tokens,
    for which no logits are formed.

    model        the wrapped GPTModel
    vocab_size   real rows of its vocabulary: columns beyond are padding and get no probability, as if they did not exist
    temperature  the logits are divided by it, so that the probabilities are those that were sampled from
    """

    def from_hidden(hidden_states, output_layer, output_weight, labels, **_):
        found = _label_log_probs(hidden_states, output_layer, output_weight, labels.view(-1), batch.targets, vocab_size, temperature)
        return found.new_zeros(2, labels.numel()).index_copy(1, batch.targets, found)

    out = model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        attention_mask=None,
        labels=batch.labels.unsqueeze(0),
        packed_seq_params=packed_positions(batch),
        output_processor=from_hidden,
    )
    return out[0], out[1]


def _label_log_probs(hidden_TH, output_layer, output_weight, labels_T, targets_N, vocab_size: int, temperature: float) -> torch.Tensor:
    """float32 [2, N], log-probabilities and entropies at the targets, from hidden states [T or T / tp, 1, H] and labels [T]."""
    split_sequence, no_sum = output_layer.sequence_parallel, output_layer.disable_grad_reduce
    if split_sequence:
        # The layer would do this by itself, and cannot be given a part of the sequence. In the backward pass each rank has its columns' part
        # of the gradient, and the parts are summed where the sequence is split again: the layer need not sum them too.
        hidden_TH, no_sum = gather_from_sequence_parallel_region(hidden_TH), True
    hidden_NH, labels_N = hidden_TH.index_select(0, targets_N), labels_T.index_select(0, targets_N)

    def piece(hidden, labels):
        with _as(output_layer, sequence_parallel=False, disable_grad_reduce=no_sum):
            logits, _ = output_layer(hidden, weight=output_weight)
        logits = logits.squeeze(1)
        return torch.stack(label_log_probs(logits if temperature == 1.0 else logits / temperature, labels, vocab_size))

    columns = output_layer.output_size_per_partition
    numbers = len(targets_N) * columns
    if numbers <= min(4 * PIECE, MOST_LOGITS):
        return piece(hidden_NH, labels_N)
    tokens = max(1, PIECE // columns)
    pieces = zip(hidden_NH.split(tokens), labels_N.split(tokens))
    if numbers <= MOST_LOGITS:
        return torch.cat([piece(h, y) for h, y in pieces], dim=1)
    return torch.cat([checkpoint(piece, h, y, use_reentrant=False) for h, y in pieces], dim=1)


@contextmanager
def _as(module: torch.nn.Module, **attributes) -> Iterator[None]:
    """The module with these attributes, for as long as the block lasts."""
    before = {name: getattr(module, name) for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(before)
