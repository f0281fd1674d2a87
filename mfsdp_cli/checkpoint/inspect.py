"""`mfsdp ckpt inspect`: what a checkpoint holds, whether it is whole, and what can be done with it. Only reads; no torch."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

from mfsdp_cli.checkpoint import finding, layouts, manifest
from mfsdp_cli.checkpoint.dcp_metadata import TensorEntry, read_dcp
from mfsdp_cli.checkpoint.export_source import model_folder
from mfsdp_cli.checkpoint.hf_folder import HfContents, read_hf
from mfsdp_cli.checkpoint.words import columns, shape_words, size_words
from mfsdp_cli.errors import BAD_INPUT, OK, MfsdpError, Problem
from mfsdp_cli.output import printable

GROUPS = ("model parameters", "optimizer moments", "optimizer, other", "other")
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_OTHER = {"extra", "rng_state", "rng", "lr_scheduler", "opt_param_scheduler", "rerun_state_machine", "_extra_state"}
# Megatron-FSDP stores the gate (_w) and up (_v) halves of a gated linear_fc1 as two tensors, moments likewise
_HALF = re.compile(r"(linear_fc1\.(?:weight|bias)\d*)_[wv](?=\.|$)")


def inspect(path: str | Path, *, tensors: str | None = None, verify: bool = False) -> dict:
    """Report on the checkpoint at `path`, ready for JSON; every key is always there.

    Faults of the checkpoint are in report["problems"] (Problem dicts) and report["exit_code"] (0, or that of the
    gravest). tensors: also list the stored tensors whose names match (`matches`). verify: read all bytes and compare checksums.
    Raises MfsdpError (BAD_INPUT) when `path` leads to no checkpoint."""
    problems: list[Problem] = []
    layout = layouts.find_layout(path, problems)
    report = {
        "path": str(layout.root), "layout": layout.kind, "title": layouts.TITLES[layout.kind], "step": layout.step, "total_steps": None,
        "samples_consumed": None, "contents": [], "topology": {}, "dtype": None, "architecture": None, "source_model": None,
        "padded_vocab_size": None, "versions": {}, "created": None, "metrics": {}, "verified": False,
    }
    _describe(layout, report, problems)
    stored, objects = _read_tensors(layout, problems)
    hf = _read_huggingface(layout, problems)
    if layout.kind == "huggingface":
        stored = hf.tensors if hf else ()
    if verify:
        _verify(layout, report, problems)
    listed = None if tensors is None else [entry for entry in stored if matches(entry.name, tensors)]
    if listed == [] and stored:
        why = f"none of the {len(stored)} names matches"
        fix = "a part of a name, or a pattern as '*.exp_avg'"
        problems.append(Problem("--tensors", tensors, why, fix, "command line", BAD_INPUT, "warning"))
    problems = _one_per_place(problems)
    errors = [p for p in problems if p.level == "error"]
    return report | {
        "complete": not errors,
        "exit_code": MfsdpError(errors).exit_code if errors else OK,
        "groups": _totals(stored, _group, GROUPS),
        "dtypes": _totals(stored, lambda entry: entry.dtype, sorted({entry.dtype for entry in stored})),
        "num_tensors": len(stored), "num_logical_tensors": len({_logical(entry.name) for entry in stored}), "num_objects": objects,
        "files": _files(layout.root),
        "huggingface": _huggingface_report(hf),
        "export": _export_verdict(layout, report, hf, bool(errors)),
        "steps": _steps(layout) if layout.kind == "mfsdp" else [],
        "problems": [p.to_dict() for p in problems],
        "tensors": None if listed is None else [_tensor_report(entry) for entry in listed],
    }


def matches(name: str, pattern: str) -> bool:
    """Whether a name fits: a part of it, or with *, ? or [ a pattern for the whole.

    >>> [matches("model.norm.weight", p) for p in ("norm", "norm*", "*.weight", "")]
    [True, False, True, True]
    """
    return fnmatch.fnmatchcase(name, pattern) if set(pattern) & set("*?[") else pattern in name


def _describe(layout: layouts.Layout, report: dict, problems: list[Problem]) -> None:
    """Fill in what the layout's own record says."""
    if layout.kind == "mfsdp":
        found, faults = manifest.examine(layout.root)
        problems += faults
        for key in ("step", "total_steps", "samples_consumed", "contents", "topology", "dtype", "architecture", "source_model",
                    "padded_vocab_size", "versions", "created", "metrics"):
            report[key] = getattr(found, key) if found else report[key]
    elif layout.kind == "verl":
        found = layouts.verl_contents(layout, problems)
        report["step"] = found.get("global_step", layout.step)
        report["contents"] = found.get("save_contents", [])
        report["architecture"] = found.get("arch")
        report["topology"] = {"world": found["world_size"]} if "world_size" in found else {}
    elif layout.kind == "megatron":
        report["title"] += f" ({layouts.megatron_backend(layout)})"


def _read_tensors(layout: layouts.Layout, problems: list[Problem]) -> tuple[tuple[TensorEntry, ...], int]:
    stored, objects = [], 0
    for folder in layout.dcp:
        try:
            found = read_dcp(folder)
        except MfsdpError as error:
            problems += error.problems
            continue
        stored += found.tensors
        objects += len(found.objects)
        problems += found.problems
    return tuple(stored), objects


def _read_huggingface(layout: layouts.Layout, problems: list[Problem]) -> HfContents | None:
    if layout.huggingface is None:
        return None
    try:
        found = read_hf(layout.huggingface)
    except MfsdpError as error:
        problems += error.problems
        return None
    problems += found.problems
    if layout.kind == "huggingface" and found.config is None:
        problems.append(Problem(str(layout.root / "config.json"), "missing", "a model folder needs it", "copy it from the source model",
                                code=BAD_INPUT))
    return found


def _verify(layout: layouts.Layout, report: dict, problems: list[Problem]) -> None:
    if layout.kind == "mfsdp":
        faults = manifest.verify(layout.root)
        problems += faults
        report["verified"] = not faults
    else:
        problems.append(Problem(str(layout.root), "", "this layout records no checksums: names and sizes were checked, not bytes", "",
                                code=BAD_INPUT, level="note"))


def _one_per_place(problems: list[Problem]) -> list[Problem]:
    """Manifest, DCP metadata and checksums may each notice the same file: the first word is enough."""
    first: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.key, problem.level), problem)
    return list(first.values())


