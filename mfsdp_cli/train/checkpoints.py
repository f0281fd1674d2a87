"""A checkpoint as a whole: sharded tensors, Hugging Face files, manifest; and the way back from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

from mfsdp_cli.checkpoint import dtensor, manifest
from mfsdp_cli.checkpoint.hf_folder import read_hf
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS, DIST_CKPT, HUGGINGFACE, Manifest
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

SOURCE_INDEX = "source_index.json"
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformers")
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_INDEX = ".index.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done and conversations seen, over all ranks."""

    step: int = 0
    samples_consumed: int = 0


@dataclass(frozen=True)
class Resume:
    """A checkpoint to continue from. vocab_rows: rows of the embedding that it fixes."""

    folder: Path
    manifest: Manifest

    @property
    def position(self) -> Position:
        return Position(self.manifest.step, self.manifest.samples_consumed)


def find_resume(settings: SftSettings, run_dir: Path) -> tuple[Resume | None, list[Problem]]:
    """The checkpoint to continue from, by trainer.resume_mode, and warnings about the choice. Raises MfsdpError when the
    one asked for is incomplete or lacks what checkpoint.load_contents wants."""
    problems: list[Problem] = []
    mode = settings.trainer.resume_mode
    if mode == "disable":
        return None, problems
    folder = manifest.resolve(settings.trainer.resume_from_path) if mode == "resume_path" else manifest.latest_complete(run_dir / CHECKPOINTS, problems)
    if folder is None:
        return None, problems
    found = manifest.require_complete(folder)
    lacking = [c for c in load_contents(settings) if c not in found.contents]
    if lacking or "model" not in load_contents(settings):
        why = f"the checkpoint holds {found.contents}" if lacking else "a run cannot continue without its weights"
        raise MfsdpError(Problem("checkpoint.load_contents", str(load_contents(settings)), why, f"load {found.contents}, or fewer but model", code=BAD_INPUT))
    tp = settings.engine.tensor_model_parallel_size
    if found.padded_vocab_size % tp:
        why = f"the checkpoint fixes the embedding at {found.padded_vocab_size} rows, which {tp} ranks cannot share evenly"
        raise MfsdpError(Problem("engine.tensor_model_parallel_size", str(tp), why, f"use the {found.topology['tp']} that the checkpoint was made with"))
    return Resume(folder, found), problems


def load_contents(settings: SftSettings) -> list[str]:
    contents = settings.checkpoint.load_contents
    return settings.checkpoint.save_contents if contents is None else contents


def load(engine, resume: Resume, contents: list[str]) -> list[Problem]:
    """Restore the engine. Collective. Returns notes on what was not restored."""
    return dtensor.load(engine, resume.folder / DIST_CKPT, contents)


def save(engine, settings: SftSettings, run_dir: Path, model_dir: Path, position: Position, total_steps: int, end_of_turn_id: int) -> Path:
    """Write RUN/checkpoints/step_N and drop what retention no longer keeps. Collective. Returns the folder."""
    checkpoints = run_dir / CHECKPOINTS
    tmp = checkpoints / (manifest.step_folder(position.step) + manifest.TMP)
    if dist.get_rank() == 0:
        manifest.begin(checkpoints, position.step)
    dist.barrier()
    contents = settings.checkpoint.save_contents
    num_tensors = dtensor.save(engine, tmp / DIST_CKPT, contents)
    if dist.get_rank() == 0:
        if "model" in contents:
            copy_huggingface_files(model_dir, tmp / HUGGINGFACE, end_of_turn_id, settings.model.trust_remote_code)
            _write_source_index(model_dir, tmp / SOURCE_INDEX)
        (tmp / "trainer.json").write_text(json.dumps({
            "step": position.step, "samples_consumed": position.samples_consumed, "total_steps": total_steps, "seed": settings.trainer.seed,
        }, indent=1) + "\n")
        manifest.commit(tmp, _manifest(engine, settings, position, total_steps, num_tensors))
        manifest.prune(checkpoints, settings.trainer.max_ckpt_to_keep)
    dist.barrier()
    return checkpoints / manifest.step_folder(position.step)


def _manifest(engine, settings: SftSettings, position: Position, total_steps: int, num_tensors: int) -> Manifest:
    e = settings.engine
    topology = {
        "world": dist.get_world_size(), "dp": engine.dp_size, "tp": e.tensor_model_parallel_size, "pp": 1, "cp": e.context_parallel_size,
        "ep": e.expert_model_parallel_size, "etp": e.expert_tensor_parallel_size,
    }
    return Manifest(
        step=position.step, total_steps=total_steps, samples_consumed=position.samples_consumed, contents=list(settings.checkpoint.save_contents),
        topology=topology, dtype=e.dtype, padded_vocab_size=engine.vocab_rows, architecture=engine.hf_config.architectures[0],
        source_model=settings.model.path, num_tensors=num_tensors, versions={p: version(p) for p in PACKAGES},
    )


def copy_huggingface_files(source: Path, target: Path, end_of_turn_id: int, with_code: bool) -> None:
    """Configuration and tokenizer of the source model, byte for byte; only generation_config.json is amended, so that
    generation stops at the end of a turn (base models name another end, e.g. <|endoftext|>)."""
    target.mkdir()
    for pattern in _COPIED + (("*.py",) if with_code else ()):
        for file in source.glob(pattern):
            if not file.name.endswith(_INDEX):
                shutil.copyfile(file, target / file.name)
    path = target / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {"_from_model_config": True}
    ends = generation.get("eos_token_id", json.loads((target / "config.json").read_text()).get("eos_token_id"))
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if end_of_turn_id not in ends:
        path.write_text(json.dumps(generation | {"eos_token_id": [end_of_turn_id, *ends]}, indent=2) + "\n")


def _write_source_index(model_dir: Path, path: Path) -> None:
    """Names, shapes and dtypes of the source model's tensors, so that an export can be checked when the source is gone."""
    tensors = {t.name: {"shape": list(t.shape), "dtype": t.dtype} for t in read_hf(model_dir).tensors}
    path.write_text(json.dumps(tensors, indent=0) + "\n")


