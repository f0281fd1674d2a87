"""GRPO, top to bottom: the driver, one process that tells trainer ranks and samplers what to do.

    prompts -> n responses each, with the sampler's log-probabilities -> rewards in child processes -> advantages in the group
    -> old and reference log-probabilities (each only when needed) -> experience to the ranks -> updates by mini batch
    -> weights to the samplers, version + 1 -> metrics, samples -> validate, save

Trainer ranks and samplers are Ray actors (`ray_group`); what a rank does is in `ranks`, the losses are in `losses`.
"""

from __future__ import annotations

import time
from pathlib import Path

from mfsdp_cli.checkpoint.retention import recorded
from mfsdp_cli.config.load import read_resolved, to_dict
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.data.loader import BatchStream
from mfsdp_cli.train import ahead, correction, losses
from mfsdp_cli.train.answers import (
    Answer, answer_metrics, experience, sample_of, score, set_advantages, split, subtract_kl, usable_groups, write_samples,
)
from mfsdp_cli.train.metrics import EtaMeter, MetricsLog, grpo_line
from mfsdp_cli.train.process import RankProcess, parse_arguments
from mfsdp_cli.train.schedule import due, learning_rate
from mfsdp_cli.train.weight_sync import weight_sync


def main() -> None:
    args = parse_arguments(__doc__)
    process = RankProcess(args.attempt_dir, rank=0, local_rank=0, name=None)
    run_dir = args.run_dir.resolve()  # Ray's actors may have another working directory
    process.show(run_dir, args.run_dir)
    with process.last_word():
        train(read_resolved(args.config, "grpo"), run_dir, process)


def train(settings: GrpoSettings, run_dir: Path, process: RankProcess) -> None:
    import torch

    from mfsdp_cli.rewards.pool import RewardPool
    from mfsdp_cli.train.ray_group import Cluster

    trainer, reward = settings.trainer, settings.reward
    on_gpu = settings.engine.device != "cpu" and torch.cuda.is_available()
    with RewardPool(reward.num_workers, reward.timeout_s, reward.name, reward.function) as pool:
        with Cluster(settings, run_dir, process.attempt_dir, on_gpu) as cluster:
            pool.self_test()  # its workers have started while Ray did
            with Run(settings, run_dir, process, cluster, pool) as run:
                run.sync_weights()
                with MetricsLog(run_dir, trainer.logger, trainer.project_name, trainer.experiment_name, to_dict(settings), True, run.step) as log:
                    loop(run, log, EtaMeter(run.total_steps))


def loop(run: Run, log, meter) -> None:
    settings, process, trainer = run.settings, run.process, run.settings.trainer
    record: dict = {}
    coming = run.rollout_of_checkpoint()
    stopped = False
    if run.val_prompts and (trainer.val_only or (run.step == 0 and trainer.val_before_train)):
        record = run.validate(log)
    while run.step < run.total_steps and not trainer.val_only and not stopped:
        started = time.monotonic()
        step = run.step + 1
        answers, sampled = run.finish_rollout(coming or run.begin_rollout(step))
        coming = run.begin_rollout(step + 1) if settings.rollout.one_step_ahead and step < run.total_steps else None
        rollout_s = time.monotonic() - started
        trained = run.update(answers, step)
        update_s = time.monotonic() - started - rollout_s
        run.sync_weights()
        run.step, run.samples_consumed = step, sampled.pop("samples_consumed")

        step_s = time.monotonic() - started
        record = {"step": step, "total_steps": run.total_steps, "samples_consumed": run.samples_consumed, **answer_metrics(answers), **sampled, **trained,
                  "rollout_s": rollout_s, "update_s": update_s, "sync_s": step_s - rollout_s - update_s, "step_s": step_s,
                  "update_tokens_per_s": trained["num_tokens"] / max(update_s, 1e-9), **meter.add(step, trained["num_tokens"], step_s)}
        log.log(record)
        process.say(grpo_line(record))
        run.alarm(record, step)

        stopped = process.stop_asked()
        last = step == run.total_steps or stopped
        if run.val_prompts and not stopped and (last or due(step, trainer.test_freq)):
            record |= run.validate(log)
        if last or due(step, trainer.save_freq):
            log.sync()
            run.save(coming, recorded(record))
        run.tell_saves(wait=last)
    done = trainer.val_only or run.step >= run.total_steps
    process.say("done" if done else "stopped on request")
    process.finish({"status": "done" if done else "stopped", "step": run.step, "total_steps": run.total_steps, "checkpoint": run.saved, "metrics": record})


