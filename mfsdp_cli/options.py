"""Options that several commands share, and what the shell completes for them."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

# plain help and no pretty traceback: rich would double the time of --help, and traceback boxes would show locals in logs
STYLE = dict(rich_markup_mode=None, pretty_exceptions_enable=False,
             context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})


def complete_preset(incomplete: str) -> list[str]:
    from mfsdp_cli.config.load import preset_files

    return [name for name in preset_files() if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    from mfsdp_cli.config.values import leaves

    return [f"{key}=" for key in leaves() if key.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, also on failure")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Leave out progress and remarks; errors stay")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every step")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colour on stderr, as with NO_COLOR=1")]
Preset = Annotated[Optional[str], typer.Option(
    "--preset", metavar="NAME", autocompletion=complete_preset,
    help="Shipped settings to start from (mfsdp config presets lists them), or a file")]
Config = Annotated[Optional[str], typer.Option("--config", metavar="FILE", help="YAML file of settings; lies over the preset")]
Assignments = Annotated[Optional[list[str]], typer.Argument(
    metavar="[KEY=VALUE]...", help="Settings, as optim.lr=2e-5; lie over preset and file", autocompletion=complete_key)]
CheckpointPath = Annotated[str, typer.Argument(metavar="PATH", help="Run folder, checkpoints folder or one checkpoint")]