# ---------------------------------------------------------------- sums

def _group(entry: TensorEntry) -> str:
    parts = entry.name.split(".")
    if parts[0].startswith("optim") or parts[0].startswith("chained_"):
        return GROUPS[1] if _MOMENTS & set(parts) else GROUPS[2]
    return GROUPS[3] if parts[0] in _OTHER or "_extra_state" in parts[-1] else GROUPS[0]


def _logical(name: str) -> str:
    return _HALF.sub(r"\1", name)


def _totals(stored: tuple[TensorEntry, ...], key, names) -> list[dict]:
    """One row for each of `names` that has tensors; "bytes" is elements times element size."""
    rows = []
    for name in names:
        members = [entry for entry in stored if key(entry) == name]
        if members:
            rows.append({"name": name, "num_tensors": len(members), "num_logical_tensors": len({_logical(e.name) for e in members}),
                         "num_elements": sum(e.num_elements for e in members), "bytes": sum(e.num_bytes for e in members)})
    return rows


def _files(root: Path) -> dict:
    sizes = [p.stat().st_size for p in root.rglob("*") if p.is_file()]
    return {"count": len(sizes), "bytes": sum(sizes)}


def _tensor_report(entry: TensorEntry) -> dict:
    return {"name": entry.name, "shape": list(entry.shape), "dtype": entry.dtype, "bytes": entry.num_bytes, "num_chunks": entry.num_chunks,
            "files": list(entry.files), "group": _group(entry)}


def _huggingface_report(hf: HfContents | None) -> dict:
    return {
        "path": str(hf.folder) if hf else None, "config": bool(hf and hf.config), "tokenizer": bool(hf and hf.has_tokenizer),
        "num_weights": len(hf.tensors) if hf else 0, "weight_bytes": sum(entry.num_bytes for entry in hf.tensors) if hf else 0,
    }


