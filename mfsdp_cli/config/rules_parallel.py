"""Rules on how a model is split over ranks: tensor, pipeline, context and expert parallelism, and the layers that do it. See `rules`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mfsdp_cli.config.rulebook import rule
from mfsdp_cli.config.rules_model import experts_of, is_moe, shape_of
from mfsdp_cli.config.values import divisors
from mfsdp_cli.errors import MACHINE_UNFIT, Problem

BLACKWELL = 10.0  # compute capability from which tensor parallelism no longer wants one hardware queue


def world_size(s) -> int:
    return s.trainer.nnodes * s.trainer.n_gpus_per_node


def data_parallel(s) -> int | None:
    """Data-parallel ranks, or None when the ranks do not divide."""
    split = s.engine.tensor_model_parallel_size * s.engine.context_parallel_size
    return world_size(s) // split if world_size(s) % split == 0 else None


def uses_cuda(s, f) -> bool:
    return s.engine.device == "cuda" or (s.engine.device == "auto" and f.num_gpus > 0)


def tp_problem(config: dict, tp: int) -> tuple[str, str] | None:
    """(what, why) when megatron-core 0.19.2 cannot split this model over `tp` ranks.

    transformer_config.py:1323-1346: heads must be a multiple of TP, KV groups a multiple or a divisor of it.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % tp:
        return "num_attention_heads", f"{heads} attention heads cannot be split over TP {tp}: {heads} mod {tp} = {heads % tp}"
    if groups % tp and tp % groups:
        return "num_key_value_heads", f"{groups} key-value heads are neither a multiple nor a divisor of TP {tp}"
    if (heads + 2 * groups) * config["head_dim"] % tp:
        return "head_dim", f"the joint QKV projection of ({heads} + 2 x {groups}) x {config['head_dim']} rows cannot be split over TP {tp}"
    if not is_moe(config) and config["intermediate_size"] % tp:
        size = config["intermediate_size"]
        return "intermediate_size", f"an MLP of {size} columns cannot be split over TP {tp}: {size} mod {tp} = {size % tp}"
    return None


def workable_tp(s, config: dict | None) -> list[int]:
    """TP sizes that fit the ranks and, when it is known, the model."""
    whole = world_size(s) // s.engine.context_parallel_size if world_size(s) % s.engine.context_parallel_size == 0 else 0
    return [tp for tp in divisors(whole) if config is None or tp_problem(config, tp) is None]


# --- ranks ----------------------------------------------------------------------------------------------------------


@rule("pp-must-be-1", "there are no pipeline stages", "megatron-core 0.19.2 distributed/fsdp/mcore_fsdp_adapter.py:555-567",
      seen_in="megatron-core", fix="engine.pipeline_model_parallel_size=1")
def pipeline(s, f) -> Iterator[Problem]:
    """The device mesh of Megatron-FSDP is data x context x expert x tensor. With stages, wrapping dies in an error about shapes that
    does not mention them."""
    size = s.engine.pipeline_model_parallel_size
    if size > 1:
        why = "the device mesh of Megatron-FSDP in megatron-core 0.19.2 has no pipeline axis: world = DP x CP x TP"
        yield Problem(
            "engine.pipeline_model_parallel_size", str(size), why,
            "engine.pipeline_model_parallel_size=1, with more TP or more data-parallel ranks",
        )


def _ranks(s) -> str:
    world = world_size(s)
    return f"{s.trainer.nnodes} nodes x {s.trainer.n_gpus_per_node} = {world} ranks" if s.trainer.nnodes > 1 else f"{world} ranks"


@rule("world-divides", "TP x CP divides the ranks", "megatron-core 0.19.2 parallel_state.py:822",
      fix="one of the TP values that the message lists")
def world_divides(s, f) -> Iterator[Problem]:
    world, tp, cp = world_size(s), s.engine.tensor_model_parallel_size, s.engine.context_parallel_size
    if world % (tp * cp):
        works = workable_tp(s, shape_of(f.model_config))
        fix = f"TP values that work with {_ranks(s)}" + (f" and CP {cp}" if cp > 1 else "") + f": {', '.join(map(str, works)) or 'none'}"
        key = "engine.context_parallel_size" if tp == 1 else "engine.tensor_model_parallel_size"
        why = f"{_ranks(s)} cannot be split: {world} mod (TP {tp} x CP {cp} = {tp * cp}) = {world % (tp * cp)}"
        yield Problem(key, str(cp if tp == 1 else tp), why, fix)


@rule("experts-world-divides", "EP x ETP divides the ranks", "megatron-core 0.19.2 parallel_state.py:882",
      fix="an EP that divides the ranks")
def experts_world_divides(s, f) -> Iterator[Problem]:
    world, ep, etp = world_size(s), s.engine.expert_model_parallel_size, s.engine.expert_tensor_parallel_size
    if world % (ep * etp):
        why = f"{_ranks(s)} cannot be split: {world} mod (EP {ep} x ETP {etp} = {ep * etp}) = {world % (ep * etp)}"
        fits = [str(n) for n in divisors(world)]
        yield Problem("engine.expert_model_parallel_size", str(ep), why, f"EP values that divide: {', '.join(fits)}")


