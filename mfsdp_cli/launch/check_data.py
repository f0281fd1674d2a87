"""`--check-data`: every row through the tokenizer, in a child process, since that needs transformers."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.config.load import dump_yaml
from mfsdp_cli.config.values import kind_of
from mfsdp_cli.errors import BAD_INPUT, OK, RUN_FAILED, MfsdpError, Problem
from mfsdp_cli.launch.export import run_child

if TYPE_CHECKING:
    from mfsdp_cli.launch.start import Checked

MODULE = "mfsdp_cli.train.check_data"


def check_data(checked: Checked, module: str = MODULE) -> tuple[Checked, dict | None]:
    """The run with what its rows are like among its problems, and the report: {"splits": …}. Nothing is read, and the report is
    None, when something is wrong with the model or the files; other errors, such as too few GPUs, do not matter here.

    Raises MfsdpError when the child process fails; its own messages are on stderr.
    """
    settings, facts = checked.settings, checked.facts
    files = settings.data.train_files + settings.data.val_files
    if not settings.model.path or not files or any(p.level == "error" and p.code == BAD_INPUT for p in checked.problems):
        why = "the rows were not read: what is wrong with the model or the files comes first"
        note = Problem("--check-data", "", why, "correct it, and call it again", "command line", level="note")
        return replace(checked, problems=[*checked.problems, note]), None
    with tempfile.TemporaryDirectory(prefix="mfsdp-check-data-") as folder:
        config, report = Path(folder) / "config.yaml", Path(folder) / "report.json"
        config.write_text(dump_yaml(settings), encoding="utf-8")
        model = facts.model_path or settings.model.path
        command = [sys.executable, "-m", module, kind_of(settings), "--config", str(config), "--model-dir", model, "--report", str(report)]
        code = run_child(command, "the check of the data")
        if code != OK or not report.is_file():
            why = f"the process that reads the rows ended with exit code {code}"
            raise MfsdpError(Problem("--check-data", "", why, "see its messages above", "command line", code or RUN_FAILED))
        found = json.loads(report.read_text(encoding="utf-8"))
    problems = [Problem(**p) for p in found["problems"]]
    problems = [replace(p, where=p.where or checked.origins.get(p.key, "")) for p in problems]
    return replace(checked, problems=list(dict.fromkeys([*checked.problems, *problems]))), {"splits": found["splits"]}


def data_lines(report: dict | None) -> list[str]:
    """The report as a table."""
    if report is None:
        return []
    names = ("data", "rows", "usable", "tokens", "min", "median", "p99", "max", "limit", "above")
    lines = ["".join(f"{name:<12}" if name == "data" else f"{name:>10}" for name in names)]
    for split in report["splits"]:
        tokens = split["tokens"] or dict.fromkeys(("total", "min", "median", "p99", "max"), 0)
        cells = (split["rows"], split["usable"], *tokens.values(), split["limit"], split["above"])
        fate = f"  {100 * split['above_share']:.1f} % {split['fate']}" if split["above"] else ""
        lines.append(f"{split['name']:<12}" + "".join(f"{cell:>10}" for cell in cells) + fate)
    return lines
