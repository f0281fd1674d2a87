"""How many parameters a model has, and how many of them a tensor- or expert-parallel rank holds. From config.json, exactly."""

from __future__ import annotations

import math

from mfsdp_cli.config.rules_model import shape_of
from mfsdp_cli.records import Record

WIDTHS = {"bfloat16": 2, "float32": 4}  # bytes of a parameter


class Shape(Record):
    """What config.json says of a Qwen or Llama decoder.

    vocab      rows of the embedding as the model has them; `padded_vocab` gives those that Megatron allocates
    qkv_bias   Qwen2's query, key and value projections have biases
    qk_norm    Qwen3 normalises each head's query and key
    experts    0: a dense model; else every layer has so many, each with ffn columns, and a token goes to `chosen` of them
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    chosen: int = 0

    @property
    def query(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of the keys, and of the values."""
        return self.groups * self.head_dim


def model_shape(config: dict | None) -> Shape | None:
    """Shape from config.json; None when it is missing or too broken to be read (`config.rules` says why)."""
    c = shape_of(config)
    if c is None:
        return None
    named = c.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    experts = c.get("num_experts") or c.get("num_local_experts") or 0  # transformers 5 writes the second
    ffn = c.get("moe_intermediate_size" if experts else "intermediate_size")
    chosen = c.get("num_experts_per_tok") if experts else 0
    if not all(type(n) is int and n >= 0 for n in (experts, ffn, chosen, c["head_dim"])) or not ffn:
        return None
    return Shape(
        layers=c["num_hidden_layers"], hidden=c["hidden_size"], heads=c["num_attention_heads"], groups=c["num_key_value_heads"],
        head_dim=c["head_dim"], ffn=ffn, vocab=c["vocab_size"], tied=bool(c.get("tie_word_embeddings")),
        qkv_bias=name.startswith("Qwen2"), qk_norm=name.startswith("Qwen3"), experts=experts, chosen=chosen,
    )


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of the embedding on TP ranks, as engine.megatron.padded_vocab_size has them (a test compares the two)."""
    return vocab if vocab % tp == 0 else math.ceil(vocab / math.lcm(128, tp)) * math.lcm(128, tp)


def split_weights(shape: Shape, tp: int = 1) -> int:
    """Matrices of one layer that tensor parallelism splits: QKV with its bias, output projection, and in a dense model the MLP.

    Megatron's linear_qkv, linear_proj, linear_fc1 (gate and up) and linear_fc2; parameters of one TP rank.
    """
    joint = shape.query + 2 * shape.key_value
    attention = shape.hidden * joint + (joint if shape.qkv_bias else 0) + shape.query * shape.hidden
    mlp = 0 if shape.experts else 3 * shape.hidden * shape.ffn
    return (attention + mlp) // tp


def whole_weights(shape: Shape) -> int:
    """Parameters of one layer that every TP rank has: two norms, the norms of queries and keys, the router."""
    norms = 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    return norms + shape.hidden * shape.experts


def expert_weights(shape: Shape, ep: int = 1, etp: int = 1) -> int:
    """Matrices of one layer's experts: parameters of one rank of EP x ETP."""
    return shape.experts * 3 * shape.hidden * shape.ffn // (ep * etp)


def dense_layer(shape: Shape, tp: int = 1) -> int:
    """One layer without its experts, on one TP rank."""
    return split_weights(shape, tp) + whole_weights(shape)


def vocab_matrix(shape: Shape, tp: int = 1) -> int:
    """Embedding, or output layer, of one TP rank, with the rows that pad the vocabulary."""
    return padded_vocab(shape.vocab, tp) // tp * shape.hidden


def outer_weights(shape: Shape, tp: int = 1) -> int:
    """What is in no layer: embedding, final norm, and the output layer where it is not the embedding."""
    return vocab_matrix(shape, tp) * (1 if shape.tied else 2) + shape.hidden


def dense_parameters(shape: Shape, tp: int = 1) -> int:
    """All but the experts, on one TP rank."""
    return shape.layers * dense_layer(shape, tp) + outer_weights(shape, tp)


def expert_parameters(shape: Shape, ep: int = 1, etp: int = 1) -> int:
    """All experts, on one rank of EP x ETP."""
    return shape.layers * expert_weights(shape, ep, etp)


def num_parameters(shape: Shape) -> int:
    """The whole model, as Hugging Face counts it."""
    return dense_parameters(shape) + expert_parameters(shape)


def active_parameters(shape: Shape) -> int:
    """Those that one token meets: of the experts, the chosen ones."""
    return dense_parameters(shape) + (expert_parameters(shape) * shape.chosen // shape.experts if shape.experts else 0)