# --- tensor parallelism ---------------------------------------------------------------------------------------------


@rule("tp-divides-model", "TP divides the attention heads, the joint QKV rows and the MLP's columns, and fits the key-value heads",
      "megatron-core 0.19.2 transformer/transformer_config.py:1323-1346; ms-swift issue 8219", seen_in="megatron-core",
      fix="one of the TP values that the message lists")
def tensor_parallel(s, f) -> Iterator[Problem]:
    config, tp = shape_of(f.model_config), s.engine.tensor_model_parallel_size
    if config is not None and (wrong := tp_problem(config, tp)):
        works = ", ".join(map(str, workable_tp(s, config))) or "none with this number of ranks"
        yield Problem(
            "engine.tensor_model_parallel_size", str(tp), f"{wrong[1]} ({wrong[0]} in config.json)", f"TP values that work: {works}",
        )


@rule("vocab-divisible", "the vocabulary divides by TP, or is padded", "megatron-core 0.19.2 utils.py:558; megatron-bridge 0.6.2 "
      "models/conversion/param_mapping.py:968, 1044-1054", level="note", fix="nothing to do: padded rows are left out of exports")
def vocabulary(s, f) -> Iterator[Problem]:
    """Bridge's own padding fails on load at TP 1 and leaves padded rows in the export above; so the rows are padded here, and
    trimmed again."""
    config, tp = shape_of(f.model_config), s.engine.tensor_model_parallel_size
    if config is not None and tp_problem(config, tp) is None and config["vocab_size"] % tp:
        why = f"the vocabulary of {config['vocab_size']} is padded to be split over TP {tp}; exports are trimmed again"
        yield Problem("engine.tensor_model_parallel_size", str(tp), why, "nothing to do", level="note")


@rule("checkpoint-rows-divide", "TP divides the rows of the embedding in a checkpoint that is started from", "mfsdp checkpoint/dtensor.py",
      fix="one of the TP values that the message lists, or the checkpoint's export")
def checkpoint_rows(s, f) -> Iterator[Problem]:
    """A folder's vocabulary is padded when it is read; a checkpoint has its padding in it."""
    tp = s.engine.tensor_model_parallel_size
    for key, source in (("model.path", f.model_source), ("ref.path", f.reference_source)):
        if source is not None and source.vocab_rows % tp:
            why = f"{key} is a checkpoint with {source.vocab_rows} rows in its embedding, which {tp} ranks cannot share evenly"
            works = ", ".join(str(n) for n in workable_tp(s, shape_of(f.model_config)) if source.vocab_rows % n == 0)
            fix = f"TP values that work: {works}; or give its export: mfsdp ckpt export-hf {source.checkpoint} -o DIR"
            yield Problem("engine.tensor_model_parallel_size", str(tp), why, fix)


@rule("tp-within-node", "the ranks of a tensor-parallel group are on one node", "Narayanan et al., arXiv:2104.04473, section 3.2",
      level="warning", fix="a TP that divides the GPUs of a node")
def tp_within_node(s, f) -> Iterator[Problem]:
    """They exchange activations twice in every layer and direction, over NVLink within a node and over the network between two."""
    tp, per_node = s.engine.tensor_model_parallel_size, s.trainer.n_gpus_per_node
    if s.trainer.nnodes > 1 and world_size(s) % tp == 0 and per_node % tp:
        why = f"groups of {tp} ranks span nodes of {per_node} GPUs ({per_node} mod {tp} = {per_node % tp}): layers wait for the network"
        fits = [str(n) for n in workable_tp(s, shape_of(f.model_config)) if per_node % n == 0]
        yield Problem("engine.tensor_model_parallel_size", str(tp), why, f"TP values within a node: {', '.join(fits)}", level="warning")


@rule("max-connections-tp-cp", "tensor parallelism on GPUs before Blackwell does without its overlap", "megatron-core 0.19.2 "
      "tensor_parallel/layers.py:845-862; Megatron-LM training/arguments.py:1413-1439; torchtitan issue 1147", level="note",
      fix="fewer TP and more data-parallel ranks, where memory allows")
def tp_overlap(s, f) -> Iterator[Problem]:
    """Megatron overlaps the traffic of tensor parallelism by one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), and Megatron-FSDP
    its own by several; from compute capability 10 on nobody needs one queue. FSDP's side is taken: never set 1."""
    capability = min((c for c in f.gpu_compute_capability if c > 0), default=BLACKWELL)
    if uses_cuda(s, f) and s.engine.tensor_model_parallel_size > 1 and capability < BLACKWELL:
        why = (f"compute capability {capability:g}: with CUDA_DEVICE_MAX_CONNECTIONS above 1, which Megatron-FSDP needs, TP's traffic "
               "is not overlapped with compute")
        fix = "nothing to do; a smaller TP is faster where the model fits"
        yield Problem("engine.tensor_model_parallel_size", str(s.engine.tensor_model_parallel_size), why, fix, level="note")


