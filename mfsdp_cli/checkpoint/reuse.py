"""A checkpoint that a run continues from, or starts from: found and judged, before a launch and again in the ranks. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.checkpoint.finding import is_step_folder, resolve
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS, DIST_CKPT, HUGGINGFACE, Manifest, require_complete
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem
from mfsdp_cli.records import Record

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings

SOURCE_INDEX = "source_index.json"


class ModelSource(Record):
    """The model that a run starts from.

    folder      configuration and tokenizer, and the weights when there is no checkpoint
    checkpoint  step folder of the checkpoint that has the weights
    vocab_rows  rows of the embedding in that checkpoint
    """

    folder: Path
    checkpoint: Path | None = None
    vocab_rows: int | None = None

    def tensors(self) -> dict[str, dict]:
        """Hugging Face name -> {"shape", "dtype"} of every tensor of the model, as its Hugging Face folder had or has them."""
        if self.checkpoint is not None:
            return json.loads((self.checkpoint / SOURCE_INDEX).read_text())
        from mfsdp_cli.checkpoint.hf_folder import read_hf

        return {t.name: {"shape": list(t.shape), "dtype": t.dtype} for t in read_hf(self.folder).tensors}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, entry in self.tensors().items()}


def model_checkpoint(path: str | Path, warnings: list[Problem] | None = None) -> ModelSource | None:
    """The checkpoint that `path` means: a step folder, or the latest complete one of a run or checkpoints folder. None when
    `path` is no checkpoint of ours: a Hugging Face folder, a hub id.

    Raises MfsdpError (BAD_INPUT) when it is one and cannot be started from. Warnings about the choice are appended."""
    folder = Path(os.path.expanduser(path))
    if folder.name in (HUGGINGFACE, DIST_CKPT) and is_step_folder(folder.parent) and not any(folder.glob("*.safetensors")):
        holds = "configuration and tokenizer" if folder.name == HUGGINGFACE else "weights"
        why = f"it is a part of a checkpoint, with its {holds} alone"
        raise MfsdpError(Problem(str(path), "", why, f"give the checkpoint itself: {folder.parent}", code=BAD_INPUT))
    if (folder / "config.json").is_file() or not folder.is_dir():
        return None
    is_run = (folder / CHECKPOINTS).is_dir() or (folder / "attempts").is_dir()  # one that has not saved yet is told as such
    if not (is_run or is_step_folder(folder) or any(is_step_folder(p) for p in folder.glob("step_*"))):
        return None
    step = resolve(folder, warnings)
    found = require_complete(step)
    if "model" not in found.contents:
        raise MfsdpError(Problem(str(step), f"holds {', '.join(found.contents)}", "it was saved without the weights",
                                 "give one that was saved with model in checkpoint.save_contents", code=BAD_INPUT))
    return ModelSource(step / HUGGINGFACE, step, found.padded_vocab_size)


def load_contents(settings: SftSettings | GrpoSettings) -> list[str]:
    """What a resume restores; of a run that only validates, the weights."""
    contents = ["model"] if getattr(settings.trainer, "val_only", False) else settings.checkpoint.load_contents
    return settings.checkpoint.save_contents if contents is None else contents


def resume_problems(settings: SftSettings | GrpoSettings, found: Manifest) -> list[Problem]:
    """Why a run with these settings cannot continue from this complete checkpoint."""
    problems, wanted = [], load_contents(settings)
    lacking = [c for c in wanted if c not in found.contents]
    if lacking or "model" not in wanted:
        why = f"the checkpoint holds {found.contents}" if lacking else "a run cannot continue without its weights"
        problems.append(Problem("checkpoint.load_contents", str(wanted), why, f"load {found.contents}, or fewer but model", code=BAD_INPUT))
    pp, made_with = settings.engine.pipeline_model_parallel_size, found.topology.get("pp", 1)
    if pp != made_with:
        why = f"the checkpoint was made with {made_with}; layers are named within their stage, so that wrong ones would be loaded in silence"
        problems.append(Problem("engine.pipeline_model_parallel_size", str(pp), why, f"engine.pipeline_model_parallel_size={made_with}"))
    tp, rows = settings.engine.tensor_model_parallel_size, found.padded_vocab_size
    if rows % tp:
        why = f"the checkpoint fixes the embedding at {rows} rows, which {tp} ranks cannot share evenly"
        fix = f"use the {found.topology.get('tp', 1)} that the checkpoint was made with"
        problems.append(Problem("engine.tensor_model_parallel_size", str(tp), why, fix))
    return problems
