"""README.md against the program: blocks made from it are up to date, and every name in the text exists.

    MFSDP_UPDATE_README=1 .venv/bin/python -m pytest tests/unit/test_readme.py     writes the blocks anew
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

from mfsdp_cli.cli import app
from mfsdp_cli.errors import EXIT_CODES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
UPDATE = "MFSDP_UPDATE_README"


def text() -> str:
    return README.read_text(encoding="utf-8")


@cache
def code_blocks() -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", text(), re.M | re.S)


@cache
def inline_code() -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```\w*\n.*?^```$", "", text(), flags=re.M | re.S))


def mfsdp(*args: str) -> str:
    """stdout of the command, in a terminal of 112 columns."""
    done = subprocess.run([sys.executable, "-m", "mfsdp_cli", *args], cwd=ROOT, env={**os.environ, "COLUMNS": "112", "NO_COLOR": "1"},
                          capture_output=True, text=True, check=True)
    return done.stdout


@cache
def settings() -> list[dict]:
    return json.loads(mfsdp("config", "schema", "--json"))["keys"]


def help_block() -> str:
    lines = [line.rstrip() for line in mfsdp("--help").strip().splitlines()]
    return "```\n$ mfsdp --help\n" + "\n".join(lines) + "\n```"


def settings_table() -> str:
    lines = ["| setting | default | type, range | meaning |", "|---|---|---|---|"]
    for row in settings():
        bounds = [f"{sign} {row[name]:g}" for name, sign in (("low", "≥"), ("high", "≤")) if row[name] is not None]
        limits = ["one of " + ", ".join(map(str, row["choices"]))] if row["choices"] else bounds
        kind = ", ".join([row["type"].replace(" | None", " or null"), *([row["unit"]] if row["unit"] else []), *limits])
        doc = row["doc"].replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{row['key']}` | `{json.dumps(row['default'])}` | {kind} | {doc} |")
    return "\n".join(lines)


@pytest.mark.parametrize("name, make", [("help", help_block), ("settings", settings_table)])
def test_generated_blocks_are_up_to_date(name, make):
    pattern = re.compile(rf"(<!-- generated: {name} -->\n)(.*?)(\n<!-- end: {name} -->)", re.S)
    found = pattern.search(text())
    assert found, f"README.md has no block {name}"
    if os.environ.get(UPDATE) and found[2] != make():
        README.write_text(pattern.sub(lambda m: m[1] + make() + m[3], text()), encoding="utf-8")
        code_blocks.cache_clear()
        return
    assert found[2] == make(), f"README.md is stale: run {UPDATE}=1 .venv/bin/python -m pytest tests/unit/test_readme.py"


def test_the_first_code_block_holds_the_two_commands():
    commands = [line.split("#")[0].strip() for line in code_blocks()[0].splitlines()]
    assert commands == ["scripts/quickstart.sh", "scripts/test.sh"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def commands_named() -> list[tuple[list[str], str]]:
    """(words after mfsdp, the rest of that command's line) for every mfsdp command in code; continued lines are joined."""
    found = []
    for code in [*code_blocks(), *inline_code()]:
        for line in re.sub(r"\\\n\s*", " ", code).splitlines():
            # at the start of a line (an indented one is a problem's reason), or after a prompt, $( or &&
            for call in re.finditer(r"(?:^ {0,4}|\$ |\$\(|&& )mfsdp ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?([^|;)&]*)", line):
                found.append(([word for word in call.group(1, 2) if word], call[3]))
    return found


def test_every_command_and_option_exists():
    root = typer.main.get_command(app)
    calls = commands_named()
    assert len(calls) > 20
    for words, rest in calls:
        assert words[0] in root.commands, f"there is no mfsdp {words[0]}"
        command = root.commands[words[0]]
        if hasattr(command, "commands") and len(words) > 1:
            assert words[1] in command.commands, f"there is no mfsdp {' '.join(words)}"
            command = command.commands[words[1]]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
            assert option in known, f"mfsdp {' '.join(words)} has no option {option}"


def test_every_preset_exists():
    names = {path.stem for path in (ROOT / "presets").glob("*.yaml")}
    named = [word for code in [*code_blocks(), *inline_code()] for word in re.findall(r"--preset[ =]([\w.-]+)", code)]
    named += [code for code in inline_code() if re.fullmatch(r"(?:sft|grpo)-[\w.-]+", code)]
    assert named and set(named) <= names
    assert all(f"`{name}`" in text() for name in names if name.startswith("sft-")), "the README must name every SFT preset"


def test_every_path_of_the_project_exists():
    paths = {path.rstrip(".") for path in re.findall(r"(?<![\w/])(?:scripts|tests|presets|mfsdp_cli)/[\w./-]*", text())}
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_setting_in_the_text_exists():
    keys = {row["key"] for row in settings()}
    ours, _, rest = text().partition("## Coming from verl")
    outside = ours + rest.partition("\n## ")[2]  # that section names verl's keys
    named = set(re.findall(r"`((?:model|data|engine|optim|checkpoint|trainer)\.[a-z_0-9]+)[`=]", outside))
    assert len(named) > 20 and named - keys == {"trainer.json"}  # a file


def test_every_exit_code_is_explained():
    codes = [code for code in re.findall(r"^\| (\d+(?:\+n)?) \|", text(), re.M)]
    assert codes == [*map(str, EXIT_CODES), "128+n"]


def test_messages_in_the_troubleshooting_table_are_the_program_s():
    table = text().partition("## Troubleshooting")[2].partition("\n## ")[0]
    symptoms = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ") and not line.startswith("| symptom")]
    quoted = [code for symptom in symptoms for code in re.findall(r"`([^`]+)`", symptom)]
    sources = "\n".join(p.read_text(encoding="utf-8") for p in [*(ROOT / "mfsdp_cli").rglob("*.py"), *(ROOT / "scripts").glob("*.sh")])
    assert len(quoted) > 12
    assert [message for message in quoted if message not in sources] == []


def test_pictures_are_there_and_small():
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text())
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).stat().st_size <= 60_000, picture


def test_links_within_the_page_lead_somewhere():
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text(), flags=re.M | re.S), re.M)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert [link for link in re.findall(r"\]\(#([^)]+)\)", text()) if link not in anchors] == []


def test_no_place_of_one_machine_is_named():
    assert re.findall(r"(?<![\w.])/(?:work|root|tmp|home|opt)/\S*", text()) == []
