"""Bytes that one GPU needs, term by term, from settings and config.json. Pure.

Each term is a function whose docstring names the tensor or buffer it stands for. Sources: F is
megatron/core/distributed/fsdp/src/megatron_fsdp of megatron-core 0.19.2; `engine` is ours. The terms up to `Peak` are
what torch.cuda.max_memory_allocated counts, and follow from the code alone: nothing is fitted. Five peaks measured on an
H200 (DP 1; 0.5B and 1.5B twice, 7B; docs/performance.md) lie within 3 % of them; DP, TP and EP above 1 and experts have not
been measured. `OUTSIDE` are allowances for what torch does not count.
"""

from __future__ import annotations

import math

from mfsdp_cli.config.parameters import (
    Shape, dense_layer, dense_parameters, expert_parameters, expert_weights, outer_weights, padded_vocab, vocab_matrix,
)
from mfsdp_cli.records import Record

FP32 = 4
MOST_LOGITS = 2**32  # engine.forward: more numbers than these are formed again in the backward pass, PIECE at a time
PIECE = 2**29
PREFETCH = 500_000_000  # F/megatron_fsdp.py:443-448: elements gathered ahead; the "cap" there is a floor
REDUCE_QUEUE = 1_000_000_000  # likewise: elements whose gradients may wait for their reduction
CONTEXT = int(0.6 * 2**30)  # CUDA context and kernels of one process: an allowance
COMMUNICATORS = 2**30  # NCCL's buffers, when there is more than one rank: an allowance
FRAGMENTATION = 0.05  # of everything that is allocated anew in each micro batch: an allowance


class Layout(Record):
    """How one rank shares the model with others.

    dp, expert_dp  ranks that share the dense weights, and the experts
    split          ranks that share the sequence between the matrices: tp with sequence parallelism, else 1
    width          bytes of a weight or an activation: 2 in bfloat16, 4 in float32
    grad, moments  bytes of a gradient while it is summed, and of both moments
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    expert_dp: int = 1
    split: int = 1
    width: int = 2
    grad: int = FP32
    moments: int = 2 * FP32

    @property
    def world_size(self) -> int:
        return self.dp * self.tp


class Peak(Record):
    """Bytes by part at the moment when most are allocated; `moment` says which."""

    moment: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


# --- what stays: weights and the optimizer ----------------------------------------------------------------------------


def shard(shape: Shape, layout: Layout) -> int:
    """Parameters that this rank keeps. F/param_and_grad_buffer.py, DataParallelBuffer with is_data_distributed: a bucket is
    cut into DP equal parts. Left out: its padding to a multiple of DP x the least common multiple of the row lengths, at most
    4 % for 0.5B on 8 ranks, below 1 % from 7B on."""
    dense = math.ceil(dense_parameters(shape, layout.tp) / layout.dp)
    return dense + math.ceil(expert_parameters(shape, layout.ep, layout.etp) / layout.expert_dp)


def weights(shape: Shape, layout: Layout) -> int:
    """`model_weight_buffer`: the shard in the dtype that computes. With DP 1 the module's parameters are views of it."""
    return shard(shape, layout) * layout.width


def master_weights(shape: Shape, layout: Layout) -> int:
    """`main_weight_buffer`, float32 (engine.megatron.fsdp_config); it exists when the model is float32 too."""
    return shard(shape, layout) * FP32


def gradients(shape: Shape, layout: Layout) -> int:
    """`main_grad_buffer`: micro batches are summed in it, and Adam reads it without a copy; in bfloat16 a part of it at a time
    becomes float32 (engine.optimizer.AdamW), when the activations have gone."""
    return shard(shape, layout) * layout.grad


def moments(shape: Shape, layout: Layout) -> int:
    """AdamW's exp_avg and exp_avg_sq (engine.optimizer.AdamW). The fused step allocates nothing."""
    return shard(shape, layout) * layout.moments


def reference_model(shape: Shape, layout: Layout) -> int:
    """A frozen model has `model_weight_buffer` alone (engine.megatron.freeze); its gathered outer weights stay too."""
    return weights(shape, layout) + (outer_weights(shape, layout.tp) * layout.width if layout.dp > 1 else 0)


# --- what Megatron-FSDP gathers and reduces, when there is somebody to share with ---------------------------------------


