"""`mfsdp config from-verl`: a verl launch script as our settings, with a report of what became of every key. Runs nothing.

The script is read by `shell`, its keys by `aliases`, the result is judged by `rules` as far as no machine is needed for it.
What cannot be known from the script is named with its line, and left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from mfsdp_cli.config import aliases
from mfsdp_cli.config.conversion import Conversion, yaml_text
from mfsdp_cli.config.load import Loaded, load
from mfsdp_cli.config.rules import check
from mfsdp_cli.config.shell import Command, Script, read_script
from mfsdp_cli.config.shell_expand import Text
from mfsdp_cli.config.show import resolved
from mfsdp_cli.config.sources import Entry, read_assignment
from mfsdp_cli.config.values import Plain, as_text, free_value, leaf_of
from mfsdp_cli.config.verl_defaults import DEFAULTS
from mfsdp_cli.errors import BAD_INPUT, CONFIG_INVALID, USAGE, MfsdpError, Problem
from mfsdp_cli.launch.facts import Facts, ParquetFacts

HOME = "\uf8ff"  # stands for $HOME while the script is read: a letter that no script has
LARGEST_SCRIPT = 200_000  # bytes
TRAINER = re.compile(r"(?:[\w./-]*[./])?(?P<name>(?:fsdp_)?sft_trainer(?:_\w+)?|main_(?:ppo|dapo)(?:_\w+)?)(?:\.py)?")
OWN_CONFIGS = re.compile(r"(ppo|sft|dapo)(_\w+)?_trainer(_engine)?(\.yaml)?")  # configurations that come with verl
TORCHRUN = {"nproc_per_node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}
OF_ONE_NODE = ("trainer.node_rank", "trainer.rdzv_endpoint")  # given on each node, never in a file for all
QUOTED = re.compile(r"""(['"])([\[{].*)\1""", re.S)
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
VERLS_DEFAULT = "verl's default"
QUIET = {"echo", "mkdir", "cd", "sleep", "rm", "true", ":", "set", "printf", "date", "ulimit", "wait", "trap"}


def convert(path: str, arguments: list[str] | None = None, variables: Iterable[str] = (),
            environ: Mapping[str, str] = os.environ) -> Conversion:
    """Read the script as if it were started with these arguments and variables (NAME=VALUE); of `environ` only HOME is used.

    Raises MfsdpError when the file cannot be read or starts no trainer of verl's. Every other fault is in `.problems`.
    """
    home = environ.get("HOME", "").rstrip("/")
    known = ({"HOME": HOME} if home else {}) | _variables(variables)
    script = read_script(_read(path), known, arguments)
    in_home = _put_home(script, home)
    launches = [(c, found) for c in script.commands if (found := _trainer(c)) is not None]
    if not launches:
        raise MfsdpError([_no_launch(path, script), *_faults(path, script)])
    command, (at, kind) = launches[0]
    problems = _faults(path, script)
    launcher = _launcher(command.words[:at], path, kind, problems)
    entries = _overrides(command.words[at + 1:], path, kind, problems)
    entries = [e for e in entries if e.key not in {e.key for e in launcher}] + launcher
    set_there = {_our_key(key, kind) for key in [e.key for e in entries] + [p.key for p in problems]}
    defaults = [Entry(key, value, VERLS_DEFAULT) for key, value in DEFAULTS[kind].items() if key not in set_there]
    loaded = load(kind, layers=[defaults, _followed(entries)], environ={})
    result = Conversion(kind, path, f"{path}:{command.line}", "", loaded)
    _sort(result, entries)
    problems += [p for p in loaded.problems if p.level != "note"]
    result.problems = problems + _judged(loaded, command, path, problems) + _remarks(loaded, launches, path)
    judged = {p.key for p in result.problems}
    result.environment = {name: value.text for name, value in command.environ.items() if not value.why and name not in judged}
    result.others = [{"where": f"{path}:{c.line}", "command": _shown(c)} for c in script.commands if c is not command and _worth_naming(c)]
    result.text = yaml_text(result, in_home)
    return result


def _variables(given: Iterable[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    wrong = [Problem("--var", name + equals + value, "expected NAME=VALUE", "--var MODEL_PATH=Qwen/Qwen3-8B", "command line", USAGE)
             for name, equals, value in pairs if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name)]
    if wrong:
        raise MfsdpError(wrong)
    return {name: value for name, _, value in pairs}


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_SCRIPT + 1)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise MfsdpError(Problem(path, "", f"cannot be read: {reason}", "give the path of a shell script", code=BAD_INPUT)) from None
    if len(data) > LARGEST_SCRIPT:
        raise MfsdpError(Problem(path, "", "more than 200 kB is no launch script", "give the path of a shell script", code=BAD_INPUT))
    return data.decode("utf-8-sig", errors="replace")


def _put_home(script: Script, home: str) -> dict[str, str]:
    """Write out $HOME in all words. Returns the paths that began with it, as ~/…, which --config follows on another machine too."""
    in_home: dict[str, str] = {}

    def put(text: Text) -> Text:
        in_home.update({home + rest: "~" + rest for rest in re.findall(HOME + r"(/[^'\",\]\s]*)", text.text)})
        return replace(text, text=text.text.replace(HOME, home), why=tuple(why.replace(HOME, home) for why in text.why))
    script.commands = [replace(c, words=tuple(map(put, c.words)), environ={name: put(v) for name, v in c.environ.items()})
                       for c in script.commands]
    return in_home


# --- the launch -----------------------------------------------------------------------------------------------------


def _trainer(command: Command) -> tuple[int, str] | None:
    """Where a trainer of verl's stands among the words, and the kind of run that it is for."""
    for at, word in enumerate(command.words):
        match = TRAINER.fullmatch(word.text) if not word.why and at > 0 else None
        if match is not None and command.words[0].text not in QUIET:
            return at, "sft" if "sft" in match["name"] else "grpo"
    return None


def _no_launch(path: str, script: Script) -> Problem:
    named = ", ".join(dict.fromkeys(c.words[0].text for c in script.commands if _worth_naming(c))) or "none"
    why = f"no command that starts verl's SFT or GRPO trainer; commands found: {_short(named)}"
    fix = "a script with … -m verl.trainer.sft_trainer … or … -m verl.trainer.main_ppo …"
    return Problem(path, "", why, fix, code=BAD_INPUT)


def _faults(path: str, script: Script) -> list[Problem]:
    faults = [Problem("shell", "", f"{why}; nothing behind this line was read", "correct the script", f"{path}:{line}", BAD_INPUT)
              for line, why in script.faults]
    return faults + [Problem("shell", "", why, "", f"{path}:{line}", level="warning") for line, why in script.notes]


def _launcher(words: Iterable[Text], path: str, kind: str, problems: list[Problem]) -> list[Entry]:
    """torchrun's options that are settings here. GRPO scripts have them as keys."""
    entries, words = [], list(words)
    for i, word in enumerate(words):
        name, equals, value = word.text.lstrip("-").partition("=")
        key = TORCHRUN.get(name.replace("-", "_")) if word.text.startswith("--") and kind == "sft" else None
        if key is None or (not equals and i + 1 == len(words)):
            continue
        given = replace(word, text=value) if equals else words[i + 1]
        if given.why:
            problems.append(_unresolved(key, given, path))
        else:
            entries.append(Entry(key, Plain(given.text), f"{path}:{word.line}"))
    return entries


def _overrides(words: Iterable[Text], path: str, kind: str, problems: list[Problem]) -> list[Entry]:
    """The key=value words, the last of each key; Hydra's own options are looked at too."""
    entries: dict[str, Entry] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        where = f"{path}:{word.line}"
        if word.text.startswith("--"):
            option, equals, value = word.text.partition("=")
            takes = option in ("--config-path", "--config-name", "--config-dir") and not equals
            value = words.pop(0).text if takes and words else value
            if option == "--config-name" and not OWN_CONFIGS.fullmatch(value):
                why = "the settings of this file are not read"
                problems.append(Problem(option, value, why, "add its keys to the YAML by hand", where))
            continue
        key, _, value = word.text.lstrip("+").partition("=")
        if word.why:
            key = key if re.fullmatch(r"[A-Za-z_][\w.]*", key) else word.text
            meant = aliases.resolve(key, value, kind)
            if not isinstance(meant, aliases.Told) or meant.level == "error":
                problems.append(_unresolved(key, replace(word, text=value or word.text), path))
            continue
        quoted = QUOTED.fullmatch(value)  # quotes within a quoted text of the shell reach verl as letters
        found: list[Problem] = []
        text = f"{key}={quoted[2] if quoted else value}" if "=" in word.text and not word.text.startswith("~") else word.text
        entries |= {e.key: replace(e, where=where) for e in read_assignment(text, found)}
        problems += [replace(p, where=where, code=CONFIG_INVALID if p.code == USAGE else p.code) for p in found]
    return list(entries.values())


def _our_key(key: str, kind: str) -> str:
    meant = aliases.resolve(key, "", kind)
    return key if isinstance(meant, aliases.Told) else meant[0]


def _unresolved(key: str, word: Text, path: str) -> Problem:
    fix = "write the value into the YAML, or give what is missing: --var NAME=VALUE, and the script's arguments behind its name"
    return Problem(key, word.text, "; ".join(word.why), fix, f"{path}:{word.line}")


def _followed(entries: list[Entry]) -> list[Entry]:
    """OmegaConf's ${key} put in where the script itself sets that key to a text."""
    texts = {e.key: e.raw for e in entries if isinstance(e.raw, str) and "${" not in e.raw}

    def follow(raw):
        return type(raw)(REFERENCE.sub(lambda m: texts.get(m[1], m[0]), raw)) if isinstance(raw, str) else raw
    return [replace(e, raw=follow(e.raw)) for e in entries]


# --- what became of it ----------------------------------------------------------------------------------------------


def _sort(result: Conversion, entries: list[Entry]) -> None:
    """Every key as taken or without meaning; those that are refused are among the problems already."""
    settings = {row["key"]: row for row in resolved(result.loaded.settings, result.loaded.origins)}
    refused = {(p.key.partition(" ")[0], p.where) for p in result.loaded.problems if p.level == "error"}
    for entry in entries:
        meant = aliases.resolve(entry.key, entry.raw, result.kind)
        found = as_text(free_value(entry.raw))
        if entry.key.startswith(aliases.REWARD_FUNCTION) and result.kind == "grpo":
            meant = ("reward.function", entry.raw)
        if isinstance(meant, aliases.Told):
            if meant.level == "note":
                why = meant.why.removeprefix("accepted and without effect: ")
                result.no_meaning.append({"verl": entry.key, "found": found, "why": why, "where": entry.where})
        elif (leaf := leaf_of(meant[0], result.kind)) is not None and (entry.key, entry.where) not in refused:
            row = settings[leaf.key]
            value = row["value"] if meant[0] == leaf.key else found
            result.taken.append({"verl": entry.key, "key": meant[0], "value": value, "where": entry.where, "default": not row["changed"]})
    for key in DEFAULTS[result.kind]:
        row = settings[key]
        if row["origin"] == VERLS_DEFAULT and row["changed"]:
            result.added.append({"key": key, "value": row["value"], "default": leaf_of(key, result.kind).default})


def _judged(loaded: Loaded, command: Command, path: str, earlier: list[Problem]) -> list[Problem]:
    """The rules on this result, and on what the script exports; a machine and its files are not looked at."""
    settings, exported = loaded.settings, {name: v for name, v in command.environ.items() if not v.why}
    files = [*settings.data.train_files, *settings.data.val_files]
    facts = Facts(
        environ={name: v.text for name, v in exported.items()}, num_gpus=2**20, gpu_names=(), gpu_memory_mib=(),
        gpu_compute_capability=(), num_cpus=2**20, host_memory_gib=2.0**20, free_disk_gib=2.0**20, model_path=None, model_config=None,
        model_error="not looked at", has_tokenizer=True, model_weight_files=(),
        parquet={file: ParquetFacts(file, 0, {}, "not looked at") for file in files}, versions={},
    )
    told, found = {_our_key(p.key, loaded.kind) for p in earlier}, []
    for p in check(settings, loaded.origins, facts):
        if p.key in exported:
            p = replace(p, where=f"{path}:{exported[p.key].line}")
            why = f"{p.why}. The settings do not carry it; do not export it for mfsdp either"
            found.append(replace(p, why=why, level="warning") if p.level == "error" else p)
        elif p.code == CONFIG_INVALID and p.where != "environment" and p.key not in told and p.key not in OF_ONE_NODE:
            found.append(p)
    return found


def _remarks(loaded: Loaded, launches: list, path: str) -> list[Problem]:
    command, remarks = launches[0][0], []
    if command.doubt:
        remarks.append(Problem("launch", "", command.doubt, "it is taken as if it were run", f"{path}:{command.line}", level="warning"))
    for other, _ in launches[1:]:
        why = f"this is a further launch; the one in line {command.line} was taken"
        remarks.append(Problem("launch", _short(_shown(other)), why, "put it into a script of its own", f"{path}:{other.line}",
                               level="warning"))
    if loaded.origins.get("engine.use_megatron_fsdp") is None:
        why = "the script does not set it, and verl's default is False: it trains without Megatron-FSDP, which mfsdp always uses"
        remarks.append(Problem("engine.use_megatron_fsdp", "True", why, "", path, level="note"))
    if loaded.settings.trainer.nnodes > 1:
        why = "the place of a node is given when it is started, not in the settings"
        fix = "--node-rank and --rdzv-endpoint on every node" if loaded.kind == "sft" else "--ray-address"
        remarks.append(Problem("trainer.nnodes", str(loaded.settings.trainer.nnodes), why, fix, path, level="note"))
    return remarks


def _worth_naming(command: Command) -> bool:
    return command.words[0].text not in QUIET


def _shown(command: Command) -> str:
    return _short(" ".join(word.text for word in command.words))


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 100 else flat[:99] + "…"
