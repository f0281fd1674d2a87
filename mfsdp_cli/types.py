"""Records in which the parts of the program meet. Shapes: T tokens, S sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Sample:
    """One conversation, tokenized.

    input_ids  int64 [T], the whole conversation as the chat template renders it
    loss_mask  bool  [T], True on the tokens to be learned: assistant text and its end-of-turn token.
               loss_mask[t] belongs to input_ids[t]; the shift to next-token targets happens in `data.pack`.
    row        index in the data set, for messages to people
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    row: int

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted and counted: the first token of a sequence has no predecessor."""
        return int(self.loss_mask[1:].sum())


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end (THD), one micro batch of one data-parallel rank.

    input_ids     int64   [T]
    labels        int64   [T], labels[t] = input_ids[t + 1] inside a sequence; 0 where target_mask is 0
    target_mask   float32 [T], 1 where labels[t] counts in the loss
    targets       int64   [N], where it is 1, in order; [0] when it is 1 nowhere
    position_ids  int64   [T], 0, 1, … from the start of each sequence
    cu_seqlens    int32   [S + 1], starts of the sequences and, last, T
    max_seqlen    longest sequence, tokens
    num_real_tokens  T less the padding sequence that makes T divisible (by TP with sequence parallelism); a padding
                     sequence, if any, is the last one and has target_mask 0
    rows          data-set rows of the sequences, in order, without the padding sequence
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    target_mask: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    num_real_tokens: int
    rows: tuple[int, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class PackedExperience(PackedBatch):
    """A micro batch with all that the actor's loss needs of its responses. [T] each: a response's values stand at the positions
    that predict its tokens, as the labels do, and 0 elsewhere. See `Experience`.

    mask               bool, tokens that count in the loss
    rollout_log_probs  float32, the sampler's
    advantages         float32
    old_log_probs      float32, or None
    ref_log_probs      float32, or None
    """

    mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    advantages: torch.Tensor
    old_log_probs: torch.Tensor | None
    ref_log_probs: torch.Tensor | None


@dataclass(frozen=True)
class Prompt:
    """One row of reinforcement-learning data, rendered up to where the assistant is to speak."""

    row: int
    messages: list[dict]
    input_ids: np.ndarray  # int64 [P]
    data_source: str
    ground_truth: str
    extra_info: dict


@dataclass(frozen=True)
class Response:
    """One sampled answer to a prompt.

    input_ids        int64 [R], the response alone, end-of-turn token included when it was sampled; may be empty
    log_probs        float32 [R], log-probability of each token under the distribution it was sampled from
    text             decoded without special tokens
    is_truncated     ended at max_response_length, not at an end-of-turn token
    weight_version   number of weight updates the sampler had received
    """

    input_ids: np.ndarray
    log_probs: np.ndarray
    text: str
    is_truncated: bool
    weight_version: int


@dataclass(frozen=True)
class Experience:
    """All that a trainer rank needs of one response. Arrays run over the response's tokens, [R].

    sample             prompt and response; loss_mask True on the response
    mask               bool, tokens that count in the loss
    rollout_log_probs  float32, the sampler's
    old_log_probs      float32, the trainer's before the update; None, for all of a batch: those of the update's own forward pass
    ref_log_probs      float32, the reference's; None, for all of a batch: not needed
    """

    sample: Sample
    mask: np.ndarray
    rollout_log_probs: np.ndarray
    advantage: float
    old_log_probs: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None
