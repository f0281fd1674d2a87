"""One trainer rank of GRPO: the policy and the frozen reference on Megatron-FSDP, driven by method calls.

The class knows nothing of Ray: `ray_group` makes an actor of it, a test may call it in a forked process. Every method is
collective: the driver calls it on all ranks with the same arguments.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.types import Experience, PackedBatch, PackedExperience, Sample


class TrainerRank:
    def __init__(self, settings: GrpoSettings, run_dir: Path, rank: int, world_size: int, local_rank: int):
        self.settings, self.run_dir, self.rank, self.world_size, self.local_rank = settings, run_dir, rank, world_size, local_rank
        self.saver, self.lines = None, []

    def start(self, init_method: str) -> dict:
        """Join the group, build the policy from the latest checkpoint or the model, and the reference. Returns where the
        run stands: {"step", "samples_consumed", "rollout", "resumed_from", "notes", "source"}."""
        from mfsdp_cli.engine.megatron import init_distributed
        from mfsdp_cli.train import checkpoints

        s = self.settings
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(min(self.world_size, s.trainer.n_gpus_per_node)))  # as torchrun says it
        self.device = init_distributed(s.engine, s.trainer.startup_timeout_s, init_method=init_method, rank=self.rank,
                                       world_size=self.world_size, local_rank=self.local_rank)
        self.source = checkpoints.find_source(s.model.path, s.model.trust_remote_code, self.local_rank)
        resume, problems = checkpoints.find_resume(s, self.run_dir)
        only_validates = s.trainer.val_only
        self.policy, loaded = checkpoints.build_engine(s, self.source, resume, None if only_validates else s.optim, self.device)
        problems += loaded
        self.reference = None
        if (s.actor.use_kl_loss or s.algorithm.use_kl_in_reward) and not only_validates:
            source = checkpoints.find_source(s.ref.path, s.model.trust_remote_code, self.local_rank) if s.ref.path else self.source
            self.reference, loaded = checkpoints.build_engine(s, source, None, None, self.device)
            problems += loaded
        position = resume.position if resume else checkpoints.Position()
        return {**vars(position), "resumed_from": str(resume.folder) if resume else None,
                "notes": [f"{p.level}: {p.key}: {p.why}" for p in problems], "source": self.source}

    def log_probs(self, samples: list[Sample], reference: bool) -> dict[int, np.ndarray]:
        """Index -> log-probabilities of the response's tokens, float32 [R], of this rank's share; from one rank of each
        tensor-parallel group, the others return nothing. At the sampling temperature."""
        import torch

        engine = self.reference if reference else self.policy
        budget = (self.settings.ref.log_prob_max_token_len_per_gpu if reference else None) or self.settings.actor.ppo_max_token_len_per_gpu
        micro_batches = self._pack(samples, range(len(samples)), engine, budget, dynamic=True)
        queued = list(engine.log_probs(micro_batches, self.settings.rollout.temperature))  # all of them before the first is waited for
        values = torch.cat(queued).cpu().numpy()[np.concatenate([packed.target_mask.numpy() for packed in micro_batches]) > 0]
        rows = [i for packed in micro_batches for i in packed.rows]
        parts = np.split(values, np.cumsum([samples[i].num_targets for i in rows]))
        assert len(parts.pop()) == 0
        return dict(zip(rows, parts, strict=True)) if engine.tp_rank == 0 else {}

    def update(self, batch: list[Experience], indices: list[int], lr: float) -> dict:
        """One optimizer step on the responses `indices` of the batch. Returns statistics as sums over this rank's share
        (see `losses`), empty except from one rank of each tensor-parallel group, and the gradient norm. Raises NonFiniteGradient.

        The GPU is waited for once, for all numbers of the update: whoever waits between micro batches lets it run dry."""
        import torch

        from mfsdp_cli.data.pack import with_experience
        from mfsdp_cli.train import losses

        actor = self.settings.actor
        samples = [e.sample for e in batch]
        totals = losses.count_totals((int((batch[i].mask & np.isfinite(batch[i].rollout_log_probs)).sum()) for i in indices), self.settings.data.max_response_length)
        micro_batches = self._pack(samples, indices, self.policy, actor.ppo_max_token_len_per_gpu, actor.use_dynamic_bsz)
        stats: list[dict] = []

        def loss_fn(log_probs, packed, entropy):
            loss, found = self._loss(log_probs, entropy, packed, totals)
            stats.append(found)
            return loss

        self.policy.forward_backward([with_experience(packed, batch) for packed in micro_batches], loss_fn, self.settings.rollout.temperature,
                                     with_entropy=True)
        grad_norm = self.policy.optimizer_step(lr)
        numbers = iter(torch.stack([grad_norm.double(), *(value for part in stats for value in part.values())]).tolist())
        grad_norm = self.policy.finite(next(numbers))
        merged = losses.merge([{key: next(numbers) for key in part} for part in stats])
        return {"grad_norm": grad_norm, "stats": merged if self.policy.tp_rank == 0 else {}}

    def _loss(self, log_probs, entropy, packed: PackedExperience, totals):
        from mfsdp_cli.train import correction, losses

        algorithm = self.settings.algorithm
        mask, rollout = packed.mask, packed.rollout_log_probs
        # With one update a rollout the policy of the update is the policy before it.
        old = log_probs.detach() if packed.old_log_probs is None else packed.old_log_probs
        mismatch = correction.mismatch_stats(rollout, old, mask)
        weights, used, corrected = correction.correction_weights(rollout, old, mask, algorithm.rollout_correction, algorithm.rollout_correction_threshold)
        loss, stats = losses.actor_loss(
            log_probs, old, packed.advantages, used, losses.sequence_ids(packed.cu_seqlens, len(log_probs)), self.settings.actor, totals,
            weights=weights, ref_log_probs=packed.ref_log_probs, entropy=entropy if self.settings.actor.entropy_coeff else entropy.detach(),
        )
        return loss, stats | {f"mismatch/{k}": v for k, v in mismatch.items()} | {f"correction/{k}": v for k, v in corrected.items()}

    def _pack(self, samples: list[Sample], indices, engine, budget: int, dynamic: bool) -> list[PackedBatch]:
        """This rank's micro batches of samples[indices]; `rows` of each are positions in `samples`."""
        from mfsdp_cli.data.pack import pack
        from mfsdp_cli.train.batching import fixed_micro_batches, plan_micro_batches

        indices, usable = list(indices), self.settings.engine.usable_tokens(budget)
        if dynamic:
            plan = plan_micro_batches([samples[i].num_tokens for i in indices], dp_size=engine.dp_size, max_tokens=usable)
        else:
            plan = fixed_micro_batches(len(indices), engine.dp_size, self.settings.actor.ppo_micro_batch_size_per_gpu)
        chosen = [[samples[indices[k]] for k in micro] for micro in plan[engine.dp_rank]]
        return [pack(micro, multiple_of=engine.sequence_multiple) for micro in chosen]

    def write_weights(self, folder: str, writers: list[int]) -> str | None:
        """Stream the policy's weights into a new version in `folder`, on the ranks `writers`: one of each host. Returns its path there."""
        from mfsdp_cli.rollout.transfer import write_weights

        path = write_weights(self.policy.named_weights(), Path(folder), is_writer=self.rank in writers)
        return None if path is None else str(path)

    def hand_over_weights(self, send) -> None:
        """By CUDA IPC: see `rollout.native.send_ipc`, which says what `send` is and must do."""
        from mfsdp_cli.rollout.native import send_ipc

        send_ipc(self.policy.named_weights(on_cpu=False), send)

    def weight_layout(self) -> dict:
        from mfsdp_cli.rollout.native import layout_of

        return layout_of(self.policy.named_weights(on_cpu=False))

    def open_transfer(self, address: str, port: int, world_size: int) -> None:
        from mfsdp_cli.rollout.native import open_nccl

        self.transfer_group = open_nccl(address, port, world_size) if self.rank == 0 else None

    def broadcast_weights(self) -> None:
        """By NCCL, from rank 0; the others only take part in gathering each tensor."""
        from mfsdp_cli.rollout.native import send_nccl

        weights = self.policy.named_weights(on_cpu=False)
        if self.transfer_group is not None:
            send_nccl(weights, self.transfer_group)
        for _ in weights:
            pass

    def save(self, step: int, samples_consumed: int, total_steps: int, end_of_turn_id: int, rollout: bytes,
             metrics: dict[str, float | None]) -> None:
        """Write RUN/checkpoints/step_N, or begin to: see `saved`."""
        from mfsdp_cli.train.checkpoints import Position
        from mfsdp_cli.train.saver import Saver

        if self.saver is None:
            self.saver = Saver(self.policy, self.settings, self.run_dir, self.source, total_steps, end_of_turn_id, None, self.lines.append)
        self.saver.save(Position(step, samples_consumed, rollout, metrics))

    def saved(self, wait: bool) -> tuple[str | None, list[str]]:
        """The newest checkpoint that this attempt has completed, and lines for people since the last call. Raises what made a save fail.

        wait  for the save that is under way
        """
        if self.saver is None:
            return None, []
        self.saver.wait() if wait else self.saver.check()
        lines, self.lines[:] = list(self.lines), []
        return None if self.saver.saved is None else str(self.saver.saved), lines

    def peak_memory_gib(self) -> float:
        from mfsdp_cli.train.sft import peak_memory_gib

        return peak_memory_gib(self.device)
