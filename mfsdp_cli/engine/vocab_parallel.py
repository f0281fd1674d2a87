"""The log-probability of a label, and the entropy, when each tensor-parallel rank holds a part of the logits.

Same mathematics as megatron/core/tensor_parallel/cross_entropy.py, which makes a float32 copy of the logits and passes
over it six times; here the logits stay in their dtype and each pass is one fused kernel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.jit import jit_fuser
from megatron.core.parallel_state import get_tensor_model_parallel_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size


def label_log_probs(logits_TV: torch.Tensor, labels_T: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits)[t, labels[t]] over the whole vocabulary, and the entropy of that distribution, float32 [T] each.

    logits_TV   this rank's columns [T, V / tp]; overwritten by their gradient in the backward pass
    vocab_size  real rows of the vocabulary: columns beyond are padding, which gets no probability and no gradient
    """
    return _LabelLogProbs.apply(logits_TV, labels_T, vocab_size)


@jit_fuser
def _largest(logits: torch.Tensor) -> torch.Tensor:
    return logits.amax(-1).float()


@jit_fuser
def _sums(logits: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of exp(z - largest), and of that times z - largest."""
    shifted = logits.float() - largest[:, None]
    weights = shifted.exp()
    return weights.sum(-1), (weights * shifted).sum(-1)


@jit_fuser
def _gradient_(logits: torch.Tensor, columns: torch.Tensor, log_total: torch.Tensor, mean: torch.Tensor,
               grad: torch.Tensor, grad_entropy: torch.Tensor) -> torch.Tensor:
    """In place: grad * (one_hot(label) - p) - grad_entropy * p * (z - mean), p = softmax(z), mean = sum of p * z.

    `columns` [T] holds the label's column here, -1 if it is another rank's."""
    z = logits.float()
    p = (z - log_total[:, None]).exp()
    is_label = torch.arange(logits.shape[-1], device=logits.device)[None, :] == columns[:, None]
    return logits.copy_(grad[:, None] * (is_label.float() - p) - grad_entropy[:, None] * p * (z - mean[:, None]))


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab_size):
        width = logits.shape[-1]
        group, ranks = get_tensor_model_parallel_group(), get_tensor_model_parallel_world_size()
        first = get_tensor_model_parallel_rank() * width
        real = logits[:, : min(max(vocab_size - first, 0), width)]
        largest = _largest(real) if real.shape[-1] else torch.full(labels.shape, -torch.inf, device=logits.device)
        if ranks > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        columns = labels - first
        mine = (columns >= 0) & (columns < width)
        columns = torch.where(mine, columns, -1)
        label_logits = torch.where(mine, logits.gather(-1, columns.clamp(min=0)[:, None])[:, 0].float(), 0.0)
        sums = torch.stack((*_sums(real, largest), label_logits))
        if ranks > 1:
            dist.all_reduce(sums, group=group)
        log_sum, mean_shifted = sums[0].log(), sums[1] / sums[0]
        log_total, mean = largest + log_sum, largest + mean_shifted
        ctx.num_real = real.shape[-1]
        ctx.save_for_backward(logits, columns, log_total, mean)  # logits too: checkpointing drops what is saved, and no attribute
        return sums[2] - log_total, log_sum - mean_shifted

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        logits, columns, log_total, mean = ctx.saved_tensors
        logits[:, ctx.num_real :] = 0
        _gradient_(logits[:, : ctx.num_real], columns, log_total, mean, grad, grad_entropy)
        return logits, None, None
