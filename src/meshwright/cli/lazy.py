"""Groups of commands that are imported when they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

INTERRUPTED = 130  # as the shell has it


class LazyGroup(TyperGroup):
    """Its help needs the first lines of its commands, and nothing that they import."""

    listed: ClassVar[Mapping[str, str]]  # name to the first line of its help

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {name: TyperCommand(name, help=line) for name, line in self.listed.items()}

    def get_help_option(self, ctx: Any) -> Any:
        """``--help`` as a flag that is off when not given: what else it may be takes typer a tenth of a second."""
        found = super().get_help_option(ctx)
        if found is not None:
            found.default = False
        return found

    def load(self, name: str) -> typer.Typer:
        """The command."""
        raise NotImplementedError

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a Ctrl-C that it does not handle itself is a line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that is run, with its own name and options."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = get_command(self.load(name))
            command.name = name
        return name, command, rest
