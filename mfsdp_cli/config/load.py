"""Settings from their layers, each value with its origin: defaults < preset < YAML file < environment variables <
key=value arguments < named flags. One implementation for every kind of run. Nothing here raises for a user's mistake:
problems are collected, and told at once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field
from pathlib import Path

from mfsdp_cli.config import aliases
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.config.sources import Entry, kind_of_preset, read_assignment, read_preset, read_yaml
from mfsdp_cli.config.values import (
    SETTINGS, Plain, Unfit, as_text, coerce, free_value, kind_of, leaf_of, leaves, other_kind, plain_value, sections,
)
from mfsdp_cli.errors import MfsdpError, Problem
from mfsdp_cli.records import Section

ENVIRONMENT = {
    "NPROC": "trainer.n_gpus_per_node",
    "TP": "engine.tensor_model_parallel_size",
    "PP": "engine.pipeline_model_parallel_size",
    "EP": "engine.expert_model_parallel_size",
    "GEN_TP": "rollout.tensor_model_parallel_size",
}

# Named flags, by the word after the dashes. A kind of run has those whose setting it has.
FLAGS = {
    "model": "model.path",
    "train-files": "data.train_files",
    "val-files": "data.val_files",
    "output": "trainer.output_dir",
    "nproc": "trainer.n_gpus_per_node",
    "nnodes": "trainer.nnodes",
    "node-rank": "trainer.node_rank",
    "rdzv-endpoint": "trainer.rdzv_endpoint",
    "tp": "engine.tensor_model_parallel_size",
    "pp": "engine.pipeline_model_parallel_size",
    "ep": "engine.expert_model_parallel_size",
    "cp": "engine.context_parallel_size",
    "gen-tp": "rollout.tensor_model_parallel_size",
    "rollout": "rollout.name",
    "reward-fn": "reward.function",
    "ray-address": "trainer.ray_address",
    "val-only": "trainer.val_only",
}

PATH_KEYS = (
    "model.path", "data.train_files", "data.val_files", "trainer.output_dir", "trainer.resume_from_path", "ref.path", "reward.function",
)


class Loaded(Section):
    """origins maps every key that is not a default to its origin (entries of a mapping have a key of their own)."""

    settings: SftSettings | GrpoSettings
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return kind_of(self.settings)


def load(
    kind: str,
    *,
    preset: str | None = None,
    config: str | None = None,
    assignments: Iterable[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    layers: Iterable[list[Entry]] = (),
) -> Loaded:
    """Lay the layers of a kind of run, sft or grpo, over each other. `preset` is a shipped name or a path; `flags` maps a
    flag's word ("tp", "train-files" or "train_files") or a dotted key to a Python value, None where the flag was not given;
    `layers` are entries that have been read from elsewhere, above the preset."""
    loaded = Loaded(SETTINGS[kind]())
    told: list[Entry] = []  # what verl's keys say about the reference model, to be compared with the actor at the end
    if preset is not None:
        _apply(loaded, read_preset(preset, kind, loaded.problems), told)
    for layer in layers:
        _apply(loaded, layer, told)
    if config is not None:
        _apply(loaded, read_yaml(config, loaded.problems), told)
    variables = {name: key for name, key in ENVIRONMENT.items() if environ.get(name) and key in leaves(kind)}
    _apply(loaded, [Entry(key, Plain(environ[name]), f"${name}") for name, key in variables.items()], told)
    _apply(loaded, [entry for text in assignments for entry in read_assignment(text, loaded.problems)], told)
    _apply(loaded, [_flag(name, value) for name, value in (flags or {}).items() if value is not None], told)
    _compare_reference(loaded, told)
    return loaded


def infer_kind(preset: str | None = None, config: str | None = None, assignments: Iterable[str] = ()) -> str:
    """The kind of run that these are for: by the preset's name, else by sections that only one kind has; sft when open."""
    ignored: list[Problem] = []
    if preset is not None and (kind := kind_of_preset(preset)) is not None:
        return kind
    entries = [entry for text in assignments for entry in read_assignment(text, ignored)]
    entries += [entry for name in (preset, config) if name is not None for entry in read_yaml(name, ignored)]
    only_grpo = (sections("grpo") - sections("sft")) | {"actor_rollout_ref"}
    return "grpo" if any(entry.key.split(".")[0] in only_grpo for entry in entries) else "sft"


