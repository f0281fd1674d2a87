"""Whether a run fits: the memory of a GPU with everything on it, the disk for its checkpoints, and what to say when it does not.

Reads nothing: settings, plan and facts come in. The terms of the memory are in `memory`.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

from mfsdp_cli.config.parameters import WIDTHS, Shape, model_shape, num_parameters, padded_vocab
from mfsdp_cli.config.rules_grpo import uses_reference
from mfsdp_cli.config.rules_model import shape_of
from mfsdp_cli.config.rules_parallel import workable_tp
from mfsdp_cli.config.values import kind_of, validates_only
from mfsdp_cli.errors import MACHINE_UNFIT, Problem
from mfsdp_cli.launch import memory
from mfsdp_cli.launch.plan import Plan, by_tokens, longest_sequence, make_plan, micro_batch_key
from mfsdp_cli.records import Record

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.launch.facts import Facts

GIB = 2**30
CERTAIN = 1.3  # predicted above this share of the memory, a run is refused; below, it is warned of
SHARE = "rollout.gpu_memory_utilization"
CACHE_BESIDE_WEIGHTS = 1.25  # the least that vLLM should have, as a multiple of its weights
NAMED_PARTS = 3  # of the largest, in a warning


class Memory(Record):
    """Bytes of one GPU at the worst moment of a step.

    allocated    parts that torch counts in the trainer's process: compare with `mem` of the step line
    outside      what else lies on the GPU: samplers, CUDA context, NCCL, fragmentation
    gpu_bytes    the smallest GPU; None when unknown
    assumptions  what the figures take for granted
    """

    moment: str
    tokens: int
    allocated: dict[str, int]
    outside: dict[str, int]
    gpu_bytes: int | None
    assumptions: tuple[str, ...]

    @property
    def allocated_bytes(self) -> int:
        return sum(self.allocated.values())

    @property
    def total_bytes(self) -> int:
        return self.allocated_bytes + sum(self.outside.values())

    @property
    def fits(self) -> bool | None:
        return None if self.gpu_bytes is None else self.total_bytes <= self.gpu_bytes

    def to_dict(self) -> dict:
        return {
            "moment": self.moment, "micro_batch_tokens": self.tokens, "allocated": dict(self.allocated), "outside": dict(self.outside),
            "allocated_bytes": self.allocated_bytes, "total_bytes": self.total_bytes, "gpu_bytes": self.gpu_bytes, "fits": self.fits,
            "assumptions": list(self.assumptions),
        }


class Disk(Record):
    """Checkpoints of a run. at_once: how many lie on the disk while the last of them is written; there: how many already do;
    besides: how many are kept besides the newest trainer.max_ckpt_to_keep."""

    checkpoint_bytes: int
    at_once: int
    there: int
    free_bytes: int
    besides: int

    @property
    def needed_bytes(self) -> int:
        return self.checkpoint_bytes * max(0, self.at_once - self.there)

    def to_dict(self) -> dict:
        return {"checkpoint_bytes": self.checkpoint_bytes, "at_once": self.at_once, "there": self.there,
                "needed_bytes": self.needed_bytes, "free_bytes": self.free_bytes}


# --- memory -----------------------------------------------------------------------------------------------------------


def layout_of(settings: SftSettings | GrpoSettings, plan: Plan) -> memory.Layout:
    return memory.Layout(
        dp=plan.dp * plan.cp, tp=plan.tp, ep=plan.ep, etp=plan.etp, expert_dp=plan.expert_dp,
        split=settings.engine.sequence_multiple, width=WIDTHS[settings.engine.dtype], grad=WIDTHS[settings.optim.main_grads_dtype],
        moments=moment_bytes(settings),
    )


def moment_bytes(settings: SftSettings | GrpoSettings) -> int:
    """Of both moments of one parameter."""
    return WIDTHS[settings.optim.exp_avg_dtype] + WIDTHS[settings.optim.exp_avg_sq_dtype]


def predict_memory(settings: SftSettings | GrpoSettings, plan: Plan, facts: Facts) -> Memory | None:
    """Memory of one GPU; None on CPU, and when config.json is not there to be read."""
    shape = model_shape(facts.model_config)
    if plan.device != "cuda" or shape is None:
        return None
    layout, grpo = layout_of(settings, plan), kind_of(settings) == "grpo"
    temperature = settings.rollout.temperature if grpo else 1.0
    peak = memory.training_peak(shape, layout, plan.micro_batch_tokens, settings.engine.recompute, temperature)
    allocated = dict(peak.parts)
    if grpo and uses_reference(settings):
        other = model_shape(facts.reference_config) if settings.ref.path else None
        allocated["reference model"] = memory.reference_model(other or shape, layout)
    sizes = [mib * 2**20 for mib in facts.gpu_memory_mib if mib > 0]
    gpu_bytes = min(sizes) if sizes else None
    changing = sum(allocated.get(name, 0) for name in ("activations", "logits", "working", "waiting gradients"))
    outside = {
        "samplers": samplers(settings, shape, gpu_bytes) if grpo else 0,
        "CUDA context": memory.CONTEXT,
        "NCCL": memory.COMMUNICATORS if plan.world_size > 1 else 0,
        "fragmentation": int(memory.FRAGMENTATION * changing),
    }
    return Memory(peak.moment, plan.micro_batch_tokens, allocated, outside, gpu_bytes, tuple(_assumptions(settings, plan, facts, shape)))


def samplers(settings: GrpoSettings, shape: Shape, gpu_bytes: int | None) -> int:
    """What samplers hold on the trainer's GPUs while it trains: vLLM takes gpu_memory_utilization of the GPU and keeps it, unless
    it sleeps; an hf sampler has the weights, and its cache has gone by then."""
    rollout = settings.rollout
    if not rollout.colocate:
        return 0
    if rollout.name == "hf":
        return num_parameters(shape) * WIDTHS[settings.engine.dtype]
    return 0 if rollout.enable_sleep_mode else int(rollout.gpu_memory_utilization * (gpu_bytes or 0))


def _assumptions(settings, plan: Plan, facts: Facts, shape: Shape):
    engine = settings.engine
    yield f"micro batches as large as {micro_batch_key(settings)} allows: {plan.micro_batch_tokens} tokens"
    optim = settings.optim
    yield (f"{engine.dtype} weights and activations; float32 master weights; {optim.main_grads_dtype} gradients; "
           f"{optim.exp_avg_dtype} and {optim.exp_avg_sq_dtype} moments")
    yield "CUDA context, NCCL and fragmentation are allowances"
    if plan.world_size > 1:
        yield "measured on one GPU; for more ranks only Megatron-FSDP's buffers were compared, on CPU"
    if shape.experts:
        yield "experts get equally many tokens; not measured"
    if engine.transformer_impl != "local" and facts.versions.get("transformer-engine") is not None:
        yield "activations of mfsdp's own layers; TransformerEngine's were not measured"
    if engine.override_transformer_config:
        yield "engine.override_transformer_config is not taken into account"
    if kind_of(settings) == "grpo" and settings.rollout.colocate and settings.rollout.name == "vllm":
        if settings.rollout.enable_sleep_mode:
            yield "vLLM's memory is free while training"
        elif not any(facts.gpu_memory_mib):
            yield "without vLLM's share, since the size of the GPUs is not known"


def memory_problems(settings: SftSettings | GrpoSettings, plan: Plan, facts: Facts) -> list[Problem]:
    """A warning when the predicted peak is above the GPU's memory, an error far above it; with what would help, by how much."""
    found = None if validates_only(settings) else predict_memory(settings, plan, facts)
    if found is None or found.fits is not False:
        return []
    parts = sorted({**found.allocated, **found.outside}.items(), key=lambda part: -part[1])[:NAMED_PARTS]
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    why = (f"a run is predicted to need {found.total_bytes / GIB:.1f} GiB of each GPU, in the {found.moment} with {found.tokens} "
           f"tokens; the largest parts in GiB: {largest}")
    helps = [f"{change}: {size / GIB:.1f} GiB" for change, size in remedies(settings, facts) if size < found.total_bytes]
    command = f"mfsdp {kind_of(settings)} … --suggest lists layouts that fit"
    level = "error" if found.total_bytes > CERTAIN * found.gpu_bytes else "warning"
    return [Problem("GPU memory", f"{found.gpu_bytes / GIB:.1f} GiB", why, "\n".join([*helps, command]), "", MACHINE_UNFIT, level)]


