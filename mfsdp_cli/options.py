"""Options that several commands share, and what the shell completes for them."""

from __future__ import annotations

from typing import Annotated, Literal, Optional

import typer

# plain help and no pretty traceback: rich would double the time of --help, and traceback boxes would show locals in logs
STYLE = dict(rich_markup_mode=None, pretty_exceptions_enable=False,
             context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})


def complete_preset(ctx: typer.Context, incomplete: str) -> list[str]:
    from mfsdp_cli.config.sources import kind_of_preset, preset_files

    return [name for name in preset_files() if name.startswith(incomplete) and kind_of_preset(name) in _kinds(ctx)]


def complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys; and once there is only one, its values, so that the shell puts no space after the = sign.

    zsh and fish hand over KEY=VALUE as one word; bash cuts it at the = sign, and replaces only what stands behind.
    """
    from mfsdp_cli.config.values import leaves

    settings = {key: leaf for kind in _kinds(ctx) for key, leaf in leaves(kind).items()}
    words = [word for word in getattr(ctx, "params", {}).get("settings") or [] if word != "="]
    if words and words[-1] in settings:  # without its =, so it is a key that bash has cut off
        return _values(settings[words[-1]], incomplete.removeprefix("="))
    key, equals, value = incomplete.partition("=")
    keys = [key] if equals else [k for k in settings if k.startswith(incomplete)]
    if len(keys) == 1 and keys[0] in settings:
        return [f"{keys[0]}={text}" for text in _values(settings[keys[0]], value)] or [f"{keys[0]}="]
    return [f"{k}=" for k in keys] if not equals else []


def _values(leaf, incomplete: str) -> list[str]:
    """Choices of a setting, or its default: something to start from."""
    if leaf.kind.startswith(("list", "dict")):
        return []
    default = [] if leaf.default is None else [leaf.default]
    choices = leaf.choices or ((True, False) if leaf.kind == "bool" else default)
    return [text for text in map(str, choices) if text.startswith(incomplete)]


def complete_rule(incomplete: str) -> list[str]:
    from mfsdp_cli.config.rulebook import book

    return [rule.id for rule in book() if rule.id.startswith(incomplete)]


def _kinds(ctx: typer.Context) -> list[str]:
    """What the command is about: its own kind of run, or all."""
    from mfsdp_cli.config.values import SETTINGS

    return [ctx.info_name] if ctx.info_name in SETTINGS else list(SETTINGS)


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
Kind = Annotated[Optional[Literal["sft", "grpo"]], typer.Option("--kind", help="Kind of run that the settings are for")]
CheckpointPath = Annotated[str, typer.Argument(metavar="PATH", help="Run folder, checkpoints folder or one checkpoint")]
