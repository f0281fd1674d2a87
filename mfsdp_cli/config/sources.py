"""Where settings are written down: presets, YAML files and key=value arguments, as entries with the place of each value."""

from __future__ import annotations

from pathlib import Path

from mfsdp_cli.config.values import SETTINGS, Plain, as_text, free_value, nearest, other_kind
from mfsdp_cli.errors import USAGE, Problem
from mfsdp_cli.records import Record

DEEPEST, MOST_VALUES = 50, 100_000  # of a file of settings


class Entry(Record):
    """One value as somebody wrote it: dotted key, text or tree of `Plain`, str, list, dict, and where it stands."""

    key: str
    raw: object
    where: str



def preset_files() -> dict[str, Path]:
    """Shipped presets by name: beside the package when installed, in the repository's presets/ in a checkout."""
    package = Path(__file__).parents[1]
    folder = package / "presets" if (package / "presets").is_dir() else package.parent / "presets"
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def kind_of_preset(name: str) -> str | None:
    """A preset's file name begins with the kind of run it is for; None for a file of another name."""
    return next((kind for kind in SETTINGS if Path(name).name.startswith(f"{kind}-")), None)


def read_preset(name: str, kind: str, problems: list[Problem]) -> list[Entry]:
    known = {n: path for n, path in preset_files().items() if kind_of_preset(n) == kind}
    if kind_of_preset(name) == other_kind(kind) and (name in preset_files() or Path(name).is_file()):
        why = f"this preset is for mfsdp {other_kind(kind)}"
        fix = f"mfsdp {other_kind(kind)} --preset {name}, or one of: {', '.join(known)}"
        problems.append(Problem("--preset", name, why, fix, "command line", USAGE))
        return []
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
        root = _compose(Path(path).read_text(encoding="utf-8"))
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


def _compose(text: str):
    """The nodes of a YAML text. Raises yaml.YAMLError, also for what nests more deeply, or through aliases holds more, than settings do."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        size, height = (0, 0) if root is None else _measure(root, {})
    except RecursionError:
        size, height = 0, DEEPEST + 1
    if height > DEEPEST:
        raise yaml.YAMLError(f"it nests more than {DEEPEST} deep")
    if size > MOST_VALUES:
        raise yaml.YAMLError(f"aliases (*name) make it endless, or more than {MOST_VALUES:,} values")
    return root


def _measure(node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many values are at and below a node, what is behind an alias counted each time, and how deep they nest."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1, 0  # while it is not known: an alias of what it stands in never ends
        items = node.value if isinstance(node.value, list) else []
        below = [_measure(child, known) for item in items for child in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(size for size, _ in below), 1 + max((height for _, height in below), default=0)
    return known[id(node)]


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
        elif _has_odd_key(value_node):
            problems.append(Problem(key, "", "a key must be text", "write key: value", where(line)))
        else:
            yield Entry(key, _tree(value_node), where(line))


def _odd_tag(node) -> str | None:
    return None if node.tag in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map") else node.tag


def _has_odd_key(node) -> bool:
    """Whether a mapping at or below a node has a key that is a list or a mapping."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        return any(not isinstance(key, yaml.ScalarNode) or _has_odd_key(value) for key, value in node.value)
    return isinstance(node, yaml.SequenceNode) and any(map(_has_odd_key, node.value))


def _tree(node):
    """A YAML node as str (quoted), Plain (not quoted), list or dict."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [_tree(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _tree(value) for key, value in node.value}
    return str(node.value) if node.style in ("'", '"', "|", ">") else Plain(node.value)


def read_assignment(text: str, problems: list[Problem]) -> list[Entry]:
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
        node = _compose(value)
    except yaml.YAMLError as e:
        why = f"the value is not valid YAML: {getattr(e, 'problem', e)}"
        problems.append(Problem(
            key, value, why, "quote the argument for the shell, as in 'trainer.logger=[console, file]'", "command line",
        ))
        return []
    if isinstance(node, yaml.MappingNode) and node.value:
        return list(_flatten(node, key + ".", lambda line: "command line", problems))
    return [Entry(key, _tree(node), "command line")]
