"""The log-probability of a label, and the entropy, when each tensor-parallel rank holds a part of the logits.

Same mathematics as megatron/core/tensor_parallel/cross_entropy.py, which makes a float32 copy of the logits and passes
over it six times; here the logits stay in their dtype and each pass is one fused kernel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from mfsdp_cli.engine import formulas


def label_log_probs(logits_TV: torch.Tensor, labels_T: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits)[t, labels[t]] over the whole vocabulary, and the entropy of that distribution, float32 [T] each.

    logits_TV   this rank's columns [T, V / tp]; overwritten by their gradient in the backward pass
    vocab_size  real rows of the vocabulary: columns beyond are padding, which gets no probability and no gradient
    """
    return _LabelLogProbs.apply(logits_TV, labels_T, vocab_size)


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab_size):
        width = logits.shape[-1]
        group, ranks = get_tensor_model_parallel_group(), get_tensor_model_parallel_world_size()
        first = get_tensor_model_parallel_rank() * width
        num_real = min(max(vocab_size - first, 0), width)
        if num_real:
            largest, total, weighted = formulas.on(logits.device).row_sums(logits[:, :num_real])
        else:  # all of this rank's columns are padding
            total = weighted = torch.zeros(len(labels), device=logits.device)
            largest = torch.full_like(total, -torch.inf)
        columns = labels - first
        mine = (columns >= 0) & (columns < width)
        columns = torch.where(mine, columns, -1)
        label_logits = torch.where(mine, logits.gather(-1, columns.clamp(min=0)[:, None])[:, 0].float(), 0.0)
        if ranks > 1:
            largest, total, weighted, label_logits = _of_all_ranks(largest, total, weighted, label_logits, group)
        log_sum, mean_shifted = total.log(), weighted / total
        log_total, mean = largest + log_sum, largest + mean_shifted
        ctx.num_real = num_real
        ctx.save_for_backward(logits, columns, log_total, mean)  # logits too: checkpointing drops what is saved, and no attribute
        return label_logits - log_total, log_sum - mean_shifted

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        logits, columns, log_total, mean = ctx.saved_tensors
        return formulas.on(logits.device).gradient_(logits, columns, log_total, mean, grad, grad_entropy, ctx.num_real), None, None


def _of_all_ranks(largest, total, weighted, label_logits, group):
    """Each rank's sums are of exp(z - its own largest); those of all ranks, of exp(z - the largest of all)."""
    highest = largest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shift = torch.where(total > 0, largest - highest, 0.0)  # a rank of padding alone has nothing to shift
    weighted = shift.exp() * (weighted + shift * total)
    sums = torch.stack((shift.exp() * total, weighted, label_logits))
    dist.all_reduce(sums, group=group)
    return highest, *sums
