"""What `mfsdp config show|diff|schema|presets` prints, as plain data."""

from __future__ import annotations

import json
from pathlib import Path

from mfsdp_cli.config.load import Loaded, infer_kind, load
from mfsdp_cli.config.sources import kind_of_preset, preset_files
from mfsdp_cli.config.values import kind_of, leaves, nearest
from mfsdp_cli.errors import OK, USAGE, MfsdpError, Problem, exit_code_of


def value_of(settings, key: str):
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)


def resolved(settings, origins: dict[str, str]) -> list[dict]:
    """One row a setting, in the schema's order: key, value, origin ("default", or as in Loaded), changed (from the default).

    A mapping's origin joins those of its entries.
    """
    rows = []
    for key, leaf in leaves(kind_of(settings)).items():
        value = value_of(settings, key)
        found = dict.fromkeys(where for k, where in origins.items() if k == key or k.startswith(key + "."))
        rows.append({"key": key, "value": value, "origin": ", ".join(found) or "default", "changed": value != leaf.default})
    return rows


def compare(a: str, b: str) -> tuple[str, list[dict]]:
    """The kind of run that two presets, YAML files or run folders are for, and the settings in which they differ.

    One row a setting: key, a, b, origin_a, origin_b. Raises MfsdpError when one of them cannot be read, or they are of two kinds.
    """
    named = {name: _file_of(name) for name in (a, b)}
    missing = [_no_such(name) for name, file in named.items() if file is None]
    if missing:
        raise MfsdpError(missing)
    kinds = [infer_kind(preset=named[name]) for name in (a, b)]
    if kinds[0] != kinds[1]:
        raise MfsdpError(Problem(f"{a}, {b}", f"{kinds[0]}, {kinds[1]}", "settings of two kinds of run", "compare two of one kind",
                                 "command line", USAGE))
    sides = [_read(named[name], kinds[0]) for name in (a, b)]
    problems = [p for side in sides for p in side.problems]
    if exit_code_of(problems) != OK:
        raise MfsdpError(problems)
    rows = [resolved(side.settings, side.origins) for side in sides]
    return kinds[0], [
        {"key": x["key"], "a": x["value"], "b": y["value"], "origin_a": x["origin"], "origin_b": y["origin"]}
        for x, y in zip(*rows, strict=True) if x["value"] != y["value"]
    ]


def _file_of(name: str) -> str | None:
    """A preset's name or a file as it is, of a run folder its config.yaml; None when there is no such thing."""
    if name in preset_files() or Path(name).is_file():
        return name
    config = Path(name) / "config.yaml"
    return str(config) if config.is_file() else None


def _no_such(name: str) -> Problem:
    if Path(name).is_dir():
        return Problem(name, "", "a folder without config.yaml is no run folder", "give a run folder, a file or a preset", "command line")
    near = nearest(name, list(preset_files()))
    fix = f"did you mean {near}?" if near else f"presets: {', '.join(preset_files())}; or give a YAML file or a run folder"
    return Problem(name, "", "no such preset, file or run folder", fix, "command line")


def _read(file: str, kind: str) -> Loaded:
    """Of a run folder, origins are those of the run, as it wrote them beside its settings."""
    loaded = load(kind, preset=file, environ={})
    written = Path(file).parent / "origin.json"
    if Path(file).name == "config.yaml" and written.is_file():
        try:
            origins = json.loads(written.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return loaded  # then the file and line
        loaded.origins = {str(k): str(v) for k, v in origins.items()} if isinstance(origins, dict) else loaded.origins
    return loaded


def schema(kind: str) -> list[dict]:
    """One row a setting: key, type, default, unit, choices, low, high (inclusive), doc. JSON-ready."""
    names = ("key", "type", "default", "unit", "choices", "low", "high", "doc")
    rows = [{name: getattr(leaf, name) for name in names} for leaf in leaves(kind).values()]
    return [row | {"choices": list(row["choices"])} for row in rows]


def presets() -> list[dict]:
    """One row a shipped preset: name, kind, about (its first comment), path."""
    rows = []
    for name, path in preset_files().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        rows.append({"name": name, "kind": kind_of_preset(name), "about": first.removeprefix("#").strip(), "path": str(path)})
    return rows