def _export_verdict(layout: layouts.Layout, report: dict, hf: HfContents | None, broken: bool) -> dict:
    """Whether `mfsdp ckpt export-hf` can make a Hugging Face folder of it, and why or why not."""
    folder, why_not = model_folder(layout)
    has_weights = hf is not None and bool(hf.tensors) and hf.config is not None and not hf.problems
    if has_weights and folder is None:
        return {"possible": False, "why": f"not needed: {hf.folder} is a Hugging Face folder with weights"}
    if broken:
        return {"possible": False, "why": "the checkpoint is not whole"}
    if layout.kind == "mfsdp" and "model" not in report["contents"]:
        return {"possible": False, "why": f"it holds no model, only {', '.join(report['contents']) or 'nothing'}"}
    if folder is None:
        return {"possible": False, "why": why_not}
    source = "" if layout.kind == "mfsdp" or has_weights else " --source MODEL"
    return {"possible": True, "why": f"mfsdp ckpt export-hf {layout.root} -o DIR{source}"}


def _steps(layout: layouts.Layout) -> list[dict]:
    """The other checkpoints of the same run."""
    siblings = layout.root.absolute().parent
    latest = finding.latest_complete(siblings)
    complete = sorted(finding.complete_steps(siblings).items())
    return [{"step": step, "path": str(folder), "latest": folder == latest} for step, folder in complete]


# ---------------------------------------------------------------- text

def render(report: dict) -> str:
    """The report for people, as plain aligned text. The problems are left to whoever prints it, with their exit code."""
    step = f"{report['step']}" + (f" of {report['total_steps']}" if report["total_steps"] else "") if report["step"] is not None else ""
    num_errors = sum(p["level"] == "error" for p in report["problems"])
    state = f"NOT USABLE, problems: {num_errors}" if num_errors else "complete, checksums verified" if report["verified"] else "complete"
    hf = report["huggingface"]
    weights = f"{hf['num_weights']} weights, {size_words(hf['weight_bytes'])}" if hf["num_weights"] else "no weights"
    has = [name for name in ("config", "tokenizer") if hf[name]]
    model = ", ".join(filter(None, [report["architecture"], report["dtype"], report["source_model"] and f"from {report['source_model']}"]))
    facts = {
        "layout": report["title"], "step": step, "state": state,
        "files": f"{report['files']['count']} files, {size_words(report['files']['bytes'])}",
        "created": report["created"], "model": model, "contents": ", ".join(report["contents"]),
        "topology": " ".join(f"{name} {ranks}" for name, ranks in report["topology"].items()),
        "samples": f"{report['samples_consumed']:,} consumed" if report["samples_consumed"] is not None else "",
        "vocabulary": f"padded to {report['padded_vocab_size']:,} rows" if report["padded_vocab_size"] else "",
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "huggingface": ", ".join([*has, weights]) if hf["path"] else "none",
        "export": ("yes: " if report["export"]["possible"] else "no: ") + report["export"]["why"],
        "validation": ", ".join(f"{name} {'not finite' if value is None else f'{value:.4g}'}" for name, value in report["metrics"].items()),
        "steps": ", ".join(f"{s['step']}{' (latest)' if s['latest'] else ''}" for s in report["steps"]),
    }
    lines = [report["path"], *(f"  {name:<12} {value}" for name, value in facts.items() if value)]
    for title, rows in (("group", report["groups"]), ("dtype", report["dtypes"])):
        if rows:
            cells = [(r["name"], *(f"{r[key]:,}" for key in ("num_tensors", "num_logical_tensors", "num_elements")), size_words(r["bytes"]))
                     for r in rows]
            lines += ["", *_table((title, "stored", "tensors", "elements", "size"), cells)]
    if report["num_objects"]:
        lines += ["", f"  and {report['num_objects']:,} values that are no tensors"]
    if report["tensors"] is not None:
        cells = [(t["name"], shape_words(t["shape"]), t["dtype"], str(t["num_chunks"]), str(len(t["files"])), size_words(t["bytes"]))
                 for t in report["tensors"]]
        lines += ["", *_table(("tensor", "shape", "dtype", "chunks", "files", "size"), cells)]
    return printable("\n".join(lines))


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in columns([header, *rows], numbers=len(header) - 1)]
