"""What `mfsdp config show|diff|schema|presets` prints, as plain data."""

from __future__ import annotations

from mfsdp_cli.config.sources import kind_of_preset, preset_files
from mfsdp_cli.config.values import kind_of, leaves


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


def diff(a, b) -> list[dict]:
    """The settings in which two of one kind differ: key, a, b."""
    pairs = ((key, value_of(a, key), value_of(b, key)) for key in leaves(kind_of(a)))
    return [{"key": key, "a": x, "b": y} for key, x, y in pairs if x != y]


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
