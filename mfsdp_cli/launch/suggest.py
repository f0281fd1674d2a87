"""`--suggest`: layouts of this model and data that fit the GPUs and keep every rule, fastest first. Starts nothing.

Searched: TP x EP x DP over all GPUs, recomputation, and the size of micro batches, which is doubled from the smallest that
holds the longest sequence. PP, CP and ETP are 1, as the rules demand; everything else stays as the settings have it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from mfsdp_cli.config.load import load
from mfsdp_cli.config.parameters import active_parameters, model_shape, num_parameters
from mfsdp_cli.config.rules import check
from mfsdp_cli.config.rules_model import shape_of
from mfsdp_cli.config.rules_parallel import workable_tp, world_size
from mfsdp_cli.config.rules_rollout import sampler_gpus
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.errors import MACHINE_UNFIT, OK, USAGE, MfsdpError, Problem, exit_code_of
from mfsdp_cli.launch.facts import Facts, gather
from mfsdp_cli.launch.fit import GIB, Memory, predict_memory, read, with_values
from mfsdp_cli.launch.folder import run_folder
from mfsdp_cli.launch.plan import Plan, by_tokens, longest_sequence, make_plan, micro_batch_key, rows_of_update

# A micro batch takes a x (tokens x parameters + this): 1.5B on one H200 did 42,574 tokens/s with 16,384 tokens and 49,072 with 32,768
# (docs/performance.md, earlier code); the speeds of 0.5B and 3B then follow within 9 %.
FIXED_WORK = 9.1e12
RECOMPUTATION = {"none": 1.0, "full": 4 / 3}  # time: a second forward pass beside one forward and a backward pass of two
MOST_TOKENS = 65536
ROOM = 0.95  # of a GPU, since a prediction may be too low
SHOWN = 12
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|G|MiB|MB|M)?\s*", re.IGNORECASE)
UNITS = {"gib": 2**30, "gb": 10**9, "g": 2**30, "mib": 2**20, "mb": 10**6, "m": 2**20}
UNSPLIT = tuple(f"engine.{name}_parallel_size" for name in ("pipeline_model", "context", "expert_tensor"))
TP, EP = "engine.tensor_model_parallel_size", "engine.expert_model_parallel_size"
NPROC, RECOMPUTE = "trainer.n_gpus_per_node", "engine.recompute"


@dataclass(frozen=True)
class Suggestion:
    """values: settings by dotted key that make the layout. speed: expected, as `relative_speed`."""

    values: dict[str, object]
    plan: Plan
    memory: Memory
    speed: float

    @property
    def arguments(self) -> list[str]:
        named = [word for key, flag in ((NPROC, "--nproc"), (TP, "--tp"), (EP, "--ep")) for word in (flag, str(self.values[key]))]
        return named + [f"{key}={value}" for key, value in self.values.items() if key not in (NPROC, TP, EP)]

    @property
    def order(self) -> tuple:
        """Fewest TP ranks first, since they wait for each other in every matrix; then by expected speed; then fewest EP ranks."""
        return self.values[TP], -self.speed, self.values[EP]

    def to_dict(self) -> dict:
        p = self.plan
        return {"tp": p.tp, "ep": p.ep, "dp": p.dp, "expert_dp": p.expert_dp, "recompute": self.values[RECOMPUTE],
                "micro_batch_tokens": self.memory.tokens, "settings": dict(self.values), "arguments": self.arguments,
                "relative_speed": self.speed, "memory": self.memory.to_dict()}


@dataclass(frozen=True)
class Suggestions:
    """now: the layout of the settings as they are. layouts: best first. problems: why there are none; as warnings, what is to be
    mended whatever the layout."""

    gpus: int
    nnodes: int
    gpu_bytes: int
    num_parameters: int
    now: Suggestion
    layouts: tuple[Suggestion, ...]
    problems: list[Problem]

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.problems)

    def to_dict(self) -> dict:
        return {
            "ok": self.exit_code == OK, "exit_code": self.exit_code, "problems": [p.to_dict() for p in self.problems],
            "gpus_per_node": self.gpus, "nnodes": self.nnodes, "gpu_bytes": self.gpu_bytes, "num_parameters": self.num_parameters,
            "now": self.now.to_dict(), "layouts": [layout.to_dict() for layout in self.layouts],
        }


def relative_speed(tokens: int, parameters: float, recompute: str) -> float:
    """Tokens a second, as a share of those with endless micro batches and no recomputation.

    parameters  of this rank, that one token meets
    """
    return 1 / (1 + FIXED_WORK / max(1, tokens * parameters)) / RECOMPUTATION[recompute]


def suggest(kind: str, *, preset: str | None, config: str | None, assignments: list[str], flags: Mapping[str, object],
            gpus: int | None, gpu_memory: str | None, environ: Mapping[str, str]) -> Suggestions:
    """Load the settings, look at the machine, and search. Raises MfsdpError when there is no model or no GPU to plan for.

    gpus, gpu_memory  GPUs of each node and their size, to plan for another machine; None: as they are here
    """
    loaded = load(kind, preset=preset, config=config, assignments=assignments, flags=flags, environ=environ)
    facts = gather(loaded.settings, environ, run_folder(loaded.settings))
    found = search(loaded.settings, loaded.origins, other_machine(facts, gpus, gpu_memory))
    elsewhere = gpus is not None or gpu_memory is not None  # what this machine lacks is of no interest then
    told = [p for p in found.problems if p.level == "error" or not (elsewhere and p.code == MACHINE_UNFIT)]
    return replace(found, problems=[p for p in loaded.problems if p.level == "error"] + told)


def other_machine(facts: Facts, gpus: int | None, gpu_memory: str | None) -> Facts:
    """The facts with these GPUs in place of those that are here. Raises MfsdpError when size or number stays unknown."""
    known = [mib for mib in facts.gpu_memory_mib if mib > 0]
    count = facts.num_gpus if gpus is None else gpus
    if count < 1 or (gpu_memory is None and not known):
        lacks = "no GPU" if facts.num_gpus == 0 else "a GPU of unknown size"
        raise MfsdpError(Problem("--suggest", "", f"nvidia-smi shows {lacks} here", "--gpus 8 --gpu-memory 80GiB plans for another machine",
                                 code=MACHINE_UNFIT))
    mib = min(known) if gpu_memory is None else size_bytes(gpu_memory) // 2**20
    name = facts.gpu_names[0] if facts.gpu_names and gpu_memory is None else "planned GPU"
    capability = facts.gpu_compute_capability[0] if facts.gpu_compute_capability else 9.0
    return replace(facts, num_gpus=count, gpu_names=(name,) * count, gpu_memory_mib=(mib,) * count,
                   gpu_compute_capability=(capability,) * count)


def size_bytes(text: str) -> int:
    """80GiB, 80G or 80: GiB; 80GB: 10^9 bytes; likewise MiB and MB. Raises MfsdpError for anything else."""
    match = SIZE.fullmatch(text)
    size = float(match[1]) * UNITS[(match[2] or "GiB").lower()] if match else 0
    if not 2**30 <= size <= 2**50:
        raise MfsdpError(Problem("--gpu-memory", text, "expected the memory of one GPU", "for example 80GiB, or 81559MiB", code=USAGE))
    return int(size)


def search(settings: SftSettings | GrpoSettings, origins: dict[str, str], facts: Facts) -> Suggestions:
    """Every layout that fits the GPUs of `facts` and that `config.rules` lets pass. An error that all layouts share is none of
    theirs: it is told as a warning."""
    shape = model_shape(facts.model_config)
    if settings.engine.device == "cpu":
        raise MfsdpError(Problem("engine.device", "cpu", "layouts are suggested for GPUs", "engine.device=auto",
                                 origins.get("engine.device", "default")))
    if shape is None:
        why = facts.model_error or "its config.json is not here, or does not tell the model's shape"
        raise MfsdpError(Problem("model.path", str(settings.model.path), why, "--model, with a folder or a model in the local cache",
                                 origins.get("model.path", "default")))
    tried = list(candidates(settings, facts))
    layouts, shared, refused = sift([s for s in tried if s.memory.total_bytes <= ROOM * s.memory.gpu_bytes],
                                    lambda s: check(with_values(settings, s.values), origins, facts))
    problems = [replace(p, level="warning") for p in shared]
    if not layouts:
        problems.append(_nothing_fits(facts, min(tried, key=lambda s: s.memory.total_bytes, default=None), refused))
    now = layout_with(settings, {key: read(settings, key) for key in (NPROC, TP, EP, RECOMPUTE, micro_batch_key(settings))}, facts)
    return Suggestions(facts.num_gpus, settings.trainer.nnodes, facts.gpu_memory_mib[0] * 2**20, num_parameters(shape), now,
                       tuple(layouts[:SHOWN]), problems)


def sift(fitting: list[Suggestion], judge: Callable[[Suggestion], list[Problem]]) -> tuple[list[Suggestion], list[Problem], list[Problem]]:
    """The layouts that rules let pass, best first; the errors that all share; and the others, for which layouts were left out.

    Of layouts that differ in the size of micro batches alone, the largest that passes; with recomputation only if it is larger still.
    """
    def errors(layout: Suggestion) -> dict[tuple, Problem]:
        return {(p.key, p.found, p.why): p for p in judge(layout) if p.level == "error"}

    alike: dict[tuple, list[Suggestion]] = {}
    for layout in sorted(fitting, key=lambda s: -s.memory.tokens):
        alike.setdefault((layout.values[TP], layout.values[EP], layout.values[RECOMPUTE]), []).append(layout)
    ends = [errors(layout) for group in alike.values() for layout in {id(s): s for s in (group[0], group[-1])}.values()]
    searched = {key for layout in fitting for key in layout.values}
    shared = {name: p for name, p in (ends[0] if ends else {}).items() if name[0] not in searched and all(name in e for e in ends)}
    best, refused = {}, {}
    for key, group in alike.items():
        for layout in group:
            others = {name: p for name, p in errors(layout).items() if name not in shared}
            if not others:
                best[key] = layout
                break
            refused |= others
    without = {(tp, ep): layout.memory.tokens for (tp, ep, recompute), layout in best.items() if recompute == "none"}
    useful = [layout for (tp, ep, recompute), layout in best.items()
              if recompute == "none" or layout.memory.tokens > without.get((tp, ep), 0)]
    return sorted(useful, key=lambda layout: layout.order), list(shared.values()), list(refused.values())


def layout_with(settings: SftSettings | GrpoSettings, values: dict[str, object], facts: Facts) -> Suggestion:
    changed = with_values(settings, values)
    plan = make_plan(changed, facts)
    met = active_parameters(model_shape(facts.model_config)) / plan.tp
    speed = relative_speed(plan.micro_batch_tokens, met, changed.engine.recompute)
    return Suggestion(values, plan, predict_memory(changed, plan, facts), speed)


def candidates(settings: SftSettings | GrpoSettings, facts: Facts) -> Iterator[Suggestion]:
    """Every combination that is searched, with its memory."""
    ranks = trainer_gpus(settings, facts.num_gpus)
    unsplit = {key: 1 for key in UNSPLIT if read(settings, key) != 1}
    base = with_values(settings, {NPROC: ranks} | unsplit)
    experts, world = model_shape(facts.model_config).experts, world_size(base)
    sizes = [ep for ep in range(1, min(experts, world) + 1) if world % ep == 0 and experts % ep == 0] or [1]
    for tp in workable_tp(base, shape_of(facts.model_config)):
        if tp > ranks:
            continue  # tensor-parallel ranks talk in every layer: not across nodes
        for ep, recompute, size in product(sizes, RECOMPUTATION, micro_batch_sizes(settings, world // tp)):
            values = {NPROC: ranks, TP: tp, EP: ep, RECOMPUTE: recompute, micro_batch_key(settings): size}
            yield layout_with(settings, values | unsplit, facts)


def trainer_gpus(settings: SftSettings | GrpoSettings, gpus: int) -> int:
    """Ranks of a node: all GPUs, or as many as samplers on GPUs of their own leave."""
    for ranks in range(gpus, 1, -1):
        if ranks + sampler_gpus(with_values(settings, {NPROC: ranks})) <= gpus:
            return ranks
    return 1


def micro_batch_sizes(settings: SftSettings | GrpoSettings, dp: int) -> list[int]:
    """Token budgets, or numbers of rows, by doubling; none beyond what a rank has to work on in one update."""
    rows, longest = max(1, math.ceil(rows_of_update(settings) / dp)), longest_sequence(settings)
    smallest, share = (longest, rows * longest) if by_tokens(settings) else (1, rows)
    most = max(smallest, min(share, MOST_TOKENS if by_tokens(settings) else MOST_TOKENS // longest))
    return [smallest * 2**k for k in range(int(math.log2(most / smallest)) + 1)]


def _nothing_fits(facts: Facts, smallest: Suggestion | None, errors: list[Problem]) -> Problem:
    gpus = f"{facts.num_gpus} x {facts.gpu_memory_mib[0] / 1024:.1f} GiB"
    if errors:
        reasons = list(dict.fromkeys(p.why for p in errors))[:3]
        return Problem("--suggest", gpus, "what fits breaks rules: " + "; ".join(reasons), errors[0].fix, code=MACHINE_UNFIT)
    if smallest is None:
        return Problem("--suggest", gpus, "the model cannot be split over these GPUs", "another number of GPUs", code=MACHINE_UNFIT)
    why = f"the least that any layout needs is {smallest.memory.total_bytes / GIB:.1f} GiB a GPU: {' '.join(smallest.arguments)}"
    fix = "more GPUs (--gpus) or nodes (--nnodes), shorter sequences, or a smaller model"
    return Problem("--suggest", gpus, why, fix, code=MACHINE_UNFIT)


def suggestion_text(found: Suggestions) -> str:
    """A table for people."""
    nodes = f"{found.nnodes} nodes of " if found.nnodes > 1 else ""
    head = f"layouts of {found.num_parameters / 1e9:.2f} billion parameters on {nodes}{found.gpus} GPUs of {found.gpu_bytes / GIB:.1f} GiB"
    if not found.layouts:
        return f"{head}: none"
    rows = [("TP", "EP", "DP", "recompute", "tokens", "GiB", "of GPU", "arguments")]
    for s in (*found.layouts, found.now):
        arguments = "(the settings as they are)" if s is found.now else " ".join(s.arguments)
        rows.append((str(s.plan.tp), str(s.plan.ep), str(s.plan.dp), s.values[RECOMPUTE], f"{s.memory.tokens:,}",
                     f"{s.memory.total_bytes / GIB:.1f}", f"{100 * s.memory.total_bytes / found.gpu_bytes:.0f} %", arguments))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["  " + "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows]
    assumed = [f"  assumed: {text}" for text in found.layouts[0].memory.assumptions[1:]]
    return "\n".join([f"{head}, the fastest expected first:", "", *lines[:-1], "", lines[-1], "", *assumed])
