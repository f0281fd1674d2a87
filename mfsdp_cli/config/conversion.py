"""What a launch script of verl's became: settings, a report of every key, a file. `from_verl` makes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from mfsdp_cli.config.load import PATH_KEYS, Loaded, dump_value
from mfsdp_cli.config.show import resolved
from mfsdp_cli.config.values import as_text
from mfsdp_cli.errors import USAGE, MfsdpError, Problem, exit_code_of


@dataclass
class Conversion:
    """What a script became.

    taken        one row a key: verl (as the script has it), key, value, where, default (whether ours is the same)
    added        defaults of verl's that the script relies on and ours differ from: key, value, default
    no_meaning   keys accepted without effect: verl, found, why, where
    problems     what is wrong or could not be read, as of any other file of settings
    environment  variables that the script exports and the settings do not carry
    others       further commands of the script: where, command
    """

    kind: str
    script: str
    launch: str
    text: str
    loaded: Loaded
    taken: list[dict] = field(default_factory=list)
    added: list[dict] = field(default_factory=list)
    no_meaning: list[dict] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    others: list[dict] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.problems)

    def to_dict(self) -> dict:
        names = ("kind", "script", "launch", "taken", "added", "no_meaning", "environment", "others")
        return {name: getattr(self, name) for name in names} | {"problems": [p.to_dict() for p in self.problems], "yaml": self.text}


def yaml_text(result: Conversion, in_home: dict[str, str]) -> str:
    """The settings that are not our defaults, each with the line that it comes from."""
    lines, section = [f"# From {' '.join(Path(result.script).name.split())}, by mfsdp config from-verl; for mfsdp {result.kind}"], ""
    for row in resolved(result.loaded.settings, result.loaded.origins):
        if not row["changed"]:
            continue
        if (name := row["key"].partition(".")[0]) != section:
            section = name
            lines.append(f"{section}:")
        value = row["value"]
        if row["key"] in PATH_KEYS:
            value = [in_home.get(path, path) for path in value] if isinstance(value, list) else in_home.get(value, value)
        numbers = dict.fromkeys(re.findall(r":(\d+)(?:,|$)", row["origin"]))
        comment = f"line {', '.join(numbers)}" if numbers else row["origin"]
        lines.append(f"  {row['key'].partition('.')[2]}: {dump_value(value)}  # {comment}")
    return "\n".join(lines) + "\n"


def write(result: Conversion, path: str, overwrite: bool) -> None:
    """Put the YAML into a file. Raises MfsdpError when there is one already."""
    try:
        with open(path, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(result.text)
    except FileExistsError:
        raise MfsdpError(Problem("--out", path, "there is such a file already", "--overwrite, or another name", code=USAGE)) from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as e:
        fix = "give a file in a folder that is there"
        raise MfsdpError(Problem("--out", path, f"cannot be written: {e.strerror}", fix, code=USAGE)) from None


def report(result: Conversion) -> list[str]:
    """The conversion in words; the problems are told apart."""
    changed = [row for row in result.taken if not row["default"]]
    same = [row for row in result.taken if row["default"]]
    lines = [f"{result.launch} is for mfsdp {result.kind}"]
    sections = (
        ("taken over", [f"{r['verl']}{'' if r['verl'] == r['key'] else ' -> ' + r['key']}: {as_text(r['value'])}" for r in changed]),
        ("verl's defaults that the script relies on, written down since ours differ",
         [f"{r['key']}: {as_text(r['value'])} (ours: {as_text(r['default'])})" for r in result.added]),
        ("the same as our defaults, left out", [f"{r['verl']}: {as_text(r['value'])}" for r in same]),
        ("without meaning here", [f"{r['verl']} = {r['found']}: {r['why']}" for r in result.no_meaning]),
        ("exported by the script, not part of the settings; export what the run needs",
         [f"{name}={value}" for name, value in result.environment.items()]),
        ("other commands of the script, not taken over", [f"{r['where']}  {r['command']}" for r in result.others]),
    )
    for title, rows in sections:
        if rows:
            lines += ["", f"{title} ({len(rows)}):", *(f"  {row}" for row in rows)]
    return lines