def read_resolved(path: str | Path, kind: str = "sft") -> SftSettings | GrpoSettings:
    """The settings of a config.yaml that `dump_yaml` wrote. Raises MfsdpError when it does not parse."""
    loaded = load(kind, config=str(path), environ={})
    errors = [p for p in loaded.problems if p.level == "error"]
    if errors:
        raise MfsdpError(errors)
    return loaded.settings


def to_dict(settings: SftSettings | GrpoSettings) -> dict:
    return asdict(settings)


def dump_yaml(settings: SftSettings | GrpoSettings) -> str:
    """All settings, in a form that comes back equal through `config=`."""
    return _dump(to_dict(settings))


def dump_value(value) -> str:
    """One value on one line, in a form that comes back equal."""
    return _dump(value, default_flow_style=True, width=10**9).removesuffix("\n").removesuffix("\n...")


def _dump(value, **style) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper, value):
        bare = plain_value(value) == value and value.isprintable()  # YAML folds the lines that other separators of lines make
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if bare else '"')

    Dumper.add_representer(str, text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, **{"width": 10_000} | style)


def _flag(name: str, value: object) -> Entry:
    word = name.lstrip("-").replace("_", "-")
    key = FLAGS.get(word, name)
    word = word if word in FLAGS else next((w for w, k in FLAGS.items() if k == key), word)
    # A text flag arrives as the shell gave it, so it may say null or 3 as well as any other text.
    return Entry(key, Plain(value) if isinstance(value, str) else value, f"--{word}")


def _apply(loaded: Loaded, entries: list[Entry], told: list[Entry]) -> None:
    """Put one layer over the settings; entries about the reference model's engine go to `told`."""
    kind = loaded.kind
    seen: dict[str, tuple[Entry, object]] = {}
    for entry in _joined(entries, loaded):
        if entry.key in sections(kind) and free_value(entry.raw) in (None, {}):
            continue  # a section of which every line is commented out
        meant = aliases.resolve(entry.key, entry.raw, kind)
        if isinstance(meant, aliases.Told):
            problem = Problem(entry.key, as_text(free_value(entry.raw)), meant.why, meant.fix, entry.where, level=meant.level)
            loaded.problems.append(problem)
            continue
        key, raw = meant
        if leaf_of(key, kind) is None:
            loaded.problems.append(_unknown(entry, kind))
            continue
        try:
            value = _value(key, raw, kind)
        except Unfit as e:
            found = f'"{entry.raw}"' if entry.raw == "" else as_text(free_value(entry.raw))
            loaded.problems.append(Problem(_named(entry, key), found, e.why, e.fix, entry.where))
            continue
        if aliases.is_of_reference(entry.key, kind):
            told.append(entry)
            continue
        loaded.origins[key] = entry.where
        other, earlier = seen.get(key, (entry, value))
        # On the command line the last of the same name wins, so that a script's arguments can be followed by "$@".
        repeated = other.key == entry.key and entry.where == "command line"
        if earlier != value and not repeated:
            why = f"{other.key} = {as_text(earlier)} ({other.where}) is the same setting with another value"
            loaded.problems.append(Problem(entry.key, as_text(value), why, f"keep one of the two; the name here is {key}", entry.where))
            continue
        seen[key] = (entry, value)
        _set(loaded.settings, key, value)


def _value(key: str, raw, kind: str):
    leaf = leaf_of(key, kind)
    return free_value(raw) if key != leaf.key else coerce(raw, leaf)


def _joined(entries: list[Entry], loaded: Loaded) -> list[Entry]:
    """verl names the file and the function of a custom reward in two keys, which are one setting here."""
    if loaded.kind != "grpo":
        return entries
    for prefix in aliases.REWARD_FUNCTION:
        path = next((e for e in reversed(entries) if e.key == prefix + "path"), None)
        name = next((e for e in reversed(entries) if e.key == prefix + "name"), None)
        entries = [e for e in entries if e.key not in (prefix + "path", prefix + "name")]
        if path is not None and free_value(path.raw) is not None:
            function = "compute_score" if name is None else name.raw
            entries.append(Entry("reward.function", f"{path.raw}:{function}", path.where))
        elif name is not None and path is None:
            why = f"without {prefix}path in the same place it names no function"
            loaded.problems.append(Problem(name.key, as_text(free_value(name.raw)), why, "reward.function=FILE.py:FUNCTION", name.where))
    return entries


