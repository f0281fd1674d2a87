"""The program behind `mfsdp ckpt diff --values`: compares tensors of two checkpoints, one at a time, in float64. Imports torch alone.

    python -m mfsdp_cli.checkpoint.diff_values A B --pairs FILE --report FILE

Pairs are `diff`'s: name -> names in A and in B. Of each tensor the report has the elements that are equal (a NaN equals a NaN) and
the largest difference; NaN when there is a number on one side and a NaN on the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from mfsdp_cli.checkpoint import layouts
from mfsdp_cli.checkpoint.dcp_metadata import TensorEntry, read_dcp
from mfsdp_cli.checkpoint.export_progress import Progress
from mfsdp_cli.checkpoint.hf_folder import read_hf
from mfsdp_cli.errors import BAD_INPUT, INTERRUPTED, OK, MfsdpError, Problem
from mfsdp_cli.output import format_problems

PIECE = 1 << 22  # elements compared at a time
LONGEST_CAUSE = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    args = parser.parse_args()
    progress = Progress(os.fdopen(os.dup(2), "w"), args.quiet, args.no_color)
    code = OK
    try:
        report = {"values": compare(args.a, args.b, json.loads(args.pairs.read_text()), progress)}
    except MfsdpError as error:
        progress.stop()
        print(format_problems(error.problems), file=progress.stream)
        report, code = {"problems": [p.to_dict() for p in error.problems]}, error.exit_code
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        progress.stop()
    args.report.write_text(json.dumps(report))
    sys.exit(code)


def compare(a: Path, b: Path, pairs: dict[str, list[str]], progress: Progress) -> list[dict]:
    """One row for each pair, in their order. Raises MfsdpError (BAD_INPUT) for a file that cannot be read."""
    left, right = Tensors(a), Tensors(b)
    num_bytes, done_bytes = sum(left.entries[names[0]].num_bytes for names in pairs.values()), 0
    rows = []
    for number, (name, names) in enumerate(pairs.items(), start=1):
        rows.append({"name": name} | difference(left.read(names[0]), right.read(names[1])))
        done_bytes += left.entries[names[0]].num_bytes
        progress.advance(number, len(pairs), done_bytes, num_bytes)
    return rows


def difference(a, b) -> dict:
    """Of two tensors of one shape."""
    num_equal, largest = 0, 0.0
    for x, y in zip(a.reshape(-1).split(PIECE), b.reshape(-1).split(PIECE)):
        x, y = (part if part.is_complex() else part.double() for part in (x, y))
        same = (x == y) | ((x != x) & (y != y))
        num_equal += int(same.sum())
        if not bool(same.all()):
            apart = (x - y).abs()[~same].max().item()  # NaN if any is
            largest = apart if apart != apart or apart > largest else largest
    return {"num_elements": a.numel(), "num_equal": num_equal, "max_abs_difference": largest}


class Tensors:
    """Tensors of the checkpoint at a path, by name. entries: name -> TensorEntry."""

    def __init__(self, path: Path):
        from mfsdp_cli.checkpoint.storage import OnceReader

        layout = layouts.find_layout(path, [])
        self.entries: dict[str, TensorEntry] = {}
        self._places: dict[str, object] = {}
        for folder in layout.dcp:
            found = read_dcp(folder)  # refuses metadata that would run code when torch reads it
            reader = OnceReader(folder)
            self.entries |= {t.name: t for t in found.tensors}
            self._places |= dict.fromkeys((t.name for t in found.tensors), reader)
        if not layout.dcp:
            found = read_hf(layout.root)
            self.entries = {t.name: t for t in found.tensors}
            self._places = {t.name: layout.root / t.files[0] for t in found.tensors}

    def read(self, name: str):
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        entry, place = self.entries[name], self._places[name]
        try:
            if isinstance(place, Path):
                from safetensors import safe_open

                with safe_open(place, "pt") as file:
                    return file.get_tensor(name)
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            dcp.load({name: tensor}, storage_reader=place, no_dist=True)
            return tensor
        except (Exception, CheckpointException) as error:  # torch and safetensors raise nearly any type for a damaged file
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            found = f"{type(cause).__name__}: {cause}".splitlines()[0][:LONGEST_CAUSE]
            raise MfsdpError(Problem(f"{getattr(place, 'path', place)}: {name}", found, "its values cannot be read",
                                     "mfsdp ckpt inspect --verify tells which file is damaged", code=BAD_INPUT)) from error


if __name__ == "__main__":
    main()
