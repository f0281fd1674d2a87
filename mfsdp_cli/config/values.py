"""Values of settings: the list of all keys, and text turned into what the schema asks for. No yaml here."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import fields
from functools import cache

from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.records import Record

SETTINGS = {"sft": SftSettings, "grpo": GrpoSettings}  # kind of run -> its settings

_INT = re.compile(r"(?=.{1,40}$)[+-]?\d+(_\d+)*")
_LARGEST = 2**63 - 1  # what files and tensors hold
_FLOAT = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DURATION = re.compile(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s)?\s*(?:(\d+)ms)?")
_NULL = re.compile(r"|~|(?i:null)|None")  # but none, in small letters, is a value of several settings
_NAMES = {
    "str": "text", "int": "an integer", "float": "a number", "bool": "True or False", "dict": "a mapping",
    "list[str]": "a list of texts", "list[float]": "a list of numbers",
}


class Plain(str):
    """Text that stood without quotes: null, true and 3 mean what they say, unless the schema asks for text."""


class Unfit(ValueError):
    """A value that its key cannot take: why, and what to write instead."""

    def __init__(self, why: str, fix: str):
        super().__init__(why)
        self.why, self.fix = why, fix


class Leaf(Record):
    """One setting, as the schema declares it. `type` is the annotation: "int | None", "list[str]", "dict"."""

    key: str
    type: str
    default: object
    doc: str
    unit: str
    choices: tuple
    low: float | None
    high: float | None

    @property
    def optional(self) -> bool:
        return self.type.endswith(" | None")

    @property
    def kind(self) -> str:
        return self.type.removesuffix(" | None")

    @property
    def expected(self) -> str:
        return _NAMES[self.kind] + (f" ({self.unit})" if self.unit else "") + (" or null" if self.optional else "")


def kind_of(settings: SftSettings | GrpoSettings) -> str:
    """sft or grpo."""
    return next(kind for kind, cls in SETTINGS.items() if type(settings) is cls)


def validates_only(settings: SftSettings | GrpoSettings) -> bool:
    """Whether nothing is trained: training data and what updates need are then not asked for."""
    return kind_of(settings) == "grpo" and settings.trainer.val_only


def other_kind(kind: str) -> str:
    return "grpo" if kind == "sft" else "sft"


@cache
def leaves(kind: str) -> dict[str, Leaf]:
    """Every setting of a kind of run by its dotted key, in the order of the schema."""
    found, defaults = {}, SETTINGS[kind]()
    for section in fields(defaults):
        values = getattr(defaults, section.name)
        for f in fields(values):
            key = f"{section.name}.{f.name}"
            found[key] = Leaf(key, f.type, getattr(values, f.name), **f.metadata)
    return found


@cache
def sections(kind: str) -> frozenset[str]:
    return frozenset(key.split(".")[0] for key in leaves(kind))


def leaf_of(key: str, kind: str) -> Leaf | None:
    """The setting that a dotted key names, or names an entry of when the setting is a mapping."""
    if key in leaves(kind):
        return leaves(kind)[key]
    leaf = leaves(kind).get(".".join(key.split(".")[:2]))
    return leaf if leaf is not None and leaf.kind == "dict" else None


def plain_value(text: str):
    """What unquoted text means where the schema does not say: null, bool, int, float, else the text itself.

    Unlike YAML 1.1, yes, no, on, off, n and y are text, and 1e-5 is a number.
    """
    if _NULL.fullmatch(text):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return str(text)


def free_value(raw):
    """A value of a mapping whose entries the schema does not type."""
    if isinstance(raw, Plain):
        return plain_value(raw)
    if isinstance(raw, dict):
        return {str(k): free_value(v) for k, v in raw.items()}
    if isinstance(raw, (list, tuple)):
        return [free_value(v) for v in raw]
    return raw


def coerce(raw, leaf: Leaf):
    """`raw` (text, list, or a Python value from a flag) as the type of `leaf`, within its range. Raises Unfit."""
    if raw is None or (isinstance(raw, Plain) and _NULL.fullmatch(raw)):
        if leaf.optional:
            return None
        if leaf.kind == "dict":
            return {}
        if leaf.kind.startswith("list"):
            return []
        raise Unfit(f"null is no value for this key: expected {leaf.expected}", _advice(leaf))
    if leaf.kind.startswith("list["):
        element = leaf.kind[len("list["):-1]
        value = [_scalar(item, element, leaf) for item in (raw if isinstance(raw, (list, tuple)) else [raw])]
    else:
        value = _scalar(raw, leaf.kind, leaf)
    for item in value if isinstance(value, list) else [value]:
        _check_range(item, leaf)
    return value


def duration(text: str) -> float | None:
    """Seconds that 90s, 30m, 1h30m, 2d or 500ms stand for; None for any other text.

    >>> duration("1h30m")
    5400.0
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        return None
    days, hours, minutes, seconds, thousandths = (float(part or 0) for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds + thousandths / 1000


def _scalar(raw, kind: str, leaf: Leaf):
    if isinstance(raw, str):
        value = _from_text(raw, kind)
        if value is None and leaf.unit == "s" and (seconds := duration(raw)) is not None:
            if kind == "int" and not seconds.is_integer():
                raise Unfit(f"{raw} is {seconds:g} s, and this setting takes whole seconds", f"write {math.ceil(seconds)}")
            value = int(seconds) if kind == "int" else seconds
    elif kind == "float" and isinstance(raw, int) and not isinstance(raw, bool):
        value = float(raw)
    else:
        value = raw if type(raw).__name__ == kind else None
    if value is None or (kind == "float" and not math.isfinite(value)):
        number = raw if isinstance(raw, (int, float)) else plain_value(raw) if isinstance(raw, str) else None
        if kind == "int" and isinstance(number, float) and number.is_integer() and abs(number) < _LARGEST:
            raise Unfit(f"expected {leaf.expected}, found a number with a point or an exponent", f"write {int(number)}")
        raise Unfit(f"expected {leaf.expected}, found {describe(raw)}", _advice(leaf))
    if kind == "int" and abs(value) > _LARGEST:
        raise Unfit(f"{value} is beyond the greatest integer, {_LARGEST}", _advice(leaf))
    if kind == "str" and "${" in value:
        raise Unfit("${…} is an OmegaConf reference, which is not followed here", "write the value itself")
    return value


def _from_text(text: str, kind: str):
    if kind == "str":
        return str(text)
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "int" and _INT.fullmatch(text):
        return int(text)
    if kind == "float" and _FLOAT.fullmatch(text):
        return float(text)
    return None


# Values that other systems have, and why they are not here; the sources are those of field reports on megatron-core 0.19.2.
WHY_NOT = {
    **dict.fromkeys(("float16", "fp16", "half"), "ZeRO's empty shards have no gradient, on which the loss scaling of float16 fails "
                                                 "(megatron-core distrib_optimizer.py)"),
    **dict.fromkeys(("sgd", "muon", "lion", "soap", "adafactor"), "the distributed optimizer, which shards the state, takes Adam only"),
    **dict.fromkeys(("gae", "reinforce_plus_plus", "remax"), "there is no critic and no baseline rollout: responses of one prompt are compared"),
    "hf_model": "Hugging Face weights are written, and proven equal, by mfsdp ckpt export-hf",
}


def _check_range(value, leaf: Leaf) -> None:
    if leaf.choices and value not in leaf.choices:
        legal = ", ".join(map(str, leaf.choices))
        near = nearest(str(value), [str(c) for c in leaf.choices])
        if value in WHY_NOT:
            raise Unfit(f"{as_text(value)} is not one of: {legal}; {WHY_NOT[value]}", f"write one of: {legal}")
        raise Unfit(f"{as_text(value)} is not one of: {legal}", f"did you mean {near}?" if near else f"write one of: {legal}")
    if isinstance(value, str):
        return
    unit = f" {leaf.unit}" if leaf.unit else ""
    if leaf.low is not None and value < leaf.low:
        raise Unfit(f"{as_text(value)} is below the least value, {as_text(leaf.low)}{unit}", f"write {as_text(leaf.low)} or more")
    if leaf.high is not None and value > leaf.high:
        raise Unfit(f"{as_text(value)} is above the greatest value, {as_text(leaf.high)}{unit}", f"write {as_text(leaf.high)} or less")


def _advice(leaf: Leaf) -> str:
    if leaf.unit == "s":
        return f"write seconds, or a duration as 90s, 30m, 1h30m; the default is {as_text(leaf.default)}"
    if leaf.choices:
        return f"write one of: {', '.join(map(str, leaf.choices))}"
    if leaf.kind == "bool":
        return "write True or False"
    return "leave it out" if leaf.default in (None, [], {}) else f"write for example {as_text(leaf.default)}, the default"


def describe(raw) -> str:
    """The kind of a raw value, in words."""
    value = free_value(raw)
    for kind, name in ((bool, "a truth value"), (int, "an integer"), (float, "a number"), (dict, "a mapping"), ((list, tuple), "a list")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else f"the text {str(value)!r}"


def nearest(word: str, names: list[str]) -> str | None:
    """The name that `word` was most likely meant to be."""
    lower = {n.lower(): n for n in names}
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.5)
    return lower[found[0]] if found else None


def divisors(number: int) -> list[int]:
    """Divisors of a number, rising: all of them up to 10**10, above it those that pair with a divisor up to 10**5.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, min(math.isqrt(number), 100_000) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def either(words: list[str]) -> str:
    """a, b or c"""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def as_text(value) -> str:
    """A value as one would write it in YAML or on the command line."""
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(as_text(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {as_text(v)}" for k, v in value.items()) + "}"
    return str(value)