def _compare_reference(loaded: Loaded, told: list[Entry]) -> None:
    """Actor and reference share engine.*; a key of verl's for the reference alone says what the actor has, or is wrong."""
    for key, entry in {aliases.resolve(e.key, e.raw, loaded.kind)[0]: e for e in told}.items():
        raw = aliases.resolve(entry.key, entry.raw, loaded.kind)[1]
        section, name, *inner = key.split(".")
        actor = getattr(getattr(loaded.settings, section), name)
        for step in inner:
            actor = actor.get(step) if isinstance(actor, dict) else None
        reference = _value(key, raw, loaded.kind)
        if actor != reference:
            why = f"the actor has {key} = {as_text(actor)} ({loaded.origins.get(key, 'default')}): actor and reference must have the " \
                  "same flags and the same parallel layout"
            fix = f"set {key} once, for both, and leave {entry.key} out"
            loaded.problems.append(Problem(entry.key, as_text(reference), why, fix, entry.where))


def _named(entry: Entry, key: str) -> str:
    return key if entry.key == key else f"{entry.key} ({key})"


def _set(settings, key: str, value) -> None:
    section, name, *inner = key.split(".")
    target = getattr(settings, section)
    if key in PATH_KEYS:
        value = [_home(v) for v in value] if isinstance(value, list) else _home(value)
    if not inner:
        # An empty mapping over another adds nothing, as in OmegaConf.
        setattr(target, name, getattr(target, name) | value if isinstance(value, dict) else value)
        return
    mapping = getattr(target, name)
    for step in inner[:-1]:
        if not isinstance(mapping.get(step), dict):
            mapping[step] = {}
        mapping = mapping[step]
    mapping[inner[-1]] = value


def _home(path: str | None) -> str | None:
    """The shell expands ~ at the start of a word only, so not in data.train_files=~/x."""
    return os.path.expanduser(path) if path is not None and path.startswith("~") else path


def _unknown(entry: Entry, kind: str) -> Problem:
    found = as_text(free_value(entry.raw))
    if entry.key in sections(kind):
        return Problem(entry.key, found, "this is a section of settings, not a setting", f"write {entry.key}.NAME=VALUE", entry.where)
    near = suggestions(entry.key, kind)
    fix = f"did you mean {' or '.join(near)}?" if near else f"mfsdp config schema --kind {kind} lists every key"
    if leaf_of(entry.key, other_kind(kind)) is not None:
        return Problem(entry.key, found, f"this is a setting of mfsdp {other_kind(kind)}, not of mfsdp {kind}",
                       fix if near else "leave it out", entry.where)
    return Problem(entry.key, found, "no such key", fix, entry.where)


def suggestions(key: str, kind: str) -> list[str]:
    """Keys that an unknown one may mean, best first: by the whole path, by its last segment, by TRL's and Megatron's names."""
    foreign, renamed = aliases.TABLES[kind].foreign, aliases.TABLES[kind].renamed
    last = key.rpartition(".")[2]
    ours = list(leaves(kind))
    if last in foreign:  # TRL's beta is another thing than optim.betas with a letter missing
        return list(dict.fromkeys([*difflib.get_close_matches(key, ours, n=1, cutoff=0.9), foreign[last]]))
    paths = difflib.get_close_matches(key, ours + list(renamed), n=2, cutoff=0.75)
    names: dict[str, list[str]] = {}
    for known in ours:
        names.setdefault(known.rpartition(".")[2], []).append(known)
    by_name = [known for name in difflib.get_close_matches(last, list(names), n=2, cutoff=0.75) for known in names[name]]
    return list(dict.fromkeys([renamed.get(k, k) for k in paths] + by_name))[:3]
