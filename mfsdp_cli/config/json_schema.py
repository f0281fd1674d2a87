"""The settings as a JSON Schema (draft 2020-12), for editors and other programs."""

from __future__ import annotations

from mfsdp_cli.config.values import Leaf, leaves

TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
DURATION = r"^\s*(\d+d)?\s*(\d+h)?\s*(\d+m)?\s*(\d+(\.\d+)?s)?\s*(\d+ms)?$"


def json_schema(kind: str) -> dict:
    """Of a file for --config with our own key names; verl's names, which the program translates, are not in it."""
    sections: dict[str, dict] = {}
    for key, leaf in leaves(kind).items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = _property(leaf)
    closed = {"type": ["object", "null"], "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"settings of mfsdp {kind}",
        **closed,
        "properties": {name: {**closed, "properties": properties} for name, properties in sections.items()},
    }


def _property(leaf: Leaf) -> dict:
    element = leaf.kind.startswith("list[")
    inner = {"type": TYPES[leaf.kind[5:-1] if element else leaf.kind]}
    inner |= {"enum": list(leaf.choices)} if leaf.choices else {}
    inner |= {"minimum": leaf.low} if leaf.low is not None else {}
    inner |= {"maximum": leaf.high} if leaf.high is not None else {}
    forms = [{"type": "array", "items": inner}] if element else [inner]
    if leaf.unit == "s":
        forms.append({"type": "string", "pattern": DURATION, "description": "a duration as 90s, 30m, 1h30m"})
    if leaf.optional:
        forms.append({"type": "null"})
    about = {"description": leaf.doc, "default": leaf.default} | ({"x-unit": leaf.unit} if leaf.unit else {})
    return about | (forms[0] if len(forms) == 1 else {"anyOf": forms})