def remedies(settings: SftSettings | GrpoSettings, facts: Facts):
    """(change as the user would write it, bytes a GPU with it) for the changes that most often help, each by itself."""
    changes = [("engine.recompute=full", {"engine.recompute": "full"})] if settings.engine.recompute == "none" else []
    key, longest = micro_batch_key(settings), longest_sequence(settings)
    half = read(settings, key) // 2
    if half >= (longest if by_tokens(settings) else 1):
        changes.append((f"{key}={half}", {key: half}))
    tp = settings.engine.tensor_model_parallel_size
    larger = [size for size in workable_tp(settings, shape_of(facts.model_config)) if size > tp]
    changes += [(f"--tp {larger[0]}", {"engine.tensor_model_parallel_size": larger[0]})] if larger else []
    share = smaller_share(settings, facts)
    changes += [(f"{SHARE}={share:g}", {SHARE: share})] if share else []
    for text, values in changes:
        changed = with_values(settings, values)
        found = predict_memory(changed, make_plan(changed, facts), facts)
        yield text, found.total_bytes


def smaller_share(settings: SftSettings | GrpoSettings, facts: Facts) -> float | None:
    """The largest share of the GPU, in steps of 0.05, that vLLM can have for the run to fit; None when that leaves no room for its cache
    beside the weights, or when it has no share of these GPUs."""
    if kind_of(settings) == "sft" or settings.rollout.name != "vllm" or not settings.rollout.colocate or settings.rollout.enable_sleep_mode:
        return None
    found = predict_memory(settings, make_plan(settings, facts), facts)
    free = found.gpu_bytes - (found.total_bytes - found.outside["samplers"])
    share = free * 20 // found.gpu_bytes / 20
    weights = num_parameters(model_shape(facts.model_config)) * WIDTHS[settings.engine.dtype] / settings.rollout.tensor_model_parallel_size
    return share if weights * CACHE_BESIDE_WEIGHTS <= share * found.gpu_bytes else None


