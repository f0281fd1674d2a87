"""Every rule that a run must keep, as small functions (settings, facts) -> problems. Nothing is started, nothing imported.

Megatron-LM's and Bridge's own asserts sit in validators that a program which builds its model through a provider never
passes, so they are restated here. By subject: `rules_settings`, what every kind of run has; `rules_sft`, `rules_grpo`,
`rules_rollout`, those of one kind; `rules_model`, the architecture; `rules_parallel`, how it is split; `rules_override`,
engine.override_transformer_config; `rules_machine`, GPUs, packages, environment; `rules_files`, model folder and data files;
`rules_columns`, what is in two columns of the data; `rules_launch`, what the launcher finds out. `rulebook` has the registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mfsdp_cli.config import (
    rules_columns, rules_files, rules_grpo, rules_launch, rules_machine, rules_model, rules_override, rules_parallel, rules_rollout,
    rules_settings, rules_sft,
)
from mfsdp_cli.config.rulebook import judge
from mfsdp_cli.errors import Problem

if TYPE_CHECKING:
    from mfsdp_cli.config.schema import SftSettings
    from mfsdp_cli.config.schema_grpo import GrpoSettings
    from mfsdp_cli.launch.facts import Facts

SUBJECTS = (rules_settings, rules_sft, rules_grpo, rules_rollout, rules_model, rules_parallel, rules_override, rules_machine, rules_files,
            rules_columns, rules_launch)


def check(settings: SftSettings | GrpoSettings, origins: dict[str, str], facts: Facts) -> list[Problem]:
    """All problems of these settings on this machine, with the origin of each value."""
    return judge("footers", settings, origins, facts)