class Run:
    """What the loop's lines stand for. Made once trainer ranks and samplers are ready, with one set of weights."""

    def __init__(self, settings: GrpoSettings, run_dir: Path, process: RankProcess, cluster, pool):
        self.settings, self.run_dir, self.process, self.cluster, self.pool = settings, run_dir, process, cluster, pool
        data, trainer = settings.data, settings.trainer
        process.say(f"loading {settings.model.path} on {cluster.num_ranks} trainer ranks …")
        state = cluster.start_trainers()
        for note in state["notes"]:
            process.say(note)
        self.step, self.samples_consumed, self.saved = state["step"], state["samples_consumed"], state["resumed_from"]
        self.rollout = state["rollout"]
        source = state["source"]
        shapes = source.tensor_shapes()
        process.say(f"starting {cluster.num_samplers} samplers ({settings.rollout.name}) …")
        cluster.start_samplers(str(source.folder), shapes)
        self.open_data(str(source.folder))
        self.total_steps, self.stream = self.step, None
        if self.train_prompts is not None:
            self.total_steps = trainer.total_training_steps or trainer.total_epochs * (len(self.train_prompts) // data.train_batch_size)
            self.stream = BatchStream(self.train_prompts, data.train_batch_size, trainer.seed, data.shuffle, self.samples_consumed)
        cluster.samplers_started()
        self.weights = weight_sync(settings, cluster, run_dir, shapes)
        self.num_updates = 0  # weight updates that the samplers have had; they start without weights

    def open_data(self, model_dir: str) -> None:
        """Prompts, tokenizer and the ids that end a response. Raises MfsdpError with every row that cannot be used."""
        from transformers import AutoTokenizer

        from mfsdp_cli.data.chat import ChatTokenizer
        from mfsdp_cli.data.prompts import PromptDataset
        from mfsdp_cli.rollout.base import stop_ids

        data = self.settings.data
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=self.settings.model.trust_remote_code)
        chat = ChatTokenizer(self.tokenizer)
        self.end_of_turn_id = chat.end_of_turn_id
        val_only = self.settings.trainer.val_only
        self.train_prompts = None if val_only else PromptDataset(data.train_files, data, chat, data.train_max_samples)
        self.val_prompts = PromptDataset(data.val_files, data, chat, data.val_max_samples) if data.val_files else None
        for name, rows in (("training", self.train_prompts), ("validation", self.val_prompts)):
            if rows is not None:
                self.process.say(f"{name} data: {rows.summary}")
                for note in rows.notes:
                    self.process.say(f"{note.level}: {note.key}: {note.why}")
        self.stop_ids = stop_ids(self.tokenizer, Path(model_dir), chat.end_of_turn_id)

    # --- rollout ------------------------------------------------------------------------------------------------------

    def begin_rollout(self, step: int) -> dict:
        """Send the next batch of prompts to the samplers; `finish_rollout` waits for the responses and scores them."""
        prompts = next(self.stream)
        return {"step": step, "prompts": prompts, "samples_consumed": self.stream.samples_consumed, **self._sample(step, prompts)}

    def _sample(self, step: int, prompts: list) -> dict:
        from mfsdp_cli.rollout.base import Sampling, response_seed

        rollout = self.settings.rollout
        sampling = Sampling(rollout.n, rollout.temperature, rollout.top_p, rollout.top_k, self.settings.data.max_response_length, self.stop_ids)
        seeds = [response_seed(self.settings.trainer.seed, step, p.row, i) for p in prompts for i in range(rollout.n)]
        return {"handles": self.cluster.begin_sampling([p.input_ids for p in prompts], sampling, seeds)}

    def finish_rollout(self, begun: dict) -> tuple[list[Answer], dict]:
        """Scored answers, and what their sampling took. With filter_groups, groups of equal rewards are replaced by those of
        further prompts, as long as the cap allows; what is missing then stays missing and is counted."""
        algorithm, wanted = self.settings.algorithm, self.settings.data.train_batch_size
        kept: list[Answer] = []
        waited_s, scored_s, num_sampled, num_tokens, batches = 0.0, 0.0, 0, 0, 0
        while True:
            started = time.monotonic()
            responses = self.responses_of(begun)
            waited_s += time.monotonic() - started
            started = time.monotonic()
            answers = score(begun["prompts"], responses, self.pool, self.settings, first_group=batches * wanted)
            scored_s += time.monotonic() - started
            batches, num_sampled = batches + 1, num_sampled + len(answers)
            num_tokens += sum(len(a.response.input_ids) for a in answers)
            kept += usable_groups(answers) if algorithm.filter_groups else answers
            if not algorithm.filter_groups or len(kept) >= wanted * self.settings.rollout.n or batches > algorithm.filter_groups_max_batches:
                break
            begun = self.begin_rollout(begun["step"])
        if self.settings.rollout.enable_sleep_mode:
            self.cluster.on_samplers("sleep")
        if not kept:  # nothing differs in any group: the step does nothing but what KL and entropy ask for
            kept = answers
        versions = {a.response.weight_version for a in answers}
        return kept[: wanted * self.settings.rollout.n], {
            "samples_consumed": begun["samples_consumed"], "rollout_batches": batches, "responses_sampled": num_sampled,
            "responses_filtered": num_sampled - min(len(kept), wanted * self.settings.rollout.n),
            "weight_version": min(versions), "staleness": self.num_updates - min(versions),
            "sampling_s": waited_s, "reward_s": scored_s, "rollout_tokens_per_s": num_tokens / max(waited_s, 1e-9),
        }

    def responses_of(self, begun: dict) -> list[list]:
        """Wait for the samplers, once."""
        if "responses" not in begun:
            begun["responses"] = self.cluster.finish_sampling(begun["handles"])
        return begun["responses"]

    def rollout_of_checkpoint(self) -> dict | None:
        """The rollout that was under way, one step ahead, when the checkpoint was saved: as `begin_rollout` gives it."""
        if not (self.rollout and self.settings.rollout.one_step_ahead and self.step < self.total_steps):
            return None
        prompts = next(self.stream)
        responses = ahead.from_bytes(self.rollout, prompts, self.settings.rollout.n, self.num_updates)
        begun = {"step": self.step + 1, "prompts": prompts, "samples_consumed": self.stream.samples_consumed}
        if responses is None:
            self.process.say(f"note: rollout.n: the responses in {self.saved} are not {self.settings.rollout.n} to a prompt; they are sampled anew")
            return begun | self._sample(begun["step"], prompts)
        return begun | {"responses": responses}

    # --- update -------------------------------------------------------------------------------------------------------

    def update(self, answers: list[Answer], step: int) -> dict:
        """All optimizer steps on one batch of answers; their statistics."""
        settings, actor = self.settings, self.settings.actor
        samples = [sample_of(a, i) for i, a in enumerate(answers)]
        mini_batches = split(answers, actor.ppo_mini_batch_size)
        # One update, weighted by the sampler's own log-probabilities, needs no forward pass of its own for the old ones.
        one_update = len(mini_batches) * actor.ppo_epochs == 1 and settings.algorithm.rollout_correction != "none"
        in_reward = settings.algorithm.use_kl_in_reward
        shared = self.cluster.put(samples)
        old = self.log_probs(shared, reference=False) if in_reward or not one_update else None
        ref = self.log_probs(shared, reference=True) if in_reward or actor.use_kl_loss else None
        kl_in_reward = subtract_kl(answers, old, ref, settings) if in_reward else {}
        set_advantages(answers, settings)
        write_samples(self.run_dir, step, answers, settings.trainer.samples_per_step)  # first: should an update fail, this is what it failed on
        batch = self.cluster.put(experience(answers, samples, old, ref, settings))
        parts, norms = [], []
        lr = learning_rate(settings.optim, step, self.total_steps)
        for _ in range(actor.ppo_epochs):
            for mini_batch in mini_batches:
                results = self.cluster.on_ranks("update", batch, mini_batch, lr)
                norms.append(results[0]["grad_norm"])
                parts.append(losses.merge(r["stats"] for r in results if r["stats"]))
        memory = max(self.cluster.on_ranks("peak_memory_gib"))
        metrics = summarize(parts) | kl_in_reward | {"lr": lr, "grad_norm": sum(norms) / len(norms), "num_updates": len(parts), "memory_gib": memory,
                                                     "num_tokens": sum(s.num_tokens for s in samples), "num_groups": len({a.group for a in answers})}
        return metrics

    def log_probs(self, samples, reference: bool) -> dict:
        """Index -> log-probabilities of the response, from all ranks."""
        return {i: values for part in self.cluster.on_ranks("log_probs", samples, reference) for i, values in part.items()}

    def alarm(self, metrics: dict, step: int) -> None:
        """Stop the run when sampler and trainer disagree, before anything is saved, with the step's numbers and samples to look at."""
        reason = correction.alarm({k.removeprefix("mismatch/"): v for k, v in metrics.items() if k.startswith("mismatch/")}, self.settings.algorithm.mismatch_alarm)
        if reason and self.settings.rollout.one_step_ahead:
            reason += "; with rollout.one_step_ahead the responses are one step old: a lower optim.lr or a higher algorithm.mismatch_alarm allows for it"
        if reason:
            self.tell_saves(wait=True)
            raise ArithmeticError(f"step {step}: {reason}; the last checkpoint is {self.saved}")

    def sync_weights(self) -> None:
        """Give the samplers the policy's weights."""
        if self.settings.rollout.enable_sleep_mode:
            self.cluster.on_samplers("wake")
        self.num_updates = self.weights.send()

    # --- validate, save -----------------------------------------------------------------------------------------------

    def validate(self, log) -> dict:
        from mfsdp_cli.rollout.base import Sampling, response_seed

        rollout = self.settings.rollout
        prompts = [self.val_prompts.prompt(i) for i in range(len(self.val_prompts))]
        sampling = Sampling(rollout.val_n, rollout.val_temperature, rollout.val_top_p, -1, self.settings.data.max_response_length, self.stop_ids)
        seeds = [response_seed(self.settings.trainer.seed + 1, 0, p.row, i) for p in prompts for i in range(rollout.val_n)]
        started = time.monotonic()
        responses = self.cluster.finish_sampling(self.cluster.begin_sampling([p.input_ids for p in prompts], sampling, seeds))
        answers = score(prompts, responses, self.pool, self.settings)
        found = {f"val_{k}": v for k, v in answer_metrics(answers).items()} | {"val_s": time.monotonic() - started}
        log.log({"step": self.step, "total_steps": self.total_steps, **found})
        write_samples(self.run_dir, self.step, answers, -1, kind="val")
        self.process.say(f"step {self.step}/{self.total_steps} val_pass_rate {found['val_pass_rate']:.4f} val_reward {found['val_reward']:.4f} "
                         f"val_len {found['val_response_length']:.0f} ({len(answers)} responses, {found['val_s']:.1f} s)")
        return found

    def save(self, begun: dict | None, metrics: dict[str, float | None]) -> None:
        """begun: the rollout that is under way, one step ahead. It is waited for, since nobody could repeat it: its weights are gone.
        metrics: of the validation at this step, if there was one."""
        rollout = b"" if begun is None else ahead.to_bytes(begun["prompts"], self.responses_of(begun), self.num_updates)
        self.cluster.on_ranks("save", self.step, self.samples_consumed, self.total_steps, self.end_of_turn_id, rollout, metrics)

    def tell_saves(self, wait: bool = False) -> None:
        """Ranks may write a checkpoint while the loop goes on: what has been completed meanwhile. Raises what made a save fail."""
        saved, lines = self.cluster.on_ranks("saved", wait)[0]
        self.saved = saved or self.saved
        for line in lines:
            self.process.say(line)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None:
            try:
                self.tell_saves(wait=True)
            except Exception as second:  # most likely the same failure again: the first is the one to tell
                self.process.say(f"note: a save that was under way, if any, came to nothing: {second}")
        self.weights.close()


def summarize(parts: list[dict]) -> dict:
    """Statistics of all updates of a step: means over tokens, shares of loss averaged over the updates."""
    merged = losses.merge(parts)
    own = {k: v for k, v in merged.items() if "/" not in k}
    found = losses.means(own)
    found |= {k: v / len(parts) for k, v in own.items() if k.endswith("_loss")}
    # The mismatch is that of the rollout's weights with the trainer's: of the first update, when there are several.
    first = {k.removeprefix("mismatch/"): v for k, v in parts[0].items() if k.startswith("mismatch/")}
    corrected = {k.removeprefix("correction/"): v for k, v in merged.items() if k.startswith("correction/")}
    mismatch = correction.mismatch_metrics(first)
    rename = {"total_loss": "loss", "clip_low": "clip_low_share", "clip_high": "clip_high_share", "clip_dual": "clip_dual_share"}
    return ({rename.get(k, k): v for k, v in found.items() if k != "num_tokens"} | {"num_response_tokens": merged["num_tokens"]}
            | {f"mismatch/{k}": v for k, v in mismatch.items()} | {f"correction/{k}": v for k, v in losses.means(corrected).items()})


if __name__ == "__main__":
    main()