def gathered_layers(shape: Shape, layout: Layout) -> int:
    """Layers whose weights are whole at a time: the one at work and those fetched ahead, until these are PREFETCH elements, or
    one layer where that is more (F/param_and_grad_buffer.py, AllGatherPipeline.all_gather_params)."""
    unit = dense_layer(shape, layout.tp) + expert_weights(shape, layout.ep, layout.etp)
    return min(shape.layers, 1 + math.ceil(max(PREFETCH, unit) / unit))


def gathered_weights(shape: Shape, layout: Layout) -> int:
    """All-gather buckets in the computing dtype. Embedding, final norm and output layer are no FSDP unit: once gathered they
    stay (AllGatherPipeline.reset). A group of one rank gathers nothing: fetch_bucket hands out the buffer itself."""
    layers = gathered_layers(shape, layout)
    dense = (outer_weights(shape, layout.tp) + layers * dense_layer(shape, layout.tp)) * (layout.dp > 1)
    return (dense + layers * expert_weights(shape, layout.ep, layout.etp) * (layout.expert_dp > 1)) * layout.width


def reduced_unit(shape: Shape, layout: Layout) -> int:
    """Parameters of one layer whose gradients are reduced over other ranks."""
    dense = dense_layer(shape, layout.tp) if layout.dp > 1 else 0
    return dense + (expert_weights(shape, layout.ep, layout.etp) if layout.expert_dp > 1 else 0)


def waiting_gradients(shape: Shape, layout: Layout, done: int) -> int:
    """Unsharded gradients, in megatron_fsdp_grad_comm_dtype, after the backward pass of `done` layers: up to REDUCE_QUEUE
    elements wait for their reduce-scatter, and one more layer (GradReducePipeline.wait_for_previous_grad_reduce). Embedding, final
    norm and output layer are one bucket, which is there from the first of them to the last. With one rank gradients
    are added to `main_grad_buffer` directly."""
    unit = reduced_unit(shape, layout)
    outer = outer_weights(shape, layout.tp) if layout.dp > 1 else 0
    return (min(done * unit, REDUCE_QUEUE + unit) + outer) * layout.grad


# --- what a micro batch needs -------------------------------------------------------------------------------------------


def saved_by_layer(shape: Shape, layout: Layout) -> int:
    """Bytes a token that one layer keeps for its backward pass (local layers, engine.layers; flash attention).

    By element: input and output of the two norms (4 h, / split; the first input is the layer's own, the second the residual);
    rotated queries and keys, values, attention's output (2 q + 2 kv, / tp); gate and up (2 f, / tp). With qk_norm the
    projection as computed, which the values are a view of, and the queries and keys before their norm (2 q + 2 kv). In float32:
    log-sum-exp of each head, one root mean square a norm.
    Of experts, instead of the MLP: each token's copy for each chosen expert, and gate, up and product there
    (chosen x (h + 3 f), / split), if all ranks get equally many; router logits, probabilities and map, float32 (3 e).
    Dropout is 0 and saves no mask; the rotary table is shared by all layers.
    """
    q, kv, h, f = shape.query, shape.key_value, shape.hidden, shape.ffn
    attention = (4 if shape.qk_norm else 2) * (q + kv)
    heads = shape.heads + (shape.heads + shape.groups if shape.qk_norm else 0)
    numbers = FP32 * (heads / layout.tp + 2 / layout.split)
    if shape.experts:
        mlp = layout.width * shape.chosen * (h + 3 * f) / layout.split + FP32 * 3 * shape.experts / layout.split
    else:
        mlp = layout.width * 2 * f / layout.tp
    return math.ceil(layout.width * (4 * h / layout.split + attention / layout.tp) + mlp + numbers)


def saved_by_recomputation(shape: Shape, layout: Layout) -> int:
    """Bytes a token that one layer keeps with engine.recompute=full: its input (tensor_parallel.checkpoint)."""
    return math.ceil(layout.width * shape.hidden / layout.split)


def layer_at_work(shape: Shape, layout: Layout) -> int:
    """Bytes a token in the middle of one layer's backward pass: the gradients of gate, up and their product (3 f), that product again in a dense
    layer (f, engine.linear), the residual's gradient and the norm's (2 h); with sequence parallelism the gathered sequence too (h,
    tensor_parallel/layers.py)."""
    per_layer = shape.chosen * (3 * shape.ffn + 2 * shape.hidden) / layout.split if shape.experts else 4 * shape.ffn / layout.tp
    gathered = shape.hidden if layout.split > 1 else 0
    return math.ceil(layout.width * (per_layer + 2 * shape.hidden / layout.split + gathered))


