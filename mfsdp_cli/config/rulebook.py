"""The rule book: every rule that a run must keep, with a name, a source, and the function that judges it.

A rule is a small function that yields problems, registered where it is written:

    @rule("tp-divides-model", "TP divides the heads …", "megatron-core …", fix="a TP that divides them")
    def tensor_parallel(settings, facts): yield Problem(…)

Names, not numbers: a name says in a message what is wrong, and survives rules that come and go. `mfsdp rules` prints the book
from this registry, so it cannot be out of date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mfsdp_cli.config.values import SETTINGS, kind_of, leaf_of, nearest, validates_only
from mfsdp_cli.errors import USAGE, MfsdpError, Problem
from mfsdp_cli.records import Record

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings

LEVELS = ("error", "warning", "note")
READS = ("footers", "columns", "launch")
OWN = "mfsdp: no library asks for it"
KNOWN_GOOD = {"torch": "2.11.0", "megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "transformers": "5.12.1"}


class Rule(Record):
    """id        kebab-case, unique
    demand    one line: what must hold
    source    where the demand comes from: a library's file, a paper, a public issue, or this program's own reason
    fix       how to satisfy it
    level     the gravest level of its problems
    kinds     kinds of run that it is for
    training  whether it is about training, and so not asked of a run that only validates
    reads     what it looks at: footers (settings, config.json, parquet footers, environment, nvidia-smi), columns of the data too, or
              what `launch` found out
    seen_in   package whose known-good version has the fault; with a newer one an error is told as a warning
    judge     (settings, facts, and what else it reads) -> problems
    """

    id: str
    demand: str
    source: str
    fix: str
    level: str
    kinds: tuple[str, ...]
    training: bool
    reads: str
    seen_in: str | None
    judge: Callable[..., Iterator[Problem]]

    @property
    def explanation(self) -> str:
        return inspect.getdoc(self.judge) or ""

    def to_dict(self) -> dict:
        return {"id": self.id, "level": self.level, "demand": self.demand, "source": self.source, "fix": self.fix,
                "kinds": list(self.kinds), "reads": self.reads, "explanation": self.explanation}


_BOOK: dict[str, Rule] = {}


def rule(id: str, demand: str, source: str, *, fix: str, level: str = "error", kinds: tuple[str, ...] = tuple(SETTINGS),
         training: bool = False, reads: str = "footers", seen_in: str | None = None):
    """Register the function below as a rule. It stays a plain function."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", id) and id not in _BOOK, id
    assert level in LEVELS and reads in READS and set(kinds) <= set(SETTINGS) and (seen_in is None or seen_in in KNOWN_GOOD), id

    def register(judge):
        _BOOK[id] = Rule(id, demand, source, fix, level, kinds, training, reads, seen_in, judge)
        return judge
    return register


def book() -> list[Rule]:
    """All rules, those of one subject together."""
    from mfsdp_cli.config import rules

    subjects = [module.__name__ for module in rules.SUBJECTS]
    return sorted(_BOOK.values(), key=lambda r: subjects.index(r.judge.__module__))


def find(id: str) -> Rule:
    """Raises MfsdpError for a rule that does not exist."""
    found = {r.id: r for r in book()}
    if id not in found:
        near = nearest(id, list(found))
        raise MfsdpError(Problem("ID", id, "there is no such rule", f"did you mean {near}?" if near else "mfsdp rules lists them",
                                 "command line", USAGE))
    return found[id]


def judge(reads: str, settings: SftSettings | GrpoSettings, origins: dict[str, str], facts, *more) -> list[Problem]:
    """Problems of every rule that reads this and is for this kind of run, each with its rule and the origin of its value."""
    kind, told = kind_of(settings), []
    for r in book():
        if r.reads == reads and kind in r.kinds and not (r.training and validates_only(settings)):
            for problem in r.judge(settings, facts, *more):
                problem = _gated(problem, r.seen_in, facts.versions)
                told.append(replace(problem, rule=r.id, where=problem.where or _origin(problem.key, origins, kind)))
    return told


def numbers_of(version: str) -> tuple[int, ...]:
    """(5, 12, 1) of "5.12.1+cu130"."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def _gated(problem: Problem, package: str | None, versions: dict[str, str | None]) -> Problem:
    installed = versions.get(package) if package else None
    if installed is None or problem.level != "error" or numbers_of(installed)[:2] <= numbers_of(KNOWN_GOOD[package])[:2]:
        return problem
    why = f"{problem.why} (so it is in {package} {KNOWN_GOOD[package]}; {installed} is installed, which may do it right)"
    return replace(problem, why=why, level="warning")


def _origin(key: str, origins: dict[str, str], kind: str) -> str:
    if key in origins:
        return origins[key]
    inside = [where for k, where in origins.items() if k.startswith(key + ".")]
    return inside[0] if inside else "default" if leaf_of(key, kind) is not None else ""


# --- for people -----------------------------------------------------------------------------------------------------


def table(rules: Iterable[Rule]) -> list[str]:
    """Two lines a rule: level, id and demand; below it the source."""
    rules = list(rules)
    width = max((len(r.id) for r in rules), default=0)
    return [line for r in rules for line in (f"{r.level:<7}  {r.id:<{width}}  {r.demand}", f"{'':<{width + 11}}{r.source}")]


def explain(r: Rule) -> list[str]:
    rows = [("rule", r.id), ("level", r.level), ("of", " and ".join(f"mfsdp {kind}" for kind in r.kinds)), ("demands", r.demand),
            ("to keep it", r.fix), ("source", r.source), ("reads", READS_WORDS[r.reads])]
    if r.seen_in:
        rows.append(("versions", f"an error with {r.seen_in} up to {KNOWN_GOOD[r.seen_in]}, a warning with a newer one"))
    lines = [f"{name:<11} {text}" for name, text in rows]
    return [*lines, "", *r.explanation.splitlines()] if r.explanation else lines


READS_WORDS = {"footers": "settings, config.json, footers of parquet files, environment, nvidia-smi",
               "columns": "the columns data_source and reward_model.ground_truth of the data files",
               "launch": "the run folder, predictions from the plan, a call of the user's own function"}
