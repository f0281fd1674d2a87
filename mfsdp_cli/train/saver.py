"""Saves checkpoints, with training going on meanwhile where there is room in the host's memory for a copy of the state.

What other systems' asynchronous saves get wrong does not happen here: there is one save at a time, the next waits for it;
`latest` moves, and older checkpoints go, only after every rank's files are on the disk; a save that fails ends the run at its
next step; and a run that ends, in whatever way it can still act on, waits for its save.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from mfsdp_cli.checkpoint import dtensor, retention, saving
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS, DIST_CKPT, HUGGINGFACE, TMP, Manifest, step_folder
from mfsdp_cli.checkpoint.reuse import SOURCE_INDEX, ModelSource
from mfsdp_cli.checkpoint.storage import num_ranks_here
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.launch.host import memory_free_gib
from mfsdp_cli.train.checkpoints import ROLLOUT, Position, copy_huggingface_files
from mfsdp_cli.train.save_failure import explained, on_first_rank

PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformers")
SHARE_OF_FREE_MEMORY = 0.5


class Saver:
    """One for each rank; all methods but `check` are collective. As a context: leaving it ends the save that is under way, if any.

    saved  the newest checkpoint that is known to be complete, or the one resumed from
    say    takes a line for people
    """

    def __init__(self, engine, settings: SftSettings, run_dir: Path, source: ModelSource, total_steps: int, end_of_turn_id: int,
                 saved: Path | None, say: Callable[[str], None]):
        self.engine, self.settings, self.run_dir, self.source, self.say = engine, settings, run_dir, source, say
        self.total_steps, self.end_of_turn_id, self.saved = total_steps, end_of_turn_id, saved
        self._task: Future | None = None
        self._memory: torch.Tensor | None = None  # of the copy
        self._group = None
        if self._in_background():
            self._group = dist.new_group(backend="gloo")  # a thread's collectives must not mix with the training's
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.wait()
        elif self._task is not None:
            self._task.exception()  # what ends the run is told; a save that fails as well leaves no checkpoint behind

    def save(self, position: Position) -> None:
        """Write RUN/checkpoints/step_N and drop what retention no longer keeps; in the background, from a copy of the state,
        if that is possible. Raises what made the save before this one fail."""
        self.wait()
        started = time.monotonic()
        folder = self.run_dir / CHECKPOINTS / step_folder(position.step)
        with explained(_tmp(folder), position.step):
            on_first_rank(lambda: saving.begin(folder.parent, position.step))
            state = dtensor.collect(self.engine, self.settings.checkpoint.save_contents)
        if self._group is None:
            self.saved = self._write(state, folder, position, started, None)
        else:
            state, self._memory = dtensor.copied(state, self._memory)
            self._task = self._thread.submit(self._write, state, folder, position, started, time.monotonic() - started)

    def check(self) -> None:
        """Raise what made a save in the background fail, if one has."""
        if self._task is not None and self._task.done():
            self.wait()

    def wait(self) -> None:
        """Until no save is under way. Raises what made it fail."""
        if self._task is not None:
            task, self._task = self._task, None
            self.saved = task.result()

    def _write(self, state, folder: Path, position: Position, started: float, paused_s: float | None) -> Path:
        """Everything after the copy. Collective. Returns the folder."""
        with explained(_tmp(folder), position.step, self._group):
            num_tensors, files = dtensor.write(state, _tmp(folder) / DIST_CKPT, self._group)
            on_first_rank(lambda: self._complete(folder, position, num_tensors, files), self._group)
        held = "" if paused_s is None else f", training waited {paused_s:.1f} s"
        self.say(f"saved {folder} ({time.monotonic() - started:.1f} s{held})")
        return folder

    def _complete(self, folder: Path, position: Position, num_tensors: int, files: dict[str, dict]) -> None:
        """What one rank does when all have written their tensors."""
        tmp = _tmp(folder)
        if "model" in self.settings.checkpoint.save_contents:
            copy_huggingface_files(self.source.folder, tmp / HUGGINGFACE, self.end_of_turn_id, self.settings.model.trust_remote_code)
            # an export is checked against it, also when the source is gone
            (tmp / SOURCE_INDEX).write_text(json.dumps(self.source.tensors(), indent=0) + "\n")
        (tmp / "trainer.json").write_text(json.dumps({"step": position.step, "samples_consumed": position.samples_consumed,
                                                      "total_steps": self.total_steps, "seed": self.settings.trainer.seed}, indent=1) + "\n")
        if position.rollout:
            (tmp / ROLLOUT).write_bytes(position.rollout)
        saving.commit(tmp, self._manifest(position, num_tensors), {f"{DIST_CKPT}/{name}": entry for name, entry in files.items()})
        trainer = self.settings.trainer
        retention.prune(folder.parent, trainer.max_ckpt_to_keep, trainer.keep_every, trainer.keep_best, trainer.best_metric)

    def _manifest(self, position: Position, num_tensors: int) -> Manifest:
        e = self.settings.engine
        topology = {
            "world": dist.get_world_size(), "dp": self.engine.dp_size, "tp": e.tensor_model_parallel_size, "pp": 1, "cp": e.context_parallel_size,
            "ep": e.expert_model_parallel_size, "etp": e.expert_tensor_parallel_size,
        }
        return Manifest(
            step=position.step, total_steps=self.total_steps, samples_consumed=position.samples_consumed, topology=topology,
            contents=list(self.settings.checkpoint.save_contents), dtype=e.dtype, padded_vocab_size=self.engine.vocab_rows,
            architecture=self.engine.hf_config.architectures[0], source_model=self.settings.model.path, num_tensors=num_tensors,
            versions={p: version(p) for p in PACKAGES}, metrics=position.metrics, best_metric=self.settings.trainer.best_metric,
        )

    def _in_background(self) -> bool:
        """By checkpoint.background_save; when that is null, on GPUs if the copies of all ranks of every node fit. The same
        answer on all ranks."""
        wanted, device = self.settings.checkpoint.background_save, self.engine.device
        if wanted is not None or device.type != "cuda":
            return bool(wanted)
        num_bytes = dtensor.num_bytes(self.engine, self.settings.checkpoint.save_contents) * num_ranks_here()
        fits = torch.tensor(num_bytes <= SHARE_OF_FREE_MEMORY * memory_free_gib() * 2**30, dtype=torch.int32, device=device)
        dist.all_reduce(fits, op=dist.ReduceOp.MIN)
        if not fits.item():
            self.say(f"note: saves hold training up: a copy of the state, {num_bytes / 2**30:.0f} GiB a node, does not fit into half of the host's free "
                     "memory (checkpoint.background_save)")
        return bool(fits.item())


def _tmp(folder: Path) -> Path:
    return folder.with_name(folder.name + TMP)
