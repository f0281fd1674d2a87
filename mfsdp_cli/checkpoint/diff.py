"""`mfsdp ckpt diff`: how two checkpoints differ, by their records and metadata. Only reads; no torch, and so no values of tensors:
`diff_values` compares those."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mfsdp_cli.checkpoint.inspect import inspect
from mfsdp_cli.checkpoint.words import columns, shape_words
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem
from mfsdp_cli.output import printable

FACTS = ("layout", "step", "total_steps", "samples_consumed", "contents", "topology", "dtype", "architecture", "source_model",
         "padded_vocab_size", "versions", "metrics")
MOST_SHOWN = 20
SIDES = ("a", "b")


def diff(a: str | Path, b: str | Path, pattern: str = "") -> dict:
    """What differs between the checkpoints at two paths, of any layout, ready for JSON. Tensors go by name, those that match the
    pattern (`inspect.matches`); between layouts the `module.` that wrappers leave in names does not count.

    equal     whether names, shapes and dtypes of the tensors are the same; the facts do not count
    pairs     name -> the tensor's names in A and in B, of those that both have in one shape
    Raises MfsdpError (BAD_INPUT) when a checkpoint is not whole, and when there is no tensor to compare."""
    reports = [inspect(path, tensors=pattern) for path in (a, b)]
    problems = [Problem(**p) for report in reports for p in report["problems"]]
    if errors := [p for p in problems if p.level == "error"]:
        raise MfsdpError(errors, hint="mfsdp ckpt inspect tells more")
    if not any(report["tensors"] for report in reports):
        nothing = Problem(f"{a}, {b}", "no tensors", "there is nothing to compare", "give checkpoints with tensors", code=BAD_INPUT)
        raise MfsdpError(next((replace(p, level="error") for p in problems if p.key == "--tensors"), nothing))
    by_layout = reports[0]["layout"] != reports[1]["layout"]
    left, right = ({_key(t["name"], by_layout): t for t in report["tensors"]} for report in reports)
    both = sorted(left.keys() & right.keys())
    found = {
        "only_a": sorted(left.keys() - right.keys()), "only_b": sorted(right.keys() - left.keys()),
        **{f"{what}s": differences(*({name: side[name][what] for name in both} for side in (left, right))) for what in ("shape", "dtype")},
    }
    return {
        "a": reports[0]["path"], "b": reports[1]["path"], "facts": _facts(*reports), **found, "equal": not any(found.values()),
        "num_tensors": {"a": len(left), "b": len(right), "both": len(both)},
        "pairs": {name: [left[name]["name"], right[name]["name"]] for name in both if left[name]["shape"] == right[name]["shape"]},
        "problems": [p.to_dict() for p in problems],
    }


def _key(name: str, by_layout: bool) -> str:
    return ".".join(part for part in name.split(".") if part != "module") if by_layout else name


def _facts(a: dict, b: dict) -> list[dict]:
    """Rows of what the records say differently; dictionaries are told by their entries."""
    left, right = (_flat({name: report[name] for name in FACTS}) for report in (a, b))
    return differences(left, right)


def _flat(facts: dict) -> dict:
    flat = {}
    for name, value in facts.items():
        flat |= {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def differences(left: dict, right: dict) -> list[dict]:
    """{"name", "a", "b"} of what differs; None is what one lacks."""
    return [{"name": name, "a": left.get(name), "b": right.get(name)} for name in {**left, **right} if left.get(name) != right.get(name)]


# ---------------------------------------------------------------- text

def render(data: dict) -> str:
    """For people: first what the records say, then the tensors, the verdict last. "values" may be there too."""
    lines = [f"A  {data['a']}", f"B  {data['b']}"]
    if data["facts"]:
        rows = [(row["name"], *(_word(row[side]) for side in SIDES)) for row in data["facts"]]
        lines += ["", *(f"  {line}" for line in columns([("differs", "A", "B"), *rows]))]
    count = data["num_tensors"]
    lines += ["", f"tensors: {count['a']} in A, {count['b']} in B, {count['both']} in both"]
    for side in SIDES:
        lines += _list(f"only in {side.upper()}", data[f"only_{side}"])
    for what, word in (("shape", shape_words), ("dtype", str)):
        rows = [(row["name"], word(row["a"]), word(row["b"])) for row in data[f"{what}s"]]
        lines += _list(f"of another {what}", columns(rows) if rows else [])
    values = data.get("values")
    if values is not None:
        rows = sorted((row for row in values if row["num_equal"] < row["num_elements"]), key=_severity)
        cells = [(row["name"], f"{row['num_equal']:,} of {row['num_elements']:,} equal", f"at most {row['max_abs_difference']:.3g} apart")
                 for row in rows]
        lines += _list("of other values", columns(cells) if cells else [])
    return printable("\n".join([*lines, "", verdict(data)]))


def _severity(row: dict) -> tuple:
    """The largest difference first; NaN is the gravest, and no number is greater than it."""
    difference = row["max_abs_difference"]
    return (difference == difference, -difference if difference == difference else 0.0, row["name"])


def verdict(data: dict) -> str:
    values = data.get("values")
    if data["equal"]:
        told = " (values were not compared: --values does)" if values is None else f"; all values of {len(values)} tensors"
        return f"equal: names, shapes and dtypes{told}"
    changed = sum(row["num_equal"] < row["num_elements"] for row in values or [])
    counts = {"in one only": len(data["only_a"]) + len(data["only_b"]), "of another shape": len(data["shapes"]),
              "of another dtype": len(data["dtypes"]), "of other values": changed}
    return "different: " + ", ".join(f"{number} {what}" for what, number in counts.items() if number)


def _list(title: str, entries: list[str]) -> list[str]:
    if not entries:
        return []
    rest = len(entries) - MOST_SHOWN
    more = [f"  … and {rest} more (--json has all)"] if rest > 0 else []
    return ["", f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries[:MOST_SHOWN]), *more]


def _word(value) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
