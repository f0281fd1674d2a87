"""Rules whose evidence `launch` gathers, since it takes more than settings and facts: predictions, the run folder, a call of the
user's own function. It hands over the problems that it found; here they have their names and sources. See `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from mfsdp_cli.config.rulebook import OWN, rule
from mfsdp_cli.errors import Problem

Evidence = dict[str, list[Problem]]


@rule("memory-fits", "what a run is predicted to need fits the memory of a GPU",
      "megatron-core 0.19.2 distributed/fsdp/src/megatron_fsdp, buffer by buffer; compared with measured peaks", reads="launch",
      training=True, fix="mfsdp sft … --suggest lists layouts that fit")
def memory_fits(s, f, evidence: Evidence) -> Iterator[Problem]:
    """A warning near the limit, an error far above it. The dry run shows the parts and what is assumed."""
    yield from evidence.get("memory", [])


@rule("disk-fits", "the checkpoints to come fit the free disk", "weights, master weights and two moments, by element; see the dry run",
      reads="launch", training=True, fix="fewer trainer.max_ckpt_to_keep, or another --output")
def disk_fits(s, f, evidence: Evidence) -> Iterator[Problem]:
    yield from evidence.get("disk", [])


@rule("run-folder", "a run folder is free, new, or goes on with what made its checkpoints", OWN, reads="launch",
      fix="the settings of its first start, or another --output")
def run_folder(s, f, evidence: Evidence) -> Iterator[Problem]:
    """One launcher at a time works in it. A folder with checkpoints is continued from the last complete one; settings that decide which
    rows and weights that means must be the same, or the rest would be another run."""
    yield from evidence.get("folder", [])


@rule("reward-function", "a scoring function of the user's own can be imported and called on a row of the data", "verl issues 3374, 3150",
      kinds=("grpo",), reads="launch", fix="def FUNCTION(data_source, solution_str, ground_truth, extra_info=None, **kwargs)")
def reward_function(s, f, evidence: Evidence) -> Iterator[Problem]:
    """In a child process with a deadline, since it may import anything or hang."""
    yield from evidence.get("function", [])
