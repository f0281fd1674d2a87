"""From a packed batch to the log-probability of each label, over a vocabulary split across tensor-parallel ranks."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from mfsdp_cli.types import PackedBatch


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The same batch with its tensors on `device`."""
    moved = {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in vars(batch).items()}
    return PackedBatch(**moved)


def packed_seq_params(batch: PackedBatch) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def log_probs(model: torch.nn.Module, batch: PackedBatch, vocab_size: int) -> torch.Tensor:
    """log p(labels[t] | input_ids[..t]) for every token, float32 [T]; meaningless where target_mask is 0.

    `model` is the wrapped GPTModel, `vocab_size` the number of real rows of its vocabulary: columns beyond it are
    padding and get no probability, as if they did not exist.
    """

    def from_hidden(hidden_states, output_layer, output_weight, labels, **_):
        logits, _ = output_layer(hidden_states, weight=output_weight)
        _hide_padding(logits, vocab_size)
        # Megatron's kernel works in float32 whatever the dtype of the logits and changes them in place.
        return -vocab_parallel_cross_entropy(logits.float(), labels.transpose(0, 1).contiguous())

    out = model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        attention_mask=None,
        labels=batch.labels.unsqueeze(0),
        packed_seq_params=packed_seq_params(batch),
        output_processor=from_hidden,
    )
    return out.view(-1)


def _hide_padding(logits: torch.Tensor, vocab_size: int) -> None:
    """Give the padding columns of this rank's part of the vocabulary, [T, 1, V / tp], a probability of zero, in place."""
    columns = logits.shape[-1]
    if columns * get_tensor_model_parallel_world_size() == vocab_size:
        return
    first = get_tensor_model_parallel_rank() * columns
    real = min(max(vocab_size - first, 0), columns)
    if real < columns:
        logits[..., real:] = torch.finfo(logits.dtype).min
