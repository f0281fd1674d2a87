"""Settings from their layers, each value with its origin: defaults < preset < YAML file < $NPROC, $TP, $PP, $EP <
key=value arguments < named flags. Nothing here raises for a user's mistake: problems are collected, and told at once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mfsdp_cli.config import aliases
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.values import Plain, Unfit, as_text, coerce, free_value, leaf_of, leaves, nearest, plain_value
from mfsdp_cli.errors import USAGE, MfsdpError, Problem

ENVIRONMENT = {
    "NPROC": "trainer.n_gpus_per_node",
    "TP": "engine.tensor_model_parallel_size",
    "PP": "engine.pipeline_model_parallel_size",
    "EP": "engine.expert_model_parallel_size",
}

# Named flags of `mfsdp sft`, by the word after the dashes.
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
}

SECTIONS = {key.split(".")[0] for key in leaves()}
PATH_KEYS = ("model.path", "data.train_files", "data.val_files", "trainer.output_dir", "trainer.resume_from_path")


@dataclass(frozen=True)
class Entry:
    """One value as somebody wrote it: dotted key, text or tree of `Plain`, str, list, dict, and where it stands."""

    key: str
    raw: object
    where: str


@dataclass
class Loaded:
    """origins maps every key that is not a default to its origin (entries of a mapping have a key of their own)."""

    settings: SftSettings = field(default_factory=SftSettings)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def load_sft(
    *,
    preset: str | None = None,
    config: str | None = None,
    assignments: Iterable[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """Lay the layers over each other. `preset` is a shipped name or a path; `flags` maps a flag's word ("tp", "train-files"
    or "train_files") or a dotted key to a Python value, None where the flag was not given."""
    loaded = Loaded()
    if preset is not None:
        _apply(loaded, _read_preset(preset, loaded.problems))
    if config is not None:
        _apply(loaded, read_yaml(config, loaded.problems))
    _apply(loaded, [Entry(key, Plain(environ[name]), f"${name}") for name, key in ENVIRONMENT.items() if environ.get(name)])
    _apply(loaded, [entry for text in assignments for entry in _assignment(text, loaded.problems)])
    _apply(loaded, [_flag(name, value) for name, value in (flags or {}).items() if value is not None])
    return loaded


def read_resolved(path: str | Path) -> SftSettings:
    """The settings of a config.yaml that `dump_yaml` wrote. Raises MfsdpError when it does not parse."""
    loaded = load_sft(config=str(path), environ={})
    errors = [p for p in loaded.problems if p.level == "error"]
    if errors:
        raise MfsdpError(errors)
    return loaded.settings


def to_dict(settings: SftSettings) -> dict:
    return asdict(settings)


def dump_yaml(settings: SftSettings) -> str:
    """All settings, in a form that comes back equal through `config=`."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper, value):
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain_value(value) == value else '"')

    Dumper.add_representer(str, text)
    return yaml.dump(to_dict(settings), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def preset_files() -> dict[str, Path]:
    """Shipped presets by name: beside the package when installed, in the repository's presets/ in a checkout."""
    package = Path(__file__).parents[1]
    folder = package / "presets" if (package / "presets").is_dir() else package.parent / "presets"
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def _read_preset(name: str, problems: list[Problem]) -> list[Entry]:
    known = preset_files()
    if name in known:
        return [Entry(e.key, e.raw, f"preset {name}") for e in read_yaml(str(known[name]), problems)]
    if Path(name).is_file():
        return read_yaml(name, problems)
    near = nearest(name, list(known))
    fix = f"did you mean {near}?" if near else f"presets: {', '.join(known)}; or give the path of a YAML file"
    problems.append(Problem("--preset", name, "no such preset, and no such file", fix, "command line"))
    return []


def read_yaml(path: str, problems: list[Problem]) -> list[Entry]:
    """Every value of a YAML file with its file:line. Unquoted text stays `Plain`: the schema decides what it means."""
    import yaml

    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
        problems.append(Problem("--config", path, f"cannot be read: {reason}", "give the path of a YAML file", "command line"))
        return []
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = path if mark is None else f"{path}:{mark.line + 1}"
        reason = getattr(e, "problem", None) or str(e)
        problems.append(Problem(path, "", f"not valid YAML: {reason}", "correct the syntax", where))
        return []
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        problems.append(Problem(path, "", "the file must hold sections (model:, data:, …)", "see: mfsdp config schema", f"{path}:1"))
        return []
    return list(_flatten(root, "", lambda line: f"{path}:{line}", problems))


def _flatten(node, prefix: str, where, problems: list[Problem]):
    """Entries of a mapping node, nested keys joined with dots. A key that stands twice is a problem."""
    import yaml

    first_line: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem(prefix.rstrip("."), "", "a key must be text", "write key: value", where(line)))
            continue
        key = prefix + key_node.value
        if key in first_line:
            why = f"the key stands twice in the same mapping, first in line {first_line[key]}"
            problems.append(Problem(key, as_text(free_value(_tree(value_node))), why, "keep one of the two", where(line)))
            continue
        first_line[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _flatten(value_node, key + ".", where, problems)
        elif (tag := _odd_tag(value_node)) is not None:
            problems.append(Problem(key, tag, "YAML tags are not used here", "write the value alone", where(line)))
        else:
            yield Entry(key, _tree(value_node), where(line))


def _odd_tag(node) -> str | None:
    return None if node.tag in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map") else node.tag


def _tree(node):
    """A YAML node as str (quoted), Plain (not quoted), list or dict."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [_tree(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _tree(value) for key, value in node.value}
    return str(node.value) if node.style in ("'", '"', "|", ">") else Plain(node.value)


def _assignment(text: str, problems: list[Problem]) -> list[Entry]:
    """A key=value argument; verl's + and ++ before the key change nothing, since a key either exists or is wrong."""
    key, equals, value = text.partition("=")
    key = key.removeprefix("+").removeprefix("+")
    if not equals or not key or key.startswith("~"):
        why = "settings cannot be deleted" if text.startswith("~") else "an argument must have the form key=value"
        problems.append(Problem(text, "", why, "write for example optim.lr=1e-5", "command line", USAGE))
        return []
    if value[:1] not in ("[", "{", '"', "'"):
        return [Entry(key, Plain(value), "command line")]
    import yaml

    try:
        node = yaml.compose(value, Loader=yaml.BaseLoader)
    except yaml.YAMLError as e:
        why = f"the value is not valid YAML: {getattr(e, 'problem', e)}"
        problems.append(Problem(
            key, value, why, "quote the argument for the shell, as in 'trainer.logger=[console, file]'", "command line",
        ))
        return []
    if isinstance(node, yaml.MappingNode) and node.value:
        return list(_flatten(node, key + ".", lambda line: "command line", problems))
    return [Entry(key, _tree(node), "command line")]


def _flag(name: str, value: object) -> Entry:
    word = name.lstrip("-").replace("_", "-")
    key = FLAGS.get(word, name)
    word = word if word in FLAGS else next((w for w, k in FLAGS.items() if k == key), word)
    # A text flag arrives as the shell gave it, so it may say null or 3 as well as any other text.
    return Entry(key, Plain(value) if isinstance(value, str) else value, f"--{word}")


def _apply(loaded: Loaded, entries: list[Entry]) -> None:
    """Put one layer over the settings."""
    seen: dict[str, tuple[Entry, object]] = {}
    for entry in entries:
        if entry.key in SECTIONS and free_value(entry.raw) in (None, {}):
            continue  # a section of which every line is commented out
        key = aliases.resolve(entry.key, entry.raw)
        if isinstance(key, aliases.Told):
            problem = Problem(entry.key, as_text(free_value(entry.raw)), key.why, key.fix, entry.where, level=key.level)
            loaded.problems.append(problem)
            continue
        leaf = leaf_of(key)
        if leaf is None:
            loaded.problems.append(_unknown(entry))
            continue
        loaded.origins[key] = entry.where
        try:
            value = free_value(entry.raw) if key != leaf.key else coerce(entry.raw, leaf)
        except Unfit as e:
            found = f'"{entry.raw}"' if entry.raw == "" else as_text(free_value(entry.raw))
            loaded.problems.append(Problem(_named(entry, key), found, e.why, e.fix, entry.where))
            continue
        other, earlier = seen.get(key, (entry, value))
        # On the command line the last of the same name wins, so that a script's arguments can be followed by "$@".
        repeated = other.key == entry.key and entry.where == "command line"
        if earlier != value and not repeated:
            why = f"{other.key} = {as_text(earlier)} ({other.where}) is the same setting with another value"
            loaded.problems.append(Problem(entry.key, as_text(value), why, f"keep one of the two; the name here is {key}", entry.where))
            continue
        seen[key] = (entry, value)
        _set(loaded.settings, key, value)


def _named(entry: Entry, key: str) -> str:
    return key if entry.key == key else f"{entry.key} ({key})"


def _set(settings: SftSettings, key: str, value) -> None:
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


def _unknown(entry: Entry) -> Problem:
    found = as_text(free_value(entry.raw))
    if entry.key in SECTIONS:
        return Problem(entry.key, found, "this is a section of settings, not a setting", f"write {entry.key}.NAME=VALUE", entry.where)
    near = suggestions(entry.key)
    fix = f"did you mean {' or '.join(near)}?" if near else "mfsdp config schema lists every key"
    return Problem(entry.key, found, "no such key", fix, entry.where)


def suggestions(key: str) -> list[str]:
    """Keys that an unknown one may mean, best first: by the whole path, by its last segment, by TRL's and Megatron's names."""
    last = key.rpartition(".")[2]
    if last in aliases.FOREIGN:
        return [aliases.FOREIGN[last]]
    ours = list(leaves())
    paths = difflib.get_close_matches(key, ours + list(aliases.RENAMED), n=2, cutoff=0.75)
    names = {k.rpartition(".")[2]: k for k in ours}
    by_name = [names[n] for n in difflib.get_close_matches(last, list(names), n=2, cutoff=0.75)]
    return list(dict.fromkeys([aliases.RENAMED.get(k, k) for k in paths] + by_name))[:3]
