"""Rules on settings that every kind of run has. See `rules`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mfsdp_cli.config.rulebook import OWN, rule
from mfsdp_cli.config.rules_files import train_rows
from mfsdp_cli.config.values import as_text, divisors, kind_of, nearest
from mfsdp_cli.errors import Problem

MBRIDGE_CONFIG = {"distributed_filesystem": bool, "memory_efficient": bool}
MOMENT_STEP = 2.0**-7  # distance of numbers in bfloat16, at most, as a share of them
LEAST_FLOAT32 = 2.0**-126  # below it numbers lose digits, and end at 0

# --- what must be given, and the three flags ------------------------------------------------------------------------


@rule("model-given", "model.path is given", OWN, fix="--model with a hub id or the path of a Hugging Face folder")
def model_given(s, f) -> Iterator[Problem]:
    if not s.model.path:
        yield Problem(
            "model.path", "null", "there is no model to start from", "--model Qwen/Qwen2.5-Math-7B, or the path of a Hugging Face folder",
        )


@rule("train-files-given", "data.train_files names at least one file", OWN, training=True,
      fix="--train-files; mfsdp prep-data writes such files")
def train_files_given(s, f) -> Iterator[Problem]:
    if not s.data.train_files:
        writer = "mfsdp prep-data … --for rl" if kind_of(s) == "grpo" else "mfsdp prep-data"
        yield Problem("data.train_files", "[]", "there is nothing to train on", f"--train-files FILE.parquet; {writer} writes one")


@rule("three-fsdp-flags", "use_mbridge=True, vanilla_mbridge=False, use_megatron_fsdp=True",
      "megatron-bridge 0.6.2 models/conversion/model_bridge.py:1070-1072, training/config.py:1070; verl utils/megatron_utils.py:446-463",
      fix="leave the three out: these values are the defaults")
def three_flags(s, f) -> Iterator[Problem]:
    """The provider's argument, the DDP configuration and the checkpoint code each have a flag of their own. When they differ, the
    optimizer is built on something that is no parameter buffer, or weights are loaded into what is not wrapped. All are set from
    these settings, so only one combination means anything."""
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


@rule("distopt-both", "the distributed optimizer is on",
      "megatron-core 0.19.2 optimizer/optimizer.py:147; megatron-bridge 0.6.2 training/config.py:1073-1077",
      fix="engine.use_distributed_optimizer=True, the default")
def distributed_optimizer(s, f) -> Iterator[Problem]:
    """It has to be on in the DDP half and in the optimizer half of the configuration; with one of them off the first step fails
    looking for main_grad. Both follow this setting."""
    if not s.engine.use_distributed_optimizer:
        yield Problem(
            "engine.use_distributed_optimizer", "False", "Megatron-FSDP shards the optimizer state and fails without it",
            "engine.use_distributed_optimizer=True",
        )


@rule("peft-export", "model.lora_rank is 0", "megatron-bridge 0.6.2 models/conversion/peft_bridge.py:778-825", fix="model.lora_rank=0")
def no_lora(s, f) -> Iterator[Problem]:
    """Bridge's exporter of adapters never gathers DTensors: a shape error on one rank, a hang on the others. Freezing after the
    wrap is ignored too (fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3886-3900)."""
    if s.model.lora_rank > 0:
        why = "LoRA is not supported with Megatron-FSDP checkpoints: adapters are never gathered on export, and ranks hang"
        yield Problem("model.lora_rank", str(s.model.lora_rank), why, "model.lora_rank=0 trains all weights")


@rule("packed-layout", "model.use_remove_padding is True", OWN, fix="model.use_remove_padding=True, the default")
def packed(s, f) -> Iterator[Problem]:
    if not s.model.use_remove_padding:
        yield Problem(
            "model.use_remove_padding", "False", "sequences are packed without padding; there is no padded layout",
            "model.use_remove_padding=True",
        )


@rule("param-offload", "parameters and optimizer state stay on the GPU", "verl utils/megatron_utils.py:663-745, 801",
      fix="more ranks, more TP, or engine.recompute=full")
def offload(s, f) -> Iterator[Problem]:
    """verl's helpers know the buffers of Megatron's DDP. Of Megatron-FSDP they resize the storage of DTensors, which raises, or
    free nothing and say that it worked."""
    for name, what in (("param_offload", "parameters"), ("optimizer_offload", "optimizer states")):
        if getattr(s.engine, name):
            why = f"{what} of Megatron-FSDP sit in its own buffers, which off-loading cannot free"
            yield Problem(
                f"engine.{name}", "True", why, f"engine.{name}=False; to save memory use more ranks, TP, or engine.recompute=full",
            )


# --- checkpoint -----------------------------------------------------------------------------------------------------


@rule("ckpt-optimizer-needs-model", "checkpoint contents that have optimizer have model too",
      "megatron-bridge 0.6.2 training/checkpointing.py:2083", fix="add model to the list")
def optimizer_needs_model(s, f) -> Iterator[Problem]:
    for name, contents in (("save_contents", s.checkpoint.save_contents), ("load_contents", s.checkpoint.load_contents or [])):
        if "optimizer" in contents and "model" not in contents:
            why = "optimizer needs model: the optimizer's state is stored under the model's parameter names"
            yield Problem(f"checkpoint.{name}", as_text(contents), why, f"checkpoint.{name}={as_text(['model', *contents])}")


@rule("ckpt-not-empty", "a checkpoint holds something, and weights", OWN, fix="checkpoint.save_contents=[model, optimizer, extra]")
def checkpoint_not_empty(s, f) -> Iterator[Problem]:
    save = s.checkpoint.save_contents
    if not save:
        yield Problem(
            "checkpoint.save_contents", "[]", "a checkpoint of nothing is useless", "checkpoint.save_contents=[model, optimizer, extra]",
        )
    elif save == ["extra"]:
        yield Problem("checkpoint.save_contents", "[extra]", "checkpoints will hold no weights", "add model", level="warning")


@rule("ckpt-load-what-is-saved", "checkpoint.load_contents is part of save_contents", OWN, fix="leave load_contents out")
def load_what_is_saved(s, f) -> Iterator[Problem]:
    save, load = s.checkpoint.save_contents, s.checkpoint.load_contents
    extra = [c for c in load or [] if c not in save]
    if extra:
        why = f"{', '.join(extra)} cannot be loaded, since save_contents is {as_text(save)}"
        yield Problem("checkpoint.load_contents", as_text(load), why, "leave it out (null loads what was saved), or widen save_contents")


@rule("async-save", "checkpoints are written synchronously",
      "megatron-bridge 0.6.2 training/checkpointing.py:1293-1320; verl megatron_checkpoint_manager.py save_checkpoint",
      fix="checkpoint.async_save=False, the default")
def async_save(s, f) -> Iterator[Problem]:
    if s.checkpoint.async_save:
        why = "asynchronous saving does not exist for Megatron-FSDP checkpoints; it would silently be synchronous"
        yield Problem("checkpoint.async_save", "True", why, "checkpoint.async_save=False")


@rule("mbridge-config", "checkpoint.mbridge_config has Bridge's options of weight saving, True or False",
      "megatron-bridge 0.6.2 models/conversion/auto_bridge.py save_hf_weights", fix="distributed_filesystem or memory_efficient")
def mbridge_config(s, f) -> Iterator[Problem]:
    for name, value in s.checkpoint.mbridge_config.items():
        key = f"checkpoint.mbridge_config.{name}"
        if name not in MBRIDGE_CONFIG:
            near = nearest(name, list(MBRIDGE_CONFIG))
            fix = f"did you mean {near}?" if near else f"known keys: {', '.join(MBRIDGE_CONFIG)}"
            yield Problem(key, as_text(value), "Bridge's weight saving has no such option", fix)
        elif not isinstance(value, MBRIDGE_CONFIG[name]):
            yield Problem(key, as_text(value), "expected True or False", f"{key}=True")


@rule("resume-path", "trainer.resume_from_path is given when resume_mode is resume_path, and only then", OWN,
      fix="--resume CHECKPOINT sets both")
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


@rule("keep-best-validates", "with trainer.keep_best every save is validated: test_freq divides save_freq", OWN, training=True,
      fix="a trainer.test_freq that divides trainer.save_freq, and data.val_files")
def keep_best(s, f) -> Iterator[Problem]:
    """A checkpoint is judged by the validation at its own step; that of another step is about other weights. The save that a signal
    asks for is not validated, so it is never among the best."""
    save, test = s.trainer.save_freq, s.trainer.test_freq
    if s.trainer.keep_best == 0:
        return
    if not s.data.val_files:
        why = "data.val_files is empty: without validation no checkpoint is better than another"
        yield Problem("trainer.keep_best", str(s.trainer.keep_best), why, "--val-files FILE.parquet, or trainer.keep_best=0")
    elif save > 0 and (test < 1 or save % test):
        which = "the last" if test < 1 else f"those of every {math.lcm(save, test)} steps and the last"
        why = f"a checkpoint is judged by the validation at its step, and of the saves every {save} steps only {which} would be validated"
        fitting = max(d for d in divisors(save) if d <= test or test < 1)
        yield Problem("trainer.test_freq", str(test), why, f"trainer.test_freq={fitting}, or another number that divides trainer.save_freq")


@rule("keep-every-saves", "trainer.keep_every is a multiple of trainer.save_freq", OWN, training=True,
      fix="a trainer.keep_every that is a multiple of trainer.save_freq")
def keep_every(s, f) -> Iterator[Problem]:
    every, save = s.trainer.keep_every, s.trainer.save_freq
    if every is None:
        return
    if save < 1:
        yield Problem("trainer.keep_every", str(every), "only the last step is saved (trainer.save_freq)", "leave it out, or a trainer.save_freq")
    elif every % save:
        why = f"saves are made every {save} steps, so of the steps divisible by {every} only those of every {math.lcm(every, save)} exist"
        yield Problem("trainer.keep_every", str(every), why, f"trainer.keep_every={-(-every // save) * save}")


@rule("keep-all", "trainer.keep_every and keep_best come with a trainer.max_ckpt_to_keep", OWN, level="warning", training=True,
      fix="a trainer.max_ckpt_to_keep, or neither of the two")
def keep_all(s, f) -> Iterator[Problem]:
    for name, off in (("keep_every", None), ("keep_best", 0)):
        if s.trainer.max_ckpt_to_keep is None and getattr(s.trainer, name) != off:
            why = "trainer.max_ckpt_to_keep=null keeps all checkpoints, these among them"
            yield Problem(f"trainer.{name}", str(getattr(s.trainer, name)), why, "trainer.max_ckpt_to_keep=3, or leave it out", level="warning")


# --- optimizer and schedule -----------------------------------------------------------------------------------------


@rule("lr-peak", "no learning rate is above the peak, optim.lr", "megatron-core 0.19.2 optimizer_param_scheduler.py (its asserts)",
      training=True, fix="lower optim.min_lr or optim.lr_warmup_init, or a higher optim.lr")
def learning_rates(s, f) -> Iterator[Problem]:
    o = s.optim
    for name in ("min_lr", "lr_warmup_init"):
        value = getattr(o, name)
        if value > o.lr:
            yield Problem(
                f"optim.{name}", as_text(value), f"it is above optim.lr = {as_text(o.lr)}",
                f"optim.{name}={as_text(o.lr / 10)}, or a higher optim.lr",
            )


@rule("adam-betas", "optim.betas are two numbers in [0, 1)", "Kingma and Ba, arXiv:1412.6980, algorithm 1", training=True,
      fix="optim.betas=[0.9, 0.95]")
def betas(s, f) -> Iterator[Problem]:
    values = s.optim.betas
    if len(values) != 2 or not all(0 <= b < 1 for b in values):
        yield Problem("optim.betas", as_text(values), "Adam has two decays, each at least 0 and below 1", "optim.betas=[0.9, 0.95]")


@rule("adam-eps", "optim.eps is a positive float32", "Kingma and Ba, arXiv:1412.6980, algorithm 1; torch.optim.AdamW", training=True,
      fix="optim.eps=1e-8")
def epsilon(s, f) -> Iterator[Problem]:
    """An embedding row whose token never came has gradient 0 and both moments 0: the step of 0 / (0 + eps) is NaN without it."""
    if s.optim.eps < LEAST_FLOAT32:
        why = "weights without a gradient, as rows of the embedding of tokens that did not come, would be divided 0 by 0"
        yield Problem("optim.eps", as_text(s.optim.eps), why, "optim.eps=1e-8, the default")


@rule("narrow-moments", "a moment in bfloat16 has a decay of at most 1 - 1/128", "engine/optimizer.py, AdamW", training=True,
      fix="optim.betas=[0.9, 0.95], or the moment in float32")
def narrow_moments(s, f) -> Iterator[Problem]:
    """Numbers of 8 bits are up to 1/128 apart: a moment that should shrink by less than half of that is rounded back to what it was, and
    never falls again."""
    for name, beta in zip(("exp_avg", "exp_avg_sq"), s.optim.betas):
        key = f"optim.{name}_dtype"
        if getattr(s.optim, f"{name}_dtype") == "bfloat16" and 1 - beta < MOMENT_STEP:
            why = f"with a decay of {beta:g} a step changes the moment by {1 - beta:.2g} of itself, and bfloat16 rounds by up to {MOMENT_STEP / 2:.2g}"
            yield Problem(key, "bfloat16", why, f"{key}=float32, or decays of at most {1 - MOMENT_STEP:.3f} in optim.betas")


@rule("warmup-ends", "the warm-up is shorter than the run", "megatron-core 0.19.2 optimizer_param_scheduler.py (its asserts)",
      training=True, fix="fewer optim.lr_warmup_steps, or a longer run")
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


# --- counts in which -1 has a meaning -------------------------------------------------------------------------------


@rule("zero-is-no-limit", "limits of rows and steps between saves are not 0", OWN, fix="-1: all rows, or only at the end")
def zero_limits(s, f) -> Iterator[Problem]:
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(s.data, name) == 0:
            yield Problem(
                f"data.{name}", "0", "no row would be used",
                f"data.{name}=-1 uses all rows" + ("; for no validation leave data.val_files empty" if "val" in name else ""),
            )
    for name in ("save_freq", "test_freq"):
        if getattr(s.trainer, name) == 0:
            yield Problem(f"trainer.{name}", "0", "every 0 steps means nothing", f"trainer.{name}=-1 does it only at the end")
