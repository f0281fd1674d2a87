"""`mfsdp ckpt list`: the checkpoints of a run, from what is on disk alone. Only reads; no torch."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from mfsdp_cli.checkpoint import finding, layouts
from mfsdp_cli.checkpoint.manifest import CHECKPOINTS, OLD, TMP, examine
from mfsdp_cli.checkpoint.retention import BETTER, ranked
from mfsdp_cli.checkpoint.words import age_words, columns, size_words
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem
from mfsdp_cli.output import printable

COMPLETE, INCOMPLETE, REMAINS = "complete", "incomplete", "remains"
REMAINS_WHY = {TMP: "a save or a deletion that was interrupted, or is still going on", OLD: "replaced by the folder of the same step"}
SHOWN_RANKS = ("tp", "pp", "dp", "ep")
HEADER = ("checkpoint", "state", "size", "age", "contents", "topology")


def listing(path: str | Path, metric: str | None = None) -> dict:
    """Every step folder at `path`, a run folder, a folder of checkpoints, or one of verl's or Megatron's: ready for JSON.

    metric  the one to find the best by; None: the run's own (trainer.best_metric)
    Raises MfsdpError (BAD_INPUT) when there is no step folder. What is incomplete is told in its row, and is no error."""
    path = finding.existing_folder(path)
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    ours = finding.step_folders(root)
    if ours:
        rows, latest = [_row(*found) for found in ours], finding.latest_complete(root)
    else:
        rows, latest = _foreign_rows(root)
    if not rows:
        raise MfsdpError(Problem(str(path), "", "there are no step folders here",
                                 "give a run folder, or a folder with step_N or global_step_N", code=BAD_INPUT))
    metric = metric or next((row["best_metric"] for row in reversed(rows) if row["best_metric"]), None)
    complete = {row["step"]: row for row in rows if row["state"] == COMPLETE}
    order = ranked({step: row["metrics"] for step, row in complete.items()}, metric) if metric in BETTER else []
    for row in rows:
        row["latest"] = latest is not None and row["path"] == str(latest)
        row["best"] = bool(order) and row is complete[order[0]]
    return {"path": str(root), "latest": str(latest) if latest else None, "best": complete[order[0]]["path"] if order else None,
            "best_metric": metric, "checkpoints": rows}


def one(data: dict, which: str) -> str:
    """The path of the checkpoint marked `which`, latest or best. Raises MfsdpError when there is none."""
    if data[which] is None:
        lacks = "none is complete" if which == "latest" else f"no complete checkpoint has a value of {data['best_metric'] or 'a metric'}"
        raise MfsdpError(Problem(data["path"], f"{len(data['checkpoints'])} step folders", lacks, "mfsdp ckpt list tells what each one has",
                                 code=BAD_INPUT))
    return data[which]


def _row(folder: Path, step: int, suffix: str) -> dict:
    manifest, problems = examine(folder)
    stands_in = suffix == OLD and not (folder.with_suffix("")).exists()
    state = COMPLETE if not problems and (not suffix or stands_in) else REMAINS if suffix else INCOMPLETE
    why = REMAINS_WHY[suffix] if state == REMAINS else _why(problems)
    return _facts(folder, step, state, why) | ({
        "created": manifest.created, "contents": manifest.contents, "topology": manifest.topology, "metrics": manifest.metrics,
        "best_metric": manifest.best_metric} if manifest else {})


def _facts(folder: Path, step: int | None, state: str, why: str) -> dict:
    """What a folder tells about itself; what only a record tells is empty."""
    files = [p.stat() for p in folder.rglob("*") if p.is_file()]
    changed = max([file.st_mtime for file in files] or [folder.stat().st_mtime])
    created = datetime.fromtimestamp(changed, timezone.utc).isoformat(timespec="seconds")
    return {"name": folder.name, "path": str(folder), "step": step, "state": state, "why": why,
            "bytes": sum(file.st_size for file in files), "created": created, "contents": [], "topology": {}, "metrics": {}, "best_metric": ""}


def _why(problems: list[Problem]) -> str:
    if not problems:
        return ""
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{Path(first.key).name} {first.found}: {first.why}{more}"


def _foreign_rows(root: Path) -> tuple[list[dict], Path | None]:
    """One row for each role of each step that verl or Megatron wrote, and the folder that the tracker names, if it is complete."""
    rows, latest = [], None
    tracked = layouts.tracked_step(root)
    for step, folder in layouts.foreign_steps(root):
        for layout in layouts.layouts_in(folder):
            problems: list[Problem] = []
            contents = layouts.verl_contents(layout, problems) if layout.kind == "verl" else {}
            problems += [Problem(str(dcp / layouts.METADATA), "missing", "the save did not finish", "", code=BAD_INPUT)
                         for dcp in layout.dcp if not (dcp / layouts.METADATA).is_file()]
            row = _facts(layout.root, step, INCOMPLETE if problems else COMPLETE, _why(problems))
            row |= {"name": layout.root.relative_to(root).as_posix(), "contents": contents.get("save_contents", []),
                    "topology": {"world": contents["world_size"]} if "world_size" in contents else {}}
            rows.append(row)
            if step == tracked and not problems and latest is None:
                latest = layout.root
    return rows, latest


# ---------------------------------------------------------------- text

def render(data: dict, now: datetime | None = None) -> str:
    """A line for each checkpoint, in columns."""
    now, metric = now or datetime.now(timezone.utc), data["best_metric"]
    lines = [(*HEADER, metric or "", "")] if metric else [(*HEADER, "")]
    for row in data["checkpoints"]:
        marks = ", ".join([mark for mark in ("latest", "best") if row[mark]] + ([row["why"]] if row["why"] else []))
        value = [_number(row["metrics"], metric)] if metric else []
        ranks = [f"{name}{row['topology'][name]}" for name in SHOWN_RANKS if name in row["topology"]]
        ranks = ranks or [f"{name} {size}" for name, size in row["topology"].items()]
        contents = "+".join(map(str, row["contents"])) or "-"
        lines.append((row["name"], row["state"], size_words(row["bytes"]), age_words(row["created"], now), contents, " ".join(ranks) or "-",
                      *value, marks))
    return printable("\n".join(columns(lines)))


def _number(metrics: dict, metric: str) -> str:
    if metric not in metrics:
        return "-"
    return "not finite" if metrics[metric] is None else f"{metrics[metric]:.4g}"