def read(settings, key: str):
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def with_values(settings, values: dict):
    """A copy of the settings with these values by dotted key."""
    changed = copy.deepcopy(settings)
    for key, value in values.items():
        section, _, name = key.partition(".")
        assert hasattr(getattr(changed, section), name), key
        setattr(getattr(changed, section), name, value)
    return changed


# --- disk -------------------------------------------------------------------------------------------------------------


def predict_disk(settings: SftSettings | GrpoSettings, plan: Plan, facts: Facts, there: int) -> Disk | None:
    """Room for the checkpoints of a run of which `there` are already on the disk; None when config.json is not there, and for a run
    that saves nothing. The padded vocabulary is stored; random states and Hugging Face files, a few MB, are left out."""
    shape = model_shape(facts.model_config)
    if shape is None or validates_only(settings):
        return None
    rows = padded_vocab(shape.vocab, plan.tp) - shape.vocab
    stored = num_parameters(shape) + rows * shape.hidden * (1 if shape.tied else 2)
    size = stored * sum(_state_bytes(settings).values())
    frequency, keep, every = settings.trainer.save_freq, settings.trainer.max_ckpt_to_keep, settings.trainer.keep_every
    saves = max(1, math.ceil(plan.total_steps / frequency)) if frequency > 0 else 1  # at the end too
    # The oldest goes only when the newest is complete.
    besides = settings.trainer.keep_best + (plan.total_steps // every if every else 0)
    at_once = saves if keep is None else min(saves, keep + 1 + besides)
    return Disk(size, at_once, min(there, at_once), int(facts.free_disk_gib * GIB), besides)


def _state_bytes(settings: SftSettings | GrpoSettings) -> dict[str, int]:
    """Of one parameter, by what is saved (checkpoint.dtensor): float32 main weights, two moments."""
    sizes = {"model": 4, "optimizer": moment_bytes(settings)}
    return {part: sizes[part] for part in settings.checkpoint.save_contents if part in sizes}


def disk_problems(settings: SftSettings | GrpoSettings, plan: Plan, facts: Facts, run_dir: str, there: int) -> list[Problem]:
    """An error when not one more checkpoint fits, a warning when those to keep do not."""
    found = predict_disk(settings, plan, facts, there)
    if found is None or found.needed_bytes <= found.free_bytes:
        return []
    size, free = found.checkpoint_bytes / GIB, found.free_bytes / GIB
    contents = " + ".join(_state_bytes(settings))
    if found.checkpoint_bytes > found.free_bytes:
        why = f"one checkpoint ({contents}) is {size:.1f} GiB, and {free:.1f} GiB are free there"
        return [Problem("trainer.output_dir", run_dir, why, "--output on a disk with more room", code=MACHINE_UNFIT)]
    more = found.at_once - found.there
    why = (f"{more} more checkpoints of {size:.1f} GiB ({contents}) lie there at once, the one being written among them: "
           f"{found.needed_bytes / GIB:.1f} GiB, and {free:.1f} GiB are free")
    fits = found.there + found.free_bytes // found.checkpoint_bytes - 1 - found.besides
    fix = "more room: two lie there while the second is written"
    if fits >= 1:
        fix = f"trainer.max_ckpt_to_keep={fits}, or more room"
    elif found.besides:
        fix = f"more room, or fewer by trainer.keep_every and trainer.keep_best, which keep up to {found.besides} more"
    found_keep = "null" if settings.trainer.max_ckpt_to_keep is None else str(settings.trainer.max_ckpt_to_keep)
    return [Problem("trainer.max_ckpt_to_keep", found_keep, why, fix, code=MACHINE_UNFIT, level="warning")]
