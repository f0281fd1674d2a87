"""`mfsdp samples`: responses that a GRPO run kept in RUN/samples, without torch."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem
from mfsdp_cli.output import printable, use_color

COLUMNS = {  # with pyarrow's names of their types; only `parsed` may be null
    "step": "int64", "row": "int64", "group": "int64", "index": "int64", "prompt": "string", "response": "string", "reward": "double",
    "status": "string", "parsed": "string", "ground_truth": "string", "advantage": "double", "num_tokens": "int64", "is_truncated": "bool",
}
SHOWN = {"best": "best", "worst": "worst", "unparseable": "no readable answer"}
LONGEST_SHOWN = 600  # characters of a prompt or response
GAP = " […] "


def read_samples(run: str, step: int | None, validation: bool = False) -> tuple[Path, list[dict]]:
    """(file, its rows by column) of a step; without one, of the last. Raises MfsdpError when there is none, or it cannot be read."""
    folder = Path(run) / "samples"
    prefix = "val_step_" if validation else "step_"
    found = {int(match[1]): path for path in folder.glob(f"{prefix}*.parquet") if (match := re.fullmatch(rf"{prefix}(\d+)", path.stem))}
    if not found:
        why = "there is no such folder" if not Path(run).is_dir() else f"no responses are kept in it ({folder}/{prefix}*.parquet)"
        fix = "name the run folder of mfsdp grpo; trainer.samples_per_step is what a step keeps"
        raise MfsdpError(Problem("RUN", run, why, fix, "command line", BAD_INPUT))
    if step is not None and step not in found:
        steps = sorted(found)
        some = ", ".join(map(str, steps if len(steps) <= 20 else [*steps[:10], "…", *steps[-10:]]))
        why = f"nothing is kept of this step in {folder}"
        raise MfsdpError(Problem("--step", str(step), why, f"steps: {some}", "command line", BAD_INPUT))
    path = found[max(found) if step is None else step]
    return path, _rows(path)


def _rows(path: Path) -> list[dict]:
    import pyarrow
    import pyarrow.parquet

    fix = "only files that mfsdp grpo wrote can be shown"
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, ValueError, OSError) as e:
        why = f"not readable as parquet: {str(e).splitlines()[0]}"
        raise MfsdpError(Problem(str(path), "", why, "name another --step", code=BAD_INPUT)) from e
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise MfsdpError(Problem(str(path), "", f"columns are missing: {', '.join(missing)}", fix, code=BAD_INPUT))
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    try:
        table = table.select(list(COLUMNS)).cast(schema)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, ValueError) as e:
        why = f"a column has another type than is written: {str(e).splitlines()[0]}"
        raise MfsdpError(Problem(str(path), "", why, fix, code=BAD_INPUT)) from e
    if empty := [name for name in COLUMNS if name != "parsed" and table[name].null_count]:
        raise MfsdpError(Problem(str(path), "", f"columns have nulls: {', '.join(empty)}", fix, code=BAD_INPUT))
    return rows


def choose(rows: list[dict], best: int, worst: int, unparseable: int) -> dict[str, list[dict]]:
    """Rows by what they show. Ties go by place in the file; a row among the best is not among the worst as well."""
    order = sorted(range(len(rows)), key=lambda i: -rows[i]["reward"])
    lowest = [i for i in sorted(range(len(rows)), key=lambda i: rows[i]["reward"]) if i not in order[:best]]
    odd = [row for row in rows if row["status"] == "unparseable"]
    return {"best": [rows[i] for i in order[:best]], "worst": [rows[i] for i in lowest[:worst]], "unparseable": odd[:unparseable]}


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters: beginning and end stay, where the question and the answer are.

    >>> shorten("0123456789abcdef", 11)
    '012 […] def'
    """
    if len(text) <= limit:
        return text
    rest = limit - len(GAP)
    return text[:rest - rest // 2] + GAP + text[len(text) - rest // 2:]


def render(path: Path, rows: list[dict], chosen: dict[str, list[dict]], no_color: bool = False) -> str:
    """A table on a terminal, plain blocks elsewhere."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    mean = f", mean reward {sum(row['reward'] for row in rows) / len(rows):.3f}" if rows else ""
    head = f"{path}: {len(rows)} responses{mean}; " + ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    if sys.stdout.isatty():
        return head + "\n" + _table(chosen, use_color(sys.stdout, no_color))
    return "\n\n".join([head, *(_block(title, row) for name, title in SHOWN.items() for row in chosen[name])])


def _facts(row: dict) -> str:
    cut = ", truncated" if row["is_truncated"] else ""
    return (f"row {row['row']} response {row['index']} of group {row['group']}: reward {row['reward']:.3f} "
            f"advantage {row['advantage']:.3f} {row['status']}, read {row['parsed']!r} of {row['ground_truth']!r}, {row['num_tokens']} tokens{cut}")


def _block(title: str, row: dict) -> str:
    texts = [f"  {name}: " + shorten(printable(row[name]), LONGEST_SHOWN).replace("\n", "\n    ") for name in ("prompt", "response")]
    return "\n".join([f"{title}: {_facts(row)}", *texts])


def _table(chosen: dict[str, list[dict]], color: bool) -> str:
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "row", "reward", "adv", "status", "read", "gold", "prompt", "response", show_lines=True)
    for name, title in SHOWN.items():
        for row in chosen[name]:
            cells = (title, f"{row['row']}.{row['index']}", f"{row['reward']:.2f}", f"{row['advantage']:.2f}", row["status"],
                     str(row["parsed"]), row["ground_truth"], shorten(row["prompt"], LONGEST_SHOWN // 3), shorten(row["response"], LONGEST_SHOWN))
            table.add_row(*(Text(printable(cell).replace("\n", "↵ ")) for cell in cells))
    screen = Console(file=StringIO(), width=shutil.get_terminal_size().columns, force_terminal=color, no_color=not color)
    screen.print(table)
    return screen.file.getvalue().rstrip("\n")
