"""What a dry run says: the verdict, the arithmetic of the plan, and everything a start would read, set, run and write."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from mfsdp_cli.checkpoint.finding import complete_steps, latest_complete
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS
from mfsdp_cli.config.rules_model import architecture_of
from mfsdp_cli.config.values import kind_of, validates_only
from mfsdp_cli.errors import EXIT_CODES, OK
from mfsdp_cli.launch.command import child_command, child_environment, shell_line
from mfsdp_cli.launch.fit import GIB, Disk, Memory, predict_disk, predict_memory
from mfsdp_cli.launch.folder import next_attempt

if TYPE_CHECKING:
    from mfsdp_cli.launch.plan import Plan
    from mfsdp_cli.launch.start import Checked


def dry_run_data(checked: Checked) -> dict:
    """The report as data; the text below is made from it."""
    settings, facts = checked.settings, checked.facts
    environment = child_environment(settings, checked.plan, facts)
    nodes = []
    for rank in range(settings.trainer.nnodes if kind_of(settings) == "sft" else 1):
        argv = child_command(settings, checked.run_dir, next_attempt(checked.run_dir / "attempts", rank), rank)
        nodes.append({"node_rank": rank, "argv": argv, "line": shell_line(argv, environment)})
    checkpoint = _resume_from(checked)
    memory, disk = predictions(checked)
    return {
        "ok": checked.exit_code == OK,
        "exit_code": checked.exit_code,
        "problems": [p.to_dict() for p in checked.problems],
        "plan": asdict(checked.plan),
        "memory": None if memory is None else memory.to_dict(),
        "disk": None if disk is None else disk.to_dict(),
        "run_dir": str(checked.run_dir),
        "resume_from": None if checkpoint is None else str(checkpoint),
        "reads": _reads(checked),
        "writes": _writes(checked),
        "environment": environment,
        "nodes": nodes,
    }


def dry_run_text(checked: Checked) -> str:
    data = dry_run_data(checked)
    rows = [("verdict", _verdict(checked)), ("model", _model(checked)), *_arithmetic(checked), ("run folder", data["run_dir"]),
            ("resume", f"from {data['resume_from']}" if data["resume_from"] else "nothing to resume: from step 0")]
    memory, disk = predictions(checked)
    rows.append(("disk", disk_words(disk)))
    blocks = [[f"{name:<11} {text}" for name, text in rows], memory_lines(memory, checked)]
    blocks += [[f"{name}:", *(f"  {line}" for line in data[name])] for name in ("reads", "writes")]
    blocks.append(["environment:", *(f"  {name}={value}" for name, value in data["environment"].items())])
    for node in data["nodes"]:
        kind = kind_of(checked.settings)
        blocks.append([f"command on node {node['node_rank']} (mfsdp {kind} runs it after writing its --config):", f"  {node['line']}"])
    return "\n\n".join("\n".join(block) for block in blocks)


def predictions(checked: Checked) -> tuple[Memory | None, Disk | None]:
    settings, plan, facts = checked.settings, checked.plan, checked.facts
    there = len(complete_steps(checked.run_dir / CHECKPOINTS))
    memory = None if validates_only(settings) else predict_memory(settings, plan, facts)
    return memory, predict_disk(settings, plan, facts, there)


def memory_lines(memory: Memory | None, checked: Checked) -> list[str]:
    """Memory of a GPU by part, largest first, and what it takes for granted."""
    if memory is None:
        lacks = "training" if validates_only(checked.settings) else "the model's config.json"
        return [f"memory: not predicted {'on CPU' if checked.plan.device == 'cpu' else f'without {lacks}'}"]
    rows = [(name, size, "") for name, size in memory.allocated.items()]
    rows += [(name, size, "beside torch") for name, size in memory.outside.items()]
    rows = sorted((row for row in rows if row[1]), key=lambda row: -row[1])
    sizes = [f"  {name:<18} {size / GIB:8.2f} GiB  {note}".rstrip() for name, size, note in rows]
    known = "" if memory.gpu_bytes is None else f" of {memory.gpu_bytes / GIB:.1f} GiB" + ("" if memory.fits else ": does not fit")
    torch = f"{memory.allocated_bytes / GIB:.2f} GiB of it are torch's (mem in the step line)"
    total = f"  {'total':<18} {memory.total_bytes / GIB:8.2f} GiB{known}; {torch}"
    assumed = [f"  assumed: {text}" for text in memory.assumptions]
    return [f"memory of each GPU, in the {memory.moment}:", *sizes, total, *assumed]


def disk_words(disk: Disk | None) -> str:
    if disk is None:
        return "not predicted"
    there = f" ({disk.there} are there)" if disk.there else ""
    return (f"{disk.checkpoint_bytes / GIB:.2f} GiB a checkpoint, at most {disk.at_once} at a time{there}: "
            f"{disk.needed_bytes / GIB:.1f} GiB more, {disk.free_bytes / GIB:.1f} GiB free")


def _verdict(checked: Checked) -> str:
    errors = sum(p.level == "error" for p in checked.problems)
    others = len(checked.problems) - errors
    told = f"; {others} remark{'s' if others > 1 else ''}" if others else ""
    if not errors:
        return f"would start{told}"
    code = checked.exit_code
    return f"would not start: {errors} problem{'s' if errors > 1 else ''}, exit code {code} ({EXIT_CODES[code]}){told}"


def _model(checked: Checked) -> str:
    path, facts = checked.settings.model.path, checked.facts
    if path is None:
        return "none given"
    if facts.model_path is None:
        return f"{path} (not here)" if facts.model_error else f"{path} (would be downloaded)"
    kind = architecture_of(facts.model_config or {}) or "unknown architecture"
    shown = path if facts.model_path == path or facts.model_source else f"{path} in {facts.model_path}"
    return f"{shown}: {kind}, {len(facts.model_weight_files)} weight file{'' if len(facts.model_weight_files) == 1 else 's'}"


def _arithmetic(checked: Checked) -> list[tuple[str, str]]:
    settings, plan = checked.settings, checked.plan
    data, optim, trainer = settings.data, settings.optim, settings.trainer
    rise = f"{optim.lr_warmup_init:g} to {optim.lr:g} in {plan.warmup_steps} steps"
    start = rise if plan.warmup_steps else f"{optim.lr:g} from the first step"
    constant = optim.lr_decay_style == "constant"
    decay = "then constant" if constant else f"then {optim.lr_decay_style} to {optim.min_lr:g} at step {plan.total_steps}"
    experts = f"; experts: EP {plan.ep} x ETP {plan.etp} x expert-DP {plan.expert_dp}" if plan.ep > 1 or plan.etp > 1 else ""
    sign = "=" if plan.world_size == plan.tp * plan.pp * plan.cp * plan.dp else "is not"
    sft = kind_of(settings) == "sft"
    validation = f"{plan.num_val_rows} rows, {_every(trainer.test_freq)}" if data.val_files else "never (data.val_files is empty)"
    if validates_only(settings):
        validation = f"{plan.num_val_rows} prompts x {settings.rollout.val_n}, and nothing else (trainer.val_only)"
    rows = [
        ("world", f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''} ({trainer.nnodes} node{'s' if trainer.nnodes > 1 else ''} x "
                  f"{trainer.n_gpus_per_node}, {plan.device}) {sign} TP {plan.tp} x PP {plan.pp} x CP {plan.cp} x DP {plan.dp}{experts}"),
        ("shards", f"parameters, gradients and optimizer over DP {plan.dp * plan.cp}" + (
            f", experts over {plan.expert_dp}" if plan.ep > 1 or plan.etp > 1 else "")),
        *(_sft_batch(settings, plan) if sft else _grpo_batch(settings, plan)),
        ("steps", _steps(settings, plan, "rows" if sft else "prompts")),
        ("lr", f"{start}, {decay}"),
        ("validate", validation),
        ("save", f"{_every(trainer.save_freq)}; keeps {_kept(trainer)}"),
    ]
    return [row for row in rows if row[0] in ("world", "samplers", "reward", "validate")] if validates_only(settings) else rows


def _sft_batch(settings, plan) -> list[tuple[str, str]]:
    data = settings.data
    micro = f"up to {data.max_token_len_per_gpu} tokens" if data.use_dynamic_bsz else f"{data.micro_batch_size_per_gpu} rows"
    return [("batch", f"{data.train_batch_size} conversations a step = {plan.rows_per_dp_rank:g} x DP {plan.dp}; "
                      f"micro batches of {micro} a rank, {_number(plan)}")]


def _number(plan: Plan) -> str:
    least, most = plan.min_micro_batches, plan.max_micro_batches
    return f"{most} an update" if least == most else f"{least} to {most} an update, by their lengths"


def _grpo_batch(settings, plan) -> list[tuple[str, str]]:
    """Who samples, and how prompts become responses, updates, shares of a rank and micro batches."""
    data, actor, rollout, ref, algorithm, reward = (
        settings.data, settings.actor, settings.rollout, settings.ref, settings.algorithm, settings.reward)
    engines = f"{plan.num_engines} {rollout.name} engine{'s' if plan.num_engines > 1 else ''}"
    if plan.device == "cpu":
        where = f"{engines} on CPU"
    elif rollout.colocate:
        where = f"{engines} x {plan.gpus_per_engine} GPUs, on the trainer's; {plan.num_gpus} GPUs in all"
    else:
        where = f"{engines} x {plan.gpus_per_engine} GPUs of their own; {plan.num_gpus} GPUs in all"
    cut = "are an error" if data.truncation == "error" else f"are cut ({data.truncation})"
    overlong = "are left out" if data.filter_overlong_prompts else cut
    by_tokens, by_responses = f"up to {actor.ppo_max_token_len_per_gpu} tokens", f"{actor.ppo_micro_batch_size_per_gpu} responses"
    micro = by_tokens if actor.use_dynamic_bsz else by_responses
    epochs = f" x {actor.ppo_epochs} passes" if actor.ppo_epochs > 1 else ""
    kl = [f"{actor.kl_loss_type} x {actor.kl_loss_coef:g} in the loss"] if actor.use_kl_loss else []
    kl += [f"{algorithm.kl_penalty} x {algorithm.kl_coef:g} in the reward"] if algorithm.use_kl_in_reward else []
    scorer = reward.function or (f"{reward.name}, by data_source" if reward.name == "auto" else reward.name)
    correction = algorithm.rollout_correction
    bound = "" if correction == "none" else f" at {algorithm.rollout_correction_threshold:g}"
    return [
        ("samplers", where),
        ("rollout", f"{data.train_batch_size} prompts x {rollout.n} responses = {plan.samples_per_step} samples a step, of at most "
                    f"{data.max_prompt_length} + {data.max_response_length} tokens; longer prompts {overlong}"),
        ("batch", f"{actor.ppo_mini_batch_size} prompts x {rollout.n} = {plan.samples_per_update} samples an update = "
                  f"{plan.rows_per_dp_rank:g} x DP {plan.dp}; micro batches of {micro} a rank, {_number(plan)}"),
        ("updates", f"{data.train_batch_size} // {actor.ppo_mini_batch_size} mini batches{epochs} = {plan.updates_per_step} a step"),
        ("loss", f"{algorithm.adv_estimator} advantages, {actor.policy_loss} clipped to [1 - {actor.clip_ratio_low:g}, 1 + "
                 f"{actor.clip_ratio_high:g}], {actor.loss_agg_mode}; correction for the sampler: {correction}{bound}"),
        ("reference", f"{ref.path or settings.model.path}, frozen; KL {' and '.join(kl)}" if plan.uses_reference else "none (no KL)"),
        ("reward", f"{scorer}; {reward.num_workers} process{'es' if reward.num_workers > 1 else ''}, {reward.timeout_s:g} s a response"),
    ]


def _steps(settings, plan, rows: str) -> str:
    data, trainer = settings.data, settings.trainer
    epoch = f"{plan.num_train_rows} {rows} // {data.train_batch_size} = {plan.steps_per_epoch}"
    if trainer.total_training_steps:
        steps = f"{plan.total_steps} (trainer.total_training_steps); an epoch has {epoch}"
    else:
        steps = f"{epoch} an epoch, x {trainer.total_epochs} epochs = {plan.total_steps}"
    dropped = plan.dropped_rows_per_epoch
    return steps + (f"; {dropped} {rows} an epoch fill no batch and are left out" if dropped else "")


def _kept(trainer) -> str:
    if trainer.max_ckpt_to_keep is None:
        return "all"
    every = f", those of every {trainer.keep_every} steps" if trainer.keep_every else ""
    return f"{trainer.max_ckpt_to_keep}{every}" + (f", the best {trainer.keep_best} by {trainer.best_metric}" if trainer.keep_best else "")


def _every(steps: int) -> str:
    return f"every {steps} steps and at the end" if steps > 0 else "at the end"


def _resume_from(checked: Checked):
    trainer = checked.settings.trainer
    if trainer.resume_mode == "resume_path":
        return trainer.resume_from_path
    return latest_complete(checked.run_dir / CHECKPOINTS) if trainer.resume_mode == "auto" else None


def _reads(checked: Checked) -> list[str]:
    facts = checked.facts
    weights_in = facts.model_source.checkpoint if facts.model_source else facts.model_path
    model = [f"{facts.model_path}/config.json", *(f"{weights_in}/{name}" for name in facts.model_weight_files)] if facts.model_path else []
    return model + [f"{f.path} ({f.error or f'{f.num_rows} rows'})" for f in facts.parquet.values()]


def _writes(checked: Checked) -> list[str]:
    run_dir, logger = checked.run_dir, checked.settings.trainer.logger
    names = ["config.yaml", "origin.json", "command.txt", "lock", "metrics.jsonl", f"{CHECKPOINTS}/step_*/", f"{CHECKPOINTS}/latest"]
    names += ["tensorboard/"] if "tensorboard" in logger else []
    names += ["samples/"] if kind_of(checked.settings) == "grpo" else []
    attempt = next_attempt(run_dir / "attempts", checked.settings.trainer.node_rank)
    return [f"{run_dir}/{name}" for name in names] + [f"{attempt}/"]
