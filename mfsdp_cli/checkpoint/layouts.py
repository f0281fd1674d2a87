"""Tells whose checkpoint a folder is, by what lies in it. Reads names and small JSON files only.

    mfsdp        step_N/{manifest.json, dist_ckpt/, huggingface/, trainer.json}
    verl         <role>/{ckpt_contents.json, model/{dist_ckpt,huggingface}/, optimizer/dist_ckpt/, extra/dist_ckpt/}
    verl-old     <role>/{dist_ckpt/, huggingface/}
    megatron     iter_N/{metadata.json, .metadata, *.distcp} (torch_dist) or without metadata.json (fsdp_dtensor)
    dcp          .metadata and *.distcp, nothing else known
    huggingface  config.json and safetensors

verl roles are actor, critic, ref, below global_step_N (GRPO), or the step folder itself (SFT).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from mfsdp_cli.checkpoint import finding, manifest
from mfsdp_cli.checkpoint.dcp_metadata import METADATA
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

VERL_CONTENTS = "ckpt_contents.json"
TRACKER = "latest_checkpointed_iteration.txt"  # verl's and Megatron's
TITLES = {
    "mfsdp": "mfsdp checkpoint",
    "verl": "verl Megatron checkpoint, current layout (ckpt_contents.json)",
    "verl-old": "verl Megatron checkpoint, old layout (dist_ckpt/ and huggingface/ at the role's root)",
    "megatron": "Megatron checkpoint",
    "dcp": "bare torch.distributed.checkpoint folder",
    "huggingface": "Hugging Face folder",
}
_VERL_DCP = ("model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt")
_VERL_TYPES = {"global_step": lambda v: type(v) is int, "world_size": lambda v: type(v) is int, "arch": lambda v: isinstance(v, str),
               "save_contents": lambda v: isinstance(v, list) and all(isinstance(part, str) for part in v)}
_STEP = re.compile(r"(?:global_step|iter|step)_(\d+)(?:\.tmp|\.old)?")


@dataclass(frozen=True)
class Layout:
    """kind: a key of TITLES; root: the folder described; dcp: its DCP folders; huggingface: its HF folder, if any;
    step: from the folder names, None when they do not tell."""

    kind: str
    root: Path
    dcp: tuple[Path, ...] = ()
    huggingface: Path | None = None
    step: int | None = None


def find_layout(path: str | Path, problems: list[Problem]) -> Layout:
    """The checkpoint that `path` means: one itself, a folder inside one, or a folder of several (then the latest).

    Raises MfsdpError (BAD_INPUT) when there is none. Choices that were made are appended to `problems` as notes."""
    path = finding.existing_folder(path)
    # the owner of a part first: dist_ckpt/ alone looks like a bare DCP folder
    depth = {manifest.DIST_CKPT: 2, manifest.HUGGINGFACE: 2, "model": 1}.get(path.name, 0)
    for folder in (*reversed(path.absolute().parents[:depth]), path):
        if found := _at(folder):
            return found
    if (path / manifest.CHECKPOINTS).is_dir() or any(finding.is_step_folder(p) for p in path.iterdir() if p.is_dir()):
        return _at(finding.resolve(path, problems))
    if found := _latest_of_several(path, problems):
        return found
    raise MfsdpError(_error(path, ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "an empty folder",
                            "no checkpoint layout is recognised here", f"give one of: {'; '.join(TITLES.values())}"))


def _at(folder: Path) -> Layout | None:
    """The layout whose root is exactly this folder."""
    hf = folder / manifest.HUGGINGFACE
    if finding.is_step_folder(folder):
        dcp = (folder / manifest.DIST_CKPT,) if (folder / manifest.DIST_CKPT).is_dir() else ()
        return Layout("mfsdp", folder, dcp, hf if hf.is_dir() else None, _step_in(folder))
    if (folder / VERL_CONTENTS).is_file() or any((folder / name).is_dir() for name in _VERL_DCP):
        hf = folder / "model" / manifest.HUGGINGFACE
        dcp = tuple(folder / name for name in _VERL_DCP if (folder / name).is_dir())
        return Layout("verl", folder, dcp, hf if hf.is_dir() else None, _step_in(folder))
    if (folder / manifest.DIST_CKPT).is_dir():
        if hf.is_dir() or _step_in(folder) is not None:
            return Layout("verl-old", folder, (folder / manifest.DIST_CKPT,), hf if hf.is_dir() else None, _step_in(folder))
        return Layout("dcp", folder / manifest.DIST_CKPT, (folder / manifest.DIST_CKPT,))
    if (folder / METADATA).is_file() or (folder / "metadata.json").is_file() or any(folder.glob("*.distcp")):
        is_megatron = (folder / "metadata.json").is_file() or folder.name.startswith("iter_")
        return Layout("megatron" if is_megatron else "dcp", folder, (folder,), None, _step_in(folder))
    if (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return Layout("huggingface", folder, (), folder)
    return None


def _latest_of_several(path: Path, problems: list[Problem]) -> Layout | None:
    """verl's global_step_N with several roles, or a folder of global_step_N or iter_N with a tracker file."""
    roles = {found.root.name: found for found in layouts_in(path)}
    if roles:
        chosen = roles.get("actor") or roles[min(roles)]
        if len(roles) > 1:
            problems.append(_note(path, ", ".join(roles), f"several roles; this is {chosen.root.name}",
                                  "name the role's folder to see another"))
        return chosen
    steps = foreign_steps(path)
    if not steps:
        return None
    tracked = tracked_step(path)
    chosen = next((p for step, p in steps if step == tracked), steps[-1][1])
    told = "no tracker file" if tracked is None else tracked
    problems.append(_note(path, ", ".join(p.name for _, p in steps), f"several steps; this is {chosen.name} ({TRACKER}: {told})",
                          "name the step's folder to see another"))
    return _at(chosen) or _latest_of_several(chosen, problems)