@rule("sp-needs-tp", "sequence parallelism has tensor-parallel ranks to split over", "megatron-core 0.19.2 model_parallel_config.py",
      fix="leave engine.sequence_parallel out: it is on when TP > 1")
def sequence_parallel(s, f) -> Iterator[Problem]:
    if s.engine.sequence_parallel and s.engine.tensor_model_parallel_size == 1:
        yield Problem(
            "engine.sequence_parallel", "True", "it splits activations over the tensor-parallel ranks, and TP is 1",
            "leave it out (null: on when TP > 1), or set a TP above 1",
        )


# --- experts --------------------------------------------------------------------------------------------------------


@rule("moe-tp-sp", "experts with TP > 1 have sequence parallelism", "megatron-core 0.19.2 transformer/moe/moe_layer.py:629",
      fix="leave engine.sequence_parallel out")
def moe_sequence_parallel(s, f) -> Iterator[Problem]:
    e = s.engine
    if e.sequence_parallel is False and e.tensor_model_parallel_size > 1 and f.model_config and is_moe(f.model_config):
        yield Problem(
            "engine.sequence_parallel", "False", "megatron-core trains experts with TP > 1 only with sequence parallelism",
            "leave it out (null: on when TP > 1)",
        )


@rule("etp-1", "experts are not split among tensor-parallel ranks", "megatron-core 0.19.2 tensor_parallel/layers.py:95-110, "
      "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3303-3318; parallel_state.py:871-872",
      fix="engine.expert_tensor_parallel_size=1, the default")
def expert_tensor_parallel(s, f) -> Iterator[Problem]:
    etp = s.engine.expert_tensor_parallel_size
    if etp > 1:
        why = "split experts have not been tried with Megatron-FSDP, which may leave them out of the gradient norm on some ranks"
        yield Problem("engine.expert_tensor_parallel_size", str(etp), why, "engine.expert_tensor_parallel_size=1")


@rule("ep-divides-experts", "expert parallelism has experts, and divides them",
      "megatron-core 0.19.2 transformer/transformer_config.py:1468", fix="an EP that divides the experts; 1 for a dense model")
def expert_parallel(s, f) -> Iterator[Problem]:
    key, ep = "engine.expert_model_parallel_size", s.engine.expert_model_parallel_size
    if ep == 1 or f.model_config is None:
        return
    experts, world = experts_of(f.model_config), world_size(s)
    if not experts:
        yield Problem(key, str(ep), "the model has no experts to split", "engine.expert_model_parallel_size=1")
    elif experts % ep:
        fits = [str(n) for n in divisors(math.gcd(world, experts))]
        why = f"{experts} experts cannot be split over EP {ep}: {experts} mod {ep} = {experts % ep}"
        yield Problem(key, str(ep), why, f"EP values that work: {', '.join(fits)}")


# --- layers ---------------------------------------------------------------------------------------------------------


@rule("te-required", "TransformerEngine, where it is asked for, is installed, and runs on GPUs", "megatron-core 0.19.2 "
      "extensions/transformer_engine.py", fix="engine.transformer_impl=auto, or pip install 'transformer-engine[pytorch]'")
def transformer_engine(s, f) -> Iterator[Problem]:
    if s.engine.transformer_impl != "transformer_engine":
        return
    key, value, fix = "engine.transformer_impl", "transformer_engine", "engine.transformer_impl=auto"
    if not uses_cuda(s, f):
        yield Problem(key, value, "TransformerEngine runs on GPUs only, and this run is on CPU", fix, code=MACHINE_UNFIT)
    elif f.versions.get("transformer-engine") is None:
        yield Problem(key, value, "TransformerEngine is not installed", f"pip install 'transformer-engine[pytorch]', or {fix}",
                      code=MACHINE_UNFIT)


@rule("cp-needs-te", "context parallelism has TransformerEngine's attention",
      "megatron-core 0.19.2 transformer/dot_product_attention.py:57-59", fix="engine.context_parallel_size=1")
def context_parallel_layers(s, f) -> Iterator[Problem]:
    if s.engine.context_parallel_size > 1 and s.engine.transformer_impl == "local":
        why = "attention across context-parallel ranks exists only in TransformerEngine's layers"
        yield Problem("engine.transformer_impl", "local", why, "engine.context_parallel_size=1")


@rule("cp-must-be-1", "there are no context-parallel ranks",
      "mfsdp; megatron-bridge 0.6.2 training/config.py:1434-1457 says what they would need",
      fix="engine.context_parallel_size=1, with more TP")
def context_parallel(s, f) -> Iterator[Problem]:
    cp = s.engine.context_parallel_size
    if cp > 1:
        why = "packed sequences are not split over context-parallel ranks yet: each of them would compute the whole batch"
        yield Problem("engine.context_parallel_size", str(cp), why, "engine.context_parallel_size=1, with more TP")
