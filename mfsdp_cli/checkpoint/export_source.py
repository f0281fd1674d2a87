"""What `mfsdp ckpt export-hf` can read: checkpoints of mfsdp, of verl's Megatron-FSDP path and of Megatron-Bridge
(fsdp_dtensor). Found and judged without torch, and without unpickling anything.

All of them are DTensor checkpoints whose model parameters are named `model.<name>`; other savers leave the wrappers'
`module.` in the names and put pickled objects beside the tensors, which are never read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mfsdp_cli.checkpoint import layouts
from mfsdp_cli.checkpoint.dcp_metadata import TensorEntry, read_dcp
from mfsdp_cli.checkpoint.manifest import require_complete
from mfsdp_cli.checkpoint.hf_folder import DTYPE_NAMES, read_hf
from mfsdp_cli.checkpoint.reuse import SOURCE_INDEX
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

PARAMETERS = "model."
_MODEL_DCP = {"mfsdp": "dist_ckpt", "verl": "model/dist_ckpt", "verl-old": "dist_ckpt", "megatron": ".", "dcp": "."}
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ExportSource:
    """A checkpoint as an export reads it.

    dcp          folder of the DTensor checkpoint
    tensors      its model parameters, by their names there
    huggingface  folder with configuration and tokenizer
    index        Hugging Face name -> {"shape", "dtype"} of every tensor to be written
    weights      folder with Hugging Face weights that were saved with the checkpoint, which it must agree with; None when there are none
    """

    root: Path
    dcp: Path
    tensors: tuple[TensorEntry, ...]
    huggingface: Path
    index: dict[str, dict]
    weights: Path | None
    step: int | None

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, with padding."""
        return next(t.shape[0] for t in self.tensors if t.name.endswith(_EMBEDDING))


def model_folder(layout: layouts.Layout) -> tuple[Path | None, str]:
    """The DTensor checkpoint with the model's parameters, or None and why there is none."""
    folder = layout.root / _MODEL_DCP.get(layout.kind, "none")
    if folder not in layout.dcp:
        return None, f"it holds no sharded weights ({_MODEL_DCP.get(layout.kind, 'dist_ckpt')} is missing)"
    if (folder / "metadata.json").is_file():
        return None, "it was saved by Megatron's own distributed checkpointing, without Megatron-FSDP; mfsdp reads DTensor checkpoints"
    return folder, ""


def find_export_source(path: str | Path, source: Path | None = None) -> ExportSource:
    """The checkpoint at `path`; `source`, a model folder, gives the names, shapes and dtypes to check against, and the
    configuration and tokenizer where the checkpoint has none. Raises MfsdpError (BAD_INPUT) when it cannot be exported."""
    problems: list[Problem] = []
    layout = layouts.find_layout(path, problems)
    step = layout.step
    if layout.kind == "mfsdp":
        step = require_complete(layout.root).step
    elif layout.kind == "verl":
        step = layouts.verl_contents(layout, problems).get("global_step", step)
    _stop_at(problems)
    folder, why_not = model_folder(layout)
    if folder is None:
        raise MfsdpError(_problem(layout.root, layouts.TITLES[layout.kind], why_not, "give another checkpoint"))
    found = read_dcp(folder)  # refuses metadata that would run code when torch reads it
    _stop_at(list(found.problems))
    tensors = tuple(t for t in found.tensors if t.name.startswith(PARAMETERS) and "_extra_state" not in t.name)
    if not any(t.name.endswith(_EMBEDDING) for t in tensors):
        raise MfsdpError(_problem(folder, f"no {PARAMETERS}…{_EMBEDDING}", "it holds no language model's parameters", "give another checkpoint"))
    huggingface = next((f for f in (layout.huggingface, source) if f and (f / "config.json").is_file()), None)
    if huggingface is None:
        raise MfsdpError(_problem(layout.root, "no config.json", "the model's configuration is not in the checkpoint",
                                  "give the folder of the model that was trained by --source"))
    weights = huggingface if huggingface == layout.huggingface and read_hf(huggingface).tensors else None
    return ExportSource(layout.root, folder, tensors, huggingface, _index(layout.root, source, weights), weights, step)


def noted_index(root: Path) -> dict[str, dict] | None:
    """As the trainer noted it, None when it has not. Raises MfsdpError (BAD_INPUT) when the file is damaged."""
    path = root / SOURCE_INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        for entry in index.values():
            sizes = [type(n) is int and n >= 0 for n in entry["shape"]]
            if entry.keys() != {"shape", "dtype"} or entry["dtype"] not in DTYPE_NAMES.values() or not all(sizes):
                raise ValueError(f"{entry} is no shape and dtype")
        return index
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise MfsdpError(_problem(path, str(error), "the list of the source model's tensors is damaged",
                                  "copy it again from where the checkpoint was made, or use another step")) from None


def _index(root: Path, source: Path | None, weights: Path | None) -> dict[str, dict]:
    """Of the folder given, else as the trainer noted it, else of the weights beside the shards, which verl writes in float32
    whatever the model's dtype is."""
    if source is None and (noted := noted_index(root)) is not None:
        return noted
    if source is None and weights is None:
        raise MfsdpError(_problem(root, "no index of the source model", "there is nothing to check the export against",
                                  "give the folder of the model that was trained by --source"))
    found = read_hf(source or weights)
    _stop_at(list(found.problems))
    if not found.tensors:
        raise MfsdpError(Problem("--source", str(source), "no safetensors in it", "give a model folder", "command line", BAD_INPUT))
    config = found.config or {}
    trained = None if source else config.get("dtype", config.get("torch_dtype"))
    return {t.name: {"shape": list(t.shape), "dtype": trained or t.dtype} for t in found.tensors}


def _stop_at(problems: list[Problem]) -> None:
    if errors := [p for p in problems if p.level == "error"]:
        raise MfsdpError(errors)


def _problem(where: Path, found: str, why: str, fix: str) -> Problem:
    return Problem(str(where), found, why, fix, code=BAD_INPUT)