def foreign_steps(path: Path) -> list[tuple[int, Path]]:
    """The folders of verl's or Megatron's steps in a folder, by step."""
    return sorted((int(match[1]), p) for p in path.iterdir() if p.is_dir() and (match := _STEP.fullmatch(p.name)))


def layouts_in(path: Path) -> list[Layout]:
    """The checkpoint that a step's folder is, or those of its roles, by name."""
    if found := _at(path):
        return [found]
    return [found for p in sorted(path.iterdir()) if p.is_dir() and (found := _at(p)) and found.kind in ("verl", "verl-old")]


def tracked_step(path: Path) -> int | None:
    """The step that the tracker file names, if it names one."""
    text = (path / TRACKER).read_text(errors="replace").strip() if (path / TRACKER).is_file() else ""
    return int(text) if text.isdecimal() and len(text) < 19 else None


def verl_contents(layout: Layout, problems: list[Problem]) -> dict:
    """verl's ckpt_contents.json; what it lists and the disk lacks goes to `problems`."""
    path = layout.root / VERL_CONTENTS
    if not path.is_file():
        problems.append(_error(path, "missing", f"verl writes {VERL_CONTENTS} last, so this save was interrupted", "use another step"))
        return {}
    try:
        contents = json.loads(path.read_text())
        places = {name: Path(entry["path"]) for name, entry in contents["contents"].items()}
        if wrong := [key for key, fits in _VERL_TYPES.items() if key in contents and not fits(contents[key])]:
            raise TypeError(f"{', '.join(wrong)} of another type than verl writes")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problems.append(_error(path, f"{type(error).__name__}: {error}", f"{VERL_CONTENTS} cannot be read", "use another step"))
        return {}
    for name, place in places.items():
        if not (layout.root / place).exists():
            problems.append(_error(layout.root / place, "missing", f"{VERL_CONTENTS} places {name} there", "use another step"))
    return contents


def megatron_backend(layout: Layout) -> str:
    """Format named by Megatron's metadata.json; without that file it is fsdp_dtensor, as Megatron-Bridge saves it."""
    path = layout.root / "metadata.json"
    if not path.is_file():
        return "fsdp_dtensor"
    try:
        return str(json.loads(path.read_text())["sharded_backend"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return "unknown format"


def _step_in(folder: Path) -> int | None:
    names = [match for part in folder.absolute().parts if (match := _STEP.fullmatch(part))]
    return int(names[-1][1]) if names else None


def _error(where: Path, found: str, why: str, fix: str) -> Problem:
    return Problem(str(where), found, why, fix, code=BAD_INPUT)


def _note(where: Path, found: str, why: str, fix: str) -> Problem:
    return Problem(str(where), found, why, fix, code=BAD_INPUT, level="note")
