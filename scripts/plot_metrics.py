#!/usr/bin/env python
"""Draw curves of one or several runs from their metrics.jsonl, as SVG or PNG by the name of --out.

    python scripts/plot_metrics.py runs/a --out loss.svg
    python scripts/plot_metrics.py runs/a runs/b --keys loss --title "two learning rates" --out compare.png

Needs matplotlib, which mfsdp does not depend on. A dotted line marks a step at which a run was resumed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works too

from mfsdp_cli.errors import MACHINE_UNFIT, USAGE, MfsdpError  # noqa: E402
from mfsdp_cli.output import format_problems  # noqa: E402
from mfsdp_cli.train.metrics import read_metrics  # noqa: E402


def series(records: list[dict], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, where it was recorded; a value that was not finite is left out."""
    found = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
    return [step for step, _ in found], [value for _, value in found]


def resumed_at(records: list[dict]) -> list[int]:
    """Steps after which another attempt went on."""
    trained = [r for r in records if "loss" in r]
    return [a["step"] for a, b in zip(trained, trained[1:]) if a.get("attempt") != b.get("attempt")]


def draw(runs: dict[str, list[dict]], keys: list[str], title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "mfsdp"  # the same picture gives the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), layout="constrained")
    for name, records in runs.items():
        for key in keys:
            steps, values = series(records, key)
            label = key if len(runs) == 1 else f"{Path(name).name}: {key}"
            axes.plot(steps, values, label=label, linewidth=1.2, marker="o" if key.startswith("val_") else None, markersize=3.5)
        for step in resumed_at(records):
            axes.axvline(step, color="gray", linewidth=0.8, linestyle=":")
    axes.set_xlabel("optimizer step")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder or metrics.jsonl")
    parser.add_argument("--keys", nargs="+", default=["loss", "val_loss"], help="metrics to draw; default: loss val_loss")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", "-o", type=Path, required=True, help="file to write: .svg or .png")
    args = parser.parse_args()
    if args.out.suffix not in (".svg", ".png"):
        print(f"error: --out {args.out}: write a name that ends in .svg or .png", file=sys.stderr)
        return USAGE
    try:
        runs = {name: read_metrics(name) for name in args.runs}
        if absent := [key for key in args.keys if not any(series(records, key)[0] for records in runs.values())]:
            known = sorted({key for records in runs.values() for record in records for key in record if series([record], key)[0]})
            print(f"error: --keys {' '.join(absent)}: no run has recorded it\nfix: one of {', '.join(known)}", file=sys.stderr)
            return USAGE
        draw(runs, args.keys, args.title, args.out)
    except MfsdpError as error:
        print(format_problems(error.problems), file=sys.stderr)
        return error.exit_code
    except FileNotFoundError as error:
        print(f"error: {error.filename}: no such file; give a run folder that holds metrics.jsonl", file=sys.stderr)
        return USAGE
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("error: matplotlib is not installed; mfsdp does not need it, so it is not among the pins\n"
              "fix: pip install matplotlib, into this environment or another that has Python 3.12", file=sys.stderr)
        return MACHINE_UNFIT
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
