"""What a run starts from: the checkpoint to continue, or the model; and the Hugging Face files that go into a checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from mfsdp_cli.checkpoint import dtensor, finding, manifest
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS, DIST_CKPT, Manifest
from mfsdp_cli.checkpoint.reuse import ModelSource, load_contents, model_checkpoint, resume_problems
from mfsdp_cli.config.schema import OptimSettings, SftSettings
from mfsdp_cli.errors import MfsdpError, Problem

ROLLOUT = "rollout_ahead.npz"
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_INDEX = ".index.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done and conversations seen, over all ranks.

    rollout  GRPO one step ahead: the next step's responses (see `ahead`)
    metrics  of the validation at this step, as the manifest has them; empty without one
    """

    step: int = 0
    samples_consumed: int = 0
    rollout: bytes = b""
    metrics: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Resume:
    """A checkpoint to continue from. vocab_rows: rows of the embedding that it fixes."""

    folder: Path
    manifest: Manifest

    @property
    def position(self) -> Position:
        rollout = self.folder / ROLLOUT
        return Position(self.manifest.step, self.manifest.samples_consumed, rollout.read_bytes() if rollout.is_file() else b"")


def find_resume(settings: SftSettings, run_dir: Path) -> tuple[Resume | None, list[Problem]]:
    """The checkpoint to continue from, by trainer.resume_mode, and warnings about the choice. Raises MfsdpError when the
    one asked for is incomplete or lacks what checkpoint.load_contents wants."""
    problems: list[Problem] = []
    mode = settings.trainer.resume_mode
    if mode == "disable":
        return None, problems
    folder = finding.resolve(settings.trainer.resume_from_path) if mode == "resume_path" else finding.latest_complete(run_dir / CHECKPOINTS, problems)
    if folder is None:
        return None, problems
    found = manifest.require_complete(folder)
    if faults := resume_problems(settings, found):
        raise MfsdpError(faults)
    return Resume(folder, found), problems


def find_source(path: str, trust_remote_code: bool, local_rank: int) -> ModelSource:
    """The model at a folder, a checkpoint or a hub id, which the first rank of each node downloads. Collective.
    Raises MfsdpError for a checkpoint that cannot be started from."""
    if (checkpoint := model_checkpoint(path)) is not None:
        return checkpoint
    folder = Path(path).expanduser()
    if folder.is_dir():
        return ModelSource(folder)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"] + (["*.py"] if trust_remote_code else [])
    if local_rank == 0:
        snapshot_download(path, allow_patterns=patterns)
    dist.barrier()
    return ModelSource(Path(snapshot_download(path, allow_patterns=patterns)))


def build_engine(settings: SftSettings, source: ModelSource, resume: Resume | None, optim: OptimSettings | None, device):
    """(engine, notes): a model with the weights of the checkpoint to continue from, else of the source; of a source only the
    weights are taken, so that optimizer and step start anew. `optim` None: a frozen model. Collective."""
    from mfsdp_cli.engine.megatron import MegatronEngine

    checkpoint, contents = (resume.folder, load_contents(settings)) if resume else (source.checkpoint, ["model"])
    engine = MegatronEngine(
        str(source.folder), settings.engine, optim, device=device, seed=settings.trainer.seed, load_weights=checkpoint is None,
        vocab_rows=resume.manifest.padded_vocab_size if resume else source.vocab_rows, trust_remote_code=settings.model.trust_remote_code,
    )
    return engine, dtensor.load(engine, checkpoint / DIST_CKPT, contents) if checkpoint else []


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