def after_the_layers(shape: Shape, layout: Layout) -> int:
    """Bytes a token of the final norm's input, its output, and that one's gradient; with sequence parallelism the output gathered."""
    return math.ceil(layout.width * (3 * shape.hidden / layout.split + (shape.hidden if layout.split > 1 else 0)))


def logits(shape: Shape, layout: Layout, tokens: int, temperature: float = 1.0) -> int:
    """Logits of a micro batch when the loss goes backward, in the computing dtype; their gradient overwrites them. They are formed of
    targets alone (engine.forward), which may be all tokens.

    0 above MOST_LOGITS: they are formed again in the backward pass then. A temperature other than 1 divides into a
    second tensor.
    """
    if piece_of_logits(shape, layout, tokens):
        return 0
    return tokens * _columns(shape, layout) * layout.width * (1 if temperature == 1.0 else 2)


def piece_of_logits(shape: Shape, layout: Layout, tokens: int, temperature: float = 1.0) -> int:
    """The piece that is formed again, PIECE numbers (engine.forward._label_log_probs); 0 when all are kept."""
    columns = _columns(shape, layout)
    if tokens * columns <= MOST_LOGITS:
        return 0
    return max(1, PIECE // columns) * columns * layout.width * (1 if temperature == 1.0 else 2)


def _columns(shape: Shape, layout: Layout) -> int:
    return padded_vocab(shape.vocab, layout.tp) // layout.tp


# --- the moments, and the peak ------------------------------------------------------------------------------------------


def turning_points(shape: Shape, layout: Layout) -> list[int]:
    """Numbers of layers that have gone backward at which the memory may be largest: the first, the last, and where gradients stop to
    queue up, since it rises or falls evenly between these."""
    unit = reduced_unit(shape, layout)
    ends = [REDUCE_QUEUE // unit + 1, REDUCE_QUEUE // unit + 2] if unit else []
    return sorted({1, shape.layers, *(min(shape.layers, done) for done in ends)})


def training_peak(shape: Shape, layout: Layout, tokens: int, recompute: str = "none", temperature: float = 1.0) -> Peak:
    """The moment of a step when most is allocated, with micro batches of `tokens`: when the loss goes backward, with all activations
    there; in the backward pass of a layer, where activations go and gradients queue up; or at its end, in the embedding's."""
    stays = {
        "parameters": weights(shape, layout), "master weights": master_weights(shape, layout), "gradients": gradients(shape, layout),
        "moments": moments(shape, layout), "gathered weights": gathered_weights(shape, layout),
    }
    whole = saved_by_layer(shape, layout)
    saved = saved_by_recomputation(shape, layout) if recompute == "full" else whole
    matrix = vocab_matrix(shape, layout.tp) * layout.width  # gradient of embedding or output layer, before it is added to its buffer
    piece = piece_of_logits(shape, layout, tokens, temperature)

    def moment(name: str, layers: int, waiting: int, logit_bytes: int, working: int) -> Peak:
        parts = {"waiting gradients": waiting, "activations": layers * saved * tokens, "logits": logit_bytes, "working": working}
        return Peak(name, stays | parts)

    # The output layer's gradient comes when the piece formed again has gone.
    found = [moment("backward of the loss", shape.layers, 0, logits(shape, layout, tokens, temperature) + piece,
                    after_the_layers(shape, layout) * tokens + max(0, matrix - piece))]
    # A tied matrix gets its gradient from the output layer first, and waits for the embedding's.
    tied = matrix if shape.tied else 0
    work = (layer_at_work(shape, layout) + whole - saved) * tokens  # what was not kept of the layer at work is computed again
    for done in turning_points(shape, layout):
        layer = shape.layers - done + 1
        found.append(moment(f"backward of layer {layer}", layer, waiting_gradients(shape, layout, done), 0, work + tied))
    found.append(moment("backward of the embedding", 0, waiting_gradients(shape, layout, shape.layers), 0, matrix + tied))
    return max(found, key=lambda peak: peak.total)
