"""Every rule that a run must keep, as small functions (settings, facts) -> problems. Nothing is started, nothing imported.

Megatron-LM's and Bridge's own asserts sit in validators that a program which builds its model through a provider never
passes, so they are restated here. This file: `check`, and the rules on settings that every kind of run has. `rules_sft`,
`rules_grpo`, `rules_rollout`: those of one kind. `rules_model`: the model and the parallel sizes. `rules_override`:
engine.override_transformer_config. `rules_machine`: GPUs, packages, environment, files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mfsdp_cli.config import rules_grpo, rules_machine, rules_model, rules_override, rules_rollout, rules_sft
from mfsdp_cli.config.rules_machine import train_rows
from mfsdp_cli.config.values import as_text, kind_of, leaf_of, nearest, validates_only
from mfsdp_cli.errors import Problem

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.launch.facts import Facts

MBRIDGE_CONFIG = {"distributed_filesystem": bool, "memory_efficient": bool}


def check(settings: SftSettings | GrpoSettings, origins: dict[str, str], facts: Facts) -> list[Problem]:
    """All problems of these settings on this machine, with the origin of each value."""
    kind = kind_of(settings)
    own = rules_sft.RULES if kind == "sft" else rules_grpo.RULES + rules_rollout.RULES
    rules = RULES + own + rules_model.RULES + rules_override.RULES + rules_machine.RULES
    return [replace(p, where=p.where or _origin(p.key, origins, kind)) for rule in rules for p in rule(settings, facts)]


def _origin(key: str, origins: dict[str, str], kind: str) -> str:
    if key in origins:
        return origins[key]
    inside = [where for k, where in origins.items() if k.startswith(key + ".")]
    return inside[0] if inside else "default" if leaf_of(key, kind) is not None else ""


# --- what must be given, and the three flags ------------------------------------------------------------------------


def required(s, f) -> Iterator[Problem]:
    if not s.model.path:
        yield Problem(
            "model.path", "null", "there is no model to start from", "--model Qwen/Qwen2.5-Math-7B, or the path of a Hugging Face folder",
        )
    if not s.data.train_files and not validates_only(s):
        writer = "mfsdp prep-data … --for rl" if kind_of(s) == "grpo" else "mfsdp prep-data"
        yield Problem("data.train_files", "[]", "there is nothing to train on", f"--train-files FILE.parquet; {writer} writes one")


def three_flags(s, f) -> Iterator[Problem]:
    reasons = {
        "use_mbridge": (True, "weights and configuration go through Megatron-Bridge; there is no other way in or out"),
        "vanilla_mbridge": (False, "the deprecated legacy mbridge ignores use_megatron_fsdp and would build plain data parallelism"),
        "use_megatron_fsdp": (True, "mfsdp shards with Megatron-FSDP only"),
    }
    for name, (right, why) in reasons.items():
        if getattr(s.engine, name) is not right:
            yield Problem(
                f"engine.{name}", str(not right), why + ". Only use_mbridge=True, vanilla_mbridge=False, use_megatron_fsdp=True works",
                f"engine.{name}={right}",
            )


def unsupported_switches(s, f) -> Iterator[Problem]:
    if not s.engine.use_distributed_optimizer:
        yield Problem(
            "engine.use_distributed_optimizer", "False", "Megatron-FSDP shards the optimizer state and fails without it",
            "engine.use_distributed_optimizer=True",
        )
    if s.model.lora_rank > 0:
        why = "LoRA is not supported with Megatron-FSDP checkpoints: adapters are never gathered on export, and ranks hang"
        yield Problem("model.lora_rank", str(s.model.lora_rank), why, "model.lora_rank=0 trains all weights")
    if not s.model.use_remove_padding:
        yield Problem(
            "model.use_remove_padding", "False", "sequences are packed without padding; there is no padded layout",
            "model.use_remove_padding=True",
        )
    for name, what in (("param_offload", "parameters"), ("optimizer_offload", "optimizer state")):
        if getattr(s.engine, name):
            why = f"{what} of Megatron-FSDP sit in its own buffers, which off-loading cannot free"
            yield Problem(
                f"engine.{name}", "True", why, f"engine.{name}=False; to save memory use more ranks, TP, or engine.recompute=full",
            )


# --- checkpoint -----------------------------------------------------------------------------------------------------


def checkpoint_contents(s, f) -> Iterator[Problem]:
    save, load = s.checkpoint.save_contents, s.checkpoint.load_contents
    for name, contents in (("save_contents", save), ("load_contents", load or [])):
        if "optimizer" in contents and "model" not in contents:
            why = "optimizer needs model: the optimizer's state is stored under the model's parameter names"
            yield Problem(f"checkpoint.{name}", as_text(contents), why, f"checkpoint.{name}={as_text(['model', *contents])}")
    if not save:
        yield Problem(
            "checkpoint.save_contents", "[]", "a checkpoint of nothing is useless", "checkpoint.save_contents=[model, optimizer, extra]",
        )
    elif save == ["extra"]:
        yield Problem("checkpoint.save_contents", "[extra]", "checkpoints will hold no weights", "add model", level="warning")
    extra = [c for c in load or [] if c not in save]
    if extra:
        why = f"{', '.join(extra)} cannot be loaded, since save_contents is {as_text(save)}"
        yield Problem("checkpoint.load_contents", as_text(load), why, "leave it out (null loads what was saved), or widen save_contents")


def async_save(s, f) -> Iterator[Problem]:
    if s.checkpoint.async_save:
        why = "asynchronous saving does not exist for Megatron-FSDP checkpoints; it would silently be synchronous"
        yield Problem("checkpoint.async_save", "True", why, "checkpoint.async_save=False")


def mbridge_config(s, f) -> Iterator[Problem]:
    for name, value in s.checkpoint.mbridge_config.items():
        key = f"checkpoint.mbridge_config.{name}"
        if name not in MBRIDGE_CONFIG:
            near = nearest(name, list(MBRIDGE_CONFIG))
            fix = f"did you mean {near}?" if near else f"known keys: {', '.join(MBRIDGE_CONFIG)}"
            yield Problem(key, as_text(value), "Bridge's weight saving has no such option", fix)
        elif not isinstance(value, MBRIDGE_CONFIG[name]):
            yield Problem(key, as_text(value), "expected True or False", f"{key}=True")


def resume(s, f) -> Iterator[Problem]:
    mode, path = s.trainer.resume_mode, s.trainer.resume_from_path
    if mode == "resume_path" and not path:
        yield Problem(
            "trainer.resume_from_path", "null", "resume_mode is resume_path, but no checkpoint is named",
            "trainer.resume_from_path=RUN/checkpoints/step_000100",
        )
    if mode != "resume_path" and path:
        yield Problem(
            "trainer.resume_from_path", path, f"it would be ignored, since resume_mode is {mode}",
            "trainer.resume_mode=resume_path, or leave the path out",
        )


# --- optimizer and schedule -----------------------------------------------------------------------------------------


def learning_rates(s, f) -> Iterator[Problem]:
    o = s.optim
    for name in ("min_lr", "lr_warmup_init"):
        value = getattr(o, name)
        if value > o.lr:
            yield Problem(
                f"optim.{name}", as_text(value), f"it is above optim.lr = {as_text(o.lr)}",
                f"optim.{name}={as_text(o.lr / 10)}, or a higher optim.lr",
            )


def betas(s, f) -> Iterator[Problem]:
    values = s.optim.betas
    if len(values) != 2 or not all(0 <= b < 1 for b in values):
        yield Problem("optim.betas", as_text(values), "Adam has two decays, each at least 0 and below 1", "optim.betas=[0.9, 0.95]")


def warmup_shorter_than_run(s, f) -> Iterator[Problem]:
    total = total_steps(s, f)
    if total == 0:
        return
    if s.optim.lr_warmup_steps >= total:
        why = f"the run has {total} steps, so the warm-up would never end"
        yield Problem(
            "optim.lr_warmup_steps", str(s.optim.lr_warmup_steps), why, f"at most {total - 1}, or -1 to go by lr_warmup_steps_ratio",
        )
    elif s.optim.lr_warmup_steps < 0 and s.optim.lr_warmup_steps_ratio >= 1:
        yield Problem(
            "optim.lr_warmup_steps_ratio", as_text(s.optim.lr_warmup_steps_ratio), "the warm-up would take all steps, and the decay none",
            "write less than 1, for example 0.1",
        )


def total_steps(s, f) -> int:
    """Steps of the run; 0 while the data is unknown."""
    return s.trainer.total_training_steps or s.trainer.total_epochs * (train_rows(s, f) // s.data.train_batch_size)


# --- data -----------------------------------------------------------------------------------------------------------


def sample_limits(s, f) -> Iterator[Problem]:
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(s.data, name) == 0:
            yield Problem(
                f"data.{name}", "0", "no row would be used",
                f"data.{name}=-1 uses all rows" + ("; for no validation leave data.val_files empty" if "val" in name else ""),
            )
    for name in ("save_freq", "test_freq"):
        if getattr(s.trainer, name) == 0:
            yield Problem(f"trainer.{name}", "0", "every 0 steps means nothing", f"trainer.{name}=-1 does it only at the end")


RULES = (
    required, three_flags, unsupported_switches, checkpoint_contents, async_save, mbridge_config, resume,
    learning_rates, betas, warmup_shorter_than_run, sample_limits,
)
