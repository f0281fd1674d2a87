"""A Typer that makes a command when it is called: to make all of them took 40 ms, at every start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mfsdp_cli.options import STYLE


class LazyTyper(typer.Typer):
    """Used as a typer.Typer with a callback is; commands and groups are added under names."""

    def __init__(self, **settings) -> None:
        self.parts: dict[str, typer.Typer] = {}  # each of one command, or a group
        self.texts: dict[str, str] = {}  # their help
        super().__init__(cls=type("LazyGroup", (_LazyGroup,), {"app": self}), **settings)

    def command(self, name: str, **settings) -> Callable[[Callable], Callable]:
        def add(function: Callable) -> Callable:
            self.parts[name] = part = typer.Typer(add_completion=False, **STYLE)
            self.texts[name] = function.__doc__
            return part.command(name, **settings)(function)

        return add

    def add_typer(self, part: typer.Typer, *, name: str) -> None:
        self.parts[name] = part
        self.texts[name] = part.info.help


class _LazyGroup(TyperGroup):
    """What typer makes of a LazyTyper."""

    app: LazyTyper

    def __init__(self, **attributes) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(self.app.parts)

    def format_commands(self, ctx, formatter) -> None:
        """The list in --help, as of a group whose commands have no options."""
        plain = TyperGroup(commands={name: TyperCommand(name, help=text) for name, text in self.app.texts.items()})
        plain.format_commands(ctx, formatter)


class _Commands(Mapping):
    """Name -> command, made when it is looked up for the first time."""

    def __init__(self, parts: dict[str, typer.Typer]) -> None:
        self.parts = parts
        self.made = {}

    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        if name not in self.made:
            self.made[name] = get_command(self.parts[name])
            self.made[name].name = name
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
